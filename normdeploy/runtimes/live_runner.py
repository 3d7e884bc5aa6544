"""Manage the lifecycle of a runner, which is opened, entered at most once, and closed. A runner runs one call at a
time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from ..errors import NormdeployError, escape_line
from ..model import TensorSpec
from ..types import Tensors
from .tensor_spec import are_numpy_arrays, check_array_feeds, check_tensor_feeds, match_input_types

if TYPE_CHECKING:
    import numpy as np


class LiveRunner:
    """Model that stays loaded until the context is left, as ``normdeploy.open_runner`` returns it.

    Calls from several threads wait for each other. To run calls in parallel, open a runner for each thread.

    Attributes:
        inputs: names, dtypes and shapes of the inputs.
        outputs: names, dtypes and shapes of the outputs.
        notes: warnings about the file on this machine.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # Warnings about the file on this machine.
    notes: tuple[str, ...] = ()
    # True if numpy arrays are passed on without conversion to tensors.
    _takes_arrays = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = self._closed = False

    def __repr__(self) -> str:
        specs = (getattr(self, "inputs", ()), getattr(self, "outputs", ()))
        ends = ("; ".join(map(str, some)) for some in specs)
        return f"<{type(self).__qualname__}: {escape_line(self.name)}: {escape_line(' -> '.join(ends))}>"

    def infer(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model once.

        Args:
            feeds: input name -> numpy array, torch tensor, or array that supports DLPack or __cuda_array_interface__.
                Nothing is converted or changed. A contiguous array on the runner's device is not copied.

        Returns:
            output name -> array. It is a numpy array if every input is a numpy array, else a torch tensor. Tensors are
            on the runner's device if an input is on that device, else on the CPU. bfloat16 in numpy is
            ``ml_dtypes.bfloat16``. Later calls do not change these arrays.

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
        """Check and bind the inputs once, so that a caller can time the run alone.

        Returns:
            A function that runs the model. The function returns when the outputs are on the runner's device.

        Raises:
            InputError: as for ``infer``.
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
        """Free the model; a second call does nothing."""
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
                raise NormdeployError(f"{self.name} was entered twice; open one runner for each `with`")
            self._entered = True
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
