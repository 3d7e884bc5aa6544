"""Race whole models in onnxruntime on the CPU; see ``__main__``."""
