"""Options and arguments of ``check``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...dtypes import half_precision_of
from ...option_values import Fuse, Runtime
from ...types import PathLike, Progress
from ...verb_options import LoadingOptions, option_field

if TYPE_CHECKING:
    from ..arguments.argument_validation import Onnx

FAIL_ON = ("decomposed", "train-mode", "eps-lost")


def _rules_of(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip() != "none"]


@dataclass(frozen=True, kw_only=True)
class FailOption:
    """Option for the rules that fail a check."""

    fail_on: str | Sequence[str] = option_field(
        FAIL_ON,
        "--fail-on",
        "Rules whose findings fail the check, separated by commas; or all, or none. Rules: decomposed, unfolded,"
        " train-mode, eps-lost, fp16-overflow, wrong-form, missing-kernel, refused, asymmetric, int32, per-tensor,"
        " blocked-fusion, fp8, weight-zero-point, unpaired, misbound, unparsed, runtime-fault, unsupported,"
        " unsupported-opset, unknown-support, and the rules of installed packages."
        " The page check.md explains the rules. Default: decomposed, train-mode and eps-lost.",
        metavar="RULES",
        type=str | None,
        read=_rules_of,
        # The help would truncate the default at 80 columns.
        show_default=False,
    )


@dataclass(frozen=True, kw_only=True)
class JudgingOptions:
    """Options for the target of a check, and for the baseline of known findings."""

    baseline: PathLike | None = option_field(
        None,
        "--baseline",
        "JSON or SARIF file of an earlier check. Findings that are in this file do not fail the check.",
        metavar="OLD",
        type=Path | None,
    )
    precision: str | None = option_field(
        None,
        "--precision",
        "Check epsilons as if the file computed in half precision. The names float16 and bfloat16 are accepted too.",
        metavar="fp16|bf16",
        parse=half_precision_of,
    )
    runtime: str = option_field(
        "any",
        "--runtime",
        "Runtime that will run the files: any, onnxruntime, onnxruntime-accurate, openvino, tensorrt or tensorrt-rtx."
        " Norms are compared with the forms that optimize writes for this runtime, and only this runtime has to"
        " support them.",
        metavar="RUNTIME",
        type=Runtime,
    )
    target: str | None = option_field(
        None,
        "--target",
        "Runtime that can't run here, such as coreml-mlprogram, qnn, directml, webgpu, nnapi, xnnpack, tensorrt-10.9,"
        " jetpack-6 or triton-26.07. Norms are compared with the op lists that the runtime publishes; nothing is run.",
        metavar="NAME",
    )
    compute_capability: str | None = option_field(
        None, "--compute-capability", "Compute capability of the oldest target GPU.", metavar="8.6"
    )
    fuse: str = option_field(
        "standard",
        "--fuse",
        "Compare norms with the forms that optimize writes with this --fuse. portable: norms that have no standard op,"
        " and group norms, become normdeploy's own ops. standard: only ONNX's standard ops are written.",
        type=Fuse,
    )


@dataclass(frozen=True)
class CheckCall(FailOption, JudgingOptions, LoadingOptions):
    """Arguments of a call of ``check``."""

    sources: Onnx | Sequence[Onnx]
    _: KW_ONLY
    progress: Progress | None = None
