"""Check rules for a fleet's options that the schema can't express, with the same functions as the verbs themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..compare.policy import parse_allclose, parse_policy
from ..errors import InputError
from ..verb_options import ConversionOptions, options_from_table
from ..verbs.arguments.user_metrics import declare_metric
from ..verbs.conversion.conversion_request import parse_half_policy, parse_quantization_request
from .fleet_file import Fleet
from .fleet_schema import Values
from .job_steps import as_list


def check_options(fleet: Fleet) -> None:
    """Check the options of all jobs.

    Raises:
        InputError: options of a job contradict each other or have no effect. The message names the line of the job's
            model.
    """
    seen = set[str]()
    for job in fleet.iter_jobs():
        every = [job.options, *(target.merge_options(job.options) for target in job.targets)]
        for options in every:
            text = json.dumps(options, sort_keys=True, default=str)
            if text in seen:
                continue
            seen.add(text)
            try:
                _check_verb_options(options)
            except (InputError, ValueError) as error:
                raise InputError(f"{fleet.describe_location(job)}: {error}") from error


def _check_verb_options(options: Mapping[str, Values]) -> None:
    export = options["export"]
    verify = options["verify"]
    conversion = options_from_table(ConversionOptions, export)
    parse_quantization_request(conversion, declare_metric)
    parse_half_policy(conversion, declare_metric)
    parse_allclose(verify.get("atol"), verify.get("rtol"))
    parse_policy(as_list(verify.get("tolerance")) or None, as_list(verify.get("metric")) or None, declare_metric)
