"""Plant faults in a 12-layer encoder of MiniLM's size, and check that ``bisect`` names the right module.

``python -m benchmarks.planted_faults`` writes ``benchmarks/results/planted_faults.md``. Each fault is written into the
exported file, in layer 5 of 0 to 11. The seconds include ``bisect`` and the writing of the reproduction, with one
thread, on a machine with other jobs. Processor seconds are given too.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from normdeploy.graphs.proto_queries import module_path as module_of
from normdeploy.precision.half_conversion import convert_to_half

RESULTS = Path(__file__).with_name("results") / "planted_faults.md"
LAYER = 5
COLUMNS = (
    "planted",
    "in",
    "module named",
    "node",
    "kind",
    "error",
    "allowed",
    "float32 mends it",
    "script fails",
    "seconds",
    "of a processor",
)


class Layer(nn.Module):
    """Post-norm encoder layer, (B, S, hidden)."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.attention_norm, self.output_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        # Make all weights different, because the exporter stores equal weights once.
        for norm in (self.attention_norm, self.output_norm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, hidden = x.shape
        q, k, v = (
            f(x).reshape(b, s, self.heads, hidden // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(hidden // self.heads)).softmax(-1)
        x = self.attention_norm(x + self.mix((weights @ v).transpose(1, 2).reshape(b, s, hidden)))
        return self.output_norm(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """Token ids (B, S), int64, to (B, S, hidden)."""

    def __init__(
        self, layers: int = 12, hidden: int = 384, heads: int = 12, inner: int = 1536, vocabulary: int = 1000
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, inner) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def specs(vocabulary: int) -> list[str]:
    """Describe the input.

    Returns:
        specifications for ``export``.
    """
    return [f"ids:int64[batch,seq]{{0:{vocabulary}}}"]


DIMS = ["batch=1:2:4", "seq=4:16:32"]


@dataclass(frozen=True)
class Fault:
    """Planted fault.

    Attributes:
        module: expected module, with a placeholder for the layer.
        kind: expected kind.
        plant: changes the file, or makes another one.
        before: changes the model first.
    """

    name: str
    module: str
    kind: str
    plant: Callable[[onnx.ModelProto, int], onnx.ModelProto | None]
    before: Callable[[Encoder, int], None] | None = None


def _node(proto: onnx.ModelProto, module: str, op: str) -> onnx.NodeProto:
    return next(n for n in proto.graph.node if module_of(n) == module and n.op_type == op)


def _weight(
    proto: onnx.ModelProto, node: onnx.NodeProto, index: int, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Replace one input of ``node`` by a changed copy of the weight."""
    (held,) = (t for t in proto.graph.initializer if t.name == node.input[index])
    name = f"{held.name}_planted"
    proto.graph.initializer.append(
        numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(held))), name)
    )
    node.input[index] = name


def _epsilon(proto: onnx.ModelProto, layer: int) -> None:
    node = _node(proto, f"layers.{layer}.attention_norm", "LayerNormalization")
    next(a for a in node.attribute if a.name == "epsilon").f = 1e-3


def _axis(proto: onnx.ModelProto, layer: int) -> None:
    node = _node(proto, f"layers.{layer}", "Softmax")
    next(a for a in node.attribute if a.name == "axis").i = 2


def _transposed(proto: onnx.ModelProto, layer: int) -> None:
    _weight(proto, _node(proto, f"layers.{layer}.mix", "MatMul"), 1, np.transpose)


def _ddof(proto: onnx.ModelProto, layer: int) -> None:
    node = _node(proto, f"layers.{layer}.output_norm", "LayerNormalization")
    _weight(proto, node, 1, lambda gamma: (gamma * math.sqrt((len(gamma) - 1) / len(gamma))).astype(gamma.dtype))


def _residual(proto: onnx.ModelProto, layer: int) -> None:
    norm = _node(proto, f"layers.{layer}.attention_norm", "LayerNormalization")
    add = next(n for n in proto.graph.node if norm.input[0] in n.output)
    mixed = next(n for n in proto.graph.node if n.output[0] in add.input and n.op_type == "Add")
    norm.input[0] = mixed.output[0]
    proto.graph.node.remove(add)


def _large(model: Encoder, layer: int) -> None:
    """Make inner values of a feed-forward part so large that only float32 can hold them: a million on the way up, a
    millionth on the way down.
    """
    with torch.no_grad():
        model.layers[layer].up.weight.mul_(1e5)
        model.layers[layer].down.weight.mul_(1e-5)


def _overflow(proto: onnx.ModelProto, layer: int) -> onnx.ModelProto:
    """Convert to half precision with a calibration that never saw the large values, because its weights were small."""
    calm = onnx.ModelProto()
    calm.CopyFrom(proto)
    up = _node(calm, f"layers.{layer}.up", "MatMul").input[1]
    (weight,) = (t for t in calm.graph.initializer if t.name == up)
    large = numpy_helper.to_array(weight)
    weight.CopyFrom(numpy_helper.from_array(large * np.float32(1e-5), up))
    half, _ = convert_to_half(calm, "fp16", [{"ids": np.zeros((1, 4), np.int64)}])
    (weight,) = (t for t in half.graph.initializer if t.name == up)
    weight.CopyFrom(numpy_helper.from_array(large.astype(numpy_helper.to_array(weight).dtype), up))
    return half


FAULTS = (
    Fault("epsilon 1e-3 for 1e-5", "layers.{}.attention_norm", "epsilon", _epsilon),
    Fault("softmax over the other axis", "layers.{}", "axis", _axis),
    Fault("weight transposed", "layers.{}.mix", "weights", _transposed),
    Fault("ddof 1 for 0", "layers.{}.output_norm", "ddof", _ddof),
    Fault("residual left out", "layers.{}", "left out", _residual),
    Fault("overflow in fp16", "layers.{}.up", "overflow", _overflow, _large),
)


def planted(fault: Fault, model: Encoder, layer: int, vocabulary: int, file: Path) -> None:
    """Export ``model`` to ``file`` with the fault in it; change the model first if the fault needs it."""
    if fault.before is not None:
        fault.before(model, layer)
    proto = normdeploy.export(model, inputs=specs(vocabulary), dims=DIMS).proto
    onnx.save(fault.plant(proto, layer) or proto, file)


def measured(fault: Fault, folder: Path) -> tuple[list[str], bool]:
    """Bisect one fault.

    Returns:
        a row, and whether module and kind are right, within 60 s, and the script shows the error.
    """
    model, file, repro = Encoder().eval(), folder / "planted.onnx", folder / f"repro-{fault.kind}".replace(" ", "-")
    planted(fault, model, LAYER, 1000, file)
    wall, processor = time.perf_counter(), time.process_time()
    found = normdeploy.bisect(model, file, inputs=specs(1000), dims=DIMS, output=repro)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    where = fault.module.format(LAYER)
    if not found.faults:
        return [fault.name, where, "none", *[""] * 6, f"{wall:.1f}", f"{processor:.1f}"], False
    first = found.faults[0]
    shown = (
        subprocess.run([sys.executable, str(repro / "reproduce.py")], capture_output=True, check=False).returncode == 1
    )
    mends = {None: "float32 already", True: "yes", False: "no"}[first.widened.mends]
    error = first.reason.split(" where")[0] or f"{first.error:.1e}"
    row = [fault.name, where, first.module, first.nodes[0].split()[0], first.kind, error, f"{first.allowed:.1e}", mends]
    right = (
        first.module == where
        and first.kind == fault.kind
        and first.mended
        and len(found.faults) == 1
        and shown
        and wall <= 60
    )
    return [*row, "yes" if shown else "no", f"{wall:.1f}", f"{processor:.1f}"], right


def main() -> None:
    """Plant all faults and write the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        rows = [measured(fault, Path(folder)) for fault in FAULTS]
    wrong = sum(not right for _, right in rows)
    head = f"# Planted faults\n\n{__doc__}\n{len(rows)} rows, {wrong} not as they should be.\n"
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row for row, _ in rows)]
    RESULTS.write_text("\n".join([head, *(f"| {' | '.join(line)} |" for line in lines), ""]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
