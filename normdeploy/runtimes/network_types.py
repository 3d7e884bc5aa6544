"""Compare the element types that TensorRT's parser gave each tensor with those in the ONNX file.

The check runs in the builder's process, on the parsed network, and needs no GPU. The engine of a strongly typed network
keeps the network's types. TensorRT may choose other types for a weakly typed network, so such a network is refused. An
engine of the wrong precision computes correct numbers but misses its speed and memory, so only a check of the types
detects such an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FLOATS = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}
QUANTIZED = {"INT8": "int8", "FP8": "float8", "INT4": "int4"}
_ASKED = {"fp16": "float16", "bf16": "bfloat16"}
_HEAVY = frozenset({"CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY", "EINSUM", "ATTENTION"})


@dataclass(frozen=True)
class NetworkTypes:
    """Floating types in which a network computes. The record is true if the types are as requested.

    Attributes:
        layers: floating or quantized type -> number of layers with an output of that type.
        heavy: like ``layers``, but counts only matrix products and convolutions.
        wrong: deviations from the request, one line each.
    """

    layers: dict[str, int] = field(default_factory=dict)
    heavy: dict[str, int] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.wrong


def check_network_types(trt: Any, network: Any, precision: str, stated: Mapping[str, str]) -> NetworkTypes:
    """Compare a parsed network with the file that it was parsed from.

    Args:
        trt: the module, tensorrt or tensorrt_rtx.
        network: its INetworkDefinition.
        precision: "fp16" or "bf16".
        stated: tensor name -> type ("float16", ...) in the file, for inputs, outputs and inner tensors. The parser
            keeps most names. A tensor whose name is missing in the network is not compared.

    Returns:
        The network's types and the deviations.
    """
    wrong: list[str] = []
    if not _is_strongly_typed(trt, network):
        wrong.append("the network is not strongly typed: TensorRT would choose other types than the file's")
    for kind, count, get in (
        ("input", network.num_inputs, network.get_input),
        ("output", network.num_outputs, network.get_output),
    ):
        wrong += _list_differing_types(kind, [get(i) for i in range(count)], stated)
    layers = count_layer_types(network)
    heavy: Counter[str] = Counter()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        made = [layer.get_output(k) for k in range(layer.num_outputs)]
        kinds = {FLOATS[t.dtype.name] for t in made if t is not None and t.dtype.name in FLOATS}
        if layer.type.name in _HEAVY:
            heavy.update(kinds)
        wrong += _list_differing_types(f"layer {layer.name!r}:", [t for t in made if t is not None], stated)
    half = _ASKED[precision]
    if not layers[half]:
        wrong.append(f"{precision} was requested, but no layer computes in {half}: {dict(layers)}")
    return NetworkTypes(dict(layers), dict(heavy), tuple(dict.fromkeys(wrong)))


def count_layer_types(network: Any) -> Counter[str]:
    """Count the layers of a network by the floating and quantized types of their outputs.

    Returns:
        type ("float32", "int8", ...) -> number of layers.
    """
    named = FLOATS | QUANTIZED
    layers: Counter[str] = Counter()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        outputs = [layer.get_output(k) for k in range(layer.num_outputs)]
        layers.update({named[t.dtype.name] for t in outputs if t is not None and t.dtype.name in named})
    return layers


def _list_differing_types(what: str, tensors: list[Any], stated: Mapping[str, str]) -> list[str]:
    differing = [
        (t.name, FLOATS.get(t.dtype.name, t.dtype.name))
        for t in tensors
        if t.name in stated and stated[t.name] in FLOATS.values()
    ]
    return [
        f"{what} {name!r} is {kind}, but the file says {stated[name]}"
        for name, kind in differing
        if kind != stated[name]
    ]


def _is_strongly_typed(trt: Any, network: Any) -> bool:
    """Return whether the network is strongly typed.

    In TensorRT 11 and TensorRT-RTX, every network is strongly typed: they dropped the builder flags that weakly typed
    networks need.
    """
    if not hasattr(trt.BuilderFlag, "FP16"):
        return True
    return bool(network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
