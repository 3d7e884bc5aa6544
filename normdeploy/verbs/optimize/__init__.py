"""ONNX files from anywhere, their norms fused or folded and the rest cleaned up."""
