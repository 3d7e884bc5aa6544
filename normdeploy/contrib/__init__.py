"""Norms in the ops of other tools (onnxruntime's contrib ops, TensorRT's old plugins), read back into standard ones."""
