"""What Hugging Face models need, on small modules by hand: masks, inputs from a config, sums of dims, caches, tasks.

The models themselves are in ``benchmarks/huggingface.py``, which needs transformers.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import sys
import types
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import InputError, LoadError, TrustError
from normdeploy.inputs.input_cases import generate_cases
from normdeploy.loading import from_module, load
from normdeploy.loading.attention_masks import find_attention_masks
from normdeploy.loading.default_inputs import infer_default_inputs, preprocessed_image_size
from normdeploy.loading.hub import is_hub_id, resolve_model_path
from normdeploy.loading.huggingface_folder import load_folder_model, prepare_folder, require_complete_weights
from normdeploy.loading.huggingface_tasks import find_task, require_part_name
from normdeploy.loading.input_request import InputRequest, parse_input_request
from normdeploy.loading.live_module import trace_module
from normdeploy.loading.traceable_models import TraceableModel, prepare_model, request_inputs, unstated_ranges
from normdeploy.model import Dim, InputSpec
from normdeploy.storage.export_record import read_record


class Attention(nn.Module):
    """One attention over embedded tokens; ``mask`` hides keys."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.segments, self.queries = nn.Embedding(11, 8), nn.Embedding(2, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, segment: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = (self.table(ids) + self.segments(segment))[:, None]
        return nn.functional.scaled_dot_product_attention(
            self.queries(x), x, x, attn_mask=mask.bool()[:, None, None, :]
        )[:, 0]


INPUTS = ["ids:int64[batch,seq]", "segment:int64[batch,seq]", "mask:int64[batch,seq]"]
DIMS = ["batch=1:2:3", "seq=1:5:9"]


def _session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def test_the_attention_mask_is_told_from_other_flags() -> None:
    """Both take 0 and 1; only one decides what an attention sees."""
    torch.manual_seed(0)
    model = from_module(Attention().eval(), inputs=INPUTS, dims=DIMS)
    assert find_attention_masks(model.program) == {"mask"}
    assert {spec.name: spec.mask for spec in model.inputs} == {"ids": False, "segment": False, "mask": True}


@pytest.mark.parametrize("other", ["stated", "a table's"])
def test_what_takes_other_values_than_a_mask_is_generated_as_no_mask(other: str) -> None:
    """A row of zeros or ones would be beyond the values that the caller stated, or that the table has."""

    class Kinds(Attention):
        def forward(self, ids: torch.Tensor, segment: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            kinds = self.table(mask - 2) if other == "a table's" else 0.0
            return super().forward(ids, segment, mask) + kinds

    values = "{2:7}" if other == "stated" else ""
    model = from_module(Kinds().eval(), inputs=[*INPUTS[:2], f"mask:int64[batch,seq]{values}"], dims=DIMS)
    assert find_attention_masks(model.program) == {"mask"}
    low, high = {"stated": (2, 7), "a table's": (2, 13)}[other]
    cases, _ = generate_cases(model, 2)
    drawn = [case.make()["mask"] for case in cases]
    assert low <= min(v.min() for v in drawn) <= max(v.max() for v in drawn) < high


def test_a_mask_by_hand_is_seen_too() -> None:
    class ByHand(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            hidden = (1.0 - mask[:, None, :]) * -1e9
            return torch.softmax(x @ x.transpose(1, 2) + hidden, -1) @ (x * other[..., None])

    model = from_module(
        ByHand().eval(), inputs=["x[batch,seq,4]", "mask:int64[batch,seq]", "other:int64[batch,seq]"], dims=DIMS
    )
    assert find_attention_masks(model.program) == {"mask"}


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_each_row_of_a_mask_shows_something(dtype: str) -> None:
    spec = InputSpec(
        "mask", dtype, (Dim("batch", 1, 64, 64), Dim("seq", 1, 2, 8)), None if dtype == "bool" else (0, 2), mask=True
    )
    drawn = spec.sample(np.random.default_rng(0))
    assert drawn.any(1).all()
    assert not drawn.all()


def test_verify_has_a_case_of_its_own_for_a_hidden_row() -> None:
    model = from_module(Attention().eval(), inputs=INPUTS, dims=DIMS)
    cases, _ = generate_cases(model, 2)
    dark = [case.name for case in cases if not case.make()["mask"].any(1).all()]
    assert dark == ["mask hides a whole row, batch=2, seq=5"]


def test_a_hidden_row_is_zero_in_the_file_as_in_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Attention().eval()
    result = normdeploy.export(net, inputs=INPUTS, dims=DIMS, output=tmp_path / "x.onnx")
    ids, segment, mask = (np.ones((2, 5), np.int64) for _ in range(3))
    mask[1] = 0
    (got,) = _session(result.proto).run(None, {"ids": ids, "segment": segment, "mask": mask})
    expected = net(*map(torch.from_numpy, (ids, segment, mask))).detach().numpy()
    assert not expected[1].any()  # the mean of all values is what the exporter makes of it
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert normdeploy.verify(net, tmp_path / "x.onnx", inputs=INPUTS, dims=DIMS)
    types = [node.op_type for node in result.proto.graph.node]
    assert "IsNaN" not in types  # what that guard hides is a NaN of the scores


def test_a_nan_is_not_hidden_by_the_guard() -> None:
    class Scores(nn.Module):
        def forward(self, x: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            return nn.functional.scaled_dot_product_attention(
                x, x, values[:, None], attn_mask=mask.bool()[:, None, None, :]
            )

    inputs = ["x[batch,seq,4]", "values[batch,seq,4]", "mask:int64[batch,seq]"]
    result = normdeploy.export(Scores().eval(), inputs=inputs, dims=DIMS)
    x, values = np.ones((1, 3, 4), np.float32), np.ones((1, 3, 4), np.float32)
    x[0, 1, 2] = np.nan
    (got,) = _session(result.proto).run(None, {"x": x, "values": values, "mask": np.ones((1, 3), np.int64)})
    assert np.isnan(got).all()


@pytest.mark.parametrize(
    ("where", "bad"),
    [("scores", np.nan), ("scores", np.inf), ("values", np.nan), ("values", np.inf), ("values", -np.inf)],
)
def test_a_hidden_row_shows_what_eager_shows(where: str, bad: float) -> None:
    """0·NaN and 0·Inf of the values are NaN in torch's hidden rows, and so is a NaN among its scores."""

    class Row(nn.Module):
        def forward(self, x: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x, keys = x[:, None], torch.ones_like(x[:, None])
            return nn.functional.scaled_dot_product_attention(
                x, keys, values[:, None], attn_mask=mask.bool()[:, None, None, :]
            )

    net = Row().eval()
    result = normdeploy.export(
        net, inputs=["x[batch,seq,4]", "values[batch,seq,4]", "mask:int64[batch,seq]"], dims=DIMS
    )
    x, values, mask = np.ones((2, 3, 4), np.float32), np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.int64)
    mask[1] = 0
    (x if where == "scores" else values)[1, 1, 2] = bad
    (got,) = _session(result.proto).run(None, {"x": x, "values": values, "mask": mask})
    expected = net(*map(torch.from_numpy, (x, values, mask))).numpy()
    assert np.isnan(expected[:, 0, 1]).any()
    np.testing.assert_array_equal(got, expected)
    products = [node for node in result.proto.graph.node if node.op_type == "MatMul"]
    assert "Softmax" in {node.op_type for node in result.proto.graph.node if node.output[0] == products[-1].input[0]}


@pytest.mark.parametrize("filled", ["where", "nan_to_num"])
def test_a_guard_that_a_user_wrote_stays_what_it_is(filled: str) -> None:
    """The same nodes as the exporter's, by hand: with the lowest number a hidden row is the mean of all values in
    eager."""

    class ByHand(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = torch.where(mask.bool()[:, None, :], 0.0, torch.finfo(x.dtype).min)
            weights = torch.softmax(x @ x.transpose(1, 2) + hidden, -1)
            return (
                torch.where(torch.isnan(weights), 0.0, weights) if filled == "where" else torch.nan_to_num(weights, 0.0)
            ) @ x

    net = ByHand().eval()
    result = normdeploy.export(net, inputs=["x[batch,seq,4]", "mask:int64[batch,seq]"], dims=DIMS)
    x, mask = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32), np.ones((2, 5), np.int64)
    mask[1] = 0
    (got,) = _session(result.proto).run(None, {"x": x, "mask": mask})
    expected = net(torch.from_numpy(x), torch.from_numpy(mask)).numpy()
    assert expected[1].any()
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_repeat_interleave_by_a_dynamic_count() -> None:
    class Repeated(nn.Module):
        def forward(self, x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(points.shape[1], 0)

    result = normdeploy.export(
        Repeated().eval(), inputs=["x[batch,3,4]", "points[batch,n]"], dims=["batch=1:2:3", "n=1:5:6"]
    )
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    (got,) = _session(result.proto).run(None, {"x": x, "points": np.zeros((2, 5), np.float32)})
    np.testing.assert_array_equal(got, x.repeat(5, 0))


# ------------------------------------------------------------------ dims


def test_a_sum_of_dims() -> None:
    wishes = parse_input_request(["ids:int64[batch,seq]", "mask:int64[batch,past+seq]"], ["past=0:4:7", "seq=1:5:9"])
    mask = wishes.inputs[1].shape[1]
    assert (mask.name, mask.min, mask.opt, mask.max) == ("past + seq", 1, 9, 16)
    assert set(wishes.dims) == {"batch", "past", "seq"}
    assert mask.size({"past": 0, "seq": 3}) == 3
    assert parse_input_request(["mask:int64[past+seq]"], ["past=2:2:2", "seq=1:1:1"]).inputs[0].shape[
        0
    ] == Dim.from_size(3)


class Decoder(nn.Module):
    """What a decoder with a past is to torch.export: keys and values go in, longer ones come out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, past: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids)
        keys = torch.cat([past, x], 1)
        heads = keys[:, None]
        seen = nn.functional.scaled_dot_product_attention(
            x[:, None], heads, heads, attn_mask=mask.bool()[:, None, None, :]
        )
        return {"logits": seen[:, 0], "present.0.key": keys}


def test_a_range_that_normdeploy_chose_keeps_its_smallest_size_0() -> None:
    inputs = ["ids:int64[batch,seq]", "mask:int64[batch,past+seq]", "past[batch,past,8]"]
    request = parse_input_request(inputs, ["batch=1:2:3", "seq=1:5:9", "past=0:4:7"])
    request = replace(request, assumed=frozenset(request.dims))
    model = trace_module(Decoder().eval(), (), {}, request, kind="test")
    assert str(model.inputs[2].shape[1]) == "past=0:4:7"


def test_a_past_that_may_be_empty(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, file = Decoder().eval(), tmp_path / "x.onnx"
    options = {"inputs": ["ids:int64[batch,seq]", "mask:int64[batch,past+seq]", "past[batch,past,8]{-1.0:1.0}"]}
    options["dims"] = ["batch=1:2:3", "seq=1:5:9", "past=0:4:7"]
    result = normdeploy.export(net, output=file, **options)
    shapes = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in result.proto.graph.input
    }
    assert shapes["mask"] == ["batch", "past + seq"]
    assert [o.name for o in result.proto.graph.output] == ["logits", "present.0.key"]
    told = read_record(result.proto)["inputs"][1].shape[1]
    assert [(d.name, d.min, d.max) for d in told.terms] == [("past", 0, 7), ("seq", 1, 9)]
    compared = normdeploy.verify(net, file, **options)
    assert compared
    assert any("past=0" in case for case in compared.cases)
    feeds = {
        "ids": np.ones((1, 2), np.int64),
        "mask": np.ones((1, 2), np.int64),
        "past": np.zeros((1, 0, 8), np.float32),
    }
    assert _session(result.proto).run(["present.0.key"], feeds)[0].shape == (1, 2, 8)


def test_a_past_without_a_stated_range_may_be_empty() -> None:
    inputs = ["ids:int64[batch,seq]{0:11}", "mask:int64[batch,past+seq]", "past[batch,past,8]{-1.0:1.0}"]
    ready = TraceableModel(Decoder().eval(), inputs, new="seq", positions=16)
    model = trace_module(ready.module, (), {}, request_inputs(ready, (), ()), kind="folder")
    assert str(model.named_dims["past"]) == "past=0:8:8"


# ------------------------------------------------------------------ inputs from a config


def _model(names: str, main: str = "", **config: object) -> nn.Module:
    """A module whose forward has these parameters; "!" marks one without a default."""
    scope: dict[str, object] = {}
    parameters = [f"{name}=None" if not name.endswith("!") else name.removesuffix("!") for name in names.split()]
    exec(f"def forward(self, *, {', '.join(parameters)}): pass", scope)
    members = {"forward": scope["forward"], "config": SimpleNamespace(**config), "main_input_name": main}
    return type("Net", (nn.Module,), members)()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (
            _model("input_ids attention_mask token_type_ids", model_type="bert", type_vocab_size=2),
            ["input_ids:int64[batch,seq]", "attention_mask:int64[batch,seq]", "token_type_ids:int64[batch,seq]{0:2}"],
        ),
        (
            _model("input_ids attention_mask token_type_ids", model_type="roberta", type_vocab_size=2),
            ["input_ids:int64[batch,seq]", "attention_mask:int64[batch,seq]"],
        ),
        (_model("pixel_values", image_size=[64, 32], num_channels=1), ["pixel_values:float32[batch,1,64,32]"]),
        (_model("pixel_values", vision_config=SimpleNamespace(image_size=48)), ["pixel_values:float32[batch,3,48,48]"]),
        (
            _model(
                "input_features decoder_input_ids",
                model_type="whisper",
                num_mel_bins=80,
                max_source_positions=1500,
                is_encoder_decoder=True,
            ),
            ["input_features:float32[batch,80,3000]", "decoder_input_ids:int64[batch,decoder_seq]"],
        ),
        # Features that replace the embeddings of a text have their width.
        (
            _model(
                "input_ids attention_mask decoder_input_ids inputs_embeds input_features",
                "input_ids",
                hidden_size=64,
                is_encoder_decoder=True,
            ),
            [
                "attention_mask:int64[batch,frames]",
                "decoder_input_ids:int64[batch,decoder_seq]",
                "input_features:float32[batch,frames,64]",
            ],
        ),
        (
            _model("pixel_values_videos", main="pixel_values_videos", frames_per_clip=4, crop_size=32, in_chans=1),
            ["pixel_values_videos:float32[batch,4,1,32,32]"],
        ),
        # A model of texts reads videos only beside them.
        (
            _model("input_ids pixel_values_videos", main="input_ids", num_frames=4, image_size=32),
            ["input_ids:int64[batch,seq]"],
        ),
        (_model("past_values", context_length=64), ["past_values:float32[batch,64]"]),
        (_model("past_values", context_length=64, num_input_channels=7), ["past_values:float32[batch,64,7]"]),
        (
            _model("past_values past_values_padding! freq!", context_length=64, freq_size=3),
            [
                "past_values:float32[batch,64]",
                "past_values_padding:int64[batch,64]{0:2}",
                "freq:int64[batch,1]{0:3}",
            ],
        ),
        (
            _model(
                "past_values past_time_features! past_observed_mask! static_categorical_features future_values "
                "future_time_features",
                context_length=24,
                prediction_length=6,
                lags_sequence=[1, 4],
                num_time_features=2,
                num_static_categorical_features=1,
                cardinality=[5],
            ),
            [
                "past_values:float32[batch,28]",
                "past_time_features:float32[batch,28,2]",
                "past_observed_mask:float32[batch,28]{0:1}",
                "static_categorical_features:int64[batch,1]{0:5}",
                "future_values:float32[batch,6]",
                "future_time_features:float32[batch,6,2]",
            ],
        ),
        (
            _model("pixel_values input_points input_labels", vision_config=SimpleNamespace(image_size=1024)),
            [
                "pixel_values:float32[batch,3,1024,1024]",
                "input_points:float32[batch,point_batch,points,2]{0:1024}",
                "input_labels:int64[batch,point_batch,points]{0:2}",
            ],
        ),
    ],
)
def test_inputs_follow_the_config(model: nn.Module, inputs: list[str], tmp_path: Path) -> None:
    assert infer_default_inputs(model, tmp_path).specs == inputs


@pytest.mark.parametrize(("hides_in_windows", "inputs"), [(False, ["noise:float32[batch,16]{0:1}"]), (True, [])])
def test_noise_of_a_masked_autoencoder_is_an_input(hides_in_windows: bool, inputs: list[str], tmp_path: Path) -> None:
    model = _model("pixel_values noise", image_size=32)
    embeddings = nn.Module()
    embeddings.patch_embeddings = SimpleNamespace(num_patches=16)
    embeddings.random_masking = len
    if hides_in_windows:
        embeddings.is_mae = True
    model.embeddings = embeddings
    assert infer_default_inputs(model, tmp_path).specs == ["pixel_values:float32[batch,3,32,32]", *inputs]


def test_samples_follow_the_strides_of_the_layers(tmp_path: Path) -> None:
    """Some configs of sound models do not list the strides of their convolutions."""
    model = _model("input_values", model_type="sound")
    model.convolutions = nn.Sequential(nn.Conv1d(1, 4, 8, stride=5), nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, stride=2))
    default = infer_default_inputs(model, tmp_path)
    assert default.specs == ["input_values:float32[batch,samples]"]
    assert default.ranges == {"samples": "100:500:15000"}


def test_preprocessor_may_be_a_part_of_the_processor(tmp_path: Path) -> None:
    content = {"image_processor": {"size": {"height": 32, "width": 48}}, "processor_class": "SomeProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(content))
    default = infer_default_inputs(_model("pixel_values", image_size=64), tmp_path)
    assert default.specs == ["pixel_values:float32[batch,3,32,48]"]


@pytest.mark.parametrize(
    ("model", "left_out"),
    [
        (_model("input_ids pixel_values", "input_ids", image_token_id=7), "pixel_values"),
        (_model("input_ids pixel_values_videos pixel_values", "input_ids", image_token_index=7), "pixel_values"),
        (_model("input_ids input_features", "input_ids", audio_token_id=7), "input_features"),
        (
            _model("input_ids pixel_values input_values", "input_ids", image_token_id=7, audio_token_id=8),
            "pixel_values or",
        ),
        (_model("input_ids pixel_values", "input_ids"), ""),
        (_model("input_ids pixel_values", "input_ids", image_token_id=None), ""),
        (_model("input_ids pixel_values", "pixel_values", image_token_id=7), ""),
        (_model("input_ids pixel_values!", "input_ids", image_token_id=7), ""),
        (_model("pixel_values", "pixel_values", image_token_id=7), ""),
    ],
)
def test_model_that_places_images_at_tokens_gets_the_text_alone(model: nn.Module, left_out: str) -> None:
    """Random ids have no token of an image at a place that fits its image."""
    default = infer_default_inputs(model, None)
    assert any(spec.startswith("pixel_values:") for spec in default.specs) == (not left_out)
    if left_out:
        (note,) = default.notes
        assert f"not {left_out}" in note
    else:
        assert not default.notes


# ------------------------------------------------------------------ dims that the model fixes


class Steps(nn.Module):
    """A loop over the tokens: torch unrolls it, which fixes their number."""

    config = SimpleNamespace(max_position_embeddings=20)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        state = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            state = torch.tanh(state + x[:, i])
        return state


class Truncated(Steps):
    """Sizes that torch can't express as a range: it names no dim that it would fix."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        return x + x.new_ones(x.shape[0], int(x.shape[1] * 1.5), 8).sum(1, keepdim=True)


def _own_request(*dims: str) -> InputRequest:
    """Inputs that the project made itself, of which the user stated ``dims``."""
    request = parse_input_request(["input_ids:int64[batch,seq]"], dims)
    return replace(request, assumed=frozenset(request.dims) - request.stated)


@pytest.mark.parametrize("module", [Steps, Truncated])
def test_dim_that_the_model_fixes_is_static_and_noted(module: type[nn.Module]) -> None:
    model = trace_module(module().eval(), (), {}, _own_request(), kind="test")
    assert [str(dim) for dim in model.inputs[0].shape] == ["batch=1:8:64", "20"]
    (note,) = model.notes
    assert note.startswith("the file has the fixed size seq=20: the model's code fixes it")
    assert "--dim seq=N:N:N" in note


class Causal(Steps):
    """A table that covers 100 tokens: at its whole length torch's slice is another function, below it is not."""

    config = SimpleNamespace()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.ones(100, 100).tril())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        length = x.shape[1]
        return self.order[:length, :length] @ x


def test_dim_is_not_fixed_where_a_narrower_range_works() -> None:
    model = trace_module(Causal().eval(), (), {}, _own_request(), kind="test")
    assert [str(dim) for dim in model.inputs[0].shape] == ["batch=1:8:64", "seq=1:8:64"]
    assert model.notes == ()


def test_fixed_dim_costs_one_more_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrower range does not free a dim that has one size, and a trace of a model with long loops takes long."""
    traces = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(kwargs["dynamic_shapes"])
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    trace_module(Steps().eval(), (), {}, _own_request(), kind="test")
    assert len(traces) == 2


def test_fixed_size_is_one_at_which_the_model_runs() -> None:
    """The size that suits most callers is beyond the table of 30 places."""

    class Short(Steps):
        config = SimpleNamespace()

        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(30, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            places = self.places(torch.arange(input_ids.shape[1]))
            return super().forward(input_ids) + places.sum(0)

    model = trace_module(Short().eval(), (), {}, _own_request(), kind="test")
    assert [str(dim) for dim in model.inputs[0].shape] == ["batch=1:8:64", "8"]


def test_dim_that_the_user_stated_is_not_fixed() -> None:
    with pytest.raises(InputError, match=r"'seq' was requested as dynamic \(seq=1:8:16\).*--dim seq=\d+:"):
        trace_module(Steps().eval(), (), {}, _own_request("seq=1:8:16"), kind="test")


def test_size_that_the_user_chose_for_a_fixed_dim() -> None:
    model = trace_module(Steps().eval(), (), {}, _own_request("seq=7:7:7"), kind="test")
    assert [str(dim) for dim in model.inputs[0].shape] == ["batch=1:8:64", "7"]
    assert model.notes == ()


@pytest.mark.parametrize(
    ("preprocessor", "size"),
    [
        ({}, (518, 518)),
        (
            {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 192}},
            (224, 192),
        ),
        ({"size": {"height": 32, "width": 48}}, (32, 48)),
        ({"size": {"longest_edge": 1024}, "do_pad": True, "pad_size": {"height": 1024, "width": 1024}}, (1024, 1024)),
        ({"size": "large"}, (518, 518)),
    ],
)
def test_images_have_the_size_that_the_preprocessor_makes(
    preprocessor: dict[str, object], size: tuple[int, int]
) -> None:
    assert preprocessed_image_size(SimpleNamespace(image_size=518), preprocessor) == size


# ------------------------------------------------------------------ tasks


def test_a_task_keeps_its_own_outputs(tmp_path: Path) -> None:
    class Net(nn.Module):
        config = SimpleNamespace(model_type="bert", type_vocab_size=2)

        def __init__(self) -> None:
            super().__init__()
            self.table, self.pooler = nn.Embedding(11, 8), nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.table(input_ids)
            return {"last_hidden_state": hidden, "pooler_output": self.pooler(hidden[:, 0])}

    ready = prepare_model(Net().eval(), tmp_path, find_task("feature-extraction"), None)
    model = from_module(ready.module, inputs=ready.inputs)
    assert model.outputs == ("last_hidden_state",)
    assert [spec.name for spec in model.inputs] == ["input_ids"]


def test_unknown_tasks_and_parts_are_named() -> None:
    with pytest.raises(InputError, match=r"unknown task 'translate'.*text2text-generation"):
        find_task("translate")
    with pytest.raises(InputError, match=r"unknown part 'half'.*decoder-with-past"):
        require_part_name("half")
    assert find_task("causal-lm-with-past").past


def test_random_weights_are_refused_where_they_are_used() -> None:
    require_complete_weights(Path("folder"), frozenset({"pooler.weight"}), frozenset({"table.weight"}))
    with pytest.raises(LoadError, match=r"no weights for classifier\.weight"):
        require_complete_weights(Path("folder"), frozenset({"classifier.weight"}), frozenset({"classifier.weight"}))


def test_a_task_is_for_folders(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="not a Hugging Face model folder"):
        load(tmp_path / "x.pt", task="fill-mask")


def test_an_unknown_task_is_refused_before_transformers_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    with pytest.raises(InputError, match="unknown task 'guessing'"):
        load(tmp_path, task="guessing")


@pytest.mark.parametrize(
    ("stated", "ranges"),
    [
        ({}, {"past": "0:8:32", "seq": "1:8:32"}),
        ({"past": 60}, {"seq": "1:4:4"}),
        ({"seq": 1}, {"past": "0:8:63"}),
        ({"past": 40, "seq": 24}, {}),
    ],
)
def test_past_and_new_tokens_share_the_positions(stated: dict[str, int], ranges: dict[str, str]) -> None:
    ready = TraceableModel(nn.Identity(), ["past_key[1,past,4]"], new="seq", positions=64)
    assert unstated_ranges(ready, stated) == ranges


@pytest.mark.parametrize(
    ("stated", "ranges"),
    [
        ({}, {"past": "0:8:63", "seq": "1:1:1"}),
        ({"past": 40}, {"seq": "1:1:1"}),
        ({"seq": 1}, {"past": "0:8:63"}),
    ],
)
def test_a_model_with_a_linear_attention_reads_one_token(stated: dict[str, int], ranges: dict[str, str]) -> None:
    ready = TraceableModel(nn.Identity(), ["past_key[1,past,4]"], new="seq", positions=64, one_token=True)
    assert unstated_ranges(ready, stated) == ranges
    with pytest.raises(InputError, match="seq may have up to 4 tokens, but this model is exported with one token"):
        unstated_ranges(ready, {**stated, "seq": 4})


@pytest.mark.parametrize("stated", [{"past": 64}, {"past": 60, "seq": 5}])
def test_more_than_the_positions_is_refused(stated: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at most the model's 64 positions"):
        unstated_ranges(TraceableModel(nn.Identity(), [], new="seq", positions=64), stated)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """transformers in the little that is used: which class was asked for a model, and how."""
    calls: list[tuple[str, dict[str, Any]]] = []

    class PreTrainedModel(nn.Module):
        @classmethod
        def from_pretrained(cls, path: str, **options: Any) -> Any:
            calls.append((cls.__name__, options))
            return nn.Identity(), {"missing_keys": set()}

    fake = types.ModuleType("transformers")
    fake.__spec__ = importlib.machinery.ModuleSpec("transformers", None)
    for name, base in (("AutoModel", PreTrainedModel), ("BertModel", PreTrainedModel), ("AutoProcessor", object)):
        setattr(fake, name, type(name, (base,), {"from_pretrained": PreTrainedModel.__dict__["from_pretrained"]}))
    fake.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    return calls


@pytest.mark.parametrize(
    ("named", "loader"), [("BertModel", "BertModel"), ("AutoProcessor", "AutoModel"), ("NoSuchModel", "AutoModel")]
)
def test_no_code_of_a_folder_is_asked_for(
    named: str, loader: str, asked: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """A processor would read other files of the folder, which may name code; and nothing is left to a question at the
    terminal."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [named]}))
    with suppress(Exception):  # the model that comes back is none
        prepare_folder(tmp_path, trust=False)
    ((name, options),) = asked
    assert name == loader
    assert options["trust_remote_code"] is False


def test_a_part_of_a_model_has_its_own_class(
    asked: list[tuple[str, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers does not export the classes of parts, and AutoModel does not know them."""
    parts = types.ModuleType("transformers.models.pair.modeling_pair")
    bert = sys.modules["transformers"].BertModel
    parts.TextPart = type("TextPart", (bert,), {})  # type: ignore[attr-defined]
    config = type("PairTextConfig", (), {"__module__": "transformers.models.pair.configuration_pair"})
    auto = types.ModuleType("transformers.models.auto.configuration_auto")
    auto.CONFIG_MAPPING = {"pair_text": config}  # type: ignore[attr-defined]
    for module in (parts, auto):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("transformers.models", "transformers.models.pair", "transformers.models.auto"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for architecture, loader in (("TextPart", "TextPart"), ("Other", "AutoModel")):
        asked.clear()
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "pair_text"}))
        load_folder_model(tmp_path, trust=False)
        assert [name for name, _ in asked] == [loader]


@pytest.mark.parametrize("config", [{"architectures": [5]}, {"architectures": {"a": 1}}, {"auto_map": ["x"]}])
def test_a_config_of_other_types_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"config\.json"):
        prepare_folder(tmp_path, trust=False)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"AutoModel": "modeling.Net"}, r"so 'modeling\.py' would run"),
        ({"AutoModel": "some/where--modeling.Net"}, r"so 'modeling\.py' from the repository 'some/where' would run"),
        # One of the two classes of a tokenizer may be missing.
        ({"AutoTokenizer": ["words.Slow", None]}, r"so 'words\.py' would run"),
        # What reads like a sentence of ours stands in quotes.
        ({"AutoModel": "nothing would run, pass trust.Net"}, r"so 'nothing would run, pass trust\.py' would run"),
    ],
)
def test_read_folder_classes_of_its_own_are_named(named: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": named}))
    with pytest.raises(TrustError, match=words):
        prepare_folder(tmp_path, trust=False)


@pytest.mark.parametrize("named", [{"AutoModel": 5}, {"AutoModel": "modeling"}, {"AutoModel": {"a": 1}}])
def test_read_folder_auto_map_of_no_classes_is_refused(named: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": named}))
    with pytest.raises(LoadError, match="in its auto_map instead of a class name"):
        prepare_folder(tmp_path, trust=False)


def test_read_folder_table_of_weights_is_not_shown(
    asked: list[tuple[str, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It holds the names that a stranger gave, with their line feeds."""
    bars = types.ModuleType("transformers.utils.logging")
    seen: list[str] = []
    bars.is_progress_bar_enabled = lambda: True  # type: ignore[attr-defined]
    bars.disable_progress_bar = lambda: seen.append("off")  # type: ignore[attr-defined]
    bars.enable_progress_bar = lambda: seen.append("on")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", bars)

    def from_pretrained(path: str, **options: Any) -> Any:
        logging.getLogger("transformers.modeling_utils").warning("x\n::error::forged | UNEXPECTED")
        return nn.Identity(), {"missing_keys": set()}

    monkeypatch.setattr(sys.modules["transformers"].BertModel, "from_pretrained", from_pretrained)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    before = logging.getLogger("transformers").level
    load_folder_model(tmp_path, trust=False)
    assert not caplog.records
    assert seen == ["off", "on"]
    assert logging.getLogger("transformers").level == before


@pytest.mark.parametrize("task", [None, "text-classification"])
def test_read_folder_class_that_cannot_be_imported_is_no_traceback(
    task: str | None, asked: list[tuple[str, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers imports a class when it is asked for, and says in errors of its own what that class lacks."""

    def lazy(name: str) -> Any:
        raise ModuleNotFoundError(
            f"Could not import module {name!r}. Are this object's requirements defined correctly?"
        )

    monkeypatch.setattr(sys.modules["transformers"], "__getattr__", lazy, raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTModel"]}))
    if task is None:
        load_folder_model(tmp_path, trust=False)
        assert [name for name, _ in asked] == ["AutoModel"]
    else:
        with pytest.raises(LoadError, match=f"no importable class for the task {task}"):
            load_folder_model(tmp_path, trust=False, task=task)


# ------------------------------------------------------------------ the Hub


class _Hub(types.ModuleType):
    """huggingface_hub with a cache of one folder; what is not in it is fetched, or fails as ``fails``."""

    def __init__(self, cached: Path | None, fetched: Path | None = None, fails: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.cached, self.fetched, self.fails, self.calls = cached, fetched, fails, list[str]()
        self.HfApi = lambda: self

    def model_info(self, name: str, timeout: float) -> None:
        assert 0 < timeout <= 10
        self.calls.append(f"asked for {name}")
        if self.fails:
            raise self.fails

    def snapshot_download(self, name: str, local_files_only: bool = False, **_: object) -> str:
        found = self.cached if local_files_only else self.fetched
        if found is None:
            raise FileNotFoundError(name)
        return str(found)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_model_of_the_hub_is_taken_from_the_cache(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = _Hub(snapshot)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("org/name") == snapshot
    assert not hub.calls  # no network where the cache has it
    (snapshot / "model.safetensors").unlink()
    hub.fetched = snapshot
    assert resolve_model_path("org/name") == snapshot
    assert hub.calls == ["asked for org/name"]


def test_without_a_network_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", _Hub(None, fails=ConnectionError("no route")))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"org/name is neither a local file or folder.*ConnectionError: no route"):
        load("org/name")


def test_a_path_is_no_name_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/x", "model.pt", "somewhere/model.pt2", "/org/name", "name"):
        assert not is_hub_id(path), path
    assert is_hub_id("org/name-1.5")
