"""One file of the corpus: who wrote it, what it takes, what should become of it."""

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
    """``expect`` is as in ``models.case.Case``; ``shapes`` holds the inputs' concrete shapes, at each size that the
    file is tried at."""

    name: str
    exporter: str
    spelling: str
    opset: int
    dynamic: bool
    dtype: str
    expect: tuple[str, ...]
    lookalike: bool  # to be refused, or (with an ``expect``) a trap: to be rewritten only so
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    highs: tuple[int, ...] = ()  # integer inputs are drawn below these
    survivors: bool = False  # an inner tensor of the norm is used elsewhere, so that reductions stay
    limit: int | None = None  # nodes of the same model as its exporter's own optimizer leaves it
    reference: str = ""  # the file that this one was made of, and must equal

    @property
    def expressible(self) -> bool:
        return bool(self.expect)

    def feeds(self, proto: onnx.ModelProto) -> Iterator[dict[str, np.ndarray]]:
        """Inputs: random at each size, small ones (where epsilon counts) and zeros (where it must have survived)."""
        for number, shapes in enumerate(self.shapes):
            yield self._feeds(proto, shapes, number, 1.0)
        # 1e-4 squared is nothing in half precision: what comes out then hangs on where a runtime rounds
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
    return json.dumps([dataclasses.asdict(e) for e in entries], indent=1)


def from_json(text: str) -> list[Entry]:
    """Entries as ``as_json`` or a foreign writer wrote them."""
    return [Entry(**{k: _tuples(v) for k, v in line.items()}) for line in json.loads(text)]


def _tuples(value: object) -> object:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def foreign() -> Iterator[tuple[Entry, onnx.ModelProto]]:
    """The files that other frameworks' exporters wrote, kept beside their writers."""
    for path in sorted(FOREIGN.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            for entry in from_json(archive.read(MANIFEST).decode()):
                yield entry, onnx.load_from_string(archive.read(f"{entry.name}.onnx"))


def nodes(proto: onnx.ModelProto) -> int:
    """Nodes of the main graph; constants are not counted, and a BatchNormalization as the scale and the shift that it
    is."""
    return sum(1 + (n.op_type == "BatchNormalization") for n in proto.graph.node if n.op_type != "Constant")
