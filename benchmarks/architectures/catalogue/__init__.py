"""List the architectures, one line per architecture if possible: library, small sizes, inputs."""

from __future__ import annotations

from .automatic import AUTOMATIC, LEFT_OUT, Automatic
from .building import Architecture, made, randomised
from .diffusion import DIFFUSION
from .pictures import PICTURES
from .seen_and_heard import SEEN_AND_HEARD
from .text import TEXT
from .torchvision_ops import declare_torchvision

__all__ = [
    "ARCHITECTURES",
    "AUTOMATIC",
    "LEFT_OUT",
    "Architecture",
    "Automatic",
    "declare_torchvision",
    "made",
    "randomised",
]

ARCHITECTURES = (*TEXT, *SEEN_AND_HEARD, *DIFFUSION, *PICTURES)
