"""Re-verifies a bundle: compares it with its manifest, runs its samples again and flags regressions.

Worse is: a file that differs from its hash, is missing or does not belong there; a configuration that can't be read or
does not fit the model; an output that passed and fails now, or whose runtime can't be run any more; a norm that is
gone, or that a runtime had a kernel for and now runs as a function of primitives or refuses. Other versions, smaller or
larger errors within the bounds and new runtimes are told.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import environment
from ...errors import GraphError, InputError, NormdeployError
from ...evidence.keys import trusted
from ...runtimes.jit_cache import beside
from ...shown import Shown
from ...storage.files import load_onnx, sha256
from ...types import PathLike, Progress
from ..inspect import census
from ..package.attest import require_signed, signers
from ..package.bundle import BESIDE, Bundle, described, open_bundle, require_hashes, scan
from ..package.manifest import norms_of, results_of
from ..package.text import REPOSITORY
from .changes import Change
from .configs import check_configs

if TYPE_CHECKING:  # torch takes seconds to import
    from ..package.sample_runs import Judgement

SCHEMA = "normdeploy/recheck/1"
_RANK = {"kernel": 0, "layers": 0, "function": 1, "missing": 2}
_TELLING = 2.0  # an error that changed by less is the same: two evaluations differ by as much


@dataclass(frozen=True)
class Recheck(Shown):
    """What ``recheck`` found; true where nothing got worse.

    ``judgement`` is what the runtimes make of the samples now, None where none could be run.
    """

    path: Path
    name: str
    made: str
    files: int
    changes: tuple[Change, ...]
    judgement: Judgement | None
    notes: tuple[str, ...]
    seconds: float

    def __bool__(self) -> bool:
        return not any(change.worse for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """In the values of JSON, of schema ``normdeploy/recheck/1``: ok, name, made (when the bundle was), files
        (compared), changes (what, name, was, now, worse), parity (as in ``normdeploy.reports.report``, or null), notes,
        seconds."""
        parity = None if self.judgement is None else self.judgement.to_json()
        told = {"schema": SCHEMA, "ok": bool(self), "name": self.name, "made": self.made, "files": self.files}
        return told | {
            "changes": [asdict(c) for c in self.changes],
            "parity": parity,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def recheck(
    folder: PathLike, *, onnx: PathLike | None = None, trust: Sequence[PathLike] = (), progress: Progress | None = None
) -> Recheck:
    """Compare a bundle with what its manifest says, and run its samples again in every runtime at hand.

    Nothing in the bundle is believed: no path leads out of it, no link is followed, nothing is unpickled, and samples
    and engines that differ from their hash are not used. Loading an engine runs what it holds, as it does anywhere:
    recheck engines of people you trust.

    Args:
        onnx: a newer ONNX file of the same model, run in place of the bundle's.
        trust: PEM files of public keys: nothing is run unless one of them has signed the bundle as it is.
        progress: called with (stage, done, total).

    Raises:
        InputError: it is no bundle, its manifest is malformed, or names what is not in it.
        GraphError: ``onnx`` is missing or broken.
        EvidenceError: with ``trust``: the bundle is not signed by such a key, or not as it was signed.
        RuntimeUnavailable: with ``trust``: a library is missing.
    """
    start = time.perf_counter()
    keys = trusted(trust)
    bundle = open_bundle(folder)
    if keys:
        require_signed(folder, keys)
    known = bundle.read("files", described)
    require_hashes(bundle, known)
    newer = None if onnx is None else Path(os.path.realpath(onnx))
    if newer is not None:
        load_onnx(newer, external_data=False)  # one that is broken is no finding about the bundle
    before = bundle.read("results", lambda value: {(str(r["output"]), str(r["runtime"])): _Result.of(r) for r in value})
    changes, damaged = _files(bundle, known, progress)
    changes += _versions(bundle.read("versions", _texts))
    path = newer or _usable(bundle, bundle.manifest["onnx"])
    judgement, notes = None, list[str]()
    if keys:
        notes.append("every file is as a trusted key has signed it")
    elif by := signers(bundle.root):
        notes.append(f"it says that {', '.join(by)} has signed it, which was not verified; --trust PUBLIC.pem does")
    if path is None:
        changes += _compared(before, None, "the ONNX file is not there")
    else:
        changes += check_configs(bundle, path)
        judgement, more, told = _results(bundle, path, before, known, damaged, progress)
        changes += more
        notes += told
        changes += _norms(bundle, path, progress)
    name, made = str(bundle.manifest.get("name", ""))[:100], str(bundle.manifest.get("made", ""))[:40]
    return Recheck(
        bundle.root, name, made, len(known), tuple(changes), judgement, tuple(notes), time.perf_counter() - start
    )


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()}


def _usable(bundle: Bundle, path: Any) -> Path | None:
    try:
        return bundle.file(path)
    except InputError:
        return None


def _files(
    bundle: Bundle, known: Mapping[str, tuple[str, int]], progress: Progress | None
) -> tuple[list[Change], set[str]]:
    """What differs from its hash, and the paths that are not to be used."""
    present, links = scan(bundle.root)
    changes = [
        Change("file", path, "", *_strange(path)) for path in links if path not in known and not _emptied(path, known)
    ]
    damaged = set[str]()
    for done, (path, (digest, size)) in enumerate(sorted(known.items())):
        if progress is not None:
            progress("hash", done, len(known))
        wrong = ""
        if path in links:
            wrong = "a link or special file, which is never opened"
        elif path not in present:
            wrong = "missing"
        elif present[path] != size:
            wrong = f"{present[path]} bytes"
        elif (now := _digest(bundle.file(path))) != digest:
            wrong = now if " " in now else f"sha256 {now[:16]}"
        if wrong:
            damaged.add(path)
            changes.append(Change("file", path, f"{size} bytes, sha256 {digest[:16]}", wrong, True))
    for path in sorted(present.keys() - known.keys() - BESIDE):
        changes.append(Change("file", path, "", "new: not in the manifest", path.startswith(f"{REPOSITORY}/")))
    return changes, damaged


def _emptied(path: str, known: Mapping[str, tuple[str, int]]) -> bool:
    """Whether it is a folder of the bundle's own, whose files are told as missing."""
    return path.endswith("/") and any(own.startswith(path) for own in known)


def _strange(path: str) -> tuple[str, bool]:
    """What something is that is no file, and whether the bundle is worse for it."""
    if path.endswith("/"):
        return "new: an empty folder", path.startswith(f"{REPOSITORY}/")
    return "a link or special file, which is never opened", True


def _digest(file: Path) -> str:
    try:
        return sha256(file)
    except OSError as error:
        return f"it can't be read: {error.strerror}"


def _versions(before: Mapping[str, str]) -> list[Change]:
    now = environment()
    names = [*before, *(name for name in now if name not in before)]
    return [
        Change("version", n, before.get(n, ""), now.get(n, ""), False) for n in names if before.get(n) != now.get(n)
    ]


_Results = Mapping[tuple[str, str], "_Result"]  # (output, runtime) -> what became of it


def _results(
    bundle: Bundle,
    path: Path,
    before: _Results,
    known: Mapping[str, tuple[str, int]],
    damaged: set[str],
    progress: Progress | None,
) -> tuple[Judgement | None, list[Change], list[str]]:
    from ..package.sample_files import read_samples
    from ..package.sample_runs import judge

    samples, notes = read_samples(bundle, damaged)
    engines = []
    for entry in bundle.read("engines", lambda value: [str(e["path"]) for e in value]):
        if entry in damaged:
            notes.append(f"{entry} is not what was packaged and was not run")
        else:
            engines.append(bundle.file(entry))
    if not samples.cases:
        return None, _compared(before, None, "no sample is as it was packaged"), notes
    trusted = {bundle.root / name for name in known.keys() - damaged}
    strange = [cache for e in engines if os.path.lexists(cache := beside(e)) and cache not in trusted]
    notes += [f"{cache.name} is not what was packaged, and no runtime cache was read" for cache in strange]
    try:
        judgement = judge(path, engines, samples, runtime_cache=False if strange else None, progress=progress)
    except (GraphError, InputError) as error:
        return None, [Change("result", path.name, "it ran", str(error), True)], notes
    return judgement, _compared(before, judgement, "it has no such output any more"), notes


@dataclass(frozen=True)
class _Result:
    passed: bool
    error: float
    reason: str

    @classmethod
    def of(cls, value: Any) -> _Result:
        return cls(value["verdict"] == "pass", float(value["max_abs_error"]), str(value["reason"]))

    def __str__(self) -> str:
        text = f"{'pass' if self.passed else 'fail'}, error {self.error:.2e}"
        return f"{text}: {self.reason}" if self.reason else text


def _compared(before: _Results, judgement: Judgement | None, otherwise: str) -> list[Change]:
    """``otherwise`` is why a result is missing where the judgement does not tell."""
    now = {(r["output"], r["runtime"]): _Result.of(r) for r in results_of(judgement)} if judgement is not None else {}
    reasons = {missed.runtime: missed.reason for missed in judgement.not_run} if judgement is not None else {}
    changes = []
    for key in [*before, *(key for key in now if key not in before)]:
        then, current = before.get(key), now.get(key)
        name = f"{key[0]} in {key[1]}"
        if current is None:
            why = reasons.get(key[1]) or reasons.get(key[1].partition(" (")[0]) or otherwise
            changes.append(Change("result", name, str(then), f"not run: {why}", then is not None and then.passed))
        elif then is None:
            changes.append(Change("result", name, "", str(current), not current.passed))
        elif then.passed != current.passed or not _alike(then.error, current.error):
            changes.append(Change("result", name, str(then), str(current), then.passed and not current.passed))
    return changes


def _alike(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other)) or max(one, other) <= _TELLING * min(one, other)


def _norms(bundle: Bundle, path: Path, progress: Progress | None) -> list[Change]:
    """Norms that came, went, or that a runtime treats otherwise."""

    def read(value: Any) -> dict[tuple[str, str, str], tuple[str, dict[str, str]]]:
        return {
            (str(n["kind"]), str(n["place"]), str(n["tensor"])): (str(n["module"]), _texts(n["runtimes"]))
            for n in value
        }

    before = bundle.read("norms", read)
    try:
        now = read(norms_of(census(load_onnx(path), progress=progress).findings))
    except NormdeployError as error:
        return [Change("norm", path.name, "it was read", str(error), True)]
    changes = []
    for key in [*before, *(key for key in now if key not in before)]:
        module, was = before.get(key, ("", {}))
        status = now.get(key, ("", {}))[1]
        name = f"{key[0]} {module or now.get(key, ('', {}))[0] or key[2]}"
        if key not in now or key not in before:
            changes.append(
                Change("norm", name, "there" if key in before else "", "there" if key in now else "gone", key in before)
            )
            continue
        for runtime in sorted(was.keys() & status.keys()):
            if was[runtime] != status[runtime]:
                worse = _RANK.get(status[runtime], 0) > _RANK.get(was[runtime], 0)
                changes.append(Change("norm", f"{name} in {runtime}", was[runtime], status[runtime], worse))
    return changes
