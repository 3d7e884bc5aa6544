"""Training mode in modules, in plain objects that modules hold, and in exported graphs: refused by name, mended on
request."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from normdeploy.errors import TrainingModeError
from normdeploy.loading import from_module, load
from normdeploy.loading.train_mode_checks import find_training_parts, is_train_mode_op


class PlainBatchNorm:
    """A norm as a plain class: ``.eval()`` of the module that holds it does not reach its flag."""

    def __init__(self, features: int) -> None:
        self.training = True
        self.gamma, self.beta = torch.full((features,), 2.0), torch.zeros(features)
        self.running_mean, self.running_var = torch.zeros(features), torch.ones(features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = (
            (x.mean(0, keepdim=True), x.var(0, keepdim=True))
            if self.training
            else (self.running_mean, self.running_var)
        )
        self.out = self.gamma * (x - mean) / torch.sqrt(var + 1e-5) + self.beta
        if self.training:
            with torch.no_grad():
                self.running_mean = 0.9 * self.running_mean + 0.1 * mean
                self.running_var = 0.9 * self.running_var + 0.1 * var
        return self.out


class Slotted:
    __slots__ = ("training",)

    def __init__(self) -> None:
        self.training = True


class OneSlot:
    __slots__ = "inner"

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Holder(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _closure(norm: PlainBatchNorm) -> Callable[..., Any]:
    return lambda x: norm(x)


HOLDERS: dict[str, tuple[Callable[[PlainBatchNorm], Any], str]] = {
    "attribute": (lambda n: n, "held"),
    "list": (lambda n: [None, n], "held[1]"),
    "dict of tuples": (lambda n: {"a": (1, n)}, "held['a'][1]"),
    "object in an object": (lambda n: type("Box", (), {})() if n is None else _boxed(n), "held.inner"),
    "partial": (lambda n: functools.partial(n), "held.func"),
    "bound method": (lambda n: n.__call__, "held.__self__"),
    "closure": (_closure, "held.norm"),
    "unregistered module": (lambda n: [nn.Dropout()], "held[0]"),
    "slots": (lambda n: [Slotted()], "held[0]"),
    "what one slot holds": (lambda n: OneSlot(n), "held.inner"),
}


def _boxed(norm: PlainBatchNorm) -> Any:
    class Box:
        def __init__(self) -> None:
            self.inner = norm
            self.itself = self

    return Box()


@pytest.mark.parametrize("how", HOLDERS)
def test_plain_objects_are_found_by_their_path(how: str) -> None:
    make, path = HOLDERS[how]
    module = Holder(make(PlainBatchNorm(4))).eval()
    assert [name for name, _ in find_training_parts(module)] == [path]
    with pytest.raises(TrainingModeError) as caught:
        from_module(module, (torch.randn(3, 4),))
    assert f"{path} (" in str(caught.value)
    assert "--eval" in str(caught.value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))])
        self.norm = PlainBatchNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers[0](x))


def _warmed() -> Net:
    torch.manual_seed(0)
    net = Net()
    for _ in range(5):
        net(torch.randn(16, 4) * 3 + 1)
    return net


def _state(net: Net) -> dict[str, Any]:
    """Everything that could be touched: tensors, those of the plain object too, and flags."""
    plain = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(net.norm).items()
    }
    return {
        "plain": plain,
        "types": {name: type(value) for name, value in vars(net.norm).items()},
        "state": copy.deepcopy(net.state_dict()),
        "flags": {name: part.training for name, part in net.named_modules()},
        "requires_grad": {name: p.requires_grad for name, p in net.named_parameters()},
    }


def test_module_is_refused_with_the_names_that_matter_first() -> None:
    with pytest.raises(
        TrainingModeError,
        match=r"^norm \(plain object PlainBatchNorm\), layers\.0\.1 \(BatchNorm1d\), layers\.0\.2 \(Dropout\)",
    ):
        from_module(_warmed(), (torch.randn(3, 4),))


def test_one_submodule_is_enough() -> None:
    net = _warmed().eval()
    net.norm.training = False
    net.layers[0][2].train()
    with pytest.raises(TrainingModeError, match=r"^layers\.0\.2 \(Dropout\) is in training mode"):
        from_module(net, (torch.randn(3, 4),))


def test_eval_mends_a_copy_and_leaves_the_object_untouched() -> None:
    net = _warmed()
    before = _state(net)
    example = torch.randn(3, 4, requires_grad=True)
    model = from_module(net, (example,), inputs=["x[batch,4]"], eval=True)
    after = _state(net)
    assert before["flags"] == after["flags"]
    assert before["requires_grad"] == after["requires_grad"]
    assert before["types"] == after["types"]
    assert not any(isinstance(value, FakeTensor) for value in vars(net.norm).values())
    for part in ("plain", "state"):
        for name, value in before[part].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(after[part][name], value, rtol=0, atol=0)
    assert example.grad is None

    del net.norm.out  # a tensor with a history, which copy.deepcopy refuses: the loader has to copy it all the same
    reference = copy.deepcopy(net).eval()
    reference.norm.training = False
    x = torch.randn(7, 4)
    torch.testing.assert_close(model.program.module()(x), reference(x))
    # and not the batch statistics: those would make this row independent of its offset
    assert not torch.allclose(model.program.module()(x + 100), model.program.module()(x))


def test_tensors_of_the_model_are_its_own() -> None:
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    model = from_module(net, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    expected = model.program.module()(x)
    with torch.no_grad():
        net[0].weight.zero_()
    torch.testing.assert_close(model.program.module()(x), expected, rtol=0, atol=0)


class ReadOnly:
    training = property(lambda self: True)


def test_what_can_not_be_mended_is_named() -> None:
    with pytest.raises(TrainingModeError, match=r"held \(plain object ReadOnly\) can't be set"):
        from_module(Holder(ReadOnly()), (torch.randn(3, 4),), eval=True)


class AlwaysDropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)  # training=True is the function's default: .eval() does not reach it


def test_functional_dropout_is_found_in_the_graph() -> None:
    module = nn.Sequential(nn.Linear(4, 4), AlwaysDropping()).eval()
    with pytest.raises(TrainingModeError, match=r"1 \(dropout\)"):
        from_module(module, (torch.randn(3, 4),))
    model = from_module(module, (torch.randn(3, 4),), eval=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model.program.module()(x), module[0](x))


class NativeDropout(nn.Module):
    """The operator that decompositions make of dropout; ``train`` left out means training."""

    def __init__(self, p: float, train: bool | None) -> None:
        super().__init__()
        self.p, self.train_ = p, train

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout(x, self.p, self.train_)[0]


@pytest.mark.parametrize(
    ("p", "train", "trains"),
    [(0.5, None, True), (0.5, True, True), (0.5, False, False), (0.0, None, False), (0.0, True, False)],
)
def test_native_dropout_trains_unless_it_says_otherwise(p: float, train: bool | None, trains: bool) -> None:
    program = torch.export.export(NativeDropout(p, train).eval(), (torch.ones(3, 4),))
    assert any(map(is_train_mode_op, program.graph.nodes)) == trains


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2 if self.training else 0.0)


class NoGrad(nn.Module):
    """The body of torch.no_grad() is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.drop(x) * 2


TRAINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (3, 4), r"1 \(batch_norm\)"),
    "Dropout": (lambda: nn.Sequential(nn.Dropout(0.3)), (3, 4), r"0 \(dropout\)"),
    "Dropout2d": (lambda: nn.Sequential(nn.Dropout2d(0.3)), (3, 4, 2, 2), r"0 \(feature_dropout\)"),
    "AlphaDropout": (lambda: nn.Sequential(nn.AlphaDropout(0.3)), (3, 4), r"0 \(alpha_dropout\)"),
    "RReLU": (lambda: nn.Sequential(nn.RReLU()), (3, 4), r"0 \(rrelu"),
    "InstanceNorm that tracks": (
        lambda: nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True)),
        (3, 4, 5),
        r"0 \(instance_norm\)",
    ),
    "LSTM": (Recurrent, (3, 5, 4), r"rnn \(lstm\)"),
    "attention": (Attention, (3, 5, 4), r"scaled_dot_product_attention"),
    "under no_grad": (NoGrad, (3, 4), r"drop \(dropout\)"),
}


def _saved(module: nn.Module, shape: tuple[int, ...], path: Path) -> Path:
    torch.export.save(torch.export.export(module, (torch.randn(shape),), strict=False), path)
    return path


@pytest.mark.parametrize("what", TRAINED)
@pytest.mark.filterwarnings("ignore")
def test_train_mode_in_an_exported_program(what: str, tmp_path: Path) -> None:
    make, shape, named = TRAINED[what]
    torch.manual_seed(0)
    module = make().train()
    for _ in range(3):
        module(torch.randn(shape) * 2 + 1)
    reference = copy.deepcopy(module).eval()
    path = _saved(module, shape, tmp_path / "m.pt2")
    with pytest.raises(TrainingModeError, match=named):
        load(path)
    model = load(path, eval=True)
    assert model.recorded == {"eval": True}
    x = torch.randn(shape)
    run = model.program.module()
    torch.testing.assert_close(run(x), reference(x))
    torch.testing.assert_close(run(x), run(x), rtol=0, atol=0)  # nothing is counted or drawn
    load(_saved(reference, shape, tmp_path / "e.pt2"))


def test_decomposed_training_program_can_not_be_mended(tmp_path: Path) -> None:
    program = torch.export.export(
        nn.Sequential(nn.BatchNorm1d(4)).train(), (torch.randn(3, 4),), strict=False
    ).run_decompositions()
    torch.export.save(program, tmp_path / "m.pt2")
    for eval_mode in (False, True):
        with pytest.raises(TrainingModeError, match=r"_native_batch_norm_legit_functional.*export the program again"):
            load(tmp_path / "m.pt2", eval=eval_mode)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.BatchNorm1d(4, track_running_stats=False), (3, 4)),
        (nn.InstanceNorm1d(4), (3, 4, 5)),
        (nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 5)),
        (nn.Dropout(0.0), (3, 4)),
        (Recurrent(), (3, 5, 4)),
    ],
    ids=[
        "BatchNorm without running statistics",
        "InstanceNorm",
        "affine InstanceNorm",
        "Dropout of nothing",
        "LSTM in eval",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_error(module: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    module.eval()
    x = torch.randn(shape)
    torch.testing.assert_close(from_module(module, (x,)).program.module()(x), module(x))
    torch.testing.assert_close(load(_saved(module, shape, tmp_path / "m.pt2")).program.module()(x), module(x))
    if isinstance(module, nn.Dropout):
        load(_saved(module.train(), shape, tmp_path / "t.pt2"))


def test_the_module_of_an_exported_program_has_the_mode_of_its_trace() -> None:
    """Its training flag is set whatever it was exported in, and its eval() raises."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(3, 4)
    given_back = torch.export.export(net.eval(), (x,)).module()
    assert given_back.training
    assert from_module(given_back, (x,))
    trained = torch.export.export(net.train(), (x,)).module()
    with pytest.raises(TrainingModeError, match=r"batch_norm.*eval=True in Python"):
        from_module(trained, (x,))


def test_modules_of_a_traced_graph_keep_their_mode() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    assert "1" in [path for path, _ in find_training_parts(traced)]
