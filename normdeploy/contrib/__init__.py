"""Read norms in other tools' ops (onnxruntime's contrib ops, TensorRT's old plugins) back into standard ones."""
