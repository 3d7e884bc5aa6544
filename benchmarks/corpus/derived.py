"""Make files that another tool changed: partly half precision, or optimized by onnxruntime's offline optimizer.

Both are made from files of torch's exporter, by tools that are part of onnxruntime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime as ort
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel

from .entry import Entry, nodes

# Ops that are commonly kept in float32 in a half-precision model
_KEPT_WIDE = {
    "statistics wide": ["ReduceMean", "ReduceSum", "Pow", "Sqrt", "Div", "Reciprocal"],
    "all half": [],
}


def derived(files: Iterable[tuple[Entry, onnx.ModelProto]]) -> Iterator[tuple[Entry, onnx.ModelProto]]:
    """Yield a mixed-precision file for every fifth float32 file, and the file of onnxruntime's optimizer for another
    fifth.

    Yields:
        entries and files.
    """
    for number, (entry, proto) in enumerate(files):
        if entry.dtype != "float32" or entry.lookalike:
            continue
        made = _mixed(entry, proto, number) if number % 5 == 0 else _offline(entry, proto) if number % 5 == 1 else None
        if made is not None:
            yield made


def _mixed(entry: Entry, proto: onnx.ModelProto, number: int) -> tuple[Entry, onnx.ModelProto] | None:
    words = list(_KEPT_WIDE)[number % len(_KEPT_WIDE)]
    keep_io = number % 3 != 0
    try:
        half = convert_float_to_float16(proto, keep_io_types=keep_io, op_block_list=_KEPT_WIDE[words])
        # The Casts are at the end.
        OnnxModel(half).topological_sort()
        onnx.checker.check_model(half, full_check=True)
    # The converter gets some graphs wrong.
    except Exception as error:
        print(f"float16 conversion of {entry.name}: {type(error).__name__}: {str(error)[:80]}")
        return None
    name = f"{entry.name}-{words.replace(' ', '_')}{'-float_io' if keep_io else ''}"
    return replace(entry, name=name, exporter="onnxruntime float16 converter", dtype="mixed", limit=None), half


def _offline(entry: Entry, proto: onnx.ModelProto) -> tuple[Entry, onnx.ModelProto] | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(path)
        try:
            ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
            optimized = onnx.load(path)
        except Exception as error:
            print(f"onnxruntime offline of {entry.name}: {type(error).__name__}: {str(error)[:80]}")
            return None
    made = replace(
        entry,
        name=f"{entry.name}-extended",
        exporter="onnxruntime extended",
        limit=nodes(optimized),
    )
    return replace(made, reference=entry.name), optimized
