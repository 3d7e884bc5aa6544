"""normdeploy: PyTorch models in onnxruntime and TensorRT with every normalization fused or folded, and proved.

Each verb of the command line is a function of this package (``__all__``). Importing the package loads no heavy library.
The first use of a verb loads the libraries that this verb needs. The import also turns off the telemetry of an
onnxruntime imported later (docs/reference/privacy.md).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .verbs.bench.bench_function import bench
    from .verbs.bisect.bisect_function import bisect
    from .verbs.build.build_function import build
    from .verbs.check.check_function import check
    from .verbs.export.export_function import export
    from .verbs.export.genai_export import export_genai
    from .verbs.export.parts_export import export_parts
    from .verbs.inspect.inspect_engine_function import inspect_engine
    from .verbs.inspect.inspect_function import inspect
    from .verbs.optimize.optimize_function import optimize
    from .verbs.package.package_function import package
    from .verbs.prove.prove_function import prove
    from .verbs.recheck.recheck_function import recheck
    from .verbs.run.run_function import open_runner, run
    from .verbs.verify.parts_comparison import verify_parts
    from .verbs.verify.verify_function import verify

__all__ = [
    "__version__",
    "bench",
    "bisect",
    "build",
    "check",
    "export",
    "export_genai",
    "export_parts",
    "inspect",
    "inspect_engine",
    "open_runner",
    "optimize",
    "package",
    "prove",
    "recheck",
    "run",
    "verify",
    "verify_parts",
]

# onnxruntime 1.31 reads this variable at import. If the variable is not set, the import writes a device id into the
# user's cache folder and reports to the vendor. ort.disable_telemetry_events() comes too late. A value that the user
# set is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_VERBS = (
    "bench",
    "bisect",
    "build",
    "check",
    "export",
    "inspect",
    "optimize",
    "package",
    "prove",
    "recheck",
    "run",
    "verify",
)
_HOMES = {
    **{verb: f"verbs.{verb}.{verb}_function" for verb in _VERBS},
    "export_genai": "verbs.export.genai_export",
    "export_parts": "verbs.export.parts_export",
    "inspect_engine": "verbs.inspect.inspect_engine_function",
    "open_runner": "verbs.run.run_function",
    "verify_parts": "verbs.verify.parts_comparison",
}


def __dir__() -> list[str]:
    """List the verbs, for ``dir`` and for completion, even before a verb is used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
