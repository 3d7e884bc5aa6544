"""Keep torch's exporter from parsing the source of every translation function.

For each export, onnxscript lists its translation functions with their domains. To get the domain, it parses the source
of each of the about 500 functions, which takes longer than the export of a small model. The result holds the domain
only, which the function's opset states too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from onnxscript import values


@dataclass(frozen=True)
class _Signature:
    """Part of a translation function's IR that onnxscript reads when it lists the functions."""

    domain: str


@contextmanager
def list_functions_unparsed() -> Iterator[None]:
    """Let onnxscript read the domain of a translation function from its opset.

    A release of onnxscript without these attributes is left as it is.
    """
    traced = getattr(values, "TracedOnnxFunction", None)
    parsed = getattr(traced, "function_ir", None)
    if traced is None or not isinstance(parsed, property) or not hasattr(values.Op, "opset"):
        yield
        return
    traced.function_ir = property(lambda function: _Signature(function.opset.domain))
    try:
        yield
    finally:
        traced.function_ir = parsed
