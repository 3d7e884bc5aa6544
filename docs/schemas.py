"""Write the JSON Schemas of the reports into ``normdeploy/reports/schemas``, from the types of the verbs' results.

    python -m docs.schemas

``tests/reports/test_schemas.py`` fails if a schema is older than the code, and validates the output of every verb.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import normdeploy
from normdeploy.findings.precision_report import PrecisionReport
from normdeploy.findings.quantization_report import QuantizationReport
from normdeploy.findings.records import Certificate, Explanation, Finding, NormDiagram, QuantizedLayer
from normdeploy.verbs.bench.model_benchmark import Race
from normdeploy.verbs.bisect.fault_tracing import Fault
from normdeploy.verbs.build.build_function import Engine
from normdeploy.verbs.check import check_function
from normdeploy.verbs.inspect.engine_report import EngineReport
from normdeploy.verbs.prove.constant_matching import RoundedConstant
from normdeploy.verbs.prove.proof_result import ExactCast, Place
from normdeploy.verbs.recheck import recheck_function
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.runtime_candidates import NotRun

from . import fleet_schema

FOLDER = Path(normdeploy.__file__).parent / "reports" / "schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NOT_FINITE = ("nan", "inf", "-inf")


class _Before(TypedDict):
    before: int
    after: int


class _Ops(TypedDict):
    before: dict[str, int]
    after: dict[str, int]


class _Inference(TypedDict):
    runner: str
    inputs: dict[str, str]
    outputs: dict[str, str]


class _Bisection(TypedDict):
    ok: bool
    faults: list[Fault]
    not_searched: list[NotRun]
    notes: list[str]
    seconds: float


class Report(TypedDict):
    """Report that `--report` of a verb writes, and `report.json` in a bundle; `normdeploy/reports/report.py` describes
    the keys.
    """

    schema: Literal["normdeploy/report/1"]
    normdeploy: str
    verb: Literal["export", "optimize", "inspect", "build", "verify", "bisect", "run", "bench", "package"]
    command: str
    files: dict[str, str]
    sizes: dict[str, int]
    sha256: dict[str, str]
    opset: int | None
    nodes: _Before | None
    ops: _Ops | None
    norms: list[Finding]
    explanations: list[Explanation]
    pictures: list[NormDiagram]
    layers: list[QuantizedLayer]
    engine: Engine | None
    engine_layers: EngineReport | None
    precision: PrecisionReport | None
    quantization: QuantizationReport | None
    parity: Comparison | None
    bisection: _Bisection | None
    race: Race | None
    inference: _Inference | None
    environment: dict[str, str]
    notes: list[str]
    seconds: dict[str, float]


class Check(TypedDict):
    """Output of `check --format json`; `normdeploy/verbs/check/check_function.py` describes the keys."""

    schema: Literal["normdeploy/check/1"]
    normdeploy: str
    ok: bool
    fail_on: list[str]
    files: list[check_function.CheckedFile]


class Recheck(TypedDict):
    """Output of `recheck --report`; `normdeploy/verbs/recheck/recheck_function.py` describes the keys."""

    schema: Literal["normdeploy/recheck/1"]
    ok: bool
    name: str
    made: str
    files: int
    changes: list[recheck_function.BundleChange]
    parity: Comparison | None
    notes: list[str]
    seconds: float


class _Shown(TypedDict):
    output: str
    index: list[int]
    first: float
    second: float
    inputs: str


class Proof(TypedDict):
    """Output of `prove --report`; `normdeploy/verbs/prove/proof_result.py` describes the keys."""

    schema: Literal["normdeploy/prove/1"]
    verdict: Literal["equal", "equal up to rounding", "different", "not known"]
    first: str
    second: str
    outputs: int
    error_bits: int
    sizes: str
    rounded: list[RoundedConstant]
    casts: list[ExactCast]
    reason: str
    places: list[Place | None]
    counterexample: _Shown | None
    notes: list[str]
    seconds: float


class _Model(TypedDict):
    kind: str
    sha256: str | None


class _Source(TypedDict):
    file: str
    sha256: str


class _PlacedEngine(TypedDict):
    path: str
    runtime: Literal["tensorrt", "tensorrt-rtx"]
    compute_capability: str
    served: bool


class _Port(TypedDict):
    name: str
    dtype: str
    shape: list[int | str | None]
    key: str


class _Sample(TypedDict):
    name: str
    kind: str
    inputs: str
    expected: str
    free: str | None


class _Bound(TypedDict):
    output: str
    kind: str
    allowed: float


class _Result(TypedDict):
    output: str
    runtime: str
    max_abs_error: float
    allowed: float
    verdict: Literal["pass", "fail"]
    reason: str


class _Missed(TypedDict):
    runtime: str
    reason: str


class _Norm(TypedDict):
    kind: str
    module: str
    tensor: str
    place: str
    runtimes: dict[str, str]


class _File(TypedDict):
    sha256: str
    bytes: int


class Package(TypedDict):
    """`manifest.json` of a bundle that `package` writes; `normdeploy/verbs/package/evidence_bundle.py` describes
    the keys.
    """

    schema: Literal["normdeploy/package/1"]
    normdeploy: str
    made: str
    name: str
    source: _Source
    model: _Model | None
    onnx: str
    configs: list[str]
    engines: list[_PlacedEngine]
    max_batch: int
    inputs: list[_Port]
    outputs: list[_Port]
    samples: list[_Sample]
    reference: str
    bounds: list[_Bound]
    results: list[_Result]
    not_run: list[_Missed]
    norms: list[_Norm]
    versions: dict[str, str]
    commands: list[str]
    files: dict[str, _File]


class _TestVerdict(TypedDict):
    test: str
    assertion: Literal["assert_parity", "assert_norms_fused", "assert_no_regression"]
    ok: bool
    text: str
    file: str
    output: str
    runtime: str
    case: str
    error: float | None
    allowed: float | None
    details: list[str]
    culprit: str
    seconds: float
    versions: dict[str, str]


class Tests(TypedDict):
    """Output of `pytest --normdeploy-report`; `normdeploy/testing/session_report.py` describes the keys."""

    schema: Literal["normdeploy/tests/1"]
    normdeploy: str
    ok: bool
    environment: dict[str, str]
    verdicts: list[_TestVerdict]


DOCUMENTS: dict[str, type] = {
    "report": Report,
    "check": Check,
    "prove": Proof,
    "recheck": Recheck,
    "package": Package,
    "tests": Tests,
}
"""The schema's file -> what the document holds."""
# Class → keys that are written in addition to its fields, with their types.
_ADDED: dict[type, dict[str, Any]] = {
    Certificate: {"rounding_ok": {"type": ["boolean", "null"]}},
    Engine: {"proved": {"const": "built only"}},
    Comparison: {"ok": {"type": "boolean"}, "rule": {"type": "object"}},
    Explanation: {"finding": {"type": ["string", "null"]}},
}


def schemas() -> dict[str, dict[str, Any]]:
    """Build all schemas.

    Returns:
        file name -> schema.
    """
    documents = {f"{name}.json": _schema(document) for name, document in DOCUMENTS.items()}
    return documents | {"fleet.json": fleet_schema.schema(_DIALECT)}


def _schema(document: type) -> dict[str, Any]:
    defs: dict[str, Any] = {}
    body = _object(document, defs)
    name = body["properties"]["schema"]["const"]
    head = {"$schema": _DIALECT, "$id": f"urn:{name.replace('/', ':')}", "title": name}
    return {**head, **body, "$defs": dict(sorted(defs.items()))}


def _object(cls: type, defs: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value with named fields. All fields are written, and later versions may add fields."""
    hints = typing.get_type_hints(cls)
    if dataclasses.is_dataclass(cls):
        hints = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    added = _ADDED.get(cls, {})
    properties = {name: _of(hint, defs) for name, hint in hints.items() if name not in added} | added
    told = (
        (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
        if cls.__doc__ != dict.__doc__
        else ""
    )
    said = {} if not told or told.startswith(f"{cls.__name__}(") else {"description": told}
    return {"type": "object", **said, "properties": properties, "required": list(properties)}


def _of(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type, as ``normdeploy.reports.report.to_plain`` writes its values.

    Raises:
        TypeError: no rule covers the type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return {}
    if simple := {str: "string", Path: "string", bool: "boolean", int: "integer", type(None): "null"}.get(hint):
        return {"type": simple}
    # JSON has only finite numbers.
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(_NOT_FINITE)}]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of(argument, defs) for argument in arguments]}
    if origin is tuple and arguments[-1] is not Ellipsis:
        items = [_of(argument, defs) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], defs)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": _of(arguments[0], defs)}
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        name = hint.__name__.removeprefix("_")
        if name not in defs:
            # A class may contain itself, so its name is reserved before its fields are described.
            defs[name] = {}
            defs[name] = _object(hint, defs)
        return {"$ref": f"#/$defs/{name}"}
    raise TypeError(f"there is no rule for {hint!r}")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / name).write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
