"""Build engines from ONNX files in a separate process, and choose the form of each norm."""
