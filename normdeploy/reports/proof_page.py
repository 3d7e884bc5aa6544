"""Write the result of ``prove`` as a page: one HTML file without scripts that makes no network requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import NormdeployError
from .page_templates import sanitize_texts, template_environment

SCHEMA = "normdeploy/prove/1"
# Maximum number of letters of one text, and of rows of one table
_LONGEST = 2000
_ROWS = 200


def render_proof_page(document: Mapping[str, Any], sentence: str) -> str:
    """Render the HTML page of a proof.

    Args:
        document: result of ``prove`` as JSON values, with the schema ``normdeploy/prove/1``.
        sentence: the verdict in one sentence.

    Returns:
        HTML text.

    Raises:
        NormdeployError: the document has another schema, or a library of the extra ``report`` is missing.
    """
    if document.get("schema") != SCHEMA:
        raise NormdeployError(
            f"can't make a page from this result: its schema is {document.get('schema')!r}, not {SCHEMA!r}"
        )
    proof = sanitize_texts(document, _LONGEST)
    worst = sorted(proof["rounded"], key=lambda row: -row["ulps"])
    context = {
        "proof": proof,
        "sentence": sanitize_texts(sentence, _LONGEST),
        "sides": [
            {"label": label, "file": file, "place": place}
            for label, file, place in zip("AB", (proof["first"], proof["second"]), proof["places"], strict=True)
        ],
        "rounded": worst[:_ROWS],
        "casts": proof["casts"][:_ROWS],
        "left_out": max(len(worst) - _ROWS, 0) + max(len(proof["casts"]) - _ROWS, 0),
    }
    return template_environment().get_template("proof.html").render(context)
