"""Generate tokens with a Hugging Face folder in eager mode, by transformers' own ``generate`` with its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..errors import InputError, NormdeployError
from ..types import Array
from .huggingface_folder import load_folder_model
from .torch_pickles import first_line
from .torch_state import preserve_torch_state, silence_logger

# Task of the class that generates.
GENERATION_TASK = "text-generation"
# Names of the width of a sliding window in configs: most families, ModernBERT's decoder, RecurrentGemma, Inkling.
_WINDOWS = ("sliding_window", "local_attention", "attention_window_size", "sliding_window_size")


@dataclass(frozen=True)
class GreedyRun:
    """Tokens that a model generates after prompts.

    Attributes:
        tokens: the most probable tokens, int64 [batch, count].
        logits: logits before each token in the model's dtype, [batch, count, vocabulary].
    """

    tokens: Array
    logits: Array


class FolderGenerator:
    """Decoder of a folder that generates in eager mode.

    Args:
        path: the folder. Its own code runs only with ``trust``.

    Raises:
        NormdeployError: as for ``load_folder_model``; InputError if the model can't generate.
    """

    def __init__(self, path: Path, *, trust: bool) -> None:
        model: Any = load_folder_model(path, trust, GENERATION_TASK).model
        if getattr(model.config, "is_encoder_decoder", False) or not hasattr(model, "generate"):
            raise InputError(
                f"{path} is a {type(model).__name__}, which is not a decoder alone; --generate supports models of the"
                f" task {GENERATION_TASK}"
            )
        self._model = model
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        # The number of positions that a layer sees, if the model has a sliding window.
        self.window = find_window(config)

    def generate(self, ids: Array, mask: Array, count: int) -> GreedyRun:
        """Generate ``count`` tokens after prompts. A token that ends a text does not end the run.

        Args:
            ids, mask: int64 [batch, length]; the rows are padded on the left.

        Returns:
            The tokens and their logits.

        Raises:
            InputError: the model does not run on the prompts.
        """
        from transformers import GenerationConfig

        settings = GenerationConfig(
            max_new_tokens=count, do_sample=False, num_beams=1, use_cache=True, pad_token_id=0, eos_token_id=None
        )
        # The folder may ask for sampling, penalties or an early end, which do not belong to the model's function.
        self._model.generation_config = settings
        try:
            with preserve_torch_state(), torch.no_grad(), silence_logger("transformers"):
                made = self._model.generate(
                    torch.from_numpy(ids),
                    attention_mask=torch.from_numpy(mask),
                    generation_config=settings,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
        except NormdeployError:
            raise
        except Exception as error:
            # Code of transformers and of the folder may raise errors of any type.
            raise InputError(
                f"the model does not generate in eager mode: {type(error).__name__}: {first_line(error, '')}"
            ) from error
        logits = torch.stack(made.logits, 1)
        if logits.dtype == torch.bfloat16:
            values = logits.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            values = logits.numpy()
        return GreedyRun(made.sequences[:, ids.shape[1] :].numpy().astype(np.int64), values)


def find_window(config: Any) -> int | None:
    """Find the width of a decoder's sliding window, or the length of its chunks, in its config.

    Returns:
        The smallest number of positions that a layer sees; None if each layer sees all positions.
    """
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    sliding = getattr(config, "use_sliding_window", True) and (not kinds or any("sliding" in kind for kind in kinds))
    widths = [getattr(config, name, None) for name in _WINDOWS] if sliding else []
    if any("chunked" in kind for kind in kinds):
        widths.append(getattr(config, "attention_chunk_size", None))
    # GPT-Neo names its kinds of layers by themselves.
    if "local" in (getattr(config, "attention_layers", None) or ()):
        widths.append(getattr(config, "window_size", None))
    return min((width for width in widths if isinstance(width, int)), default=None)
