"""Write the verdicts of a test session as JSON or as a page.

The JSON has the schema ``normdeploy/tests/1``, to which later versions may add keys. Numbers that are not finite are
the strings "nan", "inf" and "-inf":

    schema       "normdeploy/tests/1"
    normdeploy   the version that wrote it
    ok           true if no verdict failed
    environment  versions of libraries and names of the machine that wrote the file
    verdicts     one object for each assertion, sorted by the name of the test:
                 test       name of the test, such as "tests/test_net.py::test_parity"
                 assertion  "assert_parity" | "assert_norms_fused" | "assert_no_regression"
                 ok, text   the verdict, and the verdict in one line
                 file       the tested file or bundle, or the class of a model in memory
                 output, runtime, case
                            output, runtime and input of ``error``; "" if no output was compared
                 error, allowed
                            error and allowed error; null if no output was compared
                 details    lines that explain a failure
                 culprit    fault that ``bisect`` names; "" if none was searched
                 seconds    duration of the assertion
                 versions   library -> version of the runtimes, on the machine that ran the test
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..environment import describe_environment
from ..reports.page_templates import sanitize_texts, template_environment
from ..reports.report import to_plain
from ..storage.file_replacement import write_bytes
from ..version import __version__

SCHEMA = "normdeploy/tests/1"
# Maximum number of characters of one text of the page.
_LONGEST = 500
# Maximum number of rows of the page. The JSON has all verdicts.
_ROWS = 2000


def write_session_report(path: Path, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Write the verdicts: a page if the name ends in ".html", otherwise JSON.

    Args:
        verdicts: the fields of `normdeploy.testing.verdicts.Verdict`, and "test".

    Raises:
        NormdeployError: the file can't be written, or a library for pages is missing.
    """
    document = make_document(verdicts)
    if path.suffix == ".html":
        text = render_session_page(document)
    else:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def make_document(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the JSON document that the module's docstring describes.

    Returns:
        plain values.
    """
    document = {
        "schema": SCHEMA,
        "normdeploy": __version__,
        "ok": all(verdict["ok"] for verdict in verdicts),
        "environment": describe_environment(),
        # Workers of pytest-xdist finish in any order. The sort keeps the order of the verdicts of one test.
        "verdicts": sorted(verdicts, key=lambda verdict: verdict["test"]),
    }
    plain: dict[str, Any] = to_plain(document)
    return plain


def render_session_page(document: Mapping[str, Any]) -> str:
    """Render the page of a document of `make_document`.

    Returns:
        HTML text. Failed verdicts come first.

    Raises:
        NormdeployError: a library of the extra ``report`` is missing.
    """
    rows = sorted(document["verdicts"], key=lambda verdict: verdict["ok"])
    failed = sum(not verdict["ok"] for verdict in rows)
    shown = {
        "passed": len(rows) - failed,
        "failed": failed,
        "rows": rows[:_ROWS],
        "left_out": max(0, len(rows) - _ROWS),
        "environment": document["environment"],
    }
    return template_environment().get_template("tests.html").render(sanitize_texts(shown, _LONGEST))
