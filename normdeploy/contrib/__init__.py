"""Rewrite norms in other tools' ops (onnxruntime's contrib ops, TensorRT's old plugins) as standard ops."""
