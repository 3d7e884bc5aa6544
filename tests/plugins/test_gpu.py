"""On a GPU: what TensorRT would be given, launched by the driver API on fresh random inputs, against the float64 reference.

`make test-gpu`; without a GPU all of this is skipped. Outputs are poisoned with NaN and lie between guard zones.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here: the kernels were not launched (run `make test-gpu` where there is one)", allow_module_level=True)
pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: the kernels can't be launched")

from normdeploy_plugins._aot import compile_launch
from normdeploy_plugins._launch import Tensor
from normdeploy_plugins.driver import Kernel
from normdeploy_plugins.ops import BY_NAME

from .cases import UNIT, Case, allowed
from .interpreted import GUARD, torch_dtype
from .test_numerics import CASES

SEED = int(os.environ.get("SEED") or int.from_bytes(os.urandom(3), "big"))
CAPABILITY = torch.cuda.get_device_capability()


@pytest.fixture(autouse=True, scope="module")
def said() -> None:
    print(f"SEED={SEED} repeats this run, on {torch.cuda.get_device_name()}", file=sys.stderr)


def on_gpu(case: Case, arrays: list[np.ndarray], tactic: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """One tactic of an op: the inputs as they were stored and the outputs, in float64."""
    op = BY_NAME[case.op]
    stored = [torch.from_numpy(np.ascontiguousarray(a)).to(torch_dtype(d)).cuda() for a, d in zip(arrays, case.dtypes(), strict=True)]
    tensors = [Tensor(tuple(a.shape), d) for a, d in zip(arrays, case.dtypes(), strict=True)]
    results = op.output_tensors(tensors, case.attributes)
    launch = op.launch(tensors, case.attributes, op.tiles(tensors, case.attributes)[tactic])
    compiled = compile_launch(op, launch, tensors, results, CAPABILITY)
    kernel = Kernel.load(compiled.name, compiled.ptx.encode(), compiled.warps * 32, compiled.shared)
    buffers = [torch.full((int(np.prod(r.shape)) + 2 * GUARD,), torch.nan, dtype=torch_dtype(r.dtype), device="cuda") for r in results]
    outputs = [b[GUARD : b.numel() - GUARD].view(r.shape) for b, r in zip(buffers, results, strict=True)]
    extra = [launch.scalars[name] for name in compiled.arguments]
    pointers = [b.data_ptr() + GUARD * b.element_size() for b in buffers]
    kernel.launch(launch.grid, [s.data_ptr() for s in stored], extra, pointers, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for buffer in buffers:
        assert torch.cat((buffer[:GUARD], buffer[-GUARD:])).isnan().all(), f"{case.op} wrote outside its output"
    return [s.double().cpu().numpy() for s in stored], [o.double().cpu().numpy() for o in outputs]


LARGE = [
    Case("LayerNorm", (4096, 4096), {"epsilon": 1e-5, "axis": -1, "ddof": 0}, "fp16"),
    Case("AddRMSNorm", (2048, 16384), {"epsilon": 1e-5, "offset": 0.0}, "bf16"),
    Case("GroupNormSiLU", (8, 320, 64, 64), {"epsilon": 1e-5, "num_groups": 32, "channels_last": 0}, "fp16"),
    Case("GroupNormSiLU", (8, 64, 64, 320), {"epsilon": 1e-5, "num_groups": 32, "channels_last": 1}, "fp16"),
    Case("ChannelLayerNorm", (16, 192, 56, 56), {"epsilon": 1e-6}, "fp16"),
]


@pytest.mark.parametrize("case", [c for c in CASES if c.tile is None] + LARGE, ids=str)
def test_every_tactic_against_reference(case: Case) -> None:
    op = BY_NAME[case.op]
    arrays = case.arrays(SEED)
    tiles = op.tiles([Tensor(tuple(a.shape), d) for a, d in zip(arrays, case.dtypes(), strict=True)], case.attributes)
    for tactic in range(len(tiles)):
        stored, outputs = on_gpu(case, arrays, tactic)
        if "residual" in op.inputs:
            exact = stored[0] + stored[1]
            assert (np.abs(outputs[1] - exact) <= UNIT[case.dtype] * np.abs(exact)).all()
            stored = [outputs[1], np.zeros_like(exact), *stored[2:]]
        expected = op.reference(*stored, **case.attributes)
        expected = expected[0] if isinstance(expected, tuple) else expected
        if expected.size:
            excess = np.abs(outputs[0] - expected) / allowed(case, stored, expected, case.dtype)
            assert excess.max() <= 1, f"{tiles[tactic]}: {excess.max():.2f} of the bound (SEED={SEED})"


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize(("shape", "axis"), [((3, 5, 40, 41), 1), ((7, 1000), 1), ((2, 9, 3), -1), ((0, 4, 4), 1), ((8, 64, 112, 112), 1)])
def test_scale_and_shift(shape: tuple[int, ...], axis: int, activation: str) -> None:
    case = Case("ScaleShift", shape, {"axis": axis, "activation": activation})
    for tactic in range(len(BY_NAME[case.op].tiles([Tensor(shape, "fp32")], case.attributes))):
        stored, (y,) = on_gpu(case, case.arrays(SEED), tactic)
        magnitude = BY_NAME[case.op].reference(*map(np.abs, stored), axis=axis, activation="none")
        assert (np.abs(y - BY_NAME[case.op].reference(*stored, **case.attributes)) <= 8 * UNIT["fp32"] * magnitude).all()


def two_launches(first: Case, second: Case) -> None:
    """Statistics by the first kernel, given to the second."""
    arrays = second.arrays(SEED)
    _, (statistics,) = on_gpu(first, arrays[:1], 0)
    for tactic in range(len(BY_NAME[second.op].tiles([Tensor(second.shape, second.dtype)], second.attributes))):
        stored, (y,) = on_gpu(second, [arrays[0], statistics, *arrays[2:]], tactic)
        expected = BY_NAME[second.op].reference(*stored, **second.attributes)
        assert (np.abs(y - expected) <= allowed(second, stored, expected, second.dtype)).all()


def test_a_long_row_in_two_launches() -> None:
    shape, long = (2, 200_000), {"axis": -1, "groups": 1, "splits": 16, "channels_last": 0}
    two_launches(
        Case("NormStatistics", shape, long, data="offset"), Case("LayerNormApply", shape, {"epsilon": 1e-5, "axis": -1}, data="offset")
    )


@pytest.mark.parametrize(("shape", "last"), [((1, 320, 128, 128), 0), ((1, 128, 128, 320), 1)])
def test_large_groups_in_two_launches(shape: tuple[int, ...], last: int) -> None:
    statistics = {"axis": 1, "groups": 32, "splits": 8, "channels_last": last}
    apply = {"epsilon": 1e-5, "num_groups": 32, "activation": "silu", "channels_last": last}
    two_launches(Case("NormStatistics", shape, statistics, "fp16"), Case("GroupNormApply", shape, apply, "fp16"))


@pytest.mark.skipif(torch.cuda.mem_get_info()[0] < 12 * 2**30, reason="less than 12 GiB of GPU memory are free")
def test_more_than_2_to_the_31_elements() -> None:
    n, rows = 4096, 2**31 // 4096 + 8
    op, attributes = BY_NAME["LayerNorm"], {"epsilon": 1e-5, "axis": -1, "ddof": 0}
    x = torch.randn(8, n, device="cuda", dtype=torch.float16).repeat(rows // 8, 1)
    y, gamma, beta = torch.full_like(x, torch.nan), torch.ones_like(x[0]), torch.zeros_like(x[0])
    tensors = [Tensor(tuple(t.shape), "fp16") for t in (x, gamma, beta)]
    launch = op.launch(tensors, attributes, op.tiles(tensors, attributes)[0])
    compiled = compile_launch(op, launch, tensors, tensors[:1], CAPABILITY)
    kernel = Kernel.load(compiled.name, compiled.ptx.encode(), compiled.warps * 32, compiled.shared)
    pointers = [t.data_ptr() for t in (x, gamma, beta)]
    kernel.launch(launch.grid, pointers, [rows], [y.data_ptr()], torch.cuda.current_stream().cuda_stream)
    assert torch.equal(y[-8:], y[:8])
    assert not y[-8:].isnan().any()


def test_tensorrt_itself() -> None:
    """The full TensorRT, where it is installed: an engine with a plugin of ours, run and compared."""
    trt: Any = pytest.importorskip("tensorrt", reason="the full TensorRT is not installed: no engine was built")
    import tensorrt.plugin as trtp
    from normdeploy_plugins import qdp

    qdp.register()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)
    network = builder.create_network(flags | 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    names, shapes = ("x", "residual", "gamma", "beta"), ((4, 77, 768), (4, 77, 768), (768,), (768,))
    given = [network.add_input(name, trt.float16, shape) for name, shape in zip(names, shapes, strict=True)]
    layer = network.add_plugin(trtp.op.normdeploy.AddLayerNorm(*given, epsilon=1e-5), aot=True)
    for i, name in enumerate(("y", "sum")):
        layer.get_output(i).name = name
        network.mark_output(layer.get_output(i))
    engine = trt.Runtime(logger).deserialize_cuda_engine(builder.build_serialized_network(network, builder.create_builder_config()))
    context = engine.create_execution_context()
    held = {n: torch.randn(s, device="cuda", dtype=torch.float16) for n, s in zip(names, shapes, strict=True)}
    held |= {n: torch.full(shapes[0], torch.nan, device="cuda", dtype=torch.float16) for n in ("y", "sum")}
    for name, tensor in held.items():
        context.set_tensor_address(name, tensor.data_ptr())
    assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    total = held["sum"].double().cpu().numpy()
    case = Case("AddLayerNorm", shapes[0], {"epsilon": 1e-5}, "fp16")
    stored = [total, np.zeros_like(total), *(held[n].double().cpu().numpy() for n in ("gamma", "beta"))]
    expected, _ = BY_NAME["AddLayerNorm"].reference(*stored, epsilon=1e-5)
    assert torch.equal(held["sum"], held["x"] + held["residual"])
    assert (np.abs(held["y"].double().cpu().numpy() - expected) <= allowed(case, stored, expected, "fp16")).all()
