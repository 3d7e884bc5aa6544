"""Write nodes in the form that their op has at an older opset.

Each adapter takes a `NodeWriter`, writes the older nodes with it, and raises RefusedError if they have no equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ..dtypes import is_float_dtype
from ..evaluate import evaluator
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_value, attribute_values, unique_name
from .dims import Types
from .opset_forms import Opsets, build_refusal, describe_misfit, has_op, is_newer
from .region import RefusedError

_INT64_MAX = np.iinfo(np.int64).max
# Ops whose elements are elements of their first input, or products of them
_SELECTING = ("Cast", "Gather", "Identity", "ReduceProd", "Reshape", "Slice", "Squeeze", "Unsqueeze")
_FLOATS8 = frozenset(value for name, value in TensorProto.DataType.items() if name.startswith("FLOAT8"))
# Exceptions for a tensor that can't be computed from constants
_NOT_CONSTANT = (KeyError, evaluator.UnsupportedOp, ValueError, TypeError, IndexError)


class NodeWriter:
    """Write the nodes that replace one node.

    Attributes:
        node: the node.
        newer, older: opset of the node, and opset of the written nodes.
        types: types of the tensors.
        nodes, initializers: what was written.
        computed: constant inputs that other nodes compute.
    """

    def __init__(
        self,
        node: onnx.NodeProto,
        newer: int,
        older: int,
        types: Types,
        constants: Mapping[str, onnx.TensorProto],
        writers: Mapping[str, onnx.NodeProto],
        taken: set[str],
    ) -> None:
        self.node, self.newer, self.older, self.types = node, newer, older, types
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.computed: dict[str, np.ndarray] = {}
        self._constants, self._writers, self._taken = constants, writers, taken

    def __call__(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Write one node.

        Returns:
            the name of its output.
        """
        name = output or unique_name(f"{self.node.output[0]}_{op}", self._taken)
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def keep(self, inputs: Sequence[str] | None = None, **attributes: Any) -> None:
        """Write the node itself, with other inputs or attributes; an attribute None is removed."""
        made = onnx.NodeProto()
        made.CopyFrom(self.node)
        if inputs is not None:
            del made.input[:]
            made.input.extend(inputs)
        for name, value in attributes.items():
            for attribute in [a for a in made.attribute if a.name == name]:
                made.attribute.remove(attribute)
            if value is not None:
                made.attribute.append(onnx.helper.make_attribute(name, value))
        while made.input and not made.input[-1]:
            made.input.pop()
        self.nodes.append(made)

    def add_constant(self, value: Any, hint: str, dtype: Any = np.int64) -> str:
        """Write an initializer.

        Returns:
            its name.
        """
        name = unique_name(f"{self.node.output[0]}_{hint}", self._taken)
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def input_name(self, index: int) -> str:
        """Return the name of an input; "" if it is omitted."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def attribute(self, name: str) -> Any:
        """Return an attribute, or else its default; None if it has no default."""
        known = onnx.defs.get_schema(self.node.op_type, self.newer).attributes
        if name in known and known[name].default_value.name:
            implied = onnx.helper.get_attribute_value(known[name].default_value)
        else:
            implied = None
        return attribute_value(self.node, name, implied)

    def has_no_zero(self, name: str) -> bool:
        """Return whether no element of a shape can be 0, if every size of a tensor is 1 or more."""
        constant = self._constants.get(name)
        if constant is not None:
            return bool((onnx.numpy_helper.to_array(constant) != 0).all())
        writer = self._writers.get(name)
        if writer is None or not is_standard(writer):
            return False
        if writer.op_type in ("Concat", "Mul"):
            return all(map(self.has_no_zero, writer.input))
        return writer.op_type == "Shape" or (
            writer.op_type in _SELECTING and bool(writer.input) and self.has_no_zero(writer.input[0])
        )

    def constant(self, index: int) -> np.ndarray | None:
        """Return the value of a constant input.

        Returns:
            the value; None if the input is omitted.

        Raises:
            RefusedError: the input is not a constant.
        """
        name = self.input_name(index)
        if not name:
            return None
        try:
            value = self._evaluate_constant(name)
        except _NOT_CONSTANT as error:
            formal = onnx.defs.get_schema(self.node.op_type, self.newer).inputs[index].name
            raise self.refusal(f"its input {formal!r} is not a constant") from error
        if name not in self._constants:
            self.computed[name] = value
        return value

    def _evaluate_constant(self, name: str) -> np.ndarray:
        """Return the value of a tensor that is computed from constants alone.

        Raises:
            KeyError: it depends on data.
            UnsupportedOp, ValueError, TypeError, IndexError: a node can't be evaluated.
        """
        if name in self._constants:
            return np.asarray(onnx.numpy_helper.to_array(self._constants[name]))
        node = self._writers[name]
        values = [self._evaluate_constant(i) if i else None for i in node.input]
        made = evaluator.evaluate_node(
            node.op_type,
            [v.astype(np.float64) if v is not None and v.dtype.kind == "f" else v for v in values],
            {k: _array_of(v) for k, v in attribute_values(node).items()},
            opset=self.newer,
            domain=node.domain,
            outputs=len(node.output),
        )
        return np.asarray(made[list(node.output).index(name)])

    def rank(self, index: int) -> int:
        """Return the rank of an input.

        Raises:
            RefusedError: it is unknown.
        """
        shape = self.types[self.input_name(index)][1]
        if shape is None:
            raise self.refusal(f"the rank of {self.input_name(index)!r} is unknown")
        return len(shape)

    def elem_type(self, index: int) -> int:
        """Return the elem_type of an input.

        Raises:
            RefusedError: it is unknown.
        """
        elem_type = self.types[self.input_name(index)][0]
        if elem_type is None:
            raise self.refusal(f"the type of {self.input_name(index)!r} is unknown")
        return elem_type

    def refusal(self, reason: str) -> RefusedError:
        """Build the error for a node whose form has no equal below its adapter's opset."""
        return build_refusal(self.node, self.older, reason, ADAPTERS[self.node.op_type].since)


def _array_of(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value


@dataclass(frozen=True)
class Adapter:
    """Way to write an op below an opset.

    Attributes:
        since: opset from which the op has the form that is rewritten.
        write: writes the older form with a `NodeWriter`.
    """

    since: int
    write: Callable[[NodeWriter], None]


def _write_reduction(w: NodeWriter) -> None:
    """Write the axes of a reduction as an attribute."""
    axes = w.constant(1)
    if axes is not None and axes.size:
        w.keep(w.node.input[:1], axes=[int(a) for a in axes], noop_with_empty_axes=None)
    elif not w.attribute("noop_with_empty_axes"):
        w.keep(w.node.input[:1], noop_with_empty_axes=None)
    else:
        # Without axes, each element is reduced alone.
        x, y = w.node.input[0], w.node.output[0]
        if w.node.op_type == "ReduceSumSquare":
            w("Mul", x, x, output=y)
        else:
            alone = {"ReduceL1": "Abs", "ReduceL2": "Abs", "ReduceLogSum": "Log"}
            w(alone.get(w.node.op_type, "Identity"), x, output=y)


def _write_pad(w: NodeWriter) -> None:
    """Write the pads of all axes."""
    axes = w.constant(3)
    if axes is None:
        w.keep()
        return
    rank = w.rank(0)
    places = [int(a) % rank for a in axes]
    if places == list(range(rank)):
        w.keep(w.node.input[:3])
        return
    pads = w.constant(1)
    assert pads is not None
    full = np.zeros((2, rank), np.int64)
    full[:, places] = pads.reshape(2, -1)
    w.keep([w.node.input[0], w.add_constant(full.reshape(-1), "pads"), w.input_name(2)])


def _write_split(w: NodeWriter) -> None:
    """Write the sizes of the parts: of n parts, each but the last has the size ⌈size / n⌉."""
    count = w.attribute("num_outputs")
    if count is None:
        w.keep()
        return
    x = w.node.input[0]
    shape = w.types[x][1]
    size = None if shape is None else shape[w.attribute("axis")]
    if isinstance(size, int):
        part = -(-size // count)
        sizes = [part] * (count - 1) + [size - part * (count - 1)]
        if sizes[-1] == part:
            w.keep(num_outputs=None)
        elif sizes[-1] >= 0:
            w.keep([x, w.add_constant(sizes, "split")], num_outputs=None)
        else:
            raise w.refusal(f"{size} elements can't be split into {count} parts of {part}")
        return
    length = w("Gather", w("Shape", x), w.add_constant([w.attribute("axis")], "axis"))
    below, parts = w.add_constant([count - 1], "most"), w.add_constant([count], "parts")
    part = w("Div", w("Add", length, below), parts)
    last = w("Sub", length, w("Mul", part, below))
    w.keep([x, w("Concat", *[part] * (count - 1), last, axis=0)], num_outputs=None)


def _write_shape(w: NodeWriter) -> None:
    """Write a Shape of some axes as a Slice of the whole shape."""
    start, end = w.attribute("start"), w.attribute("end")
    if start == 0 and end is None:
        w.keep(start=None)
        return
    starts = w.add_constant([start], "start")
    ends = w.add_constant([_INT64_MAX if end is None else end], "end")
    w("Slice", w("Shape", w.node.input[0]), starts, ends, output=w.node.output[0])


def _write_cast_like(w: NodeWriter) -> None:
    if w.attribute("saturate") == 0 and w.elem_type(1) in _FLOATS8:
        raise w.refusal("its saturate is 0")
    w("Cast", w.node.input[0], output=w.node.output[0], to=w.elem_type(1))


def _write_triangle(w: NodeWriter) -> None:
    """Write Trilu: an element of row i and column j is kept if j − i ≥ k (upper), or j − i ≤ k (lower)."""
    x = w.node.input[0]
    shape = w("Shape", x)
    zero, one = w.add_constant(0, "zero"), w.add_constant(1, "one")
    rows, columns = (w("Range", zero, w("Gather", shape, w.add_constant(axis, "axis")), one) for axis in (-2, -1))
    offset = w.input_name(1) and w("Reshape", w.input_name(1), w.add_constant([1], "scalar"))
    below = w("Unsqueeze", rows, w.add_constant([1], "axis"))
    first = w("Add", below, offset) if offset else below
    kept = w("GreaterOrEqual" if w.attribute("upper") else "LessOrEqual", columns, first)
    nothing = w.add_constant(0, "nothing", onnx.helper.tensor_dtype_to_np_dtype(w.elem_type(0)))
    w("Where", kept, x, nothing, output=w.node.output[0])


def _write_resize(w: NodeWriter) -> None:
    """Write the scales or sizes of all axes."""
    axes = w.attribute("axes")
    inputs = [w.input_name(i) for i in range(4)]
    if axes:
        rank = w.rank(0)
        places = [int(a) % rank for a in axes]
        if places != list(range(rank)):
            if w.attribute("coordinate_transformation_mode") == b"tf_crop_and_resize":
                raise w.refusal("its roi is given for some axes only")
            scales = w.constant(2)
            if scales is not None and scales.size:
                full = np.ones(rank)
                full[places] = scales
                inputs[2] = w.add_constant(full, "scales", np.float32)
            else:
                index = w.add_constant(places, "axes")
                inputs[3] = w("ScatterElements", w("Shape", inputs[0]), index, inputs[3])
    w.keep(inputs, axes=None)


def _write_average_pool(w: NodeWriter) -> None:
    """Refuse rounded-up sizes: opset 19 leaves out windows that begin in the padding at the end."""
    if w.attribute("ceil_mode"):
        raise w.refusal("its ceil_mode 1 had another meaning")
    w.keep()


def _write_grid_sample(w: NodeWriter) -> None:
    """Write the older names of the modes."""
    if w.rank(0) != 4:
        raise w.refusal("the opset samples images only")
    modes = {b"linear": "bilinear", b"cubic": "bicubic", b"nearest": "nearest"}
    w.keep(mode=modes[w.attribute("mode")])


def _write_reshape(w: NodeWriter) -> None:
    """Drop allowzero if the shape has no 0."""
    if w.attribute("allowzero") and not w.has_no_zero(w.input_name(1)):
        raise w.refusal("its allowzero is 1, and its shape may have a 0")
    w.keep(allowzero=None)


def _write_cast(w: NodeWriter) -> None:
    """Drop saturate and round_mode, which only 8-bit floats read."""
    if w.attribute("to") in _FLOATS8:
        w.keep()
    else:
        w.keep(saturate=None, round_mode=None)


def _write_batch_norm(w: NodeWriter) -> None:
    """Write a BatchNormalization of inference; the older op computes statistics if it has more outputs."""
    if w.attribute("training_mode") or any(w.node.output[1:]):
        raise w.refusal("it computes statistics of the batch (training_mode)")
    w.keep(training_mode=None)


def _write_roi_align(w: NodeWriter) -> None:
    """Drop the mode that the older op had; it is not the newer default."""
    mode = w.attribute("coordinate_transformation_mode")
    if mode != b"output_half_pixel":
        raise w.refusal(f"its coordinate_transformation_mode is {mode.decode()}")
    w.keep(coordinate_transformation_mode=None)


def _write_mod(w: NodeWriter) -> None:
    """Refuse a floored quotient of floats; the older op has it for integers only."""
    if not w.attribute("fmod") and is_float_dtype(onnx.helper.tensor_dtype_to_np_dtype(w.elem_type(0))):
        raise w.refusal("its fmod 0 needs integers")
    w.keep()


def _refuse_group_norm(w: NodeWriter) -> None:
    raise w.refusal("the opset has one scale for each group")


def _refuse_transform(w: NodeWriter) -> None:
    raise w.refusal("its axis had another default and was an attribute")


ADAPTERS: Mapping[str, Adapter] = {
    **dict.fromkeys(
        (
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceMax",
            "ReduceMean",
            "ReduceMin",
            "ReduceProd",
            "ReduceSumSquare",
        ),
        Adapter(18, _write_reduction),
    ),
    "AveragePool": Adapter(19, _write_average_pool),
    "BatchNormalization": Adapter(14, _write_batch_norm),
    "Cast": Adapter(19, _write_cast),
    "CastLike": Adapter(15, _write_cast_like),
    "DFT": Adapter(20, _refuse_transform),
    "GroupNormalization": Adapter(21, _refuse_group_norm),
    "GridSample": Adapter(20, _write_grid_sample),
    "Mod": Adapter(28, _write_mod),
    "Pad": Adapter(18, _write_pad),
    "Reshape": Adapter(14, _write_reshape),
    "Resize": Adapter(18, _write_resize),
    "RoiAlign": Adapter(16, _write_roi_align),
    "Shape": Adapter(15, _write_shape),
    "Split": Adapter(18, _write_split),
    "Trilu": Adapter(14, _write_triangle),
}
"""Op → opset of its newer form → how the form is written below this opset."""


def write_node(w: NodeWriter) -> None:
    adapter = ADAPTERS.get(w.node.op_type)
    if adapter is not None and w.older < adapter.since <= w.newer:
        adapter.write(w)
    else:
        w.keep()
    w.nodes = [_drop_implied_attributes(n, w.newer, w.older) for n in w.nodes]


def _drop_implied_attributes(node: onnx.NodeProto, newer: int, older: int) -> onnx.NodeProto:
    """Remove the attributes that the older op lacks, if they have the value that the older op implied."""
    if not has_op(node.op_type, older):
        return node
    known = onnx.defs.get_schema(node.op_type, older).attributes
    for attribute in [a for a in node.attribute if a.name not in known]:
        if _is_implied(node.op_type, attribute, newer):
            node.attribute.remove(attribute)
    return node


def _is_implied(op: str, attribute: onnx.AttributeProto, newer: int) -> bool:
    schema = onnx.defs.get_schema(op, newer)
    if attribute.ref_attr_name or attribute.name not in schema.attributes:
        return False
    value = onnx.helper.get_attribute_value(attribute)
    default = schema.attributes[attribute.name].default_value
    if attribute.name == "dilations":
        return all(dilation == 1 for dilation in value)
    return bool(default.name) and value == onnx.helper.get_attribute_value(default)


def is_same_form(node: onnx.NodeProto, opsets: Opsets) -> bool:
    """Return whether a node of a function, whose types are unknown, means the same at both opsets."""
    if not is_standard(node) or not is_newer(node, opsets):
        return True
    adapter = ADAPTERS.get(node.op_type)
    if adapter is not None and opsets.older < adapter.since <= opsets.newer:
        return False
    return not describe_misfit(node, opsets.older, Types())
