"""``verify`` by rules of the user's own: which rule decides, and that it is told in every form of the result."""

from __future__ import annotations

import json
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError, NormdeployError
from normdeploy.inputs.dataset import open_dataset
from normdeploy.model import Dim, InputSpec, ModelSignature
from normdeploy.reports.report_page import render_page
from normdeploy.verbs.verify.comparison_result import Comparison

RNG = np.random.default_rng(1)
W = RNG.standard_normal((8, 6)).astype(np.float32)
TEXT = """
    <ir_version: 8, opset_import: ["": 18]>
    net (float[n, 8] x) => (float[n, 6] y, int64[n] best) {
        h = MatMul(x, w)
        y = Tanh(h)
        best = ArgMax <axis = -1, keepdims = 0> (y)
    }"""
DATA = RNG.standard_normal((37, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """right.onnx, off.onnx (a weight matrix with noise), one input, and a dataset."""
    folder = tmp_path_factory.mktemp("policy")
    noise = np.random.default_rng(7).standard_normal(W.shape).astype(np.float32)
    for name, weight in (("right", W), ("off", W + np.float32(0.02) * noise)):
        proto = onnx.parser.parse_model(TEXT)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(proto, folder / f"{name}.onnx")
    np.savez(folder / "in.npz", x=DATA[:5])
    np.savez(folder / "data.npz", x=DATA, label=np.zeros(37))
    return folder


def verified(folder: Path, file: str = "off", **options: Any) -> Comparison:
    return normdeploy.verify(folder / "right.onnx", folder / f"{file}.onnx", feeds=folder / "in.npz", **options)


def expected(rows: np.ndarray, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of off.onnx and right.onnx, in float64."""
    off = onnx.numpy_helper.to_array(onnx.load(folder / "off.onnx").graph.initializer[0]).astype(np.float64)
    return np.tanh(rows.astype(np.float64) @ off), np.tanh(rows.astype(np.float64) @ W.astype(np.float64))


def made(comparison: Comparison, output: str = "y") -> Any:
    return next(r for r in comparison.results if r.output == output and r.file)


def test_a_rule_decides_in_the_place_of_the_default_rule_which_is_told(folder: Path) -> None:
    assert not verified(folder)
    comparison = verified(folder, tolerance="0.2:0", metric={"best": [], "y": "cosine>=0.99"})
    assert comparison, comparison.results
    row = made(comparison)
    assert (row.verdict, row.by_default, row.decided_by) == ("pass", "fail", "tolerance 0.2:0, cosine>=0.99")
    value, reference = expected(DATA[:5], folder)
    assert row.rules[0].measured == pytest.approx(np.abs(value - reference).max(), rel=1e-4)
    assert row.rules[1].measured == pytest.approx(
        float((value * reference).sum() / np.linalg.norm(value) / np.linalg.norm(reference)), rel=1e-6
    )
    assert comparison.standard == "by the rules given, NOT by the default rule (y in off.onnx)"
    assert {r.output for r in comparison.beyond_default} == {"y"}
    assert (
        "color: #808000" in comparison._repr_html_().partition(">verified by the rules")[0].rpartition("<span")[2]
    )  # yellow
    assert made(comparison, "best").decided_by == "default rule"


def test_with_the_default_rule_besides_both_must_hold(folder: Path) -> None:
    comparison = verified(folder, tolerance="y=0.2:0", also_default=True)
    assert not comparison
    assert "default rule: error" in made(comparison).reason
    right = verified(folder, "right", tolerance="y=0.2:0", also_default=True)
    assert right
    assert right.standard == "by your tolerance 0.2:0, and by the default rule"
    assert right.beyond_default == ()
    assert "color: #008000" in right._repr_html_().partition(">verified by your")[0].rpartition("<span")[2]
    assert verified(folder, "right").standard == ""


def test_a_policy_of_also_default_alone_goes_with_rules_of_the_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "verify.toml").write_text("also-default = true\n")
    comparison = verified(folder, tolerance="y=0.2:0", policy=tmp_path / "verify.toml")
    assert not comparison
    assert "default rule: error" in made(comparison).reason


def test_a_rule_that_does_not_hold_fails_a_file_that_the_default_rule_passes(folder: Path) -> None:
    comparison = verified(folder, "right", tolerance="y=0:0")
    assert not comparison
    row = made(comparison)
    assert (row.verdict, row.by_default) == ("fail", "pass")
    assert row.reason.startswith("tolerance 0:0: error ")
    assert comparison.standard == ""


def test_an_output_of_another_type_or_shape(folder: Path, tmp_path: Path) -> None:
    proto = onnx.load(folder / "right.onnx")
    proto.graph.node[1].output[0] = "wide"
    proto.graph.node.insert(2, onnx.helper.make_node("Cast", ["wide"], ["y"], to=onnx.TensorProto.FLOAT16))
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    onnx.save(proto, tmp_path / "half.onnx")
    comparison = normdeploy.verify(
        folder / "right.onnx", tmp_path / "half.onnx", feeds=folder / "in.npz", tolerance="y=1e-3:1e-3"
    )
    assert made(comparison).verdict == "pass"
    # The file ends in float16, and so it is judged as a half file.
    assert made(comparison).dtype == "float16"
    assert "default rule: pass" in made(comparison).rules_summary


def test_metrics_are_of_the_dataset_and_pooled(folder: Path) -> None:
    comparison = verified(folder, metric=["y=top1>=0.5", "y=nearest>=0.5", "y=snr>=5"], dataset=folder / "data.npz")
    value, reference = expected(DATA, folder)
    top1, nearest, snr = made(comparison).rules
    assert top1.measured == pytest.approx(np.mean(value.argmax(-1) == reference.argmax(-1)), abs=1e-12)
    assert 0.5 < top1.measured < 1

    def neighbours(rows: np.ndarray) -> np.ndarray:
        rows = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
        return np.asarray((rows @ rows.T - 9 * np.eye(len(rows))).argmax(-1))

    assert nearest.measured == pytest.approx(np.mean(neighbours(value) == neighbours(reference)), abs=1e-12)
    batches = [slice(i, i + 8) for i in range(0, 37, 8)]  # the usual size of a dim of which nothing is said
    wanted = min(10 * np.log10((reference[b] ** 2).sum() / ((value[b] - reference[b]) ** 2).sum()) for b in batches)
    assert snr.measured == pytest.approx(wanted, abs=1e-3)
    assert sum(case.startswith("data.npz, samples") for case in comparison.cases) == 5


def test_a_folder_of_files_is_a_dataset(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", x=DATA[number : number + 2].astype(np.float64))
    comparison = verified(folder, metric="y=snr>=5", dataset=tmp_path)
    assert [case for case in comparison.cases if "samples" in case] == [f"{n}.npz, samples 0 to 1" for n in range(3)]


def test_a_batch_converts_its_own_samples_alone(tmp_path: Path) -> None:
    """A file of another type than the model's would otherwise be converted whole once for each batch."""
    model = ModelSignature(
        inputs=(InputSpec("x", "float32", (Dim("n", 1, 4, 8), Dim.from_size(8))),), outputs=("y",), kind="onnx"
    )
    np.savez(tmp_path / "d.npz", x=np.repeat(DATA[:4], 250, 0).astype(np.float64))
    (case, *_) = cases = open_dataset(tmp_path / "d.npz", model)
    assert len(cases) == 250
    tracemalloc.start()
    feeds = case.make()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (feeds["x"].shape, feeds["x"].dtype) == ((4, 8), np.float32)
    assert most < 1000 * 8 * 4, f"{most} bytes for a batch of {feeds['x'].nbytes}"


def test_a_dataset_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    def npz(name: str, **arrays: np.ndarray) -> Path:
        np.savez(tmp_path / name, **arrays)
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    for dataset, said in (
        (npz("a.npz", y=DATA), r"'a.npz' has no \['x'\]; the model expects \['x'\], the dataset has \['y'\]"),
        (npz("b.npz", x=DATA[:0]), "has {'x': 0} samples"),
        (
            npz("c.npz", x=DATA[:, :3]),
            r"the dataset, c.npz, samples 0 to 7: input 'x' has shape \[n, 8\], but got \[8, 3\]",
        ),
        (npz("d.npz", x=np.full((2, 8), "a")), "holds 'x' as <U1"),
        (tmp_path / "none.npz", "file not found"),
        (tmp_path / "empty", "a folder without .npz files"),
    ):
        with pytest.raises(InputError, match=said):
            verified(folder, metric="y=snr>=5", dataset=dataset)
    with pytest.raises(InputError, match="a dataset needs rules to judge the file by, but none were passed"):
        verified(folder, dataset=folder / "data.npz")


class FakeDataset:
    """As datasets.Dataset is used: columns, a length, slices of columns."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select_columns(self, names: list[str]) -> FakeDataset:
        return FakeDataset({name: self.columns[name] for name in names})

    def with_format(self, kind: str) -> FakeDataset:
        assert kind == "numpy"
        return self

    def __getitem__(self, part: slice) -> dict[str, Any]:
        return {name: column[part] for name, column in self.columns.items()}


def test_a_hugging_face_dataset(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NormdeployError, match="pip install datasets"):
        verified(folder, metric="y=snr>=5", dataset=tmp_path)
    monkeypatch.undo()
    held: list[Any] = []
    module = types.ModuleType("datasets")
    module.load_from_disk = lambda path: held[-1]  # type: ignore[attr-defined]
    module.DatasetDict = dict  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "datasets", module)
    held.append(FakeDataset({"x": [list(map(float, row)) for row in DATA], "label": [0] * 37}))
    comparison = verified(folder, metric="y=top1>=0.5", dataset=tmp_path)
    value, reference = expected(DATA, folder)
    assert made(comparison).rules[0].measured == pytest.approx(
        np.mean(value.argmax(-1) == reference.argmax(-1)), abs=1e-12
    )
    labels = reference.argmax(-1)
    held.append(FakeDataset({"x": DATA.tolist(), "label": labels.tolist()}))
    (rule,) = made(verified(folder, metric="y=accuracy_drop<=1", dataset=tmp_path, labels="label")).rules
    assert rule.accuracies == (1.0, np.mean(value.argmax(-1) == labels))
    with pytest.raises(InputError, match=r"has no labels 'right'; it holds \['x', 'label'\]"):
        verified(folder, metric="y=accuracy_drop<=1", dataset=tmp_path, labels="right")
    for other, said in (
        ({"train": 1, "test": 2}, r"holds the splits \['train', 'test'\]; pass the folder of one: '.*train'"),
        (FakeDataset({"z": [1]}), r"has no \['x'\]"),
        (FakeDataset({"x": []}), "has no samples"),
        (FakeDataset({"x": [[1.0] * 8, [1.0] * 7]}), "samples of different sizes"),
    ):
        held.append(other)
        with pytest.raises(InputError, match=said):
            verified(folder, metric="y=top1>=0.5", dataset=tmp_path)


def labelled(folder: Path, tmp_path: Path, labels: Any) -> Path:
    np.savez(tmp_path / "labelled.npz", x=DATA, right=labels)
    return tmp_path / "labelled.npz"


def test_the_accuracy_against_labels_may_drop_by_so_much(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The labels are what right.onnx answers but for five of 37 samples; off.onnx differs from it in some."""
    value, reference = (scores.argmax(-1) for scores in expected(DATA, folder))
    labels = reference.copy()
    labels[:5] = (labels[:5] + 1) % 6
    theirs, own = np.mean(reference == labels), np.mean(value == labels)
    assert theirs == 32 / 37
    assert own < theirs
    data = labelled(folder, tmp_path, labels.astype(np.uint8))
    rule = made(verified(folder, metric="y=accuracy_drop:0.001", dataset=data, labels="right")).rules[0]
    assert (rule.kind, rule.verdict, rule.samples, rule.case) == ("accuracy_drop", "fail", 37, "")
    assert rule.accuracies == (theirs, own)
    assert rule.measured == pytest.approx(theirs - own, abs=1e-12)
    passing = verified(
        folder, metric={"y": ["accuracy_drop<=0.5", "accuracy5_drop<=0.5"]}, dataset=data, labels="right"
    )
    assert passing
    assert "in the reference and" in made(passing).rules_summary
    (tmp_path / "verify.toml").write_text('labels = "right"\n[outputs.y]\nmetric = "accuracy_drop<=0.001"\n')
    by_file = verified(folder, policy=tmp_path / "verify.toml", dataset=data)
    assert made(by_file).rules == (rule,)
    (tmp_path / "verify.toml").write_text('labels = "right"\nmetric = "snr>=5"\n')
    assert verified(folder, policy=tmp_path / "verify.toml")  # a file may name labels for the runs that ask for them
    monkeypatch.chdir(folder)
    done = command(folder, "--metric", "y=accuracy_drop:0.5", "--dataset", str(data), "--labels", "right")
    assert done.exit_code == 0, done.output
    assert "accuracy_drop<=0.5" in done.output
    assert "0.864865 in the reference" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels": "right"}, r"the labels 'right' are part of a dataset, but no dataset was passed"),
        ({"metric": "y=accuracy_drop:0.1"}, "accuracy_drop needs labels, but there are none"),
        (
            {"metric": "y=accuracy_drop:0.1", "dataset": 0},
            "accuracy_drop needs labels, but there are none",
        ),
        ({"metric": "y=snr>=5", "dataset": 0, "labels": "right"}, "labels were passed, but no metric uses them"),
        (
            {"metric": "y=accuracy_drop>=0.1", "dataset": 0},
            r"the smaller accuracy_drop is, the better; write accuracy_drop<=0\.1",
        ),
        ({"metric": "y=accuracy_drop<=1.5", "dataset": 0}, "accuracy_drop is between 0 and 1"),
        ({"metric": "best=accuracy_drop<=0.5", "dataset": 0, "labels": "right"}, "it is int64, not floating-point"),
        ({"dataset": 0, "labels": "left"}, r"'labelled\.npz' has no labels 'left'; it holds \['x', 'right'\]"),
        ({"dataset": 0, "labels": "x"}, "the labels 'x' are an input of the model"),
        ({"dataset": np.zeros(37)}, r"the labels 'right' as float64; integers are required"),
        ({"dataset": np.zeros((37, 1), int)}, r"in the shape \[37, 1\]; \[samples\] is required"),
        ({"dataset": np.zeros(36, int)}, "holds 36 labels 'right' and 37 samples"),
        (
            {"dataset": np.full(37, 6)},
            "samples 0 to 7: the label in row 0 is 6, but the output has the classes 0 to 5",
        ),
    ],
)
def test_labels_that_are_refused(options: dict[str, Any], said: str, folder: Path, tmp_path: Path) -> None:
    given = dict(options)
    if "dataset" in given:
        array = given["dataset"] if isinstance(given["dataset"], np.ndarray) else np.zeros(37, int)
        given["dataset"] = labelled(folder, tmp_path, array)
        if "metric" not in given:
            given |= {"metric": "y=accuracy_drop<=0.1", "labels": given.get("labels", "right")}
    with pytest.raises(InputError, match=said):
        verified(folder, **given)


# ------------------------------------------------------------------ the command


def command(folder: Path, *options: str, file: str = "off") -> Any:
    arguments = ["verify", "right.onnx", f"{file}.onnx", "--inputs", "in.npz", *options]
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)


def test_the_command_tells_which_rule_decided(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    policy = tmp_path / "verify.toml"
    policy.write_text('[outputs.y]\nmetric = "cosine>=0.999999"\n')
    options = ["--policy", str(policy), "--metric", "y=cosine:0.99", "--report", str(tmp_path / "r.json")]
    done = command(folder, *options)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "decided by" in said
    assert "cosine>=0.99" in said
    # The proof that comes first finds that the file is another function.
    assert (
        "verified by the rules given, NOT by the default rule (y in off.onnx) (although off.onnx computes a different"
        " function) on 1 input against right.onnx in float64" in said
    )
    document = json.loads((tmp_path / "r.json").read_text())
    row = next(r for r in document["parity"]["results"] if r["output"] == "y" and r["file"])
    assert (row["decided_by"], row["by_default"], row["rules"][0]["kind"]) == ("cosine>=0.99", "fail", "cosine")
    assert document["parity"]["standard"].startswith("by the rules given, NOT")
    html = render_page(document)
    assert "decided by" in html
    assert "by the rules given, NOT by the default rule" in html
    assert "cosine 0.99" in html
    done = command(folder, "--policy", str(policy))
    assert done.exit_code == 1
    assert "NOT verified" in done.output


def test_wrong_options_are_told_and_write_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("tolerance = [\n")
    (tmp_path / "alone.toml").write_text("also-default = true\n")
    report = tmp_path / "r.json"
    for options, said in (
        (["--tolerance", "y=1"], "can't be read; write ABS:REL"),
        (["--tolerance", "z=1:1"], "output 'z', which the model does not have; its outputs are ['y', 'best']"),
        (["--metric", "cosine"], "in a shell within quotes"),
        (["--metric", "best=cosine:0.9"], "it is int64, not floating-point"),
        (["--policy", str(tmp_path / "broken.toml")], "is not valid TOML"),
        (["--map", "a=b"], "names 'b', which is not an input or output of the model"),
        (["--also-default"], "--also-default (in a policy file also-default) adds the default rule"),
        (
            ["--policy", str(tmp_path / "alone.toml")],
            "--also-default (in a policy file also-default) adds the default rule",
        ),
        (["--dataset", "data.npz"], "pass a metric or a tolerance"),
    ):
        arguments = ["verify", "right.onnx", "off.onnx", "--inputs", "in.npz", "--report", str(report), *options]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, InputError), (options, done.exception)
        assert said in str(done.exception), (options, done.exception)
        assert not report.exists()


def test_a_quiet_run_still_tells_what_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = command(folder, "-q", "--metric", "y=snr:90")
    assert (done.exit_code, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("fail: y, onnxruntime (optimizer off), off.onnx: snr ")
    assert lines[-1] == "NOT verified on 1 input against right.onnx in float64"


def test_a_quiet_run_that_passes_is_silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = command(folder, "-q", file="right")
    assert (done.exit_code, done.output) == (0, "")


def test_atol_and_rtol_decide_as_numpy_allclose_does(folder: Path) -> None:
    value, reference = expected(DATA[:5], folder)
    excess = np.abs(value - reference) - 0.1 * np.abs(reference)
    # The result is float32, so the bound is 1e-5 wider or narrower.
    for atol in (excess.max() + 1e-5, excess.max() - 1e-5):
        comparison = verified(folder, atol=float(atol), rtol=0.1)
        assert bool(comparison) == np.allclose(value, reference, rtol=0.1, atol=atol)
    assert verified(folder, atol=1.0, rtol=0.0).standard.startswith("by your tolerance 1:0, NOT by the default rule")
    # A rule of one output goes before the rule of all outputs.
    assert not verified(folder, atol=1.0, tolerance="y=0:0")


def test_two_tolerances_of_every_output_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--atol and --rtol state the tolerance of every output, and so does"):
        verified(folder, rtol=0.1, tolerance="1:0")
    # A policy file is a default that options replace.
    (tmp_path / "verify.toml").write_text('tolerance = "0:0"\n')
    assert verified(folder, atol=1.0, policy=tmp_path / "verify.toml")


def test_the_verdict_of_the_command_names_the_tolerance(folder: Path) -> None:
    words = ["verify", folder / "right.onnx", folder / "off.onnx", "--inputs", folder / "in.npz", "--atol", "0.5"]
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    assert "verified by your tolerance 0.5:0, NOT by the default rule" in done.output
    done = CliRunner().invoke(app, [*map(str, words), "--atol=1e-9", "--rtol", "1e-9"])
    assert done.exit_code == 1
    assert "tolerance 1e-09:1e-09: error" in done.output
