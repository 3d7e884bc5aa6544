"""Releases of NVIDIA's bindings: the one that is installed, and all of the registry, fetched by pip into
``.venv-tensorrt`` (python -m tests.plugins.bindings.wheels; ``make test-tensorrt`` does it)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / ".venv-tensorrt"
# CUDA 13's package begins with 10.13.2; releases before it are taken from CUDA 12's
PACKAGES = ("tensorrt_cu13_bindings", "tensorrt_cu12_bindings")
OLDEST = (10, 9)


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def installed() -> tuple[str, Path] | None:
    """Version and site folder of the bindings that this environment has."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    if spec is None or spec.origin is None:
        return None
    return importlib.metadata.version("tensorrt_cu13_bindings"), Path(spec.origin).parents[1]


def fetched() -> dict[str, Path]:
    """The releases in ``.venv-tensorrt``, oldest first."""
    found = {p.name: p for p in (FOLDER / "bindings").glob("*") if (p / "tensorrt_bindings").is_dir()}
    return {version: found[version] for version in sorted(found, key=number)}


def fetch() -> None:
    """Every release of the registry from OLDEST on. Raises RuntimeError where the registry names none."""
    wanted: dict[str, str] = {}
    for package in PACKAGES:
        for version in _versions(package):
            if number(version) >= OLDEST:
                wanted.setdefault(version, package)
    if not wanted:
        raise RuntimeError(f"no release of {PACKAGES[0]} is on the registry that pip asks, or pip can't reach it")
    for version, package in sorted(wanted.items(), key=lambda item: number(item[0])):
        target = FOLDER / "bindings" / version
        if target.is_dir():
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
            _pip(*command, f"{package}=={version}")
            (wheel,) = Path(folder).glob("*.whl")
            part = target.with_name(f".{version}")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part)
            part.rename(target)
        print(f"{package} {version}", flush=True)


def _versions(package: str) -> list[str]:
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", package))
    return listed.group(1).split(", ") if listed else []


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)}: {ended.stderr.strip()[-500:]}")
    return ended.stdout


if __name__ == "__main__":
    fetch()
