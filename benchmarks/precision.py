"""Test half precision for every listed model and the demo's encoder: errors against eager's, and types of
TensorRT-RTX's network.

``python -m benchmarks.precision`` writes ``benchmarks/results/precision.md``. Errors are the largest absolute
differences from the model in float64, for inputs that are half-precision numbers, with three seeds (the encoder: six
sentences). "allowed" is twice the larger of eager's error in the type and of one rounding of the largest output.
"stepwise" computes each node in float32 and rounds its result, as a GPU does. "onnxruntime" is its CPU provider, which
has almost no bfloat16 kernels and computes long stretches of float16 in float32.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import normdeploy
from models import minilm
from models.demo import SENTENCES
from models.registry import CASES, LOOKALIKES, SMALL, samples
from normdeploy.precision.emulated_half import emulate_half
from normdeploy.precision.half_conversion import builder_request, convert_to_half
from normdeploy.precision.type_conversion import FORMATS
from normdeploy.runtimes.network_types import check_network_types
from normdeploy.runtimes.ort_runner import OrtRunner

RESULTS = Path(__file__).with_name("results") / "precision.md"
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
COLUMNS = (
    "model",
    "type",
    "eager",
    "allowed",
    "stepwise",
    "onnxruntime off",
    "onnxruntime on",
    "float32 nodes",
    "TensorRT-RTX layers",
)


@dataclass
class Subject:
    """Module and its inputs, one tuple for each seed."""

    name: str
    module: nn.Module
    inputs: list[tuple[torch.Tensor, ...]]
    specs: tuple[str, ...] = ()


def subjects() -> Iterator[Subject]:
    """Yield the models.

    Yields:
        subjects.
    """
    for case in (*SMALL, *CASES, *LOOKALIKES):
        yield Subject(case.name, case.make(), [samples(case, seed=seed) for seed in range(3)])
    specs = tuple(
        f"{name}:int64[batch,seq]{{0:{high}}}" for name, high in (("input_ids", 30522), ("attention_mask", 2))
    )
    yield Subject("all-MiniLM-L6-v2", minilm.load(), [minilm.tokenize(SENTENCES)], specs)


def measured(subject: Subject) -> Iterator[tuple[list[str], bool]]:
    """Convert a model to each type and compare.

    Yields:
        a row for each type, and whether everything in it is right.
    """
    wide = normdeploy.export(subject.module, subject.inputs[0], inputs=list(subject.specs)).proto
    for to in ("fp16", "bf16"):
        try:
            proto, account = convert_to_half(
                wide, to, None if subject.specs else [numpied(wide, x) for x in subject.inputs]
            )
        except normdeploy.errors.InputError as error:
            yield [subject.name, to, f"refused: {error}", *[""] * (len(COLUMNS) - 3)], True
            continue
        errors, eager, allowed = compared(subject, proto, to)
        layers, right = network(proto)
        shown = [f"{errors[r]:.1e}" if r in errors else "" for r in ("stepwise", "off", "on")]
        row = [subject.name, to, f"{eager:.1e}", f"{allowed:.1e}", *shown, f"{account.kept} of {account.nodes}", layers]
        yield row, right and all(error <= allowed for error in errors.values())


def compared(subject: Subject, proto: onnx.ModelProto, to: str) -> tuple[dict[str, float], float, float]:
    """Compare a half-precision file with the model.

    Returns:
        errors by runtime, eager's error, and the allowed error.
    """
    runners: dict[str, Any] = {"stepwise": OrtRunner(emulate_half(proto), optimize=False)}
    if to == "fp16":
        runners |= {"off": OrtRunner(proto, optimize=False), "on": OrtRunner(proto)}
    errors, eager, rounding = dict.fromkeys(runners, 0.0), 0.0, 0.0
    for drawn in subject.inputs:
        inputs = tuple(x.to(TORCH[to]).float() if x.is_floating_point() else x for x in drawn)
        reference = run(subject.module, inputs, torch.float64)
        rounding = max(rounding, FORMATS[to].unit_roundoff * max(float(np.abs(v).max()) for v in reference))
        eager = max(eager, worst(run(subject.module, inputs, TORCH[to]), reference))
        for name, runner in runners.items():
            feeds = numpied(proto, inputs, np.float32 if name == "stepwise" else None)
            errors[name] = max(errors[name], worst(list(runner.infer(feeds).values()), reference))
    return errors, eager, 2 * max(eager, rounding)


def network(proto: onnx.ModelProto) -> tuple[str, bool]:
    """Parse a file with TensorRT-RTX.

    Returns:
        number of layers by type, and whether all have the types that the file states.
    """
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    parsed = builder.create_network(0)
    parser = trt.OnnxParser(parsed, logger)
    if not parser.parse(proto.SerializeToString()):
        return "refused: " + "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))[:120], False
    wanted = builder_request(proto)
    found = check_network_types(trt, parsed, wanted["precision"], wanted["types"])
    return ", ".join(f"{n} {kind}" for kind, n in sorted(found.layers.items())) + "".join(
        f"; {w}" for w in found.wrong[:1]
    ), bool(found)


def run(module: nn.Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[np.ndarray]:
    """Run a module in ``dtype``.

    Returns:
        outputs in float64.
    """
    # oneDNN's bfloat16 needs instructions that not every machine has.
    with (
        torch.no_grad(),
        torch.backends.mkldnn.flags(enabled=False),
    ):
        found = copy.deepcopy(module).to(dtype)(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
    return [v.double().numpy() for v in (found if isinstance(found, list | tuple) else [found])]


def numpied(
    proto: onnx.ModelProto, inputs: Sequence[torch.Tensor], floats: type | None = None
) -> dict[str, np.ndarray]:
    """Convert inputs to the names and types of the file.

    Args:
        floats: type of floating inputs, instead of the file's.

    Returns:
        name -> array.
    """
    found = {}
    for v, x in zip(proto.graph.input, inputs, strict=True):
        kind = onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)
        found[v.name] = x.numpy().astype(kind if floats is None or not x.is_floating_point() else floats)
    return found


def worst(found: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Find the largest error.

    Returns:
        error; infinite if there is a NaN.
    """
    errors = [float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(found, reference, strict=True)]
    return float("inf") if any(np.isnan(errors)) else max(errors)


def main() -> None:
    """Measure the models; write the results only if all are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="models; all where none is given, and only then the results are written"
    )
    wanted = set(parser.parse_args().names)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start, rows, failed = time.perf_counter(), [], []
    for subject in subjects():
        if wanted and subject.name not in wanted:
            continue
        for row, right in measured(subject):
            print(*row, sep="  ", flush=True)
            rows.append(row)
            failed += [] if right else [f"{row[0]} {row[1]}"]
    told = f"{len(rows)} rows, {len(failed)} not as they should be{': ' if failed else ''}{', '.join(failed)}"
    print(told)
    if not wanted:
        lines = ["| " + " | ".join(row) + " |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
        text = "\n".join(
            ["# Half precision", "", str(__doc__).split("\n\n", 1)[1].strip(), "", told + ".", "", *lines, ""]
        )
        RESULTS.write_text(text)
        print(f"{RESULTS.name} written after {time.perf_counter() - start:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
