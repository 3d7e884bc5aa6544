"""Quantize linear layers to integers or FP8, with QuantizeLinear and DequantizeLinear of standard ONNX."""
