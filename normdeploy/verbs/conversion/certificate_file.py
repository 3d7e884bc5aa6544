"""Check the option ``--certificate``, and describe the written file that a certificate belongs to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx

from ...errors import InputError, NormdeployError
from ...rewriting.certificate_document import CertifiedFile
from ...storage.file_hash import hash_file
from ...storage.file_replacement import resolve_writable_path
from ...storage.onnx_files import iter_tensors, load_onnx
from ...types import PathLike
from ...verb_options import ConversionOptions

# Number of bytes that contain the first key of a certificate.
_HEAD = 64


def require_certifiable(certificate: PathLike, options: ConversionOptions, output: PathLike | None) -> None:
    """Check, before any work, that a certificate file can be written for this output.

    Raises:
        InputError: the file is not the float32 file that the rewrites were proved for, or there is no file.
        NormdeployError: the certificate file can't be written, or would replace the model.
    """
    if output is None:
        raise InputError("a certificate belongs to a file, but no output was given; pass output=")
    other = "precision" if options.precision is not None else "quantize" if options.quantize is not None else ""
    if other:
        raise InputError(
            f"--certificate can't be combined with --{other} {getattr(options, other)}: the proofs are about the"
            f" float32 file, and --{other} writes another function; omit one of the two options"
        )
    target = resolve_writable_path(certificate)
    if target == Path(os.path.realpath(output)):
        raise NormdeployError(
            f"the certificate {os.fspath(certificate)!r} would replace the model; choose another name"
        )
    if target.exists() and not _is_certificate(target):
        raise NormdeployError(
            f"the certificate {os.fspath(certificate)!r} would replace a file that is not a certificate; choose another"
            " name, or delete that file"
        )
    if options.external_data_name and target == Path(os.path.realpath(output)).with_name(options.external_data_name):
        raise NormdeployError(
            f"the certificate {os.fspath(certificate)!r} would replace the external data"
            f" {options.external_data_name!r}; choose another name for one of them"
        )


def _is_certificate(path: Path) -> bool:
    """Return whether a file begins as a certificate does: its keys are sorted."""
    with path.open("rb") as file:
        return b'"constants"' in file.read(_HEAD)


def describe_certified_file(output: PathLike, source: Any, source_opset: int) -> CertifiedFile:
    """Read the written file, and hash it with its external data and its source.

    Args:
        source: the file that was optimized, or the source of an export.
        source_opset: opset of the graph that the first rewrite changed.

    Returns:
        the file.
    """
    light = onnx.load(os.fspath(output), load_external_data=False)
    folder = Path(output).parent
    places = {entry.value for t in iter_tensors(light) for entry in t.external_data if entry.key == "location"}
    data = {place: hash_file(folder / place) for place in sorted(places)}
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".onnx" and Path(source).is_file():
        digest = hash_file(source)
    else:
        digest = None
    return CertifiedFile(load_onnx(output), hash_file(output), data, digest, source_opset)
