"""Bisect a file: find the first wrong tensor, the node that computes it, the cause, and a change that mends it.

``verify`` finds the wrong outputs of each runtime, and an input on which they are wrong. A tensor is wrong if its error
exceeds the allowed error. Each wrong output is then searched (``fault_search``):

1. The tensors at the boundaries of modules (``verbs.verify.tensor_drift``) are compared in the runtime. The search
   takes the first tensor, in the file's order, from which a path of wrong tensors leads to the output. The compared
   tensors before this tensor are right.
2. The nodes between these right tensors and the wrong tensor are evaluated in float64, by ONNX's definition of their
   ops, from the right values. If the result differs from the model, the file is wrong. ``counterpart_search`` then
   finds the nodes, and ``cause_search`` finds the kind of mistake.
3. Otherwise the runtime is wrong. Each node is run alone on its right inputs to find the wrong one
   (``runtime_faults``).
4. The fault is mended: the file is run again with the wrong tensor set to its right value. If the output is still
   wrong, there is another fault, and the search continues.

A quantized file that is wrong in float64 needs another search (``quantized_search``), because its tensors differ from
the model's tensors by design. The steps of its quantizers bound these differences.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from ...compare.policy import Policy
from ...errors import GraphError, InputError, NormdeployError, RuntimeUnavailable
from ...findings.rendering import Renderable
from ...inputs.input_cases import InputCase, Inputs, read_inputs
from ...runtimes.float64_evaluator import NotEvaluated, inline_functions
from ...runtimes.named_runners import BUILTIN_TITLES
from ...storage.onnx_files import load_onnx
from ...types import PathLike, Progress
from ..build.build_function import Engine
from ..verify.compared_files import open_files_of_model
from ..verify.comparison_result import Comparison
from ..verify.compute_budget import ComparisonBudget
from ..verify.file_comparison import compare_files
from ..verify.input_plan import plan_inputs
from ..verify.io_matching import Map, rename_ends
from ..verify.output_results import OutputResult
from ..verify.quantization_budget import ROUNDED, UNROUNDED
from ..verify.reference_models import OWN, FileModel, Original
from ..verify.runtime_candidates import OFF, ON, STEPWISE, NotRun
from .failing_nodes import find_failing_nodes
from .fault_search import FaultSearch
from .fault_tracing import CUDA, Fault, FaultyOutput
from .preprocessing import find_preprocessing
from .quantized_search import QuantizedSearch
from .reproduction import Reproduction
from .runtime_faults import Float32Trial

if TYPE_CHECKING:
    from rich.console import Console

_UNNAMED = (
    "the file is quantized, and none of its weights or ranges explains all of the error: its float original"
    " may differ from the model (bisect that file), or its weights were changed before quantization, as in a"
    " migration"
)


# Maximum number of tensors that a message names.
_SEEN = 5


@dataclass(frozen=True, repr=False)
class Bisection(Renderable):
    """Result of ``bisect``; true if nothing exceeds the allowed error.

    Attributes:
        parity: the comparison of ``verify``.
        not_searched: wrong outputs that could not be searched, each with the reason.
        reproduction: smallest failing model of the first fault.
    """

    parity: Comparison
    faults: tuple[Fault, ...] = ()
    not_searched: tuple[NotRun, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    reproduction: Reproduction | None = field(default=None, repr=False)

    def summarize(self) -> str:
        """Return the main facts in one line."""
        if self:
            return "no output leaves the bound"
        if self.parity.outcome == "not run":
            return "nothing was run"
        if not self.faults:
            return "the file is wrong, and no node is named"
        return f"{len(self.faults)} fault{'s' * (len(self.faults) > 1)}; {self.faults[0].summarize()}"

    def __bool__(self) -> bool:
        return bool(self.parity)

    def to_json(self) -> dict[str, Any]:
        """Convert the result to JSON values.

        Returns:
            "ok", "faults", "not_searched", "notes" and "seconds".
        """
        told = {name: [asdict(v) for v in getattr(self, name)] for name in ("faults", "not_searched")}
        return {"ok": bool(self), **told, "notes": list(self.notes), "seconds": self.seconds}

    def write(self, folder: PathLike) -> Path | None:
        """Write the smallest failing model of the first fault (``normdeploy.verbs.bisect.reproduction``).

        Returns:
            The folder; None if no fault has such a model.

        Raises:
            NormdeployError: the folder is not empty, or can't be written.
        """
        if self.reproduction is None:
            return None
        return self.reproduction.write(folder)

    def show(self, console: Console) -> None:
        from .bisect_tables import show_bisection

        self.parity.show(console)
        show_bisection(console, self)


def search_faults(
    model: Original,
    onnx_path: PathLike,
    *,
    engines: Sequence[Engine | PathLike] = (),
    seeds: int = 3,
    inputs: Inputs | None = None,
    names: Map = (),
    most: int | None = None,
    policy: Policy | None = None,
    dataset: Sequence[InputCase] = (),
    runners: Sequence[str] = (),
    budget: ComparisonBudget = ComparisonBudget(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> Bisection:
    """Compare as ``verify`` does, and find the faults of the outputs that fail.

    Args:
        engines: engines that are also compared, only at their outputs. The inner tensors of an engine can't be read: an
            engine with more outputs would be a different engine.
        seeds, inputs, names, most, policy, dataset, runners, budget, progress: as for
            ``normdeploy.verbs.verify.file_comparison.compare_files``.

    Returns:
        The comparison and the faults.

    Raises:
        NormdeployError: as ``verify``. A fault raises nothing; it makes the result false.
    """
    start = time.perf_counter()
    own = None if inputs is None else read_inputs(inputs)
    parity = compare_files(
        model,
        onnx_path,
        engines=engines,
        seeds=seeds,
        inputs=own,
        names=names,
        most=most,
        policy=policy,
        dataset=dataset,
        runners=runners,
        budget=budget,
        progress=progress,
    )
    faults = list[Fault]()
    not_searched = list[NotRun]()
    notes = list[str]()
    first = None
    looked_at: Sequence[str] = ()
    quantized = _find_wrong_quantized(parity)
    (subject,), _ = open_files_of_model(model, [onnx_path], names)
    theirs = [v.name for v in load_onnx(onnx_path, external_data=False).graph.output]
    outputs = [subject.outputs.get(name, name) for name in theirs]
    chosen = quantized if quantized is not None else _choose_result(parity, outputs, not_searched)
    failed = [r for r in parity.results if not r and r.runtime == OFF and r.output in outputs]
    if chosen is not None or failed:
        # The search needs a file whose inputs and outputs have the model's names.
        proto = inline_functions(rename_ends(load_onnx(onnx_path), subject.inputs, subject.outputs))
        if isinstance(model, FileModel):
            model = model.with_inlined_functions()
        cases = (*plan_inputs(model, [subject], seeds, own, most, budget).cases, *dataset)
        faults += [] if quantized is not None else _find_input_faults(model, proto, failed, cases[0])
        if quantized is None and not faults:
            faults += _find_failing_nodes(model, proto, failed, cases)
    altered = {w.name: w.reason for w in parity.weights if not w}
    if chosen is not None and not faults:
        try:
            if quantized is not None:
                case = next((c for c in cases if c.name == chosen.case), cases[0])
                usual = [c.make() for c in cases if c.kind == "random"]
                calibrated = () if subject.steps is None else subject.steps.calibrated
                output = FaultyOutput(chosen, case.name, case.make(), altered)
                faults += QuantizedSearch(model, proto, output, usual, calibrated, progress).faults()
                notes += [] if faults and faults[-1].mended else [_UNNAMED]
            else:
                hunt = _open_search(model, proto, chosen, cases, progress, altered)
                faults += hunt.faults()
                looked_at = hunt.compared_tensors
                notes += hunt.notes
                first = hunt.reproduction
        except (NotEvaluated, NormdeployError) as error:
            not_searched.append(NotRun(chosen.runtime, str(error), chosen.file))
    notes += [] if faults else _list_unexplained(parity, looked_at, {n.reason for n in not_searched})
    return Bisection(parity, tuple(faults), tuple(not_searched), tuple(notes), time.perf_counter() - start, first)


def _find_input_faults(
    model: Original, proto: onnx.ModelProto, failed: Sequence[OutputResult], case: InputCase
) -> Iterable[Fault]:
    """Yield the fault of a file that expects another preprocessing of an input.

    The fault is also found if the file does not run on the model's inputs.
    """
    for result in failed[:1]:
        try:
            found = find_preprocessing(model, proto, result, case.make())
        except (GraphError, RuntimeUnavailable):
            # The file can't be opened, which is reported elsewhere.
            return
        if found is None:
            return
        readers = [n for n in proto.graph.node if found.tensor in n.input]
        yield Fault(
            runtime=result.runtime,
            case=case.name,
            tensor=found.tensor,
            nodes=tuple(f"{n.op_type} {n.name}".strip() for n in readers),
            error=result.max_abs_error,
            allowed=result.allowed,
            reason=result.reason,
            kind="preprocessing",
            cause=found.text,
            widened=Float32Trial(None, reason="the preprocessing differs, not a node"),
            output=result.output,
            output_error=result.max_abs_error,
            output_allowed=found.allowed,
            output_reason=result.reason,
            mended_error=found.error,
            mended=True,
        )


def _find_failing_nodes(
    model: Original, proto: onnx.ModelProto, failed: Sequence[OutputResult], cases: Sequence[InputCase]
) -> list[Fault]:
    """Find the nodes that can't be computed in a file that does not run."""
    lost = next((r for r in failed if r.reason and not np.isfinite(r.max_abs_error)), None)
    case = next((case for case in cases if lost is not None and case.name == lost.case), None)
    if lost is None or case is None:
        return []
    return find_failing_nodes(model, proto, FaultyOutput(lost, case.name, case.make(), {}))


def _list_unexplained(parity: Comparison, looked_at: Sequence[str], told_before: Set[str]) -> list[str]:
    """List the wrong outputs and weights if no fault is found.

    The result has the first failed row for each output, followed by the wrong weights.

    Args:
        told_before: reasons that were already reported.
    """
    failed = [r for r in parity.results if not r and r.runtime not in OWN and r.reason not in told_before]
    firsts = {r.output: r for r in reversed(failed)}
    seen = f"{', '.join(map(repr, looked_at[:_SEEN]))}{', …' if len(looked_at) > _SEEN else ''}"
    if looked_at:
        looked = f"{len(looked_at)} tensors were compared ({seen})"
    else:
        looked = "no inner tensor was compared"
    told = [
        f"{r.output!r} in {r.runtime}"
        f" {f'differs: {r.reason}' if r.reason else f'is off by {r.max_abs_error:.3g}'}, allowed"
        f" {r.allowed:.3g}; {looked}, and no smaller wrong graph was found"
        for r in reversed(firsts.values())
    ]
    weights = [f"the weight {w.name!r} differs from the model's" for w in parity.weights if not w]
    return told + weights


def _find_wrong_quantized(parity: Comparison) -> OutputResult | None:
    """Return the failed result of a quantized file in float64; None if the file is right in float64.

    If it is right, its numbers are not at fault, and need not be searched.
    """
    failed = {r.runtime: r for r in reversed(parity.results) if not r and r.steps is not None}
    return failed.get(UNROUNDED, failed.get(ROUNDED))


def _choose_result(parity: Comparison, given: Sequence[str], not_searched: list[NotRun]) -> OutputResult | None:
    """Choose the failed result whose faults are searched.

    If onnxruntime is wrong with its optimizer off, only its errors are searched, because other runtimes have the same
    faults.

    Args:
        given: the file's outputs.
    """
    failed = [r for r in parity.results if not r and r.runtime not in OWN]
    chosen: OutputResult | None = None
    for runtime in (OFF, STEPWISE, ON, *CUDA, *BUILTIN_TITLES):
        own = [r for r in failed if r.runtime == runtime]
        files = ", ".join(map(repr, given)) or "none"
        not_searched += [
            NotRun(runtime, f"the file has no output {r.output!r}; its outputs are {files}", r.file)
            for r in own
            if r.output not in given
        ]
        of = next((r for r in own if r.output in given), None)
        if of is not None and not of.case:
            not_searched.append(NotRun(runtime, f"it can't run the file: {of.reason}", of.file))
        elif of is not None and chosen is None:
            chosen = of
    for r in failed:
        if r.runtime not in (OFF, STEPWISE, ON, *CUDA, *BUILTIN_TITLES, ROUNDED, UNROUNDED):
            message = "engines and runtimes of other packages are compared at their outputs only"
            not_searched.append(NotRun(r.runtime, f"{r.output} is off by {r.max_abs_error:.3g}: {message}", r.file))
    return chosen


def _open_search(
    model: Original,
    proto: onnx.ModelProto,
    result: OutputResult,
    cases: Sequence[InputCase],
    progress: Progress | None,
    altered: Mapping[str, str],
) -> FaultSearch:
    """Open the search on the first input if the output is wrong on it; otherwise on the worst input.

    The first input is preferred, because the worst input may be all zeros, on which different functions can agree.
    """

    def search_on(case: InputCase) -> FaultSearch:
        return FaultSearch(model, proto, FaultyOutput(result, case.name, case.make(), altered), progress)

    first = search_on(cases[0])
    try:
        if cases[0].name == result.case or not first.output_error():
            return first
    except (GraphError, InputError):
        # A model may declare a dim as dynamic but run at only one size. Another input may have this size.
        pass
    return search_on(next((case for case in cases if case.name == result.case), cases[0]))
