"""Find runners by the name of ``--runner``: OpenVINO, onnxruntime-web, and runtimes of installed packages."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ..environment import WEB
from ..types import PathLike
from . import Runner
from .live_runner import LiveRunner
from .openvino_runner import (
    PRECISIONS,
    TITLE,
    OpenVinoRunner,
    describe_limits,
    explain_missing_openvino,
    title_of_runner,
)
from .ort_runner import OrtRunner
from .third_party_runner import ThirdPartyRunner, require_runtime, third_party_title
from .web_process import explain_missing_web
from .web_runner import WebRunner

# Inference precision of OpenVINO -> precision in which ``verify`` judges it.
_JUDGED = {"f32": "", "bf16": "bf16", "f16": "fp16"}


@dataclass(frozen=True)
class NamedRunner:
    """Runtime besides onnxruntime and TensorRT, which runs ONNX files.

    Attributes:
        title: name in tables.
        runtime: name of the software in messages; "" for a runtime of another package.
        precision: "fp16" or "bf16" if the runtime computes float32 files in this type, else "".
        finite_only: True if the runtime guarantees nothing for NaN and infinities.
    """

    name: str
    title: str
    runtime: str = ""
    precision: str = ""
    finite_only: bool = False

    @property
    def provider(self) -> str:
        """Return the name for `open_session_runner`; "" for a runtime of another package."""
        return self.name if self.runtime else ""

    def open(self, source: PathLike | bytes, threads: int = 0) -> LiveRunner:
        """Open a file, or the bytes of a model.

        Args:
            source: runtimes of other packages take only a path.
            threads: number of threads; 0 for the runtime's default. Runtimes of other packages have no such setting.

        Returns:
            The runner.

        Raises:
            GraphError, InputError, RuntimeUnavailable: as for `OpenVinoRunner`, `WebRunner` and `ThirdPartyRunner`.
        """
        if self.runtime == TITLE:
            return OpenVinoRunner(source, self.name, threads)
        if self.runtime == WEB:
            return WebRunner(source, threads)
        assert not isinstance(source, bytes)
        return ThirdPartyRunner(self.name, source)

    def explain_missing(self) -> str | None:
        """Explain why the runtime can't be used here.

        Returns:
            The missing part and advice; None if nothing is known to be missing.
        """
        if self.runtime == TITLE:
            return explain_missing_openvino()
        if self.runtime == WEB:
            return explain_missing_web()
        return None

    def describe_limits(self, proto: onnx.ModelProto) -> str:
        """Describe a limit of the runtime that makes a correct file differ.

        Returns:
            One phrase, or "".
        """
        if self.runtime == TITLE:
            return describe_limits(proto)
        return ""


_BUILTIN = (
    *(
        NamedRunner(name, title_of_runner(name), TITLE, _JUDGED[precision], finite_only=True)
        for name, precision in PRECISIONS.items()
    ),
    NamedRunner(WEB, WEB, WEB),
)
BUILTIN_RUNNERS = {runner.name: runner for runner in _BUILTIN}
"""Name of ``--runner`` -> runtime that needs no extension of normdeploy."""
BUILTIN_TITLES = {runner.title: runner for runner in _BUILTIN}
"""Name in tables -> runtime that needs no extension of normdeploy."""


def require_named_runner(name: str) -> NamedRunner:
    """Find a runner by its name.

    Returns:
        The runner.

    Raises:
        InputError: there is no such runner.
    """
    if name in BUILTIN_RUNNERS:
        return BUILTIN_RUNNERS[name]
    return NamedRunner(name, third_party_title(require_runtime(name, others=tuple(BUILTIN_RUNNERS))))


def open_session_runner(source: str | bytes, *, optimize: bool, provider: str) -> Runner:
    """Open a model in onnxruntime or in a runtime of ``BUILTIN_RUNNERS``.

    Args:
        source: a path, or the bytes of a model.
        optimize: as for `OrtRunner`; the other runtimes always optimize.
        provider: "cpu", "cuda", or a key of ``BUILTIN_RUNNERS``.

    Returns:
        The runner.

    Raises:
        GraphError, RuntimeUnavailable: as for the runners.
    """
    if provider in BUILTIN_RUNNERS:
        return BUILTIN_RUNNERS[provider].open(source)
    return OrtRunner(source, optimize=optimize, provider=provider)
