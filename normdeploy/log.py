"""Log the work of a verb to standard error with ``-v``, one line per step with the time.

All lines go through the logger "normdeploy", so that programs that call the verbs can collect them. The log contains
stages with their seconds, written files, each norm's outcome and reason, and code of other packages that runs. The
debug level adds each failed attempt to read a norm.
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
    """Format seconds since the start and the message, without characters that control a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._start = time.time()

    def format(self, record: logging.LogRecord) -> str:
        """Format one record.

        Returns:
            line without a newline.
        """
        return f"[{record.created - self._start:8.2f} s] {escape_line(record.getMessage())}"


def start_logging(verbosity: int) -> None:
    """Send the log to standard error. A later call replaces an earlier one. Handlers that the calling program added
    itself are kept.

    Args:
        verbosity: 0 logs nothing, 1 logs stages and results, 2 also logs each attempt.
    """
    log.handlers[:] = [handler for handler in log.handlers if not isinstance(handler.formatter, _LineFormatter)]
    log.setLevel({0: logging.NOTSET, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    log.propagate = not verbosity
    if verbosity:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_LineFormatter())
        log.addHandler(handler)


def log_norms(summary: Summary, notes: Iterable[str] = ()) -> None:
    """Log each norm's outcome and reason. At debug level, also log the other readings that were tried and the
    seconds.
    """
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
