"""Quantized files of normdeploy and of other tools, judged with samples that calibrated none of them: see
``__main__``.
"""
