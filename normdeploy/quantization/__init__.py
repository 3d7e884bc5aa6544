"""Quantize linear layers to integers or FP8, as QuantizeLinear and DequantizeLinear of standard ONNX."""
