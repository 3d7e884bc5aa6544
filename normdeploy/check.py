"""A guard for CI: rules that the norms of a file should keep, judged on what the census (``normdeploy.census``) tells of them.

The JSON's schema is ``normdeploy/check/1``; keys may be added. ``normdeploy.sarif`` says the same as SARIF.

    schema      "normdeploy/check/1"
    normdeploy  the version that wrote it
    ok          nothing of ``fail_on`` was found that the baseline does not know, and every file could be read
    fail_on     names of rules
    files       one object for each: file (path as given), error (why it could not be checked, "" where it was), notes, and findings:
        rule, level ("error" where it fails the check, else "warning" or "note"), message, kind (of norm, "" where it is about none),
        module, place, node, tensor (where it is; "" where the file does not tell), fingerprint, known (the baseline has it)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import onnx

from .deploy import Loading, opened
from .errors import InputError, NormdeployError
from .files import bodies, tensors
from .floating import module
from .opsets import nodes_of
from .records import Finding
from .runtimes.trt import TITLES

SCHEMA = "normdeploy/check/1"
FINGERPRINT = "normdeploy/v1"  # its key in SARIF; another recipe is another key
_MOST = 2**28  # bytes of a baseline
_UNBOUNDED = float(np.finfo(np.float32).max)  # what exporters write for "no bound"; Inf says the same in float16
_LARGEST_HALF = float(np.finfo(np.float16).max)

Progress = Callable[[str, int, int], None]
Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Rule:
    """``help`` says what is wrong with it and what to do."""

    id: str
    short: str
    help: str
    level: Level = "warning"  # where it does not fail the check


RULES = (
    Rule(
        "decomposed",
        "A normalization is written in several nodes, and one would do.",
        "`normdeploy optimize` proves one node equal and writes it: fewer passes over memory, and an epsilon that nothing can lose.",
    ),
    Rule(
        "unfolded",
        "A BatchNorm could be folded into its neighbour.",
        "`normdeploy optimize` folds its scale and shift into the weights of the linear op beside it: it then costs nothing.",
    ),
    Rule(
        "train-mode",
        "A node is in training mode.",
        "Its result depends on the rest of the batch, or is random. Call `.eval()` on the model before the export.",
    ),
    Rule(
        "eps-lost",
        "An epsilon is zero in the type in which its norm computes.",
        "Rows without variance become NaN or Inf. Keep the statistics in float32, or choose an epsilon that the type can hold "
        "(float16 from 6e-8 on); `normdeploy optimize --precision` does the first.",
    ),
    Rule(
        "fp16-overflow",
        "A constant is larger than float16 can hold (65504).",
        "It becomes Inf in float16. `normdeploy optimize --precision fp16` keeps such constants in float32 between Casts.",
    ),
    Rule(
        "wrong-form",
        "A norm is one node, but one that a runtime gets wrong or does not know.",
        "Ops of one tool alone, GroupNormalization of one group (TensorRT takes it for InstanceNormalization), or another form than the "
        "one that `--runtime` runs best: `normdeploy optimize` writes the better one.",
    ),
    Rule(
        "missing-kernel",
        "A runtime refuses a norm, or has no kernel of its own for it.",
        "The runtimes that are installed were asked. `normdeploy optimize --runtime ...` chooses a form that the runtime has.",
    ),
    Rule(
        "refused",
        "Something like a norm is none that one standard node can hold.",
        "`normdeploy inspect --explain NAME` shows what stops it.",
        level="note",
    ),
)
IDS = tuple(rule.id for rule in RULES)
FAIL_ON = ("decomposed", "train-mode", "eps-lost")


@dataclass(frozen=True)
class Problem:
    """One breach of one rule; the module's docstring says what the fields mean."""

    rule: str
    message: str
    kind: str = ""
    module: str = ""
    place: str = ""
    node: str = ""
    tensor: str = ""
    level: Level = "warning"
    fingerprint: str = ""
    known: bool = False

    @property
    def name(self) -> str:
        """Where it is, as briefly as the file tells: the module path, the node, or the tensor."""
        return self.module or self.node or self.tensor


@dataclass(frozen=True)
class Checked:
    """One file; ``error`` says why it could not be checked."""

    file: str
    findings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Check:
    """What became of all files; true where nothing fails and all could be read."""

    files: tuple[Checked, ...]
    fail_on: tuple[str, ...]
    baseline: bool = False

    def __bool__(self) -> bool:
        return not any(f.error or any(p.level == "error" for p in f.findings) for f in self.files)

    def json(self) -> str:
        """The document described at the top of this module."""
        from . import __version__

        document = {"schema": SCHEMA, "normdeploy": __version__, "ok": bool(self), "fail_on": self.fail_on}
        return json.dumps(document | {"files": [asdict(f) for f in self.files]}, indent=2, ensure_ascii=False) + "\n"


def check(
    sources: Sequence[str | os.PathLike[str]],
    *,
    fail_on: Sequence[str] = FAIL_ON,
    runtime: str = "any",
    fuse: str = "standard",
    precision: str | None = None,
    baseline: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Check:
    """Judge the norms of each file by ``RULES``; nothing is changed.

    Of a model that is yet to be exported what ``export`` would mend is no problem (decomposed, unfolded, wrong-form).

    Args:
        sources: ONNX files, or what ``export`` takes.
        fail_on: the rules that make the result false, "all" among them for every one.
        runtime, fuse: as for ``optimize``; with a runtime other than "any" only what that one makes of the norms counts.
        precision: "fp16" or "bf16": judge epsilons as though the file computed in it.
        baseline: an earlier result as JSON or SARIF; what it holds does not fail again.
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: see ``normdeploy.loading.load``.

    Raises:
        InputError: there is no such rule, or the baseline can't be read. A file that can't be read is a part of the result.
    """
    unknown = [name for name in fail_on if name not in (*IDS, "all")]
    if unknown:
        raise InputError(f"there is no rule {unknown[0]!r}; choose from {', '.join(IDS)}, or all")
    failing = IDS if "all" in fail_on else tuple(dict.fromkeys(fail_on))
    left = _known(baseline)
    files = []
    for source in dict.fromkeys(os.fspath(s) for s in sources):
        try:
            found, notes = _of_file(source, runtime, fuse, precision, progress, loading)
        except NormdeployError as error:
            files.append(Checked(source, error=str(error)))
            continue
        files.append(Checked(source, tuple(_judged(source, found, failing, left)), tuple(notes)))
    return Check(tuple(files), failing, baseline is not None)


def _of_file(
    source: str, runtime: str, fuse: str, precision: str | None, progress: Progress | None, loading: Loading
) -> tuple[list[Problem], Sequence[str]]:
    from .census import census

    proto, deployed = opened(source, loading=loading, progress=progress)
    summary = census(proto, runtime=runtime, fuse=fuse, progress=progress, chains=deployed)
    nodes = {name: node for body in bodies(proto) for node in body.node for name in node.output}
    training = list(_training(proto))
    random = {p.tensor for p in training}
    found = [*training]
    for finding in summary.findings:
        if finding.tensor not in random:
            found += _of_norm(finding, deployed, runtime, precision)
    told = {name for f in summary.findings for h in f.half if h.dtype == "float16" for name in h.overflow}
    found += _constants(proto, told)
    return [replace(p, node=p.node or (nodes[p.tensor].name if p.tensor in nodes else "")) for p in found], summary.notes


# ------------------------------------------------------------------ the rules


def _of_norm(f: Finding, deployed: bool, runtime: str, precision: str | None) -> Iterator[Problem]:
    at = Problem("", "", f.kind, f.module, f.place, tensor=f.tensor)
    ops = [word for word in f.spelling.split() if not word.startswith("(")]
    if deployed and f.status == "fused" and len(ops) > 1:
        yield replace(at, rule="decomposed", message=f"{f.kind} in {len(ops)} nodes ({f.spelling}) can be {f.became}")
    elif deployed and f.status == "fused":
        yield replace(at, rule="wrong-form", message=f"{f.kind} as {f.spelling} should be {f.became}")
    elif deployed and f.status == "folded" and "folded into" in f.became:
        yield replace(at, rule="unfolded", message=f"{f.kind} can be {f.became}")
    elif f.status in ("refused", "undone"):
        yield replace(at, rule="refused", message=f"{f.kind} is left as it is: {f.reason}")
    if said := _lost(f, precision):
        yield replace(at, rule="eps-lost", message=f"{f.kind}: {said}")
    for half in f.half:
        if half.dtype == "float16" and half.overflow:
            yield replace(at, rule="fp16-overflow", message=f"{f.kind}: constants overflow in float16: {', '.join(half.overflow)}")
    yield from _kernels(f, at, deployed, runtime)


def _lost(f: Finding, precision: str | None) -> str:
    """How the epsilon of a norm is lost, "" where it is not. An eval BatchNorm has none that could be: its root is a constant."""
    epsilon = f.epsilon_as_written if f.epsilon_as_written is not None else f.epsilon
    if epsilon is None or f.statistics in ("", "constant"):
        return ""
    if epsilon == 0:
        return "its epsilon is 0"
    kinds = {*f.statistics.split(" and "), {"fp16": "float16", "bf16": "bfloat16"}.get(precision or "", "")}
    lost = [half.dtype for half in f.half if half.dtype in kinds and half.vanishes == "zero"]
    return f"its epsilon {epsilon:.7g} is 0 in {' and '.join(lost)}" if lost else ""


def _kernels(f: Finding, at: Problem, deployed: bool, runtime: str) -> Iterator[Problem]:
    """What runtimes refuse. Where none is named the bodies that they run for want of a kernel are no fault of the file."""
    bad = ("missing",) if runtime == "any" else ("missing", "function")
    form = "now" if deployed or not f.written else "optimized"
    title = TITLES.get(runtime, runtime)
    for s in f.runtimes:
        asked = runtime == "any" or s.runtime.split()[0] == title
        if asked and s.form == form and s.verdict in bad:
            yield replace(at, rule="missing-kernel", message=f"{f.kind} ({' '.join(s.nodes)}) in {s.runtime}: {s.reason or s.verdict}")


def _training(proto: onnx.ModelProto) -> Iterator[Problem]:
    """Nodes in training mode, those of bodies and functions too (ONNX, BatchNormalization 1, 7, 9 and 14, Dropout 1, 7 and 12)."""
    constants = {t.name: t for t in proto.graph.initializer}
    for node, opset in nodes_of(proto):
        if node.domain not in ("", "ai.onnx") or node.op_type not in ("BatchNormalization", "Dropout"):
            continue
        attributes = {a.name: a.i for a in node.attribute}
        if node.op_type == "BatchNormalization":
            by_outputs = sum(map(bool, node.output)) > 1
            training = bool(attributes.get("training_mode", 0)) if opset >= 14 else by_outputs
            training = not attributes.get("is_test", 0) if opset < 7 else training
            said = "its statistics are of the batch"
        else:
            flag = constants.get(node.input[2]) if opset >= 12 and len(node.input) > 2 else None
            training = bool(onnx.numpy_helper.to_array(flag).any()) if flag is not None else False
            training = not attributes.get("is_test", 0) if opset < 7 else training
            said = "its result is random"
        if training:
            kind = "BatchNorm" if node.op_type == "BatchNormalization" else ""
            message = f"{node.op_type} in training mode: {said}"
            yield Problem("train-mode", message, kind, module(node), node=node.name, tensor=next(iter(node.output), ""))


def _constants(proto: onnx.ModelProto, told: set[str]) -> Iterator[Problem]:
    """Constants outside of norms that float16 can't hold."""
    names = {a.t.name or n.output[0]: n.output[0] for b in bodies(proto) for n in b.node if n.op_type == "Constant" for a in n.attribute}
    for tensor in tensors(proto):
        name = names.get(tensor.name, tensor.name)
        if tensor.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE) or name in told or not tensor.dims:
            continue
        largest = _largest(onnx.numpy_helper.to_array(tensor))
        if largest > _LARGEST_HALF:
            yield Problem("fp16-overflow", f"a constant of up to {largest:.7g} overflows in float16", tensor=name)


def _largest(values: np.ndarray) -> float:
    """The largest finite magnitude that is a number, no bound."""
    if not values.size:
        return 0.0
    ends = float(values.min()), float(values.max())
    if all(abs(v) < _UNBOUNDED for v in ends):
        return max(map(abs, ends))
    magnitudes = np.abs(values)
    return float(magnitudes[magnitudes < _UNBOUNDED].max(initial=0.0))


# ------------------------------------------------------------------ fingerprints and the baseline


def _judged(source: str, found: Sequence[Problem], fail_on: Sequence[str], left: Counter[str]) -> Iterator[Problem]:
    levels = {rule.id: rule.level for rule in RULES}
    seen: Counter[tuple[str, ...]] = Counter()
    for p in found:
        key = (p.rule, Path(source).name, p.kind, p.place, p.module or re.sub(r"\d+", "", p.node or p.tensor))
        seen[key] += 1
        fingerprint = hashlib.sha256(json.dumps([*key, seen[key]]).encode()).hexdigest()[:32]
        known = left[fingerprint] > 0
        left[fingerprint] -= known
        yield replace(p, level="error" if p.rule in fail_on and not known else levels[p.rule], fingerprint=fingerprint, known=known)


def _known(baseline: str | os.PathLike[str] | None) -> Counter[str]:
    """The fingerprints that an earlier result holds."""
    if baseline is None:
        return Counter()
    label = repr(os.fspath(baseline))
    try:
        if os.stat(baseline).st_size > _MOST:
            raise InputError(f"the baseline {label} has more than {_MOST} bytes; give what an earlier check wrote")
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
