"""The interpreter's process: TRITON_INTERPRET is set there alone, so that this process can compile the same kernels
ahead of time."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.quick import made_once

MISSING = "triton is not installed: the kernels can't be tried (pip install triton)"
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if importlib.util.find_spec("triton") is None:
        terminalreporter.write_line(f"tests/plugins not run: {MISSING}")


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where kernels are interpreted: ``interpreter(function, *arguments)``."""
    import numpy
    import triton

    if (
        tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
        and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
    ):
        pytest.skip(
            f"Triton {triton.__version__}'s interpreter breaks with NumPy {numpy.__version__}: triton>=3.7 or numpy<2.4"
            " is needed"
        )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _interpret) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "kernels", lambda folder: None)  # which all workers fill


@pytest.fixture(scope="module")
def cache(kernels: Path) -> Iterator[Path]:
    """Kernels are kept in a folder of this run's own, so that each is compiled and not found, but once for all
    tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMDEPLOY_CACHE", str(kernels))
        patch.setenv("TRITON_CACHE_DIR", str(kernels / "triton"))
        yield kernels
