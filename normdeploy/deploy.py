"""The verbs, each one function that is read top to bottom and names every stage once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from . import rewrite
from .errors import NormdeployError
from .files import load_onnx, save_onnx
from .records import Summary

Progress = Callable[[str, int, int], None]
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class ExportResult:
    """An ONNX model and the account of its making.

    ``path`` is where it was written, None where no output was asked for; ``seconds`` holds stage -> seconds, in the order run.
    """

    proto: onnx.ModelProto
    path: Path | None
    summary: Summary
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


class _Stages:
    """Names and times the stages of a verb, and tells the progress bar which one runs."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, 0, 0)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def optimize(
    source: PathLike | onnx.ModelProto,
    output: PathLike | None = None,
    *,
    runtime: str = "any",
    strict: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Fuse and fold the normalizations of an ONNX model from anywhere.

    Args:
        source: a file, or a model with its weights loaded; neither is changed.
        output: where to write the result.
        runtime: which of equal standard forms to write: "any", "onnxruntime", "tensorrt" or "tensorrt-rtx".
        strict: a failed certificate is an error; otherwise its rewrite is undone and reported.
        progress: called with (stage, done, total); total is 0 where it is not known.

    Raises:
        GraphError: the file is broken or no ONNX.
        CertificateError: with ``strict``, where a certificate failed.
        NormdeployError: ``output`` is ``source``, or can't be written.
    """
    stage = _Stages(progress)
    if output is not None and not isinstance(source, onnx.ModelProto):
        _refuse_same(source, output)
    with stage("load"):
        proto = source if isinstance(source, onnx.ModelProto) else load_onnx(source)
    with stage("norms"):
        proto, summary = rewrite.optimize(proto, runtime=runtime, strict=strict, progress=progress)
    if output is not None:
        with stage("write"):
            save_onnx(proto, output)
    return ExportResult(proto, None if output is None else Path(output), summary, seconds=stage.seconds)


def _refuse_same(source: PathLike, output: PathLike) -> None:
    if os.path.realpath(source) == os.path.realpath(output):
        raise NormdeployError(
            f"the output {os.fspath(output)!r} is the input {os.fspath(source)!r}, which would be lost; give another name with -o"
        )
