"""TorchScript archives: their weights go into the model that the user names, and none of their code is run."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normdeploy.errors import InputError, LoadError, TrustError
from normdeploy.loading import load
from normdeploy.loading.torchscript_weights import read_torchscript


class Net(nn.Module):
    """Parameters, persistent and other buffers, a tied weight and a plain attribute."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, features)])
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.tied = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x)).mean((2, 3))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    net = Net().train()
    with torch.no_grad():
        net(torch.randn(8, 3, 8, 8))  # statistics of its own
    return net.eval()


@pytest.mark.parametrize("how", ["script", "trace"])
def test_its_weights_are_used(net: Net, how: str, tmp_path: Path) -> None:
    scripted = torch.jit.script(net) if how == "script" else torch.jit.trace(net, torch.randn(1, 3, 8, 8))
    torch.jit.save(scripted, tmp_path / "net.pt")
    model = load(tmp_path / "net.pt", model=f"{__name__}:Net", inputs=["x[batch,3,8,8]"])
    assert model.kind == "TorchScript"
    stored = {**model.program.state_dict}
    for name, value in net.state_dict().items():
        if name in stored:
            assert torch.equal(stored[name], value), name
    assert {"bn.running_mean", "conv.weight", "layers.1.bias"} <= stored.keys()


def test_weights_that_do_not_fit_are_told(net: Net, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(net), tmp_path / "net.pt")
    with pytest.raises(LoadError, match=r"layers.1.weight: the file has \[4, 8\], the model \[5, 8\]"):
        load(tmp_path / "net.pt", model=f"{__name__}:Net", model_args={"features": 5}, inputs=["x[1,3,8,8]"])
    with pytest.raises(LoadError, match="pass the model that its weights belong to with --model"):
        load(tmp_path / "net.pt")
    with pytest.raises(InputError, match="omit --key"):
        load(tmp_path / "net.pt", model=f"{__name__}:Net", key="state_dict")


def test_frozen_weights_are_none(net: Net, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.freeze(torch.jit.script(net)), tmp_path / "net.pt")
    with pytest.raises(LoadError, match=r"torch\.jit\.freeze wrote them into its code"):
        read_torchscript(tmp_path / "net.pt")


class Touch:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def repacked(source: Path, target: Path, entry: str, data: bytes) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.partition("/")[2] == entry else old.read(name))
    return target


def test_nothing_in_it_is_run(net: Net, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(net), tmp_path / "net.pt")
    hostile = repacked(
        tmp_path / "net.pt", tmp_path / "hostile.pt", "data.pkl", pickle.dumps(Touch(tmp_path / "touched"), protocol=2)
    )
    with pytest.raises(TrustError, match="which no weights need"):
        load(hostile, model=f"{__name__}:Net", inputs=["x[1,3,8,8]"])
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"\x80\x02]q\x00.", b"\x80\x02c__torch__\nNet\n)\x81}b."])
def test_broken_archives_are_errors(net: Net, data: bytes, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(net), tmp_path / "net.pt")
    with pytest.raises(LoadError):
        read_torchscript(repacked(tmp_path / "net.pt", tmp_path / "broken.pt", "data.pkl", data))


def test_storages_are_read_once(net: Net, tmp_path: Path) -> None:
    """Tensors that share one go on sharing it, and a file of many references to one takes no more memory than that."""
    torch.jit.script(net).save(tmp_path / "net.ts")
    found = read_torchscript(tmp_path / "net.ts").parameters
    assert found["tied"].untyped_storage().data_ptr() == found["layers.0.weight"].untyped_storage().data_ptr()


def test_modules_without_end_in_each_other_are_refused(net: Net, tmp_path: Path) -> None:
    """A chain takes time in proportion to its square where each holds the ids of all around it."""
    torch.jit.script(net).save(tmp_path / "net.ts")
    deep = (
        b"\x80\x02"
        + b"c__torch__.tests.loading.test_torchscript_weights\nNet\n)\x81}X\x01\x00\x00\x00a" * 3000
        + b"N"
        + b"sb" * 3000
        + b"."
    )
    with zipfile.ZipFile(tmp_path / "net.ts") as old, zipfile.ZipFile(tmp_path / "deep.ts", "w") as new:
        for entry in old.namelist():
            new.writestr(entry, deep if entry.endswith("/data.pkl") else old.read(entry))
    with pytest.raises(LoadError, match="nests modules"):
        read_torchscript(tmp_path / "deep.ts")
