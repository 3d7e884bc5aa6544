"""The plugin where pip installed it: a project of its own (tests/guests/parity_project) in an environment of its own,
with two releases of pytest, alone and with pytest-xdist.

The environment borrows the libraries of this environment, so that pip downloads at most a release of pytest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.forked import ROOT

# Release of pytest that pip fetches for ``make test-pytest``. The other release is that of this environment.
OLDER = "8.4.2"
FAILURES = {
    "test_wrong_epsilon": "has epsilon 0.01, but the model has 1e-05",
    "test_transposed_weight": "linear, Gemm node_linear: ",
    "test_wrong_at_other_batches": "Add",
}

pytestmark = pytest.mark.slow


def _run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """The output of a command, which sees nothing of this checkout."""
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_XDIST_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", params=["own", pytest.param(OLDER, marks=pytest.mark.pytest8)])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment into which pip installed normdeploy, the project, and a release of pytest."""
    folder = tmp_path_factory.mktemp("environment")
    source = folder / "normdeploy-source"
    for name in ("normdeploy", "plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    project = shutil.copytree(ROOT / "tests" / "guests" / "parity_project", folder / "project")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    made = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", _site(made))
    _run(*pip, "--no-index", "--no-build-isolation", source, project, cwd=folder)
    if request.param != "own":
        _run(*pip, f"pytest=={request.param}", cwd=folder)
    paths = dict.fromkeys(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    (_site(made) / "lent.pth").write_text("\n".join(paths or [sysconfig.get_path("purelib")]))
    if request.param != "own":
        assert _run(made, "-m", "pytest", "--version", cwd=folder).split()[-1] == request.param
    return made


def _site(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "tests" / "guests" / "parity_project", tmp_path / "project")
    (tmp_path / "project" / "parity_project.py").unlink()
    return tmp_path / "project"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_project_passes_and_fails_with_the_culprits(python: Path, project: Path, workers: tuple[str, ...]) -> None:
    files = ("--normdeploy-report=r.json", "--junitxml=junit.xml")
    said = _run(python, "-m", "pytest", "-p", "no:logging", *workers, *files, cwd=project, code=1)
    assert "3 failed, 2 passed" in said
    where = _run(python, "-c", "import normdeploy; print(normdeploy.__file__)", cwd=project)
    assert Path(where.strip()).is_relative_to(_site(python))
    document = json.loads((project / "r.json").read_text())
    verdicts = {verdict["test"].partition("::")[2]: verdict for verdict in document["verdicts"]}
    assert set(verdicts) == {"test_right_file", "test_norms", *FAILURES}
    assert {test for test, verdict in verdicts.items() if not verdict["ok"]} == set(FAILURES)
    junit = (project / "junit.xml").read_text()
    for test, culprit in FAILURES.items():
        verdict = verdicts[test]
        assert culprit in verdict["culprit"]
        assert f"E       culprit: {verdict['culprit']}" in said
        assert verdict["error"] > verdict["allowed"] > 0
    assert "batch=" in verdicts["test_wrong_at_other_batches"]["case"]
    assert len(re.findall('name="normdeploy.verdict"', junit)) == 5
