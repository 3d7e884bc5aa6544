"""Time the stages of a verb and report them to the progress bar."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..log import log
from ..types import Progress


class StageTimer:
    """Name and time the stages of a verb, and report the current stage to the progress bar."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a stage."""
        if self.progress is not None:
            self.progress(name, 0, 0)
        log.info("%s ...", name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        log.info("%s took %.2f s", name, self.seconds[name])


def prefix_progress(part: str, progress: Progress | None) -> Progress | None:
    """Prefix each stage that is reported to ``progress`` with the name of a part of the model.

    Returns:
        The wrapped callback; None if ``progress`` is None.
    """
    if progress is None:
        return None
    return lambda stage, done, total: progress(f"{part}: {stage}", done, total)
