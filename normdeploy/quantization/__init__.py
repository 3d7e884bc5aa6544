"""Linear layers in integers or in FP8, as QuantizeLinear and DequantizeLinear of standard ONNX."""
