"""Time the stages of a verb and report them to the progress bar."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..log import log
from ..reports.page_templates import format_bytes
from ..types import Progress

# Minimum bytes of a file whose size is shown on the progress bar. Smaller files load in an instant.
_LARGE = 10_000_000


class StageTimer:
    """Measure the seconds of each stage of a verb, and report the running stage to the progress bar.

    Attributes:
        seconds: stage name -> seconds, in the order of the stages.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, details: str = "") -> Iterator[None]:
        """Time the body of a ``with`` statement as the stage ``name``; a stage that raises records no seconds.

        Args:
            details: text for the progress bar after the name.
        """
        if self.progress is not None:
            self.progress(f"{name} {details}".rstrip(), 0, 0)
        log.info("%s ...", name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        log.info("%s took %.2f s", name, self.seconds[name])


def describe_loading(source: object) -> str:
    """Describe what makes loading a source slow, for the progress bar.

    Args:
        source: a file, a folder or a model in memory.

    Returns:
        for example "model.pt2, 2.1 GB, after the import of torch"; "" for a model in memory.
    """
    if not isinstance(source, str | os.PathLike):
        return ""
    path = Path(source)
    parts = [path.name]
    if path.is_file() and path.stat().st_size >= _LARGE:
        parts.append(format_bytes(path.stat().st_size))
    if path.suffix != ".onnx" and "torch" not in sys.modules:
        parts.append("after the import of torch")
    return ", ".join(parts)


def prefix_progress(part: str, progress: Progress | None) -> Progress | None:
    """Prefix each stage that ``progress`` receives with the name of a model's part.

    Returns:
        a callback that reports "part: stage", or None if ``progress`` is None.
    """
    if progress is None:
        return None
    return lambda stage, done, total: progress(f"{part}: {stage}", done, total)
