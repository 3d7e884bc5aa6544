"""Type aliases that all packages share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    # Only type checkers import numpy here: modules that handle no arrays must not import numpy at run time.
    import numpy as np
    import torch

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); total is 0 if it is unknown."""

PathLike = str | os.PathLike[str]

Array: TypeAlias = "np.ndarray[Any, Any]"

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
"""Arrays by tensor name: a model's inputs, weights or outputs."""

Tensors = dict[str, "torch.Tensor"]
"""The same as torch tensors."""

ProfileRanges = Mapping[str, Any] | Sequence[str]
"""Ranges of dims or inputs for one optimization profile; `normdeploy.runtimes.optimization_profiles` parses them."""
