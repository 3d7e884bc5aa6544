"""Write a verb's report as JSON.

The schema is ``normdeploy/report/1``. A later version may add keys; one that changes or removes a key gets the next
number. Numbers that are not finite are the strings "nan", "inf" and "-inf". Unknown or inapplicable values are null.

    schema      "normdeploy/report/1"
    normdeploy  version that wrote the report
    verb        "export" | "optimize" | "inspect" | "build" | "verify" | "bisect" | "run" | "bench" | "package"
    command     command line, quoted for a POSIX shell; "" from Python
    files       role -> path as given; roles: "source", "output", "model", "onnx", "engine", "inputs", "onnx 2", ...
    sha256      "output" -> SHA-256 of the file that the verb wrote, by which `package` finds its report; empty if
        the verb wrote no single file
    opset       of the ONNX file
    sizes       role -> bytes of the file and of its external weights; paths that are not files are left out
    nodes       {"before", "after"}: number of nodes
    ops         {"before", "after"}: op type -> number of nodes in the main graph, the most frequent first
    norms       one object for each normalization of the model, in the graph's order:
        kind
        status: "fused" | "folded" | "kept" | "refused" | "undone"
        module: qualified path
        place: body or function that contains the norm, "" for the main graph
        tensor
        spelling: op types found
        remains: ops left of a folded norm
        became, reason, axes, epsilon, dtype, notes
        attempts: readings that were given up: start, end, stage ("ends" | "values" | "form"), reason, tensor (the
            culprit)
        proved: kinds of evidence, "identity", "onnxruntime run", ...
        certificate: null, or
            identity
            method: "exact" | "float64"
            exact proofs: cases (points), bits (the error probability is at most 2^-bits), degree, gains (NaN where an
                infinite input gave a number); failures: why and culprit
            float64 proofs: error and bound (relative), cases, worst
            rounding_before, rounding_after, rounding_bound: absolute, in onnxruntime, in the model's own type
            rounding_ok, note
        "inspect" alone adds:
            input, shape (of the input: sizes, names, null)
            ddof: 0 | 1 | null
            epsilon_as_written: added to a variance of that ddof; epsilon is that of the equal biased norm
            outside: epsilon is added to the root
            gamma and beta: null, or data (comes from an input of the model), axes (of the norm's input, along which it
                varies), name, one_plus (it is 1 + w)
            statistics: type of the reductions, "constant" for BatchNorm
            half: for "float16" and "bfloat16": dtype, epsilon (as it would be stored), vanishes ("" | "subnormal" |
                "zero"), overflow (names of constants that become Inf)
            tensors: outputs of the nodes found
            written: outputs of the nodes that would replace them
            runtimes: runtime (with its version), form ("now" | "optimized"), nodes (op types), verdict ("kernel" |
                "function" | "layers" | "missing" | "unknown"), parts (the ops that onnxruntime runs after its own
                optimizations, or the types of TensorRT's layers that process data), reason
    explanations  one object for each norm that --explain NAME selects, or for a place without a norm:
        name, finding (its tensor, null without a finding), start, way (the nodes from there: tensor, text, mark), said
        (how far recognition came)
    pictures    "inspect" alone: one object for each group of norms that look alike: kind, module (of the first),
        status, tensors (of the norms), before and after (empty if the norm stays or is folded away): boxes, each with
        op ("" for a tensor at the edge), name (of that tensor), inputs (indices of earlier boxes), own (a node of the
        norm; else a neighbor)
    layers      "inspect" of a quantized file alone: one object for each linear layer or convolution with a constant
        weight: tensor (its result), op, module, input (the tensor that is quantized before it, or that it reads),
        status (its quantized operands: "quantized" | "weight" | "activation" | "float"), weight (type), granularity (of
        the scales: "tensor", "384 channels", "blocks of 32"), weight_symmetric (zero points are 0), activation (type),
        dynamic (the input's scale is computed at run time), scale and zero_point of the input, low and high (its
        range); null if they are not one number
    engine      path, bytes, runtime, version (of the library), compute_capabilities (empty: every GPU that the library
        builds for), profile (input -> [min, opt, max] shapes), layers, seconds, proved ("built only": not run),
        norm_impl ("native" | "plugin" | "auto"), norms (empty if the file was parsed unchanged): node, module, op, form
        ("native node", "function body", "plugin RMSNorm", or the nodes that replaced it), reason, types (floating type
        -> number of layers, checked against the file's; {} if the file was not converted to half precision here),
        more_profiles (like profile, one object each), options (of the build: timing_cache, workspace in bytes,
        optimization_level, hardware_compatibility, version_compatible, refit, weight_streaming, ep_context; null or
        false: not requested), capability (the library's: "STANDARD"), notes, ep_context (null if path is the engine
        itself: mode "embed" | "file", file (of the engine next to it), partition, architecture, sdk_version)
    quantization  null, or `normdeploy.findings.quantization_report.QuantizationReport`, field by field
    precision   null, or to ("fp16" | "bf16"), islands (float32 regions: kind "norm" | "statistics" | "constant" |
        "range" | "positions" | "angles" | "scales" | "logarithm" | "logits" | "no half form" | "control flow" |
        "as written", op, module, tensor, reason, value: largest magnitude seen or null, nodes: their outputs), nodes
        (floating ones), kept (the number of these in float32), casts (inserted), bytes (of the weights, before and
        after), calibrated ("given" | "generated" | ""), samples, inputs and outputs (name -> type), notes. The norms'
        certificates are of the model before the conversion
    parity      ok, rule (the default: reference, multiple, most_ratio, most_runs), standard (the rules that were given,
        "" without any), reference (the model that the files were compared with), up_to (input elements, null if every
        size was run), cases (names), notes, seconds, not_run (runtime, reason, file: "" if it applies to every file)
        results: output, runtime, dtype, max_abs_error, max_rel_error, allowed, verdict ("pass" | "fail"), case (the
            worst), near_ties, reason, file (its name, the path if two have one name; "" of eager), precision ("" |
            "fp16" | "bf16": of the eager run used as its peer), culprit (onnxruntime's optimizers without which the
            file passes), decided_by ("default rule", or the rules that were given), rules (each: rule, kind "tolerance"
            | "cosine" | ..., measured, wanted, verdict, case, reason, accuracies ([the reference's, this one's] if the
            rule needs labels, else []), samples (their number)), by_default ("pass" | "fail" | "": verdict of the
            default rule, to which the numbers belong), default_reason, steps (of a quantized file, whose default rule
            is the error budget of its quantization steps: relative change of the output caused by these alone, else
            null), account (rules and default rule in words)
        drift: null if not requested, or the tensors that a file and the model share, in the file's order, one runtime
            after the other: runtime, file, module, tensor, where ("out of MODULE" | "into MODULE" | "output NAME"),
            error (absolute, against float64), eager (its error), allowed, scale (largest magnitude in float64), reason
            (a mismatch that no error can express)
    bisection   null, or ok, notes, seconds, not_searched (runtime, reason, file: failures that could not be searched),
        and faults:
        runtime, case (the input), module ("" if unknown), tensor, nodes ("op name" of each suspect), operator (the
            model's)
        wrong: "file" (its function differs from the model's) | "runtime" (it differs from ONNX's definition) |
            "between" (small errors grow)
        error (of the tensor, on right inputs), allowed, scale (its largest right value), reason (a mismatch that no
            error can express)
        kind: "weights" | "epsilon" | "axis" | "ddof" | "left out" | "approximation" | "hidden row" | "overflow" |
            "underflow" | "factor" | "accuracy" | "optimizer" | "unknown"; of quantized files also "scale" | "zero
            point" | "channels" | "saturation" | "granularity" | "coarse"
        cause
        widened: mends (null if it can't be tested), nodes (of the float32 region), error (of the output with it, or
            null), reason
        output, output_error, output_allowed, output_reason: of the file as it is
        mended_error (with the tensor at its right value, null if that can't be run), mended
    race        null, or threads, warmup and rounds (counts), seed, shapes (input, or norm -> shape), reference (its
        outputs are what the others are compared with), machine (cpu, cores, load, system, versions: library ->
        version), load (of the machine afterwards), notes, not_run (runtime, reason), and entries: runtime, file, form,
        norm ("" for whole models), median, p95 and p99 (milliseconds), samples (at most 400 of the times, in ms, in the
        order run), ratio (median of the time over the first entry's, for the same norm in the same round), interval (95
        %, of the ratio), error (relative; absolute for a norm), far_error (of a norm, around an offset of 1000), reason
        ("", or why it was not timed: then the times are null)
    inference   null, or runner, inputs and outputs (name -> "dtype[shape]")
    environment key -> version or name: libraries, "python", "system", "cpu", "driver", "gpu 0", ...
    notes       remarks for the user, one string each
    seconds     stage -> seconds
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
SECTIONS = ("engine", "precision", "quantization", "parity", "bisection", "race", "inference")
"""What the results of verbs say, in the order of the document; null where they say nothing."""


@dataclass(frozen=True)
class Report:
    """Account of one run of a verb.

    Attributes:
        files: role -> path as given.
        summary: norms of the model; None for a verb that lists none.
        sections: some of ``SECTIONS``, with values that `to_plain` accepts.
        command: command line, quoted for a shell; "" from Python.
        seconds: stage -> seconds.
    """

    verb: str
    files: Mapping[str, str]
    summary: Summary | None = None
    sections: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    command: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write the document that this module describes.

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
    """Return the bytes of a file and of the weights that `save_onnx` wrote next to it; 0 if it does not exist."""
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
    """Convert ``value`` to the types of JSON. With SOURCE_DATE_EPOCH set, drop ``seconds``, so that equal runs write
    equal files.

    Returns:
        dicts, lists, texts and numbers; numbers that are not finite become texts.
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
