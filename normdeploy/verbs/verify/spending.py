"""Bounds what a comparison may spend: seconds for the references, and bytes for the tensors inside a model.

A file of 90 KB can hold a convolution whose result has 700 million elements. In float64, with the tensors that are
drawn beside it, that took 23 GB.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from ...graphs.dims import Dims, evaluate_dim
from ...graphs.inference import inferred
from ...graphs.stated import stated_inputs
from ...model import InputSpec
from .cases import Case, listed
from .originals import Original

_WIDE = 8  # bytes of an element in float64
_HELD = 16  # tensors of the largest size that are held at a time; 9 were seen on a convolution and its square
_NAMED = 3  # sizes that a note names


@dataclass(frozen=True)
class Budget:
    """What a comparison may spend.

    ``seconds``: of processor time; half of it is for the model and its float64 form, since the runtimes and the bounds
    take about as long again. ``memory``: bytes beyond the model's own weights.
    """

    seconds: float = 60.0
    memory: int = 4 * 2**30

    @property
    def most_elements(self) -> int:
        """The elements of the largest tensor that the memory allows."""
        return self.memory // (_WIDE * _HELD)


@dataclass
class Clock:
    """The processor time that is left of a budget, and the cases that it left out."""

    seconds: float
    left_out: list[str] = field(default_factory=list)
    _begun: float = field(default_factory=time.process_time)

    def is_over(self) -> bool:
        return time.process_time() - self._begun > self.seconds


class InnerSizes:
    """The largest tensor inside an ONNX file at given sizes of the model's dims."""

    def __init__(self, proto: onnx.ModelProto, inputs: Mapping[str, str], specs: Sequence[InputSpec]) -> None:
        """
        Args:
            proto: the file, its weights need not be loaded.
            inputs: the file's name of an input -> the model's, where they differ.
            specs: the model's inputs.
        """
        self._shapes: dict[str, Dims] = {name: dims for name, (_, dims) in inferred(proto).items() if dims is not None}
        self._stated = {inputs.get(item.name, item.name): item.dims for item in stated_inputs(proto.graph)}
        self._specs = {spec.name: spec for spec in specs}

    def largest(self, sizes: Mapping[str, int]) -> tuple[str, int]:
        """Return the name and the elements of the largest tensor; a dim that inference can't follow counts as 1."""
        symbols: dict[str, int] = {}
        for name, dims in self._stated.items():
            spec = self._specs.get(name)
            if spec is None or dims is None or len(dims) != len(spec.shape):
                continue
            pairs = zip(dims, spec.sizes(sizes), strict=True)
            symbols |= {dim: size for dim, size in pairs if isinstance(dim, str)}
        counts = {
            name: math.prod(1 if (n := evaluate_dim(d, symbols)) is None else n for d in dims)
            for name, dims in self._shapes.items()
        }
        name = max(counts, key=lambda tensor: counts[tensor], default="")
        return name, counts.get(name, 0)


def with_usual_sizes(signature: Original, insides: Sequence[InnerSizes], budget: Budget) -> Original:
    """Halve the usual sizes of the dims until the tensors inside fit the budget, or all dims are at their minimum.

    Most inputs are drawn at the usual sizes, so where these are too large nearly nothing would be run.
    """
    if not insides:
        return signature
    dims = dict(signature.dims)
    while not _fits({name: dim.opt for name, dim in dims.items()}, insides, budget):
        smaller = {name: replace(dim, opt=max(dim.min, dim.opt // 2)) for name, dim in dims.items()}
        if smaller == dims:
            break
        dims = smaller
    if dims == signature.dims:
        return signature
    inputs = tuple(replace(spec, shape=tuple(d.among(dims) for d in spec.shape)) for spec in signature.inputs)
    return replace(signature, inputs=inputs)


def _fits(sizes: Mapping[str, int], insides: Sequence[InnerSizes], budget: Budget) -> bool:
    return all(inside.largest(sizes)[1] <= budget.most_elements for inside in insides)


def affordable(
    cases: Sequence[Case], opt: Mapping[str, int], insides: Sequence[InnerSizes], budget: Budget
) -> tuple[list[Case], list[str]]:
    """Leave out the cases whose inner tensors would take more memory than the budget has.

    Args:
        opt: sizes of the cases that state none.
        insides: of each ONNX file.

    Returns:
        The cases that are left, at least one; and a note on the sizes left out, if any.
    """
    kept, left_out = list[Case](), dict[str, tuple[str, int]]()
    largest: dict[tuple[tuple[str, int], ...], tuple[str, int]] = {}
    for case in cases:
        sizes = case.sizes or tuple(opt.items())
        if sizes not in largest:
            every = (inside.largest(dict(sizes)) for inside in insides)
            largest[sizes] = max(every, key=lambda each: each[1], default=("", 0))
        if largest[sizes][1] <= budget.most_elements or case.kind == "given":
            kept.append(case)
        else:
            left_out[listed(dict(sizes)) or "its sizes"] = largest[sizes]
    if not kept and cases:
        kept = [min(cases, key=lambda case: largest[case.sizes or tuple(opt.items())][1])]
    if not left_out:
        return kept, []
    tensor, elements = max(left_out.values(), key=lambda each: each[1])
    some, more = [*left_out][:_NAMED], len(left_out) - _NAMED
    return kept, [
        f"not run at {'; '.join(some)}{f' and {more} other sizes' if more > 0 else ''}: the tensor {tensor!r} would"
        f" have up to {elements:,} elements, and {budget.memory:,} bytes suffice for {budget.most_elements:,};"
        " --max-memory raises that"
    ]
