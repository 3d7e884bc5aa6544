"""What the options of the verbs may be."""

from __future__ import annotations

OPSETS = range(18, 26)  # torch takes others without a word and writes something else
RUNTIMES = ("any", "onnxruntime", "onnxruntime-accurate", "tensorrt", "tensorrt-rtx")
FUSES = ("standard", "portable")
PROVIDERS = ("cpu", "cuda")
