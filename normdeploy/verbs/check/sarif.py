"""Write the result of a check as SARIF 2.1.0 (OASIS, Static Analysis Results Interchange Format).

Code hosts show SARIF results in a review. A graph has no lines, so the logical locations of a result name the module
path, the node and the tensor.

GitHub shows only results that have a line. It recognizes a result of an earlier run only by the fingerprint
``primaryLocationLineHash``. Therefore each result names line 1 and has this fingerprint in addition to ours.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...version import __version__
from .check_function import FINGERPRINT, Check, CheckedFile
from .norm_rules import Problem

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def to_sarif(result: Check) -> str:
    """Build the SARIF document of a check.

    Returns:
        JSON; paths inside the working directory are relative to it.
    """
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.short},
            "fullDescription": {"text": f"{rule.short} {rule.help}"},
            "help": {"text": rule.help.replace("`", ""), "markdown": rule.help},
            "defaultConfiguration": {"level": "error" if rule.id in result.fail_on else rule.level},
        }
        for rule in result.rules
    ]
    broken = [
        {"level": "error", "message": {"text": f.error}, "locations": [{"physicalLocation": _physical_location(f)}]}
        for f in result.files
        if f.error
    ]
    notes = dict.fromkeys(note for f in result.files for note in f.notes)
    run = {
        "tool": {
            "driver": {"name": "normdeploy", "version": __version__, "semanticVersion": __version__, "rules": rules}
        },
        "invocations": [
            {
                "executionSuccessful": not broken,
                "exitCode": result.exit_code,
                "toolExecutionNotifications": broken,
                "toolConfigurationNotifications": [{"level": "note", "message": {"text": note}} for note in notes],
            }
        ],
        "artifacts": [{"location": _artifact_location(f.file), "roles": ["analysisTarget"]} for f in result.files],
        "results": [_sarif_result(f, p, result) for f in result.files for p in f.findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _sarif_result(checked: CheckedFile, p: Problem, result: Check) -> dict[str, Any]:
    names = (("function", p.place), ("module", p.module), ("node", p.node), ("tensor", p.tensor))
    logical = [{"kind": kind, "name": name, "fullyQualifiedName": name} for kind, name in names if name]
    at = {"physicalLocation": _physical_location(checked)} | ({"logicalLocations": logical} if logical else {})
    entry = {
        "ruleId": p.rule,
        "ruleIndex": [rule.id for rule in result.rules].index(p.rule),
        "level": p.level,
        "message": {"text": f"{p.location}: {p.message}" if p.location else p.message},
        "locations": [at],
        "partialFingerprints": {FINGERPRINT: p.fingerprint, "primaryLocationLineHash": p.fingerprint},
    }
    return entry | ({"baselineState": "unchanged" if p.known else "new"} if result.baseline else {})


def _physical_location(checked: CheckedFile) -> dict[str, Any]:
    return {"artifactLocation": _artifact_location(checked.file), "region": {"startLine": 1}}


def _artifact_location(file: str) -> dict[str, str]:
    path = Path(os.path.abspath(file))
    here = Path.cwd()
    if path.is_relative_to(here):
        return {"uri": quote(os.fsencode(path.relative_to(here).as_posix())), "uriBaseId": "%SRCROOT%"}
    return {"uri": path.as_uri()}
