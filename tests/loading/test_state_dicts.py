"""Weights alone, in whatever a training script leaves: a model is filled with them, or what does not fit is listed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normdeploy
from normdeploy.errors import InputError, LoadError
from normdeploy.loading import load
from normdeploy.loading.file_kinds import hash_model_files
from normdeploy.loading.model_factories import make_model
from normdeploy.loading.state_dicts import fill_module
from normdeploy.model import Dim
from tests.loading.test_loading import INPUTS, _same


def test_state_dict_with_a_factory_in_the_working_directory(net: Any) -> None:
    torch.save(net.state_dict(), "w.pt")
    path_before = list(sys.path)
    model = load("w.pt", model=net.where, inputs=INPUTS)
    _same(model, net)
    assert sys.path == path_before
    assert model.kind == "state_dict"
    assert model.named_dims == {"batch": Dim("batch", 1, 8, 64)}
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
    with pytest.raises(LoadError, match=r"no key 'teacher'; its keys are: 'model', 'ema', 'step'"):
        load("c.pt", model=net.where, inputs=INPUTS, key="teacher")
    with pytest.raises(LoadError, match=r"int under 'step'"):
        load("c.pt", model=net.where, inputs=INPUTS, key="step")


def test_checkpoint_without_weights(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "losses": [0.5, 0.25]}, tmp_path / "c.pt")
    with pytest.raises(LoadError, match=r"contains no weights.*'epoch' \(int\)"):
        load(tmp_path / "c.pt", model="a:b", inputs=INPUTS)
    torch.save([torch.ones(2)], tmp_path / "d.pt")
    with pytest.raises(LoadError, match=r"contains list, not weights"):
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
        fill_module(module, {"a": torch.ones(0)}, tmp_path / "w.pt")


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


class HoldsAll(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(3), nn.Linear(3, 2))


class HoldsPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = PlainNorm(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def test_parameters_that_no_state_dict_holds_are_named(tmp_path: Path) -> None:
    torch.save(HoldsPlain().state_dict(), tmp_path / "w.pt")
    (note,) = load(tmp_path / "w.pt", model=f"{__name__}:HoldsPlain", inputs=INPUTS).notes
    assert note.startswith("no state_dict contains norm.gamma")


def test_tensors_beside_the_model_are_named_where_it_is_exported_and_verified(tmp_path: Path) -> None:
    state = {f"model.{name}": value for name, value in HoldsAll().state_dict().items()}
    torch.save({**state, "criterion.center": torch.zeros(3)}, tmp_path / "w.pt")
    options: dict[str, Any] = {"model": f"{__name__}:HoldsAll", "inputs": INPUTS}
    made = normdeploy.export(tmp_path / "w.pt", output=tmp_path / "w.onnx", **options)
    said = "the weights are model.* in w.pt; ignored, because the model has no such tensors: criterion.center"
    assert said in made.notes
    assert said in normdeploy.verify(tmp_path / "w.pt", tmp_path / "w.onnx", **options).notes


def test_a_model_named_by_its_file_is_answered_with_its_module() -> None:
    with pytest.raises(
        InputError, match=r"names a file, but an importable module is expected.*: write nets\.small:Net$"
    ):
        make_model("nets/small.py:Net", {})


def test_arguments_without_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"the arguments of torch\.nn:Linear are a list; pass them by name"):
        make_model("torch.nn:Linear", [3, 4])  # type: ignore[arg-type]


def lightning(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what Lightning saves: tensors of callbacks and optimizers lie beside the weights."""
    moments = {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}
    return {
        "epoch": 1,
        "pytorch-lightning_version": "2.5.0",
        "callbacks": {"EarlyStopping": {"best_score": torch.tensor(0.5)}},
        "optimizer_states": [{"state": moments, "param_groups": []}],
        "hyper_parameters": {"lr": 0.1},
        "state_dict": state,
    }


@pytest.mark.parametrize("prefix", ["model.", "net.", "model._orig_mod."])
@pytest.mark.parametrize("others", [{}, {"loss.weight": torch.ones(3)}], ids=["alone", "beside a loss"])
def test_load_lightning_checkpoint_takes_the_weights_of_the_model(
    net: Any, prefix: str, others: dict[str, torch.Tensor]
) -> None:
    state = {f"{prefix}{name}": value for name, value in net.state_dict().items()}
    torch.save(lightning({**state, **others}), "w.ckpt")
    _same(load("w.ckpt", model=net.where, inputs=INPUTS), net)


def test_load_lightning_checkpoint_of_two_copies_asks_which(net: Any) -> None:
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    older = {f"ema.{name}": value * 2 for name, value in net.state_dict().items()}
    torch.save(lightning({**state, **older}), "w.ckpt")
    with pytest.raises(LoadError, match="contains the model 2 times, under net, ema; choose with --key"):
        load("w.ckpt", model=net.where, inputs=INPUTS)
    _same(load("w.ckpt", model=net.where, inputs=INPUTS, key="net"), net)
    _same(load("w.ckpt", model=net.where, inputs=INPUTS, key="state_dict.net"), net)


def test_load_foreign_keys_below_the_prefix_are_told(net: Any) -> None:
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    torch.save(lightning({**state, "net.tail.weight": torch.ones(3), "loss.weight": torch.ones(3)}), "w.ckpt")
    with pytest.raises(LoadError, match="not in the model"):
        load("w.ckpt", model=net.where, inputs=INPUTS)


def test_load_picks_the_prefix_whose_shapes_fit(net: Any) -> None:
    """A loss may have layers of the same names."""
    state = net.state_dict()
    others = {f"loss.{name}": torch.ones(2, 2) for name in state}
    torch.save({**{f"net.{name}": value for name, value in state.items()}, **others}, "w.pt")
    model = load("w.pt", model=net.where, inputs=INPUTS)
    _same(model, net)
    assert model.notes[0].startswith("the weights are net.* in w.pt; ignored")


def test_load_of_an_incomplete_part_names_what_it_lacks_alone(net: Any) -> None:
    names = list(net.state_dict())
    state = {f"net.{name}": value for name, value in net.state_dict().items() if name != names[0]}
    torch.save({**state, "loss.centers": torch.ones(3)}, "w.pt")
    with pytest.raises(LoadError) as raised:
        load("w.pt", model=net.where, inputs=INPUTS)
    assert f"1 missing from the file:\n    {names[0]}\n" in str(raised.value)
    assert "not in the model" not in str(raised.value)


def test_load_batch_norm_of_before_its_counter(tmp_path: Path) -> None:
    """torch 0.4 saved no num_batches_tracked, and eval mode reads none."""
    made = nn.BatchNorm2d(3)
    state = {name: value + 2 for name, value in made.state_dict().items() if name != "num_batches_tracked"}
    torch.save(state, tmp_path / "w.pth")
    fill_module(made, torch.load(tmp_path / "w.pth"), tmp_path / "w.pth")
    assert torch.equal(made.running_var, torch.full((3,), 3.0))


@pytest.mark.parametrize("key", [None, "optimizer"])
def test_load_state_of_an_optimizer_is_told(net: Any, key: str | None) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    sum(parameter.sum() for parameter in net.parameters()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    torch.save({key: state, "epoch": 3} if key else state, "w.pt")
    with pytest.raises(LoadError, match="contains the state of an optimizer and no weights: pass the file with"):
        load("w.pt", model=net.where, inputs=INPUTS)


def save_shards(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Save each tensor as a shard. Returns: the index's weight_map, tensor -> file."""
    files = {name: f"model-{i:05}-of-{len(state):05}.safetensors" for i, name in enumerate(state, 1)}
    for name, file in files.items():
        save_file({name: state[name].contiguous()}, file)
    return files


def test_load_sharded_safetensors_by_their_index(net: Any) -> None:
    files = save_shards(net.state_dict())
    index = Path("model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    model = load(index, model=net.where, inputs=INPUTS)
    _same(model, net)
    shard = next(iter(files.values()))
    with pytest.raises(LoadError, match="one of several shards: pass their index"):
        load(shard, model=net.where, inputs=INPUTS)
    save_file({"other": torch.ones(1)}, shard)
    assert hash_model_files(index) != model.sha256
    Path(shard).unlink()
    with pytest.raises(LoadError, match="but no such file is next to it; copy all shards"):
        load(index, model=net.where, inputs=INPUTS)


def test_load_index_that_leads_out_of_its_folder_is_refused(net: Any, tmp_path: Path) -> None:
    index = Path("model.safetensors.index.json")
    for target in ("../w.safetensors", "/dev/zero"):
        index.write_text(json.dumps({"weight_map": {"x": target}}))
        with pytest.raises(LoadError, match="points outside the folder"):
            load(index, model=net.where, inputs=INPUTS)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(LoadError, match="lists no shards"):
        load(index, model=net.where, inputs=INPUTS)


def test_weights_alone_without_inputs_name_model_and_inputs_at_once(net: Any) -> None:
    torch.save(net.state_dict(), "w.pt")
    with pytest.raises(LoadError, match=r"--model package\.module:factory\. Also describe .*--input 'x:float32"):
        load("w.pt")


@pytest.mark.parametrize("model", ["{package}.missing:Net", "{package}.nets:Other", "{package}.nets:fail"])
def test_factory_that_fails_without_inputs_names_both_at_once(net: Any, model: str) -> None:
    torch.save(net.state_dict(), "w.pt")
    package = net.where.partition(".")[0]
    with pytest.raises(InputError, match=r"(can't be imported|has no 'Other'|on purpose).*Also describe .*--input"):
        load("w.pt", model=model.format(package=package))


def test_unfitting_weights_and_missing_inputs_are_named_at_once(net: Any) -> None:
    state = dict(net.state_dict())
    removed = next(iter(state))
    state["foreign.weight"] = state.pop(removed)
    torch.save(state, "w.pt")
    with pytest.raises(LoadError) as raised:
        load("w.pt", model=net.where)
    for fault in (removed, "foreign.weight", "Also, Net needs example inputs", "--input 'x:"):
        assert fault in str(raised.value)


def test_unfitting_weights_and_unknown_inputs_are_named_at_once(net: Any) -> None:
    torch.save({"a.weight": torch.ones(2)}, "w.pt")
    with pytest.raises(LoadError, match=r"(?s)1 not in the model.*Also, the input 'y' is not a parameter of"):
        load("w.pt", model=net.where, inputs=["x[batch,3]", "y[batch,3]"])


def test_dim_without_any_input_names_the_missing_input(net: Any) -> None:
    torch.save(net.state_dict(), "w.pt")
    with pytest.raises(InputError, match=r"needs example inputs.*--input 'x:"):
        load("w.pt", model=net.where, dims=["batch=1:2:4"])


def test_all_missing_and_unknown_arguments_of_a_class_are_named_at_once() -> None:
    with pytest.raises(InputError) as raised:
        make_model("torch.nn:Linear", {"in_feature": 3, "outs": 4})
    for fault in (
        "needs 'in_features', 'out_features'",
        "does not accept 'in_feature', 'outs'",
        "--model-arg NAME=VALUE",
    ):
        assert fault in str(raised.value)
