"""ScaleNorm with a clamped norm: Y = g · X / max(‖X‖₂ over the last axis, ε), g one number (Nguyen & Salazar,
"Transformers without Tears", 2019, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from normdeploy.norms.third_party import GuestNorm, GuestPlugin
from normdeploy.verbs.check.third_party_rules import GuestFinding, GuestRule


def form(norm: Any, writer: Any) -> Any:
    """The norm as a ClampedScaleNorm: over the last axis, with one number for all of a row."""
    if not norm.fit.clamped:
        return writer.refuse("its norm is not clamped from below")
    if norm.axes != (len(norm.shape) - 1,):
        return writer.refuse(f"it is over the axes {norm.axes}, and a ScaleNorm is over the last")
    if norm.gamma is None or norm.gamma.data or norm.gamma.value.size != 1:
        return writer.refuse("its scale is not one number")
    writer.op(writer.parameter(norm.gamma, [1], 1.0, "scale"), epsilon=norm.epsilon)
    writer.affine(None, norm.beta)
    return writer.done()


def registered() -> None:
    """Where a package has a kernel, it registers it here, with tensorrt.plugin or a shared library."""


NORMS = GuestNorm(
    op="ClampedScaleNorm",
    kind="ScaleNorm",
    inputs=("X", "scale"),
    attributes=("epsilon",),
    body="""
        axes = Constant <value_ints: ints = [-1]> ()
        length = ReduceL2 <keepdims: int = 1> (X, axes)
        given = Constant <value_float: float = @epsilon> ()
        least = CastLike (given, X)
        clamped = Clip (length, least)
        normal = Div (X, clamped)
        Y = Mul (normal, scale)
    """,
    form=form,
    since=18,
    centered=False,
    plugin=GuestPlugin("ClampedScaleNorm", namespace="guests", register=registered),
)


class Reference:
    """A runtime: onnx's own reference evaluator."""

    name = "onnx's reference"

    def __init__(self, path: Path) -> None:
        self._model = ReferenceEvaluator(onnx.load(path))

    def infer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self._model.output_names, self._model.run(None, dict(feeds)), strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._model


def small(proto: onnx.ModelProto) -> Iterator[GuestFinding]:
    """The ScaleNorms whose epsilon float16 can't hold as a normal number."""
    for node in proto.graph.node:
        for attribute in node.attribute if node.op_type == "ClampedScaleNorm" else ():
            if attribute.name == "epsilon" and attribute.f < np.finfo(np.float16).smallest_normal:
                yield GuestFinding(f"its epsilon {attribute.f:.2g} is subnormal in float16", tensor=node.output[0])


RULES = GuestRule(
    id="scale-norm-epsilon",
    short="The epsilon of a ScaleNorm is too small for float16.",
    help="Choose 1e-4 or more where the model shall run in half precision.",
    find=small,
)
