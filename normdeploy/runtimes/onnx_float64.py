"""Run an ONNX file as the reference of a comparison: in float64, or with random roundings of the file's own types.

For a PyTorch model, ``torch_runners.Float64Runner`` and ``rounding_noise.RoundingRunner`` do the same. A node that the
evaluator does not know runs in onnxruntime in the file's own type, and `OnnxFloat64Runner.describe_narrow_nodes` names
it. Then both the reference and the file contain the rounding errors of that node. A node that stands for k nodes in its
subgraphs (k is 1 without subgraphs) causes 2k such errors, k in each of the two runs. How far these errors cancel is
unknown, so each element is disturbed by √(2k)·u times the largest element, where u is the unit roundoff.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch

from ..dtypes import unit_roundoff
from ..errors import NormdeployError
from ..evaluate import evaluator
from ..evaluate.evaluator_core import UnsupportedOp
from ..graphs.file_graph import widen_to_float64
from ..graphs.qoperator_expansion import expand_qoperators
from ..inputs.array_conversion import check_names
from ..norms.norm_table import STANDARD, StatisticsKind
from ..precision.preparation import file_opset
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_values, iter_subgraphs
from ..types import Arrays
from . import HeldRunner, RunResult, control_flow
from .float64_evaluator import Array, Float64Evaluator, NotEvaluated, inferred_dtypes, inline_functions
from .resize_error import resize_error_bound
from .rounding_noise import FLOAT16, FLOAT32, float32_sum_error_along, split_op_names, statistics_error, sum_roundings
from .torch_runners import Float64Runner
from .underflow import round_underflow

_HALVES = {torch.float16: np.dtype(np.float16), torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


# Ops that do not round. This set and the following sets correspond to the sets of operators in `rounding_noise`.
_EXACT = split_op_names("""
    Identity Reshape Transpose Squeeze Unsqueeze Flatten Expand Tile Concat Split Slice Gather GatherElements GatherND
    ScatterND
    ScatterElements Pad Relu Neg Abs Max Min Clip Where Sign Floor Ceil Round MaxPool GlobalMaxPool ReduceMax ReduceMin
    Dropout Constant
    ConstantOfShape DepthToSpace SpaceToDepth Trilu Compress OneHot EyeLike ReverseSequence
    SplitToSequence ConcatFromSequence SequenceAt SequenceConstruct
    """)
# Ops that round once.
_ONE_ROUNDING = split_op_names("Add Sub Mul Div Sqrt Reciprocal LeakyRelu PRelu ThresholdedRelu Cast CastLike")
# Ops that IEEE 754 requires to be correctly rounded. If the result of such an op fits in a dozen bits, it is taken as
# exact, because a rounded result rarely has so few bits.
_CORRECTLY_ROUNDED = split_op_names("Add Sub Mul Div")
# Ops whose absolute error is about u·1, even for results near 0.
_AS_ONE = split_op_names("Sigmoid HardSigmoid Softplus Elu Selu Celu LogSoftmax Sin Cos Erf Tanh Atan LSTM GRU RNN")
# Recurrent op -> positions of the inputs that hold initial states. A gate has an absolute error of about u and
# multiplies a state, so the error grows with the state.
_STATES = {"GRU": (5,), "LSTM": (5, 6)}
# Ops whose absolute error is about u·|operand|.
_AS_OPERAND = split_op_names("Gelu FastGelu QuickGelu BiasGelu Swish Mish HardSwish Softplus Sin Cos")
_CENTERED = frozenset(
    op for op, row in STANDARD.items() if row.statistics is StatisticsKind.INPUT and row.centered and row.has_scale
)
_SEQUENCES = split_op_names("SplitToSequence SequenceAt SequenceConstruct ConcatFromSequence")
_FIRST_ALONE = split_op_names("Pow Resize Upsample CumSum")
# Ops that return numbers below the smallest normal number even for ordinary operands.
_UNDERFLOWING = split_op_names("Exp Softmax Sigmoid Mul Div Pow ReduceProd Gelu FastGelu QuickGelu Swish")
_ORDERS = split_op_names("TopK ArgMax ArgMin NonMaxSuppression Unique")
# Maximum number of elements of a constant that is disturbed. A constant of one element is not disturbed either, since
# an epsilon or exponent is exact.
_SMALL = 2**16
# Unit roundoff -> smallest normal number. Only float16's range is narrow enough to matter.
_SMALLEST_NORMAL = {FLOAT16: 2.0**-14}
_SHORT = {FLOAT32: np.dtype(np.float16), FLOAT16: np.dtype(ml_dtypes.bfloat16)}
# Absolute noise that gives equal zeros a random order, since a runtime may sort equal numbers in any order. The noise
# is too small to change any other number.
_APART = 1e-300

_Read = Callable[[onnx.NodeProto, list[Any]], list[Any]]
_Write = Callable[[onnx.NodeProto, list[Any], str, Array], Array]
_RunBody = Callable[["OnnxFloat64Runner", Arrays], RunResult]


class OnnxFloat64Runner(HeldRunner):
    """Runner of the main graph of ``proto`` in float64, with the weights loaded. Floating outputs are float64.

    Raises:
        GraphError: a function that the file calls can't be inlined.
    """

    name = Float64Runner.name
    exact = Float64Evaluator

    def __init__(self, proto: onnx.ModelProto) -> None:
        proto = expand_qoperators(inline_functions(proto))
        types = inferred_dtypes(proto)
        self._exact = self.exact(proto, types)
        self._outputs = [v.name for v in proto.graph.output]
        self._places = [
            p
            for p in self._exact.nodes_between(self._outputs)
            if not set(self._exact.nodes[p].output) <= self._exact.constants
        ]
        reads = {p: self._exact.read_names(self._exact.nodes[p]) for p in self._places}
        self._last = {name: p for p, names in reads.items() for name in names}
        named = set(self._outputs).union(*reads.values())
        floats = [dtype for name, dtype in types.items() if name in named and is_floating(dtype)]
        self.unit = max(map(unit_roundoff, floats), default=0.0)
        # Runs a body of control flow in the same way as the graph around it.
        self._inside: _RunBody = OnnxFloat64Runner.infer
        self._bodies: dict[tuple[str, str], OnnxFloat64Runner] = {}

    def describe_narrow_nodes(self, within: str = "") -> list[str]:
        """List the nodes that onnxruntime ran in the file's own types so far.

        Returns:
            Descriptions such as "DFT 'd' in then_branch of If 'c'".
        """
        named = [_describe_node(node) + within for node in self._exact.narrow.values()]
        for (output, body), runner in self._bodies.items():
            node = self._exact.nodes[self._exact.makers[output]]
            named += runner.describe_narrow_nodes(f" in {body} of {_describe_node(node)}{within}")
        return named

    def infer(self, feeds: Arrays) -> RunResult:
        """Run the model in float64.

        Returns:
            Output name -> array; floating outputs are float64.

        Raises:
            InputError: inputs are missing or unknown.
            NormdeployError: a node can't be computed.
        """
        return self._run_nodes(feeds, OnnxFloat64Runner.infer)

    def run_and_find_overflow(self, feeds: Arrays) -> tuple[RunResult, dict[str, float]]:
        """Run the model in float64 and find the tensors with numbers beyond the range of the file's float16.

        Returns:
            Outputs as from ``infer``, and tensor name -> its largest finite magnitude, for each tensor that overflows.

        Raises:
            InputError: inputs are missing or unknown.
            NormdeployError: a node can't be computed.
        """
        beyond: dict[str, float] = {}

        def record_overflow(node: onnx.NodeProto, inputs: list[Any], name: str, value: Array) -> Array:
            if self._exact.types.get(name) == np.float16:
                largest = float(np.abs(np.where(np.isfinite(value), value, 0.0)).max(initial=0.0))
                if largest > np.finfo(np.float16).max:
                    beyond[name] = largest
            return value

        return self._run_nodes(feeds, OnnxFloat64Runner.infer, write=record_overflow), beyond

    def run_perturbed(self, feeds: Arrays, unit: float, seed: int) -> RunResult:
        """Run the model with every input and weight changed at random by a relative error of up to ``unit``.

        Outputs that change much are ill-conditioned. Single numbers are not changed, because an epsilon or exponent is
        exact.

        Returns:
            Outputs as from ``infer``.
        """
        rng = np.random.default_rng(seed)

        def perturb_value(value: Any) -> Any:
            if _is_float64(value):
                return value * (1 + unit * rng.uniform(-1, 1, value.shape))
            return value

        def perturb_inputs(node: onnx.NodeProto, inputs: list[Any]) -> list[Any]:
            constant = [name in self._exact.constants for name in node.input]
            return [
                perturb_value(v) if c and self._is_perturbable(node, i, v) else v
                for i, (v, c) in enumerate(zip(inputs, constant, strict=True))
            ]

        return self._run_nodes(
            {name: perturb_value(widen_to_float64(np.asarray(value))) for name, value in feeds.items()},
            lambda body, given: body.run_perturbed(given, unit, seed),
            read=perturb_inputs,
        )

    def _is_perturbable(self, node: onnx.NodeProto, place: int, value: Any, most: float = float("inf")) -> bool:
        """Return whether an input of a node may be disturbed.

        Exponents, the scales of a Resize and the inputs of a Range may not be disturbed, since they define the
        computation. A constant may be disturbed if it has more than one element and at most ``most`` elements.
        """
        if node.op_type == "Range" or (place and node.op_type in _FIRST_ALONE):
            return False
        return node.input[place] not in self._exact.constants or 1 < np.size(value) <= most

    def run_rounded(self, feeds: Arrays, seed: int, half: torch.dtype | None = None) -> RunResult:
        """Run the model once with random roundings, different ones for each ``seed``.

        Args:
            half: dtype to which float32 and float64 tensors of the file are rounded; None keeps the file's types.

        Returns:
            Outputs as from ``infer``.
        """
        if half is not None:
            kind = _HALVES.get(half)
        else:
            kind = None
        noise = _RoundingNoise(np.random.default_rng(seed), self._exact.types, kind, self._exact.narrow)

        def add_input_noise(node: onnx.NodeProto, inputs: list[Any]) -> list[Any]:
            unit = noise.unit_roundoff(node.output[0] if node.op_type not in _ORDERS else node.input[0], node)
            if not unit or node.op_type in _EXACT | _ONE_ROUNDING:
                return inputs
            if node.op_type in _ORDERS:
                apart = _APART
            else:
                apart = 0.0
            return [
                noise.add_noise(v, unit, apart) if self._is_perturbable(node, i, v, _SMALL) else v
                for i, v in enumerate(inputs)
            ]

        return self._run_nodes(
            feeds,
            # Each run of a body gets a new seed, so each iteration of a loop draws other roundings.
            lambda body, given: body.run_rounded(given, int(noise.random.integers(2**31)), half),
            read=add_input_noise,
            write=noise.add_output_noise,
            # In half precision, kernels differ in which intermediate results they round. So settled integers are
            # computed in the file's types only if ``half`` is not given.
            settled=kind is None,
        )

    def run_in_half(self, feeds: Arrays, half: torch.dtype | None) -> RunResult:
        """Run the model with each result rounded to its type in the file, or to ``half`` if that type is wider.

        This is the result of a correct runtime that computes node by node.

        Returns:
            Output name -> array in the rounded type.
        """
        if half is None:
            narrow = None
        else:
            narrow = _HALVES[half]

        def target_dtype(name: str, value: Array) -> np.dtype:
            own = self._exact.types.get(name, np.dtype(np.float32) if _is_float64(value) else value.dtype)
            if narrow is not None and own in (np.float32, np.float64):
                return narrow
            return own

        def round_value(name: str, value: Any) -> Any:
            if _is_float64(value):
                return value.astype(target_dtype(name, value)).astype(np.float64)
            return value

        def round_constants(node: onnx.NodeProto, inputs: list[Any]) -> list[Any]:
            return [
                round_value(n, v) if n in self._exact.constants else v for n, v in zip(node.input, inputs, strict=True)
            ]

        values = self._run_nodes(
            {name: round_value(name, widen_to_float64(np.asarray(value))) for name, value in feeds.items()},
            lambda body, given: body.run_in_half(given, half),
            read=round_constants,
            write=lambda node, inputs, name, value: round_value(name, value),
            # In this run every tensor already has its type in the file, so settled integers need no separate
            # computation.
            settled=False,
        )
        with np.errstate(all="ignore"):
            return {
                name: value.astype(target_dtype(name, value)) if _is_float64(value) else value
                for name, value in values.items()
            }

    def _run_nodes(
        self,
        feeds: Arrays,
        inside: _RunBody,
        *,
        read: _Read = lambda node, inputs: inputs,
        write: _Write = lambda node, inputs, name, value: value,
        settled: bool = True,
    ) -> RunResult:
        """Run the nodes in order.

        Args:
            inside: runs a body of control flow.
            read: changes the operands of a node.
            write: changes a floating result of a node, given its operands.
            settled: True to compute integers that do not depend on the inputs' data in the file's own types, not in
                float64.
        """
        check_names(self.name, feeds, sorted(self._exact.inputs))
        self._inside = inside
        stated: dict[str, Array] | None
        if settled:
            stated = {}
        else:
            stated = None
        values: dict[str, Array] = {name: widen_to_float64(np.asarray(value)) for name, value in feeds.items()}
        try:
            with evaluator.silence_numpy():
                for place in self._places:
                    self._run_node(place, values, stated, read, write)
                return {name: np.asarray(self._exact.tensor_value(name, values)) for name in self._outputs}
        except NotEvaluated as error:
            raise NormdeployError(f"the float64 reference can't be run: {error}") from error

    def _run_node(
        self, place: int, values: dict[str, Array], stated: dict[str, Array] | None, read: _Read, write: _Write
    ) -> None:
        node = self._exact.nodes[place]
        if node.op_type in control_flow.OPS and is_standard(node) and self._run_bodies(node, values):
            self._drop_read(place, node, values)
            return
        given: list[Any] = [self._exact.tensor_value(name, values) if name else None for name in node.input]
        if stated is not None:
            given = list(self._exact.apply_stated_types(place, given, stated))
        inputs = read(node, given)
        if node.op_type not in _SEQUENCES:
            made = self._exact.evaluate_node(node, inputs, values)
        else:
            made = _run_sequence_op(node, inputs)
        for name, value in zip(node.output, made, strict=False):
            if name and value is not None:
                values[name] = write(node, inputs, name, value) if _is_float64(value) else value
        self._drop_read(place, node, values)

    def _drop_read(self, place: int, node: onnx.NodeProto, values: dict[str, Array]) -> None:
        """Free the tensors that no later node reads."""
        for name in {*node.input, *node.output}:
            if self._last.get(name, -1) <= place and name not in self._outputs:
                values.pop(name, None)

    def _run_bodies(self, node: onnx.NodeProto, values: dict[str, Array]) -> bool:
        """Run control flow with the function that this run uses for bodies.

        Returns:
            False if this control flow is not implemented here, so that onnxruntime has to run the node.
        """

        def run_body(name: str, given: Sequence[Any]) -> list[Any]:
            body = self._body_runner(node, name)
            own = [v.name for v in control_flow.body_graph(node, name).input]
            feeds = dict(zip(own, (np.asarray(v) for v in given), strict=True))
            feeds |= {
                seen: self._exact.tensor_value(seen, values) for seen in control_flow.names_captured_by(node, name)
            }
            made = self._inside(body, feeds)
            return [widen_to_float64(made[v.name]) for v in control_flow.body_graph(node, name).output]

        inputs = [self._exact.tensor_value(name, values) if name else None for name in node.input]
        try:
            made = control_flow.run_control_flow(node, inputs, file_opset(self._exact.proto), run_body)
        except (UnsupportedOp, NormdeployError):
            return False
        values.update((name, np.asarray(v)) for name, v in zip(node.output, made, strict=False) if name)
        return True

    def _body_runner(self, node: onnx.NodeProto, name: str) -> OnnxFloat64Runner:
        key = (next(filter(None, node.output)), name)
        if key not in self._bodies:
            model = control_flow.body_model(node, name, self._exact.proto, self._exact.types)
            self._bodies[key] = OnnxFloat64Runner(model)
        return self._bodies[key]


class _RoundingNoise:
    """Draw random roundings r + u·ξ·(|r| + a), as `rounding_noise` defines them."""

    def __init__(
        self,
        rng: np.random.Generator,
        types: Mapping[str, np.dtype],
        half: np.dtype | None,
        narrow: Mapping[str, onnx.NodeProto],
    ) -> None:
        self._types = types
        self._half = half
        self._narrow = narrow
        self.random = rng

    def unit_roundoff(self, name: str, node: onnx.NodeProto) -> float:
        """Return the unit roundoff of a tensor.

        Returns:
            u of the tensor's dtype, or of ``half`` if that is narrower; 0 if the node does not round or the tensor is
            not floating.
        """
        own = self._types.get(name, np.dtype(np.float32))
        chooses = node.op_type in ("Resize", "Upsample") and not _is_interpolating(node)
        if node.op_type in _EXACT or chooses or not is_floating(own):
            return 0.0
        return unit_roundoff(self._half if self._half is not None and own in (np.float32, np.float64) else own)

    def add_noise(self, value: Any, unit: float, apart: float = 0.0, extra: Any = 0.0) -> Any:
        """Add a random rounding to each element of a float64 array.

        Args:
            unit: unit roundoff.
            apart: size of the absolute noise that separates equal zeros.
            extra: magnitudes added to |value| before scaling by ``unit``.

        Returns:
            The changed array; any other value is returned unchanged.
        """
        if not _is_float64(value):
            return value
        drawn = self.random.uniform(-1, 1, value.shape)
        # Below the smallest normal number, the type's spacing is constant down to 0. The noise does not change the sign
        # of a number.
        absolute = np.abs(value)
        size = np.maximum(absolute, np.minimum(_SMALLEST_NORMAL.get(unit, 0.0), absolute / unit))
        return value + np.nan_to_num(unit * drawn * (size + extra), nan=0.0, posinf=0.0, neginf=0.0) + apart * drawn

    def add_output_noise(self, node: onnx.NodeProto, inputs: list[Any], name: str, value: Array) -> Array:
        """Add the rounding errors of the op to one of its results.

        Args:
            inputs: the node's operands.
            name: the output's name.

        Returns:
            The changed value.
        """
        unit = self.unit_roundoff(name, node)
        counted = node.op_type == "Range" or (node.op_type in ("Cast", "CastLike") and not _is_float64(inputs[0]))
        # A size cast to float is a whole number, so the cast does not round it.
        if not unit or counted or node.op_type in _ORDERS:
            return value
        extra: Any = 1.0 if node.op_type in _AS_ONE else 0.0
        if node.op_type in _STATES:
            extra += _largest_finite(inputs[i] for i in _STATES[node.op_type] if i < len(inputs))
        unknown = node.op_type not in _AS_ONE | _AS_OPERAND | _ONE_ROUNDING | _FIRST_ALONE
        if unknown and self._narrow.get(next(filter(None, node.output))) is node and value.size:
            largest = np.abs(np.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)).max()
            extra = extra + largest * (2.0 * _count_nodes(node)) ** 0.5
        if node.op_type in _AS_OPERAND and np.shape(inputs[0]) == value.shape:
            extra = extra + np.abs(inputs[0])
        if node.op_type in ("ReduceSum", "ReduceMean", "GlobalAveragePool") and value.size and _is_float64(inputs[0]):
            extra = extra + np.abs(value) * (sum_roundings(inputs[0].size / value.size) - 1)
            if unit == FLOAT32:
                lost = float32_sum_error_along(
                    inputs[0], _reduced_axes(node, inputs), node.op_type != "ReduceSum"
                ).reshape(value.shape)
                value = value + lost * self.random.uniform(-1, 1, value.shape)
        elif node.op_type in ("Resize", "Upsample") and np.ndim(inputs[0]) == value.ndim and _is_interpolating(node):
            antialias = any(a.name == "antialias" and a.i for a in node.attribute)
            off = resize_error_bound(inputs[0], value.shape, min(unit, FLOAT32), antialias=antialias)
            value = value + off * self.random.uniform(-1, 1, value.shape)
        elif node.op_type == "CumSum":
            value = value + _cumulate_noise(
                node, self.add_noise(value, unit) - value, int(np.asarray(inputs[1]).item())
            )
        elif node.op_type in _CENTERED and name == node.output[0]:
            value = value + self._statistics_noise(node, inputs, value, unit)
        moved = np.array(self.add_noise(value, unit, extra=extra))
        if node.op_type in _CORRECTLY_ROUNDED and unit in _SHORT:
            with np.errstate(all="ignore"):
                kept = value == value.astype(_SHORT[unit]).astype(value.dtype)
            moved = np.where(kept, value, moved)
        if node.op_type in _UNDERFLOWING:
            round_underflow(moved, unit, self.random)
        return moved

    def _statistics_noise(self, node: onnx.NodeProto, inputs: list[Any], value: Array, unit: float) -> Array:
        """Draw the error that rounded statistics cause in a norm.

        The error is the same for the whole row, even if the row's elements differ little.

        Returns:
            Error, with the shape of ``value``.
        """
        x = inputs[0]
        scale = inputs[1]
        if not x.size:
            return np.zeros_like(value)
        attrs = attribute_values(node)
        if node.op_type == "LayerNormalization":
            axis = int(attrs.get("axis", -1)) % x.ndim
            rows = x.reshape(*x.shape[:axis], -1)
            weight = scale
        else:
            if node.op_type == "GroupNormalization":
                groups = int(attrs.get("num_groups", x.shape[1]))
            else:
                groups = x.shape[1]
            rows = x.reshape(x.shape[0], groups, -1)
            weight = np.repeat(scale, x.shape[1] // len(scale)).reshape(-1, *[1] * (x.ndim - 2))
        alike, scaled = statistics_error(rows, float(attrs.get("epsilon", 1e-5)), unit)
        drawn = (self.random.uniform(-1, 1, alike.shape) for _ in range(2))
        off = alike * next(drawn) + (rows - rows.mean(-1, keepdims=True)) * scaled * next(drawn)
        return np.asarray(np.nan_to_num(off, nan=0.0, posinf=0.0, neginf=0.0).reshape(value.shape) * weight)


def _largest_finite(values: Iterable[Any]) -> float:
    """Return the largest finite magnitude in all arrays; 0 if they contain no finite number."""
    finite = [np.nan_to_num(np.abs(v), nan=0.0, posinf=0.0, neginf=0.0) for v in values if v is not None and np.size(v)]
    return max((float(v.max()) for v in finite), default=0.0)


def _describe_node(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {(node.name or next(filter(None, node.output)))!r}"


def _count_nodes(node: onnx.NodeProto) -> int:
    """Count the nodes of a node's bodies, at any depth; a node without bodies counts as 1."""
    return sum(_count_nodes(inner) for body in iter_subgraphs(node) for inner in body.node) or 1


def _is_interpolating(node: onnx.NodeProto) -> bool:
    """Return whether a Resize interpolates between neighbors instead of choosing the nearest neighbor."""
    return any(a.name == "mode" and a.s != b"nearest" for a in node.attribute)


def _reduced_axes(node: onnx.NodeProto, inputs: list[Any]) -> list[int]:
    """Return the axes of a reduction; an empty list means all axes."""
    if node.op_type == "GlobalAveragePool":
        return list(range(2, inputs[0].ndim))
    if len(inputs) > 1 and inputs[1] is not None:
        given = inputs[1]
    else:
        given = next((a.ints for a in node.attribute if a.name == "axes"), ())
    return [int(a) for a in np.asarray(given).reshape(-1)]


def _cumulate_noise(node: onnx.NodeProto, lost: Array, axis: int) -> Array:
    """Add the error of each partial sum of a CumSum to all later elements (to all earlier elements with ``reverse``).

    ``exclusive`` needs no special case: each result is still a partial sum, stored one element later, and the first
    result is exactly 0.
    """
    if any(a.name == "reverse" and a.i for a in node.attribute):
        return np.asarray(np.flip(np.cumsum(np.flip(lost, axis), axis=axis), axis))
    return np.asarray(np.cumsum(lost, axis=axis))


def _run_sequence_op(node: onnx.NodeProto, inputs: list[Any]) -> list[Any]:
    """Compute the ops on sequences that torch's exporter writes for ``split`` and ``chunk``; a sequence is a list."""
    attrs = {a.name: a.i for a in node.attribute}
    first = inputs[0]
    if len(inputs) > 1:
        second = inputs[1]
    else:
        second = None
    if node.op_type == "SequenceConstruct":
        return [list(inputs)]
    if node.op_type == "SequenceAt":
        return [first[int(inputs[1])]]
    axis = attrs.get("axis", 0)
    if node.op_type == "ConcatFromSequence":
        return [np.stack(first, axis) if attrs.get("new_axis", 0) else np.concatenate(first, axis)]
    size = first.shape[axis]
    if second is None:
        step = 1
    else:
        step = second
    if np.ndim(step):
        ends = np.cumsum(step)[:-1]
    else:
        ends = np.arange(int(step), size, int(step))
    parts = np.split(first, ends, axis)
    return [[np.squeeze(part, axis) for part in parts] if second is None and not attrs.get("keepdims", 1) else parts]


def _is_float64(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64


def is_floating(kind: np.dtype) -> bool:
    """Return whether a numpy dtype is floating, including ml_dtypes' bfloat16."""
    return kind.kind == "f" or kind == ml_dtypes.bfloat16
