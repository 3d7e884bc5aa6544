"""Read the samples of a bundle as untrusted input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes

from ...errors import InputError
from ...storage.npz_files import read_npz
from ...types import Array
from .evidence_bundle import EvidenceBundle
from .samples import Sample, Samples


def read_samples(bundle: EvidenceBundle, damaged: set[str]) -> tuple[Samples, list[str]]:
    """Read the samples whose files are unchanged since packaging.

    Args:
        damaged: paths of files that differ from their hash.

    Returns:
        The samples, and a note for each sample that was skipped.

    Raises:
        InputError: the manifest is malformed, or a file has other arrays than the manifest states.
    """
    inputs = bundle.read_part("inputs", _parse_ports)
    outputs = bundle.read_part("outputs", _parse_ports)
    bounds = bundle.read_part(
        "bounds", lambda value: {(str(b["output"]), str(b["kind"])): _parse_bound(b["allowed"]) for b in value}
    )
    cases = []
    notes = []
    for entry in bundle.read_part("samples", lambda value: [dict(v) for v in value]):
        name = str(entry.get("name"))
        kind = str(entry.get("kind"))
        paths = [entry.get(p) for p in ("inputs", "expected", "free")]
        if broken := [str(path) for path in paths if path in damaged]:
            notes.append(f"the sample {name!r} was not run: {broken[0]} changed after packaging")
            continue
        given = _read_arrays(bundle, paths[0], inputs)
        expected = _read_arrays(bundle, paths[1], outputs)
        if paths[2] is not None:
            free = _read_arrays(bundle, paths[2], {n: ("bool", key) for n, (_, key) in outputs.items()}, every=False)
        else:
            free = {}
        if missing := sorted({output for output in expected if (output, kind) not in bounds}):
            raise InputError(
                f"the manifest has no bound for {missing} in samples of kind {kind!r}; create the bundle again"
            )
        if wrong := [n for n, a in free.items() if n not in expected or a.shape != expected[n].shape]:
            raise InputError(f"{paths[2]} does not fit {wrong} of {paths[1]}; create the bundle again")
        cases.append(Sample(name, kind, given, expected, free))
    return Samples(tuple(cases), bounds, str(bundle.manifest.get("reference", ""))), notes


def _parse_ports(value: Any) -> dict[str, tuple[str, str]]:
    """Parse the inputs or outputs in the manifest: name -> dtype and key."""
    return {str(v["name"]): (str(v["dtype"]), str(v["key"])) for v in value}


def _parse_bound(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"the bound {value!r} is not a number of 0 or more")
    return float(value)


def _read_arrays(
    bundle: EvidenceBundle, path: Any, ports: Mapping[str, tuple[str, str]], *, every: bool = True
) -> dict[str, Array]:
    file = bundle.file_path(path)
    # `package` writes arrays without compression, so they are never larger than the file. The limit refuses compressed
    # arrays that would fill the memory.
    content = read_npz(file, limit=file.stat().st_size)
    arrays = {}
    for name, (dtype, key) in ports.items():
        if key not in content and not every:
            continue
        array = content.get(key)
        if array is not None and dtype == "bfloat16" and array.dtype.str[1:] == "V2":
            array = array.view(ml_dtypes.bfloat16)
        if array is None or array.dtype.name != dtype:
            if array is None:
                kind = "nothing"
            else:
                kind = array.dtype.name
            raise InputError(f"{path} has {kind} for {name!r}, but the manifest has {dtype}; create the bundle again")
        arrays[name] = array
    return arrays
