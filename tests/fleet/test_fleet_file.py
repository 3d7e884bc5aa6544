"""fleet.toml: what is wrong with it is said with its line, before any work."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import InputError
from normdeploy.fleet.fleet_commands import read_fleet_file
from normdeploy.fleet.job_steps import job_steps_of
from normdeploy.fleet.toml_lines import line_of_key

GOOD = """store = "kept"
[defaults]
steps = ["verify", "package"]
export = { opset = 20, fuse = "portable" }

[variants.fp32]
[variants.fp16.export]
precision = "fp16"
fuse = "standard"

[targets.cpu]
runtime = "onnxruntime"
[targets.ada]
runtime = "tensorrt-rtx"
version = "1.7.*"
compute_capability = "8.9"
bundle = false
build = { workspace = "1G" }

[models.one]
source = "one.pt2"
variant.fp16.export = { opset = 19 }
[models.zoo]
source = "zoo/*.pt2"
variants = ["fp32"]
targets = ["cpu"]
export = { metric = "cosine>=0.9", quantize = "int4", calibrate = "samples.npz" }
"""


def written(folder: Path, text: str) -> Path:
    (folder / "zoo").mkdir()
    for name in ("one.pt2", "zoo/a.pt2", "zoo/b c.pt2", "samples.npz"):
        (folder / name).touch()
    (folder / "fleet.toml").write_text(text)
    return folder / "fleet.toml"


def test_levels_go_before_each_other(tmp_path: Path) -> None:
    jobs = {job.name: job for job in read_fleet_file(written(tmp_path, GOOD)).iter_jobs()}
    assert list(jobs) == ["one/fp32", "one/fp16", "zoo.a/fp32", "zoo.b_c/fp32"]
    assert jobs["one/fp32"].options["export"] == {"opset": 20, "fuse": "portable"}
    assert jobs["one/fp16"].options["export"] == {"opset": 19, "fuse": "standard", "precision": "fp16"}
    assert jobs["zoo.a/fp32"].options["export"]["calibrate"] == tmp_path / "samples.npz"
    assert [t.name for t in jobs["zoo.a/fp32"].targets] == ["cpu"]


def test_the_steps_are_the_commands(tmp_path: Path) -> None:
    jobs = {job.name: job for job in read_fleet_file(written(tmp_path, GOOD)).iter_jobs()}
    commands = {step.name: " ".join(step.argv) for step in job_steps_of(jobs["one/fp16"])}
    assert commands == {
        "one/fp16/export": "export one.pt2 -o out/model.onnx --fuse standard --opset 19 --precision fp16"
        " --report out/report.json",
        "one/fp16/verify": "verify one.pt2 export/model.onnx --report out/report.json",
        "one/fp16/cpu/package": "package export/model.onnx -o out/bundle --name one --source one.pt2"
        " --report-from export/report.json",
        "one/fp16/cpu/recheck": "recheck package/bundle --report out/report.json",
        "one/fp16/ada/build": "build export/model.onnx -o out/model.engine --library tensorrt-rtx"
        " --compute-capability 8.9 --workspace 1G --report out/report.json",
        "one/fp16/ada/verify": "verify one.pt2 build/model.engine --report out/report.json",
    }
    step = next(s for s in job_steps_of(jobs["zoo.b_c/fp32"]) if s.verb == "export")
    assert step.argv[1:6] == ("b c.pt2", "-o", "out/model.onnx", "--calibrate", "files/samples.npz")
    assert step.files["files/samples.npz"] == tmp_path / "samples.npz"


def test_tokens_are_generated_with_onnx_files_alone(tmp_path: Path) -> None:
    text = GOOD.replace('source = "one.pt2"', 'source = "one.pt2"\nverify = {generate = 4}')
    jobs = {job.name: job for job in read_fleet_file(written(tmp_path, text)).iter_jobs()}
    commands = {step.name: step.argv for step in job_steps_of(jobs["one/fp16"])}
    assert "--generate" in commands["one/fp16/verify"]
    assert "--generate" not in commands["one/fp16/ada/verify"]


def test_name_of_a_package_model_is_a_source_without_files(tmp_path: Path) -> None:
    text = '[models.one]\nsource = "timm:resnet18.a1_in1k"\nexport = {model_arg = "pretrained=True"}\n'
    (tmp_path / "fleet.toml").write_text(text)
    (job,) = read_fleet_file(tmp_path / "fleet.toml").iter_jobs()
    export, verify = job_steps_of(job)
    assert export.argv[:4] == ("export", "timm:resnet18.a1_in1k", "-o", "out/model.onnx")
    assert verify.argv[:3] == ("verify", "timm:resnet18.a1_in1k", "export/model.onnx")
    assert "pretrained=True" in verify.argv
    # The code of the package belongs to the key of the step.
    assert (export.files, export.code) == ({}, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("steps", "stepz", 3, "unknown 'stepz'; did you mean 'steps'?"),
        ("opset = 20", 'opset = "20"', 4, "defaults.export.opset is '20'; expected an integer"),
        ('precision = "fp16"', 'precison = "fp16"', 8, "did you mean 'precision'?"),
        ('precision = "fp16"', 'precision = "fp15"', 20, "unknown precision 'fp15'"),
        ('runtime = "onnxruntime"', 'runtime = "ort"', 12, "expected one of 'onnxruntime', 'tensorrt-rtx', 'tensorrt'"),
        ('compute_capability = "8.9"\n', "", 13, "an engine of tensorrt-rtx works only on one compute capability"),
        (
            'compute_capability = "8.9"',
            'compute_capability = "89"',
            16,
            "is '89'; expected a compute capability such as 8.9",
        ),
        (
            'runtime = "onnxruntime"',
            'runtime = "onnxruntime"\ncompute_capability = "8.9"',
            13,
            "does not apply to onnxruntime",
        ),
        ('source = "one.pt2"', 'source = "two.pt2"', 21, "model not found: 'two.pt2', relative to fleet.toml"),
        ('"zoo/*.pt2"', '"zoo/*.onnx"', 24, "matches no file, relative to fleet.toml"),
        ('source = "one.pt2"\n', "", 20, "'source' is missing"),
        ('variants = ["fp32"]', 'variants = ["fp33"]', 25, "unknown [variants.fp33]; did you mean 'fp32'?"),
        ('targets = ["cpu"]', 'targets = ["gpu"]', 26, "unknown [targets.gpu]; did you mean 'cpu'?"),
        ("variant.fp16.export = {", "variant.fp8.export = {", 22, "unknown variant 'fp8' of this model"),
        (
            'calibrate = "samples.npz"',
            'calibrate = "gone.npz"',
            27,
            "file not found: 'gone.npz', relative to fleet.toml",
        ),
        ('"cosine>=0.9"', '"cosines>=0.9"', 23, "'cosines'"),
        ('quantize = "int4", calibrate = "samples.npz"', 'quantize = "int8"', 23, "int8 needs samples"),
        (
            'quantize = "int4", calibrate = "samples.npz"',
            "rotate = true",
            23,
            "dynamic and rotate need quantization",
        ),
        ("opset = 20", 'part = "all"', 4, "add one model per part"),
        ("[variants.fp32]", '[variants."a/b"]', 6, "may contain only letters, digits"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    assert GOOD.count(old) >= 1
    file = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        read_fleet_file(file)
    assert f"fleet.toml, line {line}:" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[models", "TOML"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        (b"", "'models' is missing"),
        (b"models = 3", "models is 3; expected a table"),
        (b"[models]", "models"),
        (b"a = " + b"[" * 5000, "TOML"),
    ],
)
def test_what_is_no_fleet(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "fleet.toml").write_bytes(text)
    with pytest.raises(InputError, match=r"fleet\.toml") as error:
        read_fleet_file(tmp_path / "fleet.toml")
    assert said in str(error.value)


def test_two_files_of_one_name(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    (tmp_path / "zoo" / "b_c.pt2").touch()
    with pytest.raises(InputError, match=r"line 24: .*'b c\.pt2' and 'b_c\.pt2' would both be zoo\.b_c"):
        read_fleet_file(file)


def test_lines() -> None:
    text = 'a = 1\n\n[t]\nlist = [\n  1,\n  2,\n]\n[t.u]\nx = """\nmany\nlines"""\n'
    assert [
        line_of_key(text, path) for path in (["a"], ["t", "list"], ["t", "list", 1], ["t", "u", "x"], ["gone"])
    ] == [
        1,
        7,
        7,
        11,
        1,
    ]


def test_line_of_many_lines_are_bisected(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"[models.m{i}]\nsource = [\n'a',\n'b']\n" for i in range(500))
    parsed = []
    right = tomllib.loads

    def counted(beginning: str) -> dict[str, Any]:
        parsed.append(beginning)
        return right(beginning)

    monkeypatch.setattr(tomllib, "loads", counted)
    assert line_of_key(text, ["models", "m321", "source"]) == 4 * 322
    # Each half is cut at the end of a statement, which is at most four lines away.
    assert len(parsed) <= 1 + 4 * math.ceil(math.log2(2000))
