"""normdeploy: PyTorch models in onnxruntime and TensorRT with every normalization fused or folded, and proved.

The verbs of the command line are functions here (``__all__``). Importing this package imports none of the heavy libraries; the first use
of a verb does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundles.package import package
    from .bundles.recheck import recheck
    from .deploy import bench, bisect, build, export, inspect, open_runner, optimize, run, verify
    from .guard.check import check

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

_ELSEWHERE = {"check": "guard.check", "package": "bundles.package", "recheck": "bundles.recheck"}  # the others are in ``deploy``


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f".{_ELSEWHERE.get(name, 'deploy')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
