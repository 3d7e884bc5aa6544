"""Runs kernels in Triton's interpreter on the CPU: in a process of its own, as TRITON_INTERPRET has to be set before
triton is imported.

Everything here runs in that process (see ``conftest.py``); numpy arrays go in and come out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GUARD = 4096  # elements of NaN on both sides of each output: a write there is found


def torch_dtype(name: str) -> Any:
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]


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

    op = BY_NAME[op_name]
    stored = [torch.from_numpy(np.ascontiguousarray(a)).to(torch_dtype(d)) for a, d in zip(arrays, dtypes, strict=True)]
    tensors = [Tensor(tuple(a.shape), d) for a, d in zip(arrays, dtypes, strict=True)]
    chosen = Tile(*tile) if tile else op.tiles(tensors, attributes)[tactic]
    launch = op.launch(tensors, attributes, chosen)
    buffers, outputs = [], []
    for out in op.output_tensors(tensors, attributes):
        size = int(np.prod(out.shape))
        buffer = torch.full((size + 2 * GUARD,), float("nan"), dtype=torch_dtype(out.dtype))
        buffers.append(buffer)
        outputs.append(buffer[GUARD : GUARD + size].view(out.shape))
    launch.kernel[(launch.grid,)](*stored, *launch.scalars.values(), *outputs, **launch.constants)
    for buffer in buffers:
        assert torch.cat((buffer[:GUARD], buffer[-GUARD:])).isnan().all(), f"{op_name} wrote outside its output"
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
