"""Launch a compiled kernel through CUDA's driver API, as TensorRT does, for tests and benchmarks on a GPU.

The module needs cuda-bindings, which torch installs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def checked(result: tuple[Any, ...]) -> Any:
    """Check the status of a driver call.

    Returns:
        the other values of the result.

    Raises:
        RuntimeError: the call failed; the error contains CUDA's message.
    """
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA: {text.decode() if text else status} ({status})")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class Kernel:
    """Kernel in the current context. Keep this object as long as the kernel is used.

    Attributes:
        block: threads a block.
        shared: bytes of shared memory a block.
    """

    module: Any
    function: Any
    block: int
    shared: int

    @staticmethod
    def load(name: str, ptx: bytes, block: int, shared: int) -> Kernel:
        """Compile PTX with the driver for the GPU of the current context.

        Args:
            block: threads a block.
            shared: bytes of shared memory a block.

        Returns:
            the kernel.
        """
        from cuda.bindings import driver

        module = checked(driver.cuModuleLoadDataEx(ptx + b"\0", 0, [], []))
        function = checked(driver.cuModuleGetFunction(module, name.encode()))
        if shared > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, shared))
        return Kernel(module, function, block, shared)

    def launch(
        self, grid: int, inputs: Sequence[int], extra: Sequence[int], outputs: Sequence[int], stream: int
    ) -> None:
        """Launch the kernel with arguments in TensorRT's order: pointers of inputs, int32 extras, pointers of
        outputs.
        """
        from cuda.bindings import driver

        values = (*inputs, *extra, *outputs)
        kinds = (ctypes.c_void_p,) * len(inputs) + (ctypes.c_int32,) * len(extra) + (ctypes.c_void_p,) * len(outputs)
        checked(
            driver.cuLaunchKernel(self.function, grid, 1, 1, self.block, 1, 1, self.shared, stream, (values, kinds), 0)
        )
