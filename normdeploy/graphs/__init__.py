"""ONNX graphs for the rest of the package: nodes, tensors, dims, bodies and functions. Nothing here knows about norms."""
