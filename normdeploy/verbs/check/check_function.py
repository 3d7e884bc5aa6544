"""A guard for CI: rules that the norms of a file should keep, judged on what the census
(``normdeploy.verbs.inspect.norm_census``) tells of them.

The JSON's schema is ``normdeploy/check/1``; keys may be added. ``normdeploy.verbs.check.sarif`` says the same as SARIF.

    schema      "normdeploy/check/1"
    normdeploy  the version that wrote it
    ok          nothing of ``fail_on`` was found that the baseline does not know, and every file could be read
    fail_on     names of rules
    files       one object for each: file (path as given), error (why it could not be checked, "" where it was), notes,
        and findings: rule, level ("error" where it fails the check, else "warning" or "note"), message, kind (of norm,
        "" where it is about none), module, place, node, tensor (where it is; "" where the file does not tell),
        fingerprint, known (the baseline has it)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...errors import ExtensionError, InputError, NormdeployError
from ...findings.rendering import Renderable
from ...norms.third_party import is_managed_op
from ...option_values import TENSORRT
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
from .third_party_rules import ThirdPartyRule, load_rules

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "normdeploy/check/1"
# its key in SARIF; another recipe is another key
FINGERPRINT = "normdeploy/v1"
# bytes of a baseline
_MOST = 2**28


@dataclass(frozen=True)
class CheckedFile:
    """One file; ``error`` says why it could not be checked."""

    file: str
    findings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Check(Renderable):
    """What became of all files; true where nothing fails and all could be read."""

    files: tuple[CheckedFile, ...]
    fail_on: tuple[str, ...]
    baseline: bool = False
    # ours, and then those of installed packages
    rules: tuple[Rule, ...] = RULES
    # The named runtime and why it is not here, where a rule of ``fail_on`` asks it; "" where all was asked.
    unasked: str = ""

    def __bool__(self) -> bool:
        return not any(f.error or any(p.level == "error" for p in f.findings) for f in self.files)

    def json(self) -> str:
        """The document described at the top of this module."""
        document = {"schema": SCHEMA, "normdeploy": __version__, "ok": bool(self), "fail_on": self.fail_on}
        return json.dumps(document | {"files": [asdict(f) for f in self.files]}, indent=2, ensure_ascii=False) + "\n"

    def show(self, console: Console) -> None:
        from rich.text import Text

        console.print(Text(render_check(self).rstrip("\n")), soft_wrap=True)


@take_fields_as_arguments(CheckCall, onnx="sources")
def check(call: CheckCall) -> Check:
    """Judge the norms of each file by ``RULES``; nothing is changed.

    Of a model that is yet to be exported what ``export`` would mend is no problem (decomposed, unfolded, wrong-form).

    Args:
        sources: ONNX files, or what ``export`` takes; one or several, models in memory too. Of a folder every .onnx
            file in it, at any depth; one that holds none is taken as a model (a Hugging Face folder).
        fail_on: the rules that make the result false, "all" among them for every one; one text may hold several, by
            comma. Rules of installed packages (`normdeploy.verbs.check.third_party_rules`) are named like ours.
        runtime, fuse: as for ``optimize``; with a runtime other than "any" only what that one makes of the norms
        counts. A file that has ops with bodies of ours or a package's is judged as with "portable".
        precision: "fp16" or "bf16": judge epsilons as though the file computed in it.
        compute_capability: of the oldest GPU that the files are for, "8.6".
        baseline: an earlier result as JSON or SARIF; what it holds does not fail again.
        progress: called with (stage, done, total); total is 0 where it is not known.
        model, model_args, key, trust, ...: see ``normdeploy.loading.load``.

    Raises:
        InputError: there is no such rule or compute capability, or the baseline can't be read. A file that can't be
            read is a part of the result.
        ExtensionError: a package's rule is broken.
    """
    others = load_rules()
    rules = (*RULES, *(other.rule for other in others))
    ids = tuple(rule.id for rule in rules)
    unknown = [name for name in call.fail_on if name not in (*ids, "all")]
    if unknown:
        raise InputError(f"there is no rule {unknown[0]!r}; choose from {', '.join(ids)}, or all")
    capability = _parse_capability(call.compute_capability)
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
            problems, notes = _problems_of_file(source, call, capability, others)
        except ExtensionError:
            # of no file's doing
            raise
        except NormdeployError as error:
            files.append(CheckedFile(source, error=str(error)))
            continue
        files.append(CheckedFile(source, tuple(_grade_problems(source, problems, failing, left, rules)), tuple(notes)))
    return Check(tuple(files), failing, call.baseline is not None, rules, _describe_unchecked(call.runtime, failing))


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
        raise InputError(f"the compute capability is {text!r}; give it as NVIDIA writes it, such as 8.6")
    return float(text)


def find_onnx_files(source: str) -> list[str]:
    """Every .onnx file in a folder, at any depth and in the order of the names; a file, or a folder without one, as it
    is.

    Links to folders are not followed, and what begins with a dot (.git, caches) is passed by.
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


def _problems_of_file(
    source: str, call: CheckCall, capability: float | None, others: Sequence[ThirdPartyRule] = ()
) -> tuple[list[Problem], Sequence[str]]:
    runtime = call.runtime
    fuse = call.fuse
    proto, weights, deployed = open_onnx_source(source, loading=call.load_keywords, progress=call.progress)
    if any(is_managed_op(node.domain, node.op_type) for node, _ in nodes_with_opsets(proto)):
        # as such the file was written; without, the bodies of its ops would be taken for norms in it
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
    if deployed and runtime in TENSORRT and not any(p.rule in REFUSED_BY_TENSORRT for p in problems):
        problems += find_parser_refusals(proto, runtime)
    problems += [problem for other in others for problem in other.find_problems(proto)]
    # which had to live until here
    del weights
    return [
        replace(p, node=p.node or (nodes[p.tensor].name if p.tensor in nodes else "")) for p in problems
    ], summary.notes


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
    """The fingerprints that an earlier result holds."""
    if baseline is None:
        return Counter()
    label = repr(os.fspath(baseline))
    try:
        # a device or a pipe may never end
        if os.stat(baseline).st_size > _MOST or not os.path.isfile(baseline):
            raise InputError(
                f"the baseline {label} is no file, or has more than {_MOST} bytes; give what an earlier check wrote"
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
        raise InputError(f"the baseline {label} is neither JSON nor SARIF of an earlier check") from error
