"""Verify a bundle again: compare it with its manifest, run its samples again, and report regressions.

Regressions are:

- a file that differs from its hash, is missing, or is not part of the bundle;
- a configuration that can't be read or does not fit the model;
- an output that passed before and fails now, or whose runtime can't run any more;
- a norm that is missing now;
- a norm that a runtime ran in a kernel, if the runtime now refuses the norm or runs its function body.

Changed versions, changed errors within the allowed error, and new runtimes are reported but are not regressions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import describe_environment
from ...errors import GraphError, InputError, NormdeployError
from ...evidence.signing_keys import load_public_keys
from ...findings.rendering import Renderable
from ...runtimes.runtime_cache import default_cache_path
from ...storage.file_hash import hash_file
from ...storage.onnx_files import load_onnx
from ...types import PathLike, Progress
from ..arguments.argument_validation import write_to_disk
from ..inspect.norm_census import take_census
from ..package.bundle_signing import list_signers, require_signed
from ..package.bundle_text import REPOSITORY
from ..package.evidence_bundle import BESIDE, EvidenceBundle, open_bundle, parse_files, require_hashes, scan_folder
from ..package.manifest import norms_to_json, results_to_json
from .bundle_change import BundleChange
from .config_checks import check_configs

# torch takes seconds to import.
if TYPE_CHECKING:
    from rich.console import Console

    from ..arguments.argument_validation import Onnx
    from ..package.sample_judgement import Judgement

SCHEMA = "normdeploy/recheck/1"
_RANK = {"kernel": 0, "layers": 0, "function": 1, "missing": 2}
# Two errors count as equal if the larger error is at most this multiple of the smaller error. Errors of two correct
# runs differ by this much.
_TELLING = 2.0


@dataclass(frozen=True, repr=False)
class Recheck(Renderable):
    """Result of ``recheck``; true if there is no regression.

    Attributes:
        made: date at which the bundle was made.
        files: number of files that were compared with their hashes.
        judgement: current verdicts of the runtimes on the samples; None if no sample could run.
    """

    path: Path
    name: str
    made: str
    files: int
    changes: tuple[BundleChange, ...]
    judgement: Judgement | None
    notes: tuple[str, ...]
    seconds: float

    def summarize(self) -> str:
        """Return the main facts in one line."""
        worse = sum(change.worse for change in self.changes)
        verdict = f"{worse} got worse" if worse else "nothing got worse"
        return f"{verdict}; {self.path}: {self.name}, {self.files} files compared, {len(self.changes)} changed"

    def __bool__(self) -> bool:
        return not any(change.worse for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """Convert the result to JSON values with the schema ``normdeploy/recheck/1``.

        Returns:
            ok, name, made (date of the bundle), files (number compared), changes (what, name, was, now, worse), parity
            (as in ``normdeploy.reports.report``, or null), notes, seconds.
        """
        if self.judgement is None:
            parity = None
        else:
            parity = self.judgement.to_json()
        told = {"schema": SCHEMA, "ok": bool(self), "name": self.name, "made": self.made, "files": self.files}
        return told | {
            "changes": [asdict(c) for c in self.changes],
            "parity": parity,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def show(self, console: Console) -> None:
        from .recheck_tables import show_recheck

        show_recheck(console, self)


def recheck(
    folder: PathLike, *, onnx: Onnx | None = None, trust: Sequence[PathLike] = (), progress: Progress | None = None
) -> Recheck:
    """Compare a bundle with its manifest, and run its samples again in every installed runtime.

    Bundles are untrusted input. Paths outside the bundle are refused, links are not followed, nothing is unpickled, and
    samples and engines that differ from their hash are not used. However, loading an engine always runs the code that
    the engine contains: recheck only bundles of people that you trust if they contain engines.

    Args:
        onnx: a newer ONNX file, or a model in memory, of the same model; it runs instead of the bundle's ONNX file.
        trust: PEM files of public keys. Nothing runs unless the bundle is unchanged since it was signed with one of
            these keys.
        progress: called with (stage, done, total).

    Returns:
        The changes, the verdicts of the runtimes and notes. The result is true if there is no regression.

    Raises:
        InputError: the folder is not a bundle, or its manifest is malformed or names missing files.
        GraphError: ``onnx`` is missing or broken.
        EvidenceError: ``trust`` is set, and none of the keys has signed the bundle, or the bundle has changed since.
        RuntimeUnavailable: ``trust`` is set, and the library that checks signatures is missing.
    """
    with ExitStack() as stack:
        return _recheck_bundle(folder, write_to_disk(onnx, stack), trust, progress)


def _recheck_bundle(
    folder: PathLike, onnx: PathLike | None, trust: Sequence[PathLike], progress: Progress | None
) -> Recheck:
    start = time.perf_counter()
    keys = load_public_keys(trust)
    bundle = open_bundle(folder)
    if keys:
        require_signed(folder, keys)
    known = bundle.read_part("files", parse_files)
    require_hashes(bundle, known)
    newer = None if onnx is None else Path(os.path.realpath(onnx))
    if newer is not None:
        # If the newer file is broken, this raises an error. It is not a change of the bundle.
        load_onnx(newer, external_data=False)
    before = bundle.read_part(
        "results", lambda value: {(str(r["output"]), str(r["runtime"])): RecordedResult.from_json(r) for r in value}
    )
    changes, damaged = _compare_files(bundle, known, progress)
    changes += _compare_versions(bundle.read_part("versions", _as_string_map))
    path = newer or _model_path(bundle, bundle.manifest["onnx"])
    judgement = None
    notes = list[str]()
    if keys:
        notes.append("a trusted key signed every file, and none changed since")
    elif by := list_signers(bundle.root):
        notes.append(
            f"the bundle names {', '.join(by)} as its signer, which was not verified; verify it with"
            " --trust-key PUBLIC.pem"
        )
    if path is None:
        changes += compare_outputs(before, None, "the ONNX file is missing")
    else:
        changes += check_configs(bundle, path)
        judgement, more, told = _compare_results(bundle, path, before, known, damaged, progress)
        changes += more
        notes += told
        changes += _compare_norms(bundle, path, progress)
    name = str(bundle.manifest.get("name", ""))[:100]
    made = str(bundle.manifest.get("made", ""))[:40]
    return Recheck(
        bundle.root, name, made, len(known), tuple(changes), judgement, tuple(notes), time.perf_counter() - start
    )


def _as_string_map(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()}


def _model_path(bundle: EvidenceBundle, path: Any) -> Path | None:
    try:
        return bundle.file_path(path)
    except InputError:
        return None


def _compare_files(
    bundle: EvidenceBundle, known: Mapping[str, tuple[str, int]], progress: Progress | None
) -> tuple[list[BundleChange], set[str]]:
    """Compare the files with their hashes.

    Returns:
        The differences, and the paths of changed files, which must not be used.
    """
    present, links = scan_folder(bundle.root)
    changes = [
        BundleChange("file", path, "", *_describe_special_file(path))
        for path in links
        if path not in known and not _is_emptied_folder(path, known)
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
        elif (now := _file_digest(bundle.file_path(path))) != digest:
            if " " in now:
                wrong = now
            else:
                wrong = f"sha256 {now[:16]}"
        if wrong:
            damaged.add(path)
            changes.append(BundleChange("file", path, f"{size} bytes, sha256 {digest[:16]}", wrong, True))
    for path in sorted(present.keys() - known.keys() - BESIDE):
        changes.append(BundleChange("file", path, "", "new: not in the manifest", path.startswith(f"{REPOSITORY}/")))
    return changes, damaged


def _is_emptied_folder(path: str, known: Mapping[str, tuple[str, int]]) -> bool:
    """Check whether an empty folder had files when the bundle was made. These files are already reported as missing."""
    return path.endswith("/") and any(own.startswith(path) for own in known)


def _describe_special_file(path: str) -> tuple[str, bool]:
    """Describe a path that is not a regular file, and say whether it is a regression."""
    if path.endswith("/"):
        return "new: an empty folder", path.startswith(f"{REPOSITORY}/")
    return "a link or special file, which is never opened", True


def _file_digest(file: Path) -> str:
    try:
        return hash_file(file)
    except OSError as error:
        return f"can't be read: {error.strerror}"


def _compare_versions(before: Mapping[str, str]) -> list[BundleChange]:
    now = describe_environment()
    names = [*before, *(name for name in now if name not in before)]
    return [
        BundleChange("version", n, before.get(n, ""), now.get(n, ""), False)
        for n in names
        if before.get(n) != now.get(n)
    ]


# (output, runtime) -> verdict and error of this output in this runtime.
_Results = Mapping[tuple[str, str], "RecordedResult"]


def _compare_results(
    bundle: EvidenceBundle,
    path: Path,
    before: _Results,
    known: Mapping[str, tuple[str, int]],
    damaged: set[str],
    progress: Progress | None,
) -> tuple[Judgement | None, list[BundleChange], list[str]]:
    from ..package.sample_judgement import judge_samples
    from ..package.sample_reader import read_samples

    samples, notes = read_samples(bundle, damaged)
    engines = []
    for entry in bundle.read_part("engines", lambda value: [str(e["path"]) for e in value]):
        if entry in damaged:
            notes.append(f"{entry} changed after packaging and was not run")
        else:
            engines.append(bundle.file_path(entry))
    if not samples.cases:
        return None, compare_outputs(before, None, "all samples changed after packaging"), notes
    trusted = {bundle.root / name for name in known.keys() - damaged}
    strange = [cache for e in engines if os.path.lexists(cache := default_cache_path(e)) and cache not in trusted]
    notes += [f"{cache.name} changed after packaging, so no runtime cache was read" for cache in strange]
    try:
        judgement = judge_samples(path, engines, samples, runtime_cache=False if strange else None, progress=progress)
    except (GraphError, InputError) as error:
        return None, [BundleChange("result", path.name, "it ran", str(error), True)], notes
    return judgement, compare_outputs(before, judgement, "the output no longer exists"), notes


@dataclass(frozen=True)
class RecordedResult:
    """Verdict and error of one output in one runtime, as a bundle records them."""

    passed: bool
    error: float
    reason: str

    @classmethod
    def from_json(cls, value: Any) -> RecordedResult:
        """Read a result of the manifest or of a judgement.

        Returns:
            The verdict, the largest absolute error and the reason.
        """
        return cls(value["verdict"] == "pass", float(value["max_abs_error"]), str(value["reason"]))

    def __str__(self) -> str:
        text = f"{'pass' if self.passed else 'fail'}, error {self.error:.2e}"
        if self.reason:
            return f"{text}: {self.reason}"
        return text


def compare_outputs(before: _Results, judgement: Judgement | None, otherwise: str) -> list[BundleChange]:
    """Compare the recorded results with the current results.

    Args:
        judgement: the current results; None if nothing could run.
        otherwise: reason that is reported for a missing result if the judgement has no reason.

    Returns:
        A change for each result that is missing, is new, or differs.
    """
    if judgement is not None:
        now = {(r["output"], r["runtime"]): RecordedResult.from_json(r) for r in results_to_json(judgement)}
    else:
        now = {}
    if judgement is not None:
        reasons = {missed.runtime: missed.reason for missed in judgement.not_run}
    else:
        reasons = {}
    changes = []
    for key in [*before, *(key for key in now if key not in before)]:
        then = before.get(key)
        current = now.get(key)
        name = f"{key[0]} in {key[1]}"
        if current is None:
            why = reasons.get(key[1]) or reasons.get(key[1].partition(" (")[0]) or otherwise
            changes.append(BundleChange("result", name, str(then), f"not run: {why}", then is not None and then.passed))
        elif then is None:
            changes.append(BundleChange("result", name, "", str(current), not current.passed))
        elif then.passed != current.passed or not _are_alike(then.error, current.error):
            changes.append(BundleChange("result", name, str(then), str(current), then.passed and not current.passed))
    return changes


def _are_alike(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other)) or max(one, other) <= _TELLING * min(one, other)


def _compare_norms(bundle: EvidenceBundle, path: Path, progress: Progress | None) -> list[BundleChange]:
    """Find norms that are new or missing, and norms that a runtime runs differently than before."""

    def read_norms(value: Any) -> dict[tuple[str, str, str], tuple[str, dict[str, str]]]:
        """Read norms and the support of each runtime from JSON.

        Returns:
            (kind, place, tensor) -> (module, runtime -> support).
        """
        return {
            (str(n["kind"]), str(n["place"]), str(n["tensor"])): (str(n["module"]), _as_string_map(n["runtimes"]))
            for n in value
        }

    before = bundle.read_part("norms", read_norms)
    try:
        now = read_norms(norms_to_json(take_census(load_onnx(path), progress=progress).findings))
    except NormdeployError as error:
        return [BundleChange("norm", path.name, "it was read", str(error), True)]
    changes = []
    for key in [*before, *(key for key in now if key not in before)]:
        module, was = before.get(key, ("", {}))
        status = now.get(key, ("", {}))[1]
        name = f"{key[0]} {module or now.get(key, ('', {}))[0] or key[2]}"
        if key not in now or key not in before:
            changes.append(
                BundleChange(
                    "norm", name, "there" if key in before else "", "there" if key in now else "gone", key in before
                )
            )
            continue
        for runtime in sorted(was.keys() & status.keys()):
            if was[runtime] != status[runtime]:
                worse = _RANK.get(status[runtime], 0) > _RANK.get(was[runtime], 0)
                changes.append(BundleChange("norm", f"{name} in {runtime}", was[runtime], status[runtime], worse))
    return changes
