"""What ``export`` and ``optimize`` give back, and how such a result stands for what it was made from and for its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from .precision.precision import Account
from .records import Summary
from .shown import Shown


@dataclass(frozen=True)
class Origin:
    """What a verb was given to make a model from, so that another need not be told again."""

    source: Any
    args: Any = ()
    kwargs: Mapping[str, Any] | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportResult(Shown):
    """An ONNX model and the account of its making.

    ``path`` is where it was written, None where no output was asked for; ``seconds`` holds stage -> seconds, in the order run.
    ``precision`` tells what stayed float32 where half precision was asked for. ``origin`` is what it was made from: ``verify(result)``
    and ``bisect(result)`` compare with that. Wherever a verb takes an ONNX file, the result may stand in its place.
    """

    proto: onnx.ModelProto = field(repr=False)
    path: Path | None
    summary: Summary
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    precision: Account | None = None
    origin: Origin | None = field(default=None, repr=False, compare=False)


def onnx_of(value: Any) -> Any:
    """The ONNX file or model that a result stands for; any other value as it is."""
    if not isinstance(value, ExportResult):
        return value
    return value.proto if value.path is None else value.path


def several(value: Any) -> Sequence[Any]:
    """One thing, or a list or tuple of them, as a sequence."""
    return value if isinstance(value, list | tuple) else [value]
