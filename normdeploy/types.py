"""Type aliases that all packages share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    # Type checkers only: modules that handle no arrays must not import numpy at run time.
    import numpy as np
    import torch

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); total is 0 where it is not known."""

PathLike = str | os.PathLike[str]

Array: TypeAlias = "np.ndarray[Any, Any]"

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
"""Values by the names of tensors: what a model is fed, its weights, its outputs."""

Tensors = dict[str, "torch.Tensor"]
"""The same as tensors of torch."""

ProfileRanges = Mapping[str, Any] | Sequence[str]
"""Ranges of dims or of inputs, as one optimization profile takes them; `normdeploy.runtimes.optimization_profiles`
reads them."""
