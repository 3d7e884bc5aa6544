"""ONNX files to engines."""
