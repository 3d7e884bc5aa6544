"""Quantized files of normdeploy and of others, judged by samples that calibrated none of them: see ``__main__``."""
