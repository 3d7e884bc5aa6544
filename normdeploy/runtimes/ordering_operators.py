"""Let a run in torch follow the choices of another evaluation: which scores topk, sort and argmax pick, and in what
order.

If two scores are nearly equal, rounding decides which of them comes first, and both orders are correct. A run that
follows a file's picks computes the values that belong to these picks, so they can be compared with the file's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..graphs.proto_queries import strip_invented_module
from ..inputs.array_conversion import to_numpy
from ..loading.train_mode_checks import bind_node_arguments, operator_name
from ..types import Array

# ONNX's op for each operator of torch.
_ONNX_OPS = {"topk": "TopK", "sort": "TopK", "argsort": "TopK", "argmax": "ArgMax", "argmin": "ArgMin"}
# Operators with two overloads. The overload with a dim also returns indices.
_EXTREMES = {"max": "ArgMax", "min": "ArgMin"}
# Operators that return values and indices. The others return only indices.
_PAIRS = frozenset({"topk", "sort", "max", "min"})


@dataclass(frozen=True)
class OrderingOperator:
    """Operator of a model that orders scores, and whose indices are read.

    Attributes:
        node: name of the node in the graph.
        name: name of the operator, such as "topk".
        module: path of its module; "" for the model itself.
        onnx_op: ONNX's op for the operator: "TopK", "ArgMax" or "ArgMin".
        dim: dim along which the scores are ordered; None to order all elements as one row.
        largest: True if the largest scores come first.
        in_order: True if the picks are sorted.
    """

    node: str
    name: str
    module: str
    onnx_op: str
    dim: int | None
    largest: bool
    in_order: bool

    @property
    def axis(self) -> int:
        """Return ``dim``, or 0 for one row of all elements."""
        if self.dim is None:
            return 0
        return self.dim


def list_ordering_operators(graph: torch.fx.GraphModule) -> list[OrderingOperator] | None:
    """List the operators of a graph that order scores and whose indices are read, in the graph's order.

    Returns:
        the operators. None if a body of control flow has such an operator.
    """
    bodies = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule) and m is not graph]
    if any(_describe_operator(node) is not None for body in bodies for node in body.graph.nodes):
        return None
    return [found for node in graph.graph.nodes if (found := _describe_operator(node)) is not None]


def has_fixed_order(graph: torch.fx.GraphModule, operators: Sequence[OrderingOperator]) -> bool:
    """Check whether each operator depends on the operator before it, if both have the same op in ONNX.

    Every file then has the operators in this order.

    Returns:
        True if no two operators with the same op in ONNX can be exchanged.
    """
    last = dict[str, str]()
    for operator in operators:
        before = last.get(operator.onnx_op)
        if before is not None and operator.node not in find_dependent_nodes(graph, before):
            return False
        last[operator.onnx_op] = operator.node
    return True


def find_dependent_nodes(graph: torch.fx.GraphModule, name: str) -> set[str]:
    """Find the nodes that depend on a node.

    Returns:
        their names, and ``name`` itself.
    """
    dependent = {name}
    for node in graph.graph.nodes:
        if any(read.name in dependent for read in node.all_input_nodes):
            dependent.add(node.name)
    return dependent


def _describe_operator(node: torch.fx.Node) -> OrderingOperator | None:
    """Return the ordering operator that a node is; None if it is another operator or if its indices are not read."""
    name = operator_name(node)
    given = bind_node_arguments(node)
    if name in _EXTREMES and "dim" in given:
        onnx_op = _EXTREMES[name]
    elif name in _ONNX_OPS:
        onnx_op = _ONNX_OPS[name]
    else:
        return None
    if not isinstance(node.args[0], torch.fx.Node) or (name in _PAIRS and not _reads_indices(node)):
        return None
    if "largest" in given:
        largest = bool(given["largest"])
    elif "descending" in given:
        largest = bool(given["descending"])
    else:
        largest = onnx_op != "ArgMin"
    scopes = list(node.meta.get("nn_module_stack", {}).values())
    module = strip_invented_module(str(scopes[-1][0])) if scopes else ""
    return OrderingOperator(
        node.name, name, module, onnx_op, given.get("dim"), largest, bool(given.get("sorted", True))
    )


def _reads_indices(node: torch.fx.Node) -> bool:
    """Return whether a node reads the second result."""
    return any(user.args[1:] == (1,) and user.users for user in node.users)


@dataclass(frozen=True)
class Misfit:
    """Picks of a file that can't be the picks of the model's operator.

    Attributes:
        reason: difference, for example that an index is out of range.
    """

    operator: OrderingOperator
    reason: str


class ChoiceGuide(Protocol):
    """Object that sees the choices of a run, and may replace them.

    Attributes:
        nodes: nodes of the operators that it sees.
    """

    nodes: Set[str]

    def start_run(self) -> None:
        """Prepare for a new run."""

    def choose(self, node: torch.fx.Node, own: Any, scores: torch.Tensor) -> Any:
        """Return the result of an ordering operator.

        Args:
            node: one of ``nodes``.
            own: result of the operator for the run's own scores.
            scores: the operator's operand.
        """


class ChoiceWatcher:
    """Observer of several runs that finds out whether all of them make the same choices.

    Attributes:
        differ: True if two runs made different choices.
    """

    def __init__(self, operators: Iterable[OrderingOperator]) -> None:
        self._by_node = {operator.node: operator for operator in operators}
        self.nodes: Set[str] = self._by_node.keys()
        self._first: dict[str, torch.Tensor] = {}
        self.differ = False

    def start_run(self) -> None:
        """Do nothing: all runs are compared with the first one."""

    def choose(self, node: torch.fx.Node, own: Any, scores: torch.Tensor) -> Any:
        """Compare the indices with those of the first run.

        Returns:
            ``own``.
        """
        indices = own[1] if self._by_node[node.name].name in _PAIRS else own
        self.differ = self.differ or not torch.equal(self._first.setdefault(node.name, indices), indices)
        return own


class ChoiceFollower:
    """Picks that a run follows, and what the run saw at each of them.

    If a file picks fewer scores than the model, the best of the other scores follow. If a file picks more, only the
    first ones are followed. A file may leave out picks that the model does not use.

    Attributes:
        picks: node -> indices. From the first run on, they have the shape of the model's indices.
        scores: node -> scores that the operator ordered in the last run.
        differing: number of picks that differ from those of the last run's own scores.
        misfit: the first picks that do not fit the model's operator; None if all fit. The run then orders its own
            scores there.
    """

    def __init__(self, operators: Iterable[OrderingOperator], picks: Sequence[Array]) -> None:
        """Store the picks.

        Args:
            picks: indices for each operator.
        """
        self.operators = tuple(operators)
        self.picks = {operator.node: chosen for operator, chosen in zip(self.operators, picks, strict=True)}
        self._by_node = {operator.node: operator for operator in self.operators}
        self.nodes: Set[str] = self._by_node.keys()
        self.scores: dict[str, Array] = {}
        self.differing = 0
        self.misfit: Misfit | None = None

    def start_run(self) -> None:
        """Forget what the last run saw."""
        self.scores = {}
        self.differing = 0
        self.misfit = None

    def choose(self, node: torch.fx.Node, own: Any, scores: torch.Tensor) -> Any:
        """Replace the result of an ordering operator by the result for the given picks.

        Returns:
            values and indices for the picks; ``own`` if the picks do not fit.
        """
        operator = self._by_node[node.name]
        self.scores[node.name] = to_numpy(scores)
        indices = own[1] if operator.name in _PAIRS else own
        picks = torch.from_numpy(self.picks[node.name].astype(np.int64))
        reason = _find_misfit(operator, picks, indices, scores)
        if reason:
            self.misfit = self.misfit or Misfit(operator, reason)
            return own
        if picks.shape != indices.shape:
            picks = _resize_picks(operator, picks, indices, scores)
            self.picks[node.name] = to_numpy(picks)
        self.differing += int((picks != indices).sum())
        if operator.name not in _PAIRS:
            return picks
        # max and min of a dim may drop the dim.
        kept = picks if picks.dim() == scores.dim() else picks.unsqueeze(operator.axis)
        return scores.gather(operator.axis, kept).reshape(picks.shape), picks


def _find_misfit(operator: OrderingOperator, picks: torch.Tensor, own: torch.Tensor, scores: torch.Tensor) -> str:
    """Return why picks of a file can't be those of the operator; "" if they can."""
    others = [
        [
            size
            for dim, size in enumerate(values.shape)
            if operator.onnx_op != "TopK" or dim != operator.axis % own.dim()
        ]
        for values in (picks, own)
        if own.dim()
    ]
    if picks.dim() != own.dim() or (others and others[0] != others[1]):
        return f"picks of shape {list(picks.shape)}, but the model's have shape {list(own.shape)}"
    if operator.dim is None:
        size = scores.numel()
    else:
        size = scores.shape[operator.dim] if scores.dim() else 1
    if picks.numel() and not 0 <= int(picks.min()) <= int(picks.max()) < size:
        return f"an index outside of its {size} scores"
    if operator.onnx_op == "TopK" and picks.dim():
        ordered = picks.sort(operator.axis).values
        if bool((ordered.diff(dim=operator.axis) == 0).any()):
            return "the same score twice"
    if scores.is_floating_point() and bool(scores.isnan().any()):
        return "scores that are NaN"
    return ""


def _resize_picks(
    operator: OrderingOperator, picks: torch.Tensor, own: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Remove the last picks, or append the best of the other scores, so that ``picks`` has the shape of ``own``."""
    axis = operator.axis
    missing = own.shape[axis] - picks.shape[axis]
    if missing <= 0:
        return picks.narrow(axis, 0, own.shape[axis])
    ordered = scores.argsort(dim=axis, descending=operator.largest)
    is_picked = torch.zeros(scores.shape, dtype=torch.bool).scatter(axis, picks, True)
    places = is_picked.gather(axis, ordered).to(torch.int8).argsort(dim=axis, stable=True)
    return torch.cat([picks, ordered.gather(axis, places.narrow(axis, 0, missing))], axis)


def line_up_scores(operator: OrderingOperator, values: Array, picks: Array) -> tuple[Array, Array, int]:
    """Give scores and picks the same number of dims.

    Returns:
        (values, picks, axis along which the scores are ordered).
    """
    if operator.dim is None:
        return values.reshape(-1), picks.reshape(-1), 0
    if not values.ndim:
        return values.reshape(1), picks.reshape(1), 0
    axis = operator.dim % values.ndim
    if picks.ndim < values.ndim:
        return values, np.expand_dims(picks, axis), axis
    return values, picks, axis
