"""``verify`` with an ONNX file, a ModelProto or a session as the reference: right files pass, planted errors fail, all
told."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import normdeploy
from normdeploy.errors import InputError
from normdeploy.inputs.input_ranges import resolve_input_ranges
from normdeploy.model import Dim, InputSpec, ModelSignature
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from normdeploy.storage.export_record import write_record
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.reference_models import AS_IT_IS, FloatReference, open_original

RNG = np.random.default_rng(3)
W = RNG.standard_normal((16, 12)).astype(np.float32)
GAMMA, BETA = (RNG.standard_normal(12).astype(np.float32) for _ in range(2))
DECOMPOSED = """
    <ir_version: 8, opset_import: ["": 18]>
    net (float[batch, 16] x) => (float[batch, 12] y, int64[batch] best)
    <int64[1] last = {-1}, float two = {2.0}, float epsilon = {1e-5}> {
        h = MatMul(x, w)
        mean = ReduceMean(h, last)
        away = Sub(h, mean)
        square = Pow(away, two)
        variance = ReduceMean(square, last)
        shifted = Add(variance, epsilon)
        deviation = Sqrt(shifted)
        normal = Div(away, deviation)
        scaled = Mul(normal, gamma)
        y = Add(scaled, beta)
        best = ArgMax <axis = -1, keepdims = 0> (y)
    }"""
FUSED = """
    <ir_version: 8, opset_import: ["": 18]>
    net (float[n, 16] input) => (float[n, 12] out, int64[n] index) {
        h = MatMul(input, w)
        out = LayerNormalization <axis = -1, epsilon = 1e-5> (h, gamma, beta)
        index = ArgMax <axis = -1, keepdims = 0> (out)
    }"""


def model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(text)
    held = {"w": W, "gamma": GAMMA, "beta": BETA} | weights
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in held.items())
    return proto


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    onnx.save(model(DECOMPOSED), folder / "a.onnx")
    onnx.save(model(FUSED), folder / "b.onnx")
    return folder


def verified(reference: object, file: Path, **options: object) -> Comparison:
    return normdeploy.verify(reference, file, dims=["batch=1:3:17"], **options)  # type: ignore[arg-type]


def given(reference: Path, how: str) -> object:
    """The reference as a path, a text, a proto, or a session on its path or bytes."""
    return {
        "path": lambda: reference,
        "text": lambda: str(reference),
        "proto": lambda: onnx.load(reference),
        "session": lambda: ort.InferenceSession(str(reference), providers=["CPUExecutionProvider"]),
        "session of bytes": lambda: ort.InferenceSession(reference.read_bytes(), providers=["CPUExecutionProvider"]),
    }[how]()


@pytest.mark.parametrize("how", ["path", "text", "proto", "session", "session of bytes"])
def test_the_same_function_in_other_nodes_under_other_names(how: str, folder: Path) -> None:
    comparison = verified(given(folder / "a.onnx", how), folder / "b.onnx")
    assert comparison, comparison.results
    assert comparison.reference == ("a.onnx" if how in ("path", "text", "session") else "net")
    assert {r.runtime for r in comparison.results if not r.file} == {AS_IT_IS}
    assert "b.onnx: names matched by order: input is x, out is y, index is best" in comparison.notes
    assert any("one outlier" in case for case in comparison.cases)


def test_no_false_alarm_on_the_fused_side(folder: Path) -> None:
    """Constant rows hang on the mean's rounding, which the fused node makes otherwise."""
    comparison = normdeploy.verify(folder / "b.onnx", folder / "a.onnx", dims=["n=1:4:9"], seeds=8)
    assert comparison, comparison.results


FAULTS: dict[str, Callable[[], onnx.ModelProto]] = {
    "epsilon": lambda: model(FUSED.replace("1e-5", "1.2e-5")),
    "one weight": lambda: model(FUSED, w=W + 1e-4 * np.eye(16, 12, dtype=np.float32)),
    "one gamma": lambda: model(FUSED, gamma=GAMMA * (1 + 1e-4 * np.eye(1, 12, 3, dtype=np.float32)[0])),
    "another output": lambda: model(FUSED.replace("ArgMax", "ArgMin")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_error_fails(name: str, folder: Path, tmp_path: Path) -> None:
    onnx.save(FAULTS[name](), tmp_path / "wrong.onnx")
    assert not verified(folder / "a.onnx", tmp_path / "wrong.onnx")


def test_an_altered_weight_is_named(folder: Path, tmp_path: Path) -> None:
    changed = W.copy()
    changed[3, 4] += 1e-5
    onnx.save(model(FUSED, w=changed), tmp_path / "wrong.onnx")
    comparison = verified(folder / "a.onnx", tmp_path / "wrong.onnx")
    (weight,) = (w for w in comparison.weights if not w)
    assert (weight.name, weight.parameter) == ("w", "w")


def test_the_reference_is_float64(folder: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 16)).astype(np.float32)
    h = x.astype(np.float64) @ W.astype(np.float64)
    away = h - h.mean(-1, keepdims=True)
    wanted = (
        away / np.sqrt((away**2).mean(-1, keepdims=True) + np.float64(np.float32(1e-5))) * GAMMA.astype(np.float64)
        + BETA
    )
    for file, name, output in (("a.onnx", "x", "y"), ("b.onnx", "input", "out")):
        runner = OnnxFloat64Runner(onnx.load(folder / file))
        np.testing.assert_allclose(runner.infer({name: x})[output], wanted, rtol=1e-12)
        moved = np.abs(runner.run_rounded({name: x}, 0)[output] - wanted).max()
        assert 1e-9 < moved < 1e-5
        assert not np.array_equal(runner.run_rounded({name: x}, 0)[output], runner.run_rounded({name: x}, 1)[output])


def test_what_was_widened_is_given_up_when_it_is_not_needed(folder: Path, rng: np.random.Generator) -> None:
    """While the runtimes are run, the reference's weights in float64 are not held beside theirs."""
    opened = open_original(folder / "a.onnx")
    reference = FloatReference(opened)
    x = rng.standard_normal((5, 16)).astype(np.float32)
    before = reference.float64_runner.infer({"x": x})["y"]
    held = weakref.ref(reference.float64_runner)
    reference.release_runner()
    gc.collect()
    assert held() is None
    assert opened.coarsest_unit == 2.0**-24
    np.testing.assert_array_equal(reference.float64_runner.infer({"x": x})["y"], before)


def test_half_precision_is_judged_by_the_reference_in_it(folder: Path, tmp_path: Path) -> None:
    normdeploy.optimize(folder / "a.onnx", tmp_path / "half.onnx", precision="fp16")
    comparison = verified(folder / "a.onnx", tmp_path / "half.onnx")
    assert comparison, comparison.results
    assert {r.precision for r in comparison.results} == {"fp16"}
    assert max(r.allowed for r in comparison.results) > 1e-4


def test_what_the_file_does_not_say_is_told(folder: Path) -> None:
    assert open_original(folder / "a.onnx", dims=["batch=1:3:17"]).notes == ()
    (note,) = open_original(folder / "a.onnx").notes
    assert "does not state the sizes of batch: 1 to 64 were tried" in note
    ids = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (int64[?] i) => (float[?] o) { o = Cast <to = 1> (i) }'
    )
    assert [dim.name for spec in open_original(ids).inputs for dim in spec.shape] == ["i_0"]
    assert any("the values of i: mostly 0 and 1" in note for note in open_original(ids).notes)
    assert open_original(ids, ["i:int64[n=1:2:3]{0:9}"]).notes == ()


def test_what_does_not_fit_is_told_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    a, b = folder / "a.onnx", folder / "b.onnx"
    for options, said in (
        ({"dims": ["seq=1:2:3"]}, r"a.onnx has no dynamic dim 'seq'; it has \['batch'\]"),
        ({"inputs": ["z:float32[2]"]}, r"a.onnx has no input 'z'; it has \['x'\]"),
        ({"inputs": ["x:int64[batch,16]"]}, "'x' is float32, but --input says int64"),
        ({"inputs": ["x[batch]"]}, "has 2 dims, but --input says 1"),
        ({"trust": True}, "trust: applies to a PyTorch model"),
        ({"model": "m:f"}, "model: applies to a PyTorch model"),
        ({"drift": True}, "drift compares the modules of a PyTorch model"),
        (
            {"map": ["nothing=x"]},
            r"'nothing', which is not an input or output of any file: b.onnx has \['input', 'out', 'index'\]",
        ),
        (
            {"map": ["input=z"]},
            r"'z', which is not an input or output of the model; it has the inputs \['x'\]"
            r" and the outputs \['y', 'best'\]",
        ),
        ({"map": ["out=y", "index=y"]}, r"\['out', 'index'\] are all mapped to 'y'"),
    ):
        with pytest.raises(InputError, match=said):
            normdeploy.verify(a, b, **options)  # type: ignore[arg-type]
    onnx.save(model(FUSED.replace("float[n, 16] input", "float[n, 15] input")), tmp_path / "other.onnx")
    with pytest.raises(
        InputError, match=r"has the inputs \['input'\], but the model has \['x'\].*input\[\?, 15\] and x\[\?, 16\]"
    ):
        normdeploy.verify(a, tmp_path / "other.onnx")


def test_names_that_are_said(folder: Path, tmp_path: Path) -> None:
    text = FUSED.replace("int64[n] index)", "float[n, 12] y)").replace(
        "index = ArgMax <axis = -1, keepdims = 0> (out)", "y = Neg(out)"
    )
    onnx.save(model(text), tmp_path / "swapped.onnx")
    assert not verified(folder / "a.onnx", tmp_path / "swapped.onnx")
    comparison = verified(folder / "a.onnx", tmp_path / "swapped.onnx", map={"out": "y"})
    made = {r.output: r.verdict for r in comparison.results if r.file}
    assert made == {"y": "pass", "best": "fail"}  # which the file does not have


def test_a_model_that_draws_is_refused(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { r = RandomUniformLike(x) y = Add(x,'
        " r) }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "r.onnx")
    with pytest.raises(InputError, match="it draws random numbers \\(RandomUniformLike\\)"):
        normdeploy.verify(tmp_path / "r.onnx", tmp_path / "r.onnx")


WHAT_IS_NOT_DISTURBED = """
    <ir_version: 8, opset_import: ["": 18]>
    net (float[2, 4, 6] x) => (float[?, ?, ?] y, float[?, ?, ?] z, float[?] r, float[?, ?, ?] p)
    <int64 two = {2}, int64 at = {1},
        float[3] scales = {1.0, 1.0, 2.0}, float exponent = {3.0},
        int64[1] first = {0}, float zero = {0.0}, float one = {1.0}> {
        parts = SplitToSequence <axis = 2> (x, two)
        y = SequenceAt (parts, at)
        z = Resize <mode = "nearest"> (x, , scales)
        shape = Shape <start = 2> (x)
        size = Squeeze (shape, first)
        limit = Cast <to = 1> (size)
        r = Range (zero, limit, one)
        p = Pow (x, exponent)
    }"""


@pytest.mark.parametrize("how", ["infer", "run_rounded", "run_perturbed"])
def test_sizes_exponents_and_scales_are_what_they_are(how: str, rng: np.random.Generator) -> None:
    """Disturbed, a Resize by 2 loses a column, a Range gains a number and a power of −1 becomes NaN."""
    x = -np.abs(rng.standard_normal((2, 4, 6)).astype(np.float32))
    runner = OnnxFloat64Runner(onnx.parser.parse_model(WHAT_IS_NOT_DISTURBED))
    more = {"infer": (), "run_rounded": (3,), "run_perturbed": (1e-7, 3)}[how]
    found = getattr(runner, how)({"x": x}, *more)
    np.testing.assert_allclose(found["y"], x[:, :, 2:4], rtol=1e-6)
    np.testing.assert_allclose(found["z"], x.repeat(2, -1), rtol=1e-6)
    np.testing.assert_array_equal(found["r"], np.arange(6.0))
    np.testing.assert_allclose(found["p"], x.astype(np.float64) ** 3, rtol=1e-5)


def test_an_infinity_that_the_model_does_not_make_fails_a_tolerance() -> None:
    """3e5 is a number of float32 and none of float16: what is infinite is decided by the reference's type."""
    text = '<ir_version: 8, opset_import: ["" : 17]> net (float[4] x) => (float[4] y) <float big = {3e5}> '
    reference = onnx.parser.parse_model(text + "{ z = Mul(x, big) y = Add(z, big) }")
    narrow = onnx.parser.parse_model(
        text + "{ z = Mul(x, big) w = Add(z, big) h = Cast <to = 10> (w) y = Cast <to = 1> (h) }"
    )
    assert not normdeploy.verify(reference, [narrow], tolerance=["y=1e-3:1e-2"])
    assert normdeploy.verify(reference, [reference], tolerance=["y=1e-3:1e-2"])


def test_what_an_exported_file_records_of_its_inputs_is_kept_as_the_reference() -> None:
    """A dim that is the sum of two, a mask, and a range of one size."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (int64[batch, seq] ids, int64[batch, long] mask) =>
        (int64[batch, seq] y)
        { y = Identity(ids) }"""
    )
    past, seq, batch = Dim("past", 0, 4, 8), Dim("seq", 1, 4, 8), Dim("batch", 1, 2, 4)
    specs = (
        InputSpec("ids", "int64", (batch, seq), (0, 9)),
        InputSpec("mask", "int64", (batch, Dim.sum_of((past, seq))), (0, 2), True),
    )
    write_record(proto, ModelSignature(inputs=specs, outputs=("y",), kind="onnx"), {})
    opened = open_original(proto, dims=["seq=1:5:16", "batch=3:3:3"])
    ids, mask = opened.inputs
    assert (ids.shape[1].max, mask.shape[1].max, mask.shape[1].min) == (16, 24, 1)
    assert ids.shape[0] == mask.shape[0] == Dim.from_size(3)
    assert mask.mask
    assert "batch" not in " ".join(opened.notes)
    with pytest.raises(InputError, match="no dynamic dim 'nosuch'"):
        open_original(proto, dims=["nosuch=4:4:4"])


def test_the_sizes_that_optimize_records_of_a_sum_follow_its_terms() -> None:
    body = "{ y = Identity(ids) z = Identity(mask) }"
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> net (int64[batch, seq] ids, int64[batch, long] mask)
        => (int64[batch, seq] y, int64[batch, long] z) {body}"""
    )
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "past + seq"
    past, seq, batch = Dim("past", 0, 4, 8), Dim("seq", 1, 4, 8), Dim("batch", 1, 2, 4)
    specs = (
        InputSpec("ids", "int64", (batch, seq), (0, 9)),
        InputSpec("mask", "int64", (batch, Dim.sum_of((past, seq))), (0, 2), True),
    )
    (ids, mask), _ = resolve_input_ranges(proto, specs, ["past=0:8:40"])
    assert (ids.shape[1].max, mask.shape[1].max, mask.mask) == (8, 48, True)
    with pytest.raises(InputError, match=r"'past \+ seq' is not in any input"):
        resolve_input_ranges(proto, specs, ["past + seq=1:8:100"])


@pytest.mark.parametrize("attributes", ["", "<exclusive = 1>", "<reverse = 1>", "<exclusive = 1, reverse = 1>"])
def test_a_running_sum_loses_more_the_further_it_has_run(attributes: str, rng: np.random.Generator) -> None:
    """Sums of a few numbers are off by a few roundings, those of hundreds by many; where the sum begins at the end, the
    other way round."""
    text = '<ir_version: 8, opset_import: ["": 18]> net (float[64, 512] x) => (float[64, 512] y) <int64 axis = {-1}> '
    runner = OnnxFloat64Runner(onnx.parser.parse_model(text + f"{{ y = CumSum {attributes} (x, axis) }}"))
    feeds = {"x": np.abs(rng.standard_normal((64, 512))).astype(np.float32)}
    exact = runner.infer(feeds)["y"]
    moved = np.sqrt(np.mean([(runner.run_rounded(feeds, seed)["y"] - exact) ** 2 for seed in range(16)], axis=(0, 1)))
    units = moved / (np.maximum(exact.mean(0), 1e-30) * 2.0**-24)
    few, many = (units[::-1], units) if "reverse" in attributes else (units, units[::-1])
    assert few[:8].max() < 2
    assert 5 < many[:8].min() < many[:8].max() < 10


def test_a_file_that_cant_be_read_is_named_and_the_others_are_judged(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[2, 4] x) => (float[2, 4] y) { y = OP (x) }"""
    for name, op in (("right", "Relu"), ("same", "Relu"), ("wrong", "Abs")):
        onnx.save(onnx.parser.parse_model(text.replace("OP", op)), tmp_path / f"{name}.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"junk")
    comparison = normdeploy.verify(tmp_path / "right.onnx", [broken, tmp_path / "same.onnx", tmp_path / "wrong.onnx"])
    assert comparison.outcome == "failed"
    verdicts = {(r.file, r.verdict) for r in comparison.results if r.file}
    assert verdicts == {("same.onnx", "pass"), ("wrong.onnx", "fail")}
    assert any("broken.onnx" in line.reason and "not an ONNX file" in line.reason for line in comparison.not_run)
    assert not normdeploy.verify(tmp_path / "right.onnx", [broken, tmp_path / "same.onnx"])
    with pytest.raises(normdeploy.errors.GraphError, match=r"broken\.onnx"):
        normdeploy.verify(tmp_path / "right.onnx", broken)
