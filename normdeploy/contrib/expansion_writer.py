"""Write a foreign norm node as standard primitives of the file's opset.

Statistics of a 16-bit tensor are computed in float32, as by the runtimes that define these ops. Statistics of a wider
tensor are computed in the tensor's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import onnx

from ..graphs.dims import Dims, Types
from ..graphs.region import RefusedError
from ..norms.interpreter import Definition, Interpreter
from ..norms.norm_table import NormOp, OpOwner, rows_of_owner

Attrs = Mapping[str, Any]

_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_FLOATING = (*_NARROW, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
# Op → elem_type of its result, for ops whose result does not have the type of the first input.
_KINDS = {"Shape": onnx.TensorProto.INT64, "Equal": onnx.TensorProto.BOOL}
# Ops whose results have the rank of their first input.
_RANK_KEPT = ("Add", "Transpose")
# Op → first opset in which the axes are an input instead of an attribute.
_AXES_AS_INPUT = {"ReduceMean": 18, "ReduceSum": 13}
# Ops that normalize the sum of their first two inputs.
SKIP_NORMS = frozenset(op for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if row.inputs[1] == "residual")
# Lowest opset in which Add and Mul broadcast without attributes.
OLDEST = 7


class ExpansionWriter(Interpreter):
    """Write nodes one after the other, linked by the names of their tensors.

    Attributes:
        opset: opset that defines the node.
        written_opset: opset of the written nodes.
        nodes: the nodes written so far.
        initializers: the constants written so far.
        notes: notes for the report.
        alike: names of the written tensors whose shape is the shape of the foreign node's first output.
    """

    def __init__(
        self, node: onnx.NodeProto, opset: int, types: Types, taken: set[str], written_opset: int | None = None
    ) -> None:
        """Start an expansion of ``node``.

        Args:
            types: types and shapes of the file's tensors.
            taken: names that new tensors must not have. The names of new tensors are added to it.
            written_opset: opset of the written nodes; None for ``opset``.
        """
        self.node, self.opset, self.outputs = node, opset, len(node.output)
        self.written_opset = opset if written_opset is None else written_opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.notes: tuple[str, ...] = ()
        self.alike: list[str] = []
        self._types = types
        self._taken = taken
        self._kinds: dict[str, int] = {}
        self._ranks: dict[str, int] = {}
        self._ints: dict[tuple[int, ...], str] = {}

    def expand_definition(
        self, definition: Definition, attrs: Attrs, inputs: Sequence[str] = ()
    ) -> tuple[str | None, ...]:
        """Write the nodes of a definition and name its outputs as in the file.

        Args:
            inputs: tensor names; if empty, the foreign node's inputs are used.

        Returns:
            the outputs' temporary names, before they were renamed as in the file; None for an output that is not
            needed.
        """
        names = inputs or [self.input_name(i) for i in range(len(self.node.input))]
        results = definition(self, *(name or None for name in names), **attrs)
        if not isinstance(results, tuple):
            results = (results,)
        for i, name in enumerate(results):
            if name is not None:
                self._set_output(i, name)
        return results

    def input_name(self, index: int) -> str:
        """Look up the name of an input.

        Returns:
            the name, "" if the node omits it.
        """
        if index < len(self.node.input):
            return self.node.input[index]
        return ""

    def elem_type_of(self, t: str, *alike: str) -> int:
        """Find the floating element type of a tensor.

        Args:
            alike: tensors of the same type, which are tried if the type of ``t`` is unknown.

        Returns:
            ONNX's number of the type.

        Raises:
            RefusedError: the type is unknown or not floating.
        """
        kind = next((k for n in (t, *alike) if (k := self._kinds.get(n) or self._types[n][0])), None)
        if kind is None or kind not in _FLOATING:
            raise RefusedError(
                f"the type of {t!r} is {'unknown' if not kind else onnx.TensorProto.DataType.Name(kind)}: "
                "it must be a floating-point type"
            )
        return kind

    def learn_elem_type(self, t: str, *alike: str) -> None:
        """If the file does not state the type of ``t``, set it to the type of ``alike``.

        Raises:
            RefusedError: the type is unknown or not floating.
        """
        self._kinds[t] = self.elem_type_of(t, *alike)

    @staticmethod
    def statistics_elem_type(kind: int) -> int:
        """Choose the type in which statistics are computed.

        Returns:
            float32 for a 16-bit ``kind``, otherwise ``kind``.
        """
        if kind in _NARROW:
            return onnx.TensorProto.FLOAT
        return kind

    def shape_of(self, t: str) -> Dims:
        """Look up the shape of ``t``.

        Returns:
            its dims.

        Raises:
            RefusedError: even the rank is unknown.
        """
        shape = self._types[t][1]
        if shape is None:
            raise RefusedError(f"the rank of {t!r} is unknown")
        return shape

    def rank_of(self, x: str) -> int:
        """Look up the number of axes.

        Returns:
            the rank of ``x``.

        Raises:
            RefusedError: the rank is unknown.
        """
        if x in self._ranks:
            return self._ranks[x]
        return len(self.shape_of(x))

    def vector_length(self, t: str) -> int | None:
        """Look up the number of elements of a vector.

        Returns:
            the number, None if the file does not state it.
        """
        shape = self._types[t][1]
        if shape is not None and len(shape) == 1 and isinstance(shape[0], int):
            return shape[0]
        return None

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Write one node.

        Returns:
            the name of the result. It has the type of the first input, unless the op determines the type.
        """
        name = self._fresh_name(op)
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [name], name=name, **attributes))
        kind, shape = self._types[inputs[0]]
        kind = attributes.get("to") or _KINDS.get(op) or self._kinds.get(inputs[0], kind)
        if kind:
            self._kinds[name] = kind
        if op in _RANK_KEPT and (inputs[0] in self._ranks or shape is not None):
            self._ranks[name] = self.rank_of(inputs[0])
        return name

    def add_constant(self, values: object, kind: int, hint: str) -> str:
        """Write an initializer of type ``kind``.

        Returns:
            its name, derived from ``hint``.
        """
        name = self._fresh_name(hint)
        array = np.asarray(values).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        self._kinds[name] = kind
        return name

    def make_int64_vector(self, values: Sequence[int], hint: str) -> str:
        """Write an int64 initializer; equal vectors share one.

        Returns:
            its name.
        """
        key = tuple(values)
        if key not in self._ints:
            self._ints[key] = self.add_constant(np.array(values, dtype=np.int64), onnx.TensorProto.INT64, hint)
        return self._ints[key]

    def make_int32_scalar(self, value: int, name: str) -> str:
        return self.add_constant(value, onnx.TensorProto.INT32, name)

    def make_scalar(self, value: float, like: str) -> str:
        # Attributes are float32.
        return self.add_constant(np.float64(np.float32(value)), self.elem_type_of(like), "epsilon")

    def make_vector(self, values: Any, like: str, name: str, trailing: int = 0) -> str:
        array = np.asarray(values, dtype=np.float64).reshape(-1, *(1,) * trailing)
        return self.add_constant(array, self.statistics_elem_type(self.elem_type_of(like)), name)

    def wants_output(self, output: int) -> bool:
        return output < len(self.node.output) and bool(self.node.output[output])

    def refuse(self, reason: str) -> NoReturn:
        raise RefusedError(reason)

    def widen_for_statistics(self, x: str) -> str:
        return self._cast_to(x, self.statistics_elem_type(self.elem_type_of(x)))

    def cast_like(self, x: str, like: str) -> str:
        return self._cast_to(x, self.elem_type_of(like))

    def _cast_to(self, t: str, kind: int) -> str:
        own = self._kinds.get(t, self._types[t][0])
        if own == kind:
            return t
        return self("Cast", t, to=kind)

    def reduce(self, op: str, x: str, axes: Sequence[int], **attributes: Any) -> str:
        """Write a reduction, whose axes are an attribute or an input depending on the opset.

        Returns:
            the name of its result.
        """
        if self.written_opset < _AXES_AS_INPUT[op]:
            return self(op, x, axes=list(axes), **attributes)
        return self(op, x, self.make_int64_vector(axes, "axes"), **attributes)

    def reshape(self, t: str, shape: Sequence[int]) -> str:
        """Write a Reshape to ``shape``.

        Returns:
            the name of its result.
        """
        return self("Reshape", t, self.make_int64_vector(shape, "shape"))

    def reshape_like(self, y: str, x: str) -> str:
        return self("Reshape", y, self("Shape", x))

    def split_into_groups(self, x: str, groups: int) -> str:
        return self("Reshape", x, self.make_int64_vector([0, groups, -1], "groups"))

    def last_size_of(self, x: str) -> int:
        size = self.shape_of(x)[-1]
        if not isinstance(size, int):
            raise RefusedError(f"the last size of {x!r} is not static")
        return size

    def split_last_axis(self, x: str, size: int) -> str:
        shape = self.shape_of(x)
        last = shape[-1]
        if last == size:
            return x
        if not isinstance(last, int):
            parts = -1
        elif size < 1 or last % size:
            raise RefusedError(f"the last size {last} of {x!r} is not divisible by {size}")
        else:
            parts = last // size
        result = self.reshape(x, [*[0] * (len(shape) - 1), parts, size])
        self._ranks[result] = len(shape) + 1
        return result

    def join_last_axes(self, y: str, x: str) -> str:
        shape = self.shape_of(x)
        if isinstance(shape[-1], int):
            return self.reshape(y, [*[0] * (len(shape) - 1), shape[-1]])
        return self.reshape_like(y, x)

    def reshape_per_channel(self, v: str, x: str) -> str:
        return self.reshape(v, [-1, *(1,) * (self.rank_of(x) - 2)])

    def reshape_per_group(self, v: str, groups: int) -> str:
        return self.reshape(v, [-1, 1])

    def reshape_per_element(self, v: str, x: str, axes: Sequence[int]) -> str:
        """Reshape a vector to the sizes of ``x`` along ``axes``, which are the last axes of ``x``.

        Returns:
            the name of the result; ``v`` itself for one axis.

        Raises:
            RefusedError: there are several axes and one has a dynamic size.
        """
        if len(axes) == 1:
            return v
        sizes = []
        for dim in self.shape_of(x)[axes[0] :]:
            if not isinstance(dim, int):
                raise RefusedError(f"it normalizes over the dynamic size {dim}, so gamma can't be reshaped to it")
            sizes.append(dim)
        return self.reshape(v, sizes)

    def require_divisible_groups(self, x: str, axis: int, groups: int) -> None:
        """Check that the groups divide the channels along ``axis``.

        Raises:
            RefusedError: the groups don't divide the channels.
        """
        channels = self.shape_of(x)[axis]
        if groups < 1 or (isinstance(channels, int) and channels % groups):
            raise RefusedError(f"{channels} channels are not divisible into {groups} groups")

    def _set_output(self, index: int, t: str) -> None:
        """Rename ``t`` to output ``index`` of the foreign node if the node has that output."""
        if not self.wants_output(index):
            return
        name = self.node.output[index]
        for node in self.nodes:
            node.input[:] = [name if i == t else i for i in node.input]
            node.output[:] = [name if o == t else o for o in node.output]

    def _fresh_name(self, hint: str) -> str:
        stem = f"{self.node.output[0]}_{hint}"
        name = stem
        n = 1
        while name in self._taken:
            n += 1
            name = f"{stem}_{n}"
        self._taken.add(name)
        return name


@dataclass(frozen=True)
class ForeignOp:
    """Norm op of another tool, and how its nodes are written as standard nodes.

    Attributes:
        row: its row in the table of norm ops.
        check: raises RefusedError if the meaning of a node is ambiguous; it may add notes to the report.
        write: writes the nodes if the op's definition alone is not enough; None otherwise.
        ignored: attributes without meaning that a node may have.
    """

    row: NormOp
    check: Callable[[ExpansionWriter, Attrs], None] | None = None
    write: Callable[[ExpansionWriter, Attrs], None] | None = None
    ignored: frozenset[str] = frozenset()

    def expand(self, writer: ExpansionWriter, attrs: Attrs) -> None:
        """Write the writer's node as standard nodes.

        Raises:
            RefusedError: the node can't be written, or its meaning is not certain.
        """
        if self.check is not None:
            self.check(writer, attrs)
        if self.write is not None:
            self.write(writer, attrs)
            return
        assert self.row.definition is not None
        results = writer.expand_definition(self.row.definition, attrs)
        if self.row.op in SKIP_NORMS:
            writer.alike.append(str(results[-1]))
