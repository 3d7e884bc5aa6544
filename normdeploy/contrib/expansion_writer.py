"""Writes what stands for a foreign norm node: standard primitives, all of them in the file's own opset.

The statistics of a 16-bit tensor are taken in float32, as the runtimes that own these ops take them; a wider one keeps
its type.
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
# of each tensor its element type and shape, None where unknown

_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_FLOATING = (*_NARROW, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
# of results, whatever goes in
_KINDS = {"Shape": onnx.TensorProto.INT64, "Equal": onnx.TensorProto.BOOL}
# whose results have the rank of their first input
_RANK_KEPT = ("Add", "Transpose")
# since these opsets
_AXES_AS_INPUT = {"ReduceMean": 18, "ReduceSum": 13}
# that normalize the sum of their first two inputs
SKIP_NORMS = frozenset(op for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if row.inputs[1] == "residual")
# the first opset in which Add and Mul broadcast by themselves
OLDEST = 7


class ExpansionWriter(Interpreter):
    """Strings nodes together by the names of their tensors; what it wrote is in ``nodes`` and ``initializers``."""

    def __init__(self, node: onnx.NodeProto, opset: int, types: Types, taken: set[str]) -> None:
        """``taken``: names that no new tensor may bear; those that are made are added."""
        self.node, self.opset, self.outputs = node, opset, len(node.output)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.notes: tuple[str, ...] = ()
        # tensors with the shape of the node's first output
        self.alike: list[str] = []
        self._types = types
        self._taken = taken
        self._kinds: dict[str, int] = {}
        self._ranks: dict[str, int] = {}
        self._ints: dict[tuple[int, ...], str] = {}

    def expand_definition(
        self, definition: Definition, attrs: Attrs, inputs: Sequence[str] = ()
    ) -> tuple[str | None, ...]:
        """Write the nodes of a definition, by default of the node's own inputs.

        Returns: the names of its outputs, before those that the node wants bear their names in the file.
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
        """The name of an input, "" where it is left out."""
        if index < len(self.node.input):
            return self.node.input[index]
        return ""

    def elem_type_of(self, t: str, *alike: str) -> int:
        """The floating element type of a tensor; ``alike``: others of the same type, asked where its own is not known.

        Raises:
            Refused: it is not known, or not floating.
        """
        kind = next((k for n in (t, *alike) if (k := self._kinds.get(n) or self._types[n][0])), None)
        if kind is None or kind not in _FLOATING:
            raise RefusedError(
                f"the type of {t!r} is {'not known' if not kind else onnx.TensorProto.DataType.Name(kind)}: it must be"
                " floating"
            )
        return kind

    def learn_elem_type(self, t: str, *alike: str) -> None:
        """Take the type of ``t`` from those of ``alike`` where the file does not state it. Raises Refused as `kind`."""
        self._kinds[t] = self.elem_type_of(t, *alike)

    @staticmethod
    def statistics_elem_type(kind: int) -> int:
        """The type that statistics of a tensor of type ``kind`` are taken in."""
        if kind in _NARROW:
            return onnx.TensorProto.FLOAT
        return kind

    def shape_of(self, t: str) -> Dims:
        """
        Raises:
            Refused: not even the rank is known.
        """
        shape = self._types[t][1]
        if shape is None:
            raise RefusedError(f"the rank of {t!r} is not known")
        return shape

    def rank_of(self, x: str) -> int:
        """Return the number of axes. Raises Refused as `shape`."""
        if x in self._ranks:
            return self._ranks[x]
        return len(self.shape_of(x))

    def vector_length(self, t: str) -> int | None:
        """How many elements a vector has, None where the file does not say."""
        shape = self._types[t][1]
        if shape is not None and len(shape) == 1 and isinstance(shape[0], int):
            return shape[0]
        return None

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Write one node; its result has the type of its first input, unless the op says another one."""
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
        name = self._fresh_name(hint)
        array = np.asarray(values).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        self._kinds[name] = kind
        return name

    def make_int64_vector(self, values: Sequence[int], hint: str) -> str:
        key = tuple(values)
        if key not in self._ints:
            self._ints[key] = self.add_constant(np.array(values, dtype=np.int64), onnx.TensorProto.INT64, hint)
        return self._ints[key]

    def make_int32_scalar(self, value: int, name: str) -> str:
        return self.add_constant(value, onnx.TensorProto.INT32, name)

    def make_scalar(self, value: float, like: str) -> str:
        # attributes are float32
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
        """A reduction, its axes an attribute before the opset in which they are an input."""
        if self.opset < _AXES_AS_INPUT[op]:
            return self(op, x, axes=list(axes), **attributes)
        return self(op, x, self.make_int64_vector(axes, "axes"), **attributes)

    def reshape(self, t: str, shape: Sequence[int]) -> str:
        return self("Reshape", t, self.make_int64_vector(shape, "shape"))

    def reshape_like(self, y: str, x: str) -> str:
        return self("Reshape", y, self("Shape", x))

    def split_into_groups(self, x: str, groups: int) -> str:
        return self("Reshape", x, self.make_int64_vector([0, groups, -1], "groups"))

    def reshape_per_channel(self, v: str, x: str) -> str:
        return self.reshape(v, [-1, *(1,) * (self.rank_of(x) - 2)])

    def reshape_per_group(self, v: str, groups: int) -> str:
        return self.reshape(v, [-1, 1])

    def reshape_per_element(self, v: str, x: str, axes: Sequence[int]) -> str:
        if len(axes) == 1:
            return v
        sizes = []
        for dim in self.shape_of(x)[axes[0] :]:
            if not isinstance(dim, int):
                raise RefusedError(f"it normalizes over the dynamic size {dim!r}, and gamma has to be laid along it")
            sizes.append(dim)
        return self.reshape(v, sizes)

    def require_divisible_groups(self, x: str, axis: int, groups: int) -> None:
        """
        Raises:
            Refused: the groups don't divide the channels along ``axis``.
        """
        channels = self.shape_of(x)[axis]
        if groups < 1 or (isinstance(channels, int) and channels % groups):
            raise RefusedError(f"{channels} channels can't be divided into {groups} groups")

    def _set_output(self, index: int, t: str) -> None:
        """Let ``t`` be the output ``index`` of the foreign node, where that is wanted."""
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
    """A norm op of another tool, whose nodes are written as standard ones.

    Attributes:
        row: of the table of norm ops.
        check: raises RefusedError if the meaning of a node is ambiguous; it may add notes to the report.
        write: writes a node where its definition alone does not.
        ignored: attributes that a node may have and that mean nothing.
    """

    row: NormOp
    check: Callable[[ExpansionWriter, Attrs], None] | None = None
    write: Callable[[ExpansionWriter, Attrs], None] | None = None
    ignored: frozenset[str] = frozenset()

    def expand(self, writer: ExpansionWriter, attrs: Attrs) -> None:
        """Write the writer's node as standard nodes.

        Raises:
            RefusedError: it can't be written, or its meaning is not certain.
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
