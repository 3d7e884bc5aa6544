"""Export the models of ``models`` with torch's two exporters: dynamo (with and without its optimizer) and
TorchScript's.

Every model goes through each exporter once, with a random opset, type and choice of dynamic dims.
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import onnx
import onnx.inliner
import torch

from models import registry
from models.case import Case

from .entry import Entry, nodes

DYNAMO_OPSETS, SCRIPT_OPSETS = range(18, 26), range(11, 18)
SURVIVORS = ("reused_", "residual_stream")
_DTYPES = ("float32",) * 4 + ("float16",) * 2 + ("bfloat16",)
_NARROW = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def cases() -> list[Case]:
    """List the models.

    Returns:
        cases.
    """
    return [*registry.CASES, *registry.SPELLINGS, *registry.SMALL, *registry.LOOKALIKES]


def written(chosen: list[Case]) -> Iterator[tuple[Entry, onnx.ModelProto]]:
    """Yield the files of every case, except those that an exporter can't write.

    Yields:
        entries and files.
    """
    for case in chosen:
        draw = random.Random(case.name)
        for files in (_dynamo, _script):
            # A half-precision constant may be zero when a float32 one is not; then a lookalike is a norm.
            dtype = draw.choice(_DTYPES) if case.expect and not case.reason else "float32"
            # TorchScript's exporter writes invalid ONNX for it.
            if dtype == "bfloat16" and files is _script:
                dtype = "float16"
            dynamic = case.dynamic and (bool(case.reason) or draw.random() < 0.5)
            try:
                with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    warnings.simplefilter("ignore")
                    made = list(files(case, draw, dtype, dynamic))
                for _, proto in made:
                    onnx.checker.check_model(proto, full_check=True)
            # Exporters raise any exception.
            except Exception as error:
                print(
                    f"{files.__name__[1:]} can't write {case.name} ({dtype}): {type(error).__name__}:"
                    f" {str(error)[:100]}"
                )
                continue
            yield from made


def _entry(case: Case, exporter: str, opset: int, dtype: str, dynamic: bool, sizes: list[Mapping[str, int]]) -> Entry:
    words = (case.name, exporter, str(opset), "dynamic" if dynamic else "static", _NARROW[dtype])
    return Entry(
        name="-".join(words).replace(" ", "_"),
        exporter=exporter,
        spelling=case.name,
        opset=opset,
        dynamic=dynamic,
        dtype=dtype,
        expect=case.expect,
        lookalike=case.row == "lookalike" or bool(case.reason),
        shapes=tuple(tuple(spec.sizes(s) for spec in case.inputs) for s in sizes),
        highs=tuple(spec.high for spec in case.inputs),
        survivors=case.name.startswith(SURVIVORS),
    )


def _sizes(case: Case, dynamic: bool) -> list[Mapping[str, int]]:
    named = {d[0]: d for spec in case.inputs for d in spec.shape if not isinstance(d, int)} if dynamic else {}
    return [{}, {name: min(3, high) for name, (_, _, _, high) in named.items()}] if named else [{}]


def _dynamo(case: Case, draw: random.Random, dtype: str, dynamic: bool) -> Iterator[tuple[Entry, onnx.ModelProto]]:
    opset, kind = draw.choice(DYNAMO_OPSETS), getattr(torch, dtype)
    args, shapes = registry.export_args(case, kind, dynamic)
    program = torch.export.export(case.make().to(kind), args, dynamic_shapes=shapes, strict=False)
    exported = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=opset, verbose=False)
    assert exported is not None
    raw = onnx.inliner.inline_local_functions(exported.model_proto)
    exported.optimize()
    optimized = onnx.inliner.inline_local_functions(exported.model_proto)
    entry = _entry(case, "torch dynamo", opset, dtype, dynamic, _sizes(case, dynamic))
    entry = replace(entry, limit=nodes(optimized))
    yield entry, raw
    yield (
        replace(entry, name=entry.name.replace("dynamo", "dynamo_optimized"), exporter="torch dynamo optimized"),
        optimized,
    )


def _script(case: Case, draw: random.Random, dtype: str, dynamic: bool) -> Iterator[tuple[Entry, onnx.ModelProto]]:
    opset, kind = draw.choice(SCRIPT_OPSETS), getattr(torch, dtype)
    args, shapes = registry.export_args(case, kind, dynamic)
    named = [spec.name for spec in case.inputs]
    axes = {n: {a: d.__name__ for a, d in s.items()} for n, s in zip(named, shapes, strict=True)} if shapes else None
    file = io.BytesIO()
    torch.onnx.export(
        case.make().to(kind), args, file, dynamo=False, opset_version=opset, input_names=named, dynamic_axes=axes
    )
    entry = _entry(case, "torch TorchScript", opset, dtype, dynamic, _sizes(case, dynamic))
    proto = onnx.load_from_string(file.getvalue())
    yield replace(entry, limit=nodes(proto)), proto
