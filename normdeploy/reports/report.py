"""The report of a verb, as JSON.

Its schema is ``normdeploy/report/1``. A later version may add keys; one that changes or removes a key gets the
next number. A number that is not finite is written as the string "nan", "inf" or "-inf"; what is not known or does not
apply is null.

    schema      "normdeploy/report/1"
    normdeploy  the version that wrote the report
    verb        "export" | "optimize" | "inspect" | "build" | "verify" | "bisect" | "run" | "bench" | "package"
    command     as it was typed, quoted for a POSIX shell; "" where Python was the caller
    files       role -> path as given; roles: "source", "output", "model", "onnx", "engine", "inputs", "onnx 2", ...
    opset       of the ONNX file
    sizes       role -> bytes of that file and of the weights beside it; without what is no file
    nodes       {"before", "after"}: number of nodes
    ops         {"before", "after"}: op type -> number of nodes in the main graph, the most frequent first
    norms       one object for each normalization of the model, in the graph's order:
        kind, status ("fused" | "folded" | "kept" | "refused" | "undone"), module (qualified path), place (the body or
        function that it is in, "" for the main graph), tensor, spelling (op types found), remains (the ops left of one
        that is folded), became, reason, axes, epsilon, dtype, notes,
        attempts (each reading that was given up: start, end, stage "ends" | "values" | "form", reason, tensor: the
        culprit), proved (where it was seen: "identity", "onnxruntime run", ...), certificate: null, or identity, method
        ("exact" | "float64"), of exact ones cases (points), bits (the error probability is 2^-bits or less), degree,
        gains (NaN where an infinite input gave a number) and, of failures, why and culprit; of others error and bound
        (relative, float64), cases, worst; rounding_before, rounding_after and rounding_bound (absolute, in onnxruntime,
        in the model's own type), rounding_ok, note. The others are told by "inspect" alone:
        input, shape (of the input: sizes, names, null), ddof (0 | 1 | null), epsilon_as_written (beside a variance of
        that ddof; epsilon is that of the equal biased norm), outside (epsilon is added to the root), gamma and beta:
        null, or data (from an input of the model), axes (of the norm's input, along which it varies), name, one_plus
        (it is 1 + w), statistics (the type in which the reductions run, "constant" for BatchNorm), half: for "float16"
        and "bfloat16" dtype, epsilon (as it would be stored), vanishes ("" | "subnormal" | "zero"), overflow (names of
        constants that become Inf), tensors (outputs of the nodes found), written (of those that would take their
        place), runtimes: runtime (with its version), form ("now" | "optimized"), nodes (op types), verdict ("kernel" |
        "function" | "layers" | "missing" | "unknown"), parts (the ops that onnxruntime runs after its own
        optimizations, the types of TensorRT's layers that see data), reason
    explanations  one object for each norm that --explain NAME means, or for the place where there is none:
        name, finding (its tensor, null where none), start, way (the nodes from there: tensor, text, mark), said (how
        far recognition came)
    pictures    of "inspect" alone, one object for norms that look alike: kind, module (of the first), status, tensors
        (of the norms), before and after (empty where it stays or is folded away): boxes, each with op ("" for a tensor
        at the edge), name (of that), inputs (places of boxes before it), own (a node of the norm; else a neighbour)
    layers      of "inspect" of a quantized file alone, one object for each linear layer or convolution with a constant
        weight: tensor (its result), op, module, input (the tensor that is quantized in front of it, or that it reads),
        status ("quantized" | "weight" | "activation" | "float": what of it is quantized), weight (type), granularity
        (of its scales: "tensor", "384 channels", "blocks of 32"), weight_symmetric (its zero points are 0), activation
        (type), dynamic (the input's scale is computed when it runs), scale and zero_point of the input, low and high
        (what it can be), null where they are not one number
    engine      path, bytes, runtime, version (of the library), compute_capabilities (empty: every GPU that the library
        builds for), profile (input -> [min, opt, max] shapes), layers, seconds, proved ("built only": nothing was run),
        norm_impl ("native" | "plugin" | "auto"), norms (empty where the file was parsed as it is): node, module, op,
        form ("native node", "function body", "plugin RMSNorm", or the nodes that took its place), reason, types
        (floating type -> number of layers, checked against the file's; {} where the file was not made half precision
        here), more_profiles (as profile, one object each), options (what the build was asked for: timing_cache,
        workspace in bytes, optimization_level, hardware_compatibility, version_compatible, refit, weight_streaming,
        ep_context; null or false: not asked for), capability (the library's: "STANDARD"), notes, ep_context (null where
        path is the engine itself: mode "embed" | "file", file: the engine's beside it, partition, architecture,
        sdk_version)
    quantization  null, or `normdeploy.findings.quantization_report.QuantizationReport` as it stands
    precision   null, or to ("fp16" | "bf16"), islands (what stayed float32: kind "norm" | "statistics" | "constant" |
        "range" | "positions" | "logarithm" | "logits" | "no half form" | "control flow" | "as written", op, module,
        tensor, reason,
        value: the largest magnitude seen or null,
        nodes: their outputs), nodes (floating ones), kept (of them, in float32), casts (inserted), bytes (of the
        weights, before and after), calibrated ("given" | "generated" | ""), samples, inputs and outputs (name -> type),
        notes. The certificates of norms speak of the model before
    parity      ok, rule (of the default: reference, multiple, most_ratio, most_runs), standard (by which rules the
        files are verified where some were given, else ""), reference (what the files were compared with), up_to (input
        elements, null where every size was run), cases (names), notes, seconds, not_run (runtime, reason, file: ""
        where it is so for every file), results: output, runtime, dtype, max_abs_error, max_rel_error, allowed, verdict
        ("pass" | "fail"), case (the worst), near_ties, reason, file (its name, the path where two have one name; "" of
        eager), precision ("" | "fp16" | "bf16": of the eager run that it was judged by), culprit (onnxruntime's
        optimizers without which the file passes), decided_by ("default rule", or the rules that were given), rules
        (each: rule, kind "tolerance" | "cosine" | ..., measured, wanted, verdict, case, reason, accuracies ([the
        reference's, this one's] where labels were asked for, else []), samples (of these)), by_default ("pass" | "fail"
        | "": the default rule's verdict, of which the numbers are), default_reason, steps (of a quantized file, whose
        default rule is the error budget of its steps: what these alone move the output by over its size, else null),
        account (rules and default rule in words), and drift: null where it was not asked for, or the tensors that a
        file and the model share, in the file's order, one runtime after the other: runtime, file, module, tensor, where
        ("out of MODULE" | "into MODULE" | "output NAME"), error (absolute, against float64), eager (eager's), allowed,
        scale (the largest magnitude in float64), reason (of what no error can express)
    bisection   null, or ok, notes, seconds, not_searched (runtime, reason, file: what is wrong and could not be looked
        into), and faults: runtime, case (the input it was found on), module ("" where unknown), tensor, nodes ("op
        name" of each that it may be), operator (the model's), wrong ("file": it computes something else than the model
        | "runtime": it computes otherwise than ONNX defines |
        "between": small errors grow), error (of the tensor, on right inputs), allowed, scale (its largest right value),
        reason (what no error can say), kind ("weights" | "epsilon" | "axis" | "ddof" | "left out" | "approximation" |
        "hidden row" | "overflow" | "underflow" | "factor" | "accuracy" | "optimizer" | "unknown", of quantized files
        "scale" | "zero point" | "channels" | "saturation" | "granularity" | "coarse"), cause, widened:
        mends (null where it can't be asked), nodes (in the island of float32), error (of the output then, or null) and
        reason; output, output_error, output_allowed, output_reason (as the file is), mended_error (with the tensor at
        its right value, null where that can't be run) and mended
    race        null, or threads, warmup and rounds (counts), seed, shapes (input, or norm -> shape), reference (whose
        outputs the others were compared with), machine (cpu, cores, load, system, versions: library -> version), load
        (of the machine afterwards), notes, not_run (runtime, reason), and entries: runtime, file, form, norm ("" where
        whole models are raced), median, p95 and p99 (milliseconds), samples (at most 400 of the times, in ms, in the
        order run), ratio (median of this one's time over that of the first entry, of the same norm, in the same round),
        interval (95 %, of the ratio), error (relative; of a norm absolute), far_error (of a norm, around an offset of
        1000), reason ("", or why it was not timed: then the times are null)
    inference   null, or runner, inputs and outputs (name -> "dtype[shape]")
    environment what -> its version or name: libraries, "python", "system", "cpu", "driver", "gpu 0", ...
    notes       what else the user should know, one string each
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
from ..storage.file_replacement import matching_siblings
from ..version import __version__

if TYPE_CHECKING:
    from ..findings.records import Explanation, Finding, Summary

SCHEMA = "normdeploy/report/1"
SECTIONS = ("engine", "precision", "quantization", "parity", "bisection", "race", "inference")
"""What the results of verbs say, in the order of the document; null where they say nothing."""


@dataclass(frozen=True)
class Report:
    """The account of one run of one verb; ``sections`` holds some of ``SECTIONS``, in values that `to_plain` takes."""

    verb: str
    files: Mapping[str, str]
    summary: Summary | None = None
    sections: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    command: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """The document described at the top of this module."""

        summary = self.summary
        document = {
            "schema": SCHEMA,
            "normdeploy": __version__,
            "verb": self.verb,
            "command": self.command,
            "files": self.files,
            "sizes": {role: size for role, path in self.files.items() if (size := _file_size(path))},
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
    """Bytes of a file and of the weights that `save_onnx` put beside it."""
    file = Path(path)
    if file.is_file() and file.suffix == ".onnx":
        weights = matching_siblings(file, rf"{re.escape(file.name)}\.[0-9a-f]{{16}}\.data")
    else:
        weights = ()
    return sum(f.stat().st_size for f in (file, *weights) if f.is_file())


def to_plain(value: Any) -> Any:
    """``value`` in the types that JSON has; without what it took where SOURCE_DATE_EPOCH asks for equal files."""
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
