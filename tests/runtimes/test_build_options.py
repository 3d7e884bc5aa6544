"""Options of builds reach the library's configuration."""

from __future__ import annotations

import subprocess
import sys

import pytest

CONFIGURE = """
import os
os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
from pathlib import Path
import tensorrt_rtx as trt
from polygraphy.backend.trt import CreateConfig
from normdeploy.runtimes.build_options import config_arguments
builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
config = CreateConfig(**config_arguments(trt, {}, Path()))(builder, builder.create_network(0))
print(config.profiling_verbosity.name)
"""


def test_build_keeps_the_details_of_layers() -> None:
    """`inspect` reads them. Without them, an engine's inspector states only the names of layers."""
    pytest.importorskip("tensorrt_rtx")
    done = subprocess.run([sys.executable, "-c", CONFIGURE], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "DETAILED"
