"""Export torch to ONNX: the exporter, its fixes, and translations of operators."""
