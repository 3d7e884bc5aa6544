"""Tensors of a decoder's cache: keys, values and states of constant size, by hand; the models need transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from normdeploy.errors import ExportError
from normdeploy.loading.decoder_cache import choose_recurrent_kind, find_cache_slots, read_cache


def attention() -> SimpleNamespace:
    return SimpleNamespace(keys=torch.zeros(1, 2, 3, 8), values=torch.ones(1, 2, 3, 8))


def states(**kinds: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(**{f"{kind}_states": {0: tensor} for kind, tensor in kinds.items()})


def test_each_kind_of_layer_gives_its_tensors_and_names() -> None:
    both = SimpleNamespace(**vars(attention()), **vars(states(conv=torch.zeros(1, 32, 4))))
    cache = SimpleNamespace(layers=[attention(), states(conv=torch.zeros(1, 32, 3), recurrent=None), both])
    slots = find_cache_slots(cache)
    assert [slot.past_name for slot in slots] == [
        *("past_key_values.0.key", "past_key_values.0.value", "past_conv.1"),
        *("past_key_values.2.key", "past_key_values.2.value", "past_conv.2"),
    ]
    assert [slot.present_name for slot in slots][2:4] == ["present_conv.1", "present.2.key"]
    tensors = read_cache(cache, slots)
    texts = [slot.describe_input(tensor, "past") for slot, tensor in zip(slots, tensors, strict=True)]
    assert texts[0] == "past_key_values.0.key:float32[batch,2,past,8]{-3.0:3.0}"
    assert texts[2] == "past_conv.1:float32[batch,32,3]{-3.0:3.0}"
    assert texts[5] == "past_conv.2:float32[batch,32,4]{-3.0:3.0}"


def test_a_cache_of_an_unknown_form_is_refused() -> None:
    with pytest.raises(ExportError, match="is a SimpleNamespace, not keys and values"):
        find_cache_slots(SimpleNamespace(layers=[SimpleNamespace()]))
    with pytest.raises(ExportError, match="has no layers"):
        find_cache_slots(SimpleNamespace())


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        # Qwen3-Next, Falcon-H1, Nemotron-H, Mamba 2
        ({"linear_key_head_dim": 8}, "recurrent"),
        ({"mamba_d_state": 8}, "ssm"),
        ({"ssm_state_size": 8}, "ssm"),
        ({"state_size": 8}, "ssm"),
    ],
)
def test_states_of_a_linear_attention_have_the_names_of_transformers_js(config: dict[str, int], kind: str) -> None:
    assert choose_recurrent_kind(SimpleNamespace(**config)) == kind
    layer = states(conv=torch.zeros(1, 32, 4), recurrent=torch.ones(1, 4, 8, 8))
    cache = SimpleNamespace(layers=[attention(), layer])
    slots = find_cache_slots(cache, kind)
    assert [slot.past_name for slot in slots[2:]] == ["past_conv.1", f"past_{kind}.1"]
    assert [slot.present_name for slot in slots[2:]] == ["present_conv.1", f"present_{kind}.1"]
    assert [slot.is_recurrent for slot in slots] == [False, False, False, True]
    assert read_cache(cache, slots)[3] is layer.recurrent_states[0]
    text = slots[3].describe_input(layer.recurrent_states[0], "past")
    assert text == f"past_{kind}.1:float32[batch,4,8,8]{{-3.0:3.0}}"
