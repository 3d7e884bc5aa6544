"""Benchmark models, ONNX files and engines against each other, or the forms of each norm."""
