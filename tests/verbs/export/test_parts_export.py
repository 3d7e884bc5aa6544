"""All parts of an encoder-decoder as one folder: written whole or not at all, fitting each other, verified with one
verdict.

What needs a real model is skipped without transformers (``make huggingface`` installs it); the others read small
modules by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import ExportError, InputError, NormdeployError
from normdeploy.loading import from_module, load
from normdeploy.loading.huggingface_folder import HuggingfaceFolder
from normdeploy.loading.huggingface_tasks import PART_FILES
from normdeploy.storage.export_record import read_record
from normdeploy.storage.folder_replacement import replace_folder_atomically
from normdeploy.storage.onnx_files import save_onnx
from normdeploy.verbs.export.output_folder import COPIED

FILES = tuple(PART_FILES.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What looks like a Hugging Face folder."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"architectures": ["T5ForConditionalGeneration"]}))
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "modeling.py").write_text("raise SystemExit")
    return made


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parts that are small modules; "fails" names one that can't be loaded."""
    said: dict[str, Any] = {"fails": ""}

    def parts(path: str, **options: Any) -> Iterator[tuple[str, Any]]:
        said["options"] = options
        for part in PART_FILES:
            if part == said["fails"]:
                raise ExportError("torch can't trace it")
            net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
            yield (
                part,
                from_module(
                    net, torch.ones(2, 4), inputs=[f"{part.replace('-', '_')}[batch,4]"], dims=options.get("dims", ())
                ),
            )

    monkeypatch.setattr("normdeploy.verbs.export.parts_export.load_parts", parts)
    return said


def _exported(source: Path, output: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["export", str(source), "-o", str(output), "--part", "all", *options])


def test_a_folder_of_all_parts_with_what_makes_inputs(folder: Path, by_hand: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "made"
    output.mkdir()  # an empty one may be there
    results = normdeploy.export_parts(folder, output, dims="batch=1:2:16")
    assert tuple(results) == FILES
    assert sorted(p.name for p in output.iterdir()) == sorted([*FILES, "config.json", "tokenizer.json"])
    assert by_hand["options"] == {"dims": ["batch=1:2:16"]}
    for part, (file, result) in zip(PART_FILES, results.items(), strict=True):
        assert result.path == output / file
        assert result.proto.graph.input[0].name == part.replace("-", "_")  # read from where it is now
        assert result.origin is not None
        assert result.origin.loading == {"dims": ["batch=1:2:16"], "part": part}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "model"]


def test_the_command_line_titles_each_part_and_writes_a_report_of_each(
    folder: Path, by_hand: dict[str, Any], tmp_path: Path
) -> None:
    told = _exported(folder, tmp_path / "made", "--report", str(tmp_path / "r.json"))
    assert told.exit_code == 0, told.output
    places = [told.output.index(file) for file in FILES]
    assert places == sorted(places)
    for file in FILES:
        report = json.loads((tmp_path / f"r.{Path(file).stem}.json").read_text())
        assert report["files"]["output"] == str(tmp_path / "made" / file)


def test_the_folder_is_written_whole_or_not_at_all(folder: Path, by_hand: dict[str, Any], tmp_path: Path) -> None:
    by_hand["fails"] = "decoder-with-past"  # the last
    with pytest.raises(ExportError):
        normdeploy.export_parts(folder, tmp_path / "made")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_file_is_written_into_a_folder_that_is_not_whole_yet(tmp_path: Path) -> None:
    """The folder is locked as long as it is written; a file in it waited for that lock without end."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    with replace_folder_atomically(tmp_path / "made") as fresh:
        save_onnx(model, fresh / "x.onnx")
    assert (tmp_path / "made" / "x.onnx").is_file()


@pytest.mark.parametrize("named", ["model.onnx", "there"])
def test_a_file_as_the_output_is_refused(named: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    told = _exported(folder, tmp_path / named)
    assert told.exit_code == 1
    assert isinstance(told.exception, InputError)
    assert "the parts need a folder" in str(told.exception)
    assert f"{named.removesuffix('.onnx')}-onnx" in str(told.exception)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "there"]
    assert (tmp_path / "there").read_text() == "kept"


def test_a_folder_that_holds_something_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("kept")
    with pytest.raises(NormdeployError, match="not an empty folder; choose another name"):
        normdeploy.export_parts(folder, tmp_path / "made")
    with pytest.raises(NormdeployError, match="folder 'nowhere' does not exist; create it first"):
        normdeploy.export_parts(folder, tmp_path / "nowhere" / "made")
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--input", "x[batch,4]"], "inputs applies to one part"),
        (["--model", "a:b"], "model applies to one part"),
        (["--precision", "fp16", "--calibrate", "x.npz"], "--calibrate has the inputs of one part"),
    ],
)
def test_options_of_one_part_are_refused(options: list[str], said: str, folder: Path, tmp_path: Path) -> None:
    told = _exported(folder, tmp_path / "made", *options)
    assert told.exit_code == 1
    assert said in str(told.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_has_no_parts_is_refused(folder: Path, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="not a Hugging Face folder, so it has no parts: omit --part"):
        normdeploy.export_parts(tmp_path / "x.pt", tmp_path / "made")
    with pytest.raises(InputError, match=r"the part 'all' is a folder of files.*export_parts"):
        normdeploy.export(folder, part="all")
    with pytest.raises(InputError, match="the part 'encoder' is a single file"):
        normdeploy.export_parts(folder, tmp_path / "made", part="encoder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "x.pt"]


def test_a_folder_to_verify_has_all_parts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "encoder_model.onnx").write_bytes(b"")
    command = ["verify", str(folder), str(tmp_path / "made")]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    assert "has no decoder_model.onnx, decoder_with_past_model.onnx" in str(told.exception)
    told = CliRunner().invoke(app, [*command, str(tmp_path / "x.onnx")])
    assert "passed with 1 more" in str(told.exception)
    told = CliRunner().invoke(app, [*command, "--dataset", "x.npz"])
    assert "--dataset is for one file" in str(told.exception)


def test_one_part_that_fails_fails_all(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each file is compared with its own part; the verdict counts what fails."""
    net = nn.Linear(4, 4).eval()
    (tmp_path / "made").mkdir()
    for file in (*FILES, "decoder_model_merged.onnx"):
        normdeploy.export(net, torch.ones(2, 4), output=tmp_path / "made" / file)
    wrong = nn.Linear(4, 4).eval()
    normdeploy.export(wrong, torch.ones(2, 4), output=tmp_path / "made" / "decoder_model.onnx")
    asked: list[str] = []

    def original(source: Any, files: Any, args: Any, kwargs: Any, loading: Any, **_: Any) -> Any:
        asked.append(loading["part"])
        return from_module(net, torch.ones(2, 4)), []

    monkeypatch.setattr("normdeploy.verbs.verify.verify_function.load_original", original)
    told = CliRunner().invoke(app, ["verify", str(folder), str(tmp_path / "made"), "--seeds", "1"])
    assert asked == list(PART_FILES)
    assert told.exit_code == 1, told.output
    assert "1 of 3 parts fail: decoder_model.onnx" in told.output
    assert "because no part has this name: decoder_model_merged.onnx" in told.output
    normdeploy.export(net, torch.ones(2, 4), output=tmp_path / "made" / "decoder_model.onnx")
    found = normdeploy.verify_parts(folder, tmp_path / "made", seeds=1)
    assert found
    assert "all 3 parts are verified" in str(found)


def test_a_part_is_prepared_anew_after_another(tmp_path: Path) -> None:
    """Parts are one module with another forward each: the second must not call the first's."""

    class Net(nn.Module):
        config: Any = type("Config", (), {"is_encoder_decoder": False})()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    net = Net().eval()
    net.forward = lambda *_: None  # type: ignore[method-assign, assignment]
    with pytest.raises(
        InputError, match=r"not an encoder-decoder, so it has no parts; omit --part.*text-generation-with-past"
    ):
        HuggingfaceFolder(tmp_path, net, None, frozenset()).prepare_part("encoder")
    assert "forward" not in vars(net)


# ------------------------------------------------------------------ a real one


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BART with random weights, and its folder of all parts beside it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32, "vocab_size": 40}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, init_std=0.3)).eval()
    place = tmp_path_factory.mktemp("bart")
    model.save_pretrained(place / "model")
    loads = []
    loader = transformers.BartForConditionalGeneration.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.BartForConditionalGeneration,
            "from_pretrained",
            lambda *a, **k: loads.append(a) or loader(*a, **k),
        )
        normdeploy.export_parts(place / "model", place / "onnx", dims=["seq=1:5:32", "batch=1:2:4"])
    assert len(loads) == 1  # for three parts
    return place


def _run(place: Path, file: str, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(place / "onnx" / file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    assert wanted == feeds.keys()
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.slow
def test_parts_decode_together_as_eager_does(bart: Path) -> None:
    """Two tokens, greedily: what one file gives the next takes under its name."""
    transformers = sys.modules["transformers"]
    model = transformers.BartForConditionalGeneration.from_pretrained(bart / "model").eval()
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(4, 40, (2, 5)), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    hidden = _run(bart, FILES[0], input_ids=ids, attention_mask=mask)["last_hidden_state"]
    first = np.full((2, 1), 2)
    made = _run(bart, FILES[1], input_ids=first, encoder_hidden_states=hidden, encoder_attention_mask=mask)
    seen = np.concatenate([first, made["logits"][:, -1:].argmax(-1)], 1)
    presents = {
        name.replace("present", "past_key_values"): value for name, value in made.items() if name.startswith("present")
    }
    next_made = _run(bart, FILES[2], input_ids=seen[:, -1:], encoder_attention_mask=mask, **presents)
    assert {n for n in next_made if n != "logits"} == {
        n.replace("past_key_values", "present") for n in presents if ".decoder." in n
    }
    with torch.no_grad():
        call = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        eager = model(**call, decoder_input_ids=torch.from_numpy(seen), use_cache=False).logits.numpy()
        exact = model.double()(**call, decoder_input_ids=torch.from_numpy(seen), use_cache=False).logits.numpy()
    assert eager[:, -1].argmax(-1).tolist() == next_made["logits"][:, -1].argmax(-1).tolist()
    # other kernels than eager's sum in another order: four times its error, and four units for what it happened to hit
    allowed = 4 * np.abs(eager - exact).max() + 4 * 2.0**-24 * np.abs(exact).max()
    assert np.abs(made["logits"][:, -1] - exact[:, 0]).max() <= allowed
    assert np.abs(next_made["logits"][:, -1] - exact[:, 1]).max() <= allowed


@pytest.mark.slow
def test_dims_go_to_the_parts_that_have_them(bart: Path) -> None:
    load_of = {file: read_record(onnx.load(bart / "onnx" / file))["load"] for file in FILES}
    assert [load["part"] for load in load_of.values()] == list(PART_FILES)
    assert all(load["dims"] == ["seq=1:5:32", "batch=1:2:4"] for load in load_of.values())
    with pytest.raises(
        InputError, match="the dim 'sequence' is not in any part; the parts have the dims batch, decoder_seq, past, seq"
    ):
        normdeploy.export_parts(bart / "model", bart / "other", dims="sequence=1:2:3")
    assert not (bart / "other").exists()
    assert (bart / "onnx" / "config.json").read_bytes() == (bart / "model" / "config.json").read_bytes()
    assert "generation_config.json" in COPIED


@pytest.mark.slow
def test_parts_are_verified_and_a_changed_one_fails(bart: Path, tmp_path: Path) -> None:
    proto = onnx.load(bart / "onnx" / FILES[1])
    weight = next(t for t in proto.graph.initializer if len(t.dims) == 2 and t.data_type == onnx.TensorProto.FLOAT)
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float32(1.5), weight.name))
    for file in FILES:
        onnx.save(proto if file == FILES[1] else onnx.load(bart / "onnx" / file), tmp_path / file)
    found = normdeploy.verify_parts(bart / "model", tmp_path, seeds=1)
    assert {file: bool(comparison) for file, comparison in found.comparisons.items()} == dict(
        zip(FILES, (True, False, True), strict=True)
    )
    assert not found


@pytest.mark.slow
def test_models_without_parts_say_what_to_do(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    with pytest.raises(
        InputError, match=r"GPT2LMHeadModel is not an encoder-decoder.*--task text-generation-with-past"
    ):
        normdeploy.export_parts(tmp_path / "model", tmp_path / "made")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    with pytest.raises(InputError, match="not an encoder-decoder"):
        load(tmp_path / "model", part="encoder")
