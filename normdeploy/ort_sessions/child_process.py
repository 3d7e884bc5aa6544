"""Starts processes of this package. Libraries that may abort run in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parents[2]
# Where this variable is set, each session of onnxruntime is opened and run in a child first, whatever the file states.
REHEARSE_ALL = "NORMDEPLOY_REHEARSE_ALL"


def module_command(module: str) -> tuple[str, ...]:
    """What runs a module of this package; -P: a file of the working directory is never imported."""
    return sys.executable, "-P", "-m", module


def child_environment() -> dict[str, str]:
    """The environment in which a child finds the very package that runs here, installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_HERE), os.environ.get("PYTHONPATH")]))}
