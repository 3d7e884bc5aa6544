"""Match the product of a norm's result and SiLU or the sigmoid of another tensor, the gate.

With n the norm and s(g) = sigmoid(g), models compute one of

    n · (g · s(g))        (n · g) · s(g)        (n · s(g)) · g        n · Swish(g)

in any order of the factors. Models in half precision compute SiLU in float32, so Casts may stand between the nodes
(Qwen3-Next: ``(n.float() * silu(gate.float())).to(dtype)``). A Cast is the identity in exact numbers.

The gate of Kimi Linear passes through the sigmoid alone: n · s(g).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..dtypes import is_float_dtype
from ..graphs.graph import Graph
from .node_queries import sole_consumer, standard_producer


@dataclass(frozen=True)
class NormGate:
    """Gate of a norm.

    Attributes:
        activation: "SiLU" or "Sigmoid".
        gate: the tensor g, in the dtype of the norm's input if the graph has it.
        product: result of the last product, in the dtype of the norm's input.
        nodes: the nodes between the norm or the gate and the product, in topological order.
    """

    activation: str
    gate: gs.Tensor
    product: gs.Tensor
    nodes: tuple[gs.Node, ...]


@dataclass(frozen=True)
class _Factor:
    """Factor of the product, with its Casts.

    Attributes:
        sources: the tensor g after each of its Casts to wider types, and last the one before them.
        activation: "Sigmoid" or "SiLU"; "" for the tensor itself.
        nodes: the Casts and the activation.
    """

    sources: tuple[gs.Tensor, ...]
    activation: str
    nodes: tuple[gs.Node, ...]


def find_gate(graph: Graph, y: gs.Tensor, dtype: np.dtype | None) -> NormGate | None:
    """Find the gate that the norm's result ``y`` is multiplied by.

    Args:
        dtype: dtype of the norm's input, and so of the product.

    Returns:
        the gate; None if there is none, or if another node reads one of the results before the product.
    """
    first = _multiply(graph, _Product(y))
    # The norm is multiplied by SiLU of the gate, or by the two factors of SiLU one after the other.
    second = _multiply(graph, first) if first is not None else None
    for product in (first, second):
        if product is not None and _gate_of(product.factors):
            return _finish(graph, product, "SiLU", _gate_of(product.factors), dtype)
    if first is not None and first.factors[0].activation == "Sigmoid":
        return _finish(graph, first, "Sigmoid", first.factors[0].sources, dtype)
    return None


def find_gate_before(graph: Graph, x: gs.Tensor) -> gs.Tensor | None:
    """Find the gate of a norm of x = h · SiLU(g), the order of Mamba-2 (Dao, Gu 2024).

    Returns:
        the tensor g; None for other tensors.
    """
    product = standard_producer(graph, strip_widening_casts(graph, x), "Mul")
    if product is None:
        return None
    factors = [_read_factor(graph, operand) for operand in product.inputs]
    gates = [factor.sources[-1] for factor in factors if factor.activation == "SiLU"]
    if len(gates) != 1 or graph.is_constant(gates[0]):
        return None
    return gates[0]


@dataclass(frozen=True)
class _Product:
    """Product of the norm's result and factors.

    Attributes:
        result: result of the last multiplication; the norm's result if there is none.
        factors: the factors besides the norm.
        nodes: the multiplications, and the Casts of their first operands.
    """

    result: gs.Tensor
    factors: tuple[_Factor, ...] = ()
    nodes: tuple[gs.Node, ...] = ()


def _multiply(graph: Graph, before: _Product) -> _Product | None:
    """Return the product of ``before`` and the factor that its only reader multiplies it by; None if there is none."""
    casts: list[gs.Node] = []
    operand = _skip_casts_behind(graph, before.result, casts)
    multiplication = sole_consumer(graph, operand, "Mul")
    if multiplication is None:
        return None
    others = [t for t in multiplication.inputs if t is not operand]
    if len(others) != 1:
        return None
    factors = (*before.factors, _read_factor(graph, others[0]))
    return _Product(multiplication.outputs[0], factors, (*before.nodes, *casts, multiplication))


def _finish(
    graph: Graph, found: _Product, activation: str, sources: tuple[gs.Tensor, ...], dtype: np.dtype | None
) -> NormGate | None:
    """Return the gate of a product, with the Casts back to ``dtype``; None if the product has another dtype."""
    nodes = [*found.nodes]
    product = found.result
    gate = next((t for t in sources if graph.dtype(t) == dtype), sources[-1])
    if graph.dtype(product) != dtype:
        product = _skip_casts_behind(graph, product, nodes, until=dtype)
    if graph.dtype(product) != dtype:
        return None
    nodes += [node for factor in found.factors for node in factor.nodes]
    unique = {id(node): node for node in nodes}.values()
    return NormGate(activation, gate, product, tuple(sorted(unique, key=graph.position_of)))


def _gate_of(factors: Sequence[_Factor]) -> tuple[gs.Tensor, ...]:
    """Return the sources of g if the product of the factors is SiLU(g); none otherwise."""
    activations = sorted(factor.activation for factor in factors)
    first = factors[0].sources
    if activations == ["SiLU"] or (activations == ["", "Sigmoid"] and first[-1] is factors[1].sources[-1]):
        return first
    return ()


def _read_factor(graph: Graph, t: gs.Tensor) -> _Factor:
    """Read a factor: SiLU(g), sigmoid(g), or g itself.

    A node that another node reads too stays in the graph, so its result is a tensor like any other.
    """
    casts: list[gs.Node] = []
    result = _skip_casts_before(graph, t, casts)
    multiplication = standard_producer(graph, result, "Mul")
    if multiplication is not None and sole_consumer(graph, result) is not None:
        factors = [_read_simple_factor(graph, operand) for operand in multiplication.inputs]
        sources = _gate_of(factors)
        if sources:
            return _Factor(sources, "SiLU", (*casts, multiplication, *(n for factor in factors for n in factor.nodes)))
    return _read_simple_factor(graph, t)


def _read_simple_factor(graph: Graph, t: gs.Tensor) -> _Factor:
    """Read a factor that is the result of one node, Sigmoid or Swish, or a tensor without an activation."""
    casts: list[gs.Node] = []
    result = _skip_casts_before(graph, t, casts)
    activation = standard_producer(graph, result, "Sigmoid", "Swish")
    if activation is None or sole_consumer(graph, result) is None:
        widenings = _widening_casts_before(graph, t)
        return _Factor((t, *(cast.inputs[0] for cast in widenings)), "", widenings)
    if activation.op == "Sigmoid":
        name = "Sigmoid"
    elif graph.attrs(activation).get("alpha", 1.0) == 1.0:
        name = "SiLU"
    else:
        return _Factor((t,), "", ())
    argument = activation.inputs[0]
    widenings = _widening_casts_before(graph, argument)
    sources = (argument, *(cast.inputs[0] for cast in widenings))
    return _Factor(sources, name, (activation, *casts, *widenings))


def _skip_casts_behind(graph: Graph, t: gs.Tensor, nodes: list[gs.Node], *, until: np.dtype | None = None) -> gs.Tensor:
    """Return the tensor after the Casts to floating types that alone read ``t``, and append these to ``nodes``.

    Args:
        until: dtype at which to stop; None for none.
    """
    cast = sole_consumer(graph, t, "Cast")
    while cast is not None and _is_float_tensor(graph, cast.outputs[0]):
        nodes.append(cast)
        t = cast.outputs[0]
        if graph.dtype(t) == until:
            break
        cast = sole_consumer(graph, t, "Cast")
    return t


def _skip_casts_before(graph: Graph, t: gs.Tensor, nodes: list[gs.Node]) -> gs.Tensor:
    """Return the tensor before the Casts from floating types that only the next node reads."""
    cast = standard_producer(graph, t, "Cast")
    while cast is not None and _is_float_tensor(graph, cast.inputs[0]) and sole_consumer(graph, t) is not None:
        nodes.append(cast)
        t = cast.inputs[0]
        cast = standard_producer(graph, t, "Cast")
    return t


def strip_widening_casts(graph: Graph, t: gs.Tensor) -> gs.Tensor:
    """Return the tensor before the Casts to wider types that compute ``t``.

    Returns:
        ``t`` itself without such a Cast.
    """
    casts = _widening_casts_before(graph, t)
    if casts:
        source: gs.Tensor = casts[-1].inputs[0]
        return source
    return t


def _widening_casts_before(graph: Graph, t: gs.Tensor) -> tuple[gs.Node, ...]:
    """Return the Casts to wider types, which lose nothing, that compute ``t``; the last one first."""
    casts: list[gs.Node] = []
    cast = standard_producer(graph, t, "Cast")
    while cast is not None and _widens(graph, cast):
        casts.append(cast)
        cast = standard_producer(graph, cast.inputs[0], "Cast")
    return tuple(casts)


def _widens(graph: Graph, cast: gs.Node) -> bool:
    source, target = graph.dtype(cast.inputs[0]), graph.dtype(cast.outputs[0])
    if source is None or target is None or not is_float_dtype(source):
        return False
    return source.itemsize < target.itemsize


def _is_float_tensor(graph: Graph, t: gs.Tensor) -> bool:
    dtype = graph.dtype(t)
    return dtype is not None and is_float_dtype(dtype)
