"""Architectures that are made automatically: shrunk models, with inputs that are derived and tried.

Their names are stored in ``automatic_names.json``, which ``python -m benchmarks.architectures.enumeration`` writes, so
that the catalogue can be read without the libraries. A model is made when its row is measured.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import samples
from .building import Architecture, randomised
from .torchvision_ops import declare_torchvision

NAMES = Path(__file__).with_name("automatic_names.json")
# Number of pairs of a config and a class that are tried for a model type
_TRIES = 6


class UnmakeableError(Exception):
    """No model of this name runs with inputs that are derived automatically."""


@dataclass(frozen=True)
class Automatic:
    """Architecture that is made when it is measured.

    Attributes:
        key: name in the library, for example a model type of transformers.
    """

    library: str
    key: str

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.library}: {self.key}"

    def resolved(self) -> Architecture:
        """Make the model, and find inputs with which the model runs.

        Returns:
            The architecture. Its ``build`` returns the module that was made.

        Raises:
            UnmakeableError: with the reason.
        """
        declare_torchvision()
        torch.manual_seed(0)
        from . import automatic_diffusers, automatic_pictures, automatic_transformers

        makers = {
            "transformers": automatic_transformers.candidates,
            "diffusers": automatic_diffusers.candidates,
            "timm": automatic_pictures.timm_candidates,
            "torchvision": automatic_pictures.torchvision_candidates,
        }
        return _first_that_runs(self, makers[self.library](self.key))


@dataclass(frozen=True)
class Candidate:
    """Model with inputs to try.

    Attributes:
        inputs: specifications as for normdeploy's ``--input``.
        ranges: dim -> min:opt:max, for dims that ``SIZES`` does not name.
        part: part of the model that is measured if both exporters refuse the whole model.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    ranges: dict[str, str]
    part: Candidate | None = None


@dataclass(frozen=True)
class Refused:
    """Model that can't be constructed, with the reason."""

    reason: str


def _first_that_runs(automatic: Automatic, candidates: Iterable[Candidate | Refused]) -> Architecture:
    reasons: list[str] = []
    for candidate in itertools.islice(candidates, 4 * _TRIES):
        if isinstance(candidate, Refused):
            reasons.append(candidate.reason)
            continue
        architecture = _describe_candidate(automatic, candidate)
        try:
            with torch.no_grad():
                result = candidate.module(**samples.draw(architecture))
            require_finite_tensors(result)
        except Exception as error:
            reasons.append(brief(error))
            continue
        return architecture
    raise UnmakeableError("; ".join(dict.fromkeys(reasons))[:500] or "no inputs are known for its forward")


def _describe_candidate(automatic: Automatic, candidate: Candidate) -> Architecture:
    """Describe a candidate and its part. The constant weights get random values."""
    module = randomised(candidate.module)
    part = None if candidate.part is None else _describe_candidate(automatic, candidate.part)
    return Architecture(
        automatic.name, automatic.library, lambda: module, candidate.inputs, ranges=candidate.ranges, part=part
    )


def require_finite_tensors(result: Any) -> None:
    """Check that the result of a model contains a tensor.

    Raises:
        ValueError: the result has no floating tensor, or a tensor with NaN.
    """
    found = [t for t in iter_tensors(result) if t.is_floating_point()]
    if not found:
        raise ValueError("the model returns no floating tensor")
    if any(bool(t.isnan().any()) for t in found):
        raise ValueError("the model returns NaN in eager torch")


def iter_tensors(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested containers."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from iter_tensors(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from iter_tensors(value)
    elif hasattr(result, "__dict__"):
        yield from iter_tensors({k: v for k, v in vars(result).items() if isinstance(v, torch.Tensor | list | tuple)})


def brief(error: Exception) -> str:
    """Format an error as one line of at most 160 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:140]}"


def _read_names() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(NAMES.read_text()) if NAMES.exists() else {"order": [], "left out": {}}
    return content


_CONTENT = _read_names()
AUTOMATIC: Sequence[Automatic] = tuple(Automatic(library, key) for library, key in _CONTENT["order"])
# Name of a model that is left out -> reason
LEFT_OUT: dict[str, str] = _CONTENT["left out"]
