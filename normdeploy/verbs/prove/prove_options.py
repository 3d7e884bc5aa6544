"""Options and arguments of ``prove``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...types import PathLike, Progress
from ...verb_options import option_field

if TYPE_CHECKING:
    from ..arguments.argument_validation import Onnx


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """Options of ``prove``."""

    map: str | Sequence[str] = option_field(
        (),
        "--map",
        "Match an input or output of A with one of B that has another name. You can repeat the option.",
        metavar="NAME_IN_A=NAME_IN_B",
        type=list[str] | None,
    )
    max_seconds: float | None = option_field(
        None,
        "--max-seconds",
        'Limit on processor time, in seconds. The verdict is "not known" if it is reached.',
        metavar="S",
        minimum=1,
    )
    counterexample: PathLike | None = option_field(
        None,
        "--counterexample",
        "Write the inputs that show a difference into this file.",
        metavar="FILE.npz",
        type=Path | None,
    )


@dataclass(frozen=True)
class ProveCall(ProveOptions):
    """Arguments of a call of ``prove``."""

    first: Onnx
    second: Onnx
    _: KW_ONLY
    progress: Progress | None = None
