"""Export PyTorch models to ONNX: one file, or all parts of an encoder-decoder."""
