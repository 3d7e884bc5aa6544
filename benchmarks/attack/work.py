"""Generate, optimize and judge one graph."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import onnx

from .builder import Case
from .families import generate
from .judge import FALSE, judge

# Time limit for one graph in seconds, so that a graph that hangs does not end a long run
LIMIT = 120


@dataclass
class Outcome:
    """Result for one graph.

    Attributes:
        kind: "" (right or unchanged), one of ``judge.FALSE``, "skipped", "error" (``optimize`` raised) or "invalid"
            (the generator's own fault).
        before: original model; kept only if the result should be examined.
        after: optimized model; kept only if the result should be examined.
    """

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
        """Return whether the models should be saved."""
        return bool(self.kind)

    def counts(self) -> Counter[str]:
        """Count the graph.

        Returns:
            flags and kind.
        """
        flags = {
            "rewritten": self.rewritten,
            "false": self.kind in FALSE,
            "exposed": self.exposed,
            "runtime": self.runtime,
        }
        return Counter({"graphs": 1, **{k: int(v) for k, v in flags.items()}, **({self.kind: 1} if self.kind else {})})


def changed(before: onnx.ModelProto, after: onnx.ModelProto) -> bool:
    """Compare everything that computes.

    Returns:
        true if something differs.
    """

    def essence(m: onnx.ModelProto) -> list[bytes]:
        """Serialize the parts that compute.

        Returns:
            bytes of each.
        """
        parts = [*m.graph.node, *m.graph.initializer, *m.functions, *m.opset_import]
        return [p.SerializeToString(deterministic=True) for p in parts]

    return essence(before) != essence(after)


def attack(job: tuple[int, int, tuple[str, ...], int]) -> Outcome:
    """Run one job (seed, index, families, inputs).

    Returns:
        the outcome, the same in every process.
    """
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
    """Optimize and judge one case.

    Returns:
        the outcome.
    """
    import normdeploy

    result = Outcome(case.family, case.name, index, case.honest)
    given = onnx.ModelProto()
    given.CopyFrom(case.model)
    try:
        made = normdeploy.optimize(given)
    except TimeoutError:
        raise
    # Any exception counts, because the graph is valid.
    except Exception as error:
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
