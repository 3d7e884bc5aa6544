"""Files that generate are compared with eager mode token by token: right files pass, planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import normdeploy
from normdeploy.errors import InputError, RuntimeUnavailable
from normdeploy.inputs.input_cases import NamedInputs
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.compute_budget import BudgetClock, processor_time
from normdeploy.verbs.verify.generation_check import check_generation
from normdeploy.verbs.verify.generation_result import Generation
from normdeploy.verbs.verify.output_results import OutputResult
from tests.decoders import (
    PAST_DIMS,
    PAST_INPUTS,
    PLACES,
    PLAIN_INPUTS,
    STATE_DIMS,
    STATE_INPUTS,
    STATIC_DIMS,
    STATIC_INPUTS,
    BlindToPadding,
    Chunked,
    Decoder,
    EagerLoop,
    ForgottenState,
    GrowingState,
    OverwrittenToken,
    PaddedState,
    RecurrentDecoder,
    RecurrentLoop,
    RestartedChunks,
    WiderWindow,
    Windowed,
    WithPast,
    WithStates,
    WithStaticCache,
    WrongOffset,
    counting_decoder,
    past_example,
    plain_example,
    state_example,
    static_example,
)

COUNT = 12
# Number of tokens of a decoder whose loop over the tokens is unrolled.
UNROLLED = 6


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return from_module(Decoder().eval(), plain_example(), inputs=PLAIN_INPUTS)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(Decoder(), tmp_path_factory.mktemp("right"))


def exported(decoder: Decoder, folder: Path) -> Path:
    path = folder / "decoder.onnx"
    normdeploy.export(WithPast(decoder).eval(), past_example(), output=path, inputs=PAST_INPUTS, dims=PAST_DIMS)
    return path


def check(model: LoadedModel, path: Path, decoder: Decoder | None = None, seeds: int = 2) -> Generation:
    return check_generation(model, EagerLoop(decoder or Decoder()), [path], count=COUNT, seeds=seeds)


def edit_weight(path: Path, target: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(change(tensor.name, array.copy()), tensor.name))
    onnx.save(proto, target)
    return target


def test_a_right_file_generates_the_tokens_of_eager_mode(model: LoadedModel, right: Path) -> None:
    result = check(model, right)
    assert result, list(result.describe_failures())
    rows = result.files[0].rows
    assert [row.equal for row in rows] == [COUNT] * 5
    assert [bool(row.padding) for row in rows] == [False, False, True, False, True]
    # The bound leaves no room for another token: the smallest margin is far above it.
    assert min(step.margin for row in rows for step in row.steps) > 10 * max(
        step.bound for row in rows for step in row.steps
    )


def test_one_changed_weight_is_found(model: LoadedModel, right: Path, tmp_path: Path) -> None:
    def change(name: str, array: np.ndarray) -> np.ndarray:
        if array.shape == (12, 16) and "embed" in name:
            array[:, 3] += 0.01
        return array

    changed = edit_weight(right, tmp_path / "changed.onnx", change)
    assert changed.read_bytes() != right.read_bytes()
    result = check(model, changed, seeds=1)
    assert not result
    assert "allowed" in next(result.describe_failures())


def test_a_wrong_position_after_the_prompt_is_found(model: LoadedModel, tmp_path: Path) -> None:
    result = check(model, exported(WrongOffset(), tmp_path), seeds=1)
    assert not result
    row = result.files[0].rows[0]
    # The prompt itself is read rightly, so the fault shows from the second token on.
    assert row.steps[0].verdict == "pass"
    assert row.first_failure is not None
    assert row.first_failure.step == 2


def test_a_mask_that_ignores_padding_is_found_in_padded_prompts_alone(model: LoadedModel, tmp_path: Path) -> None:
    result = check(model, exported(BlindToPadding(), tmp_path), seeds=1)
    assert not result
    assert [bool(row) for row in result.files[0].rows] == [not row.padding for row in result.files[0].rows]


def test_a_choice_between_nearly_equal_logits_is_a_tie(tmp_path: Path) -> None:
    decoder = Decoder().eval()
    with torch.no_grad():
        # The two tokens win always, and their rows differ by one unit in the last place.
        decoder.head.bias[[3, 7]] = 9.0
        row = decoder.head.weight[3]
        sign = torch.where(torch.arange(len(row)) % 2 == 0, torch.inf, -torch.inf)
        decoder.head.weight[7] = torch.nextafter(row, sign)
    model = from_module(decoder, plain_example(), inputs=PLAIN_INPUTS)
    right = exported(decoder, tmp_path)

    def swap(name: str, array: np.ndarray) -> np.ndarray:
        if array.shape == (12, 16) and "head" in name:
            array[[3, 7]] = array[[7, 3]]
        if array.shape == (16, 12):
            array[:, [3, 7]] = array[:, [7, 3]]
        return array

    swapped = edit_weight(right, tmp_path / "swapped.onnx", swap)
    assert swapped.read_bytes() != right.read_bytes()
    result = check(model, swapped, decoder, seeds=1)
    assert result, list(result.describe_failures())
    differing = [row for row in result.files[0].rows if row.first_difference is not None]
    assert differing
    first = differing[0].first_difference
    assert first is not None
    assert first.verdict == "tie"
    assert {first.token, first.choice} == {3, 7}
    assert 0 < first.gap <= first.bound
    assert next(result.describe_ties()).startswith("tie: swapped.onnx")


def test_a_difference_beyond_the_bound_is_named_with_its_margin(
    model: LoadedModel, right: Path, tmp_path: Path
) -> None:
    def negate_head(name: str, array: np.ndarray) -> np.ndarray:
        return -array if array.shape in {(12, 16), (16, 12)} and "head" in name else array

    result = check(model, edit_weight(right, tmp_path / "negated.onnx", negate_head), seeds=1)
    row = result.files[0].rows[0]
    first = row.first_difference
    assert first is not None
    assert first.gap > first.bound
    assert first.gap >= first.margin > 0
    assert f"token {first.step} is {first.choice}, eager's is {first.token}" in next(result.describe_failures())


def test_eager_with_a_wrong_cache_is_no_reference(model: LoadedModel, right: Path) -> None:
    result = check(model, right, WrongOffset().eval(), seeds=1)
    assert not result
    assert "eager mode with its cache is not the model without a cache" in result.reference


def biased(value: float) -> Decoder:
    """Return a decoder whose logit of token 5 is ``value``."""
    decoder = Decoder().eval()
    with torch.no_grad():
        decoder.head.bias[5] = value
    return decoder


def test_a_model_whose_logits_are_nan_judges_no_file(right: Path) -> None:
    decoder = biased(float("nan"))
    result = check(from_module(decoder, plain_example(), inputs=PLAIN_INPUTS), right, decoder, seeds=1)
    assert not result
    assert "the model's own logits in float64 contain NaN" in result.reference


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_file_with_nan_or_inf_in_place_of_an_excluded_token_fails(right: Path, tmp_path: Path, value: float) -> None:
    decoder = biased(-float("inf"))
    model = from_module(decoder, plain_example(), inputs=PLAIN_INPUTS)

    def bias(path: str, number: float) -> Path:
        def change(name: str, array: np.ndarray) -> np.ndarray:
            if array.shape == (12,) and "head" in name:
                array[5] = number
            return array

        return edit_weight(right, tmp_path / path, change)

    same = check(model, bias("same.onnx", -np.inf), decoder, seeds=1)
    assert same, list(same.describe_failures())
    assert not check(model, bias("other.onnx", value), decoder, seeds=1)


def test_the_users_prompts_are_continued(model: LoadedModel, right: Path) -> None:
    given = NamedInputs(
        "mine.npz", {"input_ids": np.array([[0, 5], [4, 2]]), "attention_mask": np.array([[0, 1], [1, 1]])}
    )
    result = check_generation(model, EagerLoop(Decoder()), [right], count=3, inputs=[given])
    assert result
    assert [row.prompt for row in result.files[0].rows] == [(5,), (4, 2)]
    beyond = NamedInputs("mine.npz", {"input_ids": np.array([[12]])})
    with pytest.raises(InputError, match="token id 12 is not among the model's 12 tokens"):
        check_generation(model, EagerLoop(Decoder()), [right], count=3, inputs=[beyond])


def test_more_tokens_than_positions_are_refused(model: LoadedModel, right: Path) -> None:
    with pytest.raises(InputError, match=r"decoder.onnx takes 41; generate at most 41"):
        check_generation(model, EagerLoop(Decoder()), [right], count=50)


def test_two_fixed_prompts_without_a_mask_have_equal_lengths(model: LoadedModel, tmp_path: Path) -> None:
    proto = counting_decoder()
    del proto.graph.input[1]
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(proto, tmp_path / "two.onnx")
    result = check_generation(model, EagerLoop(Decoder()), [tmp_path / "two.onnx"], count=2, seeds=1)
    # The file counts, so its tokens are wrong, but it runs.
    assert result.files[0].failure == ""
    assert [row.padding for row in result.files[0].rows] == [0, 0]


def test_prompts_that_a_file_can_not_read_are_an_error_of_the_call(model: LoadedModel, tmp_path: Path) -> None:
    proto = counting_decoder()
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(proto, tmp_path / "two.onnx")
    given = NamedInputs("mine.npz", {"input_ids": np.array([[1, 7]])})
    with pytest.raises(InputError, match=r"two.onnx, mine.npz: the file reads 2 prompts at once, but 1 were passed"):
        check_generation(model, EagerLoop(Decoder()), [tmp_path / "two.onnx"], count=2, inputs=[given])


def test_a_runtime_without_a_kernel_is_not_run(
    model: LoadedModel, right: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise RuntimeUnavailable("no kernel of Gemm for bfloat16")

    monkeypatch.setattr("normdeploy.verbs.verify.generation_check.OrtRunner", refuse)
    result = check(model, right, seeds=1)
    assert not result
    assert not result.is_wrong
    assert not list(result.describe_failures())
    assert "no kernel of Gemm" in next(result.describe_unrun())
    # The outputs pass, so the command's exit code is 3: nothing is wrong, but the tokens were not compared.
    row = OutputResult("y", "onnxruntime", "float32", 1e-7, 1e-5, 4e-7, "pass", "seed 0", file="decoder.onnx")
    comparison = Comparison((row,), (), ("seed 0",), generation=result)
    assert comparison.outcome == "not run"
    assert "no kernel of Gemm" in str(comparison.unrun[0])


def test_a_failure_with_too_few_roundings_says_that_it_may_pass(
    model: LoadedModel, right: Path, tmp_path: Path
) -> None:
    def change(name: str, array: np.ndarray) -> np.ndarray:
        return array + np.float32(1e-3) if array.shape == (12, 16) else array

    wrong = edit_weight(right, tmp_path / "wrong.onnx", change)
    late = BudgetClock(0.0, begun=processor_time() - 1)
    result = check_generation(model, EagerLoop(Decoder()), [wrong], count=2, seeds=1, clock=late)
    assert "may pass with a larger --max-seconds" in next(result.describe_failures())
    result = check_generation(model, EagerLoop(Decoder()), [wrong], count=2, seeds=1)
    assert "--max-seconds" not in next(result.describe_failures())


def test_a_negative_token_id_is_named(model: LoadedModel, tmp_path: Path) -> None:
    onnx.save(counting_decoder(), tmp_path / "counting.onnx")
    given = NamedInputs("mine.npz", {"input_ids": np.array([[-1, 7]])})
    with pytest.raises(InputError, match="token id -1 is not among"):
        check_generation(model, EagerLoop(Decoder()), [tmp_path / "counting.onnx"], count=2, inputs=[given])


@pytest.fixture(scope="module")
def recurrent_model() -> LoadedModel:
    # Like a linear attention of transformers, the loop over the tokens needs a fixed length. Rows are padded to it.
    length = 16
    example = torch.ones(2, length, dtype=torch.int64)
    inputs = (f"input_ids:int64[batch,{length}]{{0:12}}", f"attention_mask:int64[batch,{length}]")
    return from_module(RecurrentDecoder().eval(), (example, example), inputs=inputs)


def check_states(model: LoadedModel, network: WithStates, folder: Path) -> Generation:
    path = folder / "states.onnx"
    normdeploy.export(network.eval(), state_example(), output=path, inputs=STATE_INPUTS, dims=STATE_DIMS)
    return check_generation(model, RecurrentLoop(RecurrentDecoder()), [path], count=UNROLLED, seeds=1)


def test_a_linear_attention_that_reads_single_tokens_generates_the_tokens_of_eager_mode(
    recurrent_model: LoadedModel, tmp_path: Path
) -> None:
    result = check_states(recurrent_model, WithStates(RecurrentDecoder()), tmp_path)
    assert result, list(result.describe_failures())
    rows = result.files[0].rows
    assert [(row.equal, bool(row.padding)) for row in rows] == [(UNROLLED, False), (UNROLLED, False), (UNROLLED, True)]
    assert len({step.token for row in rows for step in row.steps}) > 1


@pytest.mark.parametrize(
    ("network", "right_without_padding"),
    [
        (WithStates(GrowingState()), False),
        (ForgottenState(RecurrentDecoder()), False),
        (WithStates(PaddedState()), True),
    ],
    ids=["wrong sign of the decay", "state not passed on", "padding read into the states"],
)
def test_a_fault_in_the_state_of_a_linear_attention_is_found(
    recurrent_model: LoadedModel, tmp_path: Path, network: WithStates, right_without_padding: bool
) -> None:
    result = check_states(recurrent_model, network, tmp_path)
    assert not result
    rows = result.files[0].rows
    assert [bool(row) for row in rows] == [right_without_padding, right_without_padding, False]


@pytest.mark.parametrize(
    ("decoder", "fault"), [(Windowed, WiderWindow), (Chunked, RestartedChunks)], ids=["window", "chunks"]
)
def test_prompt_longer_than_the_window_passes_and_another_window_fails(
    decoder: type[Decoder], fault: type[Decoder], tmp_path: Path
) -> None:
    whole = from_module(decoder().eval(), plain_example(), inputs=PLAIN_INPUTS)
    result = check(whole, exported(decoder(), tmp_path), decoder(), seeds=1)
    # Prompts of 8 tokens are longer than windows and chunks. One of three rows is padded on the left.
    assert result, result.describe_failures()
    assert all(row.equal == COUNT for file in result.files for row in file.rows)
    assert not check(whole, exported(fault(), tmp_path), decoder(), seeds=1)


def exported_static(module: WithStaticCache, folder: Path) -> Path:
    path = folder / "static.onnx"
    normdeploy.export(module.eval(), static_example(), output=path, inputs=STATIC_INPUTS, dims=STATIC_DIMS)
    return path


def test_file_with_a_static_cache_generates_the_same_tokens(model: LoadedModel, tmp_path: Path) -> None:
    path = exported_static(WithStaticCache(Decoder()), tmp_path)
    result = check(model, path, seeds=1)
    assert result, result.describe_failures()
    assert all(row.equal == COUNT for file in result.files for row in file.rows)
    # The cache grows in a file, and the tokens are the same.
    growing = normdeploy.run(exported(Decoder(), tmp_path), generate=COUNT, prompt_ids=[[3, 4, 5], [9]])
    static = normdeploy.run(path, generate=COUNT, prompt_ids=[[3, 4, 5], [9]])
    np.testing.assert_array_equal(static.arrays["tokens"], growing.arrays["tokens"])
    # The last token is not read, so it needs no place.
    assert normdeploy.run(path, generate=PLACES, prompt_ids=[[1]]).arrays["tokens"].shape == (1, PLACES)
    with pytest.raises(
        InputError, match=f"{PLACES + 1} tokens are read, but the static cache of the file has {PLACES}"
    ):
        normdeploy.run(path, generate=PLACES + 1, prompt_ids=[[1]])
    with pytest.raises(InputError, match=f"are read as 40 positions, but static.onnx takes {PLACES}; .*cache=41:41:41"):
        check_generation(model, EagerLoop(Decoder()), [path], count=40)


def test_static_cache_that_overwrites_a_token_fails(model: LoadedModel, tmp_path: Path) -> None:
    assert not check(model, exported_static(OverwrittenToken(Decoder()), tmp_path), seeds=1)
