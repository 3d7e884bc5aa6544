"""A size that models have for each op, and how a test compiles it."""

from __future__ import annotations

from typing import Any

from normdeploy_plugins._aot import Compiled, compile_launch
from normdeploy_plugins._launch import Op, Tensor
from normdeploy_plugins.ops import BY_NAME

EPS = {"epsilon": 1e-5}
LN = EPS | {"axis": -1, "ddof": 0}
GROUPS = EPS | {"num_groups": 32, "channels_last": 0}
IMAGE, LONG = (2, 320, 32, 32), (2, 200_000)
# op -> shape of x, attributes; for each op a size that models have
USUAL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "LayerNorm": ((4, 77, 768), LN),
    "RMSNorm": ((4, 77, 4096), EPS | {"axis": -1, "offset": 1.0}),
    "AddLayerNorm": ((4, 77, 768), EPS),
    "AddRMSNorm": ((4, 77, 4096), EPS | {"offset": 0.0}),
    "ModulatedLayerNorm": ((4, 256, 1152), EPS),
    "GatedRMSNorm": ((4, 256, 4096), EPS),
    "SigmoidGatedRMSNorm": ((4, 256, 4096), EPS),
    "StdNorm": ((4, 77, 512), LN | {"ddof": 1}),
    "ChannelLayerNorm": ((2, 96, 56, 56), EPS),
    "InstanceNorm": (IMAGE, EPS),
    "GroupNorm": (IMAGE, GROUPS),
    "GroupNormSiLU": ((2, 32, 32, 320), GROUPS | {"channels_last": 1}),
    "AdaGroupNorm": (IMAGE, EPS | {"num_groups": 320, "spatial": 1}),
    "AdaGroupNormSiLU": (IMAGE, EPS | {"num_groups": 32, "spatial": 0}),
    "AdaGroupNormApply": (IMAGE, EPS | {"num_groups": 32, "spatial": 0, "activation": "silu"}),
    "ScaleShift": (IMAGE, {"axis": 1, "activation": "silu"}),
    "NormStatistics": (LONG, {"axis": -1, "groups": 1, "splits": 8, "channels_last": 0}),
    "LayerNormApply": (LONG, EPS | {"axis": -1}),
    "GroupNormApply": (IMAGE, GROUPS | {"activation": "silu"}),
    "LayerNormQuantize": ((4, 77, 768), EPS | {"axis": -1, "to": "int8"}),
    "RMSNormQuantize": ((4, 77, 4096), EPS | {"axis": -1, "to": "int8"}),
    "AddLayerNormQuantize": ((4, 77, 768), EPS | {"to": "int8"}),
    "AddRMSNormQuantize": ((4, 77, 4096), EPS | {"to": "int8"}),
    "LayerNormDynamicQuantize": ((4, 77, 768), EPS | {"axis": -1, "least": 1e-5, "to": "int8"}),
    "RMSNormDynamicQuantize": ((4, 77, 4096), EPS | {"axis": -1, "least": 1e-5, "to": "int8"}),
    "AddLayerNormDynamicQuantize": ((4, 77, 768), EPS | {"least": 1e-5, "to": "int8"}),
    "AddRMSNormDynamicQuantize": ((4, 77, 4096), EPS | {"least": 1e-5, "to": "int8"}),
}


def tensors(op: Op, shape: tuple[int, ...], attributes: dict[str, Any], dtype: str) -> list[Tensor]:
    channel = (
        shape[-1] if len(shape) == 2 or attributes.get("channels_last") or attributes.get("axis") == -1 else shape[1]
    )
    small = {
        "scale": (shape[0], 1, shape[-1]),
        "shift": (shape[0], 1, shape[-1]),
        "statistics": (attributes.get("num_groups", 1) * shape[0], 8, 2),
        "y_scale": (1,),
    }
    if op.name.startswith("AdaGroupNorm"):
        data = shape if attributes["spatial"] else (*shape[:2], *(1,) * (len(shape) - 2))
        small |= {"scale": data, "shift": data}
    elif op.name == "ScaleShift" or "Modulated" not in op.name:
        small |= {"scale": (channel,), "shift": (channel,)}
    return [
        Tensor(
            shape if name in ("x", "residual", "gate") else small.get(name, (channel,)),
            "fp32" if kind == "F" else dtype,
        )
        for name, kind in zip(op.inputs, op.types, strict=False)
    ]


def compiled(
    name: str,
    shape: tuple[int, ...],
    attributes: dict[str, Any],
    dtype: str,
    capability: tuple[int, int] = (9, 0),
    tactic: int = 0,
) -> Compiled:
    op = BY_NAME[name]
    inputs = tensors(op, shape, attributes, dtype)
    launch = op.launch(inputs, attributes, op.tiles(inputs, attributes)[tactic])
    return compile_launch(op, launch, inputs, op.output_tensors(inputs, attributes), capability)
