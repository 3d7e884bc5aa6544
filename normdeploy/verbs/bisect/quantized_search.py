"""Search a quantized file for weights, nodes and quantizers with errors that quantization does not explain.

The search covers, in this order:

1. weights that are not within half a step of the nearest parameter (``quantized_weights``);
2. nodes, in the file without its quantization (``remove_quantization``), which is searched like any float file
   (``fault_search``);
3. quantizers of activations: a QuantizeLinear and DequantizeLinear with different parameters, a range that is far too
   wide, or a range that clips too much. A range clips too much if it clips values that a calibration on such inputs
   would have seen (`StepBudget.trust_ranges`).

A suspect weight or quantizer is mended in a trial: the weight is set to the parameter, or the quantizer neither rounds
nor clips. The suspect is at fault if the error of the output then falls by a third. If no trial achieves that, a
smaller improvement of 3 % is enough. A change that makes the output worse does not count.

Mended faults stay mended during the search. It ends when the output is within its error budget
(`verbs.verify.quantization_budget`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from ...errors import NormdeployError
from ...graphs.proto_queries import module_path
from ...graphs.qoperator_expansion import expand_qoperators
from ...graphs.quantization_info import DEQUANTIZE, QUANTIZE, GraphQuantization, is_quantization_node, quantizes_inside
from ...runtimes.float64_evaluator import NotEvaluated
from ...runtimes.quantized_float64 import QuantizedRunner
from ...runtimes.rounding_draws import RoundingDraw
from ...types import Array, Arrays, Progress
from ..verify.quantization_budget import BOTH, UNBOUNDED, UNROUNDED, VOID, CaseBudget
from ..verify.reference_models import FloatReference, Original
from ..verify.runtime_candidates import OFF
from .dequantized_file import BEFORE_RELU, original_node_name, remove_quantization
from .fault_search import FaultSearch
from .fault_tracing import Fault, FaultyOutput
from .quantized_weights import ModelParameters, QuantizedWeight, channel_size_ratio, describe_wrong_weight
from .runtime_faults import Float32Trial, TensorError
from .trial_changes import Cause

# Largest share of the error that may remain after a fault is mended. The second number is tried later: one of several
# faults contributes less to the error.
_HELPS = (2 / 3, 0.97)
# The largest error may grow up to this factor when a fault is mended, because two faults may partly cancel. A larger
# growth makes the output worse.
_WORSE = 1.5
# A range is too wide if the values use less than this share of it: at least three bits are then wasted.
_COARSE = 1 / 8
# Ratio of the largest to the smallest channel from which one scale for all channels is reported: the smallest channel
# then loses four bits.
_APART = 16.0
# Allowed error of a float32 evaluation, relative to the output's largest number. It is far below any quantization step.
_FLOAT32 = 1e-5
# Number of random inputs that test the ranges.
_USUAL = 4
# Kinds of causes that make the error budget larger than necessary, but no error larger than the budget.
_BY_STEPS = ("coarse", "granularity")
_UNEXPLAINED = ("unknown", "left out", "factor", "weights")
MOST = 5


@dataclass(frozen=True, kw_only=True)
class QuantizationSuspect:
    """Weight or quantizer that may be wrong.

    Attributes:
        made: tensor that is set to ``right`` in a run with the suspect mended.
        tensor: tensor that the fault names.
        right: right value of ``made``; None if the run turns rounding and clipping off instead.
        off: error of ``tensor``.
    """

    node: onnx.NodeProto
    made: str
    tensor: str
    right: Array | None
    cause: Cause
    off: TensorError


@dataclass(frozen=True)
class _OutputState:
    """Error of the output.

    Attributes:
        error: largest error of an element.
        typical: root mean square of the errors, which does not depend on a single element.
        steps: effect of the quantization steps, relative to the output (root mean squares).
        right: True if the output is within its error budget.
    """

    error: float
    typical: float
    steps: float
    right: bool


class QuantizedSearch:
    """Search for the faults of one output of a quantized file.

    Args:
        usual: random inputs that test the ranges; empty if the user passes inputs.
        calibrated: outputs of quantizers whose ranges the file records.
    """

    def __init__(
        self,
        model: Original,
        proto: onnx.ModelProto,
        subject: FaultyOutput,
        usual: Sequence[Arrays],
        calibrated: Iterable[str],
        progress: Progress | None,
    ) -> None:
        self._model = model
        self._subject = subject
        self._result = subject.result
        self._feeds = subject.feeds
        self._progress = progress
        # Nodes that the search expands to several nodes -> their original ops.
        self._inside = {
            n.name or n.output[0]: n.op_type for n in proto.graph.node if quantizes_inside(n) or is_quantization_node(n)
        }
        self._runner = QuantizedRunner(expand_qoperators(proto))
        self._quantization = GraphQuantization(self._runner.proto)
        self._reference = FloatReference(model).float64_runner.infer(self._feeds)[self._result.output]
        self._usual, self._calibrated = _pick_larger_half(usual), frozenset(calibrated)
        self._held: dict[str, Array | None] = {}
        self._named: list[Fault] = []
        values = self._runner.run_all_tensors(self._feeds, RoundingDraw())
        self._weights = list(ModelParameters(model).iter_weights(self._runner.proto, values))
        self._first = self._now = self._measure_output({})

    def faults(self) -> list[Fault]:
        """Find the faults that make the output wrong.

        Returns:
            At most `MOST` faults.
        """
        weights = list(filter(None, map(self._suspect_weight, self._weights)))
        self._mend_suspects(weights)
        if self._now.right:
            in_graph = []
        else:
            in_graph = self._find_float_faults()
        while not in_graph and not self._now.right and len(self._named) < MOST:
            count = len(self._named)
            self._mend_suspects(list(self._iter_suspect_quantizers()))
            # A wrong quantizer may have hidden a wrong weight.
            self._mend_suspects(weights)
            if len(self._named) == count:
                break
        if self._now.right:
            # The output is right on this input. Other wrong weights are reported too, because they may matter on other
            # inputs.
            self._mend_suspects(weights, all_of_them=True)
        return (self._named + in_graph)[:MOST]

    def _mend_suspects(self, suspects: Sequence[QuantizationSuspect], *, all_of_them: bool = False) -> None:
        """Add a fault for each suspect that makes the output wrong, and keep the suspect mended.

        Args:
            all_of_them: continue after the output is within its error budget.
        """
        for helps, suspect in ((helps, suspect) for helps in _HELPS for suspect in suspects):
            if (self._now.right and not all_of_them) or len(self._named) == MOST:
                return
            if suspect.made in self._held:
                continue
            held = {**self._held, suspect.made: suspect.right}
            after = self._measure_output(held)
            now = self._now
            nearer = after.typical <= helps * now.typical and after.error <= _WORSE * now.error
            finer = suspect.cause.kind in _BY_STEPS and after.steps <= helps * now.steps
            mended = after.right and not now.right
            if mended or nearer or finer:
                self._held = held
                self._now = after
                self._named.append(self._make_fault(suspect, after))

    # ------------------------------------------------------------------ error of the output

    def _measure_output(self, held: Mapping[str, Array | None]) -> _OutputState:
        """Measure the error of the output with some suspects mended, and compare it with the error budget of the mended
        file.
        """
        output = self._result.output
        is_unrounded = self._result.runtime == UNROUNDED

        def run_mended(feeds: Arrays, draw: RoundingDraw) -> dict[str, Array]:
            """Run the file with the suspects mended.

            Returns:
                Output name -> array.
            """
            values = self._runner.run_all_tensors(feeds, replace(draw, held=held))
            return {output: values[output]}

        plain = run_mended(self._feeds, RoundingDraw())
        clipped = self._runner.clipped_tensors()
        budget = CaseBudget(
            run_mended, self._feeds, self._runner.clipped_tensors, clipped - self._untrusted_ranges(held, clipped)
        )
        # Treat values that calibrated ranges clip in the same way as ``verify``.
        by_calibration = budget.cut is not None
        right = self._reference
        if is_unrounded:
            got = run_mended(self._feeds, UNBOUNDED if by_calibration else RoundingDraw("exact"))[output]
        else:
            got = plain[output]
            if budget.cut is not None:
                right = budget.cut[output]
        if got.shape != right.shape:
            return _OutputState(float("inf"), float("inf"), float("inf"), False)
        away = np.abs(got.astype(np.float64) - right)
        base = np.full(away.shape, _FLOAT32 * float(np.nanmax(np.abs(right), initial=0.0)))
        bound = budget.allowed_error(output, ("weights",) if is_unrounded else BOTH, base, away)
        steps = budget.relative_error(output)
        is_right = bool((away <= bound).all()) and (is_unrounded or steps <= VOID)
        if away.size:
            typical = float(np.sqrt(np.nanmean(away**2)))
        else:
            typical = 0.0
        return _OutputState(float(np.nanmax(away, initial=0.0)), typical, steps, is_right)

    def _untrusted_ranges(self, held: Mapping[str, Array | None], clipped: frozenset[str]) -> frozenset[str]:
        """Return the ranges that can't come from a calibration on such inputs, because they clip values of every
        input.
        """
        if not clipped or clipped <= self._calibrated:
            return frozenset()
        left = clipped
        for feeds in self._usual:
            self._runner.run_all_tensors(feeds, RoundingDraw(held=held))
            left &= self._runner.clipped_tensors()
        return left

    # ------------------------------------------------------------------ weights

    def _suspect_weight(self, weight: QuantizedWeight) -> QuantizationSuspect | None:
        right = weight.right
        if right is None:
            return None
        if not weight.is_right:
            cause = describe_wrong_weight(self._describe_node(weight.node), weight.name, weight.got, right, weight.step)
        elif weight.granularity == "tensor" and right.ndim > 1 and (ratio := channel_size_ratio(right)) > _APART:
            text = (
                f"{weight.name!r} has one scale, but its channels differ in size by a factor of {ratio:.3g}:"
                " use one scale per channel"
            )
            cause = Cause("granularity", text)
        else:
            return None
        error, allowed = weight.worst_error
        is_inside = self._op_in_file(weight.node) != weight.node.op_type
        return QuantizationSuspect(
            node=weight.node,
            made=weight.made,
            tensor=weight.node.input[0] if is_inside else weight.tensor,
            right=weight.held_value,
            cause=cause,
            off=TensorError(error, allowed, float(np.abs(right).max(initial=0.0))),
        )

    # ------------------------------------------------------------------ nodes

    def _find_float_faults(self) -> list[Fault]:
        """Find the faults in the file without its quantization.

        A weight that matches no parameter keeps its rounding, which causes errors. In this case, only faults with a
        known cause are reported.
        """
        try:
            hunts = [
                self._open_float_search({w.made for w in self._weights}),
                self._open_float_search(self._held.keys()),
            ]
            if any(hunt.output_error() for hunt in hunts):
                return []
            found = hunts[0].faults()
        except (NotEvaluated, NormdeployError):
            return []
        if not all(w.is_right or w.made in self._held for w in self._weights):
            found = [fault for fault in found if fault.kind not in _UNEXPLAINED]
        return [self._rename_to_file(fault) for fault in found]

    def _rename_to_file(self, fault: Fault) -> Fault:
        """Replace the names of the fault's nodes and tensors by the names in the original file."""
        fault = replace(
            fault,
            runtime=self._result.runtime,
            nodes=tuple(dict.fromkeys(map(self._rename_in_text, fault.nodes))),
            tensor=fault.tensor.removesuffix(BEFORE_RELU),
            cause=fault.cause.replace(BEFORE_RELU, ""),
        )
        names = {node.partition(" ")[2] for node in fault.nodes}
        for quantize in self._quantization.data_quantizers() if fault.kind == "operator" else ():
            ends = self._quantization.scheme_of(quantize).representable_range
            pair = (quantize, *self._quantization.readers_by_tensor.get(quantize.output[0], ()))
            if ends is not None and names & {self._node_name(node) for node in pair}:
                cause = (
                    f"the range of {self._describe_node(quantize)} starts at {ends[0]:.4g}; the model has ReLU"
                    " there, so it must start at 0"
                )
                node = f"{self._op_in_file(quantize)} {quantize.name}".strip()
                return replace(fault, kind="zero point", cause=cause, nodes=(node,))
        return fault

    def _open_float_search(self, mended: Collection[str]) -> FaultSearch:
        """Open the search in the file without its quantization.

        Args:
            mended: weights that are set to the model's parameter even if they are only near it.
        """
        numbers = {w.made: w.unrounded_values(mended=w.made in mended) for w in self._weights}
        plain = remove_quantization(self._runner.proto, numbers)
        subject = replace(self._subject, result=replace(self._result, runtime=OFF))
        return FaultSearch(self._model, plain, subject, self._progress)

    # ------------------------------------------------------------------ quantizers

    def _iter_suspect_quantizers(self) -> Iterator[QuantizationSuspect]:
        self._runner.run_all_tensors(self._feeds, RoundingDraw(held=self._held))
        untrusted = self._untrusted_ranges(self._held, self._runner.clipped_tensors())
        # The saturations of earlier runs are dropped, because the messages report values on this input only.
        self._runner.reset_saturations()
        values = self._runner.run_all_tensors(self._feeds, RoundingDraw(held=self._held))
        ranges = {s.tensor: s for s in self._runner.list_saturations()}
        for node in self._quantization.nodes:
            if not is_quantization_node(node):
                continue
            if node.op_type == DEQUANTIZE and not self._quantization.is_weight(node.output[0]):
                suspect = self._suspect_pair(node, values)
            elif node.op_type == QUANTIZE and not self._quantization.is_weight(node.input[0]):
                seen = ranges.get(node.input[0])
                cause = None
                if seen and node.output[0] in untrusted:
                    cause = Cause("saturation", f"its scale is too small: {seen}")
                elif seen is not None and 0 < seen.used < _COARSE:
                    share = f"{node.input[0]!r} uses {seen.used:.1%} of the range of {self._describe_node(node)}"
                    cause = Cause("coarse", f"its scale is too large: {share}")
                if cause is None:
                    suspect = None
                else:
                    suspect = self._suspect_quantizer(node, values, cause)
            else:
                continue
            if suspect is not None:
                yield suspect

    def _suspect_quantizer(self, node: onnx.NodeProto, values: Arrays, cause: Cause) -> QuantizationSuspect:
        x = values[node.input[0]]
        scheme = self._quantization.scheme_of(node)
        back = next((values[r.output[0]] for r in self._quantization.readers_by_tensor.get(node.output[0], ())), x)
        if back.shape == x.shape:
            error = float(np.nanmax(np.abs(back - x), initial=0.0))
        else:
            error = float("nan")
        if scheme.scale is None:
            half = float("nan")
        else:
            half = 0.5 * float(np.max(scheme.scale))
        size = float(np.nanmax(np.abs(x), initial=0.0))
        return QuantizationSuspect(
            node=node,
            made=node.output[0],
            tensor=node.input[0],
            right=None,
            cause=cause,
            off=TensorError(error, half, size),
        )

    def _suspect_pair(self, node: onnx.NodeProto, values: Arrays) -> QuantizationSuspect | None:
        """Check a QuantizeLinear with its DequantizeLinear. The pair is a suspect if the parameters of the two
        differ.
        """
        q = self._quantization
        quantize = q.makers.get(node.input[0])
        if quantize is None or quantize.op_type != QUANTIZE:
            return None
        mine = q.scheme_of(node)
        theirs = q.scheme_of(quantize)
        for kind, ours, other in (
            ("scale", mine.scale, theirs.scale),
            ("zero point", mine.zero_point, theirs.zero_point),
        ):
            if ours is not None and other is not None and not np.array_equal(ours, other):
                text = (
                    f"the {kind} of {self._describe_node(node)} is {_format_number(ours)}, but that of the"
                    f" {self._op_in_file(quantize)} before it is {_format_number(other)}"
                )
                suspect = self._suspect_quantizer(quantize, values, Cause(kind, text))
                return replace(suspect, node=node, made=node.output[0])
        return None

    # ------------------------------------------------------------------ names

    def _make_fault(self, suspect: QuantizationSuspect, after: _OutputState) -> Fault:
        r = self._result
        return Fault(
            runtime=r.runtime,
            case=self._subject.case,
            module=module_path(suspect.node) or self._reader_module(suspect.made),
            tensor=suspect.tensor,
            nodes=(f"{self._op_in_file(suspect.node)} {suspect.node.name}".strip(),),
            error=suspect.off.error,
            allowed=suspect.off.allowed,
            scale=suspect.off.scale,
            kind=suspect.cause.kind,
            cause=suspect.cause.text,
            widened=Float32Trial(None, reason="the file is quantized"),
            output=r.output,
            output_error=self._first.error,
            output_allowed=r.allowed,
            output_reason="",
            mended_error=after.error,
            mended=after.right,
        )

    def _reader_module(self, made: str) -> str:
        return next(
            (m for reader in self._quantization.readers_by_tensor.get(made, ()) if (m := module_path(reader))), ""
        )

    def _node_name(self, node: onnx.NodeProto) -> str:
        return node.name or node.output[0]

    def _op_in_file(self, node: onnx.NodeProto) -> str:
        """Return the op of the node in the original file, which may be an op with inner quantization."""
        return self._inside.get(self._node_name(node), node.op_type)

    def _rename_in_text(self, node: str) -> str:
        """Replace "op name" in a text by the op and name of the node in the original file."""
        op, _, name = node.partition(" ")
        name = original_node_name(name)
        return f"{self._inside.get(name, op)} {name}".strip()

    def _describe_node(self, node: onnx.NodeProto) -> str:
        if node.name:
            return f"{self._op_in_file(node)} {node.name!r}"
        return f"{node.op_type} of {node.output[0]!r}"


def _pick_larger_half(usual: Sequence[Arrays]) -> list[Arrays]:
    """Choose at most `_USUAL` of the random inputs, from the half with the most elements.

    On inputs with few elements, a wrong range may include all values by chance.
    """
    ordered = sorted(usual, key=lambda feeds: sum(value.size for value in feeds.values()))
    return ordered[len(ordered) // 2 :][:_USUAL]


def _format_number(value: Array) -> str:
    if value.size == 1:
        return f"{value.reshape(-1)[0]:.6g}"
    return f"{value.size} numbers"
