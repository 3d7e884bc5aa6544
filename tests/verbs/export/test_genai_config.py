"""The description of a decoder for onnxruntime-genai: names, sizes and limits of the file, tokens of the folder, and
the reasons of refusals. onnxruntime-genai itself reads such descriptions in benchmarks/genai.py.
"""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from normdeploy.errors import InputError
from normdeploy.loading.generation_settings import GenerationSettings
from normdeploy.model import Dim, InputSpec
from normdeploy.storage.export_record import update_record
from normdeploy.verbs.export.genai_config import make_genai_config

SETTINGS = GenerationSettings(positions=128, bos=1, eos=(2, 9), pad=0, window=None, search={"do_sample": True})
BATCH, SEQ, PAST = Dim("batch", 1, 8, 64), Dim("seq", 1, 8, 16), Dim("past", 0, 8, 112)


def _dims(shape: tuple[Dim, ...]) -> list[str | int]:
    return [dim.name or dim.opt for dim in shape]


def _decoder(
    *layers: tuple[tuple[int, int], tuple[int, int]] | int,
    seq: Dim = SEQ,
    past: Dim = PAST,
    more: str = "",
    without: str = "",
    vocabulary: int | str = 40,
) -> onnx.ModelProto:
    """Build the inputs and outputs of a decoder, without nodes.

    Args:
        layers: (heads, head size) of keys and of values; or the width of the state of a convolution.
        more: name of one more input.
        without: name of an output to leave out.
    """
    specs = [InputSpec("input_ids", "int64", (BATCH, seq))]
    specs += [InputSpec("attention_mask", "int64", (BATCH, Dim.sum_of((past, seq))))]
    specs += [InputSpec("position_ids", "int64", (BATCH, seq))]
    outputs: list[tuple[str, list[str | int]]] = [("logits", ["batch", "seq", vocabulary])]
    for number, layer in enumerate(layers):
        if isinstance(layer, int):
            shape: tuple[Dim, ...] = (BATCH, Dim.from_size(32), Dim.from_size(layer))
            specs += [InputSpec(f"past_conv.{number}", "float32", shape)]
            outputs += [(f"present_conv.{number}", _dims(shape))]
            continue
        for kind, (heads, size) in zip(("key", "value"), layer, strict=True):
            shape = (BATCH, Dim.from_size(heads), past, Dim.from_size(size))
            specs += [InputSpec(f"past_key_values.{number}.{kind}", "float32", shape)]
            outputs += [(f"present.{number}.{kind}", ["batch", heads, "all", size])]
    if more:
        specs += [InputSpec(more, "float32", (BATCH, seq))]
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(s.name, types[s.dtype], _dims(s.shape)) for s in specs]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs if name != without]
    proto = helper.make_model(helper.make_graph([], "decoder", inputs, given))
    update_record(proto, specs)
    return proto


SAME = ((2, 8), (2, 8))


def test_file_with_keys_and_values_has_all_keys_that_genai_reads() -> None:
    described = make_genai_config(_decoder(SAME, SAME), SETTINGS)
    assert described.content == {
        "model": {
            "type": "decoder",
            "vocab_size": 40,
            "context_length": 113,
            "bos_token_id": 1,
            "eos_token_id": [2, 9],
            "pad_token_id": 0,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": 8,
                "num_key_value_heads": 2,
                "num_hidden_layers": 2,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": True,
            "top_k": 40,
            "max_length": 113,
            "chunk_size": 16,
            "past_present_share_buffer": False,
        },
    }
    (note,) = described.notes
    assert "at most 113 tokens" in note
    assert "pieces of 16 tokens" in note


def test_states_of_convolutions_have_names_and_layer_types() -> None:
    described = make_genai_config(_decoder(3, SAME), SETTINGS)
    decoder = described.content["model"]["decoder"]
    assert described.content["model"]["type"] == "lfm2"
    assert decoder["layer_types"] == ["conv", "full_attention"]
    assert decoder["num_hidden_layers"] == 2
    assert decoder["inputs"]["past_conv_names"] == "past_conv.%d"
    assert decoder["outputs"]["present_conv_names"] == "present_conv.%d"
    assert "the states of convolutions would contain the padding" in described.notes[1]


@pytest.mark.parametrize(("window", "notes"), [(16, 2), (113, 1), (None, 1)])
def test_window_within_the_context_is_noted(window: int | None, notes: int) -> None:
    settings = GenerationSettings(positions=128, bos=1, eos=(2,), pad=0, window=window, search={})
    described = make_genai_config(_decoder(SAME), settings)
    assert len(described.notes) == notes
    if notes > 1:
        assert "the window of 16 tokens would contain the padding" in described.notes[1]


def test_tokens_that_genai_refuses_are_left_out() -> None:
    """onnxruntime-genai refuses null, and ids beyond the vocabulary."""
    settings = GenerationSettings(positions=128, bos=None, eos=(40, 3), pad=None, window=None, search={})
    model = make_genai_config(_decoder(SAME), settings).content["model"]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([3], 3)
    assert "bos_token_id" not in model


def test_text_without_an_end_is_refused() -> None:
    """Without a token that ends a text, onnxruntime-genai would end a text at the token for padding."""
    settings = GenerationSettings(positions=128, bos=None, eos=(40,), pad=0, window=None, search={})
    with pytest.raises(InputError, match=r"eos_token_id is \[40\], and the vocabulary of the file has 40 tokens"):
        make_genai_config(_decoder(SAME), settings)


@pytest.mark.parametrize("size", [1, 5])
def test_layers_may_differ(size: int) -> None:
    decoder = make_genai_config(_decoder(SAME, ((1, size), (1, size))), SETTINGS).content["model"]["decoder"]
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (2, 8)


@pytest.mark.parametrize(
    ("layers", "changed", "said"),
    [
        ([SAME], {"more": "inputs_embeds"}, "it has no values for the input 'inputs_embeds'"),
        ([SAME], {"more": "past_key_values.0.encoder.key"}, "no values for the input 'past_key_values.0.encoder.key'"),
        ([SAME], {"without": "present.0.value"}, "no output 'present.0.value'"),
        ([SAME], {"without": "logits"}, "no output 'logits'"),
        ([], {}, "no layer of the file has keys and values as inputs"),
        ([3], {}, "no layer of the file has keys and values as inputs"),
        ([SAME, ((2, 8), (2, 4))], {}, r"keys of layer 1 are \[batch, 2, past, 8\].*values are \[batch, 2, past, 4\]"),
        ([SAME], {"vocabulary": "words"}, "last dim of the logits is not the fixed number of tokens"),
        ([SAME], {"past": Dim("past", 4, 8, 40)}, "the file takes 4 to 40 earlier tokens; pass --dim past=0:8:64"),
        ([SAME], {"past": Dim.from_size(8)}, "the file takes 8 earlier tokens; pass --dim past=0:8:64"),
        ([SAME], {"past": Dim("past", 0, 8, 40, step=4)}, r"takes 0 to 40 \(multiples of 4\) earlier tokens"),
        ([SAME], {"seq": Dim("seq", 2, 8, 16)}, "the file takes 2 to 16 new tokens; pass --dim seq=1:8:16"),
    ],
)
def test_file_that_genai_can_not_run_is_refused(layers: list[Any], changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_genai_config(_decoder(*layers, **changed), SETTINGS)
