"""Runs kernels in Triton's interpreter on the CPU: in a process of its own, as TRITON_INTERPRET has to be set before
triton is imported.

Everything here runs in that process (see ``conftest.py``); numpy arrays go in and come out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GUARD = 4096  # elements of NaN on both sides of each output (of int8 the number 85): a write there is found


def torch_dtype(name: str) -> Any:
    import torch

    quantized = {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}
    return ({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16} | quantized)[name]


def poisoned(size: int, dtype: str, device: str = "cpu") -> Any:
    """A buffer for ``size`` elements between guard zones, full of NaN, of int8 of 85."""
    import torch

    filling = 85 if dtype == "i8" else float("nan")
    return torch.full((size + 2 * GUARD,), filling, dtype=torch_dtype(dtype), device=device)


def untouched(buffer: Any) -> bool:
    """Whether its guard zones are as `poisoned` made them."""
    import torch

    guards = torch.cat((buffer[:GUARD].double(), buffer[-GUARD:].double()))
    return bool((guards.isnan() | (guards == 85)).all())


def _round_as_gpus_do() -> None:
    """Let the interpreter convert to E4M3 and fuse a multiply-add as GPUs do. By itself (Triton 3.7) it saturates
    nothing, takes no tie to the even number and makes 4 of 7.9: what rounds up to the next power of 2 loses its
    exponent. And it rounds the product before the sum."""
    import ml_dtypes
    from triton.runtime import interpreter

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(x.data.dtype), x.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fused

    own = interpreter._convert_float
    if getattr(own, "rounds", False):
        return

    def converted(value: np.ndarray, kind: Any, target: Any, rounding: Any) -> np.ndarray:
        if target.name != "fp8e4nv" or kind.name != "fp32":
            return np.asarray(own(value, kind, target, rounding))
        limited = np.clip(value.view(np.float32), -448, 448)
        return limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    converted.rounds = True  # type: ignore[attr-defined]
    interpreter._convert_float = converted


def run(
    op_name: str,
    arrays: list[np.ndarray],
    dtypes: list[str],
    attributes: dict[str, Any],
    tactic: int = 0,
    tile: tuple[int, ...] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Launches one op; gives the inputs as they were stored in ``dtypes`` and the outputs, all as float64.

    Outputs lie between guard zones and are full of NaN before; raises AssertionError where a guard was written.
    """
    import torch
    from normdeploy_plugins._launch import Tensor, Tile
    from normdeploy_plugins.ops import BY_NAME

    _round_as_gpus_do()
    op = BY_NAME[op_name]
    stored = [torch.from_numpy(np.ascontiguousarray(a)).to(torch_dtype(d)) for a, d in zip(arrays, dtypes, strict=True)]
    tensors = [Tensor(tuple(a.shape), d) for a, d in zip(arrays, dtypes, strict=True)]
    chosen = Tile(*tile) if tile else op.tiles(tensors, attributes)[tactic]
    launch = op.launch(tensors, attributes, chosen)
    buffers, outputs = [], []
    for out in op.output_tensors(tensors, attributes):
        size = int(np.prod(out.shape))
        buffer = poisoned(size, out.dtype)
        buffers.append(buffer)
        outputs.append(buffer[GUARD : GUARD + size].view(out.shape))
    launch.kernel[(launch.grid,)](*stored, *launch.scalars.values(), *outputs, **launch.constants)
    for buffer in buffers:
        assert untouched(buffer), f"{op_name} wrote outside its output"
    return [s.double().numpy() for s in stored], [o.double().numpy() for o in outputs]


def write_outside() -> None:
    """A launch with one row more than there is, to see that the guard zones find it."""
    import torch
    from normdeploy_plugins.layer_norm import layer_norm_kernel

    x = torch.randn(3, 64)
    buffer = torch.full((2 * GUARD + 2 * 64,), float("nan"))
    layer_norm_kernel[(1,)](
        x,
        torch.ones(64),
        torch.zeros(64),
        3,
        64,
        buffer[GUARD : GUARD + 2 * 64],
        EPSILON=1e-5,
        DDOF=0,
        ROWS=4,
        BLOCK=64,
        LOOP=False,
    )
    assert torch.cat((buffer[:GUARD], buffer[-GUARD:])).isnan().all(), "wrote outside its output"
