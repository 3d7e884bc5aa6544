"""The wheel and the sdist: complete, well described, and a program where they are installed.

Built without isolation by what the extra ``test`` installs, from a copy of what git would commit; nothing is
downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import onnx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import normdeploy
from tests.forked import ROOT

SHIPPED = {"normdeploy": "normdeploy", "plugins": "normdeploy_plugins"}
"""Folders of the repository that are installed, and the packages that they are then."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints; it sees nothing of this checkout but what it is told."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and name.split("/")[0] not in ("benchmarks", "docs", "tests", "models"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, source, cwd=made)
    return made


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def shipped() -> set[str]:
    """What the wheel has to hold, as paths in it: every file of the installed folders, and the checker."""
    found = set()
    for folder, package in SHIPPED.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return found | {"normdeploy_check.py"}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_twine_has_nothing_to_say(built: Path) -> None:
    told = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built, NO_COLOR="1")
    assert told.count("PASSED") == 2


def test_wheel_holds_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == shipped()
    assert {
        "normdeploy/py.typed",
        "normdeploy/reports/templates/report.html",
        "normdeploy_plugins/layer_norm.py",
    } <= held


def test_sdist_holds_licence_and_readme(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= names


def test_metadata(wheel: Path) -> None:
    told = metadata(wheel)
    assert told["License-Expression"] == "Apache-2.0"
    assert told["License-File"] == "LICENSE"
    assert told["Version"] == normdeploy.__version__
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        told.get_all("Classifier") or ()
    )
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_changelog_begins_with_this_version() -> None:
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert normdeploy.__version__ in heads[:2]


def test_installed_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The libraries are lent from the environment of the tests, after its own: normdeploy itself comes from the
    wheel."""
    home = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=tmp_path)
    python, script = home / "bin" / "python", home / "bin" / "normdeploy"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        wheel,
        cwd=tmp_path,
    )
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    paths = dict.fromkeys(path for path in sys.path if path and Path(path).name in ("site-packages", "dist-packages"))
    (own / "lent.pth").write_text("\n".join(paths or [sysconfig.get_path("purelib")]))

    assert run(script, "--version", cwd=tmp_path).split() == ["normdeploy", normdeploy.__version__]
    model = '<ir_version: 10, opset_import: ["": 21]> g (float[2,4] x) => (float[2,4] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(model), tmp_path / "model.onnx")
    run(script, "optimize", "model.onnx", "-o", "out.onnx", "-q", cwd=tmp_path)
    assert onnx.load(tmp_path / "out.onnx").graph.node
    seen = (
        "import normdeploy, normdeploy_plugins; from normdeploy.forms import measured_forms; from pathlib import Path; "
        "print(normdeploy.__file__, normdeploy_plugins.__file__); assert measured_forms.load_table()"
    )
    for file in run(python, "-c", seen, cwd=tmp_path).split():
        assert Path(file).is_relative_to(own)


def test_constraints_pin_every_dependency() -> None:
    """Of all extras but TensorRT, which is for machines with a GPU."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pinned[canonicalize_name(name)] = version
    wanted = [r for extra, given in PROJECT["optional-dependencies"].items() if extra != "tensorrt" for r in given]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *wanted]):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize(
    "lock", sorted((ROOT / "benchmarks" / "matrix").glob("torch-*.txt")), ids=lambda path: path.stem
)
def test_locks_of_the_matrix_hold_every_dependency(lock: Path) -> None:
    """They are written anew by ``python -m benchmarks.matrix --lock``."""
    pinned: dict[str, list[str]] = {}
    for line in lock.read_text().splitlines():
        requirement = Requirement(line)
        pinned.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier).removeprefix("=="))
    for requirement in map(Requirement, PROJECT["dependencies"]):
        versions = pinned[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement
    assert pinned["torch"][0].startswith(lock.stem.removeprefix("torch-"))
