"""normdeploy: PyTorch models in onnxruntime and TensorRT with every normalization fused or folded, and proved.

The verbs of the command line are functions here (``__all__``). Importing this package imports none of the heavy
libraries; the first use of a verb does. It also switches off the telemetry of an onnxruntime that is imported after it
(docs/privacy.md).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .findings.rendering import set_renderers
from .version import __version__

if TYPE_CHECKING:
    from .api.bench import bench
    from .api.bisect import bisect
    from .api.export import export
    from .api.inspect import inspect
    from .api.optimize import optimize
    from .api.parts import export_parts, verify_parts
    from .api.verify import verify
    from .engines.engine_build import build
    from .verbs.check.check_files import check
    from .verbs.package.bundle_writer import package
    from .verbs.recheck.bundle_recheck import recheck
    from .verbs.run import open_runner, run

__all__ = [
    "__version__",
    "bench",
    "bisect",
    "build",
    "check",
    "export",
    "export_parts",
    "inspect",
    "open_runner",
    "optimize",
    "package",
    "recheck",
    "run",
    "verify",
    "verify_parts",
]

# onnxruntime 1.31 reads it while it is imported, and then writes a device id into the user's cache folder and reports
# to its maker; ort.disable_telemetry_events() comes too late. A value that the user has set stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    **{verb: f"api.{verb}" for verb in ("bench", "bisect", "export", "inspect", "optimize", "verify")},
    **{
        "export_parts": "api.parts",
        "verify_parts": "api.parts",
        "build": "engines.engine_build",
        "check": "verbs.check.check_files",
    },
    **{
        "open_runner": "verbs.run",
        "run": "verbs.run",
        "package": "verbs.package.bundle_writer",
        "recheck": "verbs.recheck.bundle_recheck",
    },
}


def _render_text(result: Any) -> str:
    from .reports.result_display import render_text

    return render_text(result)


def _render_html(result: Any) -> str:
    from .reports.result_display import render_html

    return render_html(result)


set_renderers(_render_text, _render_html)


def __dir__() -> list[str]:
    """The verbs, for ``dir`` and for completion, before the first of them is used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
