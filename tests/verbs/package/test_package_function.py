"""Evidence bundles: what Triton is told (read by its own protobuf), and what is expected of the samples."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from google.protobuf import text_format

import normdeploy
from normdeploy.errors import InputError, RuntimeUnavailable
from normdeploy.storage import folder_replacement as atomic_folder
from normdeploy.storage.onnx_files import write_bytes
from normdeploy.verbs.package import bundle_text as package_text
from normdeploy.verbs.package import manifest, model_files, samples, triton_config
from normdeploy.verbs.package.certificate_search import Certificates
from normdeploy.verbs.package.package_job import check_target, make_serving
from normdeploy.verbs.package.package_options import FoundReport, PackageCall
from normdeploy.verbs.package.sample_judgement import Judgement
from normdeploy.verbs.package.triton_config import ServingOptions, TritonPort, WarmupRequest
from normdeploy.verbs.verify.output_results import OutputResult
from tests.packaged import ADD, given, written


def _tritonclient() -> ModuleType:
    """Triton's own messages; importing them as ``tritonclient.grpc`` would need grpc, which they do not."""
    package = importlib.util.find_spec("tritonclient")
    assert package is not None
    assert package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRITON = _tritonclient()
ARG_MAX = "z = MatMul(x, w) y = ArgMax<axis=1, keepdims=0>(z)"


def parsed(text: str) -> Any:
    """A configuration as Triton reads it; our own messages must be the same bytes."""
    config = text_format.Parse(text, TRITON.ModelConfig())
    assert TRITON.ModelConfig.FromString(triton_config.parse_config(text).SerializeToString()) == config
    return config


def test_triton_reads_the_configuration(made: Path) -> None:
    repository = made / "bundle" / "model_repository"
    assert os.listdir(repository) == ["model_onnx"]
    config = parsed((repository / "model_onnx" / "config.pbtxt").read_text())
    assert (config.name, config.platform, config.backend) == ("model_onnx", "onnxruntime_onnx", "onnxruntime")
    assert config.max_batch_size == 16  # as the export recorded
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [("x", TRITON.TYPE_FP32, [8])]
    assert [list(o.dims) for o in config.output] == [[8]]
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 16]
    assert [(g.count, g.kind) for g in config.instance_group] == [(2, TRITON.ModelInstanceGroup.KIND_CPU)]
    assert not config.HasField("optimization")
    assert [w.batch_size for w in config.model_warmup] == [1, 4, 16]
    data = config.model_warmup[0].inputs["x"]
    raw = np.frombuffer((repository / "model_onnx" / "warmup" / data.input_data_file).read_bytes(), "<f4")
    assert raw.shape == tuple(data.dims)
    assert (raw == np.load(made / "bundle" / "samples" / "000.inputs.npz")["x"][0]).all()
    assert os.path.samefile(repository / "model_onnx" / "1" / "model.onnx", made / "model.onnx")  # a link, no copy


def test_expected_outputs_are_the_models_in_float64(made: Path) -> None:
    model = torch.export.load(made / "model.pt").module().double()
    content = json.loads((made / "bundle" / "manifest.json").read_text())
    bounds = {(b["output"], b["kind"]): b["allowed"] for b in content["bounds"]}
    sizes = set()
    for sample in content["samples"]:
        x = np.load(made / "bundle" / sample["inputs"])["x"]
        expected = np.load(made / "bundle" / sample["expected"])
        (name,) = expected.files
        exact = model(torch.from_numpy(x.astype(np.float64))).detach().numpy()
        assert expected[name].dtype == np.float32
        assert (expected[name] == exact.astype(np.float32)).all()
        error = np.abs(model.float()(torch.from_numpy(x)).detach().numpy() - exact).max()
        model.double()
        assert bounds[name, sample["kind"]] >= 4 * error + 4.5 * np.spacing(np.float32(np.abs(exact).max()) / 2)
        assert bounds[name, sample["kind"]] <= 1e-5  # a bound that passes everything is none
        sizes.add(len(x))
    assert {1, 4, 16} <= sizes


def test_the_evidence_is_whole(made: Path) -> None:
    bundle = made / "bundle"
    content = json.loads((bundle / "manifest.json").read_text())
    present = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()}
    assert present == {"manifest.json", *content["files"]}
    assert content["files"][content["onnx"]]["sha256"] == content["source"]["sha256"]
    assert content["versions"]["onnx"] == onnx.__version__
    certificate = json.loads((bundle / "certificates" / "000.json").read_text())
    assert certificate["kind"] == "LayerNorm"
    assert certificate["certificate"]["identity"] is True
    report = json.loads((bundle / "report.json").read_text())
    assert report["verb"] == "package"
    assert report["parity"]["ok"] is True
    assert [n["kind"] for n in content["norms"]] == ["LayerNorm"]
    assert str(made) not in "".join((bundle / p).read_text() for p in ("manifest.json", "report.json", "README.md"))
    assert [command.split()[:2] for command in content["commands"]] == [
        ["normdeploy", "export"],
        ["normdeploy", "package"],
        ["tritonserver", "--model-repository=model_repository"],
        ["normdeploy", "recheck"],
    ]


# ------------------------------------------------------------------ what Triton is told


X, Y = TritonPort("x", "float32", ("n", 3)), TritonPort("y", "int64", ("n",))


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch", "why"),
    [
        ([X], [Y], "n", ""),
        ([X, TritonPort("z", "float32", ("m", 3))], [Y], "", "do not start with one dynamic dim"),
        ([X], [TritonPort("y", "float32", (3,))], "", "do not start"),
        ([X], [TritonPort("y", "float32", ())], "", "do not start"),
        ([TritonPort("x", "float32", (None, 3))], [TritonPort("y", "float32", (None, 3))], "", "do not start"),
        ([X], [TritonPort("similarity", "float32", ("n", "n"))], "", "also another dim of 'similarity'"),
    ],
)
def test_the_batch_dim(inputs: list[TritonPort], outputs: list[TritonPort], batch: str, why: str) -> None:
    name, reason = triton_config.find_batch_dim(inputs, outputs)
    assert name == batch
    assert why in reason


def test_only_a_model_that_takes_single_rows_is_batched() -> None:
    """Triton joins requests into batches, and sends one that came alone as it is."""

    def served(least: int, max_batch: int | None = None) -> ServingOptions:
        wanted = PackageCall("m.onnx", "out", max_batch=max_batch)
        return make_serving("n", "", wanted, (least, 4, 8))

    assert served(1) == ServingOptions(8, (4, 8), 1)
    assert served(2) == ServingOptions(0, (), 1, "the dim 'n' is at least 2, but Triton also sends single rows")
    with pytest.raises(InputError, match="'n' is at least 2"):
        served(2, 8)


@pytest.mark.parametrize(
    "put", [lambda p: p.write_text("mine"), lambda p: p.symlink_to("README.md"), lambda p: p.mkdir()]
)
def test_a_bundle_with_something_else_in_it_is_not_replaced(bundle: Path, put: Callable[[Path], Any]) -> None:
    """A file, a link and an empty folder of somebody's."""
    wanted = PackageCall("m.onnx", bundle, replace=True)
    assert check_target(wanted) == bundle
    put(bundle / "own")
    with pytest.raises(InputError, match=r"contains files that are not part of it and would be lost: \['own"):
        check_target(wanted)


def test_dims_reshapes_types_and_hostile_names() -> None:
    evil = '../"\n\\é'
    ports = [TritonPort(evil, "bfloat16", ("n", None, 4)), Y]
    warmup = WarmupRequest("w", 1, {evil: "0.bin", "y": "1.bin"}, {evil: (2, 4), "y": ()})
    plans = {"8.6": "a.plan", "12.0": "b.plan"}
    served = triton_config.Config(
        name="m",
        runtime="tensorrt",
        inputs=ports,
        outputs=[Y],
        serving=ServingOptions(8, (4, 8), 1),
        gpu=True,
        files=plans,
        warmups=[warmup],
    )
    config = parsed(served.config_text())
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [
        (evil, TRITON.TYPE_BF16, [-1, 4]),
        ("y", TRITON.TYPE_INT64, [1]),
    ]
    assert config.input[1].HasField("reshape")
    assert list(config.input[1].reshape.shape) == []
    assert not config.input[0].HasField("reshape")
    assert dict(config.cc_model_filenames) == plans
    assert list(config.model_warmup[0].inputs["y"].dims) == [1]
    unbatched = replace(
        served,
        runtime="onnxruntime",
        outputs=[TritonPort("s", "bool", ())],
        serving=ServingOptions(0, (), 1),
        gpu=False,
        files=None,
        optimize=False,
        warmups=(),
    )
    alone = parsed(unbatched.config_text())
    assert [list(i.dims) for i in alone.input] == [[-1, -1, 4], [-1]]
    assert not alone.HasField("dynamic_batching")
    assert alone.optimization.graph.level == 2
    assert list(alone.output[0].dims) == [1]
    assert not alone.output[0].HasField("reshape")  # which a Triton that does not batch refuses


def test_rows_that_depend_on_each_other_are_not_batched(tmp_path: Path) -> None:
    text = "g (float[n, 3] x) => (float[n, 3] y) <int64[1] a = {0}> { m = ReduceMean(x, a) y = Sub(x, m) }"
    path = written(tmp_path, text)
    found = normdeploy.package(path, tmp_path / "b", feeds=given(4))
    assert found.serving.max_batch == 0
    assert "depends on the other rows" in found.serving.reason
    config = parsed((tmp_path / "b/model_repository/model_onnx/config.pbtxt").read_text())
    assert list(config.input[0].dims) == [-1, 3]
    assert list(config.model_warmup[0].inputs["x"].dims) == [4, 3]
    with pytest.raises(InputError, match="must not batch this file: a row's 'y' depends"):
        normdeploy.package(path, tmp_path / "c", feeds=given(4), max_batch=4)


def test_engines(tmp_path: Path) -> None:
    path = written(tmp_path, ADD)
    for name, magic in (("a", b"ftrt"), ("b", b"ftrt"), ("r", b"vtrt")):
        (tmp_path / name).write_bytes(magic + name.encode())
    with pytest.raises(InputError, match=r"the GPU of each; the compute capabilities are \['8.6', '\?'\]"):
        normdeploy.package(path, tmp_path / "out", feeds=given(), engines=[f"8.6={tmp_path / 'a'}", tmp_path / "b"])
    engines = [f"8.6={tmp_path / 'a'}", f"12.0={tmp_path / 'b'}", tmp_path / "r"]
    found = normdeploy.package(path, tmp_path / "out", feeds=given(), engines=engines, max_batch=2)
    assert found.models == ("model_onnx", "model_trt")
    assert any("Triton's backend for TensorRT can't load TensorRT-RTX engines" in note for note in found.notes)
    config = parsed((tmp_path / "out/model_repository/model_trt/config.pbtxt").read_text())
    assert (config.platform, config.backend) == ("tensorrt_plan", "tensorrt")
    assert config.instance_group[0].kind == TRITON.ModelInstanceGroup.KIND_GPU
    assert {
        cc: (tmp_path / "out/model_repository/model_trt/1" / f).read_bytes()
        for cc, f in config.cc_model_filenames.items()
    } == {
        "8.6": b"ftrta",
        "12.0": b"ftrtb",
    }
    assert (tmp_path / "out/engines/2_r.engine").read_bytes() == b"vtrtr"
    one = normdeploy.package(path, tmp_path / "one", feeds=given(), engines=[tmp_path / "a"])
    assert (one.path / "model_repository/model_trt/1/model.plan").is_file()
    assert {m.runtime for m in one.judgement.not_run} == {"onnxruntime CUDA", "TensorRT (model.plan)"}


def test_what_tensorrt_rtx_compiled_for_this_gpu_is_kept_beside_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is there is packaged; the engine is asked to write what it compiles while it runs the samples."""

    class Compiling:
        def __init__(self, path: Path, runtime_cache: bool | None) -> None:
            cache = path.with_name(f"{path.name}.runtime-cache")
            assert runtime_cache is True
            assert (cache.read_bytes() if cache.is_file() else b"") == (b"old" if "kept" in path.name else b"")
            write_bytes(cache, b"kernels")
            raise RuntimeUnavailable("it is a stand-in")

    monkeypatch.setattr("normdeploy.verbs.package.sample_judgement.TrtRunner", Compiling)
    monkeypatch.setattr("normdeploy.verbs.verify.runtime_candidates.describe_missing_runtime", lambda runtime: "")
    engines = [tmp_path / "new", tmp_path / "kept"]
    for engine in engines:
        engine.write_bytes(b"vtrt and more")
    old = tmp_path / "kept.runtime-cache"
    old.write_bytes(b"old")
    found = normdeploy.package(written(tmp_path, ADD), tmp_path / "b", feeds=given(), engines=engines)
    hashes = json.loads((found.path / "manifest.json").read_text())["files"]
    for name in ("0_new.engine.runtime-cache", "1_kept.engine.runtime-cache"):
        assert (found.path / "engines" / name).read_bytes() == b"kernels"
        assert hashes[f"engines/{name}"]["bytes"] == 7
    assert old.read_bytes() == b"old"


def test_where_onnxruntimes_optimizer_is_wrong_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(path: Path, engines: Any, samples: samples.Samples, **_: Any) -> Judgement:
        row = ("float32", 0.0, 0.0, 0.0)
        verdicts: Any = (("optimizer off", "pass"), ("optimizer on", "fail"))
        return Judgement(
            tuple(OutputResult("y", f"onnxruntime ({name})", *row, verdict, "") for name, verdict in verdicts), (), ()
        )

    monkeypatch.setattr("normdeploy.verbs.package.sample_judgement.judge_samples", judge)
    found = normdeploy.package(written(tmp_path, ADD), tmp_path / "b", feeds=given())
    assert found  # as it is configured
    assert parsed((tmp_path / "b/model_repository/model_onnx/config.pbtxt").read_text()).optimization.graph.level == 2


# ------------------------------------------------------------------ files, names, half precision


def test_names_from_the_file_become_no_paths(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="déep/w bin")
    name = "../../evil\n"
    node = onnx.helper.make_node("Add", [name, "w"], ["/y/"])
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2, 3]) for n in (name, "/y/")]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], [weight])
    (tmp_path / "déep").mkdir()
    (tmp_path / "déep" / "w bin").write_bytes(np.ones((2, 3), np.float32).tobytes())
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "a b;$(x).onnx")
    found = normdeploy.package(tmp_path / "a b;$(x).onnx", tmp_path / "out")
    assert found
    assert found.models == ("a_b_x_onnx",)
    content = json.loads((tmp_path / "out/manifest.json").read_text())
    assert content["inputs"] == [{"name": name, "dtype": "float32", "shape": [2, 3], "key": "tensor_0"}]
    assert (tmp_path / "out/model_repository/a_b_x_onnx/1/weights_0.data").read_bytes() == (
        tmp_path / "déep/w bin"
    ).read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"déep", "a b;$(x).onnx", "out"}
    assert normdeploy.recheck(tmp_path / "out")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision(made: Path, tmp_path: Path, precision: str) -> None:
    normdeploy.export(made / "model.pt", output=tmp_path / "half.onnx", precision=precision)
    if precision == "bf16":
        with pytest.raises(InputError, match=r"can't load half.onnx on the CPU: .* pass --provider cuda"):
            normdeploy.package(tmp_path / "half.onnx", tmp_path / "b", source=made / "model.pt")
        assert not (tmp_path / "b").exists()
    provider = "cpu" if precision == "fp16" else "cuda"
    assert normdeploy.package(tmp_path / "half.onnx", tmp_path / "b", source=made / "model.pt", provider=provider)
    config = parsed((tmp_path / "b/model_repository/half_onnx/config.pbtxt").read_text())
    assert config.input[0].data_type == {"fp16": TRITON.TYPE_FP16, "bf16": TRITON.TYPE_BF16}[precision]
    x = np.load(tmp_path / "b/samples/000.inputs.npz")["x"]
    x = x.view(ml_dtypes.bfloat16) if precision == "bf16" else x
    exact = (
        torch.export.load(made / "model.pt").module().double()(torch.from_numpy(x.astype(np.float64))).detach().numpy()
    )
    expected = np.load(tmp_path / "b/samples/000.expected.npz")
    held = expected[expected.files[0]]
    held = held.view(ml_dtypes.bfloat16) if precision == "bf16" else held
    assert (held == exact.astype(held.dtype)).all()
    assert normdeploy.recheck(tmp_path / "b")


def test_integers_are_free_where_they_hang_on_a_rounding(tmp_path: Path) -> None:
    text = f"g (float[n, 3] x) => (int64[n] y) <float[3, 3] w = {{1, 1, 1, 1, 1, 1, 1, 1, 1}}> {{ {ARG_MAX} }}"
    tied = np.array([[0.1, 0.2, 0.3]], np.float32)  # all three sums are equal
    found = normdeploy.package(written(tmp_path, text), tmp_path / "b", feeds={"x": tied})
    assert found
    assert np.load(tmp_path / "b/samples/000.free.npz")["y"].all()
    apart = f"g (float[n, 3] x) => (int64[n] y) <float[3, 3] w = {{1, 1, 2, 1, 1, 2, 1, 1, 2}}> {{ {ARG_MAX} }}"
    normdeploy.package(written(tmp_path, apart, "apart.onnx"), tmp_path / "c", feeds={"x": tied})
    assert not (tmp_path / "c/samples/000.free.npz").exists()
    worse = normdeploy.recheck(
        tmp_path / "c", onnx=written(tmp_path, text.replace("{1, 1, 1", "{2, 1, 1"), "other.onnx")
    )
    assert not worse
    assert [c.name for c in worse.changes if c.what == "result" and c.worse] == [
        "y in onnxruntime (optimizer off)",
        "y in onnxruntime (optimizer on)",
    ]


def test_a_file_that_states_no_sizes_is_packaged_at_those_that_are_tried(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 4] y) { y = Relu (x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "open.onnx")
    made = normdeploy.package(tmp_path / "open.onnx", tmp_path / "bundle")
    assert any("the sizes of n: samples have n=1 to 64" in note for note in made.notes)
    assert parsed(next((tmp_path / "bundle").rglob("config.pbtxt")).read_text()).max_batch_size == 64


# ------------------------------------------------------------------ whole or not at all


def test_a_bundle_appears_whole_or_not_at_all(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = written(tmp_path, ADD), (bundle / "manifest.json").read_bytes()
    left = tmp_path / f".bundle.{'0' * 16}.tmp"
    left.mkdir()
    (left / "part").touch()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "hash_files", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            normdeploy.package(path, bundle, feeds=given(), replace=True)
    assert (bundle / "manifest.json").read_bytes() == before
    assert not list(tmp_path.glob(".bundle.*"))  # what the dead run had left is swept too
    with pytest.raises(InputError, match="already contains a bundle; replace it with --replace"):
        normdeploy.package(path, bundle, feeds=given())
    (bundle / "mine.txt").touch()
    with pytest.raises(InputError, match=r"would be lost: \['mine.txt'\]"):
        normdeploy.package(path, bundle, feeds=given(), replace=True)
    (bundle / "mine.txt").unlink()
    for exchange in (
        atomic_folder.exchange_names,
        lambda *_: False,
    ):  # and where the file system can't exchange two names
        monkeypatch.setattr(atomic_folder, "exchange_names", exchange)
        normdeploy.package(path, bundle, feeds=given(), replace=True)
        assert json.loads((bundle / "manifest.json").read_text())["source"]["file"] == "model.onnx"
        assert not (bundle / "certificates").exists()
        assert not list(tmp_path.glob(".bundle.*"))
    with pytest.raises(InputError, match="exists and is not a normdeploy bundle"):
        normdeploy.package(path, tmp_path, feeds=given(), replace=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a/b"}, "the name 'a/b' is not valid for Triton .*use 'a_b'"),
        ({"max_batch": 9}, "--max-batch is 9, but the dim 'n' ranges from 1 to 3"),
        ({"provider": "tpu"}, "unknown provider 'tpu'"),
        ({"instances": 0}, "instances is 0"),
        ({"instances": 2**40}, "pass 1 to 1024 instances"),
        ({"engines": ["none.engine"]}, "engine not found: 'none.engine'"),
        ({"report_from": __file__}, "is not a report of normdeploy"),
        ({"output": "no/folder"}, "folder not found: 'no'"),
        ({"output": __file__}, "it is a file"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    options = {"feeds": given(), "output": tmp_path / "out"} | options
    with pytest.raises(InputError, match=said):
        normdeploy.package(written(tmp_path, ADD), options.pop("output"), **options)
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_random_outputs_are_no_evidence(tmp_path: Path) -> None:
    path = written(tmp_path, "g (float[n, 3] x) => (float[n, 3] y) { z = RandomNormalLike(x) y = Add(x, z) }")
    with pytest.raises(InputError, match="returns different outputs for the same inputs"):
        normdeploy.package(path, tmp_path / "b", feeds=given())


def test_a_report_of_another_file_gives_no_certificates(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="belongs to another file"):
        normdeploy.package(written(tmp_path, ADD), tmp_path / "b", feeds=given(), report_from=made / "export.json")


@pytest.mark.parametrize(
    ("certificates", "said"),
    [
        (Certificates((), None, "ab" * 32), "no certificates: no report beside the file records its SHA-256 (abababab"),
        (Certificates((), FoundReport(b"", "e.json"), ""), "no certificates: nothing was rewritten, says e.json"),
        (Certificates(({}, {}), FoundReport(b"", "e.json"), ""), "2 certificates from e.json"),
    ],
)
def test_note_says_where_certificates_are_from(certificates: Certificates, said: str) -> None:
    judged = Mock(notes=())
    notes = package_text.bundle_notes(
        [], ServingOptions(16, (), 1), [], judged, optimize=True, certificates=certificates
    )
    assert len(notes) == 1
    assert notes[0].startswith(said)


def test_one_name_that_is_no_file_name_numbers_all() -> None:
    """Else a tensor called tensor_1 could take another one's file."""
    plain = [TritonPort(name, "float32", ()) for name in ("x", "tensor_1", "x")]
    assert manifest.npz_keys(plain) == {"x": "x", "tensor_1": "tensor_1"}
    odd = [*plain, TritonPort("../y", "float32", ())]
    assert manifest.npz_keys(odd) == {"x": "tensor_0", "tensor_1": "tensor_1", "../y": "tensor_2"}


def test_each_gpu_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "read_runtime", lambda path: "tensorrt")
    assert [e.capability for e in model_files.parse_engines(["8.6=a.engine", "8.9=b.engine"])] == ["8.6", "8.9"]
    for given_ in (["8.6=a.engine", "8.6=b.engine"], ["8.6=a.engine", "b.engine"]):
        with pytest.raises(InputError, match="each compute capability once"):
            model_files.parse_engines(given_)


def test_batch_of_foreign_names_is_one_dim(tmp_path: Path) -> None:
    """tf2onnx calls the batch unk__7 at the input and unk__8 at the output."""
    text = '<ir_version: 8, opset_import: ["": 17]> net (float[unk__7, 4] x) => (float[unk__8, 4] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    normdeploy.package(tmp_path / "net.onnx", tmp_path / "bundle", max_batch=8)
    config = next((tmp_path / "bundle").glob("model_repository/*/config.pbtxt")).read_text()
    assert "max_batch_size: 8" in config
