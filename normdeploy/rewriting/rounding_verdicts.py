"""Judge the rounding of a rewrite: onnxruntime runs the nodes before and after in the model's type.

A group's error after the rewrite is expected to be at most

    max(2 · error before, the rounding error of the formula itself: `normdeploy.compare.rewrite_errors`)

The verdict takes a rewrite back only if the result is gross, in one of three cases:

- onnxruntime runs the nodes before the rewrite, but has no kernel for the nodes after.
- The nodes after give NaN or Inf at ordinary inputs (`ORDINARY`).
- At ordinary inputs, the error exceeds the allowed error by more than a factor of `GROSS`.

A smaller excess is only noted. For example, GroupNormalization computes E[x²] − E[x]² and loses most digits at an
offset of 1e3, in every file that contains it.

One session runs up to 64 rewrites, because creating a session costs more than running it. Larger sessions would not
pay, because the cost grows faster than the graph. Large weights are inputs, which onnxruntime reads without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..compare.element_errors import absolute_difference
from ..compare.rewrite_errors import norm_rounding_error, sum_rounding_error
from ..compare.verdict import Verdict, nearest_to_bound
from ..dtypes import UNIT_ROUNDOFF
from ..evaluate import evaluator
from ..findings.records import Certificate, Finding
from ..graphs.function_ops import attach_functions
from ..graphs.graph import Graph, value_inputs
from ..graphs.region import EvaluationFailed, Refusal, Region, concrete_shape
from ..ort_sessions.session import open_session, to_ort
from ..recognition.norm_facts import Norm
from ..recognition.norm_fit import NormFit
from ..storage.shared_weights import is_shareable_weight
from . import rounding_cases
from .certification import Rewrite
from .rounding_cases import RoundingCase

BATCH = 64
# Maximum number of rewrites that are run, of those that run the same kernels
OF_A_KIND = 8
# Factor by which a gross error exceeds the allowed error
GROSS = 16
# Patterns of `rounding_cases` that are ordinary inputs
ORDINARY = frozenset({"normal", "skewed"})


@dataclass(frozen=True)
class SideModel:
    """One side of a rewrite as ONNX, with renamed tensors so that many fit into one graph.

    Attributes:
        nodes: the nodes.
        initializers: small constants.
        inputs: leaves and large weights.
        feeds: arrays of the inputs, by name.
        output: name of the result.
        opset: opset of the nodes.
    """

    nodes: tuple[onnx.NodeProto, ...]
    initializers: tuple[onnx.TensorProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    feeds: dict[str, np.ndarray]
    output: str
    opset: int


@dataclass(frozen=True)
class RoundingTrial:
    """Rewrite that waits for its rounding verdict.

    Attributes:
        before: model of the nodes before.
        after: model of the nodes after.
        reference: the result in float64.
        rows: lays a result out as a matrix; the elements of a row are judged together.
        expected: expected error of each row.
        ordinary: True for rows with an ordinary input.
        nbytes: bytes held only for this trial.
    """

    before: SideModel
    after: SideModel
    reference: np.ndarray
    rows: Callable[[np.ndarray], np.ndarray]
    expected: np.ndarray
    ordinary: np.ndarray
    nbytes: int = 0


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of a trial.

    Attributes:
        before: error of the nodes before, in the worst row; None if nothing was compared.
        after: verdict on the nodes after, in the worst row; None if nothing was compared.
        note: note for the certificate.
        gross: reason why the rewrite must be taken back; None if it may stay.
        missing: reason why nothing was compared; None otherwise.
    """

    before: float | None = None
    after: Verdict | None = None
    note: str = ""
    gross: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class TrialInput:
    """Input of a trial and its expected error.

    Attributes:
        case: the input.
        dtype: type in which both sides run.
        rows: lays a result out as a matrix; the elements of a row are judged together.
        expected: returns the rounding error of each row from (float64 result, unit roundoff of ``dtype``).
    """

    case: RoundingCase
    dtype: np.dtype
    rows: Callable[[np.ndarray], np.ndarray]
    expected: Callable[[np.ndarray, float], np.ndarray]


MakeTrial = Callable[[Sequence[Rewrite], int], RoundingTrial | None]


def make_trial_of(choose: Callable[[Rewrite], TrialInput | None], opset: int) -> MakeTrial:
    """Build a function that makes a trial from (the rewrites of a proposal, the number of the trial).

    Only the first rewrite is tried. It is not tried if ``choose`` returns None, or if float64 has no result.

    Args:
        choose: chooses the input of a rewrite.
        opset: lowest opset that has the written nodes.

    Returns:
        the function.
    """

    def make_trial(rewrites: Sequence[Rewrite], number: int) -> RoundingTrial | None:
        chosen = choose(rewrites[0])
        if chosen is None:
            return None
        return make_case_trial(rewrites[0], chosen, opset, number)

    return make_trial


def norm_trial_maker(norm: Norm, opset: int) -> MakeTrial:
    """Build the function that makes the trial of a norm's rewrite on the battery.

    Returns:
        a function as `make_trial_of` returns.
    """

    def choose_input(rewrite: Rewrite) -> TrialInput | None:
        case = rounding_cases.norm_case(norm, rewrite)
        if case is None:
            return None
        if norm.gamma is None or norm.gamma.value is None:
            gamma = 1.0
        else:
            gamma = float(np.abs(norm.gamma.value).max())
        layout = norm.fit.resize(case.leaves[0].shape)
        return make_norm_input(
            case, norm.dtype, layout, layout.rows_of(case.leaves[0]), epsilon=norm.epsilon, gamma=gamma
        )

    return make_trial_of(choose_input, opset)


def make_norm_input(
    case: RoundingCase, dtype: np.dtype, fit: NormFit, x: np.ndarray, *, epsilon: float, gamma: float
) -> TrialInput:
    """Build the trial input of a norm. The expected error is the rounding error of the norm's formula.

    Args:
        x: the normalized rows.
        gamma: largest magnitude of gamma.

    Returns:
        the trial input.
    """

    def expected_error(reference: np.ndarray, unit: float) -> np.ndarray:
        y = fit.rows_of(reference)
        return norm_rounding_error(x, y, epsilon, centered=fit.centered, gamma=gamma, unit=unit)

    return TrialInput(case, dtype, fit.rows_of, expected_error)


def fold_trial_maker(windows: Sequence[tuple[int, ...] | None], dtype: np.dtype, opset: int = 1) -> MakeTrial:
    """Build the function that makes the trial of a fold. The expected error is the rounding error of its largest sum.

    Args:
        windows: smaller shape of each leaf, as for `rounding_cases.fold_case`; empty for the file's shapes.
        dtype: type in which both sides run.
        opset: lowest opset that has the written nodes.

    Returns:
        a function as `make_trial_of` returns.
    """

    def choose_input(rewrite: Rewrite) -> TrialInput | None:
        tried = rounding_cases.fold_case(rewrite, windows)
        if tried is None:
            return None
        case, terms = tried
        return make_whole_input(case, dtype, lambda y, unit: sum_rounding_error(terms, unit))

    return make_trial_of(choose_input, opset)


def make_whole_input(case: RoundingCase, dtype: np.dtype, expected: Callable[[np.ndarray, float], float]) -> TrialInput:
    """Build a trial input whose elements are all judged together.

    Args:
        expected: returns the error from (float64 result, unit roundoff).

    Returns:
        the trial input.
    """
    return TrialInput(case, dtype, lambda y: y.reshape(1, -1), lambda y, unit: np.array([expected(y, unit)]))


def make_case_trial(rewrite: Rewrite, chosen: TrialInput, opset: int, number: int) -> RoundingTrial | None:
    """Build the trial of a rewrite on one input.

    Returns:
        the trial; None if float64 has no result.
    """
    graph = rewrite.before.graph
    case = chosen.case
    dtype = chosen.dtype
    stored = tuple(v.astype(dtype) for v in case.leaves)
    try:
        with evaluator.silence_numpy():
            reference = case.before.run([v.astype(np.float64) for v in stored])
            expected = chosen.expected(reference, UNIT_ROUNDOFF.get(dtype.name, UNIT_ROUNDOFF["float32"]))
    except EvaluationFailed:
        return None
    before = make_side_model(graph, rewrite.before, stored, case.before.sizes, graph.opset, f"b{number}_")
    after = make_side_model(graph, rewrite.after, stored, case.before.sizes, max(graph.opset, opset), f"a{number}_")
    ordinary = np.resize([name in ORDINARY for name in case.names], len(chosen.rows(reference)))
    nbytes = reference.nbytes + sum(v.nbytes for v in stored)
    return RoundingTrial(before, after, reference, chosen.rows, expected, ordinary, nbytes)


def make_side_model(
    graph: Graph, region: Region, leaves: Sequence[np.ndarray], sizes: dict[str, int], opset: int, prefix: str
) -> SideModel:
    """Convert a region to a separate graph: leaves and large weights become inputs, other constants initializers.

    Args:
        leaves: values of the leaves.
        sizes: values of the dims.
        prefix: prefix of all tensor names.

    Returns:
        the model.
    """
    initializers: dict[str, onnx.TensorProto] = {}
    inputs = {prefix + t.name: v for t, v in zip(region.leaves, leaves, strict=True)}
    for t in region.shape_leaves:
        inputs.setdefault(
            prefix + t.name,
            np.broadcast_to(np.zeros((), graph.dtype(t) or np.float32), concrete_shape(graph, t, sizes) or ()),
        )
    nodes = []
    made = {id(o) for n in region.nodes for o in n.outputs}
    for node in region.nodes:
        proto = graph.node_proto(node)
        valued = {id(t) for t in value_inputs(node)}
        for i, t in enumerate(node.inputs):
            if not t.is_empty():
                proto.input[i] = prefix + t.name
            if not t.is_empty() and id(t) not in made and prefix + t.name not in inputs:
                if id(t) in valued and (array := _large_weight(t)) is not None:
                    inputs[proto.input[i]] = array
                elif id(t) in valued and graph.is_constant(t):
                    initializers[proto.input[i]] = _constant_initializer(graph, t, prefix)
                else:
                    # The second input of CastLike provides only a dtype.
                    initializers[proto.input[i]] = onnx.numpy_helper.from_array(
                        np.zeros(1, graph.dtype(t) or np.float32), proto.input[i]
                    )
        for i, t in enumerate(node.outputs):
            proto.output[i] = prefix + t.name if t.name else ""
        proto.name = ""
        nodes.append(proto)
    infos = tuple(
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for name, v in inputs.items()
    )
    return SideModel(tuple(nodes), tuple(initializers.values()), infos, inputs, prefix + region.y.name, opset)


def _large_weight(t: gs.Tensor) -> np.ndarray | None:
    """Return the array of a large weight without a copy; None for other tensors."""
    if isinstance(t, gs.Constant) and isinstance(t._values, np.ndarray):
        array = t._values
    else:
        array = None
    if array is not None and is_shareable_weight(array.dtype, array.shape):
        return array
    return None


def _constant_initializer(graph: Graph, t: gs.Tensor, prefix: str) -> onnx.TensorProto:
    if isinstance(t, gs.Constant):
        proto = onnx.TensorProto()
        proto.CopyFrom(graph.tensor_proto(t))
        proto.name = prefix + t.name
        return proto
    value = np.ascontiguousarray(graph.value(t))
    dtype = graph.dtype(t) or (np.float32 if value.dtype.kind == "f" else value.dtype)
    return onnx.numpy_helper.from_array(value.astype(dtype), prefix + t.name)


def copy_verdict(finding: Finding, first: Finding) -> Finding:
    """Copy the verdict of ``first`` to a finding that runs the same kernels and was not run.

    Returns:
        the finding with this verdict and a note of its source.
    """
    assert finding.certificate is not None
    assert first.certificate is not None
    ran = first.certificate
    if ran.rounding_after is not None:
        told = f"onnxruntime ran {first.tensor!r}, which runs the same kernels"
    else:
        told = ran.note
    certificate = replace(
        finding.certificate,
        rounding_before=ran.rounding_before,
        rounding_after=ran.rounding_after,
        rounding_bound=ran.rounding_bound,
        note=_join_notes(finding.certificate.note, told),
    )
    notes = (*finding.notes, *(n for n in first.notes if n not in finding.notes))
    if "onnxruntime run" in first.proved:
        proved = (*finding.proved, "onnxruntime run of its like")
    else:
        proved = finding.proved
    return replace(finding, certificate=certificate, notes=notes, proved=proved)


def run_trials(trials: Sequence[RoundingTrial]) -> list[TrialOutcome]:
    """Run trials in onnxruntime, `BATCH` per session.

    Returns:
        the outcome of each trial, in its worst group.
    """
    results: list[TrialOutcome] = []
    for start in range(0, len(trials), BATCH):
        batch = trials[start : start + BATCH]
        before, after = (_run_side_models([getattr(t, side) for t in batch]) for side in ("before", "after"))
        results.extend(judge_trial(t, b, a) for t, b, a in zip(batch, before, after, strict=True))
    return results


def with_verdict(certificate: Certificate, outcome: TrialOutcome) -> Certificate:
    """Add the outcome of a trial to a certificate.

    Returns:
        a new certificate.
    """
    certificate = replace(certificate, note=_join_notes(certificate.note, outcome.note))
    if outcome.after is None:
        return certificate
    return replace(
        certificate,
        rounding_before=outcome.before,
        rounding_after=outcome.after.error,
        rounding_bound=outcome.after.allowed,
    )


def _join_notes(*notes: str) -> str:
    return "; ".join(n for n in notes if n)


def _run_side_models(pieces: Sequence[SideModel]) -> list[np.ndarray | Refusal]:
    """Run the models in one session. If that fails, run each alone, and return the refusal of those that fail again."""
    try:
        return list(_run_in_session(pieces))
    except Exception as e:
        if len(pieces) == 1:
            return [Refusal(f"onnxruntime could not run it: {_short_message(e)}")]
        return [_run_side_models([p])[0] for p in pieces]


def _run_in_session(pieces: Sequence[SideModel]) -> list[Any]:
    graph = onnx.GraphProto(name="rounding")
    feeds: dict[str, np.ndarray] = {}
    for p in pieces:
        graph.node.extend(p.nodes)
        graph.initializer.extend(p.initializers)
        used = {i for n in p.nodes for i in n.input}
        graph.input.extend(i for i in p.inputs if i.name in used)
        feeds.update((k, v) for k, v in p.feeds.items() if k in used)
        graph.output.append(onnx.ValueInfoProto(name=p.output))
    opsets = [onnx.helper.make_opsetid("", max(p.opset for p in pieces)), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = attach_functions(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), opsets[0].version)
    return list(open_session(model.SerializeToString(), threads=1).run(None, _ort_values(feeds)))


def _ort_values(feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    """Convert arrays for onnxruntime.

    bfloat16 is passed by its ONNX type, because numpy has none. Arrays of which only the shape is read share their
    elements.
    """
    room = np.zeros(max((v.nbytes for v in feeds.values() if _is_shape_only(v)), default=0), np.uint8)
    laid = {k: room[: v.nbytes].view(v.dtype).reshape(v.shape) if _is_shape_only(v) else v for k, v in feeds.items()}
    return {name: to_ort(array) if array.dtype.name == "bfloat16" else array for name, array in laid.items()}


def _is_shape_only(array: np.ndarray) -> bool:
    """Return True for a single element broadcast to a shape, which `make_side_model` uses if only the shape is read."""
    return array.size > 1 and not any(array.strides)


def judge_trial(t: RoundingTrial, before: np.ndarray | Refusal, after: np.ndarray | Refusal) -> TrialOutcome:
    """Judge a trial.

    Args:
        before: result of the nodes before, or the refusal to run them.
        after: result of the nodes after, or the refusal.

    Returns:
        the outcome in the worst row.
    """
    if isinstance(after, Refusal):
        if isinstance(before, Refusal):
            gross = None
        else:
            gross = f"{after.reason}; it runs the original nodes"
        return TrialOutcome(note=after.reason, gross=gross)
    if isinstance(before, Refusal):
        return _uncompared_verdict(f"the original nodes: {before.reason}")
    ref = t.rows(t.reference)

    def errors_in_units(value: np.ndarray) -> np.ndarray:
        apart = absolute_difference(t.rows(np.asarray(value, dtype=np.float64)), ref)
        apart[~np.isfinite(ref)] = 0.0
        return apart.max(axis=1)

    was, now = errors_in_units(before), errors_in_units(after)
    allowed = np.maximum(2 * was, t.expected)
    # If the nodes before give no finite number in a row, the allowed error is infinite and the row is not compared.
    compared = np.flatnonzero(np.isfinite(allowed))
    if not compared.size:
        return _uncompared_verdict(
            "in onnxruntime, the original nodes give NaN or Inf for inputs with finite results in float64"
        )

    def worst_of(rows: np.ndarray) -> tuple[float, Verdict]:
        verdict = nearest_to_bound(now[rows], allowed[rows])
        return float(was[rows][verdict.place]), verdict

    error, verdict = worst_of(compared)
    gross = None
    ordinary = compared[t.ordinary[compared]]
    if ordinary.size:
        own, usual = worst_of(ordinary)
        if usual.bound_ratio > GROSS:
            gross = (
                f"its error in onnxruntime is {usual.error:.2g} at ordinary inputs; the error of the "
                f"original nodes is {own:.2g}, and the limit is {GROSS} times {usual.allowed:.2g}"
            )
    return TrialOutcome(error, verdict, gross=gross)


def _uncompared_verdict(why: str) -> TrialOutcome:
    missing = f"the rounding was not compared: {why}"
    return TrialOutcome(note=missing, missing=missing)


def _short_message(e: Exception) -> str:
    return " ".join(str(e).split())[:160]
