"""What makes a run of all tests quick: the order of the files, and what is made once where many tests need it."""

from __future__ import annotations

import copy
import fcntl
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LONGEST = (
    "rewriting/test_rewriting_properties.py",
    "plugins/test_emulated.py",
    "rewriting/test_rewriting_spellings.py",
    "storage/test_storage_robustness.py",
    "test_docs.py",
    "plugins/test_aot.py",
    "graphs/test_simplification.py",
    "recognition/test_affine_chains.py",
    "cli/test_app.py",
    "rewriting/test_branch_merging.py",
    "verbs/bisect/test_file_bisection.py",
    "reports/test_report_page.py",
    "rewriting/test_attention_fusion.py",
    "verbs/build/test_build_function.py",
)
"""The test files that take longest, the longest first (docs/explanation/testing.md): a worker that got one at the end
would leave the other with nothing to do."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first worker to ask for it fills, for all workers of a run. For reading."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def read_tables_once(patch: pytest.MonkeyPatch) -> None:
    """torch's exporter reads its tables for each export, which takes two thirds of that of a small model; here once.

    It parses the source of every op of onnxscript, and looks every op of torch up by its name. Neither changes between
    two exports but for ops that are registered in between, and these are seen. Each export has a registry of its own,
    to which it may add.
    """
    import torch

    try:
        from torch._export import utils
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        look_up = utils._materialize_cpp_cia_ops
    except (ImportError, AttributeError):  # another torch, which may take its time
        return
    known = set[str]()
    from_torchlib = ONNXRegistry.from_torchlib

    # The exporter lists torchvision's ops only where this package is found and its ops are declared.
    @functools.cache
    def read(has_torchvision: bool, has_ops: bool, *args: Any, **options: Any) -> ONNXRegistry:
        return from_torchlib(*args, **options)

    def registry(*args: Any, **options: Any) -> ONNXRegistry:
        has_torchvision = importlib.util.find_spec("torchvision") is not None
        made = copy.copy(read(has_torchvision, hasattr(torch.ops.torchvision, "nms"), *args, **options))
        made.functions = {op: list(found) for op, found in made.functions.items()}
        return made

    def look_up_new() -> None:
        names = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if not names <= known:
            look_up()
            known.update(names)

    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(registry))
    patch.setattr(utils, "_materialize_cpp_cia_ops", look_up_new)
