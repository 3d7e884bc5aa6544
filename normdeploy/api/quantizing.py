"""The stage of ``export`` and ``optimize`` that quantizes: what is asked for, and the file that comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx

from ..choices import TENSORRT
from ..errors import GraphError, InputError
from ..model import InputSpec
from ..precision.calibrate import loadable
from ..quantization.half import judged_again
from ..quantization.quantize import described, quantized
from ..quantization.samples import split
from ..quantization.wish import Wish, require_half, require_runtime
from ..quantized import Quantization
from ..records import Finding, Summary, both
from ..rewriting import rewrite
from ..rewriting.ledger import Wanted
from ..runtimes.survival import require_survival
from ..sessions import open_session
from ..types import Progress
from ..verbs.verify.policy import Thresholds, policy_of
from .common import compared

if TYPE_CHECKING:
    from .common import Calibration


def wish_of(
    quantize: str | None,
    runtime: str,
    calibration: str | None,
    metric: Thresholds | None,
    calibrate: Calibration,
    precision: str | None,
    dynamic: bool = False,
    rotate: bool = False,
    keep_float: Sequence[str] = (),
) -> Wish | None:
    """What is asked for, looked at before any work; None where nothing is to be quantized.

    Raises:
        InputError: options contradict each other, or the runtime has no kernels.
    """
    if quantize is None:
        if metric or calibration or dynamic or rotate or keep_float:
            raise InputError(
                "metric, calibration, dynamic, rotate and keep_float are for quantization alone; ask for it with"
                " quantize: int8, fp8 or int4"
            )
        return None
    if not calibrate and quantize != "int4" and not dynamic:
        raise InputError(
            f"{quantize} takes ranges of samples; give some with --calibrate samples.npz (INT4 weights do without, and"
            " --dynamic in onnxruntime)"
        )
    _require_texts(metric)
    if dynamic and calibration:
        raise InputError(
            f"with dynamic, ranges are taken while the model runs, and the calibration {calibration!r} would take them"
            " of samples; leave one of --dynamic and --calibration out"
        )
    if metric and not calibrate:
        raise InputError("a metric is judged on samples; give some with --calibrate samples.npz")
    wish = Wish(
        quantize,
        runtime,
        calibration or "minmax",
        policy_of(None, metric),
        dynamic,
        precision or "",
        rotate,
        tuple(keep_float),
    )
    require_runtime(wish)
    require_half(wish)
    return wish


def _require_texts(metric: object) -> None:
    """
    Raises:
        InputError: it is not what ``Thresholds`` says, which Python lets pass.
    """
    given = list(metric.values()) if isinstance(metric, Mapping) else [metric]
    texts = [t for one in given for t in (one if isinstance(one, list | tuple) else [one])]
    if metric is not None and not all(isinstance(t, str) for t in texts):
        raise InputError(
            f"the metric {metric!r} can't be read; give a text such as 'cosine>=0.995', several in a list, or a dict of"
            " them by output: {'logits': 'cosine>=0.995'}"
        )


def quantized_file(
    proto: onnx.ModelProto,
    wish: Wish,
    calibrate: Calibration,
    inputs: Sequence[InputSpec],
    progress: Progress | None,
) -> tuple[onnx.ModelProto, Quantization]:
    """
    Raises:
        InputError: the samples do not fit, or no choice of layers reaches the metrics.
        GraphError: onnxruntime does not load the file, which it should.
    """
    samples = split(calibrate, described(proto, inputs)) if calibrate else None
    made, account = quantized(proto, wish, samples, inputs, progress)
    if wish.runtime not in TENSORRT:
        try:
            with loadable(made) as file:
                require_survival(file)
                open_session(file, optimize=True)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise GraphError(
                f"the quantized file would not run, and nothing is written: {' '.join(str(error).split())[:300]}; leave"
                " --quantize out, and please report it"
            ) from error
    return made, account


def calibrating(
    calibrate: Calibration, proto: onnx.ModelProto, inputs: Sequence[InputSpec]
) -> Sequence[Mapping[str, np.ndarray]]:
    """The samples that calibrate, for half precision too."""
    return split(calibrate, described(proto, inputs)).calibrating


def judged_in_half(
    made: onnx.ModelProto,
    before: onnx.ModelProto,
    account: Quantization,
    wish: Wish,
    calibrate: Calibration,
    inputs: Sequence[InputSpec],
    progress: Progress | None,
) -> Quantization:
    """The account of ``made``, which is ``before`` quantized and in half precision since.

    Raises:
        InputError: a metric is missed in half precision.
    """
    samples = split(calibrate, described(before, inputs)) if calibrate else None
    return judged_again(made, before, account, wish, samples, progress)


def joined(
    proto: onnx.ModelProto, summary: Summary, inputs: Sequence[InputSpec], wanted: Wanted, strict: bool
) -> tuple[onnx.ModelProto, Summary, list[str]]:
    """A quantized file with the ops of ``--fuse portable``, and the account of both passes.

    They are written last: an Add and a norm that are one op already keep their gamma and beta from the layers behind,
    and a norm is joined with a QuantizeLinear that stands there only now.

    Args:
        summary: of the passes before, of which the file was quantized.

    Raises:
        CertificateError: with ``strict``, where a certificate failed.
    """
    made = rewrite.optimized(proto, wanted, strict)
    (out, more, _), notes, _ = compared(proto, inputs, wanted, made, strict)
    return out, replace(summary, findings=_merged(summary.findings, more.findings), opset=more.opset), notes


def _merged(first: Sequence[Finding], second: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding for each norm: what the second pass made of it, with the proof of the first."""
    merged, taken = list(first), set[int]()
    for finding in second:
        place = _place(finding, [(i, f) for i, f in enumerate(first) if i not in taken])
        if place is None:
            merged.append(finding)
            continue
        taken.add(place)
        before = first[place]
        if finding.status == "fused":
            certificate, proved = both(before.certificate, finding.certificate), (*before.proved, *finding.proved)
            merged[place] = replace(finding, certificate=certificate, proved=tuple(dict.fromkeys(proved)))
        else:
            merged[place] = replace(before, notes=tuple(dict.fromkeys((*before.notes, *finding.notes))))
    return tuple(merged)


def _place(finding: Finding, before: Sequence[tuple[int, Finding]]) -> int | None:
    """Which finding is of the same norm: its result has that name, or it is the module's only one, or the name was
    made of that name when the norm was split and quantized."""
    alike = [(i, f) for i, f in before if (f.kind, f.place) == (finding.kind, finding.place)]
    named = [i for i, f in alike if f.tensor == finding.tensor]
    of_module = [i for i, f in alike if f.module and f.module == finding.module]
    made = [(len(f.tensor), i) for i, f in alike if finding.tensor.startswith(f"{f.tensor}_")]
    if named or len(of_module) == 1:
        return (named or of_module)[0]
    return max(made)[1] if made else None
