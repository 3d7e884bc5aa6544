"""List the models with their samples and measures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from models import minilm
from normdeploy.compare.metrics import cosine, nearest_neighbor_agreement, top_agreement

from . import data, decoder, efficientnet, vision

Feeds = dict[str, np.ndarray]
# Number of samples per run of the model, for judging
AT_ONCE = 16
# Calibration crops of each photograph. Half of normdeploy's are used for judging; of 256, one is 0.4 %.
CROPS = 32


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
        calibrate: returns arrays, samples first.
        judge: returns arrays, samples first.
        measures: ``measures(output, reference, judged)`` returns numbers by name; output and reference are [samples,
            …].
        length: True if the second axis is a dynamic dim too.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    calibrate: Callable[[], Feeds]
    judge: Callable[[], Feeds]
    measures: Callable[[np.ndarray, np.ndarray, Feeds], dict[str, float]]
    length: bool = False

    @cached_property
    def judged(self) -> Feeds:
        """Return the samples for judging, drawn once."""
        return self.judge()

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """Describe the dynamic dims of each input.

        Returns:
            dims for torch.export.
        """
        dims: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=64)}
        if self.length:
            dims[1] = torch.export.Dim("length", min=2, max=256)
        return tuple(dims for _ in self.judged_inputs())

    def judged_inputs(self) -> Feeds:
        """Select the inputs among the judged arrays.

        Returns:
            name -> array.
        """
        return {name: array for name, array in self.judged.items() if name != "labels"}

    def reference(self) -> np.ndarray:
        """Run the model in float64, in PyTorch.

        Returns:
            [samples, …].
        """
        wide = copy.deepcopy(self.build()).double()
        with torch.no_grad():
            return batched(lambda feeds: wide(*map(_wide, feeds.values())).numpy(), self.judged_inputs())


def batched(run: Callable[[Feeds], np.ndarray], feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Call ``run`` with `AT_ONCE` samples at a time.

    Returns:
        outputs, concatenated.
    """
    count = len(next(iter(feeds.values())))
    parts = range(0, count, AT_ONCE)
    return np.concatenate([run({name: a[i : i + AT_ONCE] for name, a in feeds.items()}) for i in parts])


def _wide(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.double() if tensor.is_floating_point() else tensor


def _cosines(output: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return np.array([cosine(o, r) for o, r in zip(output, reference, strict=True)])


# ------------------------------------------------------------------ MiniLM


def _tokens(sentences: tuple[str, ...]) -> Feeds:
    return {
        name: t.numpy() for name, t in zip(("input_ids", "attention_mask"), minilm.tokenize(sentences), strict=True)
    }


def _of_vectors(output: np.ndarray, reference: np.ndarray, judged: Feeds) -> dict[str, float]:
    cosines = _cosines(output, reference)
    kept = float(nearest_neighbor_agreement(output, reference).mean())
    return {"nearest kept": kept, "worst cosine": float(cosines.min()), "mean cosine": float(cosines.mean())}


# ------------------------------------------------------------------ crops of photographs


def _of_classes(output: np.ndarray, reference: np.ndarray, judged: Feeds) -> dict[str, float]:
    return {
        "top-1 agreement": float(top_agreement(1)(output, reference).mean()),
        "accuracy": float((output.argmax(-1) == judged["labels"]).mean()),
        "worst cosine": float(_cosines(output, reference).min()),
    }


def _of_scores(output: np.ndarray, reference: np.ndarray, judged: Feeds) -> dict[str, float]:
    kept = top_agreement(1)(output, reference)
    return {
        "top-1 agreement": float(kept.mean()),
        f"of those with p >= {efficientnet.SURE}": float(kept[efficientnet.sure(reference)].mean()),
        "worst cosine": float(_cosines(output, reference).min()),
    }


def _labelled(crops: data.Crops) -> Feeds:
    return {"x": crops.images, "labels": crops.labels}


# ------------------------------------------------------------------ the decoder


def _of_tokens(output: np.ndarray, reference: np.ndarray, judged: Feeds) -> dict[str, float]:
    ids = judged["ids"]
    nats, exact = (decoder.loss(scores, ids).mean() for scores in (output, reference))
    inside = np.arange(ids.shape[1]) <= (ids[:, 1:] != decoder.END).sum(-1)[:, None]
    agreement = float(top_agreement(1)(output[inside], reference[inside]).mean())
    return {"loss, nats": float(nats), "loss, % more": float(100 * (nats / exact - 1)), "top-1 agreement": agreement}


SUBJECTS = (
    Subject(
        "minilm",
        "MiniLM, trained weights of a package",
        minilm.load,
        lambda: _tokens(data.sentences().calibrate),
        lambda: _tokens(data.sentences().judge),
        _of_vectors,
        length=True,
    ),
    Subject(
        "mobilenet",
        "MobileNetV2 at 64 pixels, trained here",
        vision.load,
        lambda: {"x": data.crops("calibrate", CROPS, seed=1).images},
        lambda: _labelled(data.crops("judge", 64, seed=2)),
        _of_classes,
    ),
    Subject(
        "efficientnet",
        "EfficientNet-Lite0 at 224 pixels, trained weights of a package",
        efficientnet.load,
        lambda: efficientnet.crops("calibrate", CROPS, seed=1),
        lambda: efficientnet.crops("judge", 36, seed=2),
        _of_scores,
    ),
    Subject(
        "decoder",
        "Llama-like decoder of 4 layers, trained here",
        decoder.load,
        lambda: {"ids": decoder.encoded(data.sentences().calibrate)},
        lambda: {"ids": decoder.encoded(data.sentences().judge)},
        _of_tokens,
    ),
)
