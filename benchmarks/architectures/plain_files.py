"""Write the files of torch's own exporter for hand-made architectures, as models for other benchmarks.

    python -m benchmarks.architectures.plain_files FOLDER [--count 60]

The architectures are spread evenly over the catalogue. Existing files stay, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from .catalogue import ARCHITECTURES, Architecture, declare_torchvision, made, samples
from .measure import dynamic


def main() -> None:
    """Write the files; an architecture that torch can't export is named and skipped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures.plain_files")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=60)
    wanted = parser.parse_args()
    declare_torchvision()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    for architecture in choose_evenly(wanted.count):
        path = wanted.folder / f"{re.sub('[^a-zA-Z0-9]+', '_', architecture.name).strip('_')}.onnx"
        if path.exists():
            continue
        try:
            write_plain_file(architecture, path)
        except Exception as error:
            print(f"{architecture.name}: {type(error).__name__}", flush=True)
        else:
            print(f"{architecture.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def choose_evenly(count: int) -> list[Architecture]:
    """Choose entries of the catalogue at equal distances."""
    count = min(count, len(ARCHITECTURES))
    return [ARCHITECTURES[i * len(ARCHITECTURES) // count] for i in range(count)]


def write_plain_file(architecture: Architecture, path: Path) -> None:
    """Export an architecture with ``torch.onnx.export``, with its ranges of dims and with its weights in the file."""
    torch.onnx.export(
        made(architecture),
        (),
        path,
        kwargs=samples.draw(architecture),
        dynamic_shapes=dynamic(architecture),
        dynamo=True,
        verbose=False,
        external_data=False,
    )


if __name__ == "__main__":
    main()
