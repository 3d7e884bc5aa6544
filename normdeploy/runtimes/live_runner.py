"""The lifecycle of a runner: open, entered at most once, closed; one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from ..errors import NormdeployError
from ..model import TensorSpec
from ..types import Tensors
from .tensor_spec import are_numpy_arrays, check_array_feeds, check_tensor_feeds, match_input_types

if TYPE_CHECKING:
    import numpy as np


class LiveRunner:
    """What ``normdeploy.open_runner`` gives: a model that stays loaded until the context is left.

    ``inputs`` and ``outputs`` say what it takes and gives. Calls from several threads wait for each other; open a
    runner for each thread to run them side by side.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # what is to be known of the file on this machine
    notes: tuple[str, ...] = ()
    # whether numpy arrays need not become tensors
    _takes_arrays = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = self._closed = False

    def infer(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model once.

        Args:
            feeds: input name -> numpy array, torch tensor, or array that speaks DLPack or __cuda_array_interface__.
                Nothing is converted, and nothing copied where it lies on the runner's device and is contiguous; none is
                changed.

        Returns:
            output name -> numpy array where every input is one, else torch tensor: on the runner's device where an
            input lies there, else on the CPU. bfloat16 in numpy is ``ml_dtypes.bfloat16``. Later calls leave these
            alone.

        Raises:
            InputError: names, dtypes, ranks or shapes do not fit, before anything runs; or the runtime fails on these
                inputs.
            NormdeployError: the runner is closed.
        """
        with self._lock:
            self._require_open()
            if self._takes_arrays and are_numpy_arrays(feeds):
                return dict(self._run_arrays(check_array_feeds(self.name, feeds, self.inputs)))
            return match_input_types(feeds, self._run_tensors(check_tensor_feeds(self.name, feeds, self.inputs)))

    def prepare(self, feeds: Mapping[str, Any]) -> Callable[[], None]:
        """The run alone, of inputs that are checked and bound once: what is timed. It ends when the outputs stand on
        the runner's device.

        Raises:
            InputError: as ``infer``.
            NormdeployError: the runner is closed.
        """
        with self._lock:
            self._require_open()
            return self._bind_run(check_tensor_feeds(self.name, feeds, self.inputs))

    def _bind_run(self, tensors: Tensors) -> Callable[[], None]:
        raise NotImplementedError

    def _run_tensors(self, tensors: Tensors) -> Tensors:
        raise NotImplementedError

    def _run_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _free_model(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Free the model; closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._free_model()

    def _require_open(self) -> None:
        if self._closed:
            raise NormdeployError(f"{self.name} is closed; open the file again with normdeploy.open_runner")

    def __enter__(self) -> Self:
        with self._lock:
            self._require_open()
            if self._entered:
                raise NormdeployError(f"{self.name} is entered twice; open a runner for each `with`")
            self._entered = True
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
