"""Set the switches of transformers models so that torch can trace them: no caches, experts and attention that export.

A model is known by its parts alone: a ``config`` with ``use_cache``, or methods such as ``set_experts_implementation``.
So a live module is treated like the model of a folder, also inside of a module of the user.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from .torch_state import silence_logger

# Multiplies each token by its experts' weights. The default sorts the tokens and calls an operator that ONNX lacks.
_EXPERTS = "batched_mm"


def set_traceable_switches(module: nn.Module) -> None:
    """Switch off caches, and choose forms of experts and attention that export; ``module`` is changed in place.

    The results stay the same up to rounding, except that caches are no longer returned.
    """
    omit_caches(module)
    with silence_logger("transformers"):
        for part in module.modules():
            _choose_experts(part)
            _choose_attention(part)


def omit_caches(module: nn.Module) -> None:
    """Let the decoders inside of ``module`` return no cache unless a call asks for it."""
    for part in module.modules():
        # A decoder inside of a model may have its own config.
        config: Any = getattr(part, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _choose_experts(part: nn.Module) -> None:
    choose = getattr(part, "set_experts_implementation", None)
    if callable(choose):
        # A version without this form, or a kernel that was chosen for good when the model was loaded, keeps its own.
        with contextlib.suppress(ValueError, RuntimeError):
            choose(_EXPERTS)


def _choose_attention(part: nn.Module) -> None:
    choose = getattr(part, "set_attn_implementation", None)
    if callable(choose) and _has_attention_bias(getattr(part, "config", None)):
        choose("eager")


def _has_attention_bias(config: Any) -> bool:
    """Return whether the attention adds a bias to the scores (T5, Swin).

    torch's exporter can't decompose its fused attention with a mask of numbers for a dynamic batch ("Cannot view a
    tensor with shape ...").
    """
    model_type = str(getattr(config, "model_type", ""))
    return hasattr(config, "relative_attention_num_buckets") or model_type.startswith("swin")
