"""Integers that no data reaches: made of sizes, integers and single numbers by way of floats.

The buckets of relative positions are such (a logarithm, cast to integers), and so are the rows of a window. Their
floats lie on edges between two integers more often than chance would have it: 4·log(8/4)/log(4) is 2. In float64 with
the float32 constants of a file it is 1.99…, and a rounding drawn at random takes either side. Each takes other rows of
a table than the model does, and what that excuses hides a wrong row.

So a float64 reference takes for these integers what the model's own types make of them. A float of more than one
element is data or a weight, and so is a constant of several integers of 8 bits or fewer, which may be codes; and so is
all that is computed from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import onnx

_T = TypeVar("_T")

# What they read gives them a size, and no value.
_SIZES = frozenset({"Shape", "Size"})
_DRAWN = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
# Attributes of a Constant that hold integers or one number.
_SINGLE = frozenset({"value_float", "value_int", "value_ints"})
_INDICES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
_WIDE = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True)
class DataIndependent(Generic[_T]):
    """Nodes of a graph.

    Args:
        integers: nodes that make integers or booleans of settled floats.
        floats: the nodes that compute these floats.
    """

    integers: frozenset[_T] = frozenset()
    floats: frozenset[_T] = frozenset()


def find_data_independent(
    nodes: Mapping[int, onnx.NodeProto],
    reads: Mapping[int, Collection[str]],
    types: Mapping[str, np.dtype],
    given: Collection[str],
) -> DataIndependent[int]:
    """Find the settled integers of a file.

    Args:
        nodes: place -> node, in the order of computation.
        reads: place -> the names that it reads.
        given: the names of inputs and weights that are settled: no float, or a single number of the file.
    """
    settled = set(given)
    makers = {}
    for place, node in nodes.items():
        makers.update(dict.fromkeys(node.output, place))
        if node.op_type == "Constant":
            settled.update(node.output if _has_scalar_attributes(node) else ())
            continue
        known = node.op_type in _SIZES or (node.op_type not in _DRAWN and settled.issuperset(reads[place]))
        kinds = [types.get(name) for name in node.output if name]
        if known and all(kind is not None and (is_integer_type(kind) or kind in _WIDE) for kind in kinds):
            settled.update(node.output)
    within = [place for place, node in nodes.items() if settled.issuperset(filter(None, node.output))]
    return select_feeding_integers(
        within,
        lambda place: [makers[name] for name in reads[place] if name in makers and name in settled],
        {place for place in within if types.get(nodes[place].output[0]) in _WIDE},
    )


def is_index_or_scalar(tensor: onnx.TensorProto) -> bool:
    """Whether a constant of a file is a single number, or holds indices: those of 8 bits and fewer may be weights."""
    return math.prod(tensor.dims) == 1 or tensor.data_type in _INDICES


def is_integer_type(kind: np.dtype) -> bool:
    """Whether a type has integers or booleans."""
    return kind.kind in "iub"


def _has_scalar_attributes(node: onnx.NodeProto) -> bool:
    return all(is_index_or_scalar(a.t) if a.name == "value" else a.name in _SINGLE for a in node.attribute)


def select_feeding_integers(
    nodes: Iterable[_T], reads: Callable[[_T], Iterable[_T]], floats: set[_T]
) -> DataIndependent[_T]:
    """Return of settled ``nodes`` those on the way of settled floats to integers."""
    every = list(nodes)
    integers = {n for n in every if n not in floats and any(read in floats for read in reads(n))}
    wanted: set[_T] = set()
    for n in reversed(every):
        if n in integers or n in wanted:
            wanted.update(read for read in reads(n) if read in floats)
    return DataIndependent(frozenset(integers), frozenset(wanted.intersection(every)))
