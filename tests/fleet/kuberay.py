"""What KubeRay's custom resource definitions say of RayJob and RayCronJob, small enough to be kept here.

``python -m tests.fleet.kuberay FOLDER COMMIT`` writes ``kuberay.json`` from ray.io_rayjobs.yaml and
ray.io_raycronjobs.yaml of ray-operator/config/crd/bases; descriptions are left out, equal parts are written once.
What an API server asks beyond JSON Schema is put into JSON Schema: a field that is not named is refused, as by strict
validation of fields; int-or-string is either. Rules in CEL (x-kubernetes-validations) are not: they are of
deletionStrategy, managedBy and gcsFaultToleranceOptions, which the examples leave out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".json")
KINDS = {"RayJob": "ray.io_rayjobs.yaml", "RayCronJob": "ray.io_raycronjobs.yaml"}
_OPEN = "x-kubernetes-preserve-unknown-fields"
_SHARED = 120  # characters of JSON from which on equal parts are written once
_COMMENT = (
    "Derived from github.com/ray-project/kuberay at {commit}, Copyright of the KubeRay authors, Apache License 2.0"
    " (LICENSE); changed as tests/fleet/kuberay.py says"
)


def schemas(folder: Path, commit: str) -> dict[str, Any]:
    """One JSON Schema (2020-12) whose $defs hold each kind under its name."""
    found: dict[str, Any] = {}
    for kind, file in KINDS.items():
        told = yaml.load((folder / file).read_bytes(), yaml.CSafeLoader)["spec"]
        assert told["names"]["kind"] == kind
        (version,) = [v for v in told["versions"] if v["name"] == "v1"]
        found[kind] = _strict(version["schema"]["openAPIV3Schema"])
        found[kind]["required"] = ["apiVersion", "kind", "metadata", "spec"]
        found[kind]["properties"] |= {
            "apiVersion": {"const": f"{told['group']}/v1"},
            "kind": {"const": kind},
            "metadata": {"type": "object"},
        }
    parts: dict[str, Any] = {}
    kinds = {kind: _shared(schema, parts) for kind, schema in found.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": _COMMENT.format(commit=commit),
        "$defs": kinds | parts,
    }


def kept() -> dict[str, Any]:
    """What ``schemas`` gave when it was last written."""
    told: dict[str, Any] = json.loads(FILE.read_text())
    return told


def schema(kind: str) -> dict[str, Any]:
    """The schema of a kind, as it is kept."""
    told = kept()
    return {"$schema": told["$schema"], "$ref": f"#/$defs/{kind}", "$defs": told["$defs"]}


def _strict(told: dict[str, Any]) -> dict[str, Any]:
    made = {k: v for k, v in told.items() if k not in ("description", "format") and not k.startswith("x-")}
    if told.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    if "properties" in told and not ("additionalProperties" in told or told.get(_OPEN)):
        made["additionalProperties"] = False
    defaults = {name for name, part in told.get("properties", {}).items() if "default" in part}
    if "required" in told:  # defaults are filled in before
        made["required"] = [name for name in told["required"] if name not in defaults]
    return _over(made, _strict)


def _over(told: dict[str, Any], done: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The schema with each schema right inside of it replaced."""
    made = dict(told)
    if "properties" in told:
        made["properties"] = {name: done(part) for name, part in told["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(told.get(name), dict):
            made[name] = done(told[name])
    for name in ("allOf", "anyOf", "oneOf"):
        if name in told:
            made[name] = [done(part) for part in told[name]]
    return made


def _shared(told: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """A schema whose larger parts are in ``parts``, by their content."""

    def placed(part: dict[str, Any]) -> dict[str, Any]:
        made = _shared(part, parts)
        text = json.dumps(made, sort_keys=True)
        if len(text) < _SHARED:
            return made
        parts[name := hashlib.sha256(text.encode()).hexdigest()[:12]] = made
        return {"$ref": f"#/$defs/{name}"}

    return _over(told, placed)


def _text(told: dict[str, Any]) -> str:
    """JSON with a line for each part."""
    lines = [f"{json.dumps(name)}: {json.dumps(told['$defs'][name], sort_keys=True)}" for name in sorted(told["$defs"])]
    rest = json.dumps({name: value for name, value in told.items() if name != "$defs"}, indent=1)
    return rest.removesuffix("\n}") + ',\n "$defs": {\n  ' + ",\n  ".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    FILE.write_text(_text(schemas(Path(sys.argv[1]), sys.argv[2])))
