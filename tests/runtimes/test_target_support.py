"""The table of published op lists is complete, and the readers of the lists read what they should."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

from benchmarks import target_support as writer
from normdeploy.runtimes.target_support import describe_sources, find_target, load_sources, load_targets


def test_each_target_has_every_norm_or_says_that_no_list_was_read() -> None:
    for target in load_targets().values():
        assert target.unknown or set(writer.NORMS) <= set(target.ops), target.name


def test_each_row_names_source_and_reason() -> None:
    for target in load_targets().values():
        for op, row in target.ops.items():
            assert row.sources, (target.name, op)
            assert describe_sources(row)
            assert row.support == "yes" or row.why, (target.name, op)


def test_bounds_of_opsets_name_their_source() -> None:
    for target in load_targets().values():
        assert target.opsets == (None, None) or target.unknown or describe_sources(target), target.name


def test_opset_of_newest_tensorrt_has_release_notes_as_source() -> None:
    assert find_target("tensorrt-11.5").opsets == (9, 25)
    assert "release notes of repository onnx/onnx-tensorrt 11.5" in describe_sources(find_target("tensorrt-11.5"))
    assert "onnx/onnx-tensorrt 11.1" in describe_sources(find_target("tensorrt-11.4"))


def test_sources_have_version_and_date() -> None:
    assert all(source["version"] and source["read"] for source in load_sources().values())


def test_required_targets_are_listed() -> None:
    names = {"coreml-mlprogram", "coreml-neuralnetwork", "qnn", "directml", "webgpu", "nnapi", "xnnpack"}
    names |= {f"tensorrt-{release}" for release in writer.TENSORRT} | {"jetpack-6", "jetpack-7", "triton-26.07"}
    assert names <= set(load_targets())


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("nnapi", {"RMSNormalization", "LayerNormalization", "GroupNormalization"}),
        ("tensorrt-10.9", {"RMSNormalization"}),
        ("jetpack-6", {"RMSNormalization", "GroupNormalization"}),
    ],
)
def test_ops_that_optimize_must_not_write(name: str, ops: set[str]) -> None:
    assert ops <= find_target(name).avoided_ops()


@pytest.mark.parametrize("name", ["xnnpack", "coreml-neuralnetwork", "jetpack-7", "triton-26.07"])
def test_nothing_is_avoided_if_composed_norm_does_not_run_either(name: str) -> None:
    assert not find_target(name).avoided_ops()


def test_installed_list_agrees_with_table() -> None:
    """A release of onnxruntime with another list makes this fail: run ``python -m benchmarks.target_support``."""
    folder = Path(onnxruntime.__file__).parent / "tools" / "mobile_helpers"
    listed = writer.read_mobile_list((folder / "nnapi_supported_ops.md").read_text())
    ops = find_target("nnapi").ops
    assert {op for op in ops if ops[op].support == "yes"} == listed.keys() & ops.keys()


def test_readers_of_lists() -> None:
    assert set(writer.read_builders('CreateSimpleOpBuilder("Add", *this);')) == {"Add"}
    kernels = "class X(a, 1, Softmax);\nRegisterKernels() { KERNEL_CREATE_INFO_VERSIONED(11, 12, MaxPool, kD), }"
    assert set(writer.read_kernel_table(kernels)) == {"MaxPool"}
    assert set(writer.read_mobile_list("|ai.onnx:Add||\n|ai.onnx.ReduceSum||\n")) == {"Add", "ReduceSum"}
    web = writer.read_web_table(
        "| BatchNormalization | ai.onnx(7-8,9-13,14+) |  |\n| GroupNorm | com.microsoft(1+) | |"
    )
    assert web["BatchNormalization"]["opsets"] == [7, None]
    assert "com.microsoft.GroupNorm" in web
    table = "| RMSNormalization | Y | FP32, FP16, BF16 |\n| DFT | N |\n"
    assert writer.read_tensorrt_table(table) == {
        "RMSNormalization": {"support": "yes", "dtypes": ["float32", "float16", "bfloat16"]}
    }
    assert writer.read_newest_opset("in the inclusive range of opset 9 to opset 24.") == 24


def test_reader_of_directml_takes_section_and_oldest_opset() -> None:
    text = """## Operators implemented by CPUExecutionProvider
|Add|*in* A:**T**|14+|**T** = tensor(float)|
## Operators implemented by DmlExecutionProvider
|**Operator Domain:** *ai.onnx*||||
|LayerNormalization|*in* X:**T**|17+|**T** = tensor(float), tensor(float16)<br/> **U** = tensor(float)|
|||1+|**T** = tensor(float), tensor(float16)|
|**Operator Domain:** *com.microsoft*||||
|GroupNorm|*in* X:**T**|1+|**M** = tensor(float)<br/> **T** = tensor(float), tensor(float16)|
"""
    rows = writer.read_directml(text)
    assert set(rows) == {"LayerNormalization", "com.microsoft.GroupNorm"}
    assert rows["LayerNormalization"] == {"support": "yes", "opsets": [1, None], "dtypes": ["float32", "float16"]}
