"""The loop that passes a decoder's cache on, by a decoder that counts."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.errors import InputError
from normdeploy.graphs.declared_inputs import tensor_spec
from normdeploy.inputs.token_prompts import pad_left
from normdeploy.model import TensorSpec
from normdeploy.runtimes.cached_decoder import (
    CachedDecoder,
    DecoderPorts,
    TextEnd,
    find_decoder_ports,
    follow_tokens,
    generate_greedily,
)
from normdeploy.runtimes.ort_runner import OrtRunner
from tests.decoders import counting_decoder

PROMPTS = pad_left("prompts", [[3, 4, 5], [9]])


def counting_ports() -> DecoderPorts:
    graph = counting_decoder().graph
    return find_decoder_ports("counting.onnx", map(tensor_spec, graph.input), [out.name for out in graph.output])


def test_greedy_tokens_continue_each_row() -> None:
    with OrtRunner(counting_decoder()) as runner:
        tokens = generate_greedily(CachedDecoder(runner.infer, counting_ports()), PROMPTS, 4)
    np.testing.assert_array_equal(tokens, [[6, 7, 8, 9], [10, 11, 0, 1]])


def test_rows_end_at_their_own_tokens_and_padding_is_read_after_the_end() -> None:
    read = []
    with OrtRunner(counting_decoder()) as runner:

        def infer(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            read.append(feeds["input_ids"][:, -1].tolist())
            return runner.infer(feeds)

        end = TextEnd(frozenset({8, 10}), padding=2)
        rows = generate_greedily(CachedDecoder(infer, counting_ports()), PROMPTS, 9, end)
    assert [row.tolist() for row in rows] == [[6, 7, 8], [10]]
    assert read == [[5, 9], [6, 10], [7, 2]]


def test_the_cache_masks_and_positions_are_passed_on() -> None:
    seen = []
    with OrtRunner(counting_decoder()) as runner:

        def infer(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            seen.append(feeds)
            return runner.infer(feeds)

        follow_tokens(CachedDecoder(infer, counting_ports()), PROMPTS, np.array([[1, 2, 0], [7, 8, 0]]))
    np.testing.assert_array_equal([feeds["input_ids"].shape[1] for feeds in seen], [3, 1, 1])
    last = seen[-1]
    np.testing.assert_array_equal(last["attention_mask"], [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(last["position_ids"], [[4], [2]])
    # The cache holds the tokens and the positions that were read before.
    np.testing.assert_array_equal(last["past_key_values.0.key"][:, 0, :, 0], [[3, 4, 5, 1], [0, 0, 9, 7]])
    np.testing.assert_array_equal(last["past_key_values.0.value"][:, 0, :, 0], [[0, 1, 2, 3], [0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("names", "outputs", "message"),
    [
        (["pixel_values"], ["logits"], "takes 'input_ids' and a cache"),
        (["input_ids", "attention_mask"], ["last_hidden_state"], "has no cache among its inputs"),
        (["input_ids", "past_key_values.0.key"], ["logits"], "has no output 'present.0.key'"),
        (["input_ids", "encoder_hidden_states", "past_key_values.0.key"], ["logits"], "'encoder_hidden_states', which"),
    ],
)
def test_files_that_do_not_generate_are_refused(names: list[str], outputs: list[str], message: str) -> None:
    specs = [TensorSpec(name, "int64", ("batch", "seq")) for name in names]
    with pytest.raises(InputError, match=message):
        find_decoder_ports("x.onnx", specs, outputs)


@pytest.mark.parametrize("more", [[], ["cache_position"]])
def test_a_static_cache_is_refused(more: list[str]) -> None:
    """A file of another exporter, whose past has the maximum length and whose new tokens have stated places."""
    specs = [TensorSpec(name, "int64", ("batch", 1)) for name in ("input_ids", *more)]
    specs += [TensorSpec(f"past_key_values.0.{kind}", "float32", ("batch", 2, 64, 8)) for kind in ("key", "value")]
    with pytest.raises(InputError, match=r"a past of the fixed length 64 .* as a static cache has"):
        find_decoder_ports("x.onnx", specs, ["logits", "present.0.key", "present.0.value"])


def test_padding_needs_a_mask() -> None:
    ports = counting_ports()
    inputs = {name: spec for name, spec in ports.inputs.items() if name != "attention_mask"}
    decoder = CachedDecoder(lambda feeds: {}, DecoderPorts(inputs, ports.cache))
    with pytest.raises(InputError, match="no attention_mask to hide the padding"):
        decoder.read_prompts(PROMPTS)


def test_a_file_of_single_tokens_reads_prompts_one_by_one_and_passes_every_state_on() -> None:
    states = {f"past_{kind}.0": f"present_{kind}.0" for kind in ("conv", "recurrent", "ssm")}
    specs = [
        TensorSpec("input_ids", "int64", ("batch", 1)),
        TensorSpec("attention_mask", "int64", ("batch", "total")),
        *(TensorSpec(name, "float32", ("batch", 1)) for name in states),
    ]
    ports = find_decoder_ports("sum.onnx", specs, ["logits", *states.values()])
    assert ports.is_recurrent
    assert not counting_ports().is_recurrent
    lengths = []

    def add_up(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        lengths.append(feeds["input_ids"].shape[1])
        # The padding's id 50 is hidden by the file itself.
        token = feeds["input_ids"] * feeds["attention_mask"][:, -1:]
        sums = {states[name]: (feeds[name] + token).astype(np.float32) for name in states}
        return {"logits": sum(sums.values())[:, None], **sums}

    decoder = CachedDecoder(add_up, ports)
    padded = pad_left("prompts", [[3, 4, 5], [9]], padding=50)
    np.testing.assert_array_equal(decoder.read_prompts(padded), [[36], [27]])
    np.testing.assert_array_equal(decoder.read_tokens(np.array([1, 1])), [[39], [30]])
    assert lengths == [1, 1, 1, 1]


def test_logits_of_another_rank_are_refused() -> None:
    ports = counting_ports()
    decoder = CachedDecoder(lambda feeds: {"logits": np.zeros(3), **dict.fromkeys(ports.cache.values())}, ports)
    with pytest.raises(InputError, match=r"'logits' is \[3\], but a decoder returns"):
        decoder.read_prompts(pad_left("one", [[1]]))


def test_a_file_of_another_fixed_length_is_refused() -> None:
    specs = [TensorSpec("input_ids", "int64", ("batch", 4)), TensorSpec("past_conv.0", "float32", ("batch", 1))]
    ports = find_decoder_ports("x.onnx", specs, ["logits", "present_conv.0"])
    with pytest.raises(InputError, match="reads 4 tokens in each run"):
        CachedDecoder(lambda feeds: {}, ports).read_prompts(pad_left("one", [[1]]))
