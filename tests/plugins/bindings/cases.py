"""Every op with the layouts, types and sizes that a network may have, as a builder meets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from normdeploy_plugins._launch import Call, Tensor, in_channels_last
from normdeploy_plugins.ops import BY_NAME

LINEAR, HWC8 = 0, 2  # TensorRT's numbers of formats
# dynamic sizes: name -> number in the mock; two sets of values, the second with an empty batch
NUMBERS = {"b": 1, "s": 2, "h": 3, "w": 4, "c": 5, "g": 6}
SIZES = ({"b": 2, "s": 77, "h": 24, "w": 40, "c": 1000, "g": 64}, {"b": 0, "s": 5, "h": 7, "w": 9, "c": 40_000, "g": 0})
EPS = {"epsilon": 1e-6}
GROUPS = EPS | {"num_groups": 32, "channels_last": 0}
LAST = {"channels_last": 1}
Shapes = tuple[tuple[int | str, ...], ...]
NCHW, NHWC = ("b", 320, "h", "w"), ("b", "h", "w", 320)
IMAGE, LAST_IMAGE = (NCHW, (320,), (320,)), (NHWC, (320,), (320,))


def _rows(n: int, parameters: int = 2, data: int = 1) -> Shapes:
    return (*(("b", "s", n),) * data, *((n,),) * parameters)


_PARTS, _FEW = ("g", 8, 2), ("b", 8, 2)
_STATISTICS = {"axis": 1, "groups": 32, "splits": 8, "channels_last": 0}
# (op, what sets this layout apart, shapes of the inputs, attributes)
LAYOUTS: tuple[tuple[str, str, Shapes, dict[str, Any]], ...] = (
    ("LayerNorm", "", _rows(768), EPS | {"axis": -1, "ddof": 0}),
    ("LayerNorm", "rows of dynamic length", (("b", "c"), ("c",), ("c",)), EPS | {"axis": -1, "ddof": 1}),
    ("RMSNorm", "", _rows(4096, 1), EPS | {"axis": -1, "offset": 1.0}),
    ("AddLayerNorm", "", _rows(768, data=2), EPS),
    ("AddRMSNorm", "", _rows(4096, 1, 2), EPS | {"offset": 0.0}),
    ("ModulatedLayerNorm", "", (("b", "s", 1152), ("b", 1, 1152), ("b", 1, 1152)), EPS),
    ("GatedRMSNorm", "", (("b", "s", 4096), (4096,), ("b", "s", 4096)), EPS),
    ("SigmoidGatedRMSNorm", "", (("b", "s", 4096), (4096,), ("b", "s", 4096)), EPS),
    ("StdNorm", "", _rows(512), EPS | {"axis": -1, "ddof": 1}),
    ("ChannelLayerNorm", "", (("b", 96, "h", "w"), (96,), (96,)), EPS),
    ("InstanceNorm", "", IMAGE, EPS),
    ("GroupNorm", "NCHW", IMAGE, GROUPS),
    ("GroupNorm", "NHWC", LAST_IMAGE, GROUPS | LAST),
    ("GroupNormSiLU", "NCHW", IMAGE, GROUPS),
    ("GroupNormSiLU", "NHWC", LAST_IMAGE, GROUPS | LAST),
    ("AdaGroupNorm", "channels", (NCHW, *(("b", 320, 1, 1),) * 2), EPS | {"num_groups": 32, "spatial": 0}),
    ("AdaGroupNorm", "positions", (NCHW, NCHW, NCHW), EPS | {"num_groups": 320, "spatial": 1}),
    ("AdaGroupNormSiLU", "", (NCHW, *(("b", 320, 1, 1),) * 2), EPS | {"num_groups": 32, "spatial": 0}),
    (
        "AdaGroupNormApply",
        "",
        (NCHW, _PARTS, *(("b", 320, 1, 1),) * 2),
        EPS | {"num_groups": 32, "spatial": 0, "activation": "silu"},
    ),
    ("ScaleShift", "NCHW", IMAGE, {"axis": 1, "activation": "silu"}),
    ("ScaleShift", "NHWC", LAST_IMAGE, {"axis": -1, "activation": "relu"}),
    ("NormStatistics", "rows", (("b", 200_000),), _STATISTICS | {"axis": -1, "groups": 1}),
    ("NormStatistics", "NCHW", (NCHW,), _STATISTICS),
    ("NormStatistics", "NHWC", (NHWC,), _STATISTICS | LAST),
    ("LayerNormApply", "", (("b", 200_000), _FEW, (200_000,), (200_000,)), EPS | {"axis": -1}),
    *(
        (op, to, (*_rows(n, parameters, data), (1,)), EPS | more | {"to": to})
        for op, n, parameters, data, more in (
            ("LayerNormQuantize", 768, 2, 1, {"axis": -1}),
            ("RMSNormQuantize", 4096, 1, 1, {"axis": -1}),
            ("AddLayerNormQuantize", 768, 2, 2, {}),
            ("AddRMSNormQuantize", 4096, 1, 2, {}),
        )
        for to in ("int8", "fp8")
    ),
    *(
        (op, to, _rows(n, parameters, data), EPS | more | {"least": 1e-5, "to": to})
        for op, n, parameters, data, more in (
            ("LayerNormDynamicQuantize", 768, 2, 1, {"axis": -1}),
            ("RMSNormDynamicQuantize", 4096, 1, 1, {"axis": -1}),
            ("AddLayerNormDynamicQuantize", 768, 2, 2, {}),
            ("AddRMSNormDynamicQuantize", 4096, 1, 2, {}),
        )
        for to in ("int8", "fp8")
    ),
    ("GroupNormApply", "NCHW", (NCHW, _PARTS, (320,), (320,)), GROUPS | {"activation": "silu"}),
    ("GroupNormApply", "NHWC", (NHWC, _PARTS, (320,), (320,)), GROUPS | LAST | {"activation": "none"}),
)


@dataclass(frozen=True)
class Case:
    """``types`` are the inputs' (fp32, fp16, bf16), ``format`` is that of x and y. A static case has the first of SIZES
    written into its shapes."""

    op: str
    layout: str
    shapes: Shapes
    types: tuple[str, ...]
    attributes: dict[str, Any]
    format: int = LINEAR

    def __str__(self) -> str:
        size, form = "dynamic" if self.dynamic else "static", "HWC8" if self.format == HWC8 else ""
        return "-".join(filter(None, (self.op, self.layout, "/".join(dict.fromkeys(self.types)), form, size)))

    @property
    def dynamic(self) -> bool:
        return any(isinstance(d, str) for shape in self.shapes for d in shape)

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        return SIZES if self.dynamic else SIZES[:1]

    def tensors(self, sizes: dict[str, int] | None = None, unknown: Any = None) -> list[Tensor]:
        """The inputs at these sizes, or with ``unknown`` for each dynamic one."""
        known = sizes or dict.fromkeys(NUMBERS, unknown)
        shapes = [tuple(known[d] if isinstance(d, str) else d for d in shape) for shape in self.shapes]
        return [Tensor(shape, dtype) for shape, dtype in zip(shapes, self.types, strict=True)]

    def call(self, sizes: dict[str, int] | None = None, unknown: Any = None) -> Call:
        """What the plugin has to call at these sizes: the op itself, or, in HWC8, the one that computes it there."""
        call = BY_NAME[self.op], self.tensors(sizes, unknown), self.attributes
        return (in_channels_last(*call) or call) if self.format == HWC8 else call

    def request(self, **more: Any) -> dict[str, Any]:
        """What the worker is told of it."""
        told = BY_NAME[self.op].encoded(self.attributes)
        return asdict(self) | {"attributes": told, "sizes": list(self.sizes), "numbers": NUMBERS} | more


def _static(shapes: Shapes) -> Shapes:
    return tuple(tuple(SIZES[0][d] if isinstance(d, str) else d for d in shape) for shape in shapes)


def _types(op: str) -> Iterator[tuple[str, ...]]:
    letters = BY_NAME[op].types[: len(BY_NAME[op].inputs)]
    for data in ("fp32", "fp16", "bf16"):
        parameters = (data, "fp32") if data != "fp32" and "P" in letters else (data,)
        for parameter in parameters:
            yield tuple({"T": data, "P": parameter, "F": "fp32"}[letter] for letter in letters)


def cases(types: Sequence[str] = ("fp32", "fp16", "bf16")) -> list[Case]:
    """Every op, layout and combination of types whose data has one of ``types``, with dynamic sizes and with static
    ones."""
    found = [
        Case(op, layout, sized, kinds, attributes)
        for op, layout, shapes, attributes in LAYOUTS
        for kinds in _types(op)
        if kinds[0] in types
        for sized in (shapes, _static(shapes))
    ]
    halves = [case for case in found if case.types[0] != "fp32" and in_channels_last(*case.call(SIZES[0]))]
    return found + [replace(case, format=HWC8) for case in halves]


def one_type(case: Case) -> bool:
    """Whether parameters have the data's type."""
    return {case.types[0]} >= {t for t, kind in zip(case.types, BY_NAME[case.op].types, strict=False) if kind != "F"}
