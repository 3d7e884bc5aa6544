"""The runners: the float64 reference against float64 computed by hand, eager and onnxruntime in each type, and what
they refuse."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from normdeploy.errors import GraphError, InputError, NormdeployError, RuntimeUnavailable
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes import Runner, trt_runner
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.runtimes.torch_runners import EagerRunner, Float64Runner
from normdeploy.runtimes.trt_runner import TrtRunner
from normdeploy.verbs.build.build_function import build

EXACT = 1e-14  # relative to the largest element: some 50 roundings of 1.1e-16, far below any narrower type's 6e-8


class Lambda(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def model_of(module: nn.Module, *inputs: str) -> LoadedModel:
    return from_module(module.eval(), inputs=inputs)


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    assert found.dtype == np.float64
    assert found.shape == wanted.shape
    return bool(np.abs(found - wanted).max() <= EXACT * np.abs(wanted).max())


def float64(model: LoadedModel, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(feeds as float64, outputs of the reference)."""
    feeds = model.samples(seed)
    return {k: v.astype(np.float64) if v.dtype.kind not in "iub" else v for k, v in feeds.items()}, Float64Runner(
        model
    ).infer(feeds)


# ------------------------------------------------------------------ the reference


class LlamaNorm(nn.Module):
    """As LLaMA writes it: upcast to float32 inside, back to the input's type, then the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_float64_reaches_into_upcasts(dtype: str) -> None:
    module = LlamaNorm(48).to(getattr(torch, dtype))
    feeds, found = float64(model_of(module, f"x:{dtype}[2,5,48]"))
    x, weight = feeds["x"], module.weight.detach().double().numpy()
    assert close(found["output"], weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))


class MaskedAttention(nn.Module):
    """Scores with float16's lowest number where the mask is 0, as models write masks by hand."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = (1.0 - mask[:, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
        scores = q @ k.transpose(1, 2) / 4.0 + bias
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def test_float64_of_attention_with_a_mask() -> None:
    model = model_of(MaskedAttention(), *(f"{n}:float16[2,6,16]" for n in "qkv"), "mask:int64[2,6]")
    feeds, found = float64(model)
    assert set(feeds["mask"].ravel()) == {0, 1}
    scores = feeds["q"] @ feeds["k"].transpose(0, 2, 1) / 4 + (1.0 - feeds["mask"][:, None, :]) * -65504.0
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    assert close(found["output"], scores / scores.sum(-1, keepdims=True) @ feeds["v"])


def test_float64_of_fused_attention() -> None:
    attention = nn.functional.scaled_dot_product_attention
    _, found = float64(model := model_of(Lambda(lambda x: attention(x, x, x, is_causal=True)), "x:bfloat16[2,3,7,16]"))
    x = torch.from_numpy(model.samples(0)["x"].astype(np.float64))
    assert close(found["output"], attention(x, x, x, is_causal=True).numpy())


def test_float64_of_eval_batch_norm() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.copy_(torch.rand(5) + 0.5)
    feeds, found = float64(model_of(norm, "x:float32[3,5,4,4]"))
    w, b, m, v = (
        t.detach().double().numpy()[:, None, None]
        for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    assert close(found["output"], w * (feeds["x"] - m) / np.sqrt(v + norm.eps) + b)


def test_float64_of_the_encoder_layer() -> None:
    """Nothing in this layer upcasts, so its own ``.double()`` is the truth."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True).eval()
    feeds, found = float64(model_of(layer, "x:float32[2,5,24]"))
    with torch.no_grad():
        wanted = copy.deepcopy(layer).double()(torch.from_numpy(feeds["x"]))
    assert close(found["output"], wanted.numpy())


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: x / torch.arange(3, 9, dtype=torch.float32), lambda x: x / np.arange(3, 9)),
        (lambda x: x * (torch.arange(1, 7) / 7), lambda x: x * (np.arange(1, 7) / 7)),
        (lambda x: x + torch.full((6,), 0.1), lambda x: x + 0.1),
        (lambda x: torch.zeros_like(x, dtype=torch.float16).add(x) / 3, lambda x: x / 3),
        (lambda x: x.half().type_as(x) * 3, lambda x: x * 3),
        (lambda x: x.new_ones(6) * torch.tensor(0.1) * x, lambda x: np.float64(np.float32(0.1)) * x),
        (lambda x: torch.cumsum(x, -1, dtype=torch.float32) / 3, lambda x: np.cumsum(x, -1) / 3),
        (lambda x: torch.exp(x.to(torch.float8_e4m3fn).to(torch.float32)), np.exp),
        (lambda x: torch.view_as_real(torch.polar(torch.ones_like(x), x))[..., 0], np.cos),
    ],
    ids=["arange", "int / int", "full", "zeros_like", "type_as", "constant", "cumsum", "float8", "complex"],
)
def test_float64_of_what_names_or_picks_a_type(function: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    feeds, found = float64(model_of(Lambda(function), "x:float32[4,6]"))
    assert close(found["output"], wanted(feeds["x"]))


@pytest.mark.filterwarnings("error")
def test_float64_within_autocast_and_control_flow() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.transpose(0, 1)
        return torch.cond(y.sum() > 1e9, lambda v: v.float(), lambda v: torch.softmax(v.float(), -1), (y,))

    feeds, found = float64(model_of(Lambda(function), "x:float32[4,6]"))
    scores = np.exp(feeds["x"] @ feeds["x"].T)
    assert close(found["output"], scores / scores.sum(-1, keepdims=True))


def test_float64_of_constants_that_a_branch_holds_itself() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 1e9, lambda v: v.sum(-1), lambda v: v @ torch.tensor([0.1, 0.2, 0.7]), (x,))

    feeds, found = float64(model_of(Lambda(function), "x:float32[4,3]"))
    assert close(found["output"], feeds["x"] @ np.array([0.1, 0.2, 0.7], np.float32).astype(np.float64))


def test_float64_of_a_decomposed_program() -> None:
    model = model_of(Lambda(lambda x: torch.softmax(x, -1, dtype=torch.float32)), "x:float16[3,7]")
    program = model.program.run_decompositions()
    called = {str(n.target) for n in program.graph.nodes}
    assert {"aten._softmax.default", "aten._to_copy.default"} <= called
    feeds, found = float64(LoadedModel(program=program, inputs=model.inputs, outputs=model.outputs, kind=model.kind))
    scores = np.exp(feeds["x"])
    assert close(found["output"], scores / scores.sum(-1, keepdims=True))


def test_a_cast_that_copied_still_copies_before_an_in_place_operator() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 1
        z = y.float()
        z.mul_(2)
        return y, z

    feeds, found = float64(model_of(Lambda(function), "x:float16[3]"))
    assert (found["output_0"] == feeds["x"]).all()
    assert (found["output_1"] == 2 * feeds["x"]).all()


def test_the_reference_leaves_the_program_in_its_type() -> None:
    model = model_of(LlamaNorm(8).half(), "x:float16[2,8]")
    code, before = model.program.graph_module.code, EagerRunner(model).infer(model.samples(0))["output"]
    Float64Runner(model).infer(model.samples(0))
    assert model.program.graph_module.code == code
    after = EagerRunner(model).infer(model.samples(0))["output"]
    assert after.dtype == np.float16
    assert (after == before).all()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("fixed", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x.relu_() + self.calls + self.fixed


class WritesWeights(nn.Module):
    """Read weights by linear layers, and write to some of them, also by a view and by dropout's result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.viewed = nn.Parameter(torch.ones(3, 3))
        self.dropped = nn.Parameter(torch.ones(3, 3))
        self.table = nn.Embedding(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) @ self.viewed + self.table(torch.zeros(2, dtype=torch.int64))
        self.viewed.t().mul_(2)
        nn.functional.dropout(self.dropped, 0.5, False).add_(1)
        return y.relu_() @ self.viewed @ self.dropped


@pytest.mark.parametrize("runner", [EagerRunner, Float64Runner])
def test_a_run_that_writes_to_weights_begins_from_the_loaded_ones(
    runner: type[EagerRunner] | type[Float64Runner],
) -> None:
    module = WritesWeights().requires_grad_(False)
    model = model_of(module, "x:float32[2,3]")
    state = {k: v.clone() for k, v in model.program.state_dict.items()}
    feeds = model.samples(0)
    with runner(model) as run:
        first, second = run.infer(feeds), run.infer(feeds)
    y = module.linear(torch.from_numpy(feeds["x"])) @ torch.ones(3, 3) + module.table.weight[0]
    expected = y.relu() @ torch.full((3, 3), 2.0) @ torch.full((3, 3), 2.0)
    assert np.allclose(first["output"], expected.numpy(), rtol=1e-5)
    assert (second["output"] == first["output"]).all()
    assert all(torch.equal(state[k], v) for k, v in model.program.state_dict.items())


@pytest.mark.parametrize("runner", [EagerRunner, Float64Runner])
def test_a_run_changes_nothing(runner: type[EagerRunner] | type[Float64Runner]) -> None:
    model = model_of(Counting(), "x:float32[2,3]")
    code, state = model.program.graph_module.code, {k: v.clone() for k, v in model.program.state_dict.items()}
    feeds = model.samples(0)
    kept = feeds["x"].copy()
    with runner(model) as run:
        assert isinstance(run, Runner)
        first, second = run.infer(feeds), run.infer(feeds)
    assert (first["output"] == np.maximum(kept.astype(first["output"].dtype), 0) + 1 + 1).all()
    assert (second["output"] == first["output"]).all()
    assert (feeds["x"] == kept).all()
    assert model.program.graph_module.code == code
    assert all(torch.equal(state[k], v) for k, v in model.program.state_dict.items())


def test_outputs_that_are_no_tensors_are_numbers_or_left_out() -> None:
    model = model_of(Lambda(lambda x: {"y": x + 1, "none": None, "n": x.shape[0]}), "x:float32[n=1:2:4,3]")
    found = EagerRunner(model).infer(model.samples(0, {"n": 3}))
    assert list(found) == ["y", "n"]
    assert found["n"] == 3
    assert found["n"].dtype == np.int64


@torch.library.custom_op("normdeploy_tests::narrow_only", mutates_args=())
def narrow_only(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError(f"no kernel for {x.dtype}")
    return x + 1


@narrow_only.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_without_a_float64_form_is_named() -> None:
    model = model_of(Lambda(lambda x: narrow_only(x)), "x:float32[2]")
    EagerRunner(model).infer(model.samples(0))
    with pytest.raises(
        NormdeployError, match=r"narrow_only.* failed: no kernel for torch\.float64.*no float64 implementation"
    ):
        Float64Runner(model).infer(model.samples(0))
    assert torch.get_default_dtype() == torch.float32


def test_reading_the_bits_of_a_float_is_refused() -> None:
    model = model_of(Lambda(lambda x: x.view(torch.int32) >> 16), "x:float32[2]")
    with pytest.raises(NormdeployError, match=r"reads the bits of a torch\.float32 tensor as torch\.int32"):
        Float64Runner(model)


def test_perturbed_moves_everything_by_the_unit() -> None:
    model = model_of(LlamaNorm(8), "x:float32[2,8]")
    runner, feeds = Float64Runner(model), model.samples(0)
    exact, moved = runner.infer(feeds)["output"], runner.run_perturbed(feeds, 1e-6, seed=0)["output"]
    change = np.abs(moved / exact - 1)
    assert 1e-8 < change.max() < 4e-6  # x, the weight and the norm's own mean each by up to 1e-6
    assert (runner.infer(feeds)["output"] == exact).all()


# ------------------------------------------------------------------ feeds


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({}, r"needs the inputs \['x'\]"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.zeros(1)}, r"has no inputs \['y'\]"),
        ({"x": np.zeros((2, 3))}, "'x' is float32, but got float64"),
        ({"x": np.zeros((2, 4), np.float32)}, r"shape \[n, 3\], but got \[2, 4\]"),
        ({"x": np.zeros(3, np.float32)}, r"shape \[n, 3\], but got \[3\]"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(feeds: dict[str, np.ndarray], said: str) -> None:
    model = model_of(nn.ReLU(), "x:float32[n=1:2:4,3]")
    for runner in (EagerRunner(model), Float64Runner(model)):
        with pytest.raises(InputError, match=said):
            runner.infer(feeds)


def test_a_model_that_does_not_run_says_where() -> None:
    model = model_of(nn.Embedding(4, 3), "ids:int64[2]{0:4}")
    with pytest.raises(InputError, match=r"operator aten\.embedding\.default.* failed: index out of range"):
        EagerRunner(model).infer({"ids": np.array([0, 9])})


# ------------------------------------------------------------------ onnxruntime


def onnx_model(
    *nodes: str, inputs: str = "float[n, 8] x", outputs: str = "float[n, 8] y", constants: str = ""
) -> onnx.ModelProto:
    held = f"<{constants}>" if constants else ""
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {held} {{ {"; ".join(nodes)} }}'
    )


SCALE = "float[8] s = {1, 2, 3, 4, 5, 6, 7, 8}"


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("by_path", [False, True])
def test_onnxruntime_runs_a_model(optimize: bool, by_path: bool, tmp_path: Path) -> None:
    proto: Any = onnx_model("y = LayerNormalization(x, s)", constants=SCALE)
    if by_path:
        onnx.save(proto, tmp_path / "m.onnx")
        proto = tmp_path / "m.onnx"
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    with OrtRunner(proto, optimize=optimize) as runner:
        assert isinstance(runner, Runner)
        assert runner.name == f"onnxruntime (optimizer {'on' if optimize else 'off'})"
        found = runner.infer({"x": x})["y"]
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * np.arange(1, 9)
    assert np.abs(found - wanted).max() < 1e-5  # 16 float32 roundings of numbers up to 20


def test_onnxruntime_reads_external_weights(tmp_path: Path) -> None:
    proto = onnx_model("y = Mul(x, s)", constants=SCALE)
    proto.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.arange(1, 9, dtype=np.float32), "s")
    )  # as bytes
    onnx.save(
        proto,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
        convert_attribute=False,
    )
    assert (tmp_path / "w.bin").stat().st_size == 32
    found = OrtRunner(tmp_path / "m.onnx").infer({"x": np.ones((2, 8), np.float32)})
    assert (found["y"] == np.arange(1, 9)).all()


def test_onnxruntime_takes_and_gives_bfloat16() -> None:
    proto = onnx_model(
        "y = LayerNormalization(x, s)", inputs="bfloat16[n, 8] x, bfloat16[8] s", outputs="bfloat16[n, 8] y"
    )
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(ml_dtypes.bfloat16)
    found = OrtRunner(proto).infer({"x": x, "s": np.ones(8, ml_dtypes.bfloat16)})["y"]
    assert found.dtype == ml_dtypes.bfloat16
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    assert (
        np.abs(found.astype(np.float64) - wanted).max() <= 2.0**-7
    )  # one ulp between 1 and 2; the norm is at most 2.6
    empty = OrtRunner(proto).infer({"x": np.zeros((0, 8), ml_dtypes.bfloat16), "s": np.ones(8, ml_dtypes.bfloat16)})[
        "y"
    ]
    assert empty.shape == (0, 8)


def test_onnxruntime_s_refusals_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="file not found"):
        OrtRunner(tmp_path / "none.onnx")
    (tmp_path / "junk.onnx").write_bytes(b"junk" * 9)
    with pytest.raises(GraphError, match="can't load the model"):
        OrtRunner(tmp_path / "junk.onnx")
    with pytest.raises(RuntimeUnavailable, match="Could not find an implementation for MatMul"):
        OrtRunner(
            onnx_model("y = MatMul(x, w)", inputs="bfloat16[n, 8] x, bfloat16[8, 8] w", outputs="bfloat16[n, 8] y"),
            optimize=False,
        )
    runner = OrtRunner(onnx_model("y = Relu(x)"))
    with pytest.raises(InputError, match="does not run the model on these inputs"):
        runner.infer({"x": np.zeros((2, 9), np.float32)})
    with pytest.raises(InputError, match=r"needs the inputs \['x'\]"):
        runner.infer({"z": np.zeros((2, 8), np.float32)})


# ------------------------------------------------------------------ TensorRT


def test_what_tensorrt_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "no GPU: none here")
    assert trt_runner.describe_missing_runtime("tensorrt-rtx") == "no GPU: none here"
    assert trt_runner.describe_missing_runtime("tensorrt-rtx", gpu=False) is None
    monkeypatch.setattr(trt_runner.importlib.util, "find_spec", lambda name: None)
    assert "TensorRT is not installed; pip install tensorrt" in str(trt_runner.describe_missing_runtime("tensorrt"))
    assert "pip install tensorrt-rtx" in str(trt_runner.describe_missing_runtime("tensorrt-rtx", gpu=False))


def test_an_engine_is_not_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes(b"vtrt and more")
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "no GPU: none here")
    with pytest.raises(RuntimeUnavailable, match=r"TensorRT-RTX \(m\.engine\): no GPU: none here"):
        TrtRunner(engine)


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="engine not found"):
        TrtRunner(tmp_path / "none.engine")
    (tmp_path / "junk.engine").write_bytes(b"\x08\x0a junk")
    with pytest.raises(InputError, match="is not a TensorRT engine"):
        TrtRunner(tmp_path / "junk.engine")
    (tmp_path / "full.engine").write_bytes(b"ftrt and more")
    assert trt_runner.read_runtime(tmp_path / "full.engine") == "tensorrt"


@pytest.mark.skipif(not trt_runner.explain_missing_gpu(), reason="there is a GPU, on which the engine may load")
def test_an_engine_that_does_not_load_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    onnx.save(onnx_model("y = Relu(x)", inputs="float[2, 8] x", outputs="float[2, 8] y"), tmp_path / "m.onnx")
    build(tmp_path / "m.onnx", tmp_path / "m.engine")
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "")
    with pytest.raises(
        NormdeployError,
        match=r"m\.engine can't be loaded on this GPU: .*CUDA driver.*; build it with this version of TensorRT-RTX",
    ):
        TrtRunner(tmp_path / "m.engine")
    assert capfd.readouterr() == ("", "")


def test_one_process_drives_one_of_the_two() -> None:
    code = (
        "from normdeploy.runtimes.trt_runner import select_library; "
        "print(select_library('tensorrt-rtx').__name__); select_library('tensorrt')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "tensorrt_rtx\n"
    assert "RuntimeUnavailable: TensorRT can't be used in a process that already uses TensorRT-RTX" in done.stderr


def test_an_engine_knows_its_profiles() -> None:
    chosen = list[int]()
    runner = TrtRunner.__new__(TrtRunner)
    runner.name, runner._failures = "engine", ()
    ranges = [((1, 8), (2, 8), (4, 8)), ((6, 8), (7, 8), (9, 8))]
    runner._runner = SimpleNamespace(
        engine=SimpleNamespace(get_tensor_profile_shape=lambda _, i: ranges[i], num_optimization_profiles=2),
        get_input_metadata=lambda: {"x": None},
        set_profile=chosen.append,
        infer=lambda feeds: feeds,
    )
    assert [n for n in range(1, 11) if runner.accepts_shapes({"x": np.zeros((n, 8))})] == [1, 2, 3, 4, 6, 7, 8, 9]
    for n in (4, 6, 1):
        runner.infer({"x": np.zeros((n, 8), np.float32)})
    assert chosen == [0, 1, 0]
