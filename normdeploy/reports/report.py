"""Write a verb's report as JSON.

The schema is ``normdeploy/report/1``. A later version may add keys. If a version changes or removes a key, the schema
gets the next number. ``reports/schemas/report.json`` is the JSON Schema.

Numbers that are not finite are the strings "nan", "inf" and "-inf". Unknown or inapplicable values are null.

    schema         "normdeploy/report/1"
    normdeploy     version that wrote the report
    verb           "export" | "optimize" | "inspect" | "build" | "verify" | "bisect" | "run" | "bench" | "package"
    command        command line, quoted for a POSIX shell; "" from Python
    files          path of each file as passed, by role: "source", "output", "model", "onnx", "engine", "inputs", ...
    sha256         "output" -> SHA-256 of the file that the verb wrote, by which `package` finds its report; empty if
                   the verb wrote no single file
    sizes          bytes of each file with its external weights, by role; only for paths that are files
    opset          opset of the ONNX file
    nodes          {"before", "after"}: number of nodes
    ops            {"before", "after"}: number of nodes of each op type in the main graph, most frequent type first
    norms          one object per norm of the model, in the graph's order (see below)
    explanations   one object per norm that --explain NAME selects (see below)
    pictures       only from "inspect": one object per group of similar norms (see below)
    layers         only from "inspect" of a quantized file: one object per linear layer or convolution (see below)
    engine         null, or the engine that "build" wrote (see below)
    engine_layers  null, or what "inspect" read about one or two engines (see below)
    quantization   null, or the fields of `normdeploy.findings.quantization_report.QuantizationReport`
    precision      null, or the conversion to half precision (see below)
    parity         null, or the result of "verify" (see below)
    bisection      null, or the result of "bisect" (see below)
    race           null, or the result of "bench" (see below)
    inference      null, or the result of "run": runner; inputs and outputs, each name -> "dtype[shape]"
    environment    versions of libraries and names of the machine: "python", "system", "cpu", "driver", "gpu 0", ...
    notes          notes for the user, one string each
    seconds        duration of each stage in seconds

An object of ``norms`` has the fields of `normdeploy.findings.records.Finding`:

    kind, tensor, module, axes, epsilon, dtype, reason, notes
    status         "fused" | "folded" | "kept" | "refused" | "undone"
    place          body or function that contains the norm; "" for the main graph
    spelling       op types of the norm in the original file
    became         form after the rewrite
    remains        ops that remain of a folded norm
    attempts       attempts that failed: start, end, stage ("ends" | "values" | "form"), reason, tensor (the culprit)
    proved         kinds of evidence: "identity", "onnxruntime run", ...
    certificate    null, or an object with these keys:
        identity   true if the proof succeeded
        method     "exact" | "float64"
        cases      number of points (exact) or inputs (float64)
        bits       exact: the error probability is at most 2^-bits
        degree     exact: degree of the identity
        gains      exact: true if an infinite input gives NaN after the rewrite and a number before it
        why        exact: kind of failure
        culprit    exact: tensor that shows the failure
        error      float64: relative error
        bound      float64: relative bound
        worst      float64: input with the largest error
        rounding_before, rounding_after, rounding_bound
                   absolute errors and bound in onnxruntime, in the model's type
        rounding_ok, note

The verb "inspect" adds these keys to a norm:

    input          tensor that is normalized
    shape          shape of the input: sizes, names of dims, null for unknown sizes
    ddof           0 | 1 | null
    epsilon_as_written
                   epsilon that is added to the variance with this ddof; ``epsilon`` is for the equal norm with
                   ddof 0
    outside        true if epsilon is added to the root instead of the radicand
    gamma, beta    null, or an object: data (computed from an input of the model), axes (of the norm's input along which
                   the parameter varies), name, one_plus (computed as 1 + w)
    statistics     type of the reductions; "constant" for BatchNorm
    half           one object per 16-bit type: dtype ("float16" | "bfloat16"), epsilon (as the type stores it), vanishes
                   ("" | "subnormal" | "zero"), overflow (names of constants that become Inf)
    tensors        outputs of the original nodes
    written        outputs of the nodes that would replace the original nodes
    runtimes       one object per runtime and form: runtime (name and version), form ("now" | "optimized"), nodes (op
                   types), verdict ("kernel" | "function" | "layers" | "missing" | "unknown"), reason, parts (ops that
                   onnxruntime runs after its own optimizations, or types of TensorRT's layers that process data)

An object of ``explanations``:

    name           name that was passed to --explain
    finding        tensor of the norm; null if no norm has this name
    start          tensor at which the explained nodes begin
    way            nodes from ``start`` on: tensor, text, mark
    said           last stage that recognition reached

An object of ``pictures`` has the fields of `normdeploy.findings.records.NormDiagram`:

    kind, status   kind and status of the norms
    module         module of the first norm
    tensors        tensors of the norms
    before, after  boxes; ``after`` is empty if the norm stays or is folded away. A box has op ("" for a tensor at the
                   edge), name (of this tensor), inputs (indices of earlier boxes), own (true for a node of the norm)

An object of ``layers`` has the fields of `normdeploy.findings.records.QuantizedLayer`:

    tensor, op, module
    input          tensor that is quantized before the layer; if none is, the tensor that the layer reads
    status         "quantized" | "weight" (only the weight) | "activation" (only the input) | "float"
    weight         type of the weight
    granularity    granularity of the weight's scales: "tensor", "384 channels", "blocks of 32"
    weight_symmetric
                   true if the weight's zero points are 0
    activation     type of the input
    dynamic        true if the input's scale is computed at run time
    scale, zero_point, low, high
                   scale, zero point and range of the input; null if they differ between channels

``engine`` has the fields of `normdeploy.verbs.build.build_function.Engine`, and "proved": "built only" (not run):

    compute_capabilities
                   GPUs that were requested; empty for every GPU that the library builds for
    profile        [min, opt, max] shapes of each dynamic input; ``more_profiles`` has further profiles
    norm_impl      "native" | "plugin" | "auto"
    norms          empty if the file was parsed unchanged; else node, module, op, reason, form ("native node", "function
                   body", "plugin RMSNorm", or the nodes that replaced the norm)
    types          number of layers of each floating-point type, checked against the file; {} if normdeploy did not
                   convert the file to half precision
    options        options of the build: timing_cache, workspace (bytes), optimization_level, hardware_compatibility,
                   version_compatible, refit, weight_streaming, ep_context; null or false if not requested
    capability     the library's name for the supported hardware: "STANDARD"
    ep_context     null if ``path`` is the engine; else mode ("embed" | "file"), file (name of the engine next to it),
                   partition, architecture, sdk_version

``engine_layers`` has the fields of `normdeploy.verbs.inspect.engine_report.EngineReport`:

    builds         one object per engine: path, onnx, profile ("" if not passed), runs, total_ms, norm_ms, reformat_ms
                   (mean milliseconds of one run, null without times), notes, and
        layers     layers in the engine's order: name, type (TensorRT's word), kind, plugin, tactic, nodes, callers,
                   inputs, outputs (each with name, dtype, layout), profile, ms
        norms      norms in the file's order: kind, module, tensor, form, layers (indices), layer_types, fused_with,
                   shared_with, missing, inputs, outputs, layouts, ms, share, reformats (indices), reformat_ms
    changes        one object per norm of two engines: name, kind, first, second (indices in ``norms``, null if it is
                   missing there), changed, factor (of the times); empty for one engine

``precision`` has the fields of `normdeploy.findings.precision_report.PrecisionReport`. The certificates of the norms
refer to the model before the conversion:

    to             "fp16" | "bf16"
    islands        float32 regions: op, module, tensor, reason, value (largest magnitude seen, or null), nodes (their
                   outputs), kind ("norm" | "statistics" | "constant" | "range" | "positions" | "angles" | "scales" |
                   "logarithm" | "logits" | "no half form" | "control flow" | "as written" | "requested" | "metric")
    nodes, kept    number of floating-point nodes, and of those that stay float32
    casts          number of inserted Casts
    bytes          size of the weights before and after the conversion
    calibrated     source of the calibration inputs: "given" | "generated" | ""
    samples        number of calibration inputs
    inputs, outputs
                   types by name
    notes
    judging        number of samples on which the metrics were measured; 0 if no metric was requested
    judged, exclusions, moved
                   as in ``quantization``; the parts of an exclusion are blocks of nodes
    errors         name of a block -> relative error with only this block in half precision

``parity`` has the fields of `normdeploy.verbs.verify.comparison_result.Comparison`, and these keys:

    ok             true if the files pass
    rule           constants of the default rule: reference, multiple, most_ratio, most_runs
    standard       rules that the user passed; "" for none
    reference      model with which the files were compared
    up_to          limit on the elements of inputs; null if every size was run
    cases          names of the input cases
    not_run        runtime, reason, file ("" if it applies to every file)
    results        one object per output, runtime and file: the fields of
                   `normdeploy.verbs.verify.output_results.OutputResult`, decided_by ("default rule" or the rules that
                   the user passed) and account (the rules in words). The numbers belong to the default rule.
                   ``rules`` has one object per passed rule (`normdeploy.verbs.verify.rule_measures.RuleVerdict`)
    drift          null if not requested; else one object per tensor that a file and the model share, in the file's
                   order, one runtime after the other (`normdeploy.verbs.verify.tensor_drift.DriftPoint`); ``where`` is
                   "out of MODULE" | "into MODULE" | "output NAME"

``bisection`` has ok, notes, seconds and these keys:

    not_searched   failures that could not be searched: runtime, reason, file
    faults         one object per fault: the fields of `normdeploy.verbs.bisect.fault_tracing.Fault`
        wrong      "file" (its function differs from the model's function) | "runtime" (it differs from ONNX's
                   definition) | "between" (small errors grow)
        kind       "weights" | "epsilon" | "axis" | "ddof" | "left out" | "approximation" | "hidden row" | "overflow" |
                   "underflow" | "factor" | "accuracy" | "optimizer" | "unknown"; for quantized files also "scale" |
                   "zero point" | "channels" | "saturation" | "granularity" | "coarse"
        widened    trial with the nodes in float32: mends (null if it can't be tested), nodes (of the float32 region),
                   error (of the output in this trial, or null), reason

``race`` has the fields of `normdeploy.verbs.bench.model_benchmark.Race`:

    threads, warmup, rounds, seed, notes
    shapes         shape of each input or norm
    reference      contestant with whose outputs all outputs are compared
    machine        cpu, cores, load, system, versions (by library)
    load           load of the machine after the race
    not_run        runtime, reason
    entries        one object per contestant: the fields of `normdeploy.verbs.bench.model_benchmark.RaceEntry`. Times
                   are in milliseconds, and null if the contestant was not timed. ``samples`` has at most 400 times
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment import describe_environment, source_date_epoch
from ..storage.file_hash import hash_file
from ..storage.file_replacement import matching_siblings
from ..version import __version__

if TYPE_CHECKING:
    from ..findings.records import Explanation, Finding, Summary

SCHEMA = "normdeploy/report/1"
SECTIONS = ("engine", "engine_layers", "precision", "quantization", "parity", "bisection", "race", "inference")
"""What the results of verbs say, in the order of the document; null where they say nothing."""


@dataclass(frozen=True)
class Report:
    """Results of one run of a verb.

    Attributes:
        files: path of each file as passed, by role.
        summary: norms of the model; None for a verb that lists none.
        sections: values of some of ``SECTIONS``, of types that `to_plain` accepts.
        command: command line, quoted for a shell; "" from Python.
        seconds: duration of each stage in seconds.
    """

    verb: str
    files: Mapping[str, str]
    summary: Summary | None = None
    sections: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    command: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write the document that the module's docstring describes.

        Returns:
            JSON text that ends with a newline.
        """

        summary = self.summary
        document = {
            "schema": SCHEMA,
            "normdeploy": __version__,
            "verb": self.verb,
            "command": self.command,
            "files": self.files,
            "sizes": {role: size for role, path in self.files.items() if (size := _file_size(path))},
            "sha256": _output_hash(self.files),
            "opset": summary.opset if summary else None,
            "nodes": {"before": summary.nodes_before, "after": summary.nodes_after} if summary else None,
            "ops": {"before": summary.ops_before, "after": summary.ops_after} if summary else None,
            "norms": [_finding_to_json(finding) for finding in summary.findings] if summary else [],
            "explanations": [_explanation_to_json(e) for e in summary.explanations] if summary else [],
            "pictures": summary.pictures if summary else (),
            "layers": summary.layers if summary else (),
            **{name: self.sections.get(name) for name in SECTIONS},
            "environment": describe_environment(),
            "notes": [*self.notes, *(summary.notes if summary else ())],
            "seconds": self.seconds,
        }
        return json.dumps(to_plain(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finding_to_json(finding: Finding) -> dict[str, Any]:
    certificate = finding.certificate
    if certificate is None:
        told = None
    else:
        told = {**vars(certificate), "rounding_ok": certificate.is_rounding_ok}
    return {**vars(finding), "certificate": told}


def _explanation_to_json(explanation: Explanation) -> dict[str, Any]:
    return {**vars(explanation), "finding": None if explanation.finding is None else explanation.finding.tensor}


def _drop_seconds(seconds: Any) -> Any:
    if isinstance(seconds, Mapping):
        return {}
    return 0.0


def _file_size(path: str) -> int:
    """Return the size in bytes of a file and of its external weights; 0 if the file does not exist."""
    file = Path(path)
    if file.is_file() and file.suffix == ".onnx":
        weights = matching_siblings(file, rf"{re.escape(file.name)}\.[0-9a-f]{{16}}\.data")
    else:
        weights = ()
    return sum(f.stat().st_size for f in (file, *weights) if f.is_file())


def _output_hash(files: Mapping[str, str]) -> dict[str, str]:
    output = files.get("output", "")
    if Path(output).is_file():
        return {"output": hash_file(output)}
    return {}


def to_plain(value: Any) -> Any:
    """Convert ``value`` to the types of JSON.

    If SOURCE_DATE_EPOCH is set, drop ``seconds``, so that equal runs write equal files.

    Returns:
        dicts, lists, strings and numbers. Numbers that are not finite become strings.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        timeless = source_date_epoch() is not None
        return {str(k): _drop_seconds(v) if timeless and k == "seconds" else to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
