"""Run a model in torch (``torch_runners``), onnxruntime (``ort_runner``) or TensorRT (``trt_runner``) through one
protocol.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import numpy as np

from ..types import Arrays

RunResult = dict[str, np.ndarray]
"""Output name -> value; bfloat16 as ``ml_dtypes.bfloat16``."""


@runtime_checkable
class Runner(Protocol):
    """Model that is ready to run. Leaving the context frees the model.

    ``infer`` takes one array for each input, in the input's own dtype, and does not change these arrays. Every call
    begins from the same state of the model. ``infer`` raises InputError if names, dtypes or shapes do not fit.
    """

    @property
    def name(self) -> str:
        """Return the runtime's display name: "onnxruntime (optimizer off)"."""

    def infer(self, feeds: Arrays) -> RunResult: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class HeldRunner:
    """Base of runners that need no setup; leaving the context frees their resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._free_model()

    def _free_model(self) -> None:
        """Do nothing: the garbage collector frees the model soon enough. Subclasses that hold other resources override
        this method.
        """
