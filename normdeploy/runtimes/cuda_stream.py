"""Queue work on a CUDA stream through torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import InputError, RuntimeUnavailable


class CudaStream:
    """One GPU and one stream on it.

    Args:
        index: number of the GPU.
        stream: a handle as an int, a torch or cupy stream, or an object with ``__cuda_stream__``. None makes a new
            stream, which first waits for the caller's current stream. Afterwards the caller's stream waits for the new
            stream, as with any torch operation.

    Raises:
        RuntimeUnavailable: this torch has no CUDA, or the GPU does not exist.
        InputError: ``stream`` is not a stream.
    """

    def __init__(self, index: int, stream: Any = None) -> None:
        if not torch.cuda.is_available():
            raise RuntimeUnavailable(
                f"torch {torch.__version__} can't use a GPU here, but GPU memory is allocated by torch; install "
                "torch with CUDA"
            )
        if index >= torch.cuda.device_count():
            raise RuntimeUnavailable(f"GPU {index} not found; GPUs that torch sees: {torch.cuda.device_count()}")
        self.device = torch.device("cuda", index)
        self._own = stream is None
        if self._own:
            self._stream = torch.cuda.Stream(self.device)
        else:
            self._stream = torch.cuda.ExternalStream(cuda_stream_handle(stream), self.device)

    @property
    def handle(self) -> int:
        """Return the stream's handle (cudaStream_t) as an int."""
        return int(self._stream.cuda_stream)

    @contextmanager
    def use_stream(self) -> Iterator[None]:
        """Make the stream current: the block queues its work and allocates its memory on it."""
        caller = torch.cuda.current_stream(self.device)
        if self._own:
            self._stream.wait_stream(caller)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                yield
        finally:
            # Work queued before a failure may still use the caller's memory.
            if self._own:
                caller.wait_stream(self._stream)

    def record_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors as used by both streams, so that torch reuses their memory only when both streams are done."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Wait until all work queued on the stream is done."""
        self._stream.synchronize()

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` as a CUDA graph.

        Returns:
            A function that replays the graph on the stream.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay


def cuda_stream_handle(stream: Any) -> int:
    """Get the handle of a stream: an int, a torch or cupy stream, or an object with ``__cuda_stream__``.

    Returns:
        The cudaStream_t handle as an int.

    Raises:
        InputError: ``stream`` is none of these.
    """
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):
        if isinstance(handle := getattr(stream, attribute, None), int):
            return handle
    raise InputError(
        f"the stream is a {type(stream).__name__}; pass a CUDA stream of torch or cupy, or its handle as an int"
    )
