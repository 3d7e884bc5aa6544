"""Assert parity, fused norms, and no regression of a bundle. A failure names the numbers and the culprit."""

from __future__ import annotations

import functools
import inspect
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from ..environment import NODE, WEB, library_versions
from ..errors import GraphError, InputError, NormdeployError
from ..norms.norm_table import ROWS
from ..runtimes.trt_runner import is_engine
from ..types import PathLike
from ..verb_options import LoadingOptions
from ..verbs.arguments.argument_validation import take_fields_as_arguments
from ..verbs.arguments.export_result import ExportResult, as_sequence
from ..verbs.bisect.bisect_function import bisect
from ..verbs.bisect.bisect_options import BisectCall
from ..verbs.check.check_function import check
from ..verbs.recheck.recheck_function import recheck
from ..verbs.verify.comparison_result import Comparison
from ..verbs.verify.output_results import OutputResult
from ..verbs.verify.reference_models import OWN
from ..verbs.verify.verify_function import verify
from ..verbs.verify.verify_options import VerifyCall, VerifyOptions
from ..verbs.verify.verify_tables import failure_lines, summarize_verdict
from .verdicts import Verdict, publish_verdict

if TYPE_CHECKING:
    from ..verbs.arguments.argument_validation import Example, Onnx
    from ..verbs.arguments.model_source import Source

# Libraries whose versions a verdict names.
_RUNTIMES = (
    *("normdeploy", "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "openvino"),
    *(WEB, NODE),
)
# Rules of ``check`` that a norm breaks if it is neither one node nor folded.
_NOT_FUSED = ("decomposed", "unfolded", "refused")
# Maximum number of lines that explain a failure.
_LINES = 20

P = ParamSpec("P")


def _as_assertion(judge: Callable[P, Verdict]) -> Callable[P, None]:
    """Turn a function that returns a verdict into an assertion.

    The assertion adds the duration and the versions to the verdict, and publishes the verdict.

    Returns:
        a function that raises an AssertionError if the verdict is not ok. pytest leaves its frame out of tracebacks.
    """

    @functools.wraps(judge)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        __tracebackhide__ = True
        start = time.perf_counter()
        verdict = judge(*args, **kwargs)
        verdict = replace(verdict, seconds=time.perf_counter() - start, versions=library_versions(_RUNTIMES))
        publish_verdict(verdict)
        if not verdict.ok:
            raise AssertionError(verdict.message)

    call.__signature__ = inspect.signature(judge).replace(return_annotation="None")  # type: ignore[attr-defined]
    return call


# ------------------------------------------------------------------ parity


@dataclass(frozen=True)
class ParityCall(VerifyOptions, LoadingOptions):
    """Arguments of ``assert_parity``."""

    source: Source | Onnx | Any
    file: Onnx = ""
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    max_seconds: float = 20.0
    engines: Sequence[PathLike] = ()
    culprit: bool = True


@_as_assertion
@take_fields_as_arguments(ParityCall, onnx="file")
def assert_parity(call: ParityCall) -> Verdict:
    """Assert that a file computes the outputs of a model, by the rule of ``verify``.

    The same inputs are generated in every run: the seeds are 0, 1, ... ``max_seconds`` limits the number of inputs.

    Args:
        source, args, kwargs: the model and its example arguments, as for ``verify``.
        file: the ONNX file, a model in memory, or an engine. It can be omitted if ``source`` is a result of ``export``
            or ``optimize``.
        max_seconds: limit on processor time of the comparison, and once more of the search for the culprit.
        culprit: search the fault with ``bisect`` if the comparison fails.
        engines, seeds, feeds, max_elements, max_memory, drift, tolerance, metric, policy, also_default, dataset,
            labels, map, runners, generate, progress, and the loading options: as for ``verify``.

    Raises:
        AssertionError: the file does not pass, or nothing could be run. The message has the verdict, the error, the
            allowed error, the output and the input of each failure, and the culprit.
        NormdeployError: the model or the file can't be read, or an option is invalid.
    """
    if not call.file:
        raise InputError("no ONNX file to compare; pass it after the model")
    file = cast("PathLike", call.file)
    options = {each.name: getattr(call, each.name) for each in fields(call)}
    comparison = verify(call.source, [file], call.args, call.kwargs, **_options_of(VerifyCall, options))
    verdict = _describe_comparison(comparison)
    if comparison.outcome == "failed" and call.culprit:
        verdict = replace(verdict, culprit=_find_culprit(call, file, _options_of(BisectCall, options)))
    return verdict


def _options_of(call: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that a verb takes besides its models and arguments."""
    taken = {each.name for each in fields(call)} - {"source", "files", "onnx_path", "args", "kwargs", "progress"}
    return {name: value for name, value in options.items() if name in taken}


def _describe_comparison(comparison: Comparison) -> Verdict:
    """Describe the result of ``verify``, with the numbers of one output.

    Returns:
        a verdict without a culprit. Its numbers belong to the first output that fails. If no output fails, they belong
        to the output that came nearest to failing.
    """
    made = [result for result in comparison.results if result.runtime not in OWN]
    failing = [result for result in made if not result]
    verdict = Verdict(assertion="assert_parity", ok=bool(comparison), text=summarize_verdict(comparison))
    if not comparison:
        lines = [line.removeprefix("fail: ") for line in failure_lines(comparison)[:-1]]
        told = [f"output {_describe_result(result)}" for result in failing]
        outputs = {", ".join(filter(None, (r.output, r.runtime, r.file))) for r in failing}
        # Weights, tokens and the trace fail besides outputs.
        told += [line for line in lines if not any(line.startswith(f"{each}:") for each in outputs)]
        verdict = replace(verdict, details=_shorten(told))
    if not made:
        return verdict
    worst = failing[0] if failing else max(made, key=_share_of_bound)
    tolerance = worst.decisive_tolerance
    return replace(
        verdict,
        output=worst.output,
        runtime=worst.runtime,
        file=worst.file,
        case=worst.case if tolerance is None else tolerance.case,
        error=float(worst.max_abs_error if tolerance is None else tolerance.measured),
        allowed=float(worst.allowed if tolerance is None else tolerance.wanted),
    )


def _describe_result(result: OutputResult) -> str:
    """Describe a failed output: its runtime, the error, the allowed error and the input.

    Returns:
        for example "'output' in onnxruntime (optimizer on): error 1.2e-02, allowed 3.0e-06, at seed 0".
    """
    where = f"{result.output!r} in {result.runtime}"
    if result.rules:
        # The reason names each given rule with its numbers and its input.
        return f"{where}: {result.reason}"
    reason = f"; {result.reason}" if result.reason else ""
    at = f", at {result.case}" if result.case else ""
    return f"{where}: error {result.error_text}, allowed {result.allowed_text}{at}{reason}"


def _share_of_bound(result: OutputResult) -> float:
    """Return the error divided by the allowed error; -1 if the default rule measured no error."""
    share = result.max_abs_error / result.allowed if result.allowed else float(result.max_abs_error > 0)
    return -1.0 if math.isnan(share) else share


def _find_culprit(call: ParityCall, file: PathLike, options: Mapping[str, Any]) -> str:
    """Search the fault with ``bisect``.

    Returns:
        the first fault in one line, or the reason why no fault is named.
    """
    if is_engine(file):
        return "not searched: the inner tensors of an engine can't be read; pass the ONNX file of the engine"
    try:
        bisection = bisect(call.source, file, call.args, call.kwargs, **options)
    except NormdeployError as error:
        return f"not found: {error}"
    if not bisection.faults:
        return f"not found: {'; '.join((bisection.summarize(), *bisection.notes[:1]))}"
    more = len(bisection.faults) - 1
    return f"{bisection.faults[0].summarize()}{f' (and {more} more)' if more else ''}"


# ------------------------------------------------------------------ fused norms


@_as_assertion
def assert_norms_fused(
    file: Onnx, *, kinds: str | Sequence[str] | None = None, runtime: str = "any", fuse: str = "standard"
) -> Verdict:
    """Assert that each norm of a file is one node, or is folded into other nodes.

    A norm that already has the best form for ``runtime`` also passes, even if this form has several nodes.

    Args:
        file: an ONNX file or a model in memory.
        kinds: kinds of norms, such as "LayerNorm" or ["LayerNorm", "RMSNorm"]; None asserts it of every norm.
        runtime, fuse: as for ``check``.

    Raises:
        AssertionError: norms are left. The message names each norm, with the reason.
        InputError: a kind is unknown.
        GraphError: the file can't be read.
    """
    checked = check(file, fail_on=_NOT_FUSED, runtime=runtime, fuse=fuse)
    broken = [each for each in checked.files if each.error]
    if broken:
        raise GraphError(broken[0].error)
    problems = [problem for each in checked.files for problem in each.findings if problem.rule in _NOT_FUSED]
    counts = [each.norms for each in checked.files]
    text = "norm"
    if kinds is not None:
        wanted = as_sequence(kinds)
        _require_known_kinds(wanted, {kind for norms in counts for kind in norms})
        problems = [problem for problem in problems if problem.kind in wanted]
        counts = [{kind: norms[kind] for kind in wanted if kind in norms} for norms in counts]
        text = " or ".join(wanted)
    found = sum(sum(norms.values()) for norms in counts)
    if problems:
        line = f"{len(problems)} norm{'s are' if len(problems) > 1 else ' is'} neither one node nor folded"
    elif found:
        line = f"no {text} can be fused or folded further; the file has {found}"
    else:
        line = f"the file has no {text}: either each is folded, or the model had none"
    details = _shorten([f"{p.location or 'the file'}: {p.message}" for p in problems])
    return Verdict(assertion="assert_norms_fused", ok=not problems, text=line, file=_name_file(file), details=details)


def _require_known_kinds(kinds: Sequence[str], found: set[str]) -> None:
    """Refuse a misspelled kind, with which the assertion could not fail.

    Raises:
        InputError: a kind is neither in the table of norms nor in the file.
    """
    known = {row.kind for row in ROWS} | found
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise InputError(f"unknown kind of norm {unknown[0]!r}; choose from {', '.join(sorted(known - {''}))}")


# ------------------------------------------------------------------ regression of a bundle


@_as_assertion
def assert_no_regression(bundle: PathLike, *, onnx: Onnx | None = None, trust: Sequence[PathLike] = ()) -> Verdict:
    """Assert that a bundle of ``package`` still gives its recorded results on this machine.

    Args:
        bundle: the folder of the bundle.
        onnx, trust: as for ``recheck``.

    Raises:
        AssertionError: something got worse. The message names each regression.
        NormdeployError: as for ``recheck``.
    """
    result = recheck(bundle, onnx=onnx, trust=trust)
    worse = [change for change in result.changes if change.worse]
    details = _shorten([f"{c.what} {c.name}: was {c.was or 'absent'}, now {c.now or 'absent'}" for c in worse])
    text = f"{len(worse)} got worse" if worse else "nothing got worse"
    return Verdict(
        assertion="assert_no_regression", ok=bool(result), text=text, file=os.fspath(bundle), details=details
    )


def _name_file(file: Any) -> str:
    """Name a file for the report: its path, or the class of a model in memory."""
    if isinstance(file, ExportResult) and file.path is not None:
        return os.fspath(file.path)
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    return type(file).__name__


def _shorten(lines: Sequence[str]) -> tuple[str, ...]:
    """Keep the first lines, and count the others."""
    kept = tuple(lines[:_LINES])
    if len(lines) > _LINES:
        return (*kept, f"and {len(lines) - _LINES} more")
    return kept
