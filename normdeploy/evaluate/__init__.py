"""Evaluate ONNX ops in float64 with numpy, each by its specification, as the reference of certificates."""
