"""ONNX models in memory, of each class that libraries use, become protobufs and back, with all of their weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch

from normdeploy.errors import GraphError
from normdeploy.storage import memory_models, onnx_files
from normdeploy.storage.memory_models import convert_like, is_memory_model, to_model_proto
from normdeploy.storage.onnx_files import load_onnx

# Larger than the size up to which ``load_small_weights`` reads external weights.
W = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


@pytest.fixture
def proto() -> onnx.ModelProto:
    """y = x · w, with a Constant node, so that tensors of initializers and of attributes are both there."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n,64] x) => (float[n,64] y)'
        " { c = Constant <value = float[1] {2.5}> () h = MatMul (x, w) y = Mul (h, c) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, "w"))
    return model


@pytest.fixture
def program() -> torch.onnx.ONNXProgram:
    torch.manual_seed(0)
    made = torch.onnx.export(torch.nn.Linear(64, 64).eval(), (torch.randn(2, 64),), dynamo=True, verbose=False)
    assert made is not None
    return made


def external(proto: onnx.ModelProto, folder: Path) -> Path:
    """The model as a file whose weights are in a second file."""
    path = folder / "model.onnx"
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    copy.graph.node[0].attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array([2.5], np.float32), "c"))
    onnx.save(copy, path, save_as_external_data=True, location="weights.bin", size_threshold=0, convert_attribute=True)
    return path


def weight(proto: onnx.ModelProto, name: str = "w") -> np.ndarray:
    (found,) = [t for t in proto.graph.initializer if t.name == name]
    return onnx.numpy_helper.to_array(found)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_become_the_proto_and_bytes_again(proto: onnx.ModelProto, kind: type) -> None:
    given = kind(proto.SerializeToString())
    assert is_memory_model(given)
    assert to_model_proto(given) == proto
    assert convert_like(proto, given) == proto.SerializeToString()


def test_proto_is_itself(proto: onnx.ModelProto) -> None:
    assert to_model_proto(proto) is proto
    assert convert_like(proto, proto) is proto


def test_ir_model_is_unchanged_and_comes_back_as_ir_model(proto: onnx.ModelProto) -> None:
    model = onnx_ir.from_proto(proto)
    before = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    made = to_model_proto(model)
    assert np.array_equal(weight(made), W)
    assert [n.op_type for n in made.graph.node] == ["Constant", "MatMul", "Mul"]
    assert onnx_ir.to_proto(model).SerializeToString(deterministic=True) == before
    back = convert_like(made, model)
    assert isinstance(back, onnx_ir.Model)
    assert np.array_equal(back.graph.initializers["w"].const_value.numpy(), W)


def test_program_comes_back_as_program_with_its_exported_program(program: torch.onnx.ONNXProgram) -> None:
    made = to_model_proto(program)
    assert made == program.model_proto
    back = convert_like(made, program)
    assert type(back) is type(program)
    assert back.exported_program is program.exported_program
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(back(x)[0], program(x)[0])


def test_paths_and_modules_are_no_models_in_memory(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        """A class with the name of onnx_ir's."""

    assert not any(map(is_memory_model, ("m.onnx", tmp_path, Model(), None, W)))


def test_external_weights_of_ir_model_are_read_from_its_folder(
    proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = external(proto, tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = onnx_ir.load(path)
    assert isinstance(model.graph.initializers["w"].const_value, onnx_ir.ExternalTensor)
    made = to_model_proto(model)
    assert list(made.graph.initializer) == list(load_onnx(path).graph.initializer)
    assert onnx.numpy_helper.to_array(made.graph.node[0].attribute[0].t) == [2.5]
    assert isinstance(model.graph.initializers["w"].const_value, onnx_ir.ExternalTensor)


def test_external_weights_of_two_folders_are_read_each_from_its_own(proto: onnx.ModelProto, tmp_path: Path) -> None:
    model = onnx_ir.load(external(proto, tmp_path))
    (tmp_path / "b").mkdir()
    other = onnx_ir.load(external(proto, tmp_path / "b"))
    (tmp_path / "b" / "weights.bin").write_bytes(bytes(W.nbytes + 8192))
    tensor = other.graph.initializers["w"].const_value
    tensor.name = "zeros"
    model.graph.register_initializer(onnx_ir.Value(name="zeros", const_value=tensor))
    made = to_model_proto(model)
    assert np.array_equal(weight(made), W)
    assert not weight(made, "zeros").any()


def test_external_weight_outside_of_the_folder_is_refused(proto: onnx.ModelProto, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    path = external(proto, tmp_path)
    model = onnx_ir.load(path)
    tensor = model.graph.initializers["w"].const_value
    model.graph.initializers["w"].const_value = onnx_ir.ExternalTensor(
        "../weights.bin", 0, W.nbytes, tensor.dtype, shape=tensor.shape, name="w", base_dir=tmp_path / "inner"
    )
    with pytest.raises(GraphError, match="outside the model's folder"):
        to_model_proto(model)


def test_truncated_external_weight_is_refused(proto: onnx.ModelProto, tmp_path: Path) -> None:
    model = onnx_ir.load(external(proto, tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"short")
    with pytest.raises(GraphError, match="truncated or is another file"):
        to_model_proto(model)


def test_weights_that_were_not_loaded_are_refused_with_what_to_do(proto: onnx.ModelProto, tmp_path: Path) -> None:
    path = external(proto, tmp_path)
    with pytest.raises(GraphError, match=r"'w' is in an external file and was not loaded; load the model"):
        to_model_proto(onnx.load(path, load_external_data=False))
    with pytest.raises(GraphError, match=r"'w' of the model is in external data.*pass the path"):
        to_model_proto(path.read_bytes())


def test_weight_without_value_is_refused(proto: onnx.ModelProto) -> None:
    model = onnx_ir.from_proto(proto)
    model.graph.initializers["w"].const_value = None
    with pytest.raises(GraphError, match=r"the weight 'w' of the onnx_ir\.Model has no value"):
        to_model_proto(model)


def test_program_with_fake_weights_is_refused_with_torchs_reason() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        net, x = torch.nn.Linear(64, 64).eval(), torch.randn(2, 64)
        made = torch.onnx.export(net, (x,), dynamo=True, optimize=False, verbose=False)
    with pytest.raises(GraphError, match=r"onnx_ir can't serialize the model: .*FakeTensor"):
        to_model_proto(made)


@pytest.mark.parametrize("content", [b"", b"\x08", b"model.onnx", b"version https://git-lfs.github.com/spec/v1\n"])
def test_bytes_that_are_no_model_are_refused(content: bytes) -> None:
    with pytest.raises(GraphError, match=r"is not an ONNX file|Git LFS pointer"):
        to_model_proto(content)


def test_bytes_that_break_the_specification_are_refused(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].input[1] = "nothing"
    with pytest.raises(GraphError, match="the model violates the ONNX specification"):
        to_model_proto(proto.SerializeToString())


def test_empty_proto_is_refused() -> None:
    with pytest.raises(GraphError, match="no graph or no opset"):
        to_model_proto(onnx.ModelProto())


def test_models_beyond_the_size_of_bytes_are_refused_with_both_sizes(
    proto: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = proto.SerializeToString()
    for module in (memory_models, onnx_files):
        monkeypatch.setattr(module, "PROTOBUF_LIMIT", len(content) - 1)
    with pytest.raises(GraphError, match=rf"has {len(content)} bytes.* at most {len(content) - 1}; write it to a file"):
        to_model_proto(content)
    with pytest.raises(GraphError, match=rf"has {len(content)} bytes.* at most {len(content) - 1}; pass output="):
        convert_like(proto, content)
