"""Where a writer puts its ONNX files: one archive for each exporter, with a line about each file (what
``benchmarks.corpus.entry`` reads).

Runs in the exporters' own environments: it imports onnx alone.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import onnx

LN, RMS, IN, GN = "LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization"
BN, FOLDED = "BatchNormalization", "folded"

Expect = tuple[str, ...]  # one entry for each norm; empty: a lookalike, to be refused
Shape = tuple[int | None, ...]  # None: dynamic

_SIZES = (3, 2)  # of dynamic dims; the file is tried at both


class Saver:
    """Collects the files of one exporter, and writes them to ``folder/exporter.zip``."""

    def __init__(self, folder: str, exporter: str) -> None:
        self.folder, self.exporter = Path(folder), exporter
        self.files: dict[str, bytes] = {}
        self.lines: list[dict[str, Any]] = []

    def add(self, name: str, proto: onnx.ModelProto, shape: Shape, expect: Expect, dtype: str = "float32") -> None:
        """Take one file, whose only input is of ``shape``.

        Raises:
            onnx.checker.ValidationError: the exporter wrote no valid model.
        """
        onnx.checker.check_model(proto, full_check=True)
        opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
        words = [name, str(opset), "dynamic" if None in shape else "static", dtype]
        stem = "-".join([self.exporter, *words]).replace(" ", "_")
        self.files[f"{stem}.onnx"] = proto.SerializeToString(deterministic=True)
        self.lines.append(
            {
                "name": stem,
                "exporter": self.exporter,
                "spelling": name,
                "opset": opset,
                "dynamic": None in shape,
                "dtype": dtype,
                "expect": expect,
                "lookalike": not expect,
                "shapes": [[[n if d is None else d for d in shape]] for n in _SIZES[: 2 if None in shape else 1]],
            }
        )

    def finish(self) -> None:
        """Write the archive; the same files give the same bytes."""
        self.files["manifest.json"] = json.dumps(self.lines, indent=1).encode()
        with zipfile.ZipFile(self.folder / f"{self.exporter}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.files.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        print(f"{len(self.lines)} files of {self.exporter}")
