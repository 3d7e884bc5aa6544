"""Where the bundle of a fleet comes from: the steps behind it, and the files that these have read.

It says nothing of times and machines, so that equal fleets give equal bundles; the signed records of the steps, which
it names, do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import StoreError
from ..evidence.slsa_provenance import ProvenanceRecord
from .fork_client import ProcessVanished
from .job_steps import JobStep
from .step_store import StepStore

# with a step's key behind it
STEP = "urn:normdeploy:step:"


def bundle_origin(
    step: JobStep, key: str, inputs: Mapping[str, str], made: Mapping[str, str], store: StepStore
) -> ProvenanceRecord:
    """
    Args:
        inputs: path in the step's folder -> SHA-256.
        made: the steps before it -> their keys.

    Raises:
        Vanished: a record of theirs is gone from the store, or not to be believed.
    """
    argv: dict[str, Any] = {}
    found = dict(inputs)
    for name, before in made.items():
        try:
            record = store.read_record(before)
        except StoreError as error:
            raise ProcessVanished(str(error)) from error
        if record is None:
            raise ProcessVanished(f"the record of {name} is gone from the store")
        argv[name] = record.depends["argv"]
        for path, digest in record.depends["inputs"].items():
            found[path if found.get(path, digest) == digest else f"{name}/{path}"] = digest
    return ProvenanceRecord(
        {"argv": list(step.argv), "before": argv},
        found,
        f"{STEP}{key}",
        {name: f"{STEP}{before}" for name, before in made.items()},
    )
