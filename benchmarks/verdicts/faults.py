"""Plant one of six faults into a copy of a right file.

A planter yields candidates in a random order; the judge takes the first one that runs, keeps the shapes and can be
observed. ``names`` are the nodes (with their outputs) and weights; ``bisect`` must name one of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

Nodes = Sequence[onnx.NodeProto]
MOVED, TIMES = 1e-3, 10.0
# An added scalar in this range is treated as an epsilon, which stabilizes a division, a root or a logarithm.
EPSILONS = (1e-13, 2e-2)


@dataclass(frozen=True)
class Right:
    """Facts about the right file.

    Attributes:
        batch: the example's batch.
        kinds: element types of tensors that inference finds.
    """

    batch: int
    kinds: Mapping[str, int]

    def is_float32(self, name: str) -> bool:
        """Check the type of a tensor.

        Returns:
            true if it is known to be float32.
        """
        return self.kinds.get(name) == TensorProto.FLOAT


@dataclass(frozen=True)
class Planted:
    """Faulty file, its fault in words, and the names that identify it."""

    proto: onnx.ModelProto
    words: str
    names: frozenset[str]


Planter = Callable[[onnx.ModelProto, random.Random, Right], Iterator[Planted]]


def copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model.

    Returns:
        the copy.
    """
    return onnx.ModelProto.FromString(proto.SerializeToString())


def _names(*nodes: onnx.NodeProto) -> frozenset[str]:
    return frozenset(n for node in nodes for n in (node.name, *node.output) if n)


def _shuffled(count: int, draw: random.Random) -> list[int]:
    order = list(range(count))
    draw.shuffle(order)
    return order


def _users(nodes: Nodes, name: str) -> list[onnx.NodeProto]:
    return [n for n in nodes if name in n.input]


# ------------------------------------------------------------------ one weight


def _floats(tensors: Sequence[TensorProto]) -> list[int]:
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
    return [i for i, t in enumerate(tensors) if t.data_type in kinds and np.prod(t.dims, dtype=int) >= 2]


def weight(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    """Move the largest element of one weight by 1e-3 of its size.

    Yields:
        candidates.
    """
    found = _floats(proto.graph.initializer)
    draw.shuffle(found)
    for index in found:
        made = copied(proto)
        tensor = made.graph.initializer[index]
        if _move(tensor):
            users = _users(made.graph.node, tensor.name)
            yield Planted(made, f"weight {tensor.name}", _names(*users) | {tensor.name})


def _move(tensor: TensorProto) -> bool:
    """Move the largest element; return false if the type can't represent the difference."""
    value = numpy_helper.to_array(tensor).copy()
    place = int(np.argmax(np.abs(value)))
    before = value.flat[place]
    value.flat[place] = before * (1 + MOVED)
    if not np.isfinite(value.flat[place]) or value.flat[place] == before:
        return False
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return True


# ------------------------------------------------------------------ epsilon


def epsilon(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    """Multiply one epsilon, an attribute or a small constant that is added, by ten.

    Yields:
        candidates.
    """
    for index in _shuffled(len(proto.graph.node), draw):
        made = copied(proto)
        if _widen(made.graph.node[index], made.graph):
            yield Planted(made, f"epsilon of {_words(made.graph.node[index])}", _names(made.graph.node[index]))


def _words(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or node.output[0]}"


def _widen(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    for attribute in node.attribute:
        if attribute.name == "epsilon":
            attribute.f *= TIMES
            return True
    if node.op_type == "BatchNormalization":
        # Without the attribute, epsilon has the standard's default.
        node.attribute.append(helper.make_attribute("epsilon", 1e-5 * TIMES))
        return True
    if node.op_type not in ("Add", "Max", "Clip"):
        return False
    for place, name in enumerate(node.input):
        value = _constant(graph, name)
        if value is None or value.size != 1 or not EPSILONS[0] < float(value.reshape(())) < EPSILONS[1]:
            continue
        own = f"{name}_times_ten"
        graph.initializer.append(numpy_helper.from_array((value * TIMES).astype(value.dtype), own))
        node.input[place] = own
        return True
    return False


def _constant(graph: onnx.GraphProto, name: str) -> np.ndarray | None:
    for tensor in graph.initializer:
        if tensor.name == name:
            return numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output and node.attribute[0].name == "value":
            return numpy_helper.to_array(node.attribute[0].t)
    return None


# ------------------------------------------------------------------ another batch


def other_batch(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    """Scale one tensor by batch / (the example's batch), like a divisor that was recorded at the example's batch.

    Yields:
        candidates.
    """
    first = proto.graph.input[0]
    dims = first.type.tensor_type.shape.dim
    if not dims or dims[0].HasField("dim_value"):
        return
    for index in _shuffled(len(proto.graph.node), draw):
        node = proto.graph.node[index]
        if len(node.output) != 1 or not right.is_float32(node.output[0]):
            continue
        yield _scaled(copied(proto), index, first.name, right.batch)


def _scaled(made: onnx.ModelProto, index: int, first: str, batch: int) -> Planted:
    graph = made.graph
    node = graph.node[index]
    kept = node.output[0]
    node.output[0] = f"{kept}_before"
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "planted_zero"))
    graph.initializer.append(numpy_helper.from_array(np.array(batch, np.float32), "planted_batch"))
    added = [
        helper.make_node("Shape", [first], ["planted_shape"], "planted_shape_node"),
        helper.make_node("Gather", ["planted_shape", "planted_zero"], ["planted_size"], "planted_gather_node"),
        helper.make_node("Cast", ["planted_size"], ["planted_float"], "planted_cast_node", to=TensorProto.FLOAT),
        helper.make_node("Div", ["planted_float", "planted_batch"], ["planted_ratio"], "planted_div_node"),
        helper.make_node("Mul", [f"{kept}_before", "planted_ratio"], [kept], "planted_mul_node"),
    ]
    nodes = [*graph.node[: index + 1], *added, *graph.node[index + 1 :]]
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    return Planted(made, f"{kept} scaled by batch / {batch}", _names(*added))


def kinds_of(proto: onnx.ModelProto) -> dict[str, int]:
    """Infer the element types of the main graph's tensors.

    Returns:
        name -> element type, as far as inference finds it.
    """
    graph = onnx.shape_inference.infer_shapes(proto).graph
    return {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}


# ------------------------------------------------------------------ one body


def body(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    """Move a weight that a body of If, Loop, Scan or a function reads, or scale one of its tensors by 1 + 1e-3.

    Yields:
        candidates.
    """
    for number in range(len(_bodies(proto))):
        _, nodes = _bodies(proto)[number]
        for index in _shuffled(len(nodes), draw):
            made = copied(proto)
            names, own = _bodies(made)[number]
            words, before = f"in a body: {_words(own[index])}", {name for n in own for name in _names(n)}
            if _scale_constant(own[index]):
                yield Planted(made, words, names | _names(own[index]))
            elif _scale_output(own[index], own, index):
                added = {name for n in own for name in _names(n)} - before
                yield Planted(made, words, names | _names(own[index]) | added)


def _scale_constant(node: onnx.NodeProto) -> bool:
    if node.op_type != "Constant" or node.attribute[0].name != "value":
        return False
    tensor = node.attribute[0].t
    return tensor.data_type == TensorProto.FLOAT and bool(np.all(numpy_helper.to_array(tensor) != 0)) and _move(tensor)


_FLOAT_OPS = {
    *("MatMul", "Gemm", "Conv", "Tanh", "Sigmoid", "Relu", "Sqrt", "Pow", "Exp", "Div", "LSTM", "GRU", "Softmax"),
    *("ReduceMean", "LayerNormalization", "BatchNormalization", "GlobalAveragePool", "InstanceNormalization"),
}


def _scale_output(node: onnx.NodeProto, nodes: onnx.GraphProto | Nodes, index: int) -> bool:
    """Add a Mul by 1.001 after ``node``."""
    if node.op_type not in _FLOAT_OPS or not node.output:
        return False
    kept = node.output[0]
    node.output[0] = f"{kept}_before"
    scale = numpy_helper.from_array(np.array(1 + MOVED, np.float32))
    constant = helper.make_node("Constant", [], [f"{kept}_scale"], f"{kept}_scale_node", value=scale)
    scaled = helper.make_node("Mul", [f"{kept}_before", f"{kept}_scale"], [kept], f"{kept}_planted_mul")
    every = [onnx.NodeProto.FromString(n.SerializeToString()) for n in (*nodes[: index + 1], constant, scaled)]
    every += [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes[index + 1 :]]
    del nodes[:]  # type: ignore[union-attr, arg-type]
    nodes.extend(every)  # type: ignore[union-attr]
    return True


def _bodies(proto: onnx.ModelProto) -> list[tuple[frozenset[str], onnx.GraphProto]]:
    """Return the node lists of all bodies, each with the names of the main graph's node that runs it."""
    found: list[tuple[frozenset[str], onnx.GraphProto]] = []
    for node in proto.graph.node:
        for graph in _graphs(node):
            found.append((_names(node), graph.node))
    for function in proto.functions:
        callers = [n for n in proto.graph.node if (n.domain, n.op_type) == (function.domain, function.name)]
        found.append((_names(*callers), function.node))
    return found


def _graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
            for inner in attribute.g.node:
                yield from _graphs(inner)


# ------------------------------------------------------------------ an axis


def axis(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    """Swap two axes of a Transpose, or use another axis in a reduction, a Softmax, a Concat or a norm.

    Yields:
        candidates.
    """
    for index in _shuffled(len(proto.graph.node), draw):
        node = proto.graph.node[index]
        for number in range(6):
            made = copied(proto)
            words = _turn(made.graph.node[index], made.graph, number)
            if words:
                yield Planted(made, f"{words} of {_words(node)}", _names(made.graph.node[index]))


_AXIS = {"Softmax", "LogSoftmax", "Concat", "ArgMax", "ArgMin", "LpNormalization", "Gather", "Flatten", "TopK"}


def _turn(node: onnx.NodeProto, graph: onnx.GraphProto, number: int) -> str:
    """Change an axis of ``node`` in the ``number``-th way; return "" if there is none."""
    attributes = {a.name: a for a in node.attribute}
    if node.op_type == "Transpose" and "perm" in attributes:
        perm = list(attributes["perm"].ints)
        swaps = [(i, j) for i in range(len(perm)) for j in range(i)]
        if number >= len(swaps):
            return ""
        i, j = swaps[-1 - number]
        perm[i], perm[j] = perm[j], perm[i]
        attributes["perm"].ints[:] = perm
        return f"perm {perm}"
    if node.op_type in _AXIS and number < 3:
        before = attributes["axis"].i if "axis" in attributes else -1
        after = [a for a in (-2, 1, 2, 0, -1) if a != before][number]
        if "axis" in attributes:
            attributes["axis"].i = after
        else:
            node.attribute.append(helper.make_attribute("axis", after))
        return f"axis {after}"
    if node.op_type.startswith("Reduce") and number < 3:
        return _turn_reduction(node, graph, attributes, number)
    return ""


def _turn_reduction(
    node: onnx.NodeProto, graph: onnx.GraphProto, attributes: dict[str, AttributeProto], number: int
) -> str:
    if "axes" in attributes:
        before = list(attributes["axes"].ints)
    elif len(node.input) > 1 and (value := _constant(graph, node.input[1])) is not None:
        before = [int(a) for a in np.ravel(value)]
    else:
        return ""
    if not before:
        return ""
    others = [a for a in (-2, 1, 2, -1) if a not in before]
    if number >= len(others):
        return ""
    after = [others[number], *before[1:]]
    if "axes" in attributes:
        attributes["axes"].ints[:] = after
    else:
        own = f"{node.output[0]}_other_axes"
        graph.initializer.append(numpy_helper.from_array(np.array(after, np.int64), own))
        node.input[1] = own
    return f"axes {after}"


# ------------------------------------------------------------------ precision


def precision(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    """Round one weight to bfloat16, or compute one linear node in float16.

    Yields:
        candidates.
    """
    makers: list[Planter] = [_rounded, _narrow]
    draw.shuffle(makers)
    if any(t.data_type == TensorProto.FLOAT16 for t in proto.graph.initializer):
        return
    for maker in makers:
        yield from maker(proto, draw, right)


def _rounded(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    found = [i for i in _floats(proto.graph.initializer) if proto.graph.initializer[i].data_type == TensorProto.FLOAT]
    draw.shuffle(found)
    for index in found:
        made = copied(proto)
        tensor = made.graph.initializer[index]
        value = numpy_helper.to_array(tensor)
        rounded = value.astype(ml_dtypes.bfloat16).astype(np.float32)
        if np.array_equal(rounded, value):
            continue
        tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
        yield Planted(
            made, f"weight {tensor.name} in bfloat16", _names(*_users(made.graph.node, tensor.name)) | {tensor.name}
        )


def _narrow(proto: onnx.ModelProto, draw: random.Random, right: Right) -> Iterator[Planted]:
    for index in _shuffled(len(proto.graph.node), draw):
        if proto.graph.node[index].op_type not in ("MatMul", "Conv", "Gemm", "ConvTranspose", "Softmax", "Tanh"):
            continue
        made = copied(proto)
        node = made.graph.node[index]
        if not right.is_float32(node.output[0]):
            continue
        before = []
        for place, name in enumerate(node.input):
            if name:
                before.append(helper.make_node("Cast", [name], [f"{name}_half{place}"], f"planted_cast{place}", to=10))
                node.input[place] = f"{name}_half{place}"
        kept = node.output[0]
        node.output[0] = f"{kept}_half"
        after = helper.make_node("Cast", [f"{kept}_half"], [kept], "planted_cast_back", to=TensorProto.FLOAT)
        nodes = [*made.graph.node[:index], *before, node, after, *made.graph.node[index + 1 :]]
        nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        names = _names(node, *before, after)
        words = f"{_words(node)} in float16"
        del made.graph.node[:]
        made.graph.node.extend(nodes)
        yield Planted(made, words, names)


FAULTS: dict[str, Planter] = {
    "weight moved by 1e-3": weight,
    "epsilon times ten": epsilon,
    "wrong at another batch": other_batch,
    "one body wrong": body,
    "an axis swapped": axis,
    "precision dropped in one layer": precision,
}
