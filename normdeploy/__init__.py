"""normdeploy: PyTorch models in onnxruntime and TensorRT with every normalization fused or folded, and proved."""
