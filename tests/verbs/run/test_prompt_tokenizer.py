"""Real tokenizers of three kinds: prompts as text, the end of a text, and the text of the answer."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import normdeploy
from normdeploy.errors import InputError, RuntimeUnavailable
from normdeploy.model import Dim, InputSpec, ModelSignature
from normdeploy.runtimes.cached_decoder import TextEnd
from normdeploy.storage.export_record import TOKENIZER_FLAG, write_record
from normdeploy.storage.tokenizer_files import hash_vocabulary
from normdeploy.verbs.run.prompt_tokenizer import PromptTokenizer
from tests.decoders import VOCABULARY, counting_decoder

PAD, BOS, EOS = range(3)
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


def unigram() -> Tokenizer:
    """Return a tokenizer as SentencePiece trains it, where the pieces of words begin with their space."""
    pieces = [("<pad>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *[(f"▁{word}", -1.0) for word in WORDS]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece() -> Tokenizer:
    vocabulary = {text: place for place, text in enumerate(("<pad>", "<s>", "</s>", *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def bpe() -> Tokenizer:
    """Return a tokenizer of bytes, where a space is the letter Ġ. Each piece is merged from two known pieces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<s>", "</s>"]
    merges = []
    for word in WORDS:
        pieces.append(f"Ġ{word}")
        merges += [(f"Ġ{word[:end]}", word[end]) for end in range(1, len(word))]
        merges.append(("Ġ", word[0]))
    merges.sort(key=lambda pair: len(pair[0]))
    merged = [first + second for first, second in merges]
    vocabulary = {text: place for place, text in enumerate(dict.fromkeys([*pieces, *letters, *merged]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(params=[unigram, wordpiece, bpe])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A decoder that counts, and a tokenizer beside it that begins each prompt with <s>."""
    tokenizer = request.param()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    onnx.save(counting_decoder(), tmp_path / "model.onnx")
    if importlib.util.find_spec("transformers") is None:
        _stand_in_for_transformers(monkeypatch)
    return tmp_path


def _stand_in_for_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    class AutoTokenizer:
        def __init__(self, folder: str) -> None:
            self._tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
            self.pad_token_id = self._tokenizer.token_to_id("<pad>")
            self.eos_token_id = self._tokenizer.token_to_id("</s>")
            settings = json.loads(Path(folder, "tokenizer_config.json").read_text())
            self.chat_template = settings.get("chat_template")

        @classmethod
        def from_pretrained(cls, folder: str, *, local_files_only: bool, trust_remote_code: bool) -> AutoTokenizer:
            assert local_files_only
            assert not trust_remote_code
            return cls(folder)

        def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, Any]:
            return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

        def apply_chat_template(
            self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
        ) -> str:
            assert add_generation_prompt
            assert not tokenize
            if "raise_exception" in self.chat_template:
                raise ValueError("no such role")
            return f"{messages[0]['content']} eight"

        def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    fake = types.ModuleType("transformers")
    fake.__spec__ = importlib.machinery.ModuleSpec("transformers", None)
    fake.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)


def test_a_folder_continues_texts_of_different_lengths(folder: Path) -> None:
    done = normdeploy.run(folder, generate=2, prompts=["one two", "four"])
    # The counting decoder continues the last word of each row: "two" is token 4, and "four" is token 6.
    assert done.arrays["tokens"].tolist() == [[5, 6], [7, 8]]
    assert done.texts == (" three four", " five six")
    # The first token of each prompt is <s>, and the shorter row is padded on the left.
    assert done.inputs["input_ids"] == "int64[2, 3]"


def test_a_token_that_ends_a_text_ends_its_row(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 9]}))
    done = normdeploy.run(folder, generate=5, prompts=["five", "three"])
    # "seven" is token 9.
    np.testing.assert_array_equal(done.arrays["tokens"], [[8, 9, PAD, PAD], [6, 7, 8, 9]])
    assert done.to_json()["tokens"] == [[8, 9], [6, 7, 8, 9]]
    assert "prompt 1: 8,9\n" in str(done)
    assert done.texts == (" six seven", " four five six seven")


def test_the_tokenizer_names_the_end_if_no_config_does(folder: Path) -> None:
    assert PromptTokenizer(folder).read_text_end() == TextEnd(frozenset({EOS}), PAD)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert PromptTokenizer(folder).read_text_end() == TextEnd(frozenset({7}), PAD)


def test_without_a_tokenizer_nothing_ends_a_row(folder: Path) -> None:
    done = normdeploy.run(folder, generate=VOCABULARY + 1, prompt_ids=[[3]])
    assert EOS in done.arrays["tokens"][0, :-2]
    ended = normdeploy.run(folder, generate=VOCABULARY + 1, prompt_ids=[[3]], tokenizer=folder)
    assert ended.arrays["tokens"][0, -1] == EOS


def record_export(file: Path, flags: dict[str, Any], positions: int = 64) -> None:
    """Write the record of an export with ``positions`` positions into a file."""
    proto = onnx.load(file)
    half = positions // 2
    parts = (Dim("past", 0, half, half), Dim("seq", 1, half, half))
    total = Dim("past + seq", 1, positions, positions, terms=parts)
    inputs = (InputSpec("attention_mask", "int64", (Dim("batch", 1, 8, 64), total)),)
    write_record(proto, ModelSignature(inputs=inputs, outputs=("logits",), kind="huggingface"), flags)
    onnx.save(proto, file)


def _set_template(folder: Path, template: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def test_chat_puts_the_prompt_into_the_template(folder: Path) -> None:
    _set_template(folder, "{{ messages[0].content }}{% if add_generation_prompt %} eight{% endif %}")
    done = normdeploy.run(folder, generate=1, prompts="one", chat=True)
    # The template has no <s>, and none is added. "eight" is token 10.
    assert done.inputs["input_ids"] == "int64[1, 2]"
    assert done.arrays["tokens"].tolist() == [[11]]


def test_chat_without_a_template_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="has no chat template, which --chat needs"):
        normdeploy.run(folder, generate=1, prompts="one", chat=True)


def test_chat_with_a_failing_template_is_refused(folder: Path) -> None:
    _set_template(folder, "{{ raise_exception('no such role') }}")
    with pytest.raises(InputError, match=r"the chat template in .* fails: .*no such role"):
        normdeploy.run(folder, generate=1, prompts="one", chat=True)


def test_prompt_without_tokens_is_refused(folder: Path) -> None:
    # With <s>, an empty text has one token, as in transformers.
    assert normdeploy.run(folder, generate=1, prompts="").inputs["input_ids"] == "int64[1, 1]"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence([])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(InputError, match="the prompt '' has no tokens"):
        normdeploy.run(folder, generate=1, prompts="")


def test_tokenizer_without_padding_pads_with_a_token_that_ends_a_text(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    done = normdeploy.run(folder, generate=2, prompts=["one two", "four"])
    assert done.texts == (" three four", " five six")


def test_tokenizer_of_another_model_is_noted(folder: Path) -> None:
    record_export(folder / "model.onnx", {TOKENIZER_FLAG: hash_vocabulary(folder)})
    assert normdeploy.run(folder, generate=1, prompts="one").notes == ()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["nine"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (note,) = normdeploy.run(folder, generate=1, prompts="one").notes
    assert "is not that of the exported folder" in note


def test_more_tokens_than_positions_are_refused(folder: Path) -> None:
    record_export(folder / "model.onnx", {}, positions=6)
    # <s> and "one" are read, and so are four of the five generated tokens.
    assert normdeploy.run(folder, generate=5, prompts="one").arrays["tokens"].shape == (1, 5)
    with pytest.raises(InputError, match=r"6 tokens after 2 .* read as 7 positions, but model.onnx takes 6; .* most 5"):
        normdeploy.run(folder, generate=6, prompts="one")
    with pytest.raises(InputError, match=r"the token id 12 of a prompt is not among the 12 tokens of"):
        normdeploy.run(folder, generate=1, prompt_ids=[[VOCABULARY]])


def test_wrong_end_of_a_text_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(InputError, match="sets eos_token_id to '</s>', which is not a token id"):
        normdeploy.run(folder, generate=2, prompts=["one"])


@pytest.mark.parametrize("missing", ["transformers", "tokenizers"])
def test_missing_library_is_named(missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(RuntimeUnavailable, match=f"the tokenizer needs {missing}, which is not installed"):
        PromptTokenizer(folder)


def test_broken_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"the tokenizer in .* can't be loaded"):
        PromptTokenizer(folder)


def test_folder_with_no_or_several_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no ONNX file"):
        normdeploy.run(tmp_path, generate=1)
    for name in ("a.onnx", "b.onnx"):
        onnx.save(counting_decoder(), tmp_path / name)
    with pytest.raises(InputError, match=r"has 2 ONNX files \(a.onnx, b.onnx\): pass one of them"):
        normdeploy.run(tmp_path, generate=1)


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    """A Llama with random weights generates the same tokens as with transformers' own ``generate``."""
    pytest.importorskip("transformers.generation")
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    )
    model = LlamaForCausalLM(config).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
    prompts = ["one two three", "four"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    feeds = {name: batch[name] for name in ("input_ids", "attention_mask")}
    width = batch["input_ids"].shape[1]
    free = model.generate(**feeds, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, width:]
    # The third token ends the first text.
    model.generation_config.eos_token_id = int(free[2])
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    wanted = model.generate(**feeds, max_new_tokens=8, do_sample=False)[:, width:]
    normdeploy.export(folder, task="text-generation-with-past", output=folder / "model.onnx")
    done = normdeploy.run(folder, generate=8, prompts=prompts)
    np.testing.assert_array_equal(done.arrays["tokens"], wanted)
    assert done.lengths[0] == 1 + free.tolist().index(int(free[2]))


def test_exported_tokenizer_gives_the_text_of_transformers(tmp_path: Path) -> None:
    """A tokenizer that is trained on a text of the repository goes from the model's folder to the file's folder."""
    pytest.importorskip("transformers.generation")
    import torch
    from tokenizers import trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = Path(__file__).read_text().splitlines()
    settings: dict[str, Any] = {"vocab_size": 400, "special_tokens": ["<end>"], "initial_alphabet": alphabet}
    trained.train_from_iterator(lines, trainers.BpeTrainer(show_progress=False, **settings))
    # No token for padding.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "eos_token_id": 0},
        **{"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": None},
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    normdeploy.export(tmp_path / "model", task="text-generation-with-past", output=tmp_path / "out" / "model.onnx")
    prompts = ["def test_the_model", "assert"]
    done = normdeploy.run(tmp_path / "out" / "model.onnx", generate=12, prompts=prompts)
    assert done.notes == ()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    feeds = {name: batch[name] for name in ("input_ids", "attention_mask")}
    wanted = model.generate(**feeds, max_new_tokens=12, do_sample=False)[:, batch["input_ids"].shape[1] :]
    assert done.texts == tuple(tokenizer.decode(row, skip_special_tokens=True) for row in wanted)
