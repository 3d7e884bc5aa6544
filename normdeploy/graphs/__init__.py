"""ONNX graphs for the rest of the package: nodes, tensors, dims, bodies and functions. No module here knows norms."""
