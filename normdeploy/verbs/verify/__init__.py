"""Run files in each runtime, compare their outputs and PyTorch's with float64, and judge the differences."""
