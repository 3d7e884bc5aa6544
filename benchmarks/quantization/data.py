"""Collect real sentences and photographs from installed packages.

No data set is downloaded, and nothing is stored in the repository.

Sentences: English prose from the documentation of installed packages and of Python itself. Photographs: the pictures
that scikit-image ships. The samples are crops of these, not separate pictures, so neighbors are similar. The text's
hash and the position in the picture decide which part a sample belongs to. No sentence and no pixel used for
calibration or training is used for judging.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics

import numpy as np
from PIL import Image

from . import environments

SOURCES = ("networkx", "sympy", "matplotlib", "torch", "numpy", "hypothesis", "rich", "onnx_ir", "_pytest")
# Maximum number of sentences of one package, so that no subject dominates
PER_SOURCE = 250
# Minimum and maximum number of words of a sentence
LEAST, MOST = 8, 40
_CODE = re.compile(r">>>|::|``|[|=<>{}\[\]_\\*`]|\.\.\s|https?:|@|\d\.\d|^\W|:param|\be\.g|\bi\.e")
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class Sentences:
    """Disjoint lists, each in a fixed order; ``train`` is for the decoder that is trained here."""

    train: tuple[str, ...]
    calibrate: tuple[str, ...]
    judge: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Return a hash of the sentences, which depend on the packages' versions."""
        parts = "\n\n".join("\n".join(part) for part in (self.train, self.calibrate, self.judge))
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


@cache
def sentences(calibrate: int = 128, judge: int = 600) -> Sentences:
    """Split all sentences by the order of their hashes: ``calibrate``, then ``judge``, from at most `PER_SOURCE` of
    each source; the rest is for training.

    Returns:
        the lists.
    """
    drawn: list[str] = []
    rest: list[str] = []
    for prose in _prose_by_source():
        ordered = sorted(prose, key=_order)
        drawn += ordered[:PER_SOURCE]
        rest += ordered[PER_SOURCE:]
    drawn = sorted(dict.fromkeys(drawn), key=_order)
    if len(drawn) < calibrate + judge:
        raise LookupError(f"the installed packages have {len(drawn)} sentences, {calibrate + judge} are needed")
    kept = set(drawn[: calibrate + judge])
    train = tuple(s for s in dict.fromkeys((*drawn[calibrate + judge :], *rest)) if s not in kept)
    return Sentences(train, tuple(drawn[:calibrate]), tuple(drawn[calibrate : calibrate + judge]))


def _order(sentence: str) -> str:
    return hashlib.sha256(sentence.encode()).hexdigest()


def _prose_by_source() -> list[list[str]]:
    """Return the different sentences of each source. Reading all takes half a minute, so they are cached by the
    versions.
    """
    names = packages_distributions()
    versions = [
        platform.python_version(),
        *(f"{s} {version(names[s][0])}" for s in SOURCES),
        Path(__file__).read_text(),
    ]
    kept = environments.cache() / f"sentences-{_order(chr(10).join(versions))[:16]}.json"
    if not kept.exists():
        kept.write_text(json.dumps([list(dict.fromkeys(prose)) for prose in (_topics(), *map(_docstrings, SOURCES))]))
    prose: list[list[str]] = json.loads(kept.read_text())
    return prose


def _topics() -> Iterator[str]:
    """Yield sentences of the language reference, as ``help()`` shows it."""
    for text in topics.topics.values():
        yield from _prose(text)


def _docstrings(package: str) -> Iterator[str]:
    """Yield sentences of every module, class and function of an installed package, read without importing it."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).rglob("*.py"))[:400]:
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    yield from _prose(ast.get_docstring(node) or "")


def _prose(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in _END.split(" ".join(paragraph.split())):
            words = sentence.split()
            whole = sentence[:1].isupper() and sentence.endswith((".", "!", "?"))
            if whole and LEAST <= len(words) <= MOST and sentence.isascii() and not _CODE.search(sentence):
                yield sentence


# ------------------------------------------------------------------ photographs

PHOTOGRAPHS = (
    "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png",
    "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "page.png", "retina.jpg", "rocket.jpg",
    "text.png",
)  # fmt: skip
# Pixels of a crop.
SIDE = 64


@dataclass(frozen=True)
class Crops:
    """Crops of photographs.

    Attributes:
        images: float32 [n, 3, side, side] between −1 and 1.
        labels: int64 [n], the photograph of each.
    """

    images: np.ndarray
    labels: np.ndarray


def crops(part: str, of_each: int, seed: int, side: int = SIDE, scales: tuple[int, int] = (40, 112)) -> Crops:
    """Draw crops of every photograph: from its left 60 % for "train", from the next 12 % for "calibrate", and from the
    last 28 % for "judge".

    Args:
        of_each: number of crops.
        scales: smallest and largest size of a crop, in pixels of the photograph.

    Returns:
        the crops.
    """
    low, high = {"train": (0.0, 0.6), "calibrate": (0.6, 0.72), "judge": (0.72, 1.0)}[part]
    rng, images, labels = np.random.default_rng(seed), [], []
    for label, picture in enumerate(_pictures()):
        left, right = int(low * picture.width), int(high * picture.width)
        for _ in range(of_each):
            most = min(right - left, picture.height)
            cut = int(rng.integers(min(scales[0], most), min(scales[1], most) + 1))
            x, y = int(rng.integers(left, right - cut + 1)), int(rng.integers(0, picture.height - cut + 1))
            crop = picture.resize((side, side), Image.Resampling.BILINEAR, (x, y, x + cut, y + cut))
            images.append(np.asarray(crop, np.float32).transpose(2, 0, 1) / 127.5 - 1)
            labels.append(label)
    order = rng.permutation(len(labels))
    return Crops(np.stack(images)[order], np.array(labels)[order])


@cache
def _pictures() -> Sequence[Image.Image]:
    folder = environments.photographs()
    return [Image.open(folder / name).convert("RGB") for name in PHOTOGRAPHS]
