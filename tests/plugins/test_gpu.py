"""On a GPU: what TensorRT would be given, launched by the driver API on fresh random inputs, against the float64
reference.

`make test-gpu`; without a GPU all of this is skipped. Outputs are poisoned with NaN and lie between guard zones.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(
        "no GPU here: the kernels were not launched (run `make test-gpu` where there is one)", allow_module_level=True
    )
pytest.importorskip(
    "cuda.bindings.driver", reason="cuda-bindings is not installed: the kernels can't be launched", exc_type=ImportError
)

from normdeploy_plugins._aot import CAPABILITIES, FP8_SINCE, compile_launch
from normdeploy_plugins._launch import Tensor, Tile
from normdeploy_plugins.driver import Kernel
from normdeploy_plugins.ops import BY_NAME

from normdeploy.errors import RuntimeUnavailable
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.runtimes.trt_runner import TrtRunner
from normdeploy.verbs.build.build_function import build

from ..rewriting.test_epilogue_fusion import KERNEL, SHAPES, call
from .cases import MORE, UNUSUAL, Case, allowed, judge, sweep, unusual
from .emulated import Unknown
from .interpreted import GUARD, poisoned, torch_dtype, untouched
from .test_emulated import DYNAMIC
from .test_numerics import CASES
from .usual import USUAL

SEED = int(os.environ.get("SEED") or int.from_bytes(os.urandom(3), "big"))
CAPABILITY = torch.cuda.get_device_capability()


@pytest.fixture(autouse=True, scope="module")
def said() -> None:
    print(f"SEED={SEED} repeats this run, on {torch.cuda.get_device_name()}", file=sys.stderr)


def runs(case: Case) -> bool:
    """Whether the GPU has the types: FP8 from 8.9 on."""
    return case.attributes.get("to") != "fp8" or CAPABILITY >= FP8_SINCE


def tensors_of(case: Case, arrays: list[np.ndarray]) -> list[Tensor]:
    return [Tensor(tuple(a.shape), d) for a, d in zip(arrays, case.dtypes(), strict=True)]


def tiles_of(case: Case, tensors: list[Tensor]) -> list[Tile]:
    """The case's own tile, else those of every tactic."""
    return [Tile(*case.tile)] if case.tile else BY_NAME[case.op].tiles(tensors, case.attributes)


def on_gpu(
    case: Case,
    arrays: list[np.ndarray],
    tile: Tile,
    capability: tuple[int, int] = CAPABILITY,
    *,
    dynamic: bool = False,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Launch one tactic of an op, compiled for ``capability``.

    Args:
        dynamic: compile it with no size known, as for an engine of dynamic sizes.

    Returns:
        The inputs as they were stored and the outputs, in float64.
    """
    op = BY_NAME[case.op]
    stored = [
        torch.from_numpy(np.ascontiguousarray(a)).to(torch_dtype(d)).cuda()
        for a, d in zip(arrays, case.dtypes(), strict=True)
    ]
    tensors = tensors_of(case, arrays)
    results = op.output_tensors(tensors, case.attributes)
    launch = op.launch(tensors, case.attributes, tile)
    known = replace(launch, scalars=dict.fromkeys(launch.scalars, Unknown())) if dynamic else launch
    compiled = compile_launch(op, known, tensors, results, capability)
    kernel = Kernel.load(compiled.name, compiled.ptx.encode(), compiled.warps * 32, compiled.shared)
    buffers = [poisoned(int(np.prod(r.shape)), r.dtype, "cuda") for r in results]
    outputs = [b[GUARD : b.numel() - GUARD].view(r.shape) for b, r in zip(buffers, results, strict=True)]
    extra = [launch.scalars[name] for name in compiled.arguments]
    pointers = [b.data_ptr() + GUARD * b.element_size() for b in buffers]
    kernel.launch(launch.grid, [s.data_ptr() for s in stored], extra, pointers, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for buffer in buffers:
        assert untouched(buffer), f"{case.op} wrote outside its output"
    return [s.double().cpu().numpy() for s in stored], [o.double().cpu().numpy() for o in outputs]


LARGE = [
    Case("LayerNorm", (4096, 4096), {"epsilon": 1e-5, "axis": -1, "ddof": 0}, "fp16"),
    Case("AddRMSNorm", (2048, 16384), {"epsilon": 1e-5, "offset": 0.0}, "bf16"),
    Case("GroupNormSiLU", (8, 320, 64, 64), {"epsilon": 1e-5, "num_groups": 32, "channels_last": 0}, "fp16"),
    Case("GroupNormSiLU", (8, 64, 64, 320), {"epsilon": 1e-5, "num_groups": 32, "channels_last": 1}, "fp16"),
    Case("ChannelLayerNorm", (16, 192, 56, 56), {"epsilon": 1e-6}, "fp16"),
    Case("ScaleShift", (8, 64, 112, 112), {"axis": 1, "activation": "silu"}, "fp16"),
]


@pytest.mark.parametrize(
    "case", list({str(c): c for c in (*CASES, *sweep(), *MORE, *LARGE) if runs(c)}.values()), ids=str
)
def test_every_tactic_against_reference(case: Case) -> None:
    arrays = case.arrays(SEED)
    for tile in tiles_of(case, tensors_of(case, arrays)):
        judge(case, *on_gpu(case, arrays, tile), f"({tile}, SEED={SEED})")


@pytest.mark.parametrize("op", [op for op in UNUSUAL if runs(unusual(op, False)[0])])
@pytest.mark.parametrize("looped", [False, True])
def test_what_is_no_number_stays_in_its_row(op: str, looped: bool) -> None:
    case, arrays = unusual(op, looped, SEED)
    for tile in tiles_of(case, tensors_of(case, arrays)):
        judge(case, *on_gpu(case, arrays, tile), f"({tile}, SEED={SEED})")


@pytest.mark.parametrize("case", [case for case in DYNAMIC if runs(case)], ids=str)
def test_sizes_known_when_it_runs_alone(case: Case) -> None:
    """One kernel for all sizes; empty tensors too, where a division by 0 must do no harm."""
    arrays = case.arrays(SEED)
    unknown = [Tensor((Unknown(),) * len(t.shape), t.dtype) for t in tensors_of(case, arrays)]
    for tile in tiles_of(case, unknown):
        judge(case, *on_gpu(case, arrays, tile, dynamic=True), f"({tile}, SEED={SEED})")


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c <= CAPABILITY], ids=str)
@pytest.mark.parametrize("name", USUAL)
def test_kernels_of_older_gpus(name: str, capability: tuple[int, int]) -> None:
    """What is compiled for an older GPU runs here too, as PTX does on every later one."""
    shape, attributes = USUAL[name]
    case = Case(name, shape, attributes, "bf16")
    arrays = case.arrays(SEED)
    tile = tiles_of(case, tensors_of(case, arrays))[0]
    judge(case, *on_gpu(case, arrays, tile, capability), f"({tile}, SEED={SEED})")


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_an_activation_keeps_a_nan(activation: str) -> None:
    case = Case("ScaleShift", (2, 3, 40), {"axis": 1, "activation": activation}, "fp16")
    arrays = case.arrays(SEED)
    arrays[0][1, 2, 5] = np.nan
    for tile in tiles_of(case, tensors_of(case, arrays)):
        _, (y,) = on_gpu(case, arrays, tile)
        assert np.argwhere(np.isnan(y)).tolist() == [[1, 2, 5]]


def two_launches(first: Case, second: Case) -> None:
    """Statistics by the first kernel, given to the second."""
    arrays = second.arrays(SEED)
    _, (statistics,) = on_gpu(first, arrays[:1], tiles_of(first, tensors_of(first, arrays[:1]))[0])
    arrays[1] = statistics
    for tile in tiles_of(second, tensors_of(second, arrays)):
        judge(second, *on_gpu(second, arrays, tile), f"({tile}, SEED={SEED})")


def test_a_long_row_in_two_launches() -> None:
    shape, long = (2, 200_000), {"axis": -1, "groups": 1, "splits": 16, "channels_last": 0}
    two_launches(
        Case("NormStatistics", shape, long, data="offset"),
        Case("LayerNormApply", shape, {"epsilon": 1e-5, "axis": -1}, data="offset"),
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


@pytest.mark.parametrize("op", sorted(SHAPES))
@pytest.mark.parametrize("runtime", ["onnxruntime", "tensorrt-rtx"])
def test_function_bodies_on_other_runtimes(op: str, runtime: str, tmp_path: Path) -> None:
    """What runs where our kernels can't: a model of one call, on this GPU; skipped in the runtime's own words where it
    does not work."""
    model, arrays, _ = call(op, SHAPES[op], np.float16, 21)
    feeds = dict(zip((i.name for i in model.graph.input), arrays, strict=True))
    try:
        if runtime == "onnxruntime":
            with OrtRunner(model, provider="cuda") as runner:
                made = runner.infer(feeds)
        else:
            onnx.save(model, tmp_path / "one.onnx")
            build(tmp_path / "one.onnx", tmp_path / "one.engine", library=runtime)
            with TrtRunner(tmp_path / "one.engine") as runner:
                made = runner.infer(feeds)
    except RuntimeUnavailable as reason:
        pytest.skip(f"{runtime}: {reason}")
    expected = BY_NAME[op].reference(*(a.astype(np.float64) for a in arrays), epsilon=0.25, **KERNEL.get(op, {}))
    for y, e in zip(made.values(), expected if isinstance(expected, tuple) else [expected], strict=True):
        # ten roundings in the type itself, as in tests/rewriting/test_epilogue_fusion.py
        assert np.abs(y - e).max() <= 10 * np.finfo(np.float16).eps * (1 + np.abs(e).max())


def test_tensorrt_itself() -> None:
    """The full TensorRT, where it is installed: an engine with a plugin of ours, run and compared."""
    trt: Any = pytest.importorskip(
        "tensorrt", reason="the full TensorRT is not installed: no engine was built", exc_type=ImportError
    )
    import tensorrt.plugin as trtp
    from normdeploy_plugins import qdp

    qdp.register()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    known = (
        trt.NetworkDefinitionCreationFlag.__members__
    )  # TensorRT 11 has strongly typed networks alone, and no flag for it
    flags = sum(1 << int(known[name]) for name in ("PREFER_AOT_PYTHON_PLUGINS", "STRONGLY_TYPED") if name in known)
    network = builder.create_network(flags)
    names, shapes = ("x", "residual", "gamma", "beta"), ((4, 77, 768), (4, 77, 768), (768,), (768,))
    given = [network.add_input(name, trt.float16, shape) for name, shape in zip(names, shapes, strict=True)]
    layer = network.add_plugin(trtp.op.normdeploy.AddLayerNorm(*given, epsilon=np.array([1e-5], np.float32)), aot=True)
    for i, name in enumerate(("y", "sum")):
        layer.get_output(i).name = name
        network.mark_output(layer.get_output(i))
    engine = trt.Runtime(logger).deserialize_cuda_engine(
        builder.build_serialized_network(network, builder.create_builder_config())
    )
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
