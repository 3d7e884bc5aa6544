"""Refuse files that ONNX's checker accepts but no later step can read. Each error names the faulty part.

These checks run when a file is opened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]

from ..errors import GraphError
from .attribute_checks import require_attributes, require_stated_attributes
from .proto_traversal import FunctionKey, function_key, functions_by_key, iter_subgraphs, nodes_with_bodies
from .sparse_tensors import require_small_sparse_tensors
from .weight_serialization import element_bits

_TYPES = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}
# Types that store two numbers for each element: real and imaginary part.
_WIDE = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
# Maximum number of dims of a numpy array.
_MOST_RANK = 64
# Maximum product of a tensor's sizes other than 0. numpy computes the product of these sizes and the bytes of an
# element (at most 16) as int64, even if another size is 0.
_MOST_PLACES = 2**59
# Maximum number of characters of a name. Every table, error and key repeats names, and onnx compares names in time
# quadratic in their length.
_LONGEST_NAME = 2**16
# Text fields that are not names, so their length is not limited. ``value`` is a metadata value, which may contain a
# long record.
_UNNAMED = frozenset({"doc_string", "value"})
# Maximum number of nodes after all function calls are inlined. 40 functions that each call the previous function twice
# would make 2**40 nodes.
_MOST_NODES = 2**18
# Count that exporters write for a Loop that ends only by its condition.
_ENDLESS = 2**63 - 1
# Maximum number of iterations of a Loop that no condition ends earlier. At a microsecond each, they take over an hour.
_MOST_ROUNDS = 2**32
# Nodes are counted only up to this number, because the exact number may have as many digits as the file has bytes.
_COUNTED = 2**62


def require_wellformed(
    proto: onnx.ModelProto, bodies: Sequence[onnx.GraphProto | onnx.FunctionProto], tensors: Iterable[onnx.TensorProto]
) -> None:
    """Check texts, types, tensors, opsets, attributes, functions and loops of a model.

    Texts must be UTF-8, types must exist, and tensors must contain as much data as their shape requires. Functions must
    not call themselves, and their calls must not multiply to too many nodes. The data of external tensors is not
    checked.

    Args:
        bodies: all graphs and functions of the model.
        tensors: all tensors of the model.

    Raises:
        GraphError: a check fails.
    """
    _require_valid_texts(proto)
    for tensor in tensors:
        _require_complete_tensor(tensor)
    for holder in (proto, *proto.functions):
        # The same entry may occur twice, because onnx.compose writes duplicates.
        stated = {(o.domain if o.domain != "ai.onnx" else "", o.version) for o in holder.opset_import}
        domains = [domain for domain, _ in stated]
        if (
            low := next((o.version for o in holder.opset_import if o.domain in ("", "ai.onnx") and o.version < 1), None)
        ) is not None:
            raise GraphError(f"the file declares opset {low}; opsets start at 1")
        if (twice := next((d for d, count in Counter(domains).items() if count > 1), None)) is not None:
            raise GraphError(f"the domain {twice!r} has two opsets, and readers disagree on which one counts")
    for body in bodies:
        _require_known_types(body)
        require_attributes(body.node)
    require_stated_attributes(nodes_with_bodies(proto.graph.node))
    require_small_sparse_tensors(proto)
    require_termination(proto)


def require_termination(proto: onnx.ModelProto) -> None:
    """Check that a runtime would reach its first result in reasonable time.

    The check uses the numbers of function calls and of Loop iterations that the file itself states. Numbers that depend
    on data are not checked.

    Raises:
        GraphError: a function calls itself, the calls make too many nodes, or a Loop has too many iterations or no end.
    """
    _require_bounded_calls(proto)
    for holder in (proto.graph, *proto.functions):
        _require_bounded_loops(holder, _constant_scalars(holder), 1)


def _require_valid_texts(proto: onnx.ModelProto) -> None:
    """Check that texts are UTF-8 and names are not too long. Protobuf returns invalid UTF-8 as bytes.

    Raises:
        GraphError: a text is not UTF-8, or a name is longer than `_LONGEST_NAME`.
    """
    stack: list[Any] = [proto]
    while stack:
        message = stack.pop()
        texts: list[str | bytes] = []
        # Tensors are handled separately, because ListFields would copy their data.
        if isinstance(message, onnx.TensorProto):
            texts = [message.name, message.doc_string]
            _require_short_names([message.name])
        else:
            for field, value in message.ListFields():
                if field.type == field.TYPE_STRING:
                    if isinstance(value, str | bytes):
                        told = [value]
                    else:
                        told = value
                    texts.extend(told)
                    if field.name not in _UNNAMED:
                        _require_short_names(told)
                elif field.type == field.TYPE_MESSAGE:
                    stack.extend([value] if isinstance(value, Message) else value)
        if (wrong := next((text for text in texts if isinstance(text, bytes)), None)) is not None:
            kind = message.DESCRIPTOR.name.removesuffix("Proto")
            raise GraphError(
                f"a text in a {kind} of the file is not UTF-8, which ONNX requires, but {wrong[:40]!r}; the file is "
                "damaged"
            )


def _require_short_names(names: Iterable[str | bytes]) -> None:
    for name in names:
        if len(name) > _LONGEST_NAME:
            raise GraphError(
                f"the name {name[:40]!r}… in the file has {len(name)} characters; at most {_LONGEST_NAME} are read"
            )


def _require_complete_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.name:
        title = f"the weight {tensor.name!r}"
    else:
        title = "a constant"
    if tensor.data_type not in _TYPES:
        raise GraphError(f"{title} has the type {tensor.data_type}, which ONNX does not have; the file is damaged")
    if min(tensor.dims, default=0) < 0 or len(tensor.dims) > _MOST_RANK:
        shape = list(tensor.dims)[: _MOST_RANK + 1]
        raise GraphError(
            f"{title} has the shape {shape}; sizes can't be negative, and at most {_MOST_RANK} sizes are read"
        )
    if 0 in tensor.dims and (most := math.prod(size or 1 for size in tensor.dims)) >= _MOST_PLACES:
        raise GraphError(
            f"{title} has the shape {list(tensor.dims)}, whose nonzero sizes make {most} elements; numpy supports up "
            f"to {_MOST_PLACES - 1}"
        )
    if tensor.HasField("segment"):
        raise GraphError(f"{title} is one segment of a tensor, which no runtime reads; store it whole")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    elements = math.prod(tensor.dims)
    bits = element_bits(tensor.data_type)
    if tensor.HasField("raw_data"):
        needed = math.ceil(elements * bits / 8)
        given = len(tensor.raw_data)
        if tensor.data_type == onnx.TensorProto.STRING or given != needed:
            raise GraphError(
                f"{title} of shape {list(tensor.dims)} needs {needed} bytes but holds {given}; the file is damaged"
            )
        return
    needed = math.ceil(elements * min(bits, 8) / 8) * (2 if tensor.data_type in _WIDE else 1)
    given = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
    if given != needed:
        raise GraphError(
            f"{title} of shape {list(tensor.dims)} needs {needed} numbers but holds {given}; the file is damaged"
        )


def _require_known_types(body: onnx.GraphProto | onnx.FunctionProto) -> None:
    for value in (
        (*body.input, *body.output, *body.value_info) if isinstance(body, onnx.GraphProto) else body.value_info
    ):
        kind = value.type.tensor_type
        if kind.elem_type not in _TYPES | {onnx.TensorProto.UNDEFINED}:
            raise GraphError(
                f"{value.name!r} has the type {kind.elem_type}, which ONNX does not have; the file is damaged"
            )
        if len(kind.shape.dim) > _MOST_RANK:
            raise GraphError(f"{value.name!r} has {len(kind.shape.dim)} dims; at most {_MOST_RANK} are read")


def _require_bounded_calls(proto: onnx.ModelProto) -> None:
    functions = functions_by_key(proto)
    if not functions:
        return
    for body in (proto.graph, *proto.functions):
        _require_matching_arity(body, functions)
    called = {key: list(_iter_function_calls(f, functions)) for key, f in functions.items()}
    size = {key: sum(1 for _ in nodes_with_bodies(f.node)) for key, f in functions.items()}
    done: dict[FunctionKey, int] = {}
    for first in functions:
        if first not in done:
            path = [(first, iter(called[first]))]
        else:
            path = []
        open_ = {first}
        while path:
            key, rest = path[-1]
            following = next((k for k in rest if k not in done), None)
            if following is None:
                done[key] = min(size[key] + sum(done[k] for k in called[key]), _COUNTED)
                open_.discard(key)
                path.pop()
            elif following in open_:
                raise GraphError(
                    f"the function {following[1]!r} calls itself through {key[1]!r}, which ONNX forbids: the calls "
                    "never end"
                )
            else:
                open_.add(following)
                path.append((following, iter(called[following])))
    total = sum(done[key] for key in _iter_function_calls(proto.graph, functions))
    if total > _MOST_NODES:
        if total < _COUNTED:
            count = str(total)
        else:
            count = f"more than {_COUNTED}"
        raise GraphError(f"the file's functions expand to {count} nodes; at most {_MOST_NODES} are read")


def _require_matching_arity(
    body: onnx.GraphProto | onnx.FunctionProto, functions: dict[FunctionKey, onnx.FunctionProto]
) -> None:
    for node in nodes_with_bodies(body.node):
        f = functions.get(function_key(node))
        if f is not None and (len(node.input) > len(f.input) or len(node.output) > len(f.output)):
            given = f"{len(node.input)} inputs and {len(node.output)} outputs"
            wanted = f"{len(f.input)} and {len(f.output)}"
            raise GraphError(f"{node.op_type} {node.name!r} calls the file's function with {given}, which has {wanted}")


def _iter_function_calls(
    body: onnx.GraphProto | onnx.FunctionProto, functions: dict[FunctionKey, onnx.FunctionProto]
) -> Iterator[FunctionKey]:
    keys = map(function_key, nodes_with_bodies(body.node))
    return (key for key in keys if key in functions)


def _constant_scalars(holder: onnx.GraphProto | onnx.FunctionProto) -> dict[str, int]:
    """Collect single INT64 and BOOL constants of a graph or function and its bodies.

    Returns:
        name → value, without constants that a caller may replace and without external constants.
    """
    bodies = [holder, *(body for node in holder.node for body in iter_subgraphs(node))]
    scalars = {t.name: t for body in bodies if isinstance(body, onnx.GraphProto) for t in body.initializer}
    scalars |= {
        n.output[0]: a.t
        for body in bodies
        for n in body.node
        if n.op_type == "Constant"
        for a in n.attribute
        if a.name == "value"
    }
    for value in holder.input if isinstance(holder, onnx.GraphProto) else ():
        scalars.pop(value.name, None)
    kinds = (onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
    single = {name: t for name, t in scalars.items() if t.data_type in kinds and math.prod(t.dims) == 1}
    return {
        name: int(onnx.numpy_helper.to_array(t).item())
        for name, t in single.items()
        if t.data_location != onnx.TensorProto.EXTERNAL
    }


def _require_bounded_loops(body: onnx.GraphProto | onnx.FunctionProto, known: dict[str, int], around: int) -> None:
    """Check the number of iterations of each Loop in ``body``. For nested Loops, the numbers are multiplied.

    Args:
        known: name of a constant scalar -> its value.
        around: minimum number of times that ``body`` itself runs; 0 if the number depends on data.
    """
    for node in body.node:
        rounds = around * (_loop_rounds(node, known) if node.op_type == "Loop" else 1)
        if rounds > _MOST_ROUNDS:
            if rounds >= _ENDLESS:
                count = "endlessly"
            else:
                count = f"{rounds} iterations"
            loop = f"the Loop {node.name or node.output[0]!r}"
            raise GraphError(
                f"{loop} runs {count}, and nothing in it ends it earlier; at most {_MOST_ROUNDS} iterations are run"
            )
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _require_bounded_loops(inner, known, rounds if node.op_type == "Loop" else 0)


def _loop_rounds(loop: onnx.NodeProto, known: dict[str, int]) -> int:
    """Return the number of iterations that a Loop certainly makes; 0 if its count or its condition is computed."""
    count, condition = [*loop.input, "", ""][:2]
    body = next((a.g for a in loop.attribute if a.name == "body"), None)
    if body is None or not body.output or len(body.input) < 2 or (condition and not known.get(condition)):
        return 0
    copied = {n.output[0]: n.input[0] for n in body.node if n.op_type == "Identity" and n.input and n.output}
    goes_on = body.output[0].name
    while goes_on in copied:
        goes_on = copied.pop(goes_on)
    if goes_on != body.input[1].name and not known.get(goes_on):
        return 0
    if count:
        return known.get(count, 0)
    return _ENDLESS
