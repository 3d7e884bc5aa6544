"""Collect statistics of the inputs of linear layers on samples: some rows, and the range of each channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from ..precision.tensor_ranges import Samples, chunk_tensors, name_failing_sample, open_session_with_outputs
from ..types import Arrays, Progress

# Hugging Face's name of the input that marks real tokens with 1 and padding with 0.
MASK = "attention_mask"
# Maximum number of rows that are kept of each tensor. Of a wide tensor, fewer rows are kept: about `_ELEMENTS`
# elements, but at least 512 rows.
ROWS = 2048
_ELEMENTS = 2**22


@dataclass(frozen=True)
class ActivationStats:
    """Values of one tensor on samples.

    Tokens that the samples' `MASK` marks as padding are left out, unless padding was requested.

    Attributes:
        rows: float32 [rows, channels], drawn evenly from all samples.
        low: minimum of each channel over all samples, [channels].
        high: maximum of each channel over all samples, [channels].
    """

    rows: np.ndarray
    low: np.ndarray
    high: np.ndarray


def observe_activations(
    proto: onnx.ModelProto,
    axes: Mapping[str, int],
    samples: Samples,
    progress: Progress | None = None,
    padding: bool = False,
) -> dict[str, ActivationStats]:
    """Run ``proto`` on ``samples`` and collect statistics of each tensor of ``axes``.

    Args:
        axes: tensor name → axis of its channels.
        padding: include tokens that `MASK` marks as padding.

    Returns:
        tensor name → statistics. Tensors that are empty or contain a NaN or Inf are missing.

    Raises:
        InputError: the model does not run on a sample.
        NormdeployError: onnxruntime can't load the model.
    """
    kept: dict[str, list[np.ndarray]] = {name: [] for name in axes}
    ends: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    parts = chunk_tensors(proto, list(axes), samples) if axes else []
    for done, part in enumerate(parts):
        runner = open_session_with_outputs(proto, part)
        for number, sample in enumerate(samples):
            if progress is not None:
                progress("observe", done * len(samples) + number, len(parts) * len(samples))
            with name_failing_sample(number):
                values = runner.run(part, dict(sample))
            for name, value in zip(part, values, strict=True):
                rows = unmasked_rows(value, axes[name], {} if padding else sample)
                if not rows.size:
                    continue
                most = min(ROWS, max(512, _ELEMENTS // rows.shape[1]))
                share = max(1, -(-most // len(samples)))
                draw = np.random.default_rng([number, len(name)])
                kept[name].append(rows[draw.permutation(len(rows))[:share]])
                low = rows.min(0)
                high = rows.max(0)
                before = ends.get(name)
                ends[name] = (
                    (low, high) if before is None else (np.minimum(low, before[0]), np.maximum(high, before[1]))
                )
    return {
        name: ActivationStats(np.concatenate(rows), *ends[name])
        for name, rows in kept.items()
        if rows and np.isfinite([*ends[name][0], *ends[name][1]]).all()
    }


def unmasked_rows(value: np.ndarray, axis: int, sample: Arrays) -> np.ndarray:
    """Reshape a tensor to rows, without the rows of padding tokens.

    Padding tokens are left out because no result depends on their values, but there may be more padding tokens than
    real tokens.

    Args:
        axis: axis of the channels.
        sample: inputs of the model. If they contain `MASK`, in the shape of ``value`` without channels, its zeros mark
            padding.

    Returns:
        [rows, channels].
    """
    moved = np.moveaxis(value, axis, -1)
    mask = sample.get(MASK)
    if mask is not None and mask.ndim == 2 and moved.shape[:-1] == mask.shape and ((mask == 0) | (mask == 1)).all():
        return np.asarray(moved[mask != 0])
    return np.asarray(moved.reshape(-1, moved.shape[-1]))
