"""Allocate memory that TensorRT accepts: contiguous, on its device, at an address that is a multiple of 256 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

# Alignment in bytes that IExecutionContext::setTensorAddress requires of every address (NvInferRuntime.h).
ALIGNMENT = 256


def allocate_aligned(size: int, device: torch.device, alignment: int = ALIGNMENT) -> torch.Tensor:
    """Allocate bytes that begin at a multiple of ``alignment``; torch aligns CPU memory only to 64 bytes.

    Args:
        size: number of bytes; at least one is allocated.

    Returns:
        uint8 tensor [max(1, size)] on ``device``.
    """
    size = max(1, size)
    memory = torch.empty(size + alignment - 1, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % alignment
    return memory[start : start + size]


def allocate_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, int]:
    """Allocate an uninitialized tensor.

    Returns:
        The tensor and its address. The address is not null even if the tensor has no elements, because TensorRT rejects
        null.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = allocate_aligned(size, device)
    return memory[:size].view(dtype).view(tuple(shape)), memory.data_ptr()


def make_bindable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move ``tensor`` to ``device``, contiguous and aligned as TensorRT needs it; a slice may begin at any element.

    Returns:
        ``tensor`` itself if it is already bindable, else a copy.
    """
    moved = tensor.to(device).contiguous()
    if moved.data_ptr() % ALIGNMENT == 0:
        return moved
    return allocate_tensor(moved.shape, moved.dtype, device)[0].copy_(moved)


def make_output_allocator(library: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Make an allocator for an output whose shape TensorRT learns only while it runs.

    Args:
        library: the module ``tensorrt`` or ``tensorrt_rtx``.

    Returns:
        An IOutputAllocator; its ``output_tensor()`` returns the output after the run.
    """

    class TensorOutputAllocator(library.IOutputAllocator):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            library.IOutputAllocator.__init__(self)
            self._memory = allocate_aligned(1, device)
            self._shape = (0,)

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            if size > self._memory.numel() or self._memory.data_ptr() % max(1, alignment):
                self._memory = allocate_aligned(size, device, max(ALIGNMENT, alignment))
            return self._memory.data_ptr()

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self._shape = tuple(shape)

        def output_tensor(self) -> torch.Tensor:
            size = math.prod(self._shape) * dtype.itemsize
            return self._memory[:size].view(dtype).view(self._shape)

    return TensorOutputAllocator()
