"""Add parity tests to pytest: a fixture, a marker, JUnit properties and a report of all verdicts.

    normdeploy_parity          fixture: the assertions of ``normdeploy.testing``, with the options of the marker
    @pytest.mark.normdeploy    marker: default options of these assertions for a test, a class or a module
    --normdeploy-report FILE   JSON (FILE.json) or a page (FILE.html) with all verdicts of the session; repeatable

pytest imports this module at each start (entry point ``pytest11``), so it imports no heavy library.

A verdict belongs to the test that was running. It is attached to the report of the test's phase, which pytest-xdist
sends from the workers to the controller. The controller writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from ..errors import NormdeployError
from ..reports.page_templates import require_page_libraries
from .verdicts import Verdict, listening

# Name of the marker, of the sections of reports and of the option's group; prefix of the JUnit properties.
_NAME = "normdeploy"
_ASSERTIONS = ("assert_parity", "assert_norms_fused", "assert_no_regression")
# Attribute of a test's report with the verdicts of its phase, as plain values.
_ATTRIBUTE = "normdeploy_verdicts"
_VERDICTS = pytest.StashKey[list[dict[str, Any]]]()
_ENDINGS = (".json", ".html")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--normdeploy-report``."""
    parser.getgroup(_NAME).addoption(
        "--normdeploy-report",
        action="append",
        default=[],
        metavar="FILE",
        help="Write the verdicts of normdeploy's assertions as JSON (FILE.json) or as a page (FILE.html). Repeatable.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, check the files of the reports, and collect verdicts if a report is wanted.

    Raises:
        pytest.UsageError: a report can't be written.
    """
    config.addinivalue_line(
        "markers",
        f"{_NAME}(**options): default options of the assertions of the fixture normdeploy_parity, such as"
        " max_seconds=5, tolerance='1e-4:1e-3' or kinds='LayerNorm'",
    )
    files = [_require_report_file(text) for text in config.getoption("--normdeploy-report")]
    # Workers of pytest-xdist send their verdicts to the controller, which alone writes the files.
    if files and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_ReportWriter(files), "normdeploy-report-writer")


def _require_report_file(text: str) -> Path:
    """Check that a report can be written.

    Raises:
        pytest.UsageError: the ending is unknown, the folder does not exist, or a library for pages is missing.
    """
    path = Path(text).expanduser().absolute()
    if path.suffix not in _ENDINGS:
        raise pytest.UsageError(f"--normdeploy-report: {text!r} ends in neither {' nor '.join(_ENDINGS)}")
    if not path.parent.is_dir() or path.is_dir():
        raise pytest.UsageError(f"--normdeploy-report: {text!r} is a folder, or its folder does not exist")
    if path.suffix == ".html":
        try:
            require_page_libraries()
        except NormdeployError as error:
            raise pytest.UsageError(str(error).replace("--html", "--normdeploy-report FILE.html")) from error
    return path


# ------------------------------------------------------------------ the verdicts of a test


# The older form of wrappers, because every release of pluggy has it. Another form would end each run of pytest 7.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, None]:
    """Collect the verdicts of a test and of its fixtures."""
    item.stash[_VERDICTS] = []
    with listening(partial(_record_verdict, item)):
        yield


def _record_verdict(item: pytest.Item, verdict: Verdict) -> None:
    """Add a verdict to the test's report: a section, JUnit properties, and the values for ``--normdeploy-report``."""
    item.stash[_VERDICTS].append(asdict(verdict) | {"details": list(verdict.details), "test": item.nodeid})
    word = "passed" if verdict.ok else "FAILED"
    culprit = f"\nculprit: {verdict.culprit}" if verdict.culprit else ""
    item.add_report_section("call", _NAME, f"{verdict.assertion} {word}: {verdict.text}{culprit}")
    versions = ", ".join(f"{library} {version}" for library, version in verdict.versions.items())
    properties = {
        "verdict": f"{verdict.assertion} {word}: {verdict.text}",
        "error": verdict.error,
        "allowed": verdict.allowed,
        "culprit": verdict.culprit or None,
        "versions": versions,
    }
    item.user_properties += [(f"{_NAME}.{name}", value) for name, value in properties.items() if value is not None]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Attach the verdicts of a phase to the phase's report."""
    outcome = yield
    verdicts = item.stash.get(_VERDICTS, [])
    if verdicts:
        setattr(outcome.get_result(), _ATTRIBUTE, verdicts)
        item.stash[_VERDICTS] = []


class _ReportWriter:
    """Collect the verdicts of the session from the reports of all phases, and write the files at its end."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._verdicts: list[dict[str, Any]] = []
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the verdicts of a report; with pytest-xdist, the report comes from a worker."""
        self._verdicts += getattr(report, _ATTRIBUTE, [])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files. If a file can't be written, the session fails."""
        from .session_report import write_session_report

        for file in self._files:
            try:
                write_session_report(file, self._verdicts)
                count = len(self._verdicts)
                self._lines.append(f"{count} verdict{'' if count == 1 else 's'} in {file}")
            except NormdeployError as error:
                self._lines.append(f"no report was written: {error}")
                session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the path of each file."""
        for line in self._lines:
            terminalreporter.write_line(f"normdeploy: {line}")


# ------------------------------------------------------------------ the fixture


class ParityAssertions:
    """Assertions of ``normdeploy.testing`` with default options. Arguments of a call override these options."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Select the options of each assertion.

        Args:
            options: option -> value; an assertion takes the options that are among its parameters.

        Raises:
            TypeError: no assertion has an option of this name.
        """
        # The assertions bring torch and onnx, for which a session without parity tests must not wait.
        from . import assertions

        self._assertions = dict[str, Callable[..., None]]()
        known = set[str]()
        for name in _ASSERTIONS:
            assertion = getattr(assertions, name)
            parameters = signature(assertion).parameters
            named = {each for each, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
            known |= named
            own = {option: value for option, value in options.items() if option in named}
            self._assertions[name] = partial(assertion, **own)
        if unknown := sorted(options.keys() - known):
            raise TypeError(f"unknown option {unknown[0]!r}; choose from {', '.join(sorted(known))}")

    def assert_parity(self, *args: Any, **kwargs: Any) -> None:
        """Call ``normdeploy.testing.assert_parity``."""
        __tracebackhide__ = True
        self._assertions["assert_parity"](*args, **kwargs)

    def assert_norms_fused(self, *args: Any, **kwargs: Any) -> None:
        """Call ``normdeploy.testing.assert_norms_fused``."""
        __tracebackhide__ = True
        self._assertions["assert_norms_fused"](*args, **kwargs)

    def assert_no_regression(self, *args: Any, **kwargs: Any) -> None:
        """Call ``normdeploy.testing.assert_no_regression``."""
        __tracebackhide__ = True
        self._assertions["assert_no_regression"](*args, **kwargs)


@pytest.fixture
def normdeploy_parity(request: pytest.FixtureRequest) -> ParityAssertions:
    """Assertions of normdeploy.testing with the options of @pytest.mark.normdeploy(...)."""
    options = dict[str, Any]()
    # The markers of the module and the class come first, so that the marker of the test overrides their options.
    for marker in reversed(list(request.node.iter_markers(_NAME))):
        if marker.args:
            pytest.fail(f"@pytest.mark.normdeploy takes options by name only, but got {marker.args!r}", pytrace=False)
        options |= marker.kwargs
    try:
        return ParityAssertions(options)
    except TypeError as error:
        wrong = str(error)
    # The call is outside of the handler, so that pytest prints the reason once.
    pytest.fail(f"@pytest.mark.normdeploy: {wrong}", pytrace=False)
