"""Run ONNX files and engines once, or keep them open for many runs."""
