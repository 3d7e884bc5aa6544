"""Race whole models in onnxruntime on the CPU: plain export, peers and normdeploy's files: see ``__main__``."""
