"""Live modules with the switches of transformers' models, by hand: caches, experts, biased attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import ExportError, InputError
from normdeploy.loading import from_module
from normdeploy.loading.transformers_switches import set_traceable_switches

IDS = "input_ids:int64[batch,seq]"


class Cache:
    """Keys of earlier calls, in an object that torch's pytree does not know."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


class Decoder(nn.Module):
    """Decoder that returns a cache unless its config or the call switches it off."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)

    def forward(self, input_ids: torch.Tensor, use_cache: bool | None = None) -> dict[str, Any]:
        x = self.norm(self.table(input_ids))
        cached = self.config.use_cache if use_cache is None else use_cache
        return {"logits": x} | ({"past_key_values": Cache(x)} if cached else {})


class Wrapper(nn.Module):
    """Module of a user with a decoder inside."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.decoder(input_ids)


@pytest.mark.parametrize("wrap", [lambda decoder: decoder, Wrapper], ids=["alone", "inside"])
def test_cache_of_a_live_module_is_no_output(wrap: Any) -> None:
    torch.manual_seed(0)
    module = wrap(Decoder()).eval()
    result = normdeploy.export(module, inputs=[IDS])
    assert [output.name for output in result.proto.graph.output] == ["logits"]
    comparison = normdeploy.verify(module, result.proto, inputs=[IDS])
    assert comparison
    assert not any("not compared with its trace" in note for note in comparison.notes)
    assert "past_key_values" in module(torch.ones(1, 2, dtype=torch.int64))


def test_cache_that_the_call_asks_for_is_named() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ExportError, match=r"returns Cache, .*use_cache=False"):
        from_module(Decoder().eval(), kwargs={"input_ids": ids, "use_cache": True})


@pytest.fixture
def grouped_operator() -> Iterator[Any]:
    """An operator that multiplies each row by its expert's weights; ONNX has no such operator."""
    library = torch.library.Library("test_experts", "DEF")
    library.define("grouped(Tensor x, Tensor weights, Tensor experts) -> Tensor")
    library.impl("grouped", lambda x, weights, experts: (x[:, None] @ weights[experts])[:, 0], "CPU")
    library.impl("grouped", lambda x, weights, experts: x.new_empty(x.shape[0], weights.shape[2]), "Meta")
    yield torch.ops.test_experts.grouped.default
    library._destroy()


class Experts(nn.Module):
    """Mixture of experts with two implementations, of which only "batched_mm" can be written as ONNX."""

    def __init__(self, grouped: Any, known: tuple[str, ...] = ("batched_mm", "grouped_mm")) -> None:
        super().__init__()
        self.config = SimpleNamespace(implementation="grouped_mm")
        self.table, self.norm, self.route = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.weights = nn.Parameter(torch.randn(3, 8, 5))
        self._grouped, self._known = grouped, known

    def set_experts_implementation(self, name: str) -> None:
        if name not in self._known:
            raise ValueError(f"{name} is not supported")
        self.config.implementation = name

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(input_ids)).flatten(0, 1)
        experts = self.route(x).argmax(-1)
        if self.config.implementation == "grouped_mm":
            y = self._grouped(x, self.weights, experts)
        else:
            y = torch.bmm(x[:, None], self.weights[experts])[:, 0]
        return y.unflatten(0, input_ids.shape)


@pytest.mark.parametrize("wrap", [lambda experts: experts, Wrapper], ids=["alone", "inside"])
def test_experts_take_the_form_that_exports(grouped_operator: Any, wrap: Any) -> None:
    torch.manual_seed(0)
    experts = Experts(grouped_operator).eval()
    module = wrap(experts).eval()
    result = normdeploy.export(module, inputs=[IDS])
    # The module itself runs its own form beside the file.
    comparison = normdeploy.verify(module, result.proto, inputs=[IDS])
    assert comparison
    assert not any("not compared with its trace" in note for note in comparison.notes)
    assert experts.config.implementation == "grouped_mm"


def test_experts_without_the_form_keep_their_own(grouped_operator: Any) -> None:
    experts = Experts(grouped_operator, known=("grouped_mm",)).eval()
    set_traceable_switches(experts)
    assert experts.config.implementation == "grouped_mm"


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"model_type": "t5", "relative_attention_num_buckets": 32}, "eager"),
        ({"model_type": "swinv2"}, "eager"),
        ({"model_type": "bert"}, "sdpa"),
    ],
)
def test_attention_with_a_bias_is_written_out(config: dict[str, Any], chosen: str) -> None:
    module = nn.Linear(2, 2)
    module.config, module.attention = SimpleNamespace(**config), "sdpa"
    module.set_attn_implementation = lambda name: setattr(module, "attention", name)
    set_traceable_switches(module)
    assert module.attention == chosen


@pytest.mark.parametrize("dims", [(), ("seq=1:4:8",)], ids=["default", "stated"])
def test_live_decoder_without_inputs_has_the_inputs_of_its_folder(dims: tuple[str, ...], tmp_path: Path) -> None:
    module = Decoder().eval()
    module.config = SimpleNamespace(use_cache=True, model_type="decoder", max_position_embeddings=20)
    result = normdeploy.export(module, output=tmp_path / "m.onnx", dims=dims)
    assert [value.name for value in result.proto.graph.input] == ["input_ids"]
    assert [value.name for value in result.proto.graph.output] == ["logits"]
    loaded = from_module(module, dims=dims)
    assert [str(dim) for dim in loaded.inputs[0].shape] == ["batch=1:8:64", "seq=1:4:8" if dims else "seq=1:8:20"]
    assert normdeploy.verify(module, tmp_path / "m.onnx")


def test_live_module_of_another_kind_still_needs_inputs() -> None:
    with pytest.raises(InputError, match=r"Decoder needs example inputs"):
        from_module(Decoder().eval())
