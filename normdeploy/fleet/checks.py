"""What a schema can't say of the options of a fleet, found by the functions with which the verbs check them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..api.quantizing import wish_of
from ..errors import InputError
from ..options import ConversionOptions, from_table
from ..verbs.verify.policy import policy_of
from .description import Fleet
from .fields import Values
from .steps import as_list


def check(fleet: Fleet) -> None:
    """
    Raises:
        InputError: options of a job contradict each other, or mean nothing; with the line of its model.
    """
    seen = set[str]()
    for job in fleet.jobs():
        every = [job.options, *(target.over(job.options) for target in job.targets)]
        for options in every:
            text = json.dumps(options, sort_keys=True, default=str)
            if text in seen:
                continue
            seen.add(text)
            try:
                _check(options)
            except (InputError, ValueError) as error:
                raise InputError(f"{fleet.where(job)}: {error}") from error


def _check(options: Mapping[str, Values]) -> None:
    export, verify = options["export"], options["verify"]
    wish_of(from_table(ConversionOptions, export))
    policy_of(as_list(verify.get("tolerance")) or None, as_list(verify.get("metric")) or None)
