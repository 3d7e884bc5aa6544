"""A bundle asked again: what recheck finds changed, and what it never opens or believes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError, NormdeployError
from normdeploy.storage.file_hash import hash_file
from normdeploy.verbs.package import sample_judgement
from normdeploy.verbs.package.evidence_bundle import open_bundle
from normdeploy.verbs.recheck import recheck_function as rechecking
from normdeploy.verbs.verify.output_results import OutputResult
from tests.packaged import edited, written
from tests.work import count_calls


def test_nothing_changed(made: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["recheck", str(made / "bundle"), "--report", str(tmp_path / "r.json")])
    assert done.exit_code == 0
    assert "nothing got worse" in done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["schema"] == "normdeploy/recheck/1"
    assert (report["ok"], report["changes"]) == (True, [])
    assert {r["verdict"] for r in report["parity"]["results"]} == {"pass"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # a copy of its own: the file may be a link
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "what", "name", "said"),
    [
        (lambda b: flip(b / "samples/001.expected.npz"), "file", "samples/001.expected.npz", "sha256"),
        (lambda b: (b / "README.md").unlink(), "file", "README.md", "missing"),
        (lambda b: (b / "README.md").unlink() or (b / "README.md").write_text("x"), "file", "README.md", "1 bytes"),
        (
            lambda b: (
                (b / "model_repository/model_onnx/2").mkdir()
                or (b / "model_repository/model_onnx/2/model.onnx").touch()
            ),
            "file",
            "model_repository/model_onnx/2/model.onnx",
            "new",
        ),
        (
            lambda b: (b / "model_repository/model_onnx/2").mkdir(),
            "file",
            "model_repository/model_onnx/2/",
            "an empty folder",
        ),
        (lambda b: (b / "link").symlink_to("/etc/passwd"), "file", "link", "link"),
        (lambda b: os.mkfifo(b / "pipe"), "file", "pipe", "special"),
        (
            lambda b: (b / "model_repository/model_onnx/config.pbtxt").write_text("{"),
            "config",
            "config.pbtxt",
            "can't read",
        ),
        (
            lambda b: (b / "model_repository/model_onnx/warmup/0_0.bin").write_bytes(b"1"),
            "config",
            "config.pbtxt",
            "has 1 bytes",
        ),
        (
            lambda b: (b / "model_repository/model_onnx/warmup/0_0.bin").write_bytes(bytes(2**16)),
            "config",
            "config.pbtxt",
            "has 65536 bytes",
        ),
    ],
)
def test_damage_is_named(bundle: Path, spoil: Callable[[Path], Any], what: str, name: str, said: str) -> None:
    spoil(bundle)
    found = normdeploy.recheck(bundle)
    assert not found
    (change,) = [c for c in found.changes if c.what == what]
    assert name in change.name
    assert said in change.now
    assert change.worse
    ran = found.judgement
    assert ran is not None  # the other samples were run all the same
    assert len(ran.cases) == len(json.loads((bundle / "manifest.json").read_text())["samples"]) - ("samples" in name)


def test_other_versions_are_told_and_are_not_worse(bundle: Path) -> None:
    edited(bundle, lambda m: m["versions"].update(onnx="1.0", driver="570.1"))
    found = normdeploy.recheck(bundle)
    assert found
    assert {(c.name, c.was, c.now) for c in found.changes} == {
        ("onnx", "1.0", onnx.__version__),
        ("driver", "570.1", ""),
    }


def test_table_of_many_versions_is_short_and_tells_what_is_worse_first(bundle: Path) -> None:
    """A manifest may name any number of versions, and each is a row."""
    edited(bundle, lambda m: m["versions"].update({f"library{i}": "1" for i in range(100_000)}))
    (bundle / "README.md").write_text("x")
    results = []
    # A dozen calls for each row.
    assert count_calls(lambda: results.append(CliRunner().invoke(app, ["recheck", str(bundle)]))) < 3_000_000
    (done,) = results
    assert done.exit_code == 1
    assert "and 99801 more changes" in done.output
    assert done.output.index("README.md") < done.output.index("library0")


def test_a_newer_model_is_judged_by_the_bundles_samples(made: Path, tmp_path: Path) -> None:
    proto = onnx.load(made / "model.onnx")
    weight = max(proto.graph.initializer, key=lambda t: len(t.raw_data))
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[0] += 1e-3
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(proto, tmp_path / "newer.onnx")
    assert normdeploy.recheck(made / "bundle", onnx=made / "model.onnx")
    done = CliRunner().invoke(app, ["recheck", str(made / "bundle"), "--onnx", str(tmp_path / "newer.onnx")])
    assert done.exit_code == 1
    assert "2 got worse" in done.output


def test_an_infinite_error_is_written(tmp_path: Path) -> None:
    path = written(tmp_path, "g (double[n, 3] x) => (double[n, 3] y) { y = Identity(x) }")
    normdeploy.package(path, tmp_path / "b", feeds={"x": np.full((2, 3), 1.7e308)})
    newer = written(tmp_path, "g (double[n, 3] x) => (double[n, 3] y) { y = Neg(x) }", "newer.onnx")
    done = CliRunner().invoke(
        app, ["recheck", str(tmp_path / "b"), "--onnx", str(newer), "--report", str(tmp_path / "r.json")]
    )
    assert done.exit_code == 1
    assert [r["max_abs_error"] for r in json.loads((tmp_path / "r.json").read_text())["parity"]["results"]] == [
        "inf",
        "inf",
    ]


def test_what_was_run_and_is_not_any_more_is_worse(bundle: Path) -> None:
    edited(bundle, lambda m: m["results"].append({**m["results"][0], "runtime": "onnxruntime CUDA (optimizer on)"}))
    edited(bundle, lambda m: m["norms"][0]["runtimes"].update({"onnxruntime CPU": "kernel", "TensorRT-RTX": "missing"}))
    found = normdeploy.recheck(bundle)
    (result,) = [c for c in found.changes if c.what == "result"]
    assert (result.was[:4], result.worse) == ("pass", True)
    assert "no GPU" in result.now
    (norm,) = [c for c in found.changes if c.what == "norm"]
    assert (norm.was, norm.now, norm.worse) == ("missing", "layers", False)


def test_an_engine_that_was_changed_is_not_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading one runs what it holds."""
    (bundle / "model.engine").write_bytes(b"changed")
    edited(bundle, lambda m: m["files"].update({"model.engine": {"sha256": "0" * 64, "bytes": 7}}))
    entry = {"path": "model.engine", "runtime": "tensorrt", "compute_capability": "", "served": False}
    edited(bundle, lambda m: m["engines"].append(entry))
    asked, judge = [], sample_judgement.judge_samples
    monkeypatch.setattr(
        sample_judgement,
        "judge_samples",
        lambda path, engines, *rest, **more: asked.extend(engines) or judge(path, [], *rest, **more),
    )
    found = normdeploy.recheck(bundle)
    assert asked == []
    assert "model.engine changed after packaging and was not run" in found.notes


@pytest.mark.parametrize(
    ("spoil", "read"),
    [
        ("", None),
        ("changed", False),  # it holds code for the GPU
        ("of nobody", False),
        ("none", None),
    ],
)
def test_a_runtime_cache_is_read_where_it_is_what_was_packaged(
    spoil: str, read: bool | None, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, cache = {}, bundle / "model.engine.runtime-cache"
    for path, content in ((bundle / "model.engine", b"vtrt"), (cache, b"kernels")):
        path.write_bytes(content)
        entry = {path.name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}}
        if spoil != "of nobody" or path != cache:
            edited(bundle, lambda m, entry=entry: m["files"].update(entry))
    if spoil == "changed":
        cache.write_bytes(b"KERNELS")
    elif spoil == "none":
        cache.unlink()
    entry = {"path": "model.engine", "runtime": "tensorrt-rtx", "compute_capability": "", "served": False}
    edited(bundle, lambda m: m["engines"].append(entry))
    judge = sample_judgement.judge_samples

    def spied(path: Path, engines: Any, *rest: Any, **more: Any) -> Any:
        told.update(more, engines=engines)
        return judge(path, [], *rest, **more)

    monkeypatch.setattr(sample_judgement, "judge_samples", spied)
    found = normdeploy.recheck(bundle)
    assert [p.name for p in told["engines"]] == ["model.engine"]
    assert told["runtime_cache"] is read
    assert any("no runtime cache was read" in note for note in found.notes) == (read is False)


def test_a_norm_that_is_gone_is_worse_and_a_new_one_is_not(bundle: Path) -> None:
    def change() -> tuple[str, str, bool]:
        (norm,) = [c for c in normdeploy.recheck(bundle).changes if c.what == "norm"]
        return norm.was, norm.now, norm.worse

    edited(bundle, lambda m: m["norms"].append(m["norms"][0] | {"tensor": "another"}))
    assert change() == ("there", "gone", True)
    edited(bundle, lambda m: m["norms"].clear())
    assert change() == ("", "there", False)


HOSTILE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: m.update(schema="normdeploy/package/9"), "has the schema 'normdeploy/package/9'"),
    (lambda m: m.update(files=[1]), "'files' in manifest.json is malformed"),
    (lambda m: m.update(files={"a": {"sha256": 1, "bytes": 2}}), "malformed"),
    (lambda m: m.update(samples=3), "malformed"),
    (lambda m: m.update(engines=[{"path": "../../x"}]), "no hash of '../../x'"),
    (lambda m: m.update(engines=[{"path": "/etc/passwd"}]), "no hash of '/etc/passwd'"),
    (lambda m: m["samples"][0].update(inputs="samples/../../x"), "no hash of"),
    (lambda m: m["samples"][0].update(inputs=None), "None is not a string"),
    (lambda m: m["samples"][0].update(inputs=[]), r"\[\] is not a string"),
    (lambda m: m["samples"][0].update(inputs=m["samples"][1]["inputs"]), "uses it twice"),
    (lambda m: m["files"].pop("samples/000.inputs.npz"), "no hash of 'samples/000.inputs.npz'"),
    (lambda m: m.pop("onnx"), "'onnx' in manifest.json is malformed"),
    (lambda m: m.update(onnx="/etc/passwd"), "no hash of '/etc/passwd'"),
    (lambda m: m["samples"][0].update(kind="other"), "no bound for"),
    (lambda m: m["bounds"][0].update(allowed=float("nan")), "it holds NaN"),
    (lambda m: m["bounds"][0].update(allowed=-1), "the bound -1"),
    (lambda m: m["bounds"][0].update(allowed=1e999), "it holds Infinity"),
    (lambda m: m["inputs"][0].update(dtype="float64"), "has float32 for 'x', but the manifest has float64"),
    (lambda m: m["inputs"][0].update(key="y"), "has nothing for 'x'"),
    (lambda m: m.update(results=None), "malformed"),
    (lambda m: m.update(norms=[{}]), "malformed"),
    (lambda m: m.update(configs=7), "malformed"),
    (lambda m: m.update(versions="x"), "malformed"),
]


@pytest.mark.parametrize(("change", "said"), HOSTILE)
def test_a_hostile_manifest_is_refused(bundle: Path, change: Callable[[Any], Any], said: str) -> None:
    edited(bundle, change)
    with pytest.raises(InputError, match=said):
        normdeploy.recheck(bundle)


def test_a_hostile_folder_is_refused(bundle: Path, tmp_path: Path) -> None:
    for path, said in [(tmp_path / "none", "folder not found"), (bundle / "samples", "manifest.json not found")]:
        with pytest.raises(InputError, match=said):
            normdeploy.recheck(path)
    for text in ("[" * 100_000, "{", "[]", '"x"'):
        (bundle / "manifest.json").write_text(text)
        with pytest.raises(InputError, match=r"as JSON|has the schema 'None'"):
            normdeploy.recheck(bundle)
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"manifest\.json not found"):
        normdeploy.recheck(bundle)


def test_pickles_are_never_loaded(bundle: Path, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    path = "samples/000.inputs.npz"
    (bundle / path).unlink()
    np.savez(bundle / path, x=np.array([Touch()], object))
    entry = {"sha256": hash_file(bundle / path), "bytes": (bundle / path).stat().st_size}
    edited(bundle, lambda m: m["files"].update({path: entry}))
    with pytest.raises(NormdeployError, match="pickled objects, which are never loaded"):
        normdeploy.recheck(bundle)
    assert not (tmp_path / "executed").exists()


def test_a_sample_that_unpacks_to_more_than_itself_is_refused(bundle: Path) -> None:
    path = bundle / "samples/000.inputs.npz"
    path.unlink()
    np.savez_compressed(path, x=np.zeros((100_000, 8), np.float32))
    entry = {"sha256": hash_file(path), "bytes": path.stat().st_size}
    edited(bundle, lambda m: m["files"].update({"samples/000.inputs.npz": entry}))
    with pytest.raises(InputError, match="unpacks to 3200128 bytes, but at most"):
        normdeploy.recheck(bundle)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda b: next((b / "model_repository/model_onnx/1").iterdir()).unlink(),
            "not run: the ONNX file is missing",
        ),
        (lambda b: edited(b, lambda m: m.update(samples=[])), "not run: all samples changed after packaging"),
    ],
)
def test_where_nothing_can_be_run_every_result_is_worse(bundle: Path, spoil: Callable[[Path], Any], said: str) -> None:
    spoil(bundle)
    found = normdeploy.recheck(bundle)
    told = [(c.now, c.worse) for c in found.changes if c.what == "result"]
    assert told == [(said, True)] * 2
    assert not any("empty folder" in c.now for c in found.changes)


def test_a_bound_of_zero_allows_nothing(bundle: Path) -> None:
    edited(bundle, lambda m: [bound.update(allowed=0) for bound in m["bounds"]])
    assert [c.was[:4] + c.now[:4] for c in normdeploy.recheck(bundle).changes] == ["passfail"] * 2


def test_a_newer_file_that_is_none_is_an_error(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(NormdeployError, match="file not found"):
        normdeploy.recheck(bundle, onnx=tmp_path / "none.onnx")


def test_links_in_the_place_of_files_are_not_followed(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "samples", tmp_path / "elsewhere")
    (bundle / "samples").symlink_to(tmp_path / "elsewhere")
    found = normdeploy.recheck(bundle)
    assert not found
    assert found.judgement is None
    assert ("samples", True) in {(c.name, c.worse) for c in found.changes}
    with pytest.raises(InputError, match="contains a link"):
        open_bundle(bundle).file_path("samples/000.inputs.npz")


@pytest.mark.parametrize(("was", "verdict", "worse"), [(True, "fail", True), (False, "fail", False)])
def test_what_failed_before_gets_no_worse_by_another_error(was: bool, verdict: str, worse: bool) -> None:
    now = OutputResult("y", "r", "float32", 9.0, 0.0, 1.0, verdict, "seed 0")
    judgement: Any = SimpleNamespace(results=(now,), not_run=())
    (change,) = rechecking.compare_outputs({("y", "r"): rechecking.RecordedResult(was, 1.0, "")}, judgement, "")
    assert change.worse == worse
