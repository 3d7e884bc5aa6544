"""``inspect`` of an engine's layers: tables, comparison, report, page, node data and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.verbs.inspect.engine_norms import NormForm
from normdeploy.verbs.inspect.engine_report import EngineReport
from tests.engine_files import BY_HAND, compiled_layers, info, layer, metadata, profile, save, tensor, write_model

HALF = "Row major linear FP16 format"
REFORMAT = "Reformatting CopyNode for Input Tensor 0 to plug"
TIMES = (0.012, 0.05, 0.008)


class Files:
    """An ONNX file, and layers and times of two engines of it; in the second engine, the first norm is a plugin."""

    def __init__(self, folder: Path) -> None:
        compiled = compiled_layers()
        plugin = layer(
            "plug", "PluginV3", [tensor("rx", HALF)], [tensor("o", HALF)], Metadata=metadata("out_y_LayerNorm")
        )
        reformat = layer(REFORMAT, "Reformat", [tensor("x")], [tensor("rx", HALF)], Metadata="")
        other = [reformat, plugin | {"PluginType": "LayerNorm"}, *compiled[1:]]
        self.folder = folder
        self.onnx = write_model(folder / "model.onnx")
        self.first = save(folder / "first.json", info(compiled))
        self.second = save(folder / "second.json", info(other))
        times = dict(zip([each["Name"] for each in compiled], TIMES, strict=True))
        self.first_times = save(folder / "first_times.json", profile(times))
        shared = {each["Name"]: times[each["Name"]] for each in compiled[1:]}
        self.second_times = save(folder / "second_times.json", profile({REFORMAT: 0.002, "plug": 0.006} | shared))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def inspect(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_each_norm_has_its_layer_and_its_time(files: Files) -> None:
    report = normdeploy.inspect_engine(files.first, onnx_files=files.onnx, profile_json=files.first_times)
    (build,) = report.builds
    first, second = build.norms
    assert [norm.form for norm in build.norms] == [NormForm.KERNEL] * 2
    assert (first.tensor, first.fused_with, first.missing) == ("out_y", (), ())
    assert (first.ms, second.ms) == (0.012, 0.008)
    assert build.total_ms == pytest.approx(0.07)
    assert build.norm_ms == pytest.approx(0.02)
    assert first.share == pytest.approx(0.012 / 0.07)
    assert not build.notes


def test_changed_norms_are_named(files: Files) -> None:
    report = normdeploy.inspect_engine(
        files.first,
        files.second,
        onnx_files=files.onnx,
        profile_json=[files.first_times, files.second_times],
    )
    changed, same = report.changes
    assert changed.changed == ("form", "types", "reformats", "time")
    # The reformat before the plugin counts too: 0.006 + 0.002 against 0.012.
    assert changed.factor == pytest.approx(2 / 3)
    assert (same.changed, same.factor) == ((), 1.0)
    assert report.builds[1].reformat_ms == 0.002


def test_norm_of_one_engine_alone_is_a_change(files: Files) -> None:
    fewer = save(files.folder / "fewer.json", info(compiled_layers()[:2]))
    forward = normdeploy.inspect_engine(files.first, fewer).changes
    assert [(c.name, c.first, c.second, c.changed) for c in forward if c.changed] == [("ln", 1, None, ("only in one",))]
    backward = normdeploy.inspect_engine(fewer, files.first).changes
    assert [(c.name, c.first, c.second) for c in backward if c.changed] == [("ln", None, 1)]


def test_tables_name_forms_types_and_shares(files: Files) -> None:
    done = inspect(
        *(files.first, files.second, "--onnx", files.onnx),
        *("--profile-json", files.first_times, "--profile-json", files.second_times),
    )
    assert done.exit_code == 0
    for text in ("one compiled kernel (kgen)", "plugin (LayerNorm)", "float16 → float16", "17.1 %", "×0.67"):
        assert text in done.output
    assert "1 of 2 norms changed" in done.output


def test_without_the_onnx_file_layers_are_listed_by_time(files: Files) -> None:
    done = inspect(files.first, "--profile-json", files.first_times)
    assert done.exit_code == 0
    assert "guessed from names" in done.output
    listed = done.output.partition("layers by time")[2]
    names = [each["Name"][:20] for each in compiled_layers()]
    assert sorted(names, key=listed.index) == [names[1], names[0], names[2]]


def test_names_alone_give_a_note_with_the_option(files: Files) -> None:
    names = save(files.folder / "names.json", info([each["Name"] for each in compiled_layers()]))
    done = inspect(names)
    assert done.exit_code == 0
    assert "--profilingVerbosity=detailed" in done.output
    assert "MeanSubMulMeanAddSqrt" in done.output


def test_report_page_and_node_data_are_written(files: Files) -> None:
    report, page, data = (files.folder / name for name in ("r.json", "r.html", "nodes.json"))
    done = inspect(
        *(files.first, "--onnx", files.onnx, "--profile-json", files.first_times, "-q"),
        *("--report", report, "--html", page, "--node-data", data),
    )
    assert (done.exit_code, done.output) == (0, "")
    told = json.loads(report.read_text())
    assert told["files"].keys() == {"source", "onnx", "profile"}
    assert [norm["form"] for norm in told["engine_layers"]["builds"][0]["norms"]] == ["one compiled kernel"] * 2
    html = page.read_text()
    assert "Norms in the engine" in html
    assert html.count("<svg") == 2
    nodes = json.loads(data.read_text())
    assert nodes["results"] == {
        **{name: {"value": 0.012} for name in BY_HAND},
        "linear": {"value": 0.05},
        "ln": {"value": 0.008},
    }
    assert [stop["stop"] for stop in nodes["gradient"]] == [0, 1]


def test_node_data_without_times_are_kinds(files: Files) -> None:
    data = files.folder / "nodes.json"
    normdeploy.inspect_engine(files.first, node_data=data)
    results = json.loads(data.read_text())["results"]
    assert results["ln"] == {"value": "compiled kernel"}


def test_node_without_a_name_is_found_by_its_output(files: Files) -> None:
    model = onnx.load(files.onnx)
    model.graph.node[-1].ClearField("name")
    onnx.save(model, files.onnx)
    last = compiled_layers()[-1] | {"Metadata": metadata("node_of_y")}
    source = save(files.folder / "unnamed.json", info([last]))
    data = files.folder / "nodes.json"
    (build,) = normdeploy.inspect_engine(source, onnx_files=files.onnx, node_data=data).builds
    assert [norm.form for norm in build.norms] == [NormForm.ABSENT, NormForm.KERNEL]
    assert json.loads(data.read_text())["results"].keys() == {"y"}


def test_page_escapes_names_from_the_file(files: Files) -> None:
    hostile = "<script>norm</script>\x1b[31m\u202e"
    layers = [layer(hostile, "kgen", [], [], Metadata=metadata(hostile), PluginType=hostile)]
    page = files.folder / "p.html"
    done = inspect(save(files.folder / "h.json", info(layers)), "--html", page)
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "<script>" not in page.read_text()


def test_long_lists_stay_short(files: Files) -> None:
    names = [f"/block.{i}/norm/{'x' * 500}" for i in range(2000)]
    layers = [layer(f"k{i}", "kgen", [], [], Metadata=metadata(name, *names[:50])) for i, name in enumerate(names)]
    source = save(files.folder / "long.json", info(layers))
    page = files.folder / "p.html"
    assert inspect(source, "--html", page, "-q").exit_code == 0
    assert page.stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{first_times}",), "pass it with --profile-json"),
        (("{first}", "--profile-json", "{first}"), "not the times of layers; pass it as FILE"),
        (("{first}", "--profile-json", "{second_times}", "--profile-json", "{first_times}"), "was given 2 times"),
        (("{first}", "{second}", "--profile-json", "{first_times}"), "was given 1 times for 2 engines"),
        (("{first}", "--onnx", "{onnx}", "--onnx", "{onnx}"), "--onnx was given 2 times"),
        (("{first}", "{second}", "--node-data", "n.json"), "--node-data shows one engine"),
        (("{first}", "--explain", "y"), "--explain is for models"),
        (("{first}", "--input", "x[1]"), "--input is for models"),
        (("{onnx}", "--profile-json", "{first_times}"), "--profile-json is for the layers of an engine"),
        (("{onnx}", "{first}"), "not JSON"),
        (("{first}", "--report", "{first}"), "would replace"),
        (("{first}", "--node-data", "{first}"), "would replace"),
        (("{first}", "--onnx", "missing.onnx"), "missing.onnx"),
        (("missing.json",), "can't read 'missing.json'"),
        (("{engine}",), "--exportLayerInfo"),
    ],
)
def test_wrong_files_are_refused(files: Files, arguments: tuple[str, ...], said: str) -> None:
    engine = files.folder / "m.engine"
    engine.write_bytes(b"vtrt" + bytes(60))
    done = inspect(*(argument.format(**vars(files), engine=engine) for argument in arguments))
    assert done.exit_code == 1
    assert said in str(done.exception)


def test_times_of_another_engine_are_refused(files: Files) -> None:
    other = save(files.folder / "other.json", profile({"conv": 1.0}))
    with pytest.raises(InputError, match="they are of different engines"):
        normdeploy.inspect_engine(files.first, profile_json=other)


def test_times_of_further_layers_give_a_note(files: Files) -> None:
    times = profile({compiled_layers()[0]["Name"]: 0.9, "another": 0.1})
    (build,) = normdeploy.inspect_engine(files.first, profile_json=save(files.folder / "t.json", times)).builds
    assert build.notes == (
        f"10 % of the time in {files.folder / 't.json'} belongs to layers that are not in {files.first}",
    )


def test_another_onnx_file_gives_a_note(files: Files) -> None:
    foreign = save(files.folder / "foreign.json", info([layer("a", "kgen", [], [], Metadata=metadata("a"))]))
    (build,) = normdeploy.inspect_engine(foreign, onnx_files=files.onnx).builds
    assert "the engine may be built from another file" in build.notes[0]


def test_first_profile_is_shown_with_a_note(files: Files) -> None:
    layers = [
        each | {"Name": f"{each['Name']}{suffix}"} for suffix in ("", " [profile 1]") for each in compiled_layers()
    ]
    (build,) = normdeploy.inspect_engine(save(files.folder / "two.json", info(layers))).builds
    assert len(build.layers) == 3
    assert "optimization profile 0" in build.notes[0]


def test_result_prints_as_the_command_does(files: Files) -> None:
    report = normdeploy.inspect_engine(str(files.first), str(files.second))
    assert isinstance(report, EngineReport)
    assert "norms changed" in repr(report)
    assert "plugin (LayerNorm)" in str(report)
