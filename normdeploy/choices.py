"""What the options of the verbs may be, and the families that ask alike."""

from __future__ import annotations

OPSETS = range(18, 26)  # torch takes others without a word and writes something else
FUSES = ("standard", "portable")
PROVIDERS = ("cpu", "cuda")

ANY, USUAL, ACCURATE = "any", "onnxruntime", "onnxruntime-accurate"
CUDA = "onnxruntime-cuda"  # what ``--runtime onnxruntime --provider cuda`` stands for
ONNXRUNTIME = (USUAL, ACCURATE, CUDA)
TENSORRT = ("tensorrt", "tensorrt-rtx")  # their files need not run in onnxruntime
RUNTIMES = (ANY, USUAL, ACCURATE, *TENSORRT)
