"""Describe one file of the corpus: its exporter, its inputs, and the expected outcome."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

FOREIGN = Path(__file__).parent / "foreign"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """One file.

    Attributes:
        expect: as in ``models.case.Case``.
        lookalike: True if the file must be refused. If it has an ``expect``, it is a trap that may be rewritten only to
            the expected node.
        shapes: concrete shapes of the inputs, for each size at which the file is run.
        highs: upper bounds, below which integer inputs are drawn.
        survivors: True if an inner tensor of the norm has other readers, so that reductions must remain.
        limit: number of nodes after the exporter's own optimizer.
        reference: file from which this file was made, and with which its outputs must agree.
    """

    name: str
    exporter: str
    spelling: str
    opset: int
    dynamic: bool
    dtype: str
    expect: tuple[str, ...]
    lookalike: bool
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    highs: tuple[int, ...] = ()
    survivors: bool = False
    limit: int | None = None
    reference: str = ""

    @property
    def expressible(self) -> bool:
        """Return True if standard ONNX can express the norms."""
        return bool(self.expect)

    def feeds(self, proto: onnx.ModelProto) -> Iterator[dict[str, np.ndarray]]:
        """Yield inputs: random ones at each size, small ones (for which epsilon matters) and zeros (for which it must
        have survived).

        Yields:
            name -> array.
        """
        for number, shapes in enumerate(self.shapes):
            yield self._feeds(proto, shapes, number, 1.0)
        # 1e-4 squared is zero in half precision; the result would then depend on the runtime's rounding.
        yield self._feeds(proto, self.shapes[0], 7, 1e-4 if self.dtype == "float32" else 1e-2)
        yield self._feeds(proto, self.shapes[0], 8, 0.0)

    def _feeds(
        self, proto: onnx.ModelProto, shapes: Iterable[tuple[int, ...]], seed: int, scale: float
    ) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        feeds = {}
        for i, (info, shape) in enumerate(zip(proto.graph.input, shapes, strict=True)):
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            if dtype.kind == "f" or dtype == ml_dtypes.bfloat16:
                feeds[info.name] = (scale * rng.standard_normal(shape)).astype(dtype)
            else:
                feeds[info.name] = rng.integers(0, self.highs[i] if self.highs else 2, shape).astype(dtype)
        return feeds


def as_json(entries: Iterable[Entry]) -> str:
    """Serialize entries.

    Returns:
        JSON text.
    """
    return json.dumps([dataclasses.asdict(e) for e in entries], indent=1)


def from_json(text: str) -> list[Entry]:
    """Parse entries that ``as_json`` or a foreign writer wrote.

    Returns:
        entries.
    """
    return [Entry(**{k: _tuples(v) for k, v in line.items()}) for line in json.loads(text)]


def _tuples(value: object) -> object:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def foreign() -> Iterator[tuple[Entry, onnx.ModelProto]]:
    """Yield the files that other frameworks' exporters wrote, stored next to their writers.

    Yields:
        entries and files.
    """
    for path in sorted(FOREIGN.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            for entry in from_json(archive.read(MANIFEST).decode()):
                yield entry, onnx.load_from_string(archive.read(f"{entry.name}.onnx"))


def nodes(proto: onnx.ModelProto) -> int:
    """Count the nodes of the main graph, without constants; a BatchNormalization counts as its scale and its shift.

    Returns:
        number of nodes.
    """
    return sum(1 + (n.op_type == "BatchNormalization") for n in proto.graph.node if n.op_type != "Constant")
