"""Sizes of the reference of ``verify --generate``; the models of folders need transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normdeploy.inputs.input_cases import NamedInputs
from normdeploy.model import TensorSpec
from normdeploy.runtimes.cached_decoder import DecoderPorts
from normdeploy.verbs.verify.folder_generation import choose_reference_dims
from normdeploy.verbs.verify.generation_check import DecoderFile


def file_with(state: str, most_past: int | None = None) -> DecoderFile:
    ports = DecoderPorts({"input_ids": TensorSpec("input_ids", "int64", ("batch", 1))}, {f"past_{state}.0": "next"})
    return DecoderFile(Path("x.onnx"), "x.onnx", ports, most_past, "")


@pytest.mark.parametrize("state", ["recurrent", "ssm"])
def test_a_linear_attention_gets_the_length_of_the_longest_run(state: str) -> None:
    file = file_with(state)
    # Random prompts have 8 tokens, and the last of 32 tokens is not read.
    assert choose_reference_dims([file], None, 32) == ["seq=39:39:39"]
    mine = [NamedInputs(f"{n}.npz", {"input_ids": np.ones((1, n), np.int64)}) for n in (3, 12)]
    assert choose_reference_dims([file], mine, 5) == ["seq=16:16:16"]
    # The run of 39 tokens does not fit, which the check explains.
    assert choose_reference_dims([replace(file, most_past=20)], None, 32) == ["seq=21:21:21"]


def test_other_decoders_keep_a_dynamic_length() -> None:
    assert choose_reference_dims([file_with("conv")], None, 32) == []
