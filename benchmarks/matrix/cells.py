"""Run one cell: its Python, its environment, its tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-matrix"
TORCH = ("2.11", "2.13", "2.15")
PYTHON = ("3.11", "3.12", "3.13")
CORE = (
    "test_export",
    "storage/test_export_record",
    "loading/test_loading",
    "loading/test_live_module",
    "loading/test_state_dicts",
    "test_models",
    "test_raw_export",
    "loading/test_train_mode_checks",
    "loading/test_loading_trust",
)
"""What hangs on torch and its exporter: loading without trust, train mode, export of every norm of `models`, what torch
itself writes."""
_TOLD = ("torch", "numpy", "onnx", "onnxruntime-gpu", "onnxruntime")
_VERSIONS = f"""
import importlib.metadata, json, platform
found = {{}}
for name in {_TOLD}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found | {{"python": platform.python_version()}}))
"""


@dataclass(frozen=True)
class Cell:
    """Result for one torch with one Python.

    Attributes:
        reason: why it was not run; "" if it was.
        seconds: of the tests alone.
    """

    torch: str
    python: str
    reason: str = ""
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    day: str = ""

    def __bool__(self) -> bool:
        return not self.failed and (bool(self.passed) or bool(self.reason))


def lock_of(torch: str) -> Path:
    """Return the lock file of a torch.

    Returns:
        path.
    """
    return Path(__file__).with_name(f"torch-{torch}.txt")


def write_lock(uv: str, torch: str) -> None:
    """Resolve the requirements of the project and the core tests with this torch, for every Python at once."""
    wanted = f"torch=={torch}.*\npytest>=8\nhypothesis\n"
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        PYTHON[0],
        "--no-header",
        "--no-annotate",
    ]
    command += ["--extra", "report", "--extra", "rtx", "--output-file", str(lock_of(torch)), "pyproject.toml", "-"]
    subprocess.run(command, cwd=ROOT, input=wanted, text=True, check=True)


def tool() -> str:
    """Find uv on the path, or install it for this alone. It links files from its cache, so that cells share common
    files.

    Returns:
        path.
    """
    if found := shutil.which("uv"):
        return found
    folder = ENVIRONMENTS / "tools"
    if not (folder / "bin" / "uv").is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    return str(folder / "bin" / "uv")


def python_of(version: str) -> str | None:
    """Find a working Python of a version: on the path, or one of pyenv's.

    Returns:
        path, or None.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    others = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for candidate in (shutil.which(f"python{version}"), *map(str, others)):
        if candidate is None:
            continue
        told = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        # pyenv's shims exist even for versions that are not selected.
        if told.returncode == 0 and told.stdout.strip() == version:
            return candidate
    return None


def run(uv: str, torch: str, python: str, *, keep: bool = False) -> Cell:
    """Install one cell separately and run the core tests of this checkout in it.

    Args:
        keep: keep the environment (6 GB, mostly shared with uv's cache).

    Returns:
        the result.
    """
    day = time.strftime("%Y-%m-%d")
    interpreter = python_of(python)
    if interpreter is None:
        return Cell(torch, python, f"there is no Python {python} on this machine", day=day)
    folder = ENVIRONMENTS / f"torch-{torch}-python-{python}"
    own = folder / "bin" / "python"
    try:
        for command in (
            ["venv", "--quiet", "--clear", "--python", interpreter, folder],
            ["pip", "sync", "--quiet", "--python", own, lock_of(torch)],
            ["pip", "install", "--quiet", "--no-deps", "--python", own, "--editable", ROOT],
        ):
            done = subprocess.run([uv, *command], cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                return Cell(torch, python, f"it can't be installed: {' '.join(done.stderr.split())[:300]}", day=day)
        versions = json.loads(subprocess.run([own, "-c", _VERSIONS], capture_output=True, text=True, check=True).stdout)
        return _tested(own, folder / "results.xml", Cell(torch, python, versions=versions, day=day))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _tested(python: Path, results: Path, cell: Cell) -> Cell:
    files = [f"tests/{name}.py" for name in CORE]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "true", "ORT_DISABLE_TELEMETRY": "1"}
    environment.pop("PYTHONPATH", None)
    start = time.perf_counter()
    subprocess.run([python, "-m", "pytest", f"--junitxml={results}", *files], cwd=ROOT, env=environment)
    seconds = time.perf_counter() - start
    if not results.is_file():
        return Cell(
            cell.torch, cell.python, versions=cell.versions, failed=("pytest ended without results",), day=cell.day
        )
    cases = list(ET.parse(results).getroot().iter("testcase"))
    failed = tuple(
        f"{c.get('classname')}::{c.get('name')}"
        for c in cases
        if c.find("failure") is not None or c.find("error") is not None
    )
    skipped = sum(c.find("skipped") is not None for c in cases)
    passed = len(cases) - len(failed) - skipped
    return Cell(cell.torch, cell.python, "", passed, skipped, failed, seconds, cell.versions, cell.day)
