"""A parsed network is of the types that its file states, by TensorRT-RTX's own parser; one that is not, or not at all
half, is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from normdeploy.errors import BuildError
from normdeploy.precision import half_conversion
from normdeploy.runtimes.network_types import check_network_types
from normdeploy.verbs.build.build_function import build

BODY = "h = MatMul(x, w) n = LayerNormalization<axis = -1>(h, g) s = Add(x, n) y = Softmax<axis = -1>(s)"


@pytest.fixture
def half(request: pytest.FixtureRequest) -> onnx.ModelProto:
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[batch,8] x) => (float[batch,8] y)'
    proto = onnx.parser.parse_model(f"{head} {{ {BODY} }}")
    proto.graph.initializer.extend(
        [
            numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"),
            numpy_helper.from_array(np.ones(8, np.float32), "g"),
        ]
    )
    return half_conversion.convert_to_half(
        proto, getattr(request, "param", "fp16"), [{"x": np.ones((2, 8), np.float32)}]
    )[0]


@pytest.mark.parametrize("half", ["fp16", "bf16"], indirect=True)
def test_an_engine_of_a_half_file_has_its_types(half: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(half, tmp_path / "m.onnx")
    engine = build(tmp_path / "m.onnx", tmp_path / "m.engine", profiles=["batch=1:2:4"], compute_capabilities=["8.9"])
    kind = {"fp16": "float16", "bf16": "bfloat16"}[half_conversion.recorded_precision(half)]
    assert engine.types[kind] >= 3
    assert engine.types["float32"] >= 2


def test_a_float32_file_has_nothing_to_check(half: onnx.ModelProto, tmp_path: Path) -> None:
    assert half_conversion.builder_request(half)["precision"] == "fp16"
    del half.metadata_props[:]
    assert half_conversion.builder_request(half) == {}


def test_a_float32_file_that_is_said_to_be_half_builds_no_engine(tmp_path: Path) -> None:
    """As another tool would leave it that changes types back."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2,8] x) => (float[2,8] y) { y = Relu(x) }'
    )
    proto.metadata_props.add(key=half_conversion.PROPERTY, value='{"to": "fp16"}')
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(BuildError, match=re.escape("no layer computes in float16: {'float32': 1}")):
        build(tmp_path / "m.onnx", tmp_path / "m.engine")
    assert not (tmp_path / "m.engine").exists()


class Network:
    """A network of one layer, as TensorRT's Python classes show it."""

    def __init__(self, kinds: dict[str, str], strong: bool = True) -> None:
        self._tensors = {
            name: SimpleNamespace(name=name, dtype=SimpleNamespace(name=kind)) for name, kind in kinds.items()
        }
        self._strong = strong
        self.num_inputs = self.num_outputs = self.num_layers = 1

    def get_input(self, i: int) -> Any:
        return self._tensors["x"]

    def get_output(self, i: int) -> Any:
        return self._tensors["y"]

    def get_layer(self, i: int) -> Any:
        return SimpleNamespace(
            name="mul",
            type=SimpleNamespace(name="MATRIX_MULTIPLY"),
            num_outputs=1,
            get_output=lambda k: self._tensors["h"],
        )

    def get_flag(self, flag: object) -> bool:
        return self._strong


OLD = SimpleNamespace(
    BuilderFlag=SimpleNamespace(FP16=1), NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1)
)
NEW = SimpleNamespace(BuilderFlag=SimpleNamespace())
STATED = {"x": "float16", "h": "float16", "y": "float16", "elsewhere": "float32"}


@pytest.mark.parametrize(
    ("trt", "kinds", "strong", "wrong"),
    [
        (NEW, ("HALF", "HALF", "HALF"), True, ()),
        (OLD, ("HALF", "HALF", "HALF"), True, ()),
        (OLD, ("HALF", "HALF", "HALF"), False, ("the network is not strongly typed",)),
        (NEW, ("FLOAT", "HALF", "HALF"), True, ("input 'x' is float32, but the file says float16",)),
        (NEW, ("HALF", "HALF", "FLOAT"), True, ("output 'y' is float32, but the file says float16",)),
        (
            NEW,
            ("HALF", "BF16", "HALF"),
            True,
            ("layer 'mul': 'h' is bfloat16, but the file says float16", "no layer computes in float16"),
        ),
        (
            NEW,
            ("HALF", "FLOAT", "HALF"),
            True,
            ("layer 'mul': 'h' is float32, but the file says float16", "no layer computes in float16"),
        ),
    ],
)
def test_what_differs_is_named(trt: Any, kinds: tuple[str, ...], strong: bool, wrong: tuple[str, ...]) -> None:
    found = check_network_types(trt, Network(dict(zip("xhy", kinds, strict=True)), strong), "fp16", STATED)
    assert bool(found) == (not wrong)
    assert len(found.wrong) == len(wrong)
    assert all(w in said for w, said in zip(wrong, found.wrong, strict=True))
