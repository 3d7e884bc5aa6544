"""Build engines from ONNX files."""
