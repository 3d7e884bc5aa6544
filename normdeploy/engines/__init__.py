"""ONNX → engine: the build in a process of its own, and the form of each norm in it."""
