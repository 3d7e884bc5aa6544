"""Write a plugin node: the kernel's attributes and parameters, and the shapes and types on which they depend.

A plugin has no defaults and no broadcasting. So every attribute is written. gamma and beta are expanded to one value
for each element of a row (or for each channel). They have the data's type, or float32 if the data is half precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.dims import Dims, evaluate_dim
from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN
from ..graphs.region import RefusedError

# Name of a parameter -> its tensor, and the value to use if the tensor is missing.
Given = dict[str, tuple[gs.Tensor | None, float]]

# Types of data that every kernel accepts.
TYPES = ("float32", "float16", "bfloat16")
# ONNX's numbers of the accepted ``stash_type`` values. The kernels compute in float32, which can represent these types.
_STASHES = (1, 10, 16)
# Default epsilon of ONNX.
_EPSILON = float(np.float32(1e-5))

# A norm with fewer rows than this number uses two launches if its rows are long. The first launch computes the
# statistics, and the second launch applies them. In a single launch, one program handles one row. If there are fewer
# rows than multiprocessors, some multiprocessors are idle. Two launches read each row twice, but a single launch also
# reads a row twice if the row exceeds one program's registers. This rule is derived, not measured on a GPU. An RTX 3090
# has 82 multiprocessors, an H100 and H200 132, an RTX 5090 170.
MULTIPROCESSORS = 128
# A row with more elements than this is long. The number equals `normdeploy_plugins._launch.REGISTER_TILE`.
LONG_ROW = 16384
# A row is split into at most one part per this number of elements, because a program for fewer elements costs more than
# it saves.
_PART = 8192


@dataclass(frozen=True)
class PluginPlan:
    """Plan to replace nodes of the graph by new nodes. The old and the new nodes compute functions of ``leaves``.

    Attributes:
        old: nodes to replace.
        outputs: outputs of the old nodes, in the order of the last new node's outputs.
        leaves: inputs of the replacement. The first is the normalized tensor.
        new: new nodes.
        shape: shape of the first leaf; unknown sizes are None.
        free: axes of the first leaf along which every position is computed in the same way.
        became: name of the norm's new form.
    """

    old: tuple[gs.Node, ...]
    outputs: tuple[gs.Tensor, ...]
    leaves: tuple[gs.Tensor, ...]
    new: tuple[gs.Node, ...]
    shape: Dims
    free: tuple[int, ...]
    became: str


class PluginPlanner:
    """Plan replacements for the nodes of one graph."""

    def __init__(self, graph: Graph, ops: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Store the graph and its context.

        Args:
            ops: kernels by name.
            sizes: usual sizes of the graph's dynamic dims.
        """
        self.graph = graph
        self.ops = ops
        self.sizes = sizes

    # ------------------------------------------------------------------ facts about the graph

    def known_shape(self, t: gs.Tensor, least: int = 1) -> Dims:
        """Return the shape of a tensor.

        Returns:
            dims; some may be unknown.

        Raises:
            RefusedError: the rank is unknown or below ``least``.
        """
        shape = self.graph.shape(t)
        if shape is None:
            raise RefusedError(f"the rank of {t.name!r} is unknown")
        if len(shape) < least:
            raise RefusedError(f"its input has rank {len(shape)}; the kernel needs at least {least}")
        return shape

    def dtype(self, t: gs.Tensor) -> Any:
        """Return the type of a tensor.

        Returns:
            float32, float16 or bfloat16.

        Raises:
            RefusedError: the type is unknown, or no kernel accepts it.
        """
        dtype = self.graph.dtype(t)
        if dtype is None or dtype.name not in TYPES:
            raise RefusedError(
                f"its type is {'unknown' if dtype is None else dtype.name}: the kernels support {', '.join(TYPES)}"
            )
        return dtype

    def attributes(self, node: gs.Node) -> dict[str, Any]:
        """Return the attributes of a norm's node.

        Returns:
            attributes, with ONNX's default epsilon if it is missing.

        Raises:
            RefusedError: the statistics are in float64.
        """
        attributes = self.graph.attrs(node)
        if attributes.get("stash_type", 1) not in _STASHES:
            raise RefusedError("its statistics are in float64: the kernels compute them in float32")
        return {"epsilon": _EPSILON} | attributes

    def is_read(self, t: gs.Tensor) -> bool:
        """Check if a tensor is read by a node or is an output of the graph.

        Returns:
            true if the tensor is read or is an output; false also for an omitted tensor.
        """
        return not t.is_empty() and (self.graph.is_output(t) or bool(self.graph.consumers(t)))

    def only_reader(self, t: gs.Tensor) -> gs.Node | None:
        """Return the only node that reads a tensor.

        Returns:
            the node, or None if there are several, none, or the tensor is an output of the graph.
        """
        readers = self.graph.consumers(t)
        if len(readers) == 1 and not self.graph.is_output(t):
            return readers[0]
        return None

    def data_inputs(self, x: gs.Tensor, parameters: Sequence[gs.Tensor]) -> tuple[gs.Tensor, ...]:
        """Select the inputs of a plan that are not constants.

        Returns:
            ``x`` and the parameters that are not constants.
        """
        return (x, *(t for t in parameters if not self.graph.is_constant(t)))

    # ------------------------------------------------------------------ parameters

    def expand_parameters(
        self,
        x: gs.Tensor,
        axes: Sequence[int],
        given: Mapping[str, tuple[gs.Tensor | None, float]],
        *,
        channels: bool = False,
    ) -> tuple[list[gs.Tensor], Dims]:
        """Expand gamma and beta along ``axes`` of ``x``.

        Args:
            given: name -> (tensor, value to use if the tensor is missing). The tensors broadcast to x.
            channels: true if the tensors do not broadcast to x, but are vectors along the only axis in ``axes``.

        Returns:
            the expanded tensors, and the shape of x with dims filled in from them.
        """
        shape = list(self.known_shape(x))
        dtype = self.dtype(x)
        tensors = {name: t for name, (t, _) in given.items() if t is not None and not t.is_empty()}
        values = {name: self.graph.known_value(t) for name, t in tensors.items()}
        layouts: dict[str, Dims] = {}
        for name, t in tensors.items():
            value = values[name]
            own: Dims
            if value is not None:
                own = tuple(value.shape)
            else:
                own = self.known_shape(t, 0)
            if channels and own:
                own = (*own, *(1,) * (len(shape) - 1 - axes[0]))
            if len(own) > len(shape) and set(own[: len(own) - len(shape)]) != {1}:
                raise RefusedError(f"its {name} has more dims than its input")
            layouts[name] = own = ((1,) * len(shape) + own)[-len(shape) :]
            if any(own[a] != 1 for a in range(len(shape)) if a not in axes):
                raise RefusedError(
                    f"its {name} varies from row to row"
                    if not channels
                    else f"its {name} is not a vector along its channels"
                )
            for a in axes:
                if shape[a] is None or isinstance(shape[a], str):
                    shape[a] = own[a] if isinstance(own[a], int) and own[a] != 1 else shape[a]
        row = [n for n in (shape[a] for a in axes) if isinstance(n, int)]
        if len(row) < len(axes):
            raise RefusedError("the size of its rows is unknown, so its parameters can't be written out")
        kinds = {name: self.graph.dtype(t) for name, t in tensors.items()}
        if all(k == dtype for k in kinds.values()):
            kind = dtype
        else:
            kind = np.dtype(np.float32)
        written = []
        for name, (_, neutral) in given.items():
            full = [shape[a] if a in axes else 1 for a in range(len(shape))]
            value = values.get(name)
            if name in tensors and value is None:
                if kinds[name] != kind or list(layouts[name]) != full:
                    raise RefusedError(f"its {name} is data of another type or size than the kernel accepts")
                written.append(tensors[name])
            elif name in tensors and value is not None:
                source = tensors[name]
                if isinstance(source, gs.Constant) and kinds[name] == kind and value.size == math.prod(row):
                    written.append(source)
                    continue
                if not np.array_equal(value, value.astype(kind).astype(np.float64), equal_nan=True):
                    raise RefusedError(f"its {name} is {kinds[name]} and would be rounded")
                laid = value.reshape([n for n in layouts[name] if isinstance(n, int)])
                written.append(
                    self.make_constant(
                        x, name, np.broadcast_to(laid, [n for n in full if isinstance(n, int)]).reshape(-1), kind
                    )
                )
            else:
                written.append(self.make_constant(x, name, np.full(math.prod(row), neutral), kind))
        return written, tuple(shape)

    def make_constant(self, like: gs.Tensor, name: str, value: np.ndarray, kind: Any) -> gs.Tensor:
        """Add a constant to the graph, named after ``like``.

        Returns:
            its tensor.
        """
        return self.graph.add_constant(f"{like.name}_{name}", value, kind)

    # ------------------------------------------------------------------ plugin nodes

    def make_plugin_node(self, name: str, inputs: Sequence[gs.Tensor], like: gs.Tensor, **attributes: Any) -> gs.Node:
        """Make one plugin node, with every attribute in the kernel's order and type. Attributes that are texts become
        numbers.

        Returns:
            the node.

        Raises:
            RefusedError: the kernel does not accept the value of an attribute.
        """
        op = self.ops[name]
        for key, allowed in op.required.items():
            if attributes[key] not in allowed:
                raise RefusedError(
                    f"its {key} is {attributes[key]!r}; the kernel accepts {', '.join(map(repr, allowed))}"
                )
        written = op.encoded(attributes)
        # The parser would also find the plugin without a version, but the node should not depend on defaults.
        parsed = {"plugin_namespace": DOMAIN, "plugin_version": "1", "aot": 1}
        return self.graph.make_node(name, inputs, like, written | parsed, DOMAIN, len(op.outputs))

    def row_splits(self, rows: Sequence[int | str | None], row: Sequence[int | str | None]) -> int:
        """Compute into how many parts each row is split, if a norm has few long rows.

        Returns:
            number of parts; 0 if a single launch is better or sizes are unknown.
        """
        sizes = [[evaluate_dim(n, self.sizes) for n in part] for part in (rows, row)]
        if any(n is None for part in sizes for n in part):
            return 0
        count, length = (math.prod(n for n in part if n is not None) for part in sizes)
        if not 0 < count < MULTIPROCESSORS or length <= LONG_ROW:
            return 0
        return min(-(-MULTIPROCESSORS // count), -(-length // _PART), 64)

    def make_statistics_node(self, x: gs.Tensor, axis: int, groups: int, splits: int, last: int) -> gs.Node:
        """Make the node of the first of two launches, which computes the statistics.

        Returns:
            node whose output is float32.
        """
        node = self.make_plugin_node(
            "NormStatistics", [x], x, axis=axis, groups=groups, splits=splits, channels_last=last
        )
        node.outputs[0].dtype = np.dtype(np.float32)
        return node
