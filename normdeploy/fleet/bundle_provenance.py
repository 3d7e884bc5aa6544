"""Record the provenance of a fleet's bundle: the steps that led to the bundle, and the files that these steps read.

The provenance contains no times and no machines, so that equal fleets give equal bundles. It names the signed records
of the steps, which contain times and machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import StoreError
from ..evidence.slsa_provenance import ProvenanceRecord
from .fork_client import ProcessVanished
from .job_steps import JobStep
from .step_store import StepStore

# Prefix of a step's name in the provenance. The step's key follows the prefix.
STEP = "urn:normdeploy:step:"


def bundle_origin(
    step: JobStep, key: str, inputs: Mapping[str, str], made: Mapping[str, str], store: StepStore
) -> ProvenanceRecord:
    """Build the provenance of a bundle.

    Args:
        inputs: path in the step's folder → SHA-256.
        made: name of each preceding step → the step's key.

    Returns:
        the record, with the options and inputs of all steps. If two steps read an input of the same name but different
        content, the step's name is added as a prefix.

    Raises:
        ProcessVanished: a record of these steps is missing from the store or is not trusted.
    """
    argv: dict[str, Any] = {}
    found = dict(inputs)
    for name, before in made.items():
        try:
            record = store.read_record(before)
        except StoreError as error:
            raise ProcessVanished(str(error)) from error
        if record is None:
            raise ProcessVanished(f"the store no longer contains the record of {name}")
        argv[name] = record.depends["argv"]
        for path, digest in record.depends["inputs"].items():
            found[path if found.get(path, digest) == digest else f"{name}/{path}"] = digest
    return ProvenanceRecord(
        {"argv": list(step.argv), "before": argv},
        found,
        f"{STEP}{key}",
        {name: f"{STEP}{before}" for name, before in made.items()},
    )
