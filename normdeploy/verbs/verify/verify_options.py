"""Define the options of ``verify`` and ``bisect``: files, inputs and rules of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...types import PathLike, Progress
from ...verb_options import ImageInputOptions, LoadingOptions, RunnersOption, option_field

if TYPE_CHECKING:
    from ...compare.policy import Thresholds, Tolerances
    from ...inputs.input_cases import Inputs
    from ..arguments.argument_validation import Example, Onnx
    from ..arguments.model_source import Source


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Options for the inputs, the cost and the rules of a comparison."""

    # Options for the inputs and for the cost.
    seeds: int = option_field(
        3, "--seeds", "Number of random inputs at the usual sizes. Inputs of other sizes are tested too.", minimum=1
    )
    feeds: Inputs | None = option_field(
        None,
        "--inputs",
        "File of input arrays by name. The models run on these arrays instead of generated inputs. Repeatable.",
        metavar="IN.npz",
        type=list[Path] | None,
    )
    max_elements: int | None = option_field(
        None,
        "--max-elements",
        "Largest number of elements of a generated input. Default: 8 times the number of elements at the usual sizes.",
        metavar="N",
        minimum=1,
    )
    max_seconds: float = option_field(
        60.0,
        "--max-seconds",
        "Limit on processor time, in seconds. The verdict lists the checks that were skipped or stopped early.",
        metavar="S",
        minimum=1,
    )
    max_memory: int = option_field(
        4 * 2**30,
        "--max-memory",
        "Memory limit for the tensors inside the model. Input sizes that need more memory are skipped.",
        metavar="BYTES",
        minimum=2**20,
    )

    # Options for the rules.
    tolerance: Tolerances | None = option_field(
        None,
        "--tolerance",
        "Allow |error| ≤ ABS + REL·|reference| for the output OUT, or for all outputs if OUT= is omitted. Repeatable.",
        metavar="[OUT=]ABS:REL",
        type=list[str] | None,
    )
    atol: float | None = option_field(
        None,
        "--atol",
        "With --rtol: allow |error| ≤ ATOL + RTOL·|reference| for all outputs, as numpy.allclose does. If only one of"
        " them is passed, the other is 0. --tolerance ATOL:RTOL means the same.",
        metavar="ATOL",
    )
    rtol: float | None = option_field(None, "--rtol", "Relative tolerance for all outputs; see --atol.", metavar="RTOL")
    metric: Thresholds | None = option_field(
        None,
        "--metric",
        "Metric that decides the verdict: cosine, psnr, snr, top1, top5 or nearest with >=X, or accuracy_drop with <=X."
        " MODULE:FUNCTION>=X calls your own function of outputs and reference, and needs --trust-remote-code."
        " Put the value in quotes for the shell, or write NAME:X. Repeatable.",
        metavar="'[OUT=]NAME>=X'",
        type=list[str] | None,
    )
    policy: PathLike | None = option_field(
        None,
        "--policy",
        "TOML file with tolerances, metrics and name mappings.",
        metavar="VERIFY.toml",
        type=Path | None,
    )
    also_default: bool = option_field(
        False,
        "--also-default",
        "Require that the default rule passes too. Without --also-default, your tolerances and metrics replace the"
        " default rule.",
    )

    # Options for the dataset of metrics, and for the names in the files.
    dataset: PathLike | None = option_field(
        None,
        "--dataset",
        "Samples for metrics: an .npz file, a folder of .npz files, or a Hugging Face dataset on disk.",
        metavar="PATH",
        type=Path | None,
    )
    preprocess: PathLike | Callable[[Path], Any] | None = option_field(
        None,
        "--preprocess",
        "--dataset names a folder of pictures, which are prepared as this file says: the image processor's config"
        " of a transformers model, or the config of a timm model. Or MODULE:FUNCTION, a function from the path of a"
        " file to an array.",
        metavar="CONFIG",
        type=Path | None,
    )
    labels: str | None = option_field(
        None, "--labels", "Array or column of the dataset with the correct classes, for accuracy_drop.", metavar="NAME"
    )
    map: Sequence[str] | Mapping[str, str] = option_field(
        (),
        "--map",
        "Match the input or output THEIRS of the file with the input or output OURS of the model. Repeatable.",
        metavar="THEIRS=OURS",
        type=list[str] | None,
    )


@dataclass(frozen=True, kw_only=True)
class DriftOption:
    """Option to compare inner tensors in addition to outputs."""

    drift: bool = option_field(
        False,
        "--drift",
        "Also compare tensors inside the model, to show where the error grows (ONNX files only).",
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOption:
    """Option to compare generated tokens in addition to outputs."""

    generate: int | None = option_field(
        None,
        "--generate",
        "Also generate N tokens after each prompt with a decoder's cache, and compare each step with eager mode."
        " The model must be a Hugging Face folder.",
        metavar="N",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class ProofOption:
    """Option to leave out the proof about an ONNX reference."""

    prove: bool = option_field(
        True,
        "--no-proof",
        "Do not try to prove that an ONNX file computes the same function as an ONNX reference.",
        negated=True,
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(RunnersOption, ProofOption, GenerateOption, DriftOption, ComparisonOptions, ImageInputOptions):
    """Options of ``verify``."""


@dataclass(frozen=True, kw_only=True)
class StrictOption:
    """Option that makes the command ``normdeploy verify`` fail if the verdict has limits."""

    strict: bool = option_field(
        False,
        "--strict",
        "Exit with 1 if the comparison was limited: some sizes were not tested, or the inputs are known only from the"
        " tested file.",
    )


@dataclass(frozen=True)
class VerifyCall(VerifyOptions, LoadingOptions):
    """Arguments of ``verify``."""

    source: Source | Onnx | Any
    files: Onnx | Sequence[Onnx] = ()
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    engines: Sequence[PathLike] = ()
    progress: Progress | None = None


@dataclass(frozen=True)
class VerifyPartsCall(DriftOption, ComparisonOptions, LoadingOptions):
    """Arguments of ``verify_parts``."""

    source: PathLike
    folder: PathLike
    _: KW_ONLY
    progress: Progress | None = None
