"""Float64 reference of certificates: ONNX ops in numpy, each by its specification."""
