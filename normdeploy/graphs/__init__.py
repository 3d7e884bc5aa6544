"""ONNX graphs as the rest sees them: nodes, tensors, dims, bodies and functions; nothing here knows what a norm is."""
