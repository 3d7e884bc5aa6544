"""Caches that are not transformers' ``Cache``: lists, objects and attributes of layers, on small models by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from normdeploy.errors import ExportError, InputError
from normdeploy.loading.decoder_states import find_decoder_states
from normdeploy.loading.huggingface_tasks import find_task
from normdeploy.loading.input_request import parse_input_request
from normdeploy.loading.traceable_models import TraceableModel, prepare_model, request_inputs, unstated_ranges

TOKENS = torch.ones(1, 3, dtype=torch.int64)
CONFIG = SimpleNamespace(is_encoder_decoder=False)


class Rwkv(nn.Module):
    """Weighted mean of all tokens, in the states of RWKV: it writes into the list that it was given."""

    def __init__(self, states: int = 5) -> None:
        super().__init__()
        self.config = CONFIG
        self.states = states

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        state: list[torch.Tensor] | None = None,
        use_cache: bool = False,
    ) -> Any:
        if state is None:
            state = [torch.zeros(input_ids.shape[0], 1, 1) for _ in range(self.states)]
            state[-1] -= 1e30
        for token in input_ids.T:
            key = token[:, None, None].float()
            largest = torch.maximum(state[4], key)
            old, new = torch.exp(state[4] - largest), torch.exp(key - largest)
            state[2][:] = old * state[2] + new * key
            state[3][:] = old * state[3] + new
            state[4][:] = largest
        return SimpleNamespace(logits=state[2] / state[3], state=state)


def test_list_of_states_gives_the_model_s_logits_from_zeros() -> None:
    model = Rwkv()
    states = find_decoder_states(model, CONFIG, TOKENS)
    assert [slot.past_name for slot in states.slots] == [f"past_state.{n}" for n in range(5)]
    assert [slot.present_name for slot in states.slots][4] == "present_state.4"
    assert all(slot.is_recurrent for slot in states.slots)
    # Keys below -100 vanish beside an exponent of 0, which is not the exponent before the first token.
    given = torch.tensor([[-200, -199]])
    held = [torch.zeros(1, 1, 1) for _ in range(5)]
    for token in given[0]:
        before = [tensor.clone() for tensor in held]
        run = states.run({"input_ids": token.reshape(1, 1)}, held)
        assert all(map(torch.equal, held, before))
        held = run.states
    torch.testing.assert_close(run.logits, model(given).logits)


def test_list_of_another_length_is_refused() -> None:
    with pytest.raises(ExportError, match="a list of 6 tensors, not of five"):
        find_decoder_states(Rwkv(states=6), CONFIG, TOKENS)


def test_states_without_a_mask_have_no_dim_for_the_past(tmp_path: Path) -> None:
    ready = prepare_model(Rwkv(), tmp_path, find_task("text-generation-with-past"), None)
    # The model ignores its attention_mask, so the file has none that would seem to hide padding.
    assert [text.partition(":")[0] for text in ready.inputs] == ["input_ids", *(f"past_state.{n}" for n in range(5))]
    assert unstated_ranges(ready, {}) == {"seq": "1:1:1"}


class LayerObject:
    """Cache of xLSTM's form."""

    def __init__(self, config: Any, max_batch_size: int, dtype: torch.dtype) -> None:
        self.config = config
        shapes = ((max_batch_size, 2, 3), (max_batch_size, 2), (max_batch_size, 1))
        self.rnn_state = {layer: tuple(torch.zeros(shape, dtype=dtype) for shape in shapes) for layer in range(2)}


class Xlstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG

    def forward(self, input_ids: torch.Tensor, cache_params: Any = None, use_cache: bool = False) -> Any:
        cache = cache_params or LayerObject(self.config, input_ids.shape[0], torch.float32)
        for tensors in cache.rnn_state.values():
            for number, tensor in enumerate(tensors):
                tensor.copy_(tensor + (number + 1) * input_ids.sum())
        return SimpleNamespace(logits=cache.rnn_state[1][2][:, None], cache_params=cache)


def test_object_with_tuples_of_states_passes_each_state_on() -> None:
    states = find_decoder_states(Xlstm(), CONFIG, TOKENS)
    names = [slot.past_name for slot in states.slots]
    assert names == [f"past_recurrent.{layer}{place}" for layer in range(2) for place in ("", ".1", ".2")]
    held = [torch.full_like(tensor, 10.0 * n) for n, tensor in enumerate(states.examples)]
    run = states.run({"input_ids": torch.tensor([[7]])}, held)
    assert [float(tensor.flatten()[0]) for tensor in run.states] == [7.0, 24.0, 41.0, 37.0, 54.0, 71.0]
    assert [float(tensor.flatten()[0]) for tensor in held] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


class Broken(nn.Module):
    config = CONFIG

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        raise ValueError("the heads do not fit")


def test_model_that_does_not_run_is_refused_without_a_traceback() -> None:
    with pytest.raises(InputError, match="Broken does not run with a cache in PyTorch: ValueError: the heads do not"):
        find_decoder_states(Broken(), CONFIG, TOKENS)


def test_model_without_keys_has_no_static_cache(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Rwkv has no keys and values, or other states"):
        prepare_model(Rwkv(), tmp_path, find_task("text-generation-with-static-cache"), None)


STATIC = TraceableModel(
    nn.Identity(),
    ["input_ids:int64[batch,seq]", "cache_position:int64[1]", "past_key_values.0.key:float32[batch,2,cache,8]"],
    static_length=64,
    positions=64,
)


@pytest.mark.parametrize(
    ("dims", "length", "places"),
    [([], 64, 33), (["cache=40:40:40"], 40, 21), (["cache=40:40:40", "seq=1:4:8"], 40, 33)],
)
def test_new_tokens_fit_behind_the_place_of_a_static_cache(dims: list[str], length: int, places: int) -> None:
    request = request_inputs(STATIC, (), dims)
    inputs = {wish.name: wish for wish in request.inputs}
    assert not inputs["past_key_values.0.key"].shape[2].is_dynamic
    assert inputs["past_key_values.0.key"].shape[2].opt == length
    assert inputs["cache_position"].range == (0, places)


@pytest.mark.parametrize("dims", [["cache=65:65:65"], ["cache=8:8:8", "seq=1:8:9"]])
def test_static_cache_that_does_not_fit_is_refused(dims: list[str]) -> None:
    with pytest.raises(InputError, match=r"the static cache has (65|8) places .* has 64 positions"):
        request_inputs(STATIC, (), dims)


def test_static_cache_has_one_length() -> None:
    with pytest.raises(InputError, match="a static cache has one length, but 8 to 64 were requested"):
        request_inputs(STATIC, (), ["cache=8:16:64"])


def test_model_of_states_alone_reads_any_number_of_tokens() -> None:
    inputs = ["input_ids:int64[batch,seq]", "attention_mask:int64[batch,past+seq]"]
    ready = TraceableModel(nn.Identity(), inputs, new="seq", positions=512, unlimited=True, one_token=True)
    assert unstated_ranges(ready, {}) == {"seq": "1:1:1", "past": "0:8:511"}
    assert unstated_ranges(ready, {"past": 100_000}) == {"seq": "1:1:1"}
    assert parse_input_request(inputs, ["past=0:8:100000", "seq=1:1:1"]).inputs
