"""Options and arguments of ``run`` and ``open_runner``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...option_values import RuntimeCache
from ...types import PathLike
from ...verb_options import option_field

if TYPE_CHECKING:
    from ...runtimes.runtime_cache import Wanted
    from ..arguments.argument_validation import Onnx


def _keeps_runtime_cache(mode: str) -> bool:
    return mode == "keep"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for running a file once."""

    stated_inputs: Sequence[str] = option_field(
        (),
        "--input",
        r"Values of an input: NAME=LOW:HIGH, NAME=VALUE or NAME=FILE.npy. To state the dtype and the sizes too, write"
        r' for example "ids:int64\[n]{0:99}". Repeatable.',
        metavar="SPEC",
        type=list[str] | None,
    )
    provider: str | None = option_field(
        None, "--provider", "Device for an ONNX file: cpu or cuda. Engines always run on a GPU."
    )
    device: int = option_field(0, "--device", "Number of the GPU to run on, counted from 0.", minimum=0)
    profile_index: int | None = option_field(
        None,
        "--profile-index",
        "Number of the engine profile to use, counted from 0. Default: the first profile that fits the shapes.",
        minimum=0,
    )
    seed: int = option_field(0, "--seed", "Seed of the generated inputs.", minimum=0)
    runner: str | None = option_field(
        None,
        "--runner",
        "Runtime that runs the file instead of onnxruntime: openvino, openvino-bf16, openvino-fp16, onnxruntime-web, or"
        " the runtime of an installed package.",
        metavar="NAME",
    )
    runtime_cache: Any = option_field(
        None,
        "--runtime-cache",
        "How to use stored kernels, which TensorRT-RTX compiles for this GPU. keep: read stored kernels, and store new"
        " kernels next to FILE. off: neither read nor store kernels. Default: read stored kernels, but store none.",
        metavar="MODE",
        type=RuntimeCache | None,
        read=_keeps_runtime_cache,
    )
    weight_budget: int | None = option_field(
        None,
        "--weight-budget",
        "For an engine built with --weight-streaming: how many bytes of the weights to keep on the GPU.",
        metavar="BYTES",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options for generating tokens with a decoder file."""

    generate: int | None = option_field(
        None,
        "--generate",
        "Generate N tokens after each prompt, with the cache of a decoder file. Each token is the most probable one."
        " With a tokenizer, an answer ends at a token that ends a text.",
        metavar="N",
        minimum=1,
    )
    prompts: Sequence[str] = option_field(
        (),
        "--prompt",
        "Text to continue. A tokenizer must be in the folder of FILE, or in --tokenizer. transformers loads it."
        " Repeatable.",
        metavar="TEXT",
        type=list[str] | None,
    )
    prompt_ids: Sequence[str | Sequence[int]] = option_field(
        (),
        "--prompt-ids",
        "Token ids to continue, such as 1,15,7. Repeatable. Shorter prompts are padded on the left.",
        metavar="IDS",
        type=list[str] | None,
    )
    chat: bool = option_field(
        False,
        "--chat",
        "Make each --prompt one message of the user in the tokenizer's chat template, and generate the answer.",
    )
    tokenizer: PathLike | None = option_field(
        None,
        "--tokenizer",
        "Folder of the tokenizer, for example the folder of the model. Default: the folder of FILE.",
        metavar="FOLDER",
        type=Path | None,
    )


@dataclass(frozen=True)
class RunCall(TokenOptions, RunOptions):
    """Arguments of a call of ``run``."""

    source: Onnx
    inputs: PathLike | Mapping[str, Any] | None = None
    output: PathLike | None = None


@dataclass(frozen=True)
class RunnerCall:
    """Arguments of a call of ``open_runner``."""

    path: Onnx
    _: KW_ONLY
    provider: str | None = None
    device: int = 0
    profile_index: int | None = None
    stream: Any = None
    cuda_graph: bool = False
    threads: int = 0
    runner: str | None = None
    runtime_cache: Wanted = None
    weight_budget: int | None = None

    @property
    def only_for_others(self) -> bool:
        """Return whether an option is set that only onnxruntime or TensorRT supports."""
        is_placed = self.provider is not None or self.stream is not None or self.cuda_graph or self.device
        is_of_engines = self.runtime_cache is not None or self.weight_budget is not None
        return bool(is_placed or is_of_engines)
