"""Race models, ONNX files and engines against each other, and each norm in all its forms."""
