"""Build the manifest of a bundle (schema: ``normdeploy.verbs.package.evidence_bundle``), and write its samples."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import describe_environment, source_date_epoch
from ...reports.report import to_plain
from ...storage.file_hash import hash_file
from ...storage.npz_files import write_npz
from ...types import Progress
from ...version import __version__
from .evidence_bundle import SCHEMA, scan_folder
from .model_files import PackagedEngine
from .triton_config import TritonPort

if TYPE_CHECKING:
    from ...findings.records import Finding, Summary
    from ..verify.comparison_result import Comparison
    from .samples import Samples

_PARTS = ("inputs", "expected", "free")


def npz_keys(ports: Sequence[TritonPort]) -> dict[str, str]:
    """Choose the keys of inputs or outputs in .npz files, where a key is also a file name.

    Returns:
        Input or output -> key. The keys are the names, or "tensor_0", "tensor_1", ... if any name is not safe as a file
        name.
    """
    names = [p.name for p in ports]
    safe = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,100}", name) for name in names)
    return {name: name if safe else f"tensor_{i}" for i, name in enumerate(dict.fromkeys(names))}


def write_samples(folder: Path, samples: Samples, keys: Mapping[str, str]) -> None:
    """Write ``samples/<number>.inputs.npz``, ``.expected.npz`` and, if integers depend on rounding, ``.free.npz``."""
    (folder / "samples").mkdir()
    for index, sample in enumerate(samples.cases):
        for part in _PARTS:
            arrays = {keys[name]: array for name, array in getattr(sample, part).items() if name in keys}
            if arrays or part != "free":
                write_npz(folder / _sample_path(index, part), arrays)


def evidence_section(
    folder: Path,
    inputs: Sequence[TritonPort],
    outputs: Sequence[TritonPort],
    samples: Samples,
    judgement: Comparison,
    summary: Summary,
) -> dict[str, Any]:
    """Build the part of the manifest that records the evidence.

    Returns:
        The keys "inputs" to "versions" of the schema.
    """
    keys = npz_keys([*inputs, *outputs])
    dtypes = {name: a.dtype.name for s in reversed(samples.cases) for name, a in s.expected.items()}
    cases = []
    for index, sample in enumerate(samples.cases):
        case: dict[str, str | None] = {"name": sample.name, "kind": sample.kind}
        paths = {part: _sample_path(index, part) for part in _PARTS}
        cases.append(case | {part: path if (folder / path).is_file() else None for part, path in paths.items()})
    return {
        "inputs": [_port_to_json(p, p.dtype, keys) for p in inputs],
        "outputs": [_port_to_json(p, dtypes[p.name], keys) for p in outputs if p.name in dtypes],
        "samples": cases,
        "reference": samples.reference,
        "bounds": [{"output": o, "kind": k, "allowed": b} for (o, k), b in samples.bounds.items() if o in keys],
        "results": results_to_json(judgement),
        "not_run": [{"runtime": n.runtime, "reason": n.reason} for n in judgement.not_run],
        "norms": norms_to_json(summary.findings),
        "versions": describe_environment(),
    }


def _port_to_json(port: TritonPort, dtype: str, keys: Mapping[str, str]) -> dict[str, Any]:
    return {"name": port.name, "dtype": dtype, "shape": list(port.shape), "key": keys[port.name]}


def manifest_head() -> dict[str, Any]:
    """Build the first keys of the manifest.

    Returns:
        Schema, version and time. The time is SOURCE_DATE_EPOCH if this variable is set.
    """
    if (stated := source_date_epoch()) is None:
        now = datetime.now(UTC)
    else:
        now = datetime.fromtimestamp(stated, UTC)
    return {"schema": SCHEMA, "normdeploy": __version__, "made": now.isoformat(timespec="seconds")}


def engines_to_json(engines: Sequence[PackagedEngine]) -> list[dict[str, Any]]:
    """Describe the engines for the manifest.

    Returns:
        One object for each engine.
    """
    return [
        {"path": e.path, "runtime": e.runtime, "compute_capability": e.capability, "served": e.is_served}
        for e in engines
    ]


def results_to_json(judgement: Comparison) -> list[dict[str, Any]]:
    """Describe the result of each output in each runtime for the manifest.

    Returns:
        One JSON object for each result.
    """
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


def norms_to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Describe each norm of the file, with the verdict of each runtime.

    The names of runtimes have no version, so that a later version can be compared.

    Returns:
        One object for each norm.
    """
    told = []
    for finding in findings:
        runtimes = {re.sub(r" \d+(\.\d+)+\S*", "", s.runtime): s.verdict for s in finding.runtimes if s.form == "now"}
        norm = {"kind": finding.kind, "module": finding.module, "tensor": finding.tensor, "place": finding.place}
        told.append(norm | {"runtimes": runtimes})
    return told


def hash_files(folder: Path, progress: Progress | None) -> dict[str, dict[str, Any]]:
    """Hash every file in the folder.

    Returns:
        Path -> sha256 and bytes.
    """
    files, _ = scan_folder(folder)
    told = {}
    for done, (path, size) in enumerate(sorted(files.items())):
        if progress is not None:
            progress("hash", done, len(files))
        told[path] = {"sha256": hash_file(folder / path), "bytes": size}
    return told


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, and create the folder if it is missing."""
    path.parent.mkdir(exist_ok=True)
    # json.dumps writes ASCII. File names can contain bytes that UTF-8 could not encode.
    path.write_text(json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n")


def _sample_path(index: int, part: str) -> str:
    return f"samples/{index:03}.{part}.npz"
