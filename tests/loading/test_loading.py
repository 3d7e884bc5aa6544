"""Loading from each kind of file and from live modules: the same numbers as eager, and errors that say what to do."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normdeploy.errors import InputError, LoadError, RuntimeUnavailable, TrustError
from normdeploy.loading import from_module, load

INPUTS = ["x[batch,3]"]


def _same(model: Any, module: nn.Module, *shape: int) -> None:
    x = torch.randn(shape or (7, 3))
    torch.testing.assert_close(model.program.module()(x), module(x), rtol=0, atol=0)


def test_factory_arguments(net: Any) -> None:
    where = net.where.replace(":Net", ":make")
    module = type(net)(width=6, bias=False).eval()
    torch.save(module.state_dict(), "w.pt")
    model = load("w.pt", model=where, model_args={"width": 6, "bias": False}, inputs=INPUTS)
    _same(model, module)
    assert model.recorded == {"model": where, "model_args": {"width": 6, "bias": False}, "inputs": INPUTS}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, r"only weights \(9 tensors: encoder\.0\.weight.*--model package\.module:factory"),
        ("nets", "package.module:factory"),
        ("{package}.missing:Net", r"missing can't be imported.*module not found: .*missing; check the name"),
        ("{package}.nets:Other", r"has no 'Other'; it has Net, make, fail, nothing"),
        ("{package}.nets:fail", "failed: ValueError: on purpose"),
        ("{package}.nets:nothing", r"returned a dict of 0, not a torch\.nn\.Module"),
        ("{package}.nets:make.inner", r"has no 'make\.inner'"),
    ],
)
def test_factories_that_can_not_be_used(net: Any, model: str | None, message: str) -> None:
    torch.save(net.state_dict(), "w.pt")
    package = net.where.partition(".")[0]
    with pytest.raises((InputError, LoadError), match=message):
        load("w.pt", model=model.format(package=package) if model else None, inputs=INPUTS)


def test_whole_module_and_checkpoint_of_modules(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = net.where.partition(":")[0]
    with monkeypatch.context() as importable:
        importable.syspath_prepend(str(Path.cwd()))
        module = importlib.import_module(name).Net().eval()
        module.load_state_dict(net.state_dict())
        torch.save(module, "m.pt")
        torch.save({"model": module, "epoch": 1}, "c.pt")
    del sys.modules[name]
    for path in ("m.pt", "c.pt"):
        model = load(path, trust=True, inputs=INPUTS)  # its class is found again in the working directory
        _same(model, net)
        assert model.kind == "pickled module"
    with pytest.raises(InputError, match=r"needs example inputs.*--input 'x:.*Net\(x\)"):
        load("m.pt", trust=True)


def test_program_under_any_name_gives_the_same_numbers(net: Any) -> None:
    batch = torch.export.Dim("batch", min=1, max=9)
    torch.export.save(
        torch.export.export(net, (torch.randn(4, 3),), dynamic_shapes=({0: batch},), strict=False), "program.pt2"
    )
    Path("model.pt").write_bytes(Path("program.pt2").read_bytes())
    for path in ("program.pt2", "model.pt"):
        model = load(path)
        _same(model, net)
        assert model.kind == "ExportedProgram"
        assert model.recorded == {}
    stacks = [
        node.meta["nn_module_stack"]
        for node in model.program.graph.nodes
        if node.op == "call_function" and "linear" in str(node.target)
    ]
    assert [list(stack.values())[-1][0] for stack in stacks] == ["encoder.0", "head"]


def test_program_exported_on_a_gpu(tmp_path: Path) -> None:
    """Shown by its JSON: the weights, the graph's tensors and the device of an arange are written as cuda:0."""

    class OnDevice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.arange(2, device=x.device)

    module = OnDevice().eval()
    torch.export.save(torch.export.export(module, (torch.randn(4, 3),), strict=False), tmp_path / "cpu.pt2")
    with zipfile.ZipFile(tmp_path / "cpu.pt2") as source, zipfile.ZipFile(tmp_path / "gpu.pt2", "w") as out:
        for entry in source.namelist():
            data = source.read(entry)
            moved = (
                data.replace(b'"type": "cpu", "index": null', b'"type": "cuda", "index": 0')
                if entry.endswith(".json")
                else data
            )
            out.writestr(entry, moved)
    model = load(tmp_path / "gpu.pt2")
    assert {tensor.device.type for tensor in model.program.state_dict.values()} == {"cpu"}
    _same(model, module, 4, 3)


def test_imports_register_what_a_program_needs(net: Any) -> None:
    name = net.where.partition(".")[0] + "_ops"
    Path(f"{name}.py").write_text(
        "import torch\n"
        f"@torch.library.custom_op('{name}::double', mutates_args=())\n"
        "def double(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        "@double.register_fake\n"
        "def _(x):\n    return torch.empty_like(x)\n"
    )
    program = torch.export.export(net, (torch.randn(4, 3),), strict=False)
    torch.export.save(program, "m.pt2")
    with zipfile.ZipFile("m.pt2") as source, zipfile.ZipFile("custom.pt2", "w") as out:
        for entry in source.namelist():
            data = source.read(entry)
            if entry.endswith("models/model.json"):
                value = json.loads(data)
                node = value["graph_module"]["graph"]["nodes"][0]
                value["graph_module"]["graph"]["nodes"][0] = {
                    **node,
                    "target": f"torch.ops.{name}.double.default",
                    "inputs": [{**node["inputs"][0], "name": "x"}],
                }
                data = json.dumps(value).encode()
            out.writestr(entry, data)
    with pytest.raises(LoadError, match=rf"{name}\.double\.default.*--import"):
        load("custom.pt2")
    with pytest.raises(InputError, match=r"--import: no_such_module can't be imported"):
        load("custom.pt2", imports=["no_such_module"])
    assert load("custom.pt2", imports=[name]).recorded == {"imports": [name]}
    # A second time the module has been imported before, and what it registered is no longer new.
    assert load("custom.pt2", imports=[name]).recorded == {"imports": [name]}
    with pytest.raises(TrustError, match=rf"{name}\.double\.default"):
        load("custom.pt2")


@pytest.mark.filterwarnings("ignore")
def test_torchscript_module_is_refused() -> None:
    with pytest.raises(LoadError, match="TorchScript"):
        from_module(torch.jit.trace(nn.Linear(3, 2).eval(), torch.ones(2, 3)), (torch.ones(2, 3),))


def test_hugging_face_folder_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find_spec(name, *a)
    )
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    with pytest.raises(RuntimeUnavailable, match="pip install transformers"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(LoadError, match=r"config\.json can't be read"):
        load(tmp_path)


def test_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
    )
    reference = transformers.BertModel(config).eval()
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert [(spec.name, spec.range) for spec in model.inputs] == [
        ("input_ids", (0, 60)),
        ("attention_mask", (0, 2)),
        ("token_type_ids", (0, 2)),
    ]
    assert model.named_dims["seq"].max == 20
    assert model.outputs[0] == "last_hidden_state"
    ids, mask, kinds = torch.randint(0, 60, (3, 11)), torch.ones(3, 11, dtype=torch.int64), torch.randint(0, 2, (3, 11))
    torch.testing.assert_close(model.program.module()(ids, mask, kinds)[0], reference(ids, mask, kinds)[0])
    torch.export.save(model.program, tmp_path / "m.pt2")
    assert load(tmp_path / "m.pt2").inputs[0].range == (0, 60)


def test_hash_of_a_folder(tmp_path: Path) -> None:
    from normdeploy.loading.file_kinds import hash_model_files

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "b").write_bytes(b"2")
    (folder / "a").write_bytes(b"1")
    first = hash_model_files(folder)
    (folder / "b").rename(folder / "c")
    assert hash_model_files(folder) != first
    (folder / "c").rename(folder / "b")
    assert hash_model_files(folder) == first
