"""Assertions for the tests of your own project: parity, fused norms, and no regression of a bundle.

``normdeploy.testing.pytest_plugin`` adds a fixture, a marker and a report to pytest. Importing this package loads no
heavy library, because pytest imports it at each start. The first assertion loads the libraries that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assertions import assert_no_regression, assert_norms_fused, assert_parity

__all__ = ["assert_no_regression", "assert_norms_fused", "assert_parity"]


def __dir__() -> list[str]:
    """List the assertions, for ``dir`` and for completion, even before an assertion is used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".assertions", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
