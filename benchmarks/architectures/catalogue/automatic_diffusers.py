"""Make models of diffusers: constructors with small arguments, inputs by the names in forward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from .. import shrinking
from .automatic import Candidate, Refused, brief
from .building import Method

_ENCODED = ("x:float32[batch,3,32,32]", "x:float32[batch,3,5,32,32]", "x:float32[batch,3,1,32,32]")
_SOUNDS = ("x:float32[batch,2,2048]", "x:float32[batch,1,2048]", "x:float32[batch,64,64]")
# Arguments that set how many units another argument has, so that the constructor's default must stay.
_KEPT = ("axes_dims_rope", "axes_dim", "axes_dims", "rope_axes_dim")


def candidates(name: str) -> Iterator[Candidate | Refused]:
    """Yield small models of a class of diffusers with inputs to try."""
    import diffusers

    kind = getattr(diffusers, name, None)
    if kind is None:
        import diffusers.models

        kind = getattr(diffusers.models, name)
    for plan in shrinking.PLANS:
        try:
            module = shrinking.construct(_arguments(kind, plan), lambda settings, kind=kind: kind(**settings))
        except Exception as error:
            yield Refused(brief(error))
            continue
        for inputs in _inputs(module):
            if hasattr(module, "encode") and hasattr(module, "decode"):
                yield Candidate(Method(module, "encode"), inputs, {})
            else:
                yield Candidate(module, inputs, {})


def _arguments(kind: Any, plan: shrinking.Plan) -> dict[str, Any]:
    """Shrink the defaults of a constructor by the rules for configs."""
    parameters = inspect.signature(kind.__init__).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    small = {}
    for name, value in defaults.items():
        if name in _KEPT:
            continue
        changed = shrinking.shrink_value(name, value, plan)
        if changed != value:
            small[name] = changed
    if plan.widths and "attention_head_dim" in small and any(name in defaults for name in _KEPT):
        # Rotary axes divide the width of a head.
        name = next(name for name in _KEPT if name in defaults)
        axes = defaults[name]
        if isinstance(axes, list | tuple) and len(axes) == 3:
            small[name] = type(axes)((4, 6, 6))
        elif isinstance(axes, list | tuple) and len(axes) == 4:
            small[name] = type(axes)((4, 4, 4, 4))
    return small


def _inputs(module: Any) -> Iterator[tuple[str, ...]]:
    if hasattr(module, "encode") and hasattr(module, "decode"):
        yield from ((spec,) for spec in (*_ENCODED, *_SOUNDS))
        return
    parameters = inspect.signature(module.forward).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    # Most transformers declare these inputs as optional, but read them.
    usual = ("hidden_states", "sample", "encoder_hidden_states", "timestep", "pooled_projections", "img_ids", "txt_ids")
    names = list(dict.fromkeys((*needed, *(n for n in usual if n in parameters))))
    for wanted in dict.fromkeys((tuple(needed), tuple(names))):
        choices = [[f"{n}:{text}" for text in _choices(n, getattr(module, "config", {}))] for n in wanted]
        if wanted and all(choices):
            yield from itertools.islice(itertools.product(*choices), 8)


def _choices(name: str, config: Any) -> list[str]:
    """Return dtypes and shapes to try for an input of this name; [] if the name is unknown."""
    channels = _first_int(config, ("in_channels", "latent_channels", "in_dim", "input_channels"), 4)
    width = _first_int(
        config,
        (
            *("cross_attention_dim", "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim"),
            *("encoder_hid_dim", "caption_dim", "cap_feat_dim", "caption_projection_dim", "context_in_dim"),
        ),
        shrinking.WIDTH,
    )
    pooled = _first_int(config, ("pooled_projection_dim",), shrinking.WIDTH)
    latents = [f"float32[batch,{channels},8,8]", f"float32[batch,16,{channels}]", f"float32[batch,{channels},2,8,8]"]
    if name in ("hidden_states", "sample", "x", "image_latents"):
        return [*latents, f"float32[batch,2,{channels},8,8]", f"float32[batch,{channels},16]"]
    texts = ("encoder_hidden_states", "prompt_embeds", "encoder_hidden_states_t5", "context", "cap_feats")
    if name in texts:
        return [f"float32[batch,7,{width}]"]
    by_name = {
        "timestep": ["int64[batch]{0:1000}", "float32[batch]{0:1}"],
        "timesteps": ["int64[batch]{0:1000}"],
        "pooled_projections": [f"float32[batch,{pooled}]"],
        "pooled_text_emb": [f"float32[batch,{pooled}]"],
        "encoder_attention_mask": ["int64[batch,7]"],
        "encoder_hidden_states_mask": ["bool[batch,7]"],
        "attention_mask": ["int64[batch,7]"],
        "img_ids": ["float32[16,3]{0:8}", "float32[16,4]{0:8}"],
        "txt_ids": ["float32[7,3]{0:8}", "float32[7,4]{0:8}"],
        "guidance": ["float32[batch]{1:4}"],
        "class_labels": ["int64[batch]{0:10}"],
        "controlnet_cond": ["float32[batch,3,64,64]"],
    }
    return by_name.get(name, [])


def _first_int(config: Any, names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = config.get(name) if hasattr(config, "get") else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default
