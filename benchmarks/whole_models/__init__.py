"""Whole models in onnxruntime on the CPU: plain export, peers and normdeploy's files in one race: see ``__main__``."""
