"""The race of files and forms: wrong answers are not timed, what can't run is said, the table is what was measured."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.compare.runtime_agreement import find_disagreement
from normdeploy.dtypes import UNIT_ROUNDOFF
from normdeploy.errors import InputError, NormdeployError, RuntimeUnavailable
from normdeploy.model import Dim
from normdeploy.reports.report_page import render_page
from normdeploy.verbs.bench import benchmark_inputs as bench_given
from normdeploy.verbs.bench import norm_benchmark as bench_norms
from normdeploy.verbs.bench import timing as bench_timing
from normdeploy.verbs.bench.bench_options import RaceOptions
from normdeploy.verbs.bench.bench_tables import show_race
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.bench.model_benchmark import Race, RaceEntry
from normdeploy.verbs.bench.norm_benchmark import find_norm_cases
from normdeploy.verbs.bench.norm_cases import NormCase


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of one call, as real races in tests need no precision."""
    monkeypatch.setattr(bench_timing, "TURN", 1e-6)


# ------------------------------------------------------------------ the same answer


def test_rounding_agrees_and_a_wrong_answer_does_not() -> None:
    y = np.linspace(-4, 4, 50)
    unit = 2.0**-24
    assert find_disagreement([y * (1 + 1e-6)], [y], unit)
    assert find_disagreement([y * (1 + 1e-6)], [y], unit).error == pytest.approx(1e-6, rel=1e-3)
    assert "differs by 1.0e-03" in str(find_disagreement([y * 1.001], [y], unit).reason)
    assert find_disagreement([y * 1.001], [y], 2.0**-11)
    holed = y.copy()
    holed[3] = np.nan
    for found, said in (
        ([holed], "other NaN or infinite elements"),
        ([y, y], "2 outputs, 1 expected"),
        ([y[:3]], "has shape [3], [50] expected"),
    ):
        verdict = find_disagreement(found, [y], unit)
        assert math.isinf(verdict.error)
        assert said in str(verdict.reason)
    assert find_disagreement([holed], [holed], unit)
    endless = np.where(np.isnan(holed), np.inf, holed)
    assert find_disagreement([endless], [endless], unit)
    for other in (np.where(np.isnan(holed), -np.inf, holed), holed):
        assert "other NaN or infinite elements" in str(find_disagreement([other], [endless], unit).reason)
    whole = np.arange(5)
    assert find_disagreement([whole], [whole], unit).error == 0.0
    assert "1 of 5 integers" in str(find_disagreement([np.array([0, 1, 2, 3, 5])], [whole], unit).reason)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(self.linear(x), (8,))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def files(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``right.onnx`` of the net with a dynamic batch, and ``wrong.onnx``, whose bias is off by a hundredth;
    ``free.onnx``: two norms, its batch without a range; ``text.onnx``, which takes strings."""
    folder = tmp_path_factory.mktemp("race")
    proto = normdeploy.export(
        net, (torch.randn(4, 8),), inputs=["x:float32[batch,8]"], output=folder / "right.onnx"
    ).proto
    bias = next(t for t in proto.graph.initializer if "bias" in t.name)
    bias.CopyFrom(
        onnx.numpy_helper.from_array(
            onnx.numpy_helper.to_array(bias) + np.linspace(-0.01, 0.01, 8, dtype=np.float32), bias.name
        )
    )
    onnx.save(proto, folder / "wrong.onnx")
    free = """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 8] x) => (float[N, 8] y) <float[8] s = {1, 1, 1, 1,
    1, 1, 1, 1}>
        { a = LayerNormalization <epsilon = 1e-5> (x, s) y = LayerNormalization <epsilon = 2e-5> (a, s) }"""
    onnx.save(onnx.parser.parse_model(free), folder / "free.onnx")
    text = '<ir_version: 10, opset_import: ["" : 21]> g (string[2] x) => (string[2] y) { y = Identity(x) }'
    onnx.save(onnx.parser.parse_model(text), folder / "text.onnx")
    (folder / "some.engine").write_bytes(b"vtrt" + bytes(64))
    return folder


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """torch.compile as it fails where there is no compiler: it would take most of the time of these tests."""
    asked: list[object] = []

    def refuse(graph: object) -> Callable[..., object]:
        def call(*args: object) -> object:
            asked.append(graph)
            raise RuntimeError("no C++ compiler\nwas found")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    return asked


@pytest.mark.usefixtures("quick")
def test_a_wrong_answer_is_not_timed(net: Net, files: Path, uncompiled: list[object]) -> None:
    sources = [net, files / "right.onnx", files / "wrong.onnx", files / "some.engine"]
    result = normdeploy.bench(
        sources, (torch.randn(4, 8),), inputs=["x:float32[batch,8]"], sizes={"batch": 3}, rounds=5
    )
    eager, right, wrong = result.entries
    assert not result
    assert (eager.runtime, right.file, wrong.file) == ("eager", "right.onnx", "wrong.onnx")
    assert "differ from float64 reference" in wrong.reason
    assert wrong.median is None
    assert wrong.ratio is None
    assert wrong.error > 1e-3
    for entry in (eager, right):
        assert entry.reason == ""
        assert entry.error < 1e-6
        assert 0 < entry.median <= entry.p95 <= entry.p99
        assert len(entry.samples) >= 5
        assert entry.interval[0] <= entry.ratio <= entry.interval[1]
    assert eager.ratio == 1
    assert result.shapes == {"x": (3, 8)}
    assert uncompiled
    reasons = {missed.runtime: missed.reason for missed in result.not_run}
    assert reasons["torch.compile"] == "torch.compile can't compile the model here: no C++ compiler was found"
    assert "TensorRT-RTX (some.engine)" in reasons
    assert result.machine.cores >= 1
    assert "torch" in result.machine.versions


@pytest.mark.usefixtures("quick")
def test_files_alone_are_compared_with_the_first(files: Path) -> None:
    paths = [files / "right.onnx", files / "right.onnx"]
    agreed = normdeploy.bench(paths, rounds=2, seed=3)
    assert agreed
    assert agreed.reference == "onnxruntime CPU (right.onnx)"
    assert normdeploy.bench(paths, rounds=2, feeds={"x": np.zeros((2, 8), np.float32)}).shapes == {"x": (2, 8)}
    differing = normdeploy.bench([files / "wrong.onnx", files / "right.onnx"], rounds=2)
    assert not differing
    assert [bool(entry.reason) for entry in differing.entries] == [False, True]


@pytest.mark.usefixtures("quick")
def test_a_right_file_is_not_blamed_for_a_coarse_reference(files: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.onnx"
    proto = normdeploy.optimize(files / "right.onnx", half, precision="fp16").proto
    bias = next(t for t in proto.graph.initializer if "bias" in t.name)
    off = onnx.numpy_helper.to_array(bias) + np.float16(0.002)
    bias.CopyFrom(onnx.numpy_helper.from_array(off.astype(np.float16), bias.name))
    onnx.save(proto, half)
    assert normdeploy.bench([files / "right.onnx", half], rounds=1)
    raced = normdeploy.bench([half, files / "right.onnx"], rounds=1)
    assert raced
    assert raced.entries[1].error > UNIT_ROUNDOFF["float32"] ** 0.5


@pytest.mark.usefixtures("quick")
def test_what_no_runtime_here_takes_does_not_end_the_race(files: Path, tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (bfloat16[8] x) => (bfloat16[8] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "wide.onnx")
    raced = normdeploy.bench([files / "right.onnx", tmp_path / "wide.onnx"], rounds=1)
    assert raced
    assert (
        "implementation for Relu"
        in {missed.runtime: missed.reason for missed in raced.not_run}["onnxruntime CPU (wide.onnx)"]
    )
    with pytest.raises(RuntimeUnavailable, match="implementation for Relu"):
        normdeploy.bench([tmp_path / "wide.onnx"], rounds=1)


@pytest.mark.usefixtures("quick")
def test_two_files_of_one_name_are_told_apart(files: Path, tmp_path: Path) -> None:
    copy = shutil.copy(files / "wrong.onnx", tmp_path / "right.onnx")
    raced = normdeploy.bench([files / "right.onnx", copy], rounds=1)
    assert [entry.file for entry in raced.entries] == [str(files / "right.onnx"), str(copy)]
    assert f"differ from onnxruntime CPU ({files / 'right.onnx'})" in raced.entries[1].reason


@pytest.mark.usefixtures("quick")
def test_an_output_that_a_file_names_twice(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (float[3] y, float[3] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "twice.onnx")
    assert normdeploy.bench([tmp_path / "twice.onnx"], rounds=1)


def test_torchs_threads_are_put_back(files: Path, net: Net, uncompiled: list[object]) -> None:
    before = torch.get_num_threads()
    seen = []
    normdeploy.bench(
        [net, files / "right.onnx"],
        (torch.randn(4, 8),),
        threads=2,
        rounds=1,
        progress=lambda *_: seen.append(torch.get_num_threads()),
    )
    assert 2 in seen
    assert torch.get_num_threads() == before


def test_sizes_that_nothing_says_are_taken_and_told(files: Path) -> None:
    race = normdeploy.bench([files / "free.onnx"], rounds=1)
    assert race
    assert any("the sizes of N: N=8 was used" in note for note in race.notes)


@pytest.mark.parametrize(
    ("sources", "options", "kind", "said"),
    [
        ([], {}, InputError, "nothing to measure"),
        (["right.onnx"], {"threads": 0}, InputError, "threads is 0"),
        (["right.onnx"], {"rounds": 0}, InputError, "rounds is 0"),
        (["right.onnx"], {"threads": 10**20}, InputError, "cores; pass at most"),
        (["right.onnx"], {"dims": ["batch=1:2:4"]}, InputError, "dims: applies to a model, but no model was passed"),
        (["text.onnx"], {}, InputError, "onnxruntime (text.onnx): 'x' is tensor(string)"),
        (["right.onnx"], {"sizes": ["batch"]}, InputError, "can't read the size 'batch'"),
        (["right.onnx"], {"sizes": ["batch=0"]}, InputError, "can't read the size 'batch=0'"),
        (["right.onnx"], {"sizes": ["batch=2", "batch=3"]}, InputError, "two sizes, 2 and 3"),
        (["right.onnx"], {"sizes": {"seq": 2}}, InputError, "unknown dynamic dim 'seq'; choose from: batch"),
        (
            ["right.onnx"],
            {"sizes": {"batch": 10**5}},
            InputError,
            "'batch' is 100000; the model accepts 1 to",
        ),
        (["right.onnx"], {"sizes": {"batch": 2}, "feeds": {}}, InputError, "inputs were passed"),
        (["right.onnx"], {"feeds": {"z": np.zeros(3)}}, InputError, "needs the inputs ['x']"),
        (["some.engine"], {}, RuntimeUnavailable, "TensorRT-RTX (some.engine): "),
        (["missing.onnx"], {}, NormdeployError, "missing.onnx"),
        (["right.onnx"], {"norm_impl": ["fast"]}, InputError, "unknown form 'fast'"),
        (["right.onnx", "wrong.onnx"], {"norm_impl": ["all"]}, InputError, "2 files were passed"),
        (["right.onnx"], {"norms": "GroupNorm"}, InputError, "omit the files or --norms"),
        ([], {"norms": "BatchNorm"}, InputError, "unknown kind of norm 'BatchNorm'"),
        ([], {"norms": "GroupNorm", "sizes": {"batch": 3}}, InputError, "sizes were passed: {'batch': 3}"),
        ([], {"norms": "GroupNorm", "norm_impl": ["narrow"]}, InputError, "has the form narrow"),
        ([], {"norms": "GroupNorm", "threads": 0}, InputError, "threads is 0"),
        (
            [],
            {"norms": "GroupNorm", "norm_impl": ["plugin"]},
            RuntimeUnavailable,
            "TensorRT: ",
        ),
        (["right.onnx"], {"norm_impl": [""]}, InputError, "unknown form ''"),
        (
            ["right.onnx"],
            {"norm_impl": ["all"], "sizes": {"seq": 3}},
            InputError,
            "unknown dynamic dim 'seq'; choose from: batch",
        ),
        (
            ["right.onnx"],
            {"norm_impl": ["all"], "sizes": {"batch": 10**12}},
            InputError,
            "has more than 268435456 elements",
        ),
        (["right.onnx"], {"norm_impl": ["all"], "feeds": {}}, InputError, "on generated inputs"),
        (["right.onnx"], {"norm_impl": ["all"], "trust": True}, InputError, "trust: applies to a model"),
        (["free.onnx"], {"norm_impl": ["all"]}, InputError, "pass sizes with --size"),
    ],
)
def test_errors(files: Path, sources: list[str], options: dict[str, object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        normdeploy.bench([files / name for name in sources], **options)
    assert said in str(caught.value)


# ------------------------------------------------------------------ norms


def test_the_norms_of_a_file(files: Path) -> None:
    """Each once, at the sizes asked for or recorded; what has no size is noted."""
    found, notes = find_norm_cases(files / "right.onnx", {"batch": 3})
    assert found == [NormCase("LayerNorm", (3, 8), epsilon=float(np.float32(1e-5)))]
    assert notes == []
    assert len(find_norm_cases(files / "free.onnx", {"N": 3})[0]) == 1  # epsilon takes no time
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 6, 5] x) => (float[N, 6, 5] y) <float[6] s = {1, 2, 3, 4, 5, 6}, float[6] b = {0, 0, 0, 0, 0, 0}>
        { a = GroupNormalization <num_groups = 3> (x, s, b) c = GroupNormalization <num_groups = 3> (a, s, b)
          y = InstanceNormalization (c, s, b) }"""
    found, notes = find_norm_cases(onnx.parser.parse_model(text), {"N": 2})
    assert [(case.kind, case.shape, case.groups) for case in found] == [
        ("GroupNorm", (2, 6, 5), 3),
        ("InstanceNorm", (2, 6, 5), 1),
    ]
    found, notes = find_norm_cases(onnx.parser.parse_model(text))
    assert found == []
    assert len(notes) == 3
    assert "pass sizes with --size" in notes[0]


@pytest.mark.usefixtures("quick")
def test_the_forms_of_a_norm_race(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = NormCase("GroupNorm", (2, 6, 5), groups=3)
    result = bench_norms.bench_norms(
        [case, NormCase("RMSNorm", (2, 8))], ["instance", "standard", "decomposed"], RaceOptions(rounds=2)
    )
    assert [(e.form, e.norm) for e in result.entries] == [
        *((form, str(case)) for form in ("standard", "decomposed", "instance")),
        *((form, "RMSNorm of 2×8, axis -1") for form in ("standard", "decomposed")),
    ]
    assert [e.ratio == 1 for e in result.entries] == [e.form == "standard" for e in result.entries]
    standard, decomposed, instance = result.entries[:3]
    assert max(standard.error, decomposed.error, instance.error) < 1e-5
    assert standard.far_error > 100 * decomposed.far_error  # onnxruntime's GroupNormalization cancels
    assert result.not_run == ()
    raced = bench_norms.bench_norms([case], ["plugin", "standard"], RaceOptions(rounds=1))
    assert "TensorRT" in [missed.runtime for missed in raced.not_run]
    monkeypatch.setattr(NormCase, "evaluate_float64", lambda self, x: np.zeros_like(x))
    wrong = bench_norms.bench_norms([case], ["standard"], RaceOptions(rounds=1))
    assert not wrong
    assert "does not compute the norm" in wrong.entries[0].reason


@pytest.mark.usefixtures("quick")
def test_the_command_line(files: Path, tmp_path: Path) -> None:
    report = tmp_path / "race.json"
    command = ["bench", str(files / "right.onnx"), "--rounds", "2", "--size", "batch=3", "--report", str(report)]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "onnxruntime CPU" in done.output
    assert "2 timed" in done.output
    told = json.loads(report.read_text())
    assert told["verb"] == "bench"
    held = told["race"]
    assert (held["threads"], held["rounds"], held["shapes"]) == (1, 2, {"x": [3, 8]})
    assert told["files"] == {"source": str(files / "right.onnx")}
    text = render_page(told)
    assert f"{held['machine']['cores']} core" in text
    assert "load" not in render_page(told | {"race": held | {"machine": {}, "load": None}}).split("<main>")[1]
    (entry,) = held["entries"]
    assert {"runtime", "file", "form", "median", "p95", "p99", "samples", "ratio", "reason"} <= entry.keys()
    assert all({"runtime", "reason"} <= missed.keys() for missed in held["not_run"])
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["bench", str(files / "right.onnx"), str(files / "wrong.onnx"), "--rounds", "1", "--report", str(report)]
    )
    assert done.exit_code == 1
    assert json.loads(report.read_text())["files"] == {
        "source": str(files / "right.onnx"),
        "source 2": str(files / "wrong.onnx"),
    }
    assert "<h1>right.onnx, wrong.onnx</h1>" in render_page(json.loads(report.read_text()))
    assert "not timed: onnxruntime CPU · wrong.onnx: its outputs differ from" in done.output
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["bench", "--norms", "InstanceNorm", "--norm-impl", "standard,layer", "--rounds", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "InstanceNorm of 1×64×64×64" in done.output


@pytest.mark.parametrize("times", [(0.00123, 0.00234, 0.00345), (12.3, 123.0, 1230.0)])
def test_80_columns_break_no_word_and_no_number(times: tuple[float, float, float]) -> None:
    here, ran = (
        describe_machine(),
        {"median": times[0], "p95": times[1], "p99": times[2], "ratio": 1.34, "interval": (1.11, 1.33), "error": 1e-7},
    )
    reason = "its outputs differ from float64 reference: output 0 differs by 3.2e-04 of its largest value; not timed"
    files = [
        RaceEntry("eager", **ran),
        RaceEntry("onnxruntime CPU", "model.onnx", **ran),
        RaceEntry("onnxruntime CPU", "wrong.onnx", reason=reason),
    ]
    norm = {"norm": "LayerNorm of 2×8, axis -1"}
    forms = [
        RaceEntry("onnxruntime CPU", form=form, far_error=1e-3, **norm, **ran) for form in ("standard", "decomposed")
    ]
    for entries, words in (
        (files, ["eager", "onnxruntime", "model.onnx", reason]),
        (forms, ["standard", "decomposed", "1.0e-03"]),
    ):
        console = Console(width=80, record=True, file=io.StringIO())
        show_race(console, Race(1, 10, 3, 0, {"x": (2, 8)}, "float64", tuple(entries), (), here, None))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= 80
        shown = " ".join(text.split())
        for word in (*words, *(f"{t:.3g}" for t in times), "1.34", "1.11–1.33", "1.0e-07"):
            assert word in shown


def test_names_from_files_are_no_commands_to_the_terminal() -> None:
    race = Race(
        1,
        10,
        3,
        0,
        {"x\x1b[31m\u202e": (2, 8)},
        "float64",
        (RaceEntry("onnxruntime CPU", "a.onnx"),),
        (),
        describe_machine(),
        None,
    )
    console = Console(width=80, record=True, file=io.StringIO())
    race.show(console)
    text = console.export_text()
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "x\N{REPLACEMENT CHARACTER}[31m" in text


def test_both_ends_of_a_range_are_sizes_that_the_model_takes() -> None:
    dim = Dim("n", 2, 4, 8)
    for size in (2, 8):
        bench_given.check_sizes({"n": size}, {"n"}, [dim])
    for size in (1, 9):
        with pytest.raises(InputError, match="the model accepts 2 to 8"):
            bench_given.check_sizes({"n": size}, {"n"}, [dim])
