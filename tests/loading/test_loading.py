"""Loading from each kind of file and from live modules: the same numbers as eager, and errors that say what to do."""

from __future__ import annotations

import collections
import hashlib
import importlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from normdeploy.errors import InputError, LoadError, RuntimeUnavailable
from normdeploy.loading import from_module, load
from normdeploy.loading.state import fill
from normdeploy.model import Dim

FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, width, bias=bias), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


def make(**arguments):
    return Net(**arguments)


def fail():
    raise ValueError("on purpose")


nothing = dict
"""
INPUTS = ["x[batch,3]"]


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A trained model whose package lies in the working directory and nowhere else."""
    monkeypatch.chdir(tmp_path)
    package = f"package_{abs(hash(request.node.name))}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "nets.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(f"{package}.nets", fromlist=["Net"]).Net()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]
    torch.manual_seed(0)
    for _ in range(3):
        module(torch.randn(8, 3) * 2 + 1)
    module.where = f"{package}.nets:Net"
    return module.eval()


def _same(model: Any, module: nn.Module, *shape: int) -> None:
    x = torch.randn(shape or (7, 3))
    torch.testing.assert_close(model.program.module()(x), module(x), rtol=0, atol=0)


def test_state_dict_with_a_factory_in_the_working_directory(net: Any) -> None:
    torch.save(net.state_dict(), "w.pt")
    path_before = list(sys.path)
    model = load("w.pt", model=net.where, inputs=INPUTS)
    _same(model, net)
    assert sys.path == path_before
    assert model.kind == "state_dict"
    assert model.dims == {"batch": Dim("batch", 1, 8, 64)}
    assert model.sha256 == hashlib.sha256(Path("w.pt").read_bytes()).hexdigest()
    assert model.recorded == {"model": net.where, "inputs": INPUTS}
    again = load("w.pt", **json.loads(json.dumps(model.recorded)))
    assert again.inputs == model.inputs
    _same(again, net)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "module.model."],
    ids=lambda p: p or "none",
)
def test_prefixes(net: Any, prefix: str, legacy: bool) -> None:
    state = {prefix + name: value for name, value in net.state_dict().items()}
    torch.save(state, "w.pt", _use_new_zipfile_serialization=not legacy)
    _same(load("w.pt", model=net.where, inputs=INPUTS), net)


def test_compiled_submodule_and_averaged_model(net: Any) -> None:
    state = {name.replace("encoder.", "encoder._orig_mod."): value for name, value in net.state_dict().items()}
    torch.save(state, "a.pt")
    _same(load("a.pt", model=net.where, inputs=INPUTS), net)
    torch.save(torch.optim.swa_utils.AveragedModel(net).state_dict(), "b.pt")
    _same(load("b.pt", model=net.where, inputs=INPUTS), net)


class Module(nn.Module):
    """Its only child is called ``module``: that prefix is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_a_prefix_of_the_model_itself_stays(tmp_path: Path) -> None:
    reference = Module().eval()
    for number, prefix in enumerate(("", "module.")):
        torch.save({prefix + name: value for name, value in reference.state_dict().items()}, tmp_path / f"{number}.pt")
        _same(load(tmp_path / f"{number}.pt", model=f"{__name__}:Module", inputs=INPUTS), reference)


def _shifted(net: nn.Module, by: float) -> dict[str, torch.Tensor]:
    return {name: value + by if value.is_floating_point() else value for name, value in net.state_dict().items()}


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "ema"])
def test_checkpoint_with_one_set_of_weights(net: Any, key: str) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    torch.save({"epoch": 3, key: net.state_dict(), "optimizer": optimizer.state_dict(), "loss": 0.5}, "c.pt")
    _same(load("c.pt", model=net.where, inputs=INPUTS), net)


def test_checkpoint_with_an_average_beside_the_weights(net: Any) -> None:
    average = {f"module.{name}": value for name, value in _shifted(net, 0.25).items()}
    torch.save({"model": net.state_dict(), "ema": {"decay": 0.99, "module": average}, "step": 1}, "c.pt")
    with pytest.raises(LoadError, match=r"several sets of weights: 'model', 'ema'; choose with --key"):
        load("c.pt", model=net.where, inputs=INPUTS)
    model = load("c.pt", model=net.where, inputs=INPUTS, key="model")
    _same(model, net)
    assert model.recorded["key"] == "model"
    net.load_state_dict(_shifted(net, 0.25))
    for key in ("ema", "ema.module"):
        _same(load("c.pt", model=net.where, inputs=INPUTS, key=key), net)
    with pytest.raises(LoadError, match=r"nothing under the key 'teacher'; there are: 'model', 'ema', 'step'"):
        load("c.pt", model=net.where, inputs=INPUTS, key="teacher")
    with pytest.raises(LoadError, match=r"int under 'step'"):
        load("c.pt", model=net.where, inputs=INPUTS, key="step")


def test_checkpoint_without_weights(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "losses": [0.5, 0.25]}, tmp_path / "c.pt")
    with pytest.raises(LoadError, match=r"holds no weights.*'epoch' \(int\)"):
        load(tmp_path / "c.pt", model="a:b", inputs=INPUTS)
    torch.save([torch.ones(2)], tmp_path / "d.pt")
    with pytest.raises(LoadError, match=r"holds list, not weights"):
        load(tmp_path / "d.pt", model="a:b", inputs=INPUTS)


def test_keys_and_shapes_that_do_not_fit_are_listed(net: Any) -> None:
    state = net.state_dict()
    torch.save(
        {"extra.weight": torch.ones(1), **{name: value for name, value in state.items() if name != "head.bias"}}, "a.pt"
    )
    with pytest.raises(LoadError) as caught:
        load("a.pt", model=net.where, inputs=INPUTS)
    assert "1 missing from the file:\n    head.bias" in str(caught.value)
    assert "1 not in the model:\n    extra.weight" in str(caught.value)
    torch.save(state, "b.pt")
    with pytest.raises(LoadError, match=r"head\.weight: the file has \[2, 4\], the model \[2, 6\]"):
        load("b.pt", model=net.where, model_args={"width": 6}, inputs=INPUTS)


def test_an_empty_parameter_shares_its_memory_with_none(tmp_path: Path) -> None:
    """All empty tensors lie at the address 0, as if they were tied."""
    module = nn.ParameterDict({"a": nn.Parameter(torch.ones(0)), "b": nn.Parameter(torch.ones(0))})
    with pytest.raises(LoadError, match="1 missing from the file:\n    b"):
        fill(module, {"a": torch.ones(0)}, tmp_path / "w.pt")


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
        (None, r"weights alone \(9 tensors: encoder\.0\.weight.*--model package\.module:factory"),
        ("nets", "package.module:factory"),
        ("{package}.missing:Net", r"missing can't be imported.*ModuleNotFoundError"),
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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids))


def test_safetensors_with_tied_weights_and_bfloat16(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    reference = Tied().eval()
    save_file({"table.weight": reference.table.weight.detach().clone()}, tmp_path / "tied.safetensors")
    model = load(tmp_path / "tied.safetensors", model=f"{__name__}:Tied", inputs=["ids:int64[batch]"])
    assert model.kind == "safetensors"
    assert model.inputs[0].range == (0, 9)
    ids = torch.tensor([1, 5, 8])
    torch.testing.assert_close(model.program.module()(ids), reference(ids), rtol=0, atol=0)

    half = Module().to(torch.bfloat16).eval()
    save_file(half.state_dict(), tmp_path / "half.safetensors")
    model = load(tmp_path / "half.safetensors", model=f"{__name__}:bfloat16_module", inputs=["x:bfloat16[batch,3]"])
    x = torch.randn(5, 3, dtype=torch.bfloat16)
    torch.testing.assert_close(model.program.module()(x), half(x), rtol=0, atol=0)
    assert model.inputs[0].dtype == "bfloat16"
    widened = load(tmp_path / "half.safetensors", model=f"{__name__}:Module", inputs=INPUTS)
    torch.testing.assert_close(widened.program.module()(x.float()), half.float()(x.float()), rtol=0, atol=0)


def bfloat16_module() -> nn.Module:
    return Module().to(torch.bfloat16)


def test_safetensors_without_a_factory_or_with_a_key(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(LoadError, match="--model"):
        load(tmp_path / "w.safetensors", inputs=INPUTS)
    with pytest.raises(InputError, match="--key"):
        load(tmp_path / "w.safetensors", model="a:b", key="ema")


class PlainNorm:
    def __init__(self) -> None:
        self.gamma = torch.ones(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class HoldsPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = PlainNorm(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def test_parameters_that_no_state_dict_holds_are_named(tmp_path: Path) -> None:
    torch.save(HoldsPlain().state_dict(), tmp_path / "w.pt")
    with pytest.warns(UserWarning, match=r"no state_dict holds norm\.gamma"):
        load(tmp_path / "w.pt", model=f"{__name__}:HoldsPlain", inputs=INPUTS)


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


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput: a dict with attributes, known to pytree by its keys."""


pytree._register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    serialized_type_name=f"{__name__}.Output",
)


class Nested(nn.Module):
    def forward(
        self, batch: dict[str, Any], scale: float = 1.0, *, mask: torch.Tensor | None = None, extra: Any = None
    ) -> Output:
        ids, pair = batch["ids"], batch["more"]["pair"]
        x = torch.nn.functional.one_hot(ids, 5).float() * scale + pair[0][:, None, None]
        if mask is not None:
            x = x * mask[..., None]
        return Output(last=x, hidden=(x + 1, x + 2), pair=Pair(x, -x))


def test_live_module_with_nested_inputs_kwargs_and_a_model_output() -> None:
    ids, a, b, mask = torch.randint(0, 5, (2, 3)), torch.randn(2), torch.randn(2), torch.rand(2, 3)
    module = Nested().eval()
    args, kwargs = ({"ids": ids, "more": {"pair": (a, b)}}, 2.0), {"mask": mask, "extra": None}
    model = from_module(
        module,
        args,
        kwargs,
        inputs=["batch_ids[batch,seq]", "batch_more_pair_0[batch]", "mask[batch,seq]"],
        dims=["batch=1:2:9"],
    )
    assert [spec.name for spec in model.inputs] == ["batch_ids", "batch_more_pair_0", "batch_more_pair_1", "mask"]
    assert model.inputs[0].range == (0, 5)
    assert model.inputs[3].shape == (Dim("batch", 1, 2, 9), Dim("seq", 1, 3, 64))
    assert model.inputs[2].shape == (Dim.static(2),)
    assert model.outputs == ("last", "hidden_0", "hidden_1", "pair_first", "pair_second")
    result = model.program.module()(*args, **kwargs)
    expected = module(*args, **kwargs)
    assert isinstance(result, Output)
    torch.testing.assert_close(result["hidden"][1], expected["hidden"][1], rtol=0, atol=0)


def test_kwargs_in_any_order_come_in_the_order_of_the_forward() -> None:
    class Three(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return a + 2 * b + 3 * c

    kwargs = {"c": torch.ones(2), "b": torch.ones(2, 1), "a": torch.ones(1)}
    model = from_module(Three().eval(), kwargs=kwargs)
    assert [spec.name for spec in model.inputs] == ["a", "b", "c"]
    assert [len(spec.shape) for spec in model.inputs] == [1, 2, 1]
    names = [node.name for node in model.program.graph.nodes if node.op == "placeholder"]
    assert names == ["a", "b", "c"]


def test_the_same_tensor_twice() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x - 2 * y

    x = torch.ones(3)
    model = from_module(Sum().eval(), (x, x), inputs=["x[n]", "y[n]"])
    torch.testing.assert_close(model.program.module()(torch.ones(4), torch.zeros(4)), torch.ones(4))


def test_names_of_outputs(tmp_path: Path) -> None:
    class Several(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how

        def forward(self, x: torch.Tensor) -> Any:
            given = {"x": 2 * x, "output_x": x + 1}
            return {
                "one": x,
                "tuple": (x, None, x + 1),
                "dict": {"a": x, "b": [x]},
                "named": Pair(x, x),
                "input": given,
            }[self.how]

    expected = {
        "one": ("output",),
        "tuple": ("output_0", "output_2"),
        "dict": ("a", "b_0"),
        "named": ("first", "second"),
        "input": ("output_output_x", "output_x"),
    }
    for how, names in expected.items():
        assert from_module(Several(how).eval(), (torch.ones(2),)).outputs == names


def test_wrappers_are_taken_off(net: Any) -> None:
    for wrapped in (nn.DataParallel(net), torch.compile(net), nn.DataParallel(torch.compile(net))):  # type: ignore[arg-type]
        wrapped.eval()
        _same(from_module(wrapped, (torch.randn(4, 3),), inputs=INPUTS), net)


def test_weight_norm_is_copied() -> None:
    with pytest.warns(FutureWarning):
        module = nn.utils.weight_norm(nn.Linear(3, 2)).eval()
    module(torch.randn(4, 3))  # now .weight is the result of a computation, which copy.deepcopy refuses
    weight = module.weight
    _same(from_module(module, (torch.randn(4, 3),), inputs=INPUTS), module)
    assert module.weight is not None
    assert weight.grad_fn is not None


def test_modules_that_can_not_be_taken() -> None:
    with pytest.raises(InputError, match="not function"):
        from_module(lambda x: x, (torch.ones(2),))  # type: ignore[arg-type]
    module = nn.Linear(3, 2).eval()
    module.generator = (x for x in ())  # type: ignore[assignment]
    with pytest.raises(LoadError, match="can't be copied"):
        from_module(module, (torch.ones(2, 3),))
    with pytest.raises(InputError, match="hold no tensor"):
        from_module(nn.Linear(3, 2).eval(), (3,))
    with pytest.raises(InputError, match=r"do not fit Linear\(input\)"):
        from_module(nn.Linear(3, 2).eval(), (torch.ones(2, 3), torch.ones(1)))


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
    assert model.dims["seq"].max == 20
    assert model.outputs[0] == "last_hidden_state"
    ids, mask, kinds = torch.randint(0, 60, (3, 11)), torch.ones(3, 11, dtype=torch.int64), torch.randint(0, 2, (3, 11))
    torch.testing.assert_close(model.program.module()(ids, mask, kinds)[0], reference(ids, mask, kinds)[0])
    torch.export.save(model.program, tmp_path / "m.pt2")
    assert load(tmp_path / "m.pt2").inputs[0].range == (0, 60)


def test_hash_of_a_folder(tmp_path: Path) -> None:
    from normdeploy.loading.kinds import sha256

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "b").write_bytes(b"2")
    (folder / "a").write_bytes(b"1")
    first = sha256(folder)
    (folder / "b").rename(folder / "c")
    assert sha256(folder) != first
    (folder / "c").rename(folder / "b")
    assert sha256(folder) == first
