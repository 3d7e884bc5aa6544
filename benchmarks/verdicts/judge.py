"""Judge one pair: run ``verify`` on the right file and on each faulty file, and ``bisect`` on each faulty file.

Each pair has its own process, which sends every result at once. After a crash the results before it remain.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path
from typing import Any

import onnx

import normdeploy
from normdeploy.errors import NormdeployError
from normdeploy.verbs.bisect.fault_tracing import Fault
from normdeploy.verbs.verify.comparison_result import Comparison

from .faults import FAULTS, Planted, Right, kinds_of
from .observe import Effect, Observer, session
from .pairs import Made, Pair
from .tools import quieted

# Candidates of one fault that are tried until one can be observed.
CANDIDATES = 24
# This step crashes for some files.
OPENING = "open the file in onnxruntime"
Report = Callable[[dict[str, Any]], None]


def judge(pair: Pair, report: Report, folder: Path, faults: Collection[str] = tuple(FAULTS)) -> None:
    """Judge a pair; report {"stage": …} before each step, and the result after it."""
    report({"stage": "make"})
    try:
        made = pair.make(folder)
        right = onnx.load(made.file)
        report({"stage": OPENING})
        session(right, optimized=True)
        observer = Observer(made, right) if faults else None
    # Tools raise any exception; then the pair does not exist.
    except Exception as error:
        report({"not_made": _line(error)})
        return
    report({"stage": "verify the right file"})
    began = time.process_time()
    verdict = _verdict(made, made.file)
    report({"right": verdict, "seconds": round(time.process_time() - began, 2)})
    if observer is None:
        return
    known = Right(len(next(iter(made.feeds[0].values()))), kinds_of(right))
    for name in faults:
        report({"stage": name})
        report({"fault": name, **_judge_fault(name, made, right, known, observer, folder, pair.name)})


def _judge_fault(
    name: str, made: Made, right: onnx.ModelProto, known: Right, observer: Observer, folder: Path, seed: str
) -> dict[str, Any]:
    found = _planted(name, right, known, observer, random.Random(f"{seed} {name}"))
    if found is None:
        return {"state": "no place"}
    planted, effect = found
    told = {"planted": planted.words, "ratio": _short(effect.ratio), "moved": _short(effect.moved)}
    if not effect.observable:
        return {"state": "not observable", **told}
    path = folder / "faulty.onnx"
    onnx.save(planted.proto, path)
    began = time.process_time()
    verdict, named, said = _found(made, path, planted)
    told["seconds"] = round(time.process_time() - began, 2)
    state = {"pass": "missed", "fail": "caught"}.get(verdict.partition(":")[0], verdict.partition(":")[0])
    return {"state": state, **told, "verdict": verdict, "named": named, "bisect": said}


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def _planted(
    name: str, right: onnx.ModelProto, known: Right, observer: Observer, draw: random.Random
) -> tuple[Planted, Effect] | None:
    """Return the first candidate that can be observed, else the one that moves an output most."""
    best: tuple[Planted, Effect] | None = None
    for planted in islice(FAULTS[name](right, draw, known), CANDIDATES):
        effect = observer.effect(planted.proto)
        if effect is None:
            continue
        if best is None or effect.ratio > best[1].ratio:
            best = (planted, effect)
        if effect.observable:
            break
    return best


def _verdict(made: Made, path: Path) -> str:
    """Return "pass", "fail: why", "refused: why" or "crash: why"."""
    try:
        with quieted():
            found = normdeploy.verify(made.reference, path, **made.call)
    except NormdeployError as error:
        return f"refused: {_line(error)}"
    # A crash of ours is also a result.
    except Exception as error:
        return f"crash: {_line(error)}"
    return _told(found)


def _told(found: Comparison) -> str:
    if found:
        return "pass"
    for result in found.results:
        if not result:
            numbers = f"{result.max_abs_error:.1e} of {result.allowed:.1e}"
            return f"fail: {result.output}, {result.runtime}, {result.case}: {_cut(result.reason) or numbers}"
    return f"fail: {_cut(' '.join(found.notes))}"


def _found(made: Made, path: Path, planted: Planted) -> tuple[str, bool, str]:
    """Bisect a faulty file. `bisect` begins with the comparison of `verify`; that runs again only if it does not fail.

    Returns:
        the verdict, whether the first fault names the planted node or weight, and its text.
    """
    try:
        with quieted():
            found = normdeploy.bisect(made.reference, path, **made.call)
    except NormdeployError as error:
        return _verdict(made, path), False, f"refused: {_line(error)}"
    except Exception as error:
        return _verdict(made, path), False, f"crash: {_line(error)}"
    verdict = _told(found.parity) if not found.parity else _verdict(made, path)
    if not found.faults:
        return verdict, False, f"no fault: {_cut(' '.join(found.notes))}"
    first = found.faults[0]
    said = " | ".join((first.kind, ", ".join(first.nodes), first.tensor, first.cause))
    return verdict, bool(planted.names & named_by(first)), _cut(said)


# An apostrophe ("the model's") opens no quote; a name that contains one is quoted with the other sign.
_QUOTED = re.compile(r"""(?<!\w)(?:'([^']+)'|"([^"]+)")""")
# The inliner of functions numbers the names of each call.
_CALL = re.compile(r"__\d+$")


def named_by(fault: Fault) -> set[str]:
    """Collect the names in a fault: the tensor, the nodes ("Conv node_conv2d") and the quoted names of the cause. Names
    in a function are those of the file.

    Returns:
        names.
    """
    quoted = [single or double for single, double in _QUOTED.findall(fault.cause)]
    named = [fault.tensor, *(node.rpartition(" ")[2] for node in fault.nodes), *quoted]
    return {*named, *(_CALL.sub("", name) for name in named)}


def _line(error: BaseException) -> str:
    """Return the error on one line, without the folder of this run."""
    return _cut(re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/", "", f"{type(error).__name__}: {error}"))


def _cut(text: str) -> str:
    return " ".join(str(text).split())[:240]
