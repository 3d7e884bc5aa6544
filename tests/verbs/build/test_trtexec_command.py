"""The printed lines of trtexec say what ``build`` would build."""

from __future__ import annotations

import shlex
from pathlib import Path

import onnx
import pytest
import typer.testing

from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.verbs.build.build_options import BuildCall
from normdeploy.verbs.build.trtexec_command import trtexec_lines

MODEL = """<ir_version: 10, opset_import: ["" : 21%s]>
g (float[n, 3] x, float[3] c) => (float[n, 3] y) { y = %s(x, c) }"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(MODEL % ("", "Add")), "m.onnx")
    onnx.save(onnx.parser.parse_model(MODEL % (', "mine" : 1', "mine.Scale")), "foreign.onnx")
    return tmp_path


def flags_of(words: tuple[str, ...]) -> dict[str, str]:
    return {flag: value for flag, _, value in (word.partition("=") for word in words if word.startswith("--"))}


def test_every_option_becomes_its_flag(folder: Path) -> None:
    lines = trtexec_lines(
        BuildCall(
            "m.onnx",
            "m.engine",
            profiles=["n=1:2:4"],
            timing_cache="t.cache",
            workspace="512M",
            optimization_level=4,
            hardware_compatibility="ampere-plus",
            version_compatible=True,
            refit=True,
            weight_streaming=True,
        )
    )
    assert lines.tensorrt10[0] == "trtexec"
    assert flags_of(lines.tensorrt10) == {
        "--onnx": "m.onnx",
        "--saveEngine": "m.engine",
        # Only dynamic inputs are part of a profile.
        "--minShapes": "x:1x3",
        "--optShapes": "x:2x3",
        "--maxShapes": "x:4x3",
        "--timingCacheFile": "t.cache",
        "--memPoolSize": f"workspace:{512 * 2**20}B",
        "--builderOptimizationLevel": "4",
        "--hardwareCompatibilityLevel": "ampere+",
        "--versionCompatible": "",
        "--refit": "",
        "--allowWeightStreaming": "",
        "--noTF32": "",
        "--profilingVerbosity": "detailed",
        "--skipInference": "",
        "--stronglyTyped": "",
    }


def test_tensorrt_11_gets_no_flag_of_types(folder: Path) -> None:
    lines = trtexec_lines(BuildCall("m.onnx", "m.engine", opt_shapes="x:2x3"))
    removed = {"--fp16", "--bf16", "--int8", "--fp8", "--best", "--stronglyTyped"}
    assert not removed & set(lines.tensorrt11)
    assert set(lines.tensorrt10) - set(lines.tensorrt11) == {"--stronglyTyped"}


def test_the_container_gets_the_current_folder_only_if_it_holds_the_files(folder: Path) -> None:
    inside = trtexec_lines(BuildCall("m.onnx", "m.engine", opt_shapes="x:2x3"))
    assert inside.container[:2] == ("docker", "run")
    assert '-v "$PWD":/models -w /models' in str(inside)
    outside = trtexec_lines(BuildCall(folder / "m.onnx", "m.engine", opt_shapes="x:2x3"))
    assert outside.container == ()
    assert "docker" not in str(outside)


def test_text_is_comments_and_commands(folder: Path) -> None:
    text = str(trtexec_lines(BuildCall("m.onnx", "my engine.plan", opt_shapes="x:2x3")))
    for line in text.splitlines():
        assert line.startswith("#") or shlex.split(line)[0] in ("trtexec", "docker")
    assert "'--saveEngine=my engine.plan'" in text


def test_an_op_of_another_library_needs_its_plugins(folder: Path) -> None:
    lines = trtexec_lines(BuildCall("foreign.onnx", "m.engine", opt_shapes="x:2x3"))
    (note,) = (note for note in lines.notes if "--staticPlugins" in note)
    assert "mine.Scale" in note
    assert not any(
        "--staticPlugins" in note for note in trtexec_lines(BuildCall("m.onnx", "e", opt_shapes="x:2x3")).notes
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_impl": "plugin"}, "trtexec can't put normdeploy's kernels into an engine"),
        ({"ep_context": "embed"}, "trtexec writes no EPContext file"),
        ({"more_profiles": ["n=4:5:6"]}, "one profile; omit --add-profile"),
        ({"compute_capabilities": ["8.6"]}, "omit it"),
        ({"profiles": ["n=1:2:3"], "opt_shapes": "x:2x3"}, "state the same profile as --profile"),
        ({}, "the range of the dim 'n'|n"),
    ],
)
def test_options_without_a_counterpart_are_refused(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        trtexec_lines(BuildCall("m.onnx", "m.engine", **options))  # type: ignore[arg-type]


def test_the_command_line_prints_and_builds_nothing(folder: Path) -> None:
    words = "build m.onnx -o m.engine --optShapes x:2x3 --print-trtexec --store kept"
    done = typer.testing.CliRunner().invoke(app, words.split())
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1].startswith("trtexec --onnx=m.onnx --saveEngine=m.engine")
    assert sorted(path.name for path in folder.iterdir()) == ["foreign.onnx", "m.onnx"]
