"""How large a dim may be of which nobody states it: from a config, a table, the model's own code; and ``optimize
--dim``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from torch import nn
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.engines.parser_input import graph_inputs
from normdeploy.errors import ExportError, GraphError, InputError
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.graphs.index_bounds import find_index_bounds
from normdeploy.loading import from_module, live_module
from normdeploy.loading.config_limits import widen_unstated_dims
from normdeploy.loading.input_request import parse_input_request
from normdeploy.model import Dim, InputSpec, LoadedModel
from normdeploy.runtimes.optimization_profiles import resolve_profile
from normdeploy.storage.export_record import read_record
from tests.work import count_calls

TEXT = ["input_ids:int64[batch,seq]"]


class Text(nn.Module):
    """Token and position embeddings, and a norm; the positions in one of the ways of the libraries."""

    def __init__(self, way: str, rows: int = 100, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.config = way, SimpleNamespace(**config)
        self.words, self.positions, self.norm = nn.Embedding(30, 8), nn.Embedding(rows, 8), nn.LayerNorm(8)
        self.register_buffer("ids", torch.arange(rows)[None])
        self.register_buffer("waves", torch.randn(1, rows, 8))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        n = input_ids.shape[1]
        match self.way:
            case "arange":
                positions = self.positions(torch.arange(n))
            case "buffer":
                positions = self.positions(self.ids[:, :n])
            case "offset":
                positions = self.positions(torch.arange(2, n + 2))
            case "running":  # RoBERTa's
                mask = (input_ids != 1).int()
                positions = self.positions((torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1)
            case "waves":
                positions = self.waves[:, :n]
            case _:
                positions = 0
        return self.norm(self.words(input_ids) + positions)


def traced(way: str, dims: tuple[str, ...] = (), **config: Any) -> LoadedModel:
    return from_module(Text(way, **config).eval(), inputs=TEXT, dims=dims)


def told(result: normdeploy.ExportResult) -> list[str]:
    """The notes but for those on sizes at which the whole model was not compared, which hang on how busy the machine
    is."""
    return [note for note in result.notes if not note.startswith("the whole model was")]


def seq(model: LoadedModel) -> tuple[str, str]:
    return str(model.named_dims["seq"]), model.taken.get("seq", "")


# ------------------------------------------------------------------ of a PyTorch model


@pytest.mark.parametrize(
    ("way", "most", "source"),
    [
        ("arange", 100, "the rows of 'positions.weight'"),
        ("buffer", 100, "the model's own code"),
        ("offset", 98, "the rows of 'positions.weight'"),
        ("running", 98, "the rows of 'positions.weight'"),
        ("waves", 100, "the model's own code"),
        ("none", 64, "no known limit"),
    ],
)
def test_a_dim_without_a_range_is_as_long_as_the_model_allows(way: str, most: int, source: str) -> None:
    model = traced(way)
    assert seq(model) == (f"seq=1:8:{most}", source)
    assert (str(model.named_dims["batch"]), model.taken["batch"]) == ("batch=1:8:64", "no known limit")


def test_the_config_says_it_where_the_code_does_not() -> None:
    source = "max_position_embeddings of its config"
    assert seq(traced("none", max_position_embeddings=512)) == ("seq=1:8:512", source)
    assert seq(traced("waves", max_position_embeddings=40)) == ("seq=1:8:40", source)
    assert seq(traced("offset", max_position_embeddings=100)) == ("seq=1:8:98", "the rows of 'positions.weight'")
    assert seq(traced("none", text_config=SimpleNamespace(n_positions=77))) == (
        "seq=1:8:77",
        "n_positions of its config",
    )
    assert seq(traced("none", max_position_embeddings=-1)) == ("seq=1:8:64", "no known limit")  # XLNet


def test_a_decoder_has_a_limit_of_its_own() -> None:
    """Whisper, TrOCR: the positions of the text that is made are not those of what is read."""
    wishes = parse_input_request(["input_ids:int64[batch,seq]", "decoder_input_ids:int64[batch,made]"], [])
    config = SimpleNamespace(max_position_embeddings=512, max_target_positions=44)
    found = widen_unstated_dims(wishes, config)
    assert (found.dims["seq"].max, found.dims["made"].max) == (512, 44)
    assert found.sources["made"] == "max_target_positions of its config"
    assert widen_unstated_dims(wishes, SimpleNamespace(max_position_embeddings=512)).dims["made"].max == 512


def test_what_is_stated_is_taken_and_not_said() -> None:
    assert seq(traced("arange", ("seq=1:4:20",), max_position_embeddings=50)) == ("seq=1:4:20", "")
    with pytest.raises(InputError, match=r"seq=1:4:200 exceeds the model's range 1 to 100"):
        traced("arange", ("seq=1:4:200",))


def test_the_size_of_images_is_the_configs() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(image_size=(16, 24))
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.conv(pixel_values).mean((2, 3))

    model = from_module(Vision().eval(), inputs=["pixel_values[batch,3,height,width]"])
    assert [(d.opt, d.max) for d in (model.named_dims["height"], model.named_dims["width"])] == [(16, 16), (24, 24)]
    assert model.taken["width"] == "image_size of its config"


def test_a_model_that_takes_no_open_dim_is_traced_up_to_the_usual_maximum() -> None:
    class Bounded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 64:
                raise ValueError("too long")
            return x * 2

    model = from_module(Bounded().eval(), inputs=["x[batch,3]"])
    assert str(model.named_dims["batch"]) == "batch=1:8:64"


def test_where_the_usual_maximum_fails_too_both_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vision(nn.Module):
        """As a patch embedding that asks for its own size; the second trace meets something else."""

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(image_size=16)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            if pixel_values.shape[-1] % 8:
                raise ValueError("not in patches of 8")
            return pixel_values

    def exported(module: nn.Module, call: Any, wishes: Any, *_: Any) -> Any:
        raise ExportError("the first" if wishes.dims["width"].max == 16 else "the second")

    inputs = ["pixel_values[batch,3,height,width]"]
    monkeypatch.setattr(live_module, "export_narrowing", exported)
    with pytest.raises(
        ExportError,
        match=r"^the second. An earlier try with batch=1:8:1048576, height=1:16:16, width=1:16:16 failed: the first$",
    ) as raised:
        from_module(Vision().eval(), inputs=inputs)
    assert str(raised.value.__cause__) == "the first"
    monkeypatch.setattr(live_module, "export_narrowing", lambda *_: (_ for _ in ()).throw(InputError("the same")))
    with pytest.raises(InputError, match=r"^the same$"):
        from_module(Vision().eval(), inputs=inputs)


def test_the_summary_says_what_was_taken_and_how_to_change_it(tmp_path: Path) -> None:
    result = normdeploy.export(Text("arange").eval(), inputs=TEXT, output=tmp_path / "m.onnx")
    said = (
        "sizes assumed because none were stated: batch=1:8:64 (no known limit), seq=1:8:100 (the rows of"
        " 'positions.weight'); "
    )
    assert told(result) == [f"{said}state others with --dim"]
    done = normdeploy.run(tmp_path / "m.onnx", {"input_ids": np.zeros((1, 100), np.int64)})
    assert done.outputs == {"output": "float32[1, 100, 8]"}
    assert told(normdeploy.export(Text("arange").eval(), inputs=TEXT, dims=["batch=1:2:4", "seq=1:2:9"])) == []


# ------------------------------------------------------------------ of an ONNX file


@pytest.mark.parametrize(
    ("way", "most", "dynamo"),
    [
        ("arange", 100, True),
        ("running", 98, True),
        ("waves", 100, True),
        ("arange", 100, False),
        ("buffer", 100, False),
        ("offset", 98, False),
        ("running", 98, False),
        ("none", None, False),
    ],
)
def test_the_tables_of_a_file_say_it_too(way: str, most: int | None, dynamo: bool, tmp_path: Path) -> None:
    if dynamo:
        proto = export_to_proto(traced(way))
    else:
        axes = {"input_ids": {0: "batch", 1: "seq"}}
        ids = (torch.zeros(2, 5, dtype=torch.int64),)
        torch.onnx.export(
            Text(way).eval(), ids, tmp_path / "m.onnx", dynamo=False, input_names=["input_ids"], dynamic_axes=axes
        )
        proto = onnx.load(tmp_path / "m.onnx")
    found = find_index_bounds(proto)
    assert {name: b.high - 1 for name, b in found.sizes.items()} == ({} if most is None else {"seq": most})
    assert (found.values["input_ids"].low, found.values["input_ids"].high) == (0, 30)


def test_numbers_of_many_origins_take_no_time_and_no_room() -> None:
    nodes, last = [onnx.helper.make_node("Constant", [], ["one"], value_int=1)], "x"
    for i in range(3000):
        nodes.append(onnx.helper.make_node("Add", [last, "one"], [f"a{i}"]))
        nodes.append(onnx.helper.make_node("Concat", [last, f"a{i}"], [f"c{i}"], axis=0))
        last = f"c{i}"
    nodes.append(onnx.helper.make_node("Gather", ["table", last], ["y"]))
    table = onnx.numpy_helper.from_array(np.zeros((5000, 1), np.float32), "table")
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["n"])
    graph = onnx.helper.make_graph(nodes, "g", [x], [], [table])
    model = onnx.helper.make_model(graph)
    # With one origin for each sum it is a multiple of 3000 squared.
    assert count_calls(lambda: find_index_bounds(model)) < 1_000_000
    found = find_index_bounds(model).values["x"]
    assert (found.low, found.high) == (0, 2000)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file without a record: two tables, and a norm. For reading."""
    proto = export_to_proto(traced("arange"))
    assert not read_record(proto)
    file = tmp_path_factory.mktemp("bare") / "bare.onnx"
    onnx.save(proto, file)
    return file


def test_optimize_records_ranges_so_that_nothing_asks_again(bare: Path, tmp_path: Path) -> None:
    assert any("does not state the sizes" in note for note in normdeploy.run(bare).notes)
    with pytest.raises(InputError, match="pass a profile"):
        resolve_profile(graph_inputs(onnx.load(bare)), read_record(onnx.load(bare)).get("inputs", ()))
    out = tmp_path / "out.onnx"
    result = normdeploy.optimize(bare, out, dims=["batch=1:2:4", "seq=1:16:50"])
    assert told(result) == []
    (spec,) = read_record(onnx.load(out))["inputs"]
    assert spec == InputSpec("input_ids", "int64", (Dim("batch", 1, 2, 4), Dim("seq", 1, 16, 50)), (0, 30))
    done = normdeploy.run(out)
    assert done.inputs == {"input_ids": "int64[2, 16]"}
    assert done.notes == ()
    assert resolve_profile(graph_inputs(onnx.load(out)), (spec,)) == {"input_ids": ((1, 1), (2, 16), (4, 50))}
    assert normdeploy.bench([out], rounds=1)
    assert normdeploy.package(out, tmp_path / "bundle")
    wider = normdeploy.optimize(out, dims=["seq=1:8:99"])
    assert told(wider) == ["seq=1:8:99 exceeds seq=1:16:50, the range recorded in the file: verify it there"]
    assert [d.max for d in read_record(wider.proto)["inputs"][0].shape] == [4, 99]


def test_what_is_not_stated_follows_from_a_table_or_is_asked_for(bare: Path) -> None:
    result = normdeploy.optimize(bare, dims=["batch=1:2:4"])
    assert read_record(result.proto)["inputs"][0].shape[1] == Dim("seq", 1, 8, 100)
    assert told(result) == [
        "sizes assumed because none were stated: seq=1:8:100 (the rows of 'positions.weight'); state others with --dim"
    ]
    with pytest.raises(InputError, match=r"the range of the dim 'batch' is unknown: also pass"):
        normdeploy.optimize(bare, dims=["seq=1:2:4"])
    (hint,) = told(normdeploy.optimize(bare))
    assert (
        hint
        == "the sizes of 'seq' are not recorded, but 'positions.weight' has rows for 100: --dim seq=1:8:100 records"
        " the range"
    )


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (["seq=1:2:101"], "exceeds the table 'positions.weight', which has rows for 100: narrow it"),
        (["sequence=1:2:4"], "'sequence' is not in any input: the dynamic dims are batch, seq"),
        (["seq=4"], "can't be read"),
        (["=1:2:4"], "can't be read"),
        (["seq=4:2:9"], "must have 0 <= min <= opt <= max"),
        (["seq=0:0:0"], "must have 0 <= min <= opt <= max and max >= 1"),
        (["seq=1:2:9999999999"], "must have 0 <= min <= opt <= max"),
        ([f"seq=1:2:{'9' * 5000}"], "can't be read: write seq=MIN:OPT:MAX"),
        (["seq=1:2:4", "seq=1:2:5"], "is passed twice"),
    ],
)
def test_dims_that_do_not_fit_the_file(bare: Path, tmp_path: Path, dims: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        normdeploy.optimize(bare, tmp_path / "out.onnx", dims=dims)
    assert not (tmp_path / "out.onnx").exists()


def test_dims_without_a_name_get_one(tmp_path: Path) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[?, 4] x) => (float[?, 4] y)
        { y = Softmax(x) }"""
    proto = parser.parse_model(text.replace("?", "n"))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1  # Paddle's
    onnx.save(proto, tmp_path / "m.onnx")
    out = tmp_path / "out.onnx"
    normdeploy.optimize(tmp_path / "m.onnx", out, dims=["x_0=1:2:9"])
    assert onnx.load(out).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "x_0"
    assert normdeploy.run(out).inputs == {"x": "float32[2, 4]"}


def test_a_record_that_can_t_be_read_is_no_place_for_ranges(bare: Path) -> None:
    proto = onnx.load(bare)
    onnx.helper.set_model_props(proto, {"normdeploy": "{}"})
    with pytest.raises(GraphError, match="malformed"):
        normdeploy.optimize(proto, dims=["batch=1:2:4"])
    assert told(normdeploy.optimize(proto))[0].startswith("the sizes of 'seq' are not recorded")


def test_the_command_takes_dims(bare: Path, tmp_path: Path) -> None:
    arguments = [
        "optimize",
        str(bare),
        "-o",
        str(tmp_path / "o.onnx"),
        "--dim",
        "batch=1:2:3",
        "--dim",
        "seq=1:2:3",
        "-q",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [d.max for d in read_record(onnx.load(tmp_path / "o.onnx"))["inputs"][0].shape] == [3, 3]


class Shifted(nn.Module):
    """MobileBERT's embeddings: each word beside the one after it; ``x[:, 1:]`` has one place where there are two
    words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 4), nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.norm(torch.cat([nn.functional.pad(x[:, 1:], [0, 0, 0, 1, 0, 0]), x], 2))


def test_sizes_that_torch_excludes_are_left_out() -> None:
    """Of a dim with a stated range the error says where it may begin."""
    inputs = ["ids:int64[batch,words]{0:10}"]
    result = normdeploy.export(Shifted().eval(), inputs=inputs)
    assert any("words=3:8:64" in note for note in result.notes)
    with pytest.raises(
        InputError, match=r"words=2:4:8 was requested, but torch can't trace the model with 2 in line .*: start at 3"
    ):
        normdeploy.export(Shifted().eval(), inputs=inputs, dims=["words=2:4:8"])
