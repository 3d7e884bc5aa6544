"""Sizes and values that the inputs of an ONNX file take."""
