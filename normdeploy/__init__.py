"""normdeploy: PyTorch models in onnxruntime and TensorRT with every normalization fused or folded, and proved.

The verbs of the command line are functions here (``__all__``). Importing this package imports none of the heavy libraries; the first use
of a verb does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .check import check
    from .deploy import bench, bisect, build, export, inspect, open_runner, optimize, run, verify
    from .package import package
    from .recheck import recheck

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "bench",
    "bisect",
    "build",
    "check",
    "export",
    "inspect",
    "open_runner",
    "optimize",
    "package",
    "recheck",
    "run",
    "verify",
]

_VERBS = frozenset(__all__) - {"__version__"}
_ELSEWHERE = {"check", "package", "recheck"}  # in modules of the same name; the others are in ``deploy``


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(f".{name}", __name__), name)
    if name in _VERBS:
        from . import deploy

        return getattr(deploy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps ``normdeploy.export`` the verb: importing the submodule of the same name would bind that name to the submodule."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _VERBS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
