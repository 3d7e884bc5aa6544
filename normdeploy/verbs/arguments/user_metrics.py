"""Import metrics that the user names as ``MODULE:FUNCTION``, for ``--metric``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...compare.metrics import Metric
from ...errors import InputError
from ...types import Array
from .user_functions import call_user_function, import_user_function


def metric_importer(*, trust: bool) -> Callable[[str], Metric]:
    """Make the function that imports metrics for ``parse_policy``.

    Args:
        trust: True if the user allows the modules to run.

    Returns:
        function from ``MODULE:FUNCTION`` to the metric.
    """

    def import_metric(name: str) -> Metric:
        """Import one metric.

        Raises:
            TrustError: the user did not allow code to run.
            InputError: the module or the function can't be used.
        """
        return make_user_metric(name, import_user_function(name, "--metric", trust=trust))

    return import_metric


def make_user_metric(name: str, function: Callable[..., Any]) -> Metric:
    """Make a metric of a function of two arrays [rows, ...] that returns one number. Larger is better.

    Returns:
        the metric.
    """

    def measure(value: Array, reference: Array) -> float:
        """Call the function, and check that its result is a number."""
        result = call_user_function(function, f"the metric {name}", value, reference)
        try:
            return float(result)
        except (TypeError, ValueError):
            raise InputError(f"the metric {name} returned {type(result).__name__}; return one number") from None

    return Metric(name, measure, -math.inf, math.inf, axes=1, joined=True)


def declare_metric(name: str) -> Metric:
    """Describe a metric without importing its module, to check the rules of a file.

    Returns:
        a metric that can't be measured.
    """

    def refuse(value: Array, reference: Array) -> float:
        """Refuse to measure."""
        raise InputError(f"the metric {name} was not imported")

    return make_user_metric(name, refuse)
