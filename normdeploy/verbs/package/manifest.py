"""What the manifest of a bundle says (its schema: ``normdeploy.verbs.package.bundle``), and the samples as files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import environment, epoch
from ...reports.report import plain
from ...storage.archive import write_npz
from ...storage.files import sha256
from ...types import Progress
from ...version import __version__
from .bundle import SCHEMA, scan
from .placing import Engine
from .triton import Port

if TYPE_CHECKING:
    from ...records import Finding, Summary
    from ..verify.comparison import Comparison
    from .samples import Samples

_PARTS = ("inputs", "expected", "free")


def keys_of(ports: Sequence[Port]) -> dict[str, str]:
    """Input or output -> its name in .npz files, where a name is also the name of a file."""
    names = [p.name for p in ports]
    safe = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,100}", name) for name in names)
    return {name: name if safe else f"tensor_{i}" for i, name in enumerate(dict.fromkeys(names))}


def write_samples(folder: Path, samples: Samples, keys: Mapping[str, str]) -> None:
    """``samples/<number>.inputs.npz``, ``.expected.npz`` and, where integers hang on a rounding, ``.free.npz``."""
    (folder / "samples").mkdir()
    for index, sample in enumerate(samples.cases):
        for part in _PARTS:
            arrays = {keys[name]: array for name, array in getattr(sample, part).items() if name in keys}
            if arrays or part != "free":
                write_npz(folder / _path(index, part), arrays)


def evidence(
    folder: Path,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    samples: Samples,
    judgement: Comparison,
    summary: Summary,
) -> dict[str, Any]:
    """The part of the manifest that says what was seen."""
    keys = keys_of([*inputs, *outputs])
    dtypes = {name: a.dtype.name for s in reversed(samples.cases) for name, a in s.expected.items()}
    cases = []
    for index, sample in enumerate(samples.cases):
        case: dict[str, str | None] = {"name": sample.name, "kind": sample.kind}
        paths = {part: _path(index, part) for part in _PARTS}
        cases.append(case | {part: path if (folder / path).is_file() else None for part, path in paths.items()})
    return {
        "inputs": [{"name": p.name, "dtype": p.dtype, "key": keys[p.name]} for p in inputs],
        "outputs": [
            {"name": p.name, "dtype": dtypes[p.name], "key": keys[p.name]} for p in outputs if p.name in dtypes
        ],
        "samples": cases,
        "reference": samples.reference,
        "bounds": [{"output": o, "kind": k, "allowed": b} for (o, k), b in samples.bounds.items() if o in keys],
        "results": results_of(judgement),
        "not_run": [{"runtime": n.runtime, "reason": n.reason} for n in judgement.not_run],
        "norms": norms_of(summary.findings),
        "versions": environment(),
    }


def made_with() -> dict[str, Any]:
    """The head of the manifest."""
    now = datetime.now(UTC) if (stated := epoch()) is None else datetime.fromtimestamp(stated, UTC)
    return {"schema": SCHEMA, "normdeploy": __version__, "made": now.isoformat(timespec="seconds")}


def engine_entries(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    return [
        {"path": e.path, "runtime": e.runtime, "compute_capability": e.capability, "served": e.served} for e in engines
    ]


def results_of(judgement: Comparison) -> list[dict[str, Any]]:
    """Each output in each runtime, in the values of JSON."""
    return [
        {
            "output": r.output,
            "runtime": r.runtime,
            "max_abs_error": r.max_abs_error,
            "allowed": r.allowed,
            "verdict": r.verdict,
            "reason": r.reason,
        }
        for r in judgement.results
    ]


def norms_of(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Each norm as it stands in the file, with what each runtime makes of it; versions, which change, are no part of a
    runtime's name."""
    told = []
    for finding in findings:
        runtimes = {re.sub(r" \d+(\.\d+)+\S*", "", s.runtime): s.verdict for s in finding.runtimes if s.form == "now"}
        norm = {"kind": finding.kind, "module": finding.module, "tensor": finding.tensor, "place": finding.place}
        told.append(norm | {"runtimes": runtimes})
    return told


def hashes(folder: Path, progress: Progress | None) -> dict[str, dict[str, Any]]:
    """Path -> sha256 and bytes of every file in the folder."""
    files, _ = scan(folder)
    told = {}
    for done, (path, size) in enumerate(sorted(files.items())):
        if progress is not None:
            progress("hash", done, len(files))
        told[path] = {"sha256": sha256(folder / path), "bytes": size}
    return told


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plain(value), indent=1, allow_nan=False) + "\n")  # ASCII: a file's name may be no text


def _path(index: int, part: str) -> str:
    return f"samples/{index:03}.{part}.npz"
