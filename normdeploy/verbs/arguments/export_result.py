"""Define the result of ``export`` and ``optimize``, which other verbs accept in place of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from ...errors import GraphError
from ...findings.precision_report import PrecisionReport
from ...findings.quantization_report import QuantizationReport
from ...findings.records import Summary
from ...findings.rendering import Renderable, make_printable
from ...storage.memory_models import convert_like, is_memory_model, to_model_proto
from ...storage.onnx_files import load_onnx

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ModelOrigin:
    """Source and arguments of a conversion; other verbs use them when they are given its result."""

    source: Any
    args: Any = ()
    kwargs: Mapping[str, Any] | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class ExportResult(Renderable):
    """ONNX model with the report of its conversion.

    Other verbs accept the result in place of an ONNX file. ``verify(result)`` and ``bisect(result)`` compare it with
    its origin.

    Attributes:
        proto: the model with its weights. If the model was written, the first access reads it from ``path``, so that
            large weights occupy no memory until then.
        path: the written file; None if no output was requested.
        seconds: stage -> seconds, in the order run.
        precision: tensors and nodes that stayed float32 in a half-precision file; None for a float32 file.
        quantization: result for each layer; None if the file is not quantized.
        origin: source and arguments of the model.
    """

    # The model, if it was not written; None if it was written to ``path``.
    made: onnx.ModelProto | None = field(repr=False)
    path: Path | None
    summary: Summary
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    precision: PrecisionReport | None = None
    origin: ModelOrigin | None = field(default=None, repr=False, compare=False)
    quantization: QuantizationReport | None = None

    def summarize(self) -> str:
        """Return the main facts in one line."""
        parts = [str(self.path) if self.path is not None else "in memory", self.summary.summarize()]
        parts += [report.summarize() for report in (self.precision, self.quantization) if report is not None]
        return "; ".join(parts)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_written", _file_state(self.path))

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """Return the model with its weights, read from ``path`` if it was written there.

        Raises:
            GraphError: the file is missing or was changed after it was written.
        """
        if self.made is not None:
            return self.made
        assert self.path is not None
        if _file_state(self.path) != self._written:  # type: ignore[attr-defined]
            raise GraphError(
                f"{str(self.path)!r} is not the file any more that was written; export or optimize the model again"
            )
        return load_onnx(self.path)

    @property
    def model(self) -> Any:
        """Return the model in the class of the ONNX model that was optimized.

        Returns:
            an ``onnx_ir.Model``, torch's ``ONNXProgram`` or bytes, if such an object was passed to ``optimize``;
            otherwise the onnx.ModelProto ``proto``.

        Raises:
            GraphError: as for ``proto``; or bytes are wanted, and the model has more than 2 GB.
        """
        if self.origin is None:
            return self.proto
        return convert_like(self.proto, self.origin.source)

    def show(self, console: Console) -> None:
        from ...findings.console_tables import print_notes
        from ...findings.norm_tables import show_norms
        from ...findings.precision_tables import show_precision
        from ...findings.quantization_tables import show_quantization

        show_norms(console, make_printable(self.summary))
        if self.precision is not None:
            show_precision(console, make_printable(self.precision))
        if self.quantization is not None:
            show_quantization(console, make_printable(self.quantization))
        print_notes(console, (*self.notes, *self.summary.notes))


def _file_state(path: Path | None) -> tuple[int, int] | None:
    """Return (size in bytes, modification time in ns), which identify a file's version; None if it is missing."""
    if path is None or not path.is_file():
        return None
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def resolve_result(value: Any) -> Any:
    """Replace a result by its ONNX file, or by its model if no file was written.

    Returns:
        a path or a ModelProto; a value that is not a result is returned unchanged.
    """
    if not isinstance(value, ExportResult):
        return value
    if value.path is None:
        return value.proto
    return value.path


def resolve_onnx(value: Any) -> Any:
    """Replace a result as `resolve_result` does, and convert an ONNX model in memory to a protobuf.

    Returns:
        a path or a ModelProto; a value that is neither a result nor an ONNX model in memory is returned unchanged.

    Raises:
        GraphError: as for `normdeploy.storage.memory_models.to_model_proto`.
    """
    value = resolve_result(value)
    if is_memory_model(value):
        return to_model_proto(value)
    return value


def as_sequence(value: Any) -> Sequence[Any]:
    """Wrap a single value in a list.

    Returns:
        ``value`` itself if it is a list or tuple, otherwise [value].
    """
    if isinstance(value, list | tuple):
        return value
    return [value]
