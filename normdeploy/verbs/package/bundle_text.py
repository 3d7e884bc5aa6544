"""Write the texts of a bundle: the commands that reproduce the bundle, and its notes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import onnx

from ...errors import GraphError
from ...storage.export_record import read_record
from ...types import PathLike
from .model_files import PackagedEngine

if TYPE_CHECKING:
    from ..verify.comparison_result import Comparison
    from .certificate_search import Certificates
    from .package_options import PackageCall
    from .triton_config import ServingOptions

REPOSITORY = "model_repository"
_DEFAULTS = {"opset": None, "runtime": "any", "fuse": "standard", "strict": False, "precision": None}


def reproduction_commands(call: PackageCall, proto: onnx.ModelProto) -> list[str]:
    """List the commands that reproduce, serve and recheck a bundle.

    The first command is the export that the file recorded, if it has a record. Paths are given without their folders.

    Returns:
        Shell command lines.
    """
    export: list[list[str]] = []
    try:
        record = read_record(proto)
    except GraphError:
        record = {}
    if record:
        flags = {
            name: value for name, value in record["export"].items() if name in _DEFAULTS and value != _DEFAULTS[name]
        }
        words = [
            word
            for name, value in sorted(flags.items())
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ]
        export = [["normdeploy", "export", "MODEL", "-o", "model.onnx", *_loading_flags(record["load"]), *words]]
    served = ["tritonserver", f"--model-repository={REPOSITORY}"]
    every = [
        *export,
        ["normdeploy", "package", *_package_arguments(call), *_loading_flags(call.load_keywords)],
        served,
        ["normdeploy", "recheck", "."],
    ]
    return [shlex.join(words) for words in every]


def package_command(commands: Sequence[str]) -> str:
    """Find the packaging command among the commands of the bundle.

    Returns:
        The first command that starts with "normdeploy package".
    """
    return next(command for command in commands if command.startswith("normdeploy package "))


def _package_arguments(call: PackageCall) -> list[str]:
    typed = [_folder_free_name(call.model_path), "-o", _folder_free_name(call.output)]
    paths: list[tuple[str, Any]] = [("--source", call.source), ("--report-from", call.report_from)]
    paths += [("--engine", e) for e in call.engines]
    paths += [("--inputs", "FILE.npz" if isinstance(i, Mapping) else i) for i in call.sample_sources]
    typed += [word for flag, value in paths if value is not None for word in (flag, _folder_free_name(value))]
    numbers: list[tuple[str, Any, Any]] = [("--name", call.name, None), ("--max-batch", call.max_batch, None)]
    numbers += [("--instances", call.instances, 1), ("--provider", call.provider, "cpu")]
    typed += [word for flag, value, usual in numbers if value != usual for word in (flag, str(value))]
    if call.replace:
        return [*typed, "--replace"]
    return typed


def _folder_free_name(path: PathLike) -> str:
    return PurePath(path).name or os.fspath(path)


def _loading_flags(loading: Mapping[str, Any]) -> list[str]:
    """Return the loading options as command-line options."""
    words: list[str] = []
    for name, flag in (("model", "--model"), ("key", "--key"), ("task", "--task"), ("part", "--part")):
        if loading.get(name):
            words += [flag, str(loading[name])]
    words += [
        word
        for name, value in (loading.get("model_args") or {}).items()
        for word in ("--model-arg", f"{name}={value!r}")
    ]
    for name, flag in (("imports", "--import"), ("inputs", "--input"), ("dims", "--dim")):
        words += [word for value in loading.get(name) or () for word in (flag, str(value))]
    return words + [flag for name, flag in (("trust", "--trust"), ("eval", "--eval")) if loading.get(name)]


def bundle_notes(
    before: Sequence[str],
    serving: ServingOptions,
    engines: Sequence[PackagedEngine],
    judgement: Comparison,
    *,
    optimize: bool,
    certificates: Certificates,
) -> list[str]:
    """Collect the notes of a bundle for the user.

    Args:
        before: notes of earlier steps; they come first in the result.
        optimize: True if Triton runs the ONNX file with onnxruntime's optimizer.

    Returns:
        Notes of one or two sentences each.
    """
    lines = [*before]
    if serving.reason:
        lines.append(f"Triton does not batch: {serving.reason}")
    if aside := [e.path for e in engines if not e.is_served]:
        lines.append(
            f"{', '.join(aside)}: Triton's backend for TensorRT can't load TensorRT-RTX engines; they are"
            " outside the repository, for recheck and for your own programs"
        )
    if not optimize:
        lines.append(
            "onnxruntime's optimizer breaks this file, so the configuration turns it off (optimization.graph.level 2)"
        )
    return [*lines, _describe_certificates(certificates), *judgement.notes]


def _describe_certificates(certificates: Certificates) -> str:
    if certificates.report is None:
        return (
            f"no certificates: no report beside the file records its SHA-256 ({certificates.digest[:16]}…); write one"
            " with export or optimize (--report), and leave it beside the file or pass it with --report-from"
        )
    if not certificates.norms:
        return f"no certificates: nothing was rewritten, says {certificates.report.origin}"
    count = len(certificates.norms)
    return f"{count} {'certificate' if count == 1 else 'certificates'} from {certificates.report.origin}"
