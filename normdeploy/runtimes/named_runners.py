"""Find runners by the name of ``--runner``: OpenVINO, and runtimes of installed packages."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ..types import PathLike
from . import Runner
from .live_runner import LiveRunner
from .openvino_runner import PRECISIONS, OpenVinoRunner, describe_limits, explain_missing_openvino, title_of_runner
from .ort_runner import OrtRunner
from .third_party_runner import ThirdPartyRunner, require_runtime, third_party_title

# Inference precision of OpenVINO -> precision in which ``verify`` judges it.
_JUDGED = {"f32": "", "bf16": "bf16", "f16": "fp16"}


@dataclass(frozen=True)
class NamedRunner:
    """Runtime besides onnxruntime and TensorRT, which runs ONNX files.

    Attributes:
        title: name in tables.
        provider: name for `open_session_runner`; "" for a runtime of another package.
        precision: "fp16" or "bf16" if the runtime computes float32 files in this type, else "".
    """

    name: str
    title: str
    provider: str = ""
    precision: str = ""

    def open(self, path: PathLike, threads: int = 0) -> LiveRunner:
        """Open a file.

        Args:
            threads: number of threads; 0 for the runtime's default. Runtimes of other packages have no such setting.

        Returns:
            The runner.

        Raises:
            GraphError, InputError, RuntimeUnavailable: as for `OpenVinoRunner` and `ThirdPartyRunner`.
        """
        if self.provider:
            return OpenVinoRunner(path, self.name, threads)
        return ThirdPartyRunner(self.name, path)

    def explain_missing(self) -> str | None:
        """Explain why the runtime can't be used here.

        Returns:
            The missing part and advice; None if nothing is known to be missing.
        """
        if self.provider:
            return explain_missing_openvino()
        return None

    def describe_limits(self, proto: onnx.ModelProto) -> str:
        """Describe a limit of the runtime that makes a correct file differ.

        Returns:
            One phrase, or "".
        """
        if self.provider:
            return describe_limits(proto)
        return ""


def require_named_runner(name: str) -> NamedRunner:
    """Find a runner by its name.

    Returns:
        The runner.

    Raises:
        InputError: there is no such runner.
    """
    if name in PRECISIONS:
        return NamedRunner(name, title_of_runner(name), name, _JUDGED[PRECISIONS[name]])
    return NamedRunner(name, third_party_title(require_runtime(name, others=tuple(PRECISIONS))))


def open_session_runner(source: str | bytes, *, optimize: bool, provider: str) -> Runner:
    """Open a model in onnxruntime or OpenVINO.

    Args:
        source: a path, or the bytes of a model.
        optimize: as for `OrtRunner`; OpenVINO always optimizes.
        provider: "cpu", "cuda", or a key of `openvino_runner.PRECISIONS`.

    Returns:
        The runner.

    Raises:
        GraphError, RuntimeUnavailable: as for the runners.
    """
    if provider in PRECISIONS:
        return OpenVinoRunner(source, provider)
    return OrtRunner(source, optimize=optimize, provider=provider)
