"""Find integers that do not depend on data: they are computed, through floats, from sizes, integers and single numbers.

Examples are the buckets of relative positions (a logarithm, cast to integers) and the rows of a window. The float that
is cast often lies exactly where the integer changes: 4·log(8/4)/log(4) is 2. With the float32 constants of a file, the
same expression in float64 is 1.99…, and a randomly drawn rounding can lead to either of the two integers. With the
wrong integer, the run reads another row of a table than the model. An allowed error that covers this difference would
also accept a file that really reads a wrong row.

So a float64 reference computes these integers in the model's own types. They are called *settled*. A float of more than
one element is data or a weight, so it is not settled. A constant with several integers of at most 8 bits is not settled
either, since it may hold quantized codes. Values that are computed from unsettled values are not settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import onnx

_T = TypeVar("_T")

# Ops that read only the size of their input, not its values.
_SIZES = frozenset({"Shape", "Size"})
_DRAWN = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
# Attributes of a Constant op that hold integers or one number.
_SINGLE = frozenset({"value_float", "value_int", "value_ints"})
_INDICES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
_WIDE = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True)
class DataIndependent(Generic[_T]):
    """Settled nodes of a graph.

    Attributes:
        integers: nodes that compute integers or booleans from settled floats.
        floats: nodes that compute the settled floats for the nodes in ``integers``.
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
        nodes: position -> node, in the order of computation.
        reads: position -> names of the tensors that the node reads.
        types: tensor -> dtype.
        given: names of settled inputs and weights: inputs and weights of integers or booleans, and weights of a single
            number.

    Returns:
        Positions of the settled nodes.
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
    """Return whether a file's constant is a single number or contains indices (int64, int32 or bool).

    Returns:
        False for several integers of 8 bits or fewer, which may be weights.
    """
    return math.prod(tensor.dims) == 1 or tensor.data_type in _INDICES


def is_integer_type(kind: np.dtype) -> bool:
    """Return whether a dtype is an integer type or bool."""
    return kind.kind in "iub"


def _has_scalar_attributes(node: onnx.NodeProto) -> bool:
    return all(is_index_or_scalar(a.t) if a.name == "value" else a.name in _SINGLE for a in node.attribute)


def select_feeding_integers(
    nodes: Iterable[_T], reads: Callable[[_T], Iterable[_T]], floats: set[_T]
) -> DataIndependent[_T]:
    """Select the settled nodes that lie on a path from settled floats to integers.

    Args:
        nodes: settled nodes, in the order of computation.
        reads: function that returns the settled nodes that a node reads.
        floats: the nodes in ``nodes`` that compute floats.

    Returns:
        The nodes that turn settled floats into integers, and the float nodes that these nodes depend on.
    """
    every = list(nodes)
    integers = {n for n in every if n not in floats and any(read in floats for read in reads(n))}
    wanted: set[_T] = set()
    for n in reversed(every):
        if n in integers or n in wanted:
            wanted.update(read for read in reads(n) if read in floats)
    return DataIndependent(frozenset(integers), frozenset(wanted.intersection(every)))
