"""normdeploy_plugins: fused normalization kernels for TensorRT. None is written yet (see the project's issue C)."""
