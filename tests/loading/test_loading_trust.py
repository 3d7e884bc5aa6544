"""Crafted and broken files: whatever would run code is refused and named, and nothing of it runs.

Every attack is shown to be live: torch itself, given the same file, plants the sentinel.
"""

from __future__ import annotations

import argparse
import fractions
import json
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from normdeploy.errors import LoadError, TrustError
from normdeploy.loading import load
from normdeploy.loading.file_kinds import FileKind, detect_kind
from normdeploy.loading.operator_allowlist import OF_TORCH
from normdeploy.loading.program_file import explain_load_failure
from normdeploy.loading.shape_expressions import DisallowedExpression, SizeGuard, require_allowed_expression
from normdeploy.loading.torch_pickles import unpickle_data
from tests.crafted import CONSTANTS, PROGRAM, WEIGHTS, Bomb, Samples, edited, json_edit, saved


def _sample_inputs(command: str, **_: Any) -> dict[str, Any]:
    return {"data/sample_inputs/model.pt": saved(Samples(command))}


def _use_pickle(command: str, **_: Any) -> dict[str, Any]:
    def edit(config: Any) -> None:
        config["config"]["scale"]["use_pickle"] = True
        config["config"]["scale"]["path_name"] = "weight_9"

    return {WEIGHTS: json_edit(edit), "data/weights/weight_9": saved(Bomb(command))}


def _opaque_constant(command: str, **_: Any) -> dict[str, Any]:
    def edit(config: Any) -> None:
        config["config"]["c"] = {
            "path_name": "opaque_obj_0",
            "is_param": False,
            "use_pickle": True,
            "tensor_meta": None,
        }

    return {CONSTANTS: json_edit(edit), "data/constants/opaque_obj_0": pickle.dumps(Bomb(command))}


def _guards_code(command: str, **_: Any) -> dict[str, Any]:
    return {PROGRAM: json_edit(lambda p: p["guards_code"].append(f"__import__('os').system({command!r}) == 0"))}


def _expression(command: str, **_: Any) -> dict[str, Any]:
    def edit(program: Any) -> None:
        size = program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]
        size["expr_str"] = f"{size['expr_str']} + 0*__import__('os').system({command!r})"

    return {PROGRAM: json_edit(edit)}


def _hint(command: str, **_: Any) -> dict[str, Any]:
    """A size whose type is a string, which sympy would evaluate too."""

    def edit(program: Any) -> None:
        program["range_constraints"] = {
            name: {"min_val": f"__import__('os').system({command!r})", "max_val": 16}
            for name in program["range_constraints"]
        }

    return {PROGRAM: json_edit(edit)}


def _node_target(sentinel: Path, **_: Any) -> dict[str, Any]:
    """One of the functions that torch's verifier lets through as a target imports what its argument names."""
    Path("planted_function.py").write_text(f"open({str(sentinel)!r}, 'w').close()\n")

    def edit(program: Any) -> None:
        graph = program["graph_module"]["graph"]
        node = next(n for n in graph["nodes"] if n["target"] == "torch.ops.aten.add.Tensor")
        target = "torch.export.custom_ops._call_custom_autograd_function_in_pre_dispatch"
        inputs = [{"name": "", "arg": {"as_string": "planted_function.Function"}, "kind": 1}]
        outputs = [{"as_tensor": {"name": "planted"}}]
        graph["tensor_values"]["planted"] = graph["tensor_values"]["add"]
        graph["nodes"].insert(0, {**node, "target": target, "name": "planted", "inputs": inputs, "outputs": outputs})
        graph["nodes"][1]["inputs"][0]["arg"] = {"as_tensor": {"name": "planted"}}

    return {PROGRAM: json_edit(edit)}


def _tree_spec(sentinel: Path, **_: Any) -> dict[str, Any]:
    """A tree spec may name a module to import: here one that lies in the working directory."""
    Path("planted_module.py").write_text(f"open({str(sentinel)!r}, 'w').close()\nfactory = list\n")
    context = {"default_factory_module": "planted_module", "default_factory_name": "factory", "dict_context": []}
    spec = json.dumps([1, {"type": "collections.defaultdict", "context": context, "children_spec": []}])

    def edit(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = spec

    return {PROGRAM: json_edit(edit)}


ATTACKS: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "sample inputs": (_sample_inputs, r"data/sample_inputs/model\.pt.*builtin\w*\.eval"),
    "use_pickle": (_use_pickle, r"'scale' \(data/weights/weight_9\).*use_pickle"),
    "opaque constant": (_opaque_constant, r"data/constants/opaque_obj_0.*would be unpickled"),
    "guards_code": (_guards_code, r"guards_code.*executed as code"),
    "expr_str": (_expression, r"shape expression.*evaluated as code"),
    "node target": (_node_target, r"node target 'torch\.export\.custom_ops\._call_custom"),
    "tree spec": (_tree_spec, r"tree spec out_spec.*import planted_module\.factory"),
}


@pytest.fixture
def crafted(ordinary: Path, tmp_path: Path, sentinel: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)

    def make(attack: str) -> Path:
        changes = ATTACKS[attack][0](command=f"touch {sentinel}", sentinel=sentinel)
        return edited(ordinary, tmp_path / "crafted.pt2", changes)

    return make


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_live(
    attack: str, crafted: Callable[[str], Path], sentinel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attack in ("opaque constant", "node target") and torch.__version__ < "2.13":
        pytest.skip(f"torch {torch.__version__} does not fall for it yet")
    path = crafted(attack)
    monkeypatch.syspath_prepend(str(path.parent))
    try:
        program = torch.export.load(path)
        program.module()(torch.randn(3, 4), torch.randn(3, 4))
    except Exception:  # the crafted parts need not fit together: what counts is what has run
        pass
    assert sentinel.exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_refused_by_name_and_nothing_runs(attack: str, crafted: Callable[[str], Path], sentinel: Path) -> None:
    with pytest.raises(TrustError, match=ATTACKS[attack][1]) as caught:
        load(crafted(attack))
    assert "--trust-remote-code" in str(caught.value)
    assert not sentinel.exists()


@pytest.mark.parametrize("attack", ["sample inputs", "guards_code", "expr_str"])
def test_trust_hands_the_file_to_torch(attack: str, crafted: Callable[[str], Path], sentinel: Path) -> None:
    model = load(crafted(attack), trust=True)
    model.program.module()(torch.randn(3, 4), torch.randn(3, 4))
    assert sentinel.exists()
    assert [spec.name for spec in model.inputs] == ["x", "y"]
    assert "trust" not in model.recorded


@pytest.mark.parametrize("trust", [False, True])
def test_ordinary_program_needs_no_trust(ordinary: Path, trust: bool) -> None:
    with zipfile.ZipFile(ordinary) as archive:
        root = archive.namelist()[0].split("/")[0]
        assert json.loads(archive.read(f"{root}/{PROGRAM}"))["guards_code"]
        assert archive.read(f"{root}/data/sample_inputs/model.pt")
    model = load(ordinary, trust=trust)
    assert not getattr(model.program, "_guards_code", [])  # taken out: module() would execute them
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    torch.testing.assert_close(model.program.module()(x, y), torch.export.load(ordinary).module()(x, y), rtol=0, atol=0)
    assert [(dim.min, dim.opt, dim.max) for dim in model.named_dims.values()] == [(1, 3, 16)]


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (
            lambda p: p["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][1].update(as_int="__import__('os')"),
            r"tensor_values\.x\.sizes\[1\]",
        ),
        (lambda p: p["graph_module"]["graph"].update(nodes={}), r"graph\.nodes is \{\}"),
        (
            lambda p: next(iter(p["range_constraints"].values())).update(max_val="9"),
            r"range_constraints.*max_val is '9'",
        ),
        (lambda p: p["graph_module"]["graph"]["inputs"][0].update(as_int=1), r"must hold one of"),
    ],
    ids=["string for a size", "object for a list", "string for a bound", "two of a union"],
)
def test_wrong_types_in_the_json(ordinary: Path, tmp_path: Path, edit: Callable[[Any], None], place: str) -> None:
    with pytest.raises(LoadError, match=place):
        load(edited(ordinary, tmp_path / "x.pt2", {PROGRAM: json_edit(edit)}))


def test_load_bound_beyond_any_size_bounds_nothing(ordinary: Path, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        next(iter(program["range_constraints"].values())).update(max_val=10**400)

    model = load(edited(ordinary, tmp_path / "x.pt2", {PROGRAM: json_edit(edit)}))
    # As of a program that states no bound.
    assert [(dim.min, dim.opt, dim.max) for dim in model.named_dims.values()] == [(1, 3, 64)]


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.ops.load_library",
        "torch.ops.load_library.__call__",
        "torch.ops.loaded_libraries.add",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save.default",
        "torch.ops.aten.manual_seed.default",
        "torch.ops.aten._print.default",
        "torch.ops.aten.no_such_operator.default",
        "torch.ops.prim.rpc_async.default",
        "torch.ops.prim.abs.default",
        "torch.ops.quantized.linear_prepack.default",
        "torch.ops.mkldnn._linear_pointwise.default",
        "torch.ops.onnx.Shape.default",
        "torch.ops.aten.add.overloads",
        "torch.ops.higher_order.triton_kernel_wrapper_functional",
        "torch.ops.c10d.send.default",
        "_operator.methodcaller",
        "torch.hub.load",
        "math.__loader__.load_module",
        "#planted:op",
    ],
)
def test_targets_that_are_no_tensor_operators(ordinary: Path, tmp_path: Path, target: str) -> None:
    def edit(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0]["target"] = target

    with pytest.raises(TrustError, match="node target"):
        load(edited(ordinary, tmp_path / "x.pt2", {PROGRAM: json_edit(edit)}))


def test_operator_of_an_unknown_library_is_named(ordinary: Path, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.ops.acme.rmsnorm.default"

    with pytest.raises(TrustError, match=r"acme\.rmsnorm\.default.*--import"):
        load(edited(ordinary, tmp_path / "x.pt2", {PROGRAM: json_edit(edit)}))


def test_operators_of_torch_itself_are_no_users() -> None:
    """A release of torch with a new namespace fails here: say in `operators` whose it is."""
    listed = (
        "import torch, torch.distributed, torch._inductor, torch._dynamo, torch.export, torch.onnx\n"
        "print(*{n.partition('::')[0] for n in torch._C._dispatch_get_all_op_names()})"
    )
    told = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    assert set(told.stdout.split()) <= OF_TORCH


def test_unregistered_output_class_is_named(ordinary: Path, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        spec = [
            1,
            {
                "type": "acme.outputs.Output",
                "context": "null",
                "children_spec": [{"type": None, "context": None, "children_spec": []}],
            },
        ]
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(spec)

    with pytest.raises(LoadError, match=r"acme\.outputs\.Output.*--import acme\.outputs"):
        load(edited(ordinary, tmp_path / "x.pt2", {PROGRAM: json_edit(edit)}))


@pytest.mark.parametrize(
    "told", ["is not registered", "failed because the serialized type is not registered in this process"]
)
def test_unregistered_output_class_in_the_words_of_each_torch(told: str) -> None:
    """Up to 2.14, and from 2.15 on."""
    error = NotImplementedError(f"Deserializing acme.outputs.Output in pytree {told}.")
    assert "--import acme.outputs" in explain_load_failure(Path("x.pt2"), [error])


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "s0.__class__",
        "eval('1')",
        "Symbol('__import__')",
        "Integer('9**9')",
        "(lambda: 0)()",
        "[s0 for s0 in s1]",
        "Max(*s0)",
        "9**9**9",
        "2**(0*s0 + 2**62)",
        "Pow(Pow(Pow(2, 64), 64), 64)",
        "(" * 300 + "s0" + ")" * 300,
        "s0 +" * 5000 + "s0",
        "ｓ0",
        "",
    ],
)
def test_expressions_not_on_the_list(text: str) -> None:
    with pytest.raises(DisallowedExpression):
        require_allowed_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "s77",
        "s77//2 + 3",
        "2**s0",
        "Max(3, s77)",
        "Add(FloorDiv(Symbol('s77', positive=True, integer=True), Integer(2)), Integer(-1))",
        "Float('0.5', precision=53)",
    ],
)
def test_expressions_as_torch_writes_them(text: str) -> None:
    require_allowed_expression(text)


def test_guards_are_evaluated_without_python() -> None:
    guard = SizeGuard("(L['x'].size()[1]*L['b']['y'][0].size()[0]) % 4 == 0 and L['x'].size()[1] <= 12")
    sizes = {("['x']", 1): 6, ("['b']['y'][0]", 0): 2}
    assert guard.holds(sizes) is True
    assert guard.holds(sizes | {("['x']", 1): 14}) is False
    assert guard.holds({("['x']", 1): 6}) is None
    for text in (
        "L['x'].size().__class__",
        "L['x'].__class__",
        "M['x'].size()[0] == 1",
        "L[print()].size()[0]",
        "L['x'].size()[0] == open('f')",
    ):
        with pytest.raises(DisallowedExpression):
            SizeGuard(text)


class Pickled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


@pytest.mark.parametrize("legacy", [False, True])
def test_whole_module_needs_trust(tmp_path: Path, sentinel: Path, legacy: bool) -> None:
    module = nn.Sequential(Pickled()).eval()
    module.planted = Bomb(f"touch {sentinel}")  # type: ignore[assignment]
    path = tmp_path / "module.pt"
    torch.save(module, path, _use_new_zipfile_serialization=not legacy)
    assert detect_kind(path) is (FileKind.LEGACY_PICKLE if legacy else FileKind.PICKLE)
    with pytest.raises(TrustError, match=r"test_loading_trust\.Pickled.*posix\.system") as caught:
        load(path, inputs=["x[batch,4]"])
    assert "--trust-remote-code" in str(caught.value)
    assert not sentinel.exists()
    model = load(path, trust=True, inputs=["x[batch,4]"])
    assert sentinel.exists()
    assert model.kind == "pickled module"
    torch.testing.assert_close(
        model.program.module()(torch.tensor([[-1.0, 2.0, 0.0, 3.0]] * 2)), torch.tensor([[0.0, 2.0, 0.0, 3.0]] * 2)
    )


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("container", [argparse.Namespace, SimpleNamespace])
def test_training_options_beside_the_weights_are_data(tmp_path: Path, container: type, legacy: bool) -> None:
    options = container(lr=1e-3, layers=[1, 2], nested=container(name="net"))
    checkpoint = {"args": options, "model": nn.Linear(2, 2).state_dict()}
    torch.save(checkpoint, tmp_path / "c.pt", _use_new_zipfile_serialization=not legacy)
    kind = FileKind.LEGACY_PICKLE if legacy else FileKind.PICKLE
    assert unpickle_data(tmp_path / "c.pt", kind)["args"].nested.name == "net"
    with pytest.raises(LoadError, match="contains only weights"):
        load(tmp_path / "c.pt")


def test_refusal_names_the_entries_with_other_objects(tmp_path: Path, sentinel: Path) -> None:
    checkpoint = {
        "args": argparse.Namespace(lr=1e-3),
        "scaler": [{"state": Bomb(f"touch {sentinel}")}],
        "model": nn.Linear(2, 2).state_dict(),
        "extra": fractions.Fraction(1, 2),
    }
    torch.save(checkpoint, tmp_path / "c.pt")
    with pytest.raises(TrustError, match="more than tensors in its entries 'scaler', 'extra', and unpickling would"):
        load(tmp_path / "c.pt")
    assert not sentinel.exists()


def test_namespace_does_not_let_other_objects_through(tmp_path: Path, sentinel: Path) -> None:
    checkpoint = {"args": argparse.Namespace(hook=Bomb(f"touch {sentinel}")), "model": nn.Linear(2, 2).state_dict()}
    torch.save(checkpoint, tmp_path / "c.pt")
    with pytest.raises(TrustError, match="more than tensors in its entry 'args', and unpickling would"):
        load(tmp_path / "c.pt")
    assert not sentinel.exists()


def test_class_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gone.py").write_text("import torch\nclass Net(torch.nn.Module):\n    pass\n")
    import gone  # type: ignore[import-not-found]

    torch.save(gone.Net(), tmp_path / "m.pt")
    del gone.Net
    with pytest.raises(LoadError, match=r"an object of gone.Net, which that module does not define here: run with"):
        load(tmp_path / "m.pt", trust=True, inputs=["x[2]"])


@pytest.mark.parametrize("trust", [False, True])
def test_class_of_a_notebook_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool) -> None:
    """Trust helps where the process that loads is the script that defines the class, and nowhere else."""
    script = sys.modules["__main__"]
    net = type("NotebookNet", (torch.nn.Linear,), {"__module__": "__main__"})
    monkeypatch.setattr(script, "NotebookNet", net, raising=False)
    torch.save({"model": net(4, 3).eval()}, tmp_path / "m.pt")
    assert load(tmp_path / "m.pt", trust=True, inputs=["x[b,4]"])
    monkeypatch.delattr(script, "NotebookNet")
    with pytest.raises(LoadError, match=r"defined in the notebook or script .* \(NotebookNet\).*--model net:"):
        load(tmp_path / "m.pt", trust=trust, inputs=["x[b,4]"])


def test_module_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "left_behind.py").write_text("import torch\nclass Net(torch.nn.Module):\n    pass\n")
    import left_behind  # type: ignore[import-not-found]

    torch.save(left_behind.Net(), tmp_path / "m.pt")
    (tmp_path / "left_behind.py").unlink()
    monkeypatch.delitem(sys.modules, "left_behind")
    with pytest.raises(LoadError, match=r"in the module 'left_behind', which can't be imported here.*--import"):
        load(tmp_path / "m.pt", trust=True, inputs=["x[2]"])


FACTORY = "import torch\nopen({sentinel!r}, 'w').close()\ndef make():\n    return torch.nn.Linear(4, 3)\n"


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy", "bomb"])
def test_factory_is_not_called_for_a_broken_file(
    tmp_path: Path, sentinel: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"factory_{kind}"
    Path(f"{name}.py").write_text(FACTORY.format(sentinel=str(sentinel)))
    state = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    path = tmp_path / "weights.bin"
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    else:
        torch.save(
            state if kind != "bomb" else {**state, "x": Bomb(f"touch {sentinel}")},
            path,
            _use_new_zipfile_serialization=kind != "legacy",
        )
    whole = path.read_bytes()
    if kind != "bomb":
        path.write_bytes(whole[:-20])
    with pytest.raises(LoadError):
        load(path, model=f"{name}:make", inputs=["input[batch,4]"])
    assert not sentinel.exists()
    if kind != "bomb":
        path.write_bytes(whole)
        load(path, model=f"{name}:make", inputs=["input[batch,4]"])
        assert sentinel.exists()
