"""Write ONNX files of an exporter into one archive, with a line about each file (read by ``benchmarks.corpus.entry``).

Runs in the exporters' own environments, so it imports onnx alone.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import onnx

LN, RMS, IN, GN = "LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization"
BN, FOLDED = "BatchNormalization", "folded"

# One entry for each norm; empty for a lookalike, which must be refused.
Expect = tuple[str, ...]
# None is dynamic.
Shape = tuple[int | None, ...]

# Sizes of dynamic dims; the file is tried at both.
_SIZES = (3, 2)


class Saver:
    """Collect the files of one exporter, and write them to ``folder/exporter.zip``."""

    def __init__(self, folder: str, exporter: str) -> None:
        self.folder, self.exporter = Path(folder), exporter
        self.files: dict[str, bytes] = {}
        self.lines: list[dict[str, Any]] = []

    def add(self, name: str, proto: onnx.ModelProto, shape: Shape, expect: Expect, dtype: str = "float32") -> None:
        """Add one file, whose only input has the shape ``shape``.

        Raises:
            onnx.checker.ValidationError: the exporter wrote an invalid model.
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
        """Write the archive; equal files give equal bytes."""
        self.files["manifest.json"] = json.dumps(self.lines, indent=1).encode()
        with zipfile.ZipFile(self.folder / f"{self.exporter}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.files.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        print(f"{len(self.lines)} files of {self.exporter}")
