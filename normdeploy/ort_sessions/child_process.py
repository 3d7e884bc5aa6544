"""Build the command and environment that run a module of this package in a child process, because some libraries may
abort their process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parents[2]
# Name of an environment variable. If the variable is set, every onnxruntime session is first opened and run in a child
# process, whatever the file contains.
REHEARSE_ALL = "NORMDEPLOY_REHEARSE_ALL"


def module_command(module: str) -> tuple[str, ...]:
    """Return the command line that runs a module of this package.

    Returns: the arguments. -P keeps Python from importing files of the working directory.
    """
    return sys.executable, "-P", "-m", module


def child_environment() -> dict[str, str]:
    """Return environment variables with which a child process imports the same copy of this package, installed or not.

    Returns: the current environment with this package's folder first in PYTHONPATH.
    """
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_HERE), os.environ.get("PYTHONPATH")]))}
