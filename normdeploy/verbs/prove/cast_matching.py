"""Decide whether both files round alike where a Cast to a narrower floating type was read as exact.

Tools move and drop such Casts: onnxruntime runs half-precision nodes in float32 between two Casts. A comparison with
exact Casts (`normdeploy.verbs.prove.field_values.CastRounding`) ignores the roundings of these Casts. The comparison
counts only if both files hold the affected values in the narrow type all the same. So every path from a Cast to an
output must contain a tensor of the Cast's type T. The other file must hold the exact value of this tensor in type T
too, and use it only in type T. So a file that rounds float32 results to half precision is never equal to one that does
not.
"""

from __future__ import annotations

import onnx

from .equality_proof import Comparison
from .graph_nodes import node_inputs
from .proof_result import ExactCast


def list_exact_casts(compared: Comparison) -> list[ExactCast]:
    """List the Casts that round but were read as exact.

    Returns:
        the Casts of both files.
    """
    return [
        ExactCast(name, onnx.helper.tensor_dtype_to_np_dtype(elem_type).name)
        for trace in compared.traces
        for name, elem_types in trace.exact_casts.items()
        for elem_type in sorted(elem_types)
    ]


def outputs_rounded_differently(compared: Comparison) -> list[str]:
    """List the outputs that a Cast affects whose type only one of the files holds.

    Returns:
        names in the file with the Cast.
    """
    found = []
    for side, graph in enumerate(compared.graphs):
        rounded = _follow_casts(compared, side)
        found += [name for name in graph.outputs if rounded.get(name)]
    return found


def _follow_casts(compared: Comparison, side: int) -> dict[str, frozenset[int]]:
    """Find the tensors that depend on a Cast, up to the tensors that both files hold in its type.

    Returns:
        types of the Casts by tensor name.
    """
    trace = compared.traces[side]
    if not trace.exact_casts:
        return {}
    other = _Holders(compared, 1 - side)
    rounded: dict[str, frozenset[int]] = {}
    for node in compared.graphs[side].nodes:
        read = [rounded[name] for name in node_inputs(node) if name in rounded]
        for name in node.output:
            types = trace.exact_casts.get(name, frozenset()).union(*read)
            if types and name in trace.values:
                elem_type = trace.values[name].elem
                if elem_type in types and other.holds_only(compared.digest(side, name), elem_type):
                    types -= {elem_type}
            if types:
                rounded[name] = types
    return rounded


class _Holders:
    """Tensors of one file by their exact values."""

    def __init__(self, compared: Comparison, side: int) -> None:
        self._trace = compared.traces[side]
        graph = compared.graphs[side]
        self._names: dict[bytes, list[str]] = {}
        for name in self._trace.values:
            self._names.setdefault(compared.digest(side, name), []).append(name)
        # Types to which each reader of a tensor rounds it; an empty set for any other use
        self._uses: dict[str, list[frozenset[int]]] = {name: [frozenset()] for name in graph.outputs}
        for node in graph.nodes:
            types = self._trace.exact_casts.get(node.output[0], frozenset()) if node.op_type == "Cast" else frozenset()
            for name in node_inputs(node):
                self._uses.setdefault(name, []).append(types)

    def holds_only(self, digest: bytes, elem_type: int) -> bool:
        """Return True if the file holds a value in a type, and every use of the value is a use in this type."""
        names = self._names.get(digest, [])
        values = self._trace.values
        wider = [n for n in names if values[n].elem != elem_type and values[n].fits != elem_type]
        if len(wider) == len(names):
            return False
        return all(elem_type in types for name in wider for types in self._uses.get(name, ()))
