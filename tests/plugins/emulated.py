"""An op as TensorRT would launch it, in the emulator: each input and output a buffer of its own, so that one byte
beside it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from normdeploy_plugins._aot import compile_launch
from normdeploy_plugins._launch import Tensor, Tile
from normdeploy_plugins.ops import BY_NAME

from . import emulator
from .cases import Case

GAP = 1 << 44  # between buffers, far more than any offset


class Unknown:
    """A size that is not constant."""

    is_fake = True


def storage(dtype: str) -> np.dtype:
    import ml_dtypes

    quantized = {"i8": np.int8, "fp8e4nv": ml_dtypes.float8_e4m3fn}
    return np.dtype(({"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16} | quantized)[dtype])


def run(
    case: Case,
    arrays: Sequence[np.ndarray],
    tactic: int = 0,
    capability: tuple[int, int] = (9, 0),
    change: Callable[[str], str] = lambda ptx: ptx,
    dynamic: bool = False,
    counts: emulator.Counts | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The inputs as they were stored and the outputs, in float64. Raises Fault, also where a byte of an output was not
    written.

    ``change``: what is done to the PTX before, to see that it is found. ``dynamic``: compiled with no size known.
    ``counts``: filled with what is issued.
    """
    op = BY_NAME[case.op]
    tensors = [Tensor(tuple(a.shape), d) for a, d in zip(arrays, case.dtypes(), strict=True)]
    known = [Tensor((Unknown(),) * len(t.shape), t.dtype) for t in tensors] if dynamic else tensors
    tile = Tile(*case.tile) if case.tile else op.tiles(known, case.attributes)[tactic]
    launch, results = op.launch(tensors, case.attributes, tile), op.output_tensors(tensors, case.attributes)
    compiled = replace(launch, scalars=dict.fromkeys(launch.scalars, Unknown())) if dynamic else launch
    kernel = compile_launch(op, compiled, tensors, results, capability)
    stored = [np.ascontiguousarray(a).astype(storage(d)) for a, d in zip(arrays, case.dtypes(), strict=True)]
    made = [np.zeros(r.shape, storage(r.dtype)) for r in results]
    buffers = [emulator.Buffer(GAP * (i + 1), a.reshape(-1).view(np.uint8)) for i, a in enumerate((*stored, *made))]
    for buffer in buffers[len(stored) :]:
        buffer.written = np.zeros(len(buffer.data), np.uint8)
    pointers = [b.base for b in buffers]
    arguments = [
        *pointers[: len(stored)],
        *(launch.scalars[name] for name in kernel.arguments),
        *pointers[len(stored) :],
    ]
    emulator.run(change(kernel.ptx), arguments, range(launch.grid), emulator.Memory(buffers, counts), kernel.shared)
    for buffer in buffers[len(stored) :]:
        assert buffer.written is not None
        if not buffer.written.all():
            raise emulator.Fault(f"{(buffer.written == 0).sum()} bytes of an output were not written")
    return [s.astype(np.float64) for s in stored], [m.astype(np.float64) for m in made]


def run_last(case: Case, kept: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The last ``kept`` places along the first dim alone, of tensors whose other pages are never touched and so take no
    memory.

    Gives the inputs at those places, and the outputs there.
    """
    op = BY_NAME[case.op]
    small = Case(case.op, (kept, *case.shape[1:]), case.attributes, case.dtype)
    parts = small.arrays(seed)
    grows = {
        "x",
        "residual",
        "gate",
        "statistics",
        *(("scale", "shift") if case.op == "ModulatedLayerNorm" or case.op.startswith("Ada") else ()),
    }
    times = case.shape[0] // kept
    assert times * kept == case.shape[0]
    stored = [p.astype(storage(d)) for p, d in zip(parts, case.dtypes(), strict=True)]
    tensors = [
        Tensor((p.shape[0] * times, *p.shape[1:]) if name in grows else p.shape, d)
        for name, p, d in zip(op.inputs, parts, case.dtypes(), strict=True)
    ]
    launch = op.launch(tensors, case.attributes, op.tiles(tensors, case.attributes)[0])
    results = op.output_tensors(tensors, case.attributes)
    kernel = compile_launch(op, launch, tensors, results, (9, 0))
    buffers, made = [], []
    for i, (tensor, held) in enumerate(zip((*tensors, *results), (*stored, *[None] * len(results)), strict=True)):
        size = int(np.prod(tensor.shape[1:])) * storage(tensor.dtype).itemsize
        own = size * (tensor.shape[0] // times if held is None or op.inputs[i] in grows else tensor.shape[0])
        data = np.zeros(own, np.uint8) if held is None else held.reshape(-1).view(np.uint8)
        # the buffer holds the end of the tensor alone: what lies before it is a fault
        buffers.append(
            emulator.Buffer(
                GAP * (i + 1) + size * tensor.shape[0] - own, data, np.zeros(own, np.uint8) if held is None else None
            )
        )
        if held is None:
            made.append(data.view(storage(tensor.dtype)).reshape(-1, *tensor.shape[1:]))
    pointers = [GAP * (i + 1) for i in range(len(buffers))]
    arguments = [
        *pointers[: len(stored)],
        *(launch.scalars[name] for name in kernel.arguments),
        *pointers[len(stored) :],
    ]
    blocks, rest = divmod(launch.grid, times)
    assert not rest
    emulator.run(
        kernel.ptx, arguments, range(launch.grid - blocks, launch.grid), emulator.Memory(buffers), kernel.shared
    )
    assert all(b.written is None or b.written.all() for b in buffers)
    return [s.astype(np.float64) for s in stored], [m.astype(np.float64) for m in made]
