"""The layers of an engine are read in every form that TensorRT's tools write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normdeploy.engines.engine_json import LARGEST, is_json_file
from normdeploy.engines.layer_info import parse_format, parse_layer_info, parse_metadata, read_layer_info
from normdeploy.engines.layer_kinds import LayerKind, classify_layer, names_in_layer_name, split_profile
from normdeploy.errors import InputError
from tests.engine_files import compiled_layers, info, layer, profile, save, tensor


def test_layers_of_tensorrt_10_and_11_are_read_alike(tmp_path: Path) -> None:
    ten = info(compiled_layers())
    eleven = {
        "Layers": [
            {
                **each,
                **{
                    side: [
                        {
                            "Name": t["Name"],
                            "Dimensions": t["Dimensions"],
                            "Datatype": t["Format/Datatype"],
                            "Format": "",
                        }
                        for t in each[side]
                    ]
                    for side in ("Inputs", "Outputs")
                },
            }
            for each in compiled_layers()
        ],
        "I/O Tensors": [{"Name": "x", "IOMode": "Input"}, {"Name": "y", "IOMode": "Output"}],
    }
    first = read_layer_info(save(tmp_path / "ten.json", ten))
    assert first == read_layer_info(save(tmp_path / "eleven.json", eleven))
    assert first.io_tensors == {"x", "y"}
    assert first.detailed
    assert [each.kind for each in first.layers] == [LayerKind.KERNEL] * 3
    assert first.layers[0].inputs[0].dtype == "float32"


@pytest.mark.parametrize(
    ("text", "nodes", "callers", "whole"),
    [
        ("[ONNX Layer: /a/Sqrt]", ("/a/Sqrt",), (), True),
        ("[ONNX Layer: a]\x1e[ONNX Layer: b]", ("a", "b"), (), True),
        ("[ONNX Layer: a]\x1f[ONNX Layer: b]", ("a", "b"), (), True),
        ("[ONNX Layer: a][ONNX Layer: a]", ("a",), (), True),
        ("[ONNX Layer: node_of_s | call (Norm)]", ("node_of_s",), ("call",), True),
        ("[ONNX Layer: s | inner (Norm) | outer (Block)]", ("s",), ("inner", "outer"), True),
        ("[ONNX Layer: s | Local Function: Norm]", ("s",), (), True),
        ("[ONNX Layer: a[0]]\x1f[ONNX Layer: b]", ("a[0]", "b"), (), True),
        ("[ONNX Layer: a]\x1f[ONNX La ... X Layer: b]", ("a",), (), False),
        ("[ONNX Layer: a]\x1f[ONNX Layer: lo ... ng]\x1f[ONNX Layer: c]", ("a", "c"), (), False),
        ("[ONNX Layer: a]\x1f[ONNX Layer: b", ("a",), (), False),
        ("no metadata of ours", (), (), True),
        ("", (), (), True),
    ],
)
def test_metadata_names_the_nodes(text: str, nodes: tuple[str, ...], callers: tuple[str, ...], whole: bool) -> None:
    assert parse_metadata(text) == (nodes, callers, whole)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("Row major linear FP16 format", ("float16", "Row major linear")),
        ("Row major linear FP32", ("float32", "Row major linear")),
        ("Channel major FP16 format where channel % 8 == 0", ("float16", "Channel major where channel % 8 == 0")),
        (
            "Thirty-two wide channel vectorized row major Int8 format.",
            ("int8", "Thirty-two wide channel vectorized row major"),
        ),
        ("Row major linear BFloat16 format", ("bfloat16", "Row major linear")),
        ("Half", ("float16", "")),
        ("Half(64,1:8,...)", ("float16", "")),
        ("FP8", ("float8", "")),
        ("N/A due to dynamic shapes", ("", "")),
        ("Unknown format", ("", "")),
        ("", ("", "")),
    ],
)
def test_format_is_split_into_dtype_and_layout(text: str, parsed: tuple[str, str]) -> None:
    assert parse_format(text) == parsed


@pytest.mark.parametrize(
    ("layer_type", "name", "kind"),
    [
        ("kgen", "__myl_MeanSub_myl0_1", LayerKind.KERNEL),
        ("fusion", "__myl_FcAdd", LayerKind.KERNEL),
        ("gemm", "linear_myl0_1", LayerKind.MATMUL),
        ("CaskConvolution", "conv1 + relu1", LayerKind.CONVOLUTION),
        ("PluginV3", "norm", LayerKind.PLUGIN),
        ("PluginV2DynamicExt", "norm", LayerKind.PLUGIN),
        ("PointWiseV2", "PWN(add)", LayerKind.POINTWISE),
        ("Reformat", "Reformatting CopyNode for Input Tensor 0 to conv1", LayerKind.REFORMAT),
        ("Normalization", "ln", LayerKind.NORMALIZATION),
        ("Reduce", "mean", LayerKind.REDUCTION),
        ("Constant", "c", LayerKind.NONE),
        ("Myelin", "{ForeignNode[a...b]}", LayerKind.REGION),
        ("", "{ForeignNode[a...b]}", LayerKind.REGION),
        ("", "conv1 + relu1", LayerKind.UNKNOWN),
        ("TopK", "topk", LayerKind.OTHER),
    ],
)
def test_layer_types_are_classified(layer_type: str, name: str, kind: LayerKind) -> None:
    assert classify_layer(layer_type, name) is kind


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("conv1 + bn1 + relu1", ("conv1", "bn1", "relu1")),
        ("PWN(PWN(sigmoid), mul)", ("sigmoid", "mul")),
        ("conv + PWN(relu)", ("conv", "relu")),
        ("{ForeignNode[first...last]}", ("first", "last")),
        ("linear_myl0_17", ("linear",)),
        ("Reformatting CopyNode for Output Tensor 0 to conv1", ()),
        ("(Unnamed Layer* 3) [Shuffle]", ("(Unnamed Layer* 3) [Shuffle]",)),
    ],
)
def test_layer_name_lists_joined_nodes(name: str, names: tuple[str, ...]) -> None:
    assert names_in_layer_name(name) == names


def test_profile_suffix_is_split_off() -> None:
    assert split_profile("conv1 [profile 2]") == ("conv1", 2)
    assert split_profile("conv1") == ("conv1", 0)


def test_names_without_detailed_verbosity_are_read(tmp_path: Path) -> None:
    read = read_layer_info(save(tmp_path / "names.json", info(["conv1 + bn1", "y"])))
    assert not read.detailed
    assert read.layers[0].nodes == ("conv1", "bn1")


def test_unescaped_separators_are_read(tmp_path: Path) -> None:
    """The inspector's text may have the character 1F itself, which strict JSON forbids."""
    text = '{"Layers": [{"Name": "k", "LayerType": "kgen", "Metadata": "[ONNX Layer: a]\x1f[ONNX Layer: b]"}]}'
    (tmp_path / "raw.json").write_text(text)
    assert read_layer_info(tmp_path / "raw.json").layers[0].nodes == ("a", "b")


def test_redirected_output_of_powershell_is_read(tmp_path: Path) -> None:
    (tmp_path / "utf16.json").write_bytes(json.dumps(info(["a"])).encode("utf-16"))
    assert read_layer_info(tmp_path / "utf16.json").layers[0].name == "a"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'{"Layers": [', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b"3", "contains a JSON int"),
        (b"null", "contains a JSON NoneType"),
        (b"{}", "contains an empty object"),
        (b'{"weights": 1}', "an object with the keys 'weights'"),
        (b'{"Layers": 3}', "an object with the keys 'Layers'"),
        (b'{"Layers": []}', "lists no layers"),
        (b'{"Layers": [3]}', "layer 0 has no name"),
        (b'{"Layers": [{"LayerType": "kgen"}]}', "layer 0 has no name"),
        (b'[{"latencyMs": 1}]', "the times of whole runs"),
    ],
)
def test_other_content_is_refused_with_the_command(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_layer_info(tmp_path / "bad.json")


def test_times_in_place_of_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pass it with --profile-json"):
        read_layer_info(save(tmp_path / "p.json", profile({"a": 1.0})))


def test_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(InputError, match=str(LARGEST)):
        read_layer_info(tmp_path / "huge.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"Inputs": None},
        {"Inputs": "x"},
        {"Inputs": [1, {"Name": 2}]},
        {"LayerType": 7},
        {"Metadata": ["a"]},
        {"PluginType": None},
    ],
)
def test_values_of_wrong_types_are_ignored(changes: dict[str, Any]) -> None:
    document = info([layer("k", "kgen", [tensor("x")], [tensor("y")], Metadata="[ONNX Layer: n]") | changes])
    (read,) = parse_layer_info(document, "f").layers
    assert read.name == "k"


@pytest.mark.parametrize(
    ("name", "content", "is_json"),
    [
        ("e.txt", b' {"Layers": []}', True),
        ("e.json", b"garbage", True),
        ("e.json", b"", True),
        ("m.onnx", b"\x08\x0a\x12\x07pytorch", False),
        ("m.safetensors", b'{\x01\0\0\0\0\0\0{"a": 1}', False),
        ("m.bin", b'{\x01\0\0\0\0\0\0{"a": 1}', False),
        ("model.safetensors.index.json", b'{"weight_map": {}}', False),
        ("e.txt", '{"Layers": []}'.encode("utf-16"), True),
    ],
)
def test_json_is_told_from_models(tmp_path: Path, name: str, content: bytes, is_json: bool) -> None:
    (tmp_path / name).write_bytes(content)
    assert is_json_file(tmp_path / name) is is_json
