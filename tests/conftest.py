"""What all tests share: one thread for each worker (several get in each other's way), the settings of property tests,
their own key."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from normdeploy.runtimes.web_process import explain_missing_web
from tests.quick import LONGEST, made_once, read_tables_once

# a time limit for each example would fail on a busy machine; derandomized in CI, so that a red run can be repeated
hypothesis.settings.register_profile("normdeploy", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("normdeploy")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def few_collections() -> None:
    """The garbage collector leaves out what was there before a file's tests: the libraries are a million objects, and
    looking at these again and again takes a fifth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def same_width() -> Iterator[None]:
    """The caller's terminal does not decide where lines are broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_exports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        read_tables_once(patch)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers get whole files, the longest first, so that none is left with one at the end."""
    if hasattr(config, "workerinput"):
        place = {f"tests/{name}": i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def seeded() -> None:
    """Set the generators that tests draw from; Python's own, which hypothesis looks after, is left alone."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Modules and parameters that a file makes when it is read are the same in every run: red ones can be repeated."""
    if isinstance(collector, pytest.Module):
        seeded()


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """A test's draws do not depend on which ran before it in its worker."""
    seeded()


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a generator that starts at the same state in each test."""
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a test's ``-v`` asked for ends with it: the stream that it wrote to is closed by then."""
    yield
    if "normdeploy.log" in sys.modules:
        sys.modules["normdeploy.log"].start_logging(0)


@pytest.fixture(autouse=True, scope="session")
def own_signals() -> Iterator[None]:
    """A test may call the command line in this process, whose signals are pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normdeploy.cli.signals.watch_signals", lambda: None)
        patch.setattr("normdeploy.cli.signals.restore_default_sigint", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exported files are signed with a key in the user's state folder: tests leave the user's own alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


FACTORY = """
import pathlib
import torch

pathlib.Path(__file__).with_name("imported").touch()


class Net(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        self.gamma = torch.nn.Parameter(torch.linspace(0.5, 2, size))
        self.beta = torch.nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x):
        x = self.linear(x)
        d = x - x.mean(-1, keepdim=True)
        return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-12) * self.gamma + self.beta
"""


@pytest.fixture(scope="session")
def saved_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "project", _save_project)


def _save_project(folder: Path) -> None:
    """In this process, which forgets the module again."""
    import torch

    (folder / "factory.py").write_text(FACTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        torch.manual_seed(0)
        net = importlib.import_module("factory").Net(8).eval()
        torch.save(net.state_dict(), folder / "weights.pt")
        torch.save(net, folder / "pickled.pt")
        shapes = ({0: torch.export.Dim("batch", min=1, max=16)},)
        torch.export.save(torch.export.export(net, (torch.randn(4, 8),), dynamic_shapes=shapes), folder / "model.pt")
        del sys.modules["factory"]
    (folder / "imported").unlink()


@pytest.fixture
def project(saved_project: Path, tmp_path: Path) -> Path:
    """A user's folder: ``factory.py`` (which leaves ``imported`` when it is imported), and its model saved in three
    ways.

    ``weights.pt`` holds the weights alone, ``pickled.pt`` the module, ``model.pt`` an ExportedProgram with a dynamic
    batch of 1 to 16.
    """
    return Path(shutil.copytree(saved_project, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture(scope="session")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary saved program; never written to."""
    from tests.crafted import save_ordinary

    return made_once(tmp_path_factory, "ordinary", lambda folder: save_ordinary(folder / "net.pt2")) / "net.pt2"


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    return tmp_path / "SENTINEL"


@pytest.fixture(scope="session")
def made(saved_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its ONNX file, the export's report and the bundle of all that. For reading."""
    from typer.testing import CliRunner

    import normdeploy
    from normdeploy.cli.app import app

    def make(folder: Path) -> None:
        shutil.copy(saved_project / "model.pt", folder)
        files = [str(folder / name) for name in ("model.pt", "model.onnx", "export.json")]
        arguments = ["export", files[0], "-o", files[1], "--report", files[2], "-q"]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        made = normdeploy.package(
            folder / "model.onnx",
            folder / "bundle",
            source=folder / "model.pt",
            report_from=folder / "export.json",
            instances=2,
        )
        assert made

    return made_once(tmp_path_factory, "made", make)


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made / "bundle", tmp_path / "bundle"))


@pytest.fixture
def web_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Node.js find onnxruntime-web in the environment of the tests, where make puts it."""
    folders = (os.environ.get("NODE_PATH"), os.path.join(sys.prefix, "node_modules"))
    monkeypatch.setenv("NODE_PATH", os.pathsep.join(filter(None, folders)))


@pytest.fixture
def web(web_path: None) -> None:
    """Skip a test if Node.js or onnxruntime-web is missing."""
    if reason := explain_missing_web():
        pytest.skip(reason)
