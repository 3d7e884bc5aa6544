"""What ``export`` and ``optimize`` give back, and how such a result stands for what it was made from and for its
file."""

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
from ...storage.onnx_files import load_onnx

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ModelOrigin:
    """What a verb was given to make a model from, so that another need not be told again."""

    source: Any
    args: Any = ()
    kwargs: Mapping[str, Any] | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportResult(Renderable):
    """An ONNX model and the account of its making.

    ``proto`` is the model with its weights, read again from ``path`` where it was written: large ones are held by
    nobody until then. ``path`` is where it was written, None where no output was asked for; ``seconds`` holds stage ->
    seconds, in the order run. ``precision`` tells what stayed float32 where half precision was asked for,
    ``quantization`` what became of each layer where that was. ``origin`` is what it was made from: ``verify(result)``
    and ``bisect(result)`` compare with that. Wherever a verb takes an ONNX file, the result may stand in its place.
    """

    # where it was not written
    made: onnx.ModelProto | None = field(repr=False)
    path: Path | None
    summary: Summary
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    precision: PrecisionReport | None = None
    origin: ModelOrigin | None = field(default=None, repr=False, compare=False)
    quantization: QuantizationReport | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_written", _file_state(self.path))

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """
        Raises:
            GraphError: the file is not there any more, or was changed.
        """
        if self.made is not None:
            return self.made
        assert self.path is not None
        if _file_state(self.path) != self._written:  # type: ignore[attr-defined]
            raise GraphError(
                f"{str(self.path)!r} is not the file any more that was written; export or optimize the model again"
            )
        return load_onnx(self.path)

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
    """What tells a file from a later one of its name."""
    if path is None or not path.is_file():
        return None
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def resolve_onnx(value: Any) -> Any:
    """The ONNX file or model that a result stands for; any other value as it is."""
    if not isinstance(value, ExportResult):
        return value
    if value.path is None:
        return value.proto
    return value.path


def as_sequence(value: Any) -> Sequence[Any]:
    """One thing, or a list or tuple of them, as a sequence."""
    if isinstance(value, list | tuple):
        return value
    return [value]
