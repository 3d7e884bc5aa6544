"""``verify`` of several files at once, on the user's own inputs, with onnxruntime's culprit named and the drift over
layers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from torch import nn
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes import trt_runner
from normdeploy.runtimes.torch_runners import Float64Runner
from normdeploy.storage.export_record import write_record
from normdeploy.storage.onnx_files import save_onnx
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.drift_outline import outline_drift
from normdeploy.verbs.verify.file_comparison import compare_files
from normdeploy.verbs.verify.optimizer_bisect import RULES, list_applied_optimizers, minimize_disabled
from normdeploy.verbs.verify.output_results import OutputResult
from normdeploy.verbs.verify.runtime_candidates import OFF, ON, NotRun

SPECS = ["x:float32[batch=1:2:4,48]", "y:float32[batch,48]"]


class Net(nn.Module):
    """Two norms with a residual stream between, and two inputs with one dynamic dim."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            nn.Linear(48, 48),
            nn.LayerNorm(48),
            nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48)),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.norm(torch.tanh(self.first(x + y))))


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return from_module(Net().eval(), inputs=SPECS)


@pytest.fixture(scope="module")
def folder(net: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """right.onnx, wrong.onnx (another epsilon in the first norm), half.onnx, and an engine by its first bytes."""
    folder = tmp_path_factory.mktemp("files")
    proto = export_to_proto(net)
    save_onnx(proto, folder / "right.onnx")
    norm = next(n for n in proto.graph.node if n.op_type == "LayerNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = 1e-3
    save_onnx(proto, folder / "wrong.onnx")
    normdeploy.optimize(folder / "right.onnx", folder / "half.onnx", precision="fp16")
    (folder / "plan").write_bytes(b"ptrt and more")
    return folder


def verdicts(comparison: Comparison) -> dict[tuple[str, str], str]:
    return {(r.file, r.runtime): r.verdict for r in comparison.results}


# ------------------------------------------------------------------ several files


def test_each_file_is_judged_by_eager_in_its_own_precision(
    net: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "no GPU: none here")
    files = [folder / name for name in ("right.onnx", "half.onnx", "plan")]
    comparison = compare_files(net, files, seeds=1)
    assert comparison
    found = {(r.file, r.runtime): r for r in comparison.results}
    assert [r.precision for r in comparison.results if r.runtime == "eager"] == ["", "fp16"]
    assert (found["right.onnx", OFF].precision, found["right.onnx", OFF].dtype) == ("", "float32")
    assert (found["half.onnx", OFF].precision, found["half.onnx", OFF].dtype) == ("fp16", "float16")
    # the bounds differ as the units of roundoff do, 2^13 apart
    assert found["half.onnx", OFF].allowed > 500 * found["right.onnx", OFF].allowed
    assert comparison.columns[0] == "file"
    assert [row[0] for row in comparison.rows()] == ["", "(in float16)", *["right.onnx"] * 2, *["half.onnx"] * 3]
    assert {len(row) for row in comparison.table()} == {len(comparison.columns)}
    assert [(m.runtime, m.file) for m in comparison.not_run if m.file] == [("TensorRT (plan)", "plan")]


def test_one_wrong_file_among_right_ones_is_the_one_that_fails(net: LoadedModel, folder: Path) -> None:
    comparison = compare_files(net, [folder / "right.onnx", folder / "wrong.onnx"], seeds=1)
    assert not comparison
    assert {file for (file, _), verdict in verdicts(comparison).items() if verdict == "fail"} == {"wrong.onnx"}
    assert verdicts(comparison)["right.onnx", OFF] == "pass"


@pytest.mark.parametrize("runtime", ["any", "onnxruntime"])
def test_a_file_of_the_fastest_forms_that_fails_names_the_other_choice(
    net: LoadedModel, folder: Path, tmp_path: Path, runtime: str
) -> None:
    files = {name: onnx.load(folder / f"{name}.onnx") for name in ("right", "wrong")}
    for name, proto in files.items():
        write_record(proto, net.as_signature, {"runtime": runtime})
        save_onnx(proto, tmp_path / f"{name}.onnx")
    comparison = compare_files(net, [tmp_path / "right.onnx", tmp_path / "wrong.onnx"], seeds=1)
    said = [note for note in comparison.notes if "--runtime onnxruntime-accurate" in note]
    assert [note.split()[0] for note in said] == (["wrong.onnx"] if runtime == "onnxruntime" else [])


def test_files_of_one_name_go_by_their_paths_and_none_is_run_twice(
    net: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "right.onnx").write_bytes((folder / "right.onnx").read_bytes())
    files = [folder / "right.onnx", tmp_path / "right.onnx", tmp_path / "." / "right.onnx"]
    comparison = compare_files(net, files, engines=[folder / "right.onnx"], seeds=1)
    assert {r.file for r in comparison.results} == {"", str(folder / "right.onnx"), str(tmp_path / "right.onnx")}
    assert len(comparison.results) == 1 + 2 * 2


def test_an_onnx_file_that_runs_nowhere_does_not_pass_beside_one_that_does(
    net: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    proto = onnx.load(folder / "right.onnx")
    onnx.checker.check_model(proto)
    next(n for n in proto.graph.node if n.op_type == "Tanh").domain = "nobody"
    proto.opset_import.add(domain="nobody", version=1)
    save_onnx(proto, tmp_path / "strange.onnx")
    comparison = compare_files(net, [folder / "right.onnx", tmp_path / "strange.onnx"], seeds=1)
    assert not comparison
    assert verdicts(comparison)["right.onnx", ON] == "pass"


def test_an_engine_may_lack_its_gpu_and_an_onnx_file_may_not_lack_every_runtime() -> None:
    right = OutputResult("y", ON, "float32", 0.0, 0.0, 1.0, "pass", "zeros", file="right.onnx")
    assert Comparison((right,), (NotRun("TensorRT (plan)", "no GPU", "plan"),), ("zeros",))
    assert not Comparison((right,), (NotRun(ON, "no kernel", "other.onnx"),), ("zeros",))


def test_what_is_no_file_of_the_model_is_told_before_anything_runs(
    net: LoadedModel, folder: Path, tmp_path: Path, no_runs: None
) -> None:
    with pytest.raises(InputError, match="no file to compare"):
        compare_files(net, [])
    with pytest.raises(InputError, match=r"file not found: '.*missing.onnx'"):
        compare_files(net, [folder / "right.onnx", tmp_path / "missing.onnx"])
    other = from_module(nn.ReLU().eval(), inputs=["z:float32[2]"])
    with pytest.raises(InputError, match=r"right.onnx has the inputs \['x', 'y'\], but the model has \['z'\]"):
        compare_files(other, folder / "right.onnx")


class Engine:
    """In place of an engine there is onnxruntime; ``kinds`` are the types that its inputs and outputs claim."""

    kinds: set[str]

    def __init__(self, path: Path) -> None:
        self._runner = importlib.import_module("normdeploy.verbs.verify.runtime_candidates").OrtRunner(
            path.with_suffix(".onnx")
        )
        self.name = "engine"

    def input_dtypes(self) -> dict[str, np.dtype]:
        return {name: np.dtype(np.float16 if "float16" in self.kinds else np.float32) for name in ("x", "y")}

    def float_types(self) -> set[str]:
        return self.kinds

    def accepts_shapes(self, feeds: Mapping[str, np.ndarray]) -> bool:
        return True

    def infer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._runner.infer(feeds)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *ignored: object) -> None:
        pass


@pytest.mark.parametrize(
    ("stem", "kinds", "beside", "wanted"), [("half", {"float16"}, "right", "fp16"), ("right", {"float32"}, "right", "")]
)
def test_an_engine_is_judged_by_the_types_that_it_states(
    net: LoadedModel,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    stem: str,
    kinds: set[str],
    beside: str,
    wanted: str,
) -> None:
    candidates = importlib.import_module("normdeploy.verbs.verify.runtime_candidates")
    monkeypatch.setattr(candidates, "TrtRunner", Engine)
    monkeypatch.setattr(candidates, "describe_missing_runtime", lambda runtime: "")
    monkeypatch.setattr(Engine, "kinds", kinds, raising=False)
    (folder / f"{stem}.engine").write_bytes(b"vtrt and more")
    comparison = compare_files(net, [folder / "right.onnx", folder / f"{stem}.engine"], seeds=1)
    (result,) = (r for r in comparison.results if r.file == f"{stem}.engine")
    assert result
    assert result.precision == wanted


# ------------------------------------------------------------------ the user's own inputs


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*ignored: object) -> Any:
        raise AssertionError("something was run")

    monkeypatch.setattr(Float64Runner, "infer", run)
    monkeypatch.setattr(importlib.import_module("normdeploy.runtimes.torch_runners").EagerRunner, "infer", run)


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


ONES = np.ones((3, 48), np.float32)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": ONES}, r"in.npz: the model needs the inputs \['y'\]; expected \['x', 'y'\], got \['x'\]"),
        ({"x": ONES, "y": ONES, "z": ONES}, r"has no inputs \['z'\]"),
        ({"x": ONES.astype(np.float64), "y": ONES}, "input 'x' is float32, but got float64; convert it"),
        ({"x": ONES.astype(np.float16), "y": ONES}, "input 'x' is float32, but got float16; convert it"),
        ({"x": ONES[:, :5], "y": ONES}, r"input 'x' has shape \[batch, 48\], but got \[3, 5\]"),
        ({"x": ONES[0], "y": ONES}, r"but got \[48\]; the batch dim is missing: x\[None\]"),
        ({"x": ONES[:0], "y": ONES[:0]}, "no input has an element"),
        ({"x": ONES, "y": ONES[:2]}, r"the dim 'batch' is 3 in input 'x' and 2 in input 'y'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_anything_runs(
    net: LoadedModel, folder: Path, tmp_path: Path, no_runs: None, arrays: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        compare_files(net, folder / "right.onnx", inputs=[saved(tmp_path / "in.npz", **arrays)])


def test_files_that_hold_no_plain_arrays_are_refused(
    net: LoadedModel, folder: Path, tmp_path: Path, no_runs: None
) -> None:
    with pytest.raises(InputError, match=r"file not found: '.*none.npz'"):
        compare_files(net, folder / "right.onnx", inputs=tmp_path / "none.npz")
    with pytest.raises(InputError, match="pickled objects, which are never loaded"):
        compare_files(net, folder / "right.onnx", inputs=saved(tmp_path / "in.npz", x=np.array([print], dtype=object)))


def test_each_npz_is_a_case_and_nothing_else_is_run(net: LoadedModel, folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one, two = (
        saved(tmp_path / f"{n}.npz", **{k: rng.standard_normal((n, 48)).astype(">f4") for k in "xy"}) for n in (1, 2)
    )
    comparison = compare_files(net, folder / "right.onnx", inputs=[one, {"x": ONES, "y": ONES}, two])
    assert comparison
    assert comparison.cases == (str(one), "given input 1", str(two))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_a_half_file_takes_is_taken(net: LoadedModel, folder: Path, tmp_path: Path, precision: str) -> None:
    """In .npz files bfloat16 is two bytes without a name."""
    dtype = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}[precision]
    normdeploy.optimize(folder / "right.onnx", tmp_path / "h.onnx", precision=precision)
    x = np.random.default_rng(0).standard_normal((2, 48)).astype(dtype)
    comparison = compare_files(net, tmp_path / "h.onnx", inputs=saved(tmp_path / "in.npz", x=x, y=x))
    assert comparison
    wide = compare_files(net, tmp_path / "h.onnx", inputs={"x": x.astype(np.float32), "y": x.astype(np.float32)})
    assert [r.max_abs_error for r in comparison.results] == [r.max_abs_error for r in wide.results]


# ------------------------------------------------------------------ onnxruntime's optimizer

HEAD = '<ir_version: 8, opset_import: ["": 17]> main '


class Scaled(nn.Module):
    """Each product fits, the product of what is not scaled yet overflows."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * 1e-20) @ w


class Spread(nn.Module):
    """RMS norm of one channel whose weight spreads it over two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * torch.tensor([1.0, 2.0])


FUSIONS: dict[str, tuple[Callable[[], nn.Module], list[str], str]] = {
    "MatMulScaleFusion": (
        Scaled,
        ["x:float32[2,4]{1e20:2e20}", "w:float32[4,4]{1e19:2e19}"],
        (
            "(float[2,4] x, float[4,4] w) => (float[2,4] output) <float s = {1e-20}> { z = Mul(x, s) output = MatMul(z,"
            " w) }"
        ),
    ),
    "SimplifiedLayerNormFusion": (
        Spread,
        ["x:float32[1,1]{1:2}"],
        """(float[1,1] x) => (float[1,2] output) <float e = {1e-5}, float t = {2}, float[2] g = {1, 2}> {
            q = Pow(x, t) m = ReduceMean<axes = [-1]>(q) a = Add(m, e) r = Sqrt(a) d = Div(x, r)
            output = Mul(d, g) }""",
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_the_fusion_that_breaks_a_file_is_named(name: str, tmp_path: Path) -> None:
    """Faults of onnxruntime 1.31.1 itself: a scale that moves behind a product, which overflows then; a weight that no
    norm has."""
    module, specs, text = FUSIONS[name]
    onnx.save(parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    comparison = compare_files(from_module(module().eval(), inputs=specs), tmp_path / "m.onnx", seeds=1)
    assert not comparison
    found: dict[str, OutputResult] = {r.runtime: r for r in comparison.results}
    assert found[OFF]
    assert found[OFF].culprit == ()
    assert found[ON].culprit == (name,)
    assert f"onnxruntime's optimizer is the cause: {name}; with it disabled the file passes" in found[ON].reason
    assert any(f'"optimization.disable_specified_optimizers", "{name}"' in note for note in comparison.notes)
    assert json.loads(json.dumps(comparison.to_json()))["results"][-1]["culprit"] == [name]


def test_a_file_that_is_wrong_by_itself_accuses_nobody(net: LoadedModel, folder: Path) -> None:
    comparison = compare_files(net, folder / "wrong.onnx", seeds=1)
    assert not comparison
    assert not any(r.culprit or "culprit" in r.reason for r in comparison.results)


def test_the_fewest_are_found_in_few_runs() -> None:
    names = [f"n{i}" for i in range(40)]
    for count in (1, 2, 3):
        for guilty in [*combinations(("n0", "n7", "n20", "n39"), count)]:
            asked: list[tuple[str, ...]] = []

            def passes(
                disabled: Sequence[str], guilty: tuple[str, ...] = guilty, asked: list[tuple[str, ...]] = asked
            ) -> bool:
                asked.append(tuple(disabled))
                return set(guilty) <= set(disabled)

            assert minimize_disabled(passes, [], names, tried=True) == list(guilty)
            assert len(asked) <= 2 * count * 6 + 2 * count  # 40 names are halved 6 times at most


def test_the_rules_behind_one_transformer_are_those_of_this_version(tmp_path: Path) -> None:
    model = from_module(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).eval(), inputs=["x:float32[1,2,3,3]"])
    save_onnx(export_to_proto(model), tmp_path / "m.onnx")
    one = "Level1_RuleBasedTransformer"
    assert one in list_applied_optimizers(tmp_path / "m.onnx", "cpu")
    assert one not in list_applied_optimizers(tmp_path / "m.onnx", "cpu", ["ConvBNFusion"])
    assert one not in list_applied_optimizers(tmp_path / "m.onnx", "cpu", RULES)


# ------------------------------------------------------------------ drift


def test_drift_says_where_a_file_leaves_the_bound(
    net: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt_runner, "explain_missing_gpu", lambda: "no GPU: none here")
    comparison = compare_files(
        net, [folder / name for name in ("right.onnx", "wrong.onnx", "plan")], seeds=1, drift=True
    )
    assert comparison.drift is not None
    runs = {
        (p.file, p.runtime): [q for q in comparison.drift if (q.file, q.runtime) == (p.file, p.runtime)]
        for p in comparison.drift
    }
    assert set(runs) == {(file, runtime) for file in ("right.onnx", "wrong.onnx") for runtime in (OFF, ON)}
    for (file, _), points in runs.items():
        first = next((p.module for p in points if not p), None)
        assert first == (None if file == "right.onnx" else "norm")
        assert {"norm", "last.1"} <= {p.module for p in points}
        assert points[-1].where == "output output"
    assert "no drift of plan: the inner tensors of an engine can't be read" in comparison.notes
    rows = {row[:2]: row for row in outline_drift(comparison.drift)}
    assert rows["wrong.onnx", OFF][3] == "norm"
    assert rows["wrong.onnx", OFF][5].startswith("norm: ")
    assert rows["right.onnx", ON][5] == "none"


def test_drift_of_a_half_file_is_seen_node_by_node(net: LoadedModel, folder: Path) -> None:
    comparison = compare_files(net, folder / "half.onnx", seeds=1, drift=True)
    assert comparison.drift is not None
    tensors = {
        r: {p.tensor for p in comparison.drift if p.runtime == r}
        for r in dict.fromkeys(p.runtime for p in comparison.drift)
    }
    assert set(tensors) >= {OFF, "each node in float32, rounded"}
    assert tensors[OFF] == tensors["each node in float32, rounded"]
    assert all(comparison.drift)
    assert max(p.error / p.scale for p in comparison.drift if p.scale) > 2.0**-12  # half it is


def test_drift_is_not_looked_for_unasked(net: LoadedModel, folder: Path) -> None:
    comparison = compare_files(net, folder / "right.onnx", seeds=1)
    assert comparison.drift is None
    assert comparison.to_json()["drift"] is None


# ------------------------------------------------------------------ the command


def test_the_command_takes_them_all(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = torch.export.export(Net().eval(), (torch.zeros(2, 48), torch.zeros(2, 48)))
    torch.export.save(program, "model.pt2")
    saved(tmp_path / "in.npz", x=ONES[:2], y=ONES[:2])
    command = [
        "verify",
        "model.pt2",
        str(folder / "right.onnx"),
        str(folder / "wrong.onnx"),
        "--inputs",
        "in.npz",
        "--drift",
    ]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--report", "v.json"])
    assert done.exit_code == 1, done.output
    document = json.loads(Path("v.json").read_text())
    assert document["files"] == {
        "model": "model.pt2",
        "onnx": str(folder / "right.onnx"),
        "onnx 2": str(folder / "wrong.onnx"),
    }
    parity = document["parity"]
    assert parity["cases"] == ["in.npz"]
    assert {r["file"] for r in parity["results"] if r["verdict"] == "fail"} == {"wrong.onnx"}
    keys = {"runtime", "file", "module", "tensor", "where", "error", "eager", "allowed", "scale", "reason"}
    assert {frozenset(point) for point in parity["drift"]} == {frozenset(keys)}
    assert "first tensor outside its bound" in " ".join(done.output.split())
    assert "NOT verified" in done.output


def test_an_onnx_file_in_the_place_of_the_model(net: LoadedModel, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"PK")
    with pytest.raises(
        InputError, match=r"right\.onnx.*is an ONNX file.*pass '.*m\.pt' first and the ONNX file second"
    ):
        normdeploy.verify(folder / "right.onnx", tmp_path / "m.pt")
    # Behind a file another file is compared with it.
    assert normdeploy.bisect(folder / "right.onnx", folder / "right.onnx", seeds=1)


def test_a_file_whose_input_is_a_sequence(net: LoadedModel, folder: Path, tmp_path: Path) -> None:
    proto = onnx.load(folder / "right.onnx")
    proto.graph.input[0].type.CopyFrom(
        onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    )
    file = tmp_path / "sequence.onnx"
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"input 'x' is a sequence"):
        compare_files(net, [file])
