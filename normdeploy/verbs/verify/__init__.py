"""Run files in each runtime, and compare their outputs, and PyTorch's outputs, with the model in float64."""
