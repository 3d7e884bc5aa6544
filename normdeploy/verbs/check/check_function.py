"""Check the norms of files against rules in CI.

The rules are applied to the findings of the norm census (``normdeploy.verbs.inspect.norm_census``).

The result can be written as SARIF (``normdeploy.verbs.check.sarif``) or as JSON. The JSON has the schema
``normdeploy/check/1``, to which later versions may add keys:

    schema      "normdeploy/check/1"
    normdeploy  the version that wrote it
    ok          true if every file could be read and each problem of ``fail_on`` is in the baseline
    fail_on     names of rules
    files       one object for each file:
                file      path as given
                error     reason why the file could not be checked, else ""
                notes     notes on the file
                norms     kind of norm -> number of norms in the file, with or without a problem
                findings  one object for each problem:
                          rule, message
                          level        "error" if the problem fails the check, else "warning" or "note"
                          kind         kind of the norm; "" if the problem does not concern a norm
                          module, place, node, tensor
                                       location of the problem; "" for each part that the file does not name
                          fingerprint  identifies the problem in later runs
                          known        true if the baseline has the problem
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...errors import ExtensionError, InputError, NormdeployError
from ...findings.records import Finding
from ...findings.rendering import Renderable, ShortRepr
from ...norms.third_party import is_managed_op
from ...option_values import ANY, TENSORRT
from ...runtimes.target_support import Target, find_target
from ...runtimes.trt_runner import PACKAGES, TITLES, describe_missing_runtime
from ...storage.proto_traversal import iter_bodies, nodes_with_opsets
from ...types import PathLike
from ...version import __version__
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.model_source import open_onnx_source
from ..inspect.norm_census import take_census
from .check_options import CheckCall
from .check_text import render_check
from .norm_rules import (
    REFUSED_BY_TENSORRT,
    RULES,
    Problem,
    Rule,
    find_misbound_calls,
    find_norm_problems,
    find_overflowing_constants,
    find_parser_refusals,
    find_training_nodes,
)
from .quantization_rules import find_quantization_problems
from .runtime_faults import find_runtime_faults
from .target_rules import find_target_problems, is_supported_form
from .third_party_rules import ThirdPartyRule, load_rules

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "normdeploy/check/1"
# Key of the fingerprint in SARIF. If the computation of the fingerprint changes, the key must change too.
FINGERPRINT = "normdeploy/v1"
# Exit code of the command if a file or an option could not be read.
NOT_JUDGED = 2
# Maximum size of a baseline file in bytes (256 MiB).
_MOST = 2**28


@dataclass(frozen=True, repr=False)
class CheckedFile(ShortRepr):
    """Problems of one file.

    Attributes:
        norms: kind of norm -> number of norms in the file, with or without a problem.
        error: reason why the file could not be checked; "" if it was checked.
    """

    file: str
    findings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    norms: Mapping[str, int] = field(default_factory=dict)
    error: str = ""

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.file}: {self.error or f'{len(self.findings)} findings'}"


@dataclass(frozen=True, repr=False)
class Check(Renderable):
    """Result of ``check``; true if all files could be read and no rule of ``fail_on`` is broken by a new problem.

    Attributes:
        fail_on: names of the rules that fail the check.
        baseline: True if a baseline was given.
        rules: our rules, followed by the rules of installed packages.
        unasked: the requested runtime and the reason why it is missing, if a rule of ``fail_on`` needs this runtime;
            else "".
        target: the requested target; "" if none was requested.
    """

    files: tuple[CheckedFile, ...]
    fail_on: tuple[str, ...]
    baseline: bool = False
    rules: tuple[Rule, ...] = RULES
    unasked: str = ""
    target: str = ""

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{'passed' if self else 'FAILED'}; {render_check(self).splitlines()[-1]}"

    def __bool__(self) -> bool:
        return not any(f.error or any(p.level == "error" for p in f.findings) for f in self.files)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command, as linters choose it.

        Returns:
            1 if a rule of ``fail_on`` is broken by a new problem; otherwise 2 if a file could not be read; otherwise 0.
        """
        if any(p.level == "error" for f in self.files for p in f.findings):
            return 1
        if not self:
            return NOT_JUDGED
        return 0

    def json(self) -> str:
        """Serialize the result.

        Returns:
            The JSON document described at the top of this module.
        """
        document = {"schema": SCHEMA, "normdeploy": __version__, "ok": bool(self), "fail_on": self.fail_on}
        return json.dumps(document | {"files": [asdict(f) for f in self.files]}, indent=2, ensure_ascii=False) + "\n"

    def show(self, console: Console) -> None:
        from rich.text import Text

        console.print(Text(render_check(self).rstrip("\n")), soft_wrap=True)


@take_fields_as_arguments(CheckCall, onnx="sources")
def check(call: CheckCall) -> Check:
    """Check the norms of each file against ``RULES``. No file is changed.

    For a model that is not exported yet, problems that ``export`` would fix don't count (decomposed, unfolded,
    wrong-form).

    Args:
        sources: one or several ONNX files, models in memory, or sources as for ``export``. For a folder, every .onnx
            file in the folder and its subfolders is checked. A folder without .onnx files is read as a model (a Hugging
            Face folder).
        fail_on: names of the rules that make the result false; "all" means every rule. One text may hold several names,
            separated by commas. Rules of installed packages (`normdeploy.verbs.check.third_party_rules`) also have
            names.
        runtime, fuse: as for ``optimize``. If ``runtime`` is not "any", only the support of this runtime for the norms
            counts. A file with normdeploy's own ops or third-party ops is checked with fuse "portable".
        precision: "fp16" or "bf16": judge the epsilons as if the file computed in this type. None judges them in the
            types of the file.
        target: runtime that can't run here (`normdeploy.runtimes.target_support`), such as "coreml-mlprogram" or
            "tensorrt-10.9". Norms are compared with its published op lists. The installed runtimes do not count.
        compute_capability: compute capability of the oldest target GPU, such as "8.6".
        baseline: file of an earlier result, as JSON or SARIF. Problems that it contains do not fail the check.
        progress: called with (stage, done, total); total is 0 if unknown.
        model, model_args, key, trust, ...: see ``normdeploy.loading.load``.

    Returns:
        The problems of each file. The result is true if the check passes.

    Raises:
        InputError: a rule, target or compute capability is unknown, the baseline can't be read, or both a runtime and a
            target were passed. A file that can't be read is part of the result instead.
        ExtensionError: a package's rule is broken.
    """
    others = load_rules()
    rules = (*RULES, *(other.rule for other in others))
    ids = tuple(rule.id for rule in rules)
    unknown = [name for name in call.fail_on if name not in (*ids, "all")]
    if unknown:
        raise InputError(f"unknown rule {unknown[0]!r}; choose from {', '.join(ids)}, or all")
    capability = _parse_capability(call.compute_capability)
    target = _resolve_target(call)
    if "all" in call.fail_on:
        failing = ids
    else:
        failing = tuple(dict.fromkeys(call.fail_on))
    left = _known_fingerprints(call.baseline)
    files = []
    for source in dict.fromkeys(
        f for s in cast("Sequence[PathLike]", call.sources) for f in find_onnx_files(os.fspath(s))
    ):
        try:
            judged = _judge_file(source, call, capability, target, others)
        except ExtensionError:
            # The package is broken, not the file, so the error is not reported for the file.
            raise
        except NormdeployError as error:
            files.append(CheckedFile(source, error=str(error)))
            continue
        graded = tuple(_grade_problems(source, judged.findings, failing, left, rules))
        files.append(replace(judged, findings=graded))
    unasked = _describe_unchecked(call.runtime, failing)
    return Check(tuple(files), failing, call.baseline is not None, rules, unasked, call.target or "")


def _resolve_target(call: CheckCall) -> Target | None:
    if call.target is None:
        return None
    if call.runtime != ANY:
        raise InputError(
            f"runtime is {call.runtime!r} and target is {call.target!r}; pass one of them: a runtime is asked here, and"
            " a target is compared with its published op lists"
        )
    return find_target(call.target)


def _describe_unchecked(runtime: str, failing: Sequence[str]) -> str:
    if runtime not in PACKAGES or "missing-kernel" not in failing:
        return ""
    reason = describe_missing_runtime(runtime, gpu=runtime == "tensorrt")
    if reason:
        return f"{TITLES[runtime]}: {reason}"
    return ""


def _parse_capability(text: str | None) -> float | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise InputError(f"can't read the compute capability {text!r}; write it as NVIDIA does, such as 8.6")
    return float(text)


def find_onnx_files(source: str) -> list[str]:
    """List every .onnx file in a folder, at any depth, sorted by name.

    Links to folders are not followed, and names that begin with a dot (.git, caches) are skipped.

    Returns:
        Paths; only ``source`` itself if it is a file or a folder without .onnx files.
    """
    if not os.path.isdir(source):
        return [source]
    paths = []
    for folder, inner, files in os.walk(source):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        paths += [
            os.path.join(folder, name) for name in sorted(files) if name.endswith(".onnx") and not name.startswith(".")
        ]
    return paths or [source]


def _judge_file(
    source: str,
    call: CheckCall,
    capability: float | None,
    target: Target | None,
    others: Sequence[ThirdPartyRule] = (),
) -> CheckedFile:
    """Apply every rule to a file.

    Returns:
        the problems without their levels, the notes, and the number of norms.
    """
    if target is None:
        runtime = call.runtime
    else:
        runtime = target.runtime
    fuse = call.fuse
    proto, weights, deployed = open_onnx_source(source, loading=call.load_keywords, progress=call.progress)
    if any(is_managed_op(node.domain, node.op_type) for node, _ in nodes_with_opsets(proto)):
        # normdeploy's own ops and third-party ops show that the file was written with "portable". With "standard", the
        # function bodies of these ops would count as norms.
        fuse = "portable"
    summary = take_census(proto, runtime=runtime, fuse=fuse, progress=call.progress, chains=deployed)
    nodes = {name: node for body in iter_bodies(proto) for node in body.node for name in node.output}
    in_training = list(find_training_nodes(proto))
    random = {p.tensor for p in in_training}
    problems = [*in_training]
    for finding in summary.findings:
        if finding.tensor not in random:
            problems += find_norm_problems(finding, deployed, runtime, call.precision)
    told = {name for f in summary.findings for h in f.half if h.dtype == "float16" for name in h.overflow}
    problems += find_overflowing_constants(proto, told)
    problems += find_quantization_problems(proto, runtime, capability)
    problems += find_misbound_calls(proto, runtime)
    problems += find_runtime_faults(proto, runtime)
    if target is not None:
        problems = [*_drop_answers_of_installed_runtimes(problems, summary.findings, target)]
        problems += find_target_problems(proto, target)
    elif deployed and runtime in TENSORRT and not any(p.rule in REFUSED_BY_TENSORRT for p in problems):
        problems += find_parser_refusals(proto, runtime)
    problems += [problem for other in others for problem in other.find_problems(proto)]
    # The rules read the weights through references, so the weights must not be freed earlier.
    del weights
    if target is None:
        notes = summary.notes
    else:
        notes = (target.note,) if target.note else ()
    found = (replace(p, node=p.node or (nodes[p.tensor].name if p.tensor in nodes else "")) for p in problems)
    norms = Counter(finding.kind for finding in summary.findings)
    return CheckedFile(source, tuple(found), tuple(notes), dict(norms))


def _drop_answers_of_installed_runtimes(
    problems: Sequence[Problem], findings: Sequence[Finding], target: Target
) -> Iterator[Problem]:
    """Leave out what the installed runtimes answered, and advice to write an op that the target does not run."""
    became = {finding.tensor: finding.became for finding in findings}
    for problem in problems:
        advice = problem.rule in ("decomposed", "wrong-form")
        if problem.rule == "missing-kernel" or (
            advice and not is_supported_form(target, became.get(problem.tensor, ""))
        ):
            continue
        yield problem


# ------------------------------------------------------------------ fingerprints and the baseline


def _grade_problems(
    source: str, problems: Sequence[Problem], fail_on: Sequence[str], left: Counter[str], rules: Sequence[Rule]
) -> Iterator[Problem]:
    levels = {rule.id: rule.level for rule in rules}
    seen: Counter[tuple[str, ...]] = Counter()
    for p in problems:
        key = (p.rule, Path(source).name, p.kind, p.place, p.module or re.sub(r"\d+", "", p.node or p.tensor))
        seen[key] += 1
        fingerprint = hashlib.sha256(json.dumps([*key, seen[key]]).encode()).hexdigest()[:32]
        known = left[fingerprint] > 0
        left[fingerprint] -= known
        yield replace(
            p,
            level="error" if p.rule in fail_on and not known else levels[p.rule],
            fingerprint=fingerprint,
            known=known,
        )


def _known_fingerprints(baseline: PathLike | None) -> Counter[str]:
    """Read the fingerprints of an earlier result.

    Returns:
        Fingerprint -> number of problems that have it.

    Raises:
        InputError: the baseline can't be read.
    """
    if baseline is None:
        return Counter()
    label = repr(os.fspath(baseline))
    try:
        # Only regular files are read: a device or a pipe may have no end.
        if os.stat(baseline).st_size > _MOST or not os.path.isfile(baseline):
            raise InputError(
                f"the baseline {label} is not a file, or has more than {_MOST} bytes; pass the output of an"
                " earlier check"
            )
        document: Any = json.loads(Path(baseline).read_text(encoding="utf-8"))
        if "runs" in document:
            return Counter(r["partialFingerprints"][FINGERPRINT] for run in document["runs"] for r in run["results"])
        return Counter(p["fingerprint"] for f in document["files"] for p in f["findings"])
    except OSError as error:
        raise InputError(
            f"can't read the baseline {label}: {error.strerror}; an earlier check writes it with --format sarif -o FILE"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"the baseline {label} is not the JSON or SARIF output of an earlier check") from error
