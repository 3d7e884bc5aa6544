"""Read the user's samples: an .npz file, a folder of .npz files, or a Hugging Face dataset on disk.

Each array contains the values of one input for many samples, along the array's first axis. Each column of a Hugging
Face dataset contains one value per sample. The model gets the samples in batches of its usual size. If the user names
an array or column of labels, it is read too. All other arrays and columns are ignored. No code in the files is
executed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError, RuntimeUnavailable
from ..model import InputSpec, ModelSignature
from ..storage.npz_files import read_npz
from .array_conversion import check_feeds
from .image_dataset import Preprocessing, list_sample_files, stack_samples
from .input_cases import DATASET, InputCase

# Files that save_to_disk writes into its folder.
_HUGGINGFACE = ("dataset_info.json", "state.json", "dataset_dict.json")


def open_dataset(
    path: str | os.PathLike[str],
    model: ModelSignature,
    labels: str | None = None,
    preprocessing: Preprocessing | None = None,
) -> list[InputCase]:
    """Split a dataset into batches, one input case each.

    The arrays of a case are read when the case is used.

    Args:
        labels: name of the array or column of labels, which are integers of shape [samples]; None if the samples have
            no labels.
        preprocessing: preparation of the files of a folder, each of which becomes one sample; None for arrays.

    Returns: the cases, in the order of the samples. Files of a folder are read in the order of their names.

    Raises:
        InputError: the file is missing or unrecognized, or contains no array for an input of the model or for the
            labels. Or a sample or its label does not fit.
        RuntimeUnavailable: this is a Hugging Face dataset and the library ``datasets`` is not installed.
    """
    place = Path(path)
    name = repr(os.fspath(path))
    if not model.inputs:
        raise InputError(f"the model has no inputs, so it can't use the dataset {name}")
    if preprocessing is not None:
        if labels is not None:
            raise InputError(
                f"the dataset {name} is a folder of files without labels, but the labels {labels!r} were asked for;"
                " save samples and labels in one .npz file"
            )
        return _open_files(place, model, preprocessing)
    if labels is not None and labels in [spec.name for spec in model.inputs]:
        raise InputError(
            f"the labels {labels!r} are an input of the model; pass the name of the array or column with the correct "
            "classes"
        )
    # Keep one file at a time in memory, for all of its batches.
    read = lru_cache(maxsize=1)(read_npz)
    if place.is_dir():
        if any((place / file).is_file() for file in _HUGGINGFACE):
            return _open_huggingface(place, model, labels)
        files = sorted(place.glob("*.npz"))
        if not files:
            raise InputError(
                f"the dataset {name} is a folder without .npz files and not a Hugging Face dataset (save_to_disk "
                "writes one); if it holds pictures, also pass --preprocess preprocessor_config.json"
            )
        return [case for file in files for case in _open_npz(file, model, read, labels)]
    return _open_npz(place, model, read, labels)


def _open_files(place: Path, model: ModelSignature, preprocessing: Preprocessing) -> list[InputCase]:
    """Make one case for each batch of files.

    Raises:
        InputError: the folder is missing or empty, or the model has several inputs.
    """
    if not place.is_dir():
        raise InputError(f"{os.fspath(place)!r} is not a folder, but --preprocess prepares the files of a folder")
    if len(model.inputs) != 1:
        raise InputError(
            f"--preprocess makes one array of each file, but the model has the inputs"
            f" {[spec.name for spec in model.inputs]}; save the arrays of all inputs in an .npz file"
        )
    (spec,) = model.inputs
    files = list_sample_files(place, pictures=preprocessing.of_pictures)

    def batch_reader(start: int, stop: int) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that prepares the files [start, stop)."""
        return lambda: {spec.name: _cast_input(place.name, spec, stack_samples(files[start:stop], preprocessing))}

    return [
        _make_batch_case(f"{place.name}, files {a} to {b - 1}", model, batch_reader(a, b), None)
        for a, b in _batch_ranges(place.name, len(files), model)
    ]


def _open_npz(
    file: Path, model: ModelSignature, read: Callable[[Path], dict[str, np.ndarray]], labels: str | None
) -> list[InputCase]:
    return batch_cases(file.name, lambda: read(file), model, labels)


def batch_cases(
    name: str, read: Callable[[], Mapping[str, np.ndarray]], model: ModelSignature, labels: str | None = None
) -> list[InputCase]:
    """Split arrays into batches, one input case each.

    Args:
        name: name of the dataset, for messages and the names of the cases.
        read: function that returns the arrays by name, each [samples, ...]. It is called again for each batch.
        labels: as in `open_dataset`.

    Returns: the cases, in the order of the samples.

    Raises:
        InputError: as in `open_dataset`.
    """
    arrays = _select_inputs(name, read(), model)
    counts = {key: len(array) if array.ndim else 0 for key, array in arrays.items()}
    count = min(counts.values())
    if count == 0 or len(set(counts.values())) > 1:
        raise InputError(
            f"the dataset {name!r} has {counts} samples of its inputs; use the same number for each, and at least one"
        )

    if labels is not None and labels not in (columns := read()):
        raise InputError(f"the dataset {name!r} has no labels {labels!r}; it holds {list(columns)}")
    if labels is None:
        classes = None
    else:
        classes = _check_labels(name, labels, read()[labels], count)

    def batch_reader(start: int, stop: int) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that reads the samples [start, stop)."""
        return lambda: _select_inputs(
            name, {key: columns[start:stop] for key, columns in read().items() if key in counts}, model
        )

    batches = _batch_ranges(name, count, model)
    return [
        _make_batch_case(f"{name}, samples {a} to {b - 1}", model, batch_reader(a, b), _slice_labels(classes, a, b))
        for a, b in batches
    ]


def _check_labels(dataset: str, name: str, value: np.ndarray, count: int) -> np.ndarray:
    """Return the labels of ``count`` samples as int64 [samples].

    Raises:
        InputError: the labels are not integers, are not one-dimensional, or their number differs from ``count``.
    """
    if value.dtype.kind not in "iu":
        raise InputError(
            f"the dataset {dataset!r} holds the labels {name!r} as {value.dtype}; integers are required, such as int64"
        )
    if value.ndim != 1:
        raise InputError(
            f"the dataset {dataset!r} holds the labels {name!r} in the shape {list(value.shape)}; [samples] is required"
        )
    if len(value) != count:
        raise InputError(
            f"the dataset {dataset!r} holds {len(value)} labels {name!r} and {count} samples; use one label for each "
            "sample"
        )
    return value.astype(np.int64)


def _slice_labels(labels: np.ndarray | None, start: int, stop: int) -> np.ndarray | None:
    if labels is None:
        return None
    return labels[start:stop]


def _select_inputs(name: str, columns: Mapping[str, Any], model: ModelSignature) -> dict[str, np.ndarray]:
    wanted = [spec.name for spec in model.inputs]
    if missing := [n for n in wanted if n not in columns]:
        raise InputError(
            f"the dataset {name!r} has no {missing}; the model expects {wanted}, the dataset has {list(columns)}"
        )
    return {spec.name: _cast_input(name, spec, np.asarray(columns[spec.name])) for spec in model.inputs}


def _cast_input(name: str, spec: InputSpec, value: np.ndarray) -> np.ndarray:
    """Convert ``value`` to the input's type.

    Datasets contain integers of any size and floats of any precision. An integer input accepts only values that its
    type represents exactly.
    """
    wanted = np.dtype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype)
    if value.dtype == wanted:
        return value
    # .npy files store bfloat16 as raw bytes, "V2".
    if value.dtype.str[1:] == "V2" and spec.dtype == "bfloat16":
        return value.view(ml_dtypes.bfloat16)
    if wanted.kind in "iub":
        kinds = "iub"
    else:
        kinds = "fiub"
    if value.dtype.kind not in kinds or (wanted.kind in "iub" and not _is_lossless(wanted, value)):
        raise InputError(
            f"the dataset {name!r} holds {spec.name!r} as {value.dtype}, which can't become {spec.dtype} without "
            "loss; convert it"
        )
    return value.astype(wanted)


def _is_lossless(wanted: np.dtype, value: np.ndarray) -> bool:
    return bool((value.astype(wanted) == value).all())


def _batch_ranges(name: str, count: int, model: ModelSignature) -> list[tuple[int, int]]:
    """Compute the range of samples (start, stop) of each batch.

    A batch has the usual size of the first input's first dim. The last batch may be smaller if that dim is dynamic.
    """
    first = model.inputs[0].shape[:1]
    if not first:
        raise InputError(
            f"the input {model.inputs[0].name!r} has no dims, so it has no dim for samples; pass it with --inputs"
        )
    size = max(first[0].opt, 1)
    if not first[0].is_dynamic and count % size:
        raise InputError(
            f"the dataset {name!r} has {count} samples, but the model accepts {size} at a time; use a multiple of "
            f"{size}"
        )
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _make_batch_case(
    name: str, model: ModelSignature, make: Callable[[], dict[str, np.ndarray]], labels: np.ndarray | None
) -> InputCase:
    def make_checked_feeds() -> dict[str, np.ndarray]:
        """Read the batch and check it against the model's inputs."""
        feeds = make()
        check_feeds(f"the dataset, {name}", feeds, model.inputs)
        return feeds

    return InputCase(name, DATASET, make_checked_feeds, labels=labels)


def _open_huggingface(place: Path, model: ModelSignature, labels: str | None) -> list[InputCase]:
    if importlib.util.find_spec("datasets") is None:
        raise RuntimeUnavailable(
            f"{os.fspath(place)!r} is a Hugging Face dataset, which needs the library datasets: pip install datasets"
        )
    import datasets

    try:
        held = datasets.load_from_disk(os.fspath(place))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"the library datasets can't read {os.fspath(place)!r}: {' '.join(str(error).split())[:300]}"
        ) from error
    if isinstance(held, datasets.DatasetDict):
        raise InputError(
            f"{os.fspath(place)!r} holds the splits {list(held)}; pass the folder of one: "
            f"{os.fspath(place / next(iter(held), ''))!r}"
        )
    columns = list(held.column_names)
    wanted = [spec.name for spec in model.inputs]
    if missing := [name for name in wanted if name not in columns]:
        raise InputError(
            f"the dataset {place.name!r} has no {missing}; the model expects {wanted}, the dataset has {columns}"
        )
    if not len(held):
        raise InputError(f"the dataset {place.name!r} has no samples")
    if labels is not None and labels not in columns:
        raise InputError(f"the dataset {place.name!r} has no labels {labels!r}; it holds {columns}")
    classes = None
    if labels is not None:
        column = held.select_columns([labels]).with_format("numpy")[0 : len(held)][labels]
        classes = _check_labels(place.name, labels, _stack_column(place.name, labels, column), len(held))
    held = held.select_columns(wanted).with_format("numpy")

    def batch_reader(start: int, stop: int) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that reads the samples [start, stop)."""
        return lambda: _select_inputs(
            place.name,
            {name: _stack_column(place.name, name, column) for name, column in held[start:stop].items()},
            model,
        )

    batches = _batch_ranges(place.name, len(held), model)
    return [
        _make_batch_case(
            f"{place.name}, samples {a} to {b - 1}", model, batch_reader(a, b), _slice_labels(classes, a, b)
        )
        for a, b in batches
    ]


def _stack_column(dataset: str, name: str, column: Sequence[Any] | np.ndarray) -> np.ndarray:
    value = np.asarray(column, dtype=None if not _is_ragged(column) else object)
    if value.dtype == object:
        raise InputError(
            f"the dataset {dataset!r} holds {name!r} in samples of different sizes; pad them to one size, or use "
            "batches of 1"
        )
    return value


def _is_ragged(column: Sequence[Any] | np.ndarray) -> bool:
    return len({np.shape(sample) for sample in column}) > 1
