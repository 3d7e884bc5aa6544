"""Split the user's samples into calibration samples and judging samples, on which metrics are measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..inputs.dataset import batch_cases, open_dataset
from ..inputs.image_dataset import Preprocessing
from ..inputs.input_cases import InputCase
from ..model import InputSpec, ModelSignature
from ..storage.npz_files import read_npz
from ..types import Arrays, PathLike


@dataclass(frozen=True)
class SampleSplit:
    """Inputs of the two parts, each a mapping name → [samples, ...]."""

    calibrating: tuple[dict[str, np.ndarray], ...]
    judging: tuple[dict[str, np.ndarray], ...]

    @property
    def sample_counts(self) -> tuple[int, int]:
        """Return the number of calibration samples and the number of judging samples."""
        a, b = (sum(_row_count(feeds) for feeds in part) for part in (self.calibrating, self.judging))
        return a, b


def split_samples(
    given: Sequence[PathLike | Mapping[str, Any]],
    inputs: Sequence[InputSpec],
    preprocessing: Preprocessing | None = None,
) -> SampleSplit:
    """Split samples: every second batch is used for calibration, and the other batches for judging.

    A single batch is split in two if the model's batch size is dynamic.

    Args:
        given: .npz files, folders of these, or arrays by name; each array holds one input of many samples along its
            first axis.
        inputs: inputs of the model.
        preprocessing: preparation of the files in the folders; None for arrays.

    Returns:
        the two parts.

    Raises:
        InputError: there is only one sample. Or the samples lack an input, do not fit the model, contain a NaN or an
            infinity, or consist of one repeated number.
    """
    cases = _load_cases(given, inputs, preprocessing)
    # Split the only batch into halves, if the model accepts any batch size.
    if len(cases) == 1:
        feeds = cases[0].make()
        rows = _row_count(feeds)
        first = inputs[0].shape[0]
        if rows < 2 or not first.is_dynamic:
            raise InputError(
                f"{cases[0].name!r} is one batch of {rows}, but calibration and judging need different "
                "samples; pass at least two"
            )
        smaller = replace(first, opt=-(-rows // 2))
        cases = _load_cases(
            given,
            [replace(spec, shape=_shape_with_opt_size(spec, first.name, smaller.opt)) for spec in inputs],
            preprocessing,
        )
    parts = [[case.make() for case in cases[start::2]] for start in (0, 1)]
    for part, case in (
        (feeds, case) for start in (0, 1) for feeds, case in zip(parts[start], cases[start::2], strict=True)
    ):
        _require_finite(part, case.name)
    _require_different_samples([*parts[0], *parts[1]])
    return SampleSplit(tuple(parts[0]), tuple(parts[1]))


def _shape_with_opt_size(spec: InputSpec, name: str | None, opt: int) -> tuple[Any, ...]:
    return tuple(replace(d, opt=opt) if d.name == name and d.is_dynamic else d for d in spec.shape)


def _load_cases(
    given: Sequence[Any], inputs: Sequence[InputSpec], preprocessing: Preprocessing | None
) -> list[InputCase]:
    model = ModelSignature(inputs=tuple(inputs), outputs=(), kind="onnx")
    cases: list[InputCase] = []
    for number, item in enumerate(given):
        if preprocessing is not None:
            if isinstance(item, Mapping):
                raise InputError("preprocess prepares the files of a folder, but calibrate has arrays; omit preprocess")
            cases += open_dataset(item, model, preprocessing=preprocessing)
        elif isinstance(item, Mapping):
            arrays = {name: np.asarray(value) for name, value in item.items()}
            cases += batch_cases(f"mapping {number}", lambda a=arrays: a, model)  # type: ignore[misc]
        else:
            if not os.path.isdir(item):
                # Read the file here first, so that error messages about it say that it is calibration data.
                read_npz(item)
            cases += open_dataset(item, model)
    return cases


def _row_count(feeds: Arrays) -> int:
    return len(next(iter(feeds.values())))


def _require_finite(feeds: Arrays, name: str) -> None:
    for key, value in feeds.items():
        if value.dtype.kind not in "iub" and not np.isfinite(value.astype(np.float64)).all():
            raise InputError(f"{name}: {key!r} contains NaN or Inf, so it has no range; remove it")


def _require_different_samples(feeds: Sequence[Arrays]) -> None:
    for key in feeds[0]:
        values = [f[key] for f in feeds]
        first = values[0].reshape(-1)[:1]
        if values[0].dtype.kind not in "iub" and all(v.size and bool((v == first).all()) for v in values):
            raise InputError(f"all samples of {key!r} are {first[0]:g}; pass representative samples")
