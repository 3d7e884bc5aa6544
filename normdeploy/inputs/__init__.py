"""Sizes and values for the inputs of an ONNX file."""
