"""Read tensors of a file's graph: the values of constants, shapes and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..evaluate import evaluation_budget, evaluator
from ..evaluate.evaluator_core import is_quantized_type
from ..norms import third_party
from ..norms.norm_op import NormOp
from ..norms.norm_table import DEFAULT, DOMAIN, OURS, STANDARD
from ..storage.onnx_domains import default_domain_opset
from ..storage.weight_serialization import is_detached
from .dims import Dims, Types, is_invented_name
from .exact_constants import ExactConstants
from .linked_graph import LinkedGraph
from .proto_queries import single_use_symbols
from .shape_inference import infer_types

# Elementwise ops. Their result has the shape to which the inputs broadcast, and the type of the first input.
_ELEMENTWISE = frozenset(
    {
        *(
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Sum",
            "Max",
            "Min",
            "Neg",
            "Sqrt",
            "Reciprocal",
            "Identity",
            "Cast",
            "CastLike",
            "Clip",
        ),
        *("Relu", "Gelu", "Erf", "Tanh", "Sigmoid"),
    }
)
_NORMS = DEFAULT | OURS
# Highest opset whose ops the passes write.
NEWEST = max(row.since for row in STANDARD.values())
# Maximum size in bytes of a constant whose value is kept in memory. A larger constant is read again each time.
_LARGE = 2**12


class FileGraph(LinkedGraph):
    """ONNX model opened for reading: links, and the values, shapes and types of tensors."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        """Open ``proto``.

        Raises:
            GraphError: the nodes are not in topological order, or a name is written twice.
        """
        super().__init__(proto)
        self.opset = default_domain_opset(proto)
        # Ids of nodes that the passes wrote. They follow the newest opset's definition.
        self._new: set[int] = set()
        self._evaluators: dict[int, Callable[[Sequence[np.ndarray | None]], tuple[Any, ...]]] = {}
        self._constant: dict[int, bool] = {}
        # Limits the number of elements that the evaluation of constants may create.
        self._budget = evaluation_budget.EvaluationBudget()
        self._shape_valued: dict[int, bool] = {}
        # Values of tensors passed to `treat_as_constant`.
        self._taken: dict[int, np.ndarray] = {}
        # Exact values that rewrites computed.
        self.exact = ExactConstants()
        # Shapes that a pass found or computed. Neither the file nor onnx's inference provides them.
        self._shapes: dict[int, Dims | None] = {}
        self._lonely = single_use_symbols(proto.graph)
        # Shapes that are completely known, so they are not computed again.
        self._stated: dict[int, Dims] = {}
        self._dtypes: dict[int, int] = {}

    def is_constant(self, t: gs.Tensor) -> bool:
        """Return whether the file alone determines the value.

        Returns: True for initializers, Constant nodes, and tensors computed from these alone.
        """
        known = self._constant.get(id(t))
        if known is None:
            return self._is_derived_from(t, self._constant, seed=lambda _node: False)
        return known

    def is_shape_valued(self, t: gs.Tensor) -> bool:
        """Return whether a tensor is constant or computed only from shapes and constants.

        Returns: False if it depends on the values of an input.
        """
        known = self._shape_valued.get(id(t))
        if known is None:
            return self._is_derived_from(t, self._shape_valued, seed=lambda node: node.op in ("Shape", "Size"))
        return known

    def treat_as_data(self, tensors: Sequence[gs.Tensor]) -> None:
        """Treat these tensors, and all that is computed from them, as data.

        Without this call they would count as constants or as sizes, because they are computed from constants or sizes.
        """
        if tensors:
            self._shape_valued = {id(t): False for t in tensors}

    @contextmanager
    def allow_temporary_constants(self) -> Iterator[None]:
        """Allow calls of `treat_as_constant`, whose effects end with this context.

        Yields: nothing.
        """
        constant = dict(self._constant)
        shape_valued = dict(self._shape_valued)
        try:
            yield
        finally:
            self._constant = constant
            self._shape_valued = shape_valued
            self._taken = {}

    def treat_as_constant(self, t: gs.Tensor, value: np.ndarray) -> None:
        """Treat ``t`` as a constant of this float64 value.

        ``t`` is the output of a node that the evaluator does not look through.
        """
        self._constant[id(t)] = self._shape_valued[id(t)] = True
        self._taken[id(t)] = value

    def _is_derived_from(self, t: gs.Tensor, memo: dict[int, bool], seed: Callable[[gs.Node], bool]) -> bool:
        stack = [t]
        while stack:
            top = stack[-1]
            if id(top) in memo:
                stack.pop()
                continue
            node = self.producer(top)
            if isinstance(top, gs.Constant) or top.is_empty():
                memo[id(top)] = True
            elif node is None or not evaluator.is_supported(node.domain or "", node.op):
                memo[id(top)] = False
            elif seed(node):
                memo[id(top)] = True
            else:
                inputs = value_inputs(node)
                open_inputs = [i for i in inputs if id(i) not in memo]
                if open_inputs:
                    stack.extend(open_inputs)
                    continue
                memo[id(top)] = all(memo[id(i)] for i in inputs)
            stack.pop()
        return memo[id(t)]

    def value(self, t: gs.Tensor) -> np.ndarray:
        """Compute the value of a tensor for which `is_constant` holds.

        Returns: float64 for floating types, exact if a rewrite computed it; other types unchanged.

        Raises:
            UnsupportedOp: the evaluator does not cover an op that computes ``t``, or the computation needs too many
                elements.
        """
        known: dict[int, Any] = {}
        stack = [t]
        made = 0
        while id(t) not in known:
            top = stack.pop()
            kept = self._taken.get(id(top), self._budget.values.get(id(top)))
            numbers = self.exact.exact_value(id(top), kept)
            if numbers is not None:
                known[id(top)] = numbers
            elif isinstance(top, gs.Constant):
                known[id(top)] = widen_to_float64(stored_array(top))
            elif id(top) not in known:
                node = self.producer(top)
                assert node is not None, f"{top.name!r} is not a constant"
                missing = [i for i in value_inputs(node) if id(i) not in known]
                if missing:
                    stack.extend((top, *missing))
                    continue
                inputs = [known.get(id(i)) for i in node.inputs[: _value_input_count(node)]]
                self._budget.charge_node(node.op, inputs)
                results = self.evaluate_node(node, inputs)
                known.update((id(o), v) for o, v in zip(node.outputs, results, strict=False))
                if known.get(id(top)) is None:
                    raise evaluator.UnsupportedOp(f"{node.op} does not compute {top.name!r}")
                made += self._budget.charge_results(node.op, results)
                if made > evaluation_budget.AT_ONCE:
                    raise evaluator.UnsupportedOp(
                        f"{t.name!r} is computed from {made} elements; the limit is {evaluation_budget.AT_ONCE}"
                    )
                self._budget.keep_results(
                    {id(o): v for o, v in zip(node.outputs, results, strict=False) if v is not None}
                )
        return known[id(t)]

    def known_value(self, t: gs.Tensor) -> np.ndarray | None:
        """Compute the value of ``t`` if it is constant.

        Returns: an array as from `value`; None if ``t`` is omitted, is not constant or can't be evaluated.
        """
        if t.is_empty():
            return None
        try:
            with evaluator.silence_numpy():
                if self.is_constant(t):
                    return self.value(t)
                return None
        except evaluator.UnsupportedOp:
            return None

    def value_and_remainder(self, t: gs.Tensor) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return a value and a remainder whose sum in float64 is the constant ``t``.

        Returns:
            float32 elements without a copy, and their remainder, or None if it is 0. Other types are returned as by
            `known_value`, without a remainder. None if ``t`` has no known value.
        """
        kept = self.exact.rounded_and_remainder(id(t))
        if kept is not None:
            return kept
        if isinstance(t, gs.Constant) and not t.is_empty() and t.dtype == np.float32 and id(t) not in self.exact:
            return stored_array(t), None
        value = self.known_value(t)
        if value is None:
            return None
        return (value, None)

    def evaluate_node(self, node: gs.Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Evaluate one node in float64, and report every failure as UnsupportedOp.

        Returns: one array per output.

        Raises:
            UnsupportedOp: the evaluator does not cover the op, or the inputs don't fit it.
        """
        try:
            return self.evaluate(node, inputs)
        except (ValueError, TypeError, IndexError, ArithmeticError, KeyError, AssertionError, MemoryError) as e:
            raise evaluator.UnsupportedOp(f"{node.op} {node.name!r}: {type(e).__name__}: {e}") from e

    def evaluate(self, node: gs.Node, inputs: Sequence[np.ndarray | None]) -> tuple[Any, ...]:
        """Evaluate one node in float64.

        Returns: one array per output.

        Raises:
            UnsupportedOp: the evaluator does not cover this op or this form of it.
        """
        return self.node_evaluator(node)(inputs)

    def node_evaluator(self, node: gs.Node) -> Callable[[Sequence[np.ndarray | None]], tuple[Any, ...]]:
        """Build a float64 function of a node's inputs.

        CastLike is a Cast to the type of its second input, whose value is not needed.

        Returns: a function from one array per input to one array per output; built once per node.
        """
        evaluation = self._evaluators.get(id(node))
        if evaluation is None:
            if node.op == "CastLike":
                target = self.dtype(node.inputs[1])
                if target is not None and target.kind in "iub":
                    kind = target
                else:
                    kind = np.dtype(np.float64)
                evaluation = partial(_cast_like, kind)
            else:
                if id(node) in self._new:
                    opset = max(self.opset, NEWEST)
                else:
                    opset = self.opset
                evaluation = partial(
                    evaluator.evaluate_node,
                    node.op,
                    attrs=self.attrs(node),
                    opset=opset,
                    domain=node.domain or "",
                    outputs=len(node.outputs),
                )
            self._evaluators[id(node)] = evaluation
        return evaluation

    def shape(self, t: gs.Tensor) -> Dims | None:
        """Return the shape as far as it is known.

        Returns: sizes, symbols or expressions of symbols, and None for an unknown dim; None if the rank is unknown.
        """
        if isinstance(t, gs.Constant):
            return tuple(t.shape)
        if id(t) in self._stated:
            return self._stated[id(t)]
        if t.shape is not None:
            known = t.shape
        else:
            known = None
        if known is None or any(_is_open_dim(d) or d in self._lonely for d in known):
            inferred = self._inferred_types.get(t.name)
            if inferred is not None and inferred[1] is not None:
                known = inferred[1]
        if known is None:
            dims = None
        else:
            dims = tuple(None if _is_open_dim(d) else d for d in known)
        if dims is not None and not any(d is None or is_invented_name(d) for d in dims):
            self._stated[id(t)] = dims
            return dims
        self._work_out_shapes()
        if dims is None:
            return self._carried_shape(t)
        return self._shapes.get(id(t)) or dims

    def _work_out_shapes(self) -> None:
        """Compute the shapes that neither the file nor onnx's inference provides. The base class does nothing;
        subclasses may override this.
        """

    def record_type(self, t: gs.Tensor, dtype: int | None, dims: Dims) -> None:
        """Record the type and shape that were found for ``t``.

        Args:
            dtype: elem_type; None if it was not determined.
        """
        self._shapes[id(t)] = dims
        if dtype is not None:
            self._dtypes[id(t)] = dtype

    def _carried_shape(self, t: gs.Tensor) -> Dims | None:
        """Return the shape that elementwise nodes carry from the last tensor of known shape.

        onnx's inference stops at the first op that it can't follow.
        """
        way: list[gs.Tensor] = []
        while id(t) not in self._shapes:
            node = self.producer(t)
            if node is None or not _keeps_input_shape(node, t) or len(way) > 64:
                self._shapes[id(t)] = None
                break
            way.append(t)
            sources = [i for i in node.inputs if not i.is_empty() and not self.is_constant(i)]
            source = max(sources, key=self._known_rank, default=None)
            if source is None or self._known_rank(source) >= 0:
                self._shapes[id(t)] = self._broadcast_shape(
                    [i for i in sources if self._known_rank(i) == self._known_rank(source)]
                )
                break
            t = source
        for step in way:
            self._shapes[id(step)] = self._shapes[id(t)]
        return self._shapes[id(t)]

    def _broadcast_shape(self, tensors: Sequence[gs.Tensor]) -> Dims | None:
        """Return the shape to which tensors of equal rank broadcast: for each axis, the first dim that is not 1."""
        shapes = [s for s in map(self.shape, tensors) if s is not None]
        if shapes:
            return tuple(next((d for d in dims if d != 1), 1) for dims in zip(*shapes, strict=True))
        return None

    def _known_rank(self, t: gs.Tensor) -> int:
        inferred = self._inferred_types.get(t.name)
        if t.shape is not None:
            known = t.shape
        else:
            known = (inferred[1] if inferred is not None else None) or self._shapes.get(id(t))
        if known is None:
            return -1
        return len(known)

    def dtype(self, t: gs.Tensor) -> Any:
        """Return the dtype of a tensor.

        Returns: numpy's dtype, of ml_dtypes for bfloat16; None if unknown or not a tensor type.
        """
        known = t.dtype
        if known is None:
            inferred = self._inferred_types.get(t.name)
            if inferred is not None:
                known = inferred[0]
            else:
                known = self._dtypes.get(id(t))
        if known is None:
            node = self.producer(t)
            if node is not None:
                typed_by = _type_source(node, t)
            else:
                typed_by = None
            if typed_by is None:
                return None
            return self.dtype(typed_by)
        try:
            if isinstance(known, int):
                return onnx.helper.tensor_dtype_to_np_dtype(known)
            return np.dtype(known)
        except (KeyError, TypeError):
            # The type is undefined, or a sequence, a map or an optional.
            return None

    @cached_property
    def _inferred_types(self) -> Types:
        """Run onnx's shape inference on a copy without the weights."""
        return infer_types(self.proto)


def stored_array(t: gs.Constant) -> np.ndarray:
    """Return the elements as stored in the file.

    Large constants are read again each time, because graphsurgeon would keep a copy of every weight.

    Returns: an array of the file's dtype.

    Raises:
        UnsupportedOp: the elements were detached from the model (`storage.weight_serialization.detach_weights`).
    """
    values = t._values
    if isinstance(values, gs.ir.tensor.LazyValues) and is_detached(values.tensor):
        raise evaluator.UnsupportedOp(f"the elements of {t.name!r} are not in this copy of the model")
    if isinstance(values, gs.ir.tensor.LazyValues) and values.nbytes > _LARGE:
        return values.load()
    return t.values


def widen_to_float64(values: np.ndarray) -> np.ndarray:
    """Convert floats to float64.

    Returns: float64 for floats, bfloat16 included; integers, booleans and quantized types unchanged.
    """
    if values.dtype.kind in "biu?" or is_quantized_type(values.dtype):
        return values
    return values.astype(np.float64)


def _is_open_dim(dim: int | str | None) -> bool:
    """Return whether a file leaves a dim open; PaddlePaddle's older exporters write -1."""
    return dim is None or dim == "" or (isinstance(dim, int) and dim < 0)


def _keeps_input_shape(node: gs.Node, t: gs.Tensor) -> bool:
    """Return whether ``t``, an output of ``node``, has the shape of its largest input.

    The op name alone does not identify a third-party op, so the result is False for it unless the op is a known norm.
    """
    norm = _norm_op_row(node)
    if norm is None and (node.domain or "") not in ("", "ai.onnx", DOMAIN):
        return False
    if norm is None:
        return node.op in _ELEMENTWISE
    return any(i in norm.x_shaped_outputs for i, o in enumerate(node.outputs) if o is t)


def _norm_op_row(node: gs.Node) -> NormOp | None:
    """Return the table row of a norm's node; None for other nodes."""
    here = (node.domain or "") in ("", "ai.onnx", DOMAIN)
    if here:
        return _NORMS.get(node.op)
    return third_party.third_party_row(node.domain, node.op)


def _type_source(node: gs.Node, t: gs.Tensor) -> gs.Tensor | None:
    """Return the input that determines the type of ``t``, an output of ``node``; None if unknown."""
    if node.op in ("Cast", "CastLike") or not _keeps_input_shape(node, t):
        return None
    norm = _norm_op_row(node)
    own = norm is not None and any(t is o and name == "Y" for o, name in zip(node.outputs, norm.outputs, strict=False))
    if norm is not None and own:
        place = norm.inputs.index(norm.typed_by)
    else:
        place = 0
    if place < len(node.inputs):
        return node.inputs[place]
    return None


def _cast_like(kind: np.dtype, inputs: Sequence[Any]) -> tuple[np.ndarray]:
    return (inputs[0].astype(kind),)


def value_inputs(node: gs.Node) -> list[gs.Tensor]:
    """List the inputs whose values matter. CastLike's second input only provides a type.

    Returns: the inputs that are not omitted.
    """
    if node.op == "CastLike":
        inputs = node.inputs[:1]
    else:
        inputs = node.inputs
    return [t for t in inputs if not t.is_empty()]


def _value_input_count(node: gs.Node) -> int:
    if node.op == "CastLike":
        return 1
    return len(node.inputs)
