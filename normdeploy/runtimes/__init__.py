"""What runs a model: torch (``torch_runners``), onnxruntime (``ort_runner``) and TensorRT (``trt_runner``), all
behind one protocol."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import numpy as np

from ..types import Arrays

RunResult = dict[str, np.ndarray]
"""Output name -> value; bfloat16 as ``ml_dtypes.bfloat16``."""


@runtime_checkable
class Runner(Protocol):
    """Holds a model ready to run; leaving the context frees it.

    ``infer`` takes one array for each input, in the input's own dtype, and changes none of them; every call begins from
    the same state. It raises InputError where names, dtypes or shapes do not fit.
    """

    @property
    def name(self) -> str:
        """The runtime in the reader's words: "onnxruntime (optimizer off)"."""

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
        """Nothing, where the garbage collector frees it soon enough."""
