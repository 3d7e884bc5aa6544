"""Read the published support of runtimes that can't run here, from the table ``target_support.json``.

``python -m benchmarks.target_support`` writes the table from the op lists and the source code that the runtimes
publish. A target is an execution provider of onnxruntime, such as "coreml-mlprogram", or one release of TensorRT. Its
rows say for each norm op whether the target runs it and under which conditions, with the sources. Nothing was run. An
op without a source is "unknown".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import onnx

from ..errors import InputError
from ..graphs.dims import Types
from ..norms.norm_table import CONTRIB, ROWS, STANDARD, OpOwner
from ..option_values import ANY, TENSORRT, USUAL
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_value

Support = Literal["yes", "no", "unknown"]
# Ops that a norm in several nodes consists of.
_COMPOSED = ("ReduceMean", "Sub", "Mul", "Add", "Sqrt", "Div")
_CONTRIB_NORMS = frozenset(row.op for row in ROWS if row.owner is OpOwner.ONNXRUNTIME)


@dataclass(frozen=True)
class OpSupport:
    """Row of one op in one target.

    Attributes:
        support: "yes" if the op is in the target's list, "no" if it is not.
        why: reason for "no" and "unknown".
        opsets: first and last opset in which the target takes the op; None for no bound.
        dtypes: element types of the first input; empty if no source lists them.
        ranks: smallest and largest rank of the first input; None for no bound.
        constant_parameters: True if all inputs but the first must be constants.
        max_outputs: largest number of outputs; 0 for no bound.
        last_axis: True if the op may normalize only the last axis.
        positive_epsilon: True if epsilon must be above 0.
        attributes: accepted values of integer attributes.
        sources: name in `load_sources`, followed by ":" and a file.
    """

    support: Support
    why: str = ""
    opsets: tuple[int | None, int | None] = (None, None)
    dtypes: tuple[str, ...] = ()
    ranks: tuple[int | None, int | None] = (None, None)
    constant_parameters: bool = False
    max_outputs: int = 0
    last_axis: bool = False
    positive_epsilon: bool = False
    attributes: Mapping[str, Sequence[int]] | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """Runtime that the table describes.

    Attributes:
        title: name for messages, such as "TensorRT 10.9".
        kind: "tensorrt" if the target rejects a file with an unsupported op. "onnxruntime" if onnxruntime runs the op
            on the CPU instead.
        opsets: first and last opset of a file; None if no source states it.
        ops: rows of the norm ops and of the ops of which a norm in several nodes consists.
        unknown: reason why no op list was read; "" if one was read.
        note: note for the report.
        sources: sources of the release that the title names, and of ``opsets``, as in `OpSupport`.
    """

    name: str
    title: str
    kind: Literal["onnxruntime", "tensorrt"]
    ops: Mapping[str, OpSupport]
    opsets: tuple[int | None, int | None] = (None, None)
    unknown: str = ""
    note: str = ""
    sources: tuple[str, ...] = ()

    @property
    def runtime(self) -> str:
        """Return the ``--runtime`` whose forms fit the target best."""
        if self.kind == "tensorrt":
            return TENSORRT[0]
        if self.name.startswith("triton-"):
            return USUAL
        return ANY

    @property
    def consequence(self) -> str:
        """Describe the result of a node that the target does not support."""
        if self.kind == "tensorrt":
            return f"{self.title} rejects the file"
        return "the CPU runs the node instead"

    def row(self, op: str) -> OpSupport:
        """Look up the row of an op.

        Args:
            op: as from `op_key`.
        """
        return self.ops.get(op) or OpSupport("unknown", self.unknown or "no source mentions it")

    def avoided_ops(self) -> frozenset[str]:
        """List the standard norm ops that optimize must not write for the target.

        If the target does not run the parts of a norm either, nothing is gained by a norm in several nodes.

        Returns:
            op types; empty if no op list was read.
        """
        if self.unknown or any(self.row(op).support != "yes" for op in _COMPOSED):
            return frozenset()
        return frozenset(op for op in STANDARD if not self._runs_newest(op))

    def _runs_newest(self, op: str) -> bool:
        row = self.ops.get(op)
        # Ops that the table does not list, such as LRN, are not written by any form.
        return row is None or (row.support == "yes" and row.opsets[1] is None)


@cache
def load_targets() -> Mapping[str, Target]:
    """Load the targets of the table.

    Returns:
        name -> target, in the order of the table.
    """
    targets = {}
    for name, entry in _load_table()["targets"].items():
        ops = {op: _read_row(row) for op, row in entry["ops"].items()}
        first, last = entry.get("opsets", (None, None))
        targets[name] = Target(
            name,
            entry["title"],
            entry["kind"],
            ops,
            opsets=(first, last),
            unknown=entry.get("unknown", ""),
            note=entry.get("note", ""),
            sources=tuple(entry.get("sources", ())),
        )
    return targets


@cache
def load_sources() -> Mapping[str, Mapping[str, str]]:
    """Load the sources of the table.

    Returns:
        name -> {"name": repository or package, "version": release or commit, "read": date}.
    """
    sources: Mapping[str, Mapping[str, str]] = _load_table()["sources"]
    return sources


@cache
def _load_table() -> Any:
    return json.loads(resources.files(__package__).joinpath("target_support.json").read_text(encoding="utf-8"))


def _read_row(row: Mapping[str, Any]) -> OpSupport:
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return OpSupport(**(dict(row) | lists))


def find_target(name: str) -> Target:
    """Look up a target by its name.

    Raises:
        InputError: the table has no such target.
    """
    targets = load_targets()
    if name not in targets:
        raise InputError(f"unknown target {name!r}; choose one of {', '.join(targets)}")
    return targets[name]


def describe_sources(entry: OpSupport | Target) -> str:
    """Name the sources of a row or of a target, with their versions.

    Returns:
        for example "npm package onnxruntime-web 1.30.0, docs/webgpu-operators.md"; "" without a source.
    """
    known = load_sources()
    parts = []
    for source in entry.sources:
        name, _, file = source.partition(":")
        described = f"{known[name]['name']} {known[name]['version']}"
        parts.append(f"{described}, {file}" if file else described)
    return "; ".join(parts)


def op_key(node: onnx.NodeProto) -> str:
    """Name the op of a node as the table does.

    Returns:
        the op type of a standard op, or "com.microsoft." and the op type of onnxruntime's own op, even if the node is
        in the default domain; "" for any other node.
    """
    if is_standard(node):
        if node.op_type not in STANDARD and node.op_type in _CONTRIB_NORMS:
            return f"{CONTRIB}.{node.op_type}"
        return node.op_type
    if node.domain == CONTRIB and node.op_type in _CONTRIB_NORMS:
        return f"{CONTRIB}.{node.op_type}"
    return ""


def describe_unmet_condition(
    row: OpSupport, node: onnx.NodeProto, opset: int, types: Types, is_constant: Callable[[str], bool]
) -> str:
    """Describe the first condition of a supported op that a node does not meet.

    Args:
        types: types and shapes of the tensors around the node, as far as they are known.
        is_constant: tells if a tensor is a constant of the file.

    Returns:
        the condition and the node's value; "" if all conditions are met. A condition on an unknown rank is not met.
    """
    elem_type, shape = types[node.input[0]]
    first, last = row.opsets
    if (first is not None and opset < first) or (last is not None and opset > last):
        return f"it takes the op in opsets {_describe_range(row.opsets)}, and the file has opset {opset}"
    if row.dtypes and elem_type:
        dtype = {"double": "float64", "float": "float32"}.get(name := _dtype_name(elem_type), name)
        if dtype not in row.dtypes:
            return f"it takes {' and '.join(row.dtypes)}, and this input is {dtype}"
    low, high = row.ranks
    if (low, high) != (None, None):
        if shape is None:
            return f"it needs an input of rank {_describe_range(row.ranks)}, and the file does not state the shape"
        if len(shape) < (low or 0) or (high is not None and len(shape) > high):
            return f"it needs an input of rank {_describe_range(row.ranks)}, and this input has rank {len(shape)}"
    changing = [name for name in node.input[1:] if name and not is_constant(name)]
    if row.constant_parameters and changing:
        return f"it needs constants as scale and bias, and {changing[0]!r} is computed"
    if row.max_outputs and sum(map(bool, node.output)) > row.max_outputs:
        return f"it computes {row.max_outputs} output, and this node has {sum(map(bool, node.output))}"
    axis = attribute_value(node, "axis", -1)
    if row.last_axis and axis != -1 and (shape is None or axis != len(shape) - 1):
        return f"it normalizes the last axis alone, and this node has axis {axis}"
    if row.positive_epsilon and attribute_value(node, "epsilon", 1e-5) <= 0:
        return "it needs an epsilon above 0"
    for name, accepted in (row.attributes or {}).items():
        value = attribute_value(node, name, accepted[0])
        if value not in accepted:
            return f"it needs {name} {' or '.join(map(str, accepted))}, and this node has {value}"
    return ""


def _dtype_name(elem_type: int) -> str:
    return onnx.TensorProto.DataType.Name(elem_type).lower()


def _describe_range(bounds: tuple[int | None, int | None]) -> str:
    low, high = bounds
    if high is None:
        return f"{low} and newer" if low is not None else "of any size"
    if low == high:
        return str(low)
    return f"{low} to {high}"
