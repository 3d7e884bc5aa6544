"""Define the verdict of an assertion, and pass each verdict to the test runner.

pytest imports this module at each start, so it imports nothing but parts of Python that pytest has already imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict of one assertion.

    Attributes:
        assertion: name of the function, such as "assert_parity".
        ok: True if the assertion holds.
        text: the verdict in one line.
        file: the tested file or bundle; the class of a model in memory.
        output, runtime, case: output, runtime and input of ``error``; "" if the assertion compares no output.
        error, allowed: error and allowed error of the element that failed, or that came nearest to failing; None if the
            assertion compares no output.
        details: lines that explain a failure: numbers, problems or regressions.
        culprit: fault that ``bisect`` names; "" if it was not searched.
        seconds: duration of the assertion.
        versions: library -> version, of the runtimes that took part.
    """

    assertion: str
    ok: bool
    text: str
    file: str = ""
    output: str = ""
    runtime: str = ""
    case: str = ""
    error: float | None = None
    allowed: float | None = None
    details: tuple[str, ...] = ()
    culprit: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """Return the text of the failure: the verdict, the details and the culprit, one in each line."""
        culprit = (f"culprit: {self.culprit}",) if self.culprit else ()
        return "\n".join((self.text, *self.details, *culprit))


_listeners: list[Callable[[Verdict], None]] = []


@contextmanager
def listening(listener: Callable[[Verdict], None]) -> Iterator[None]:
    """Call ``listener`` with each verdict of the block, in any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def publish_verdict(verdict: Verdict) -> None:
    """Pass a verdict to the innermost listener, if there is one."""
    if _listeners:
        _listeners[-1](verdict)
