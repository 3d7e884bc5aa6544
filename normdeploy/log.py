"""``-v``: what a verb does, line by line with the time, on standard error.

All of it goes through the logger "normdeploy", so that a program that calls the verbs can have it too. Stages and their
seconds, files written, each norm with what became of it and why, code of others that is run; for debugging each reading
of a norm that was given up.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .errors import escape_line

if TYPE_CHECKING:
    from .findings.records import Summary

log = logging.getLogger("normdeploy")


class _LineFormatter(logging.Formatter):
    """Seconds since the start, and the message without what a terminal would obey."""

    def __init__(self) -> None:
        super().__init__()
        self._start = time.time()

    def format(self, record: logging.LogRecord) -> str:
        return f"[{record.created - self._start:8.2f} s] {escape_line(record.getMessage())}"


def start_logging(verbosity: int) -> None:
    """From now on the log goes to standard error: stages and results for 1, each attempt too for more, nothing for 0.

    What an earlier call asked for ends with this one; handlers that a program added itself stay.
    """
    log.handlers[:] = [handler for handler in log.handlers if not isinstance(handler.formatter, _LineFormatter)]
    log.setLevel({0: logging.NOTSET, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    log.propagate = not verbosity
    if verbosity:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_LineFormatter())
        log.addHandler(handler)


def log_norms(summary: Summary, notes: Iterable[str] = ()) -> None:
    """Log what became of each norm, and why; for debugging what else was tried and in how many seconds."""
    if not log.isEnabledFor(logging.INFO):
        return
    for finding in summary.findings:
        proof = finding.certificate
        if proof is not None and proof.method == "exact":
            proved = f" ({proof.method}, error 2^-{proof.bits})"
        else:
            proved = ""
        what = ": ".join(part for part in (finding.became, finding.reason) if part)
        log.info(
            "%s %s %s%s%s",
            finding.kind,
            finding.module or finding.tensor,
            finding.status,
            f" {what}" if what else "",
            proved,
        )
        for tried in finding.attempts:
            log.debug("  tried from %s to %s: %s (%s)", tried.start, tried.end, tried.reason, tried.tensor)
    for stage, seconds in summary.seconds.items():
        log.debug("  %s took %.2f s", stage, seconds)
    for note in notes:
        log.info("note: %s", note)
