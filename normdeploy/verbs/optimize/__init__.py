"""Optimize ONNX files from any exporter: fuse or fold their norms and clean up the rest."""
