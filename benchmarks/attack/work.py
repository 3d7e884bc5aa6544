"""One graph through everything: generate, optimize, judge."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import onnx

from .builder import Case
from .families import generate
from .judge import FALSE, judge

LIMIT = 120  # seconds for one graph: one that hangs must not end a long run


@dataclass
class Outcome:
    """What became of one graph. ``kind``: "" (right or untouched), one of ``judge.FALSE``, "skipped", "error"
    (``optimize`` raised) or "invalid" (the generator's own fault). The models are kept only where somebody will want to
    look."""

    family: str
    name: str
    index: int
    honest: bool
    rewritten: bool = False
    kind: str = ""
    detail: str = ""
    became: str = ""
    exposed: bool = False
    runtime: bool = False
    before: onnx.ModelProto | None = None
    after: onnx.ModelProto | None = None
    feed: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def worth_keeping(self) -> bool:
        return bool(self.kind)

    def counts(self) -> Counter[str]:
        flags = {
            "rewritten": self.rewritten,
            "false": self.kind in FALSE,
            "exposed": self.exposed,
            "runtime": self.runtime,
        }
        return Counter({"graphs": 1, **{k: int(v) for k, v in flags.items()}, **({self.kind: 1} if self.kind else {})})


def changed(before: onnx.ModelProto, after: onnx.ModelProto) -> bool:
    """Whether anything that computes differs."""

    def essence(m: onnx.ModelProto) -> list[bytes]:
        parts = [*m.graph.node, *m.graph.initializer, *m.functions, *m.opset_import]
        return [p.SerializeToString(deterministic=True) for p in parts]

    return essence(before) != essence(after)


def attack(job: tuple[int, int, tuple[str, ...], int]) -> Outcome:
    """(seed, index, families, inputs) -> the outcome; the same one in every process."""
    seed, index, names, inputs = job
    try:
        case = generate(seed, index, names)
    except Exception as error:
        return Outcome("generator", "", index, False, kind="invalid", detail=f"{type(error).__name__}: {error}")
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT)
    try:
        return outcome_of(case, index, np.random.default_rng([seed, index, 1]), inputs)
    except TimeoutError as error:
        return Outcome(case.family, case.name, index, case.honest, kind="error", detail=str(error), before=case.model)
    finally:
        signal.alarm(0)


def _late(*_: object) -> None:
    raise TimeoutError(f"no answer in {LIMIT} s")


def outcome_of(case: Case, index: int, rng: np.random.Generator, inputs: int = 12) -> Outcome:
    """Optimizes and judges one case."""
    import normdeploy

    result = Outcome(case.family, case.name, index, case.honest)
    given = onnx.ModelProto()
    given.CopyFrom(case.model)
    try:
        made = normdeploy.optimize(given)
    except TimeoutError:
        raise
    except Exception as error:  # whatever it is: a valid graph was given
        result.kind, result.detail, result.before = "error", f"{type(error).__name__}: {error}", case.model
        return result
    done = [f for f in made.summary.findings if f.status in ("fused", "folded")]
    result.rewritten = bool(done)
    result.became = "\n".join(f"{f.kind} {f.status} {f.became}" for f in done)
    if changed(case.model, given):
        result.kind, result.detail, result.before = "error", "optimize changed the model that it was given", case.model
        return result
    if not changed(case.model, made.proto):
        return result
    verdict = judge(case, made.proto, rng, inputs)
    result.kind, result.detail, result.feed = verdict.kind, verdict.detail, verdict.feed
    result.exposed, result.runtime = verdict.exposed, verdict.runtime
    if result.worth_keeping:
        result.before, result.after = case.model, made.proto
    return result
