"""Compare hand-written activations with the standard nodes that replace them, in onnxruntime on the CPU.

The results decide which nodes `normdeploy.rewriting.activation_fusion` writes.

``python -m benchmarks.activations`` writes ``benchmarks/results/activations.md``. Each activation is a hand-written
module. It is exported by torch (opset 21), and the exported file is optimized by `normdeploy.optimize`. Both files run
in five sessions each, in turns in random order, with one thread and with onnxruntime's optimizer on. Times are
processor times. A ratio is the mean time of the optimized file over the mean time of the exported file. The smallest
and largest ratio of a session are given too. If the ratio is below 1, the node is faster. Errors are the largest
differences from the module in float64, for inputs of a normal distribution times 3.

Softplus, Mish and the sigmoid stay unchanged; they are timed next to the nodes that could replace them. The script
exits with 1 if a node is slower than the nodes it replaces.
"""

from __future__ import annotations

import datetime
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import nn

import normdeploy
from normdeploy.verbs.bench.machine_info import describe_machine
from normdeploy.verbs.bench.timing import race_calls

RESULTS = Path(__file__).with_name("results") / "activations.md"
# Number of sessions per file. The times of two sessions of one file differ by a few percent, for as long as the
# sessions exist.
SESSIONS = 5
SHAPES = ((128, 384), (128, 3072))
ROUNDS = 40

Function = Callable[[torch.Tensor], torch.Tensor]
WRITTEN: dict[str, Function] = {
    "GELU": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "GELU by tanh": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "the same, x·x·x": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x))),
    "HardSwish": lambda x: x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0,
    "HardSigmoid": lambda x: torch.clamp(x + 3.0, 0.0, 6.0) / 6.0,
    "SiLU": lambda x: x / (1.0 + torch.exp(-x)),
    "tanh": lambda x: 2.0 / (1.0 + torch.exp(-2.0 * x)) - 1.0,
    "softsign": lambda x: x / (1.0 + x.abs()),
}
LEFT: dict[str, tuple[Function, Function]] = {
    "softplus": (lambda x: torch.log(1.0 + torch.exp(x)), nn.functional.softplus),
    "sigmoid": (lambda x: 1.0 / (1.0 + torch.exp(-x)), torch.sigmoid),
    "Mish": (lambda x: x * torch.tanh(torch.log(1.0 + torch.exp(x))), nn.functional.mish),
}


class Written(nn.Module):
    """Module that applies a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def exported(function: Function, x: torch.Tensor) -> onnx.ModelProto:
    """Export a function with torch.

    Returns:
        the model.
    """
    program = torch.onnx.export(Written(function), (x,), dynamo=True, verbose=False, opset_version=21)
    assert program is not None
    return program.model_proto


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    """Open a session with one thread.

    Returns:
        the session.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def row(name: str, function: Function, other: Function | None, shape: tuple[int, int]) -> tuple[str, bool]:
    """Time and compare one activation.

    Args:
        other: function to use as the node; None for the result of `normdeploy.optimize`.

    Returns:
        a row of the table, and True if the node is at least as fast.
    """
    torch.manual_seed(0)
    x = 3 * torch.randn(*shape)
    before = exported(function, x)
    after = normdeploy.optimize(before).proto if other is None else exported(other, x)
    sessions = [session(proto) for proto in (before, after) for _ in range(SESSIONS)]
    feeds = {sessions[0].get_inputs()[0].name: x.numpy()}
    timing = race_calls([partial(s.run, None, feeds) for s in sessions], rounds=ROUNDS, clock=time.process_time)
    by_hand, node = np.median(np.array(timing.turns), axis=1).reshape(2, SESSIONS)
    ratio, low, high = (float(r) for r in (f(node) / by_hand.mean() for f in (np.mean, np.min, np.max)))
    exact = function(x.double()).numpy()
    errors = [float(np.abs(s.run(None, feeds)[0] - exact).max()) for s in sessions[::SESSIONS]]
    ops = [
        ", ".join(f"{op} ×{n}" if n > 1 else op for op, n in Counter(v.op_type for v in p.graph.node).items())
        for p in (before, after)
    ]
    cells = [
        *(
            name,
            "×".join(map(str, shape)),
            *ops,
            f"{1e6 * timing.percentile(0, 50):.0f}",
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        ),
        *(f"{e:.1e}" for e in errors),
    ]
    return f"| {' | '.join(cells)} |", other is not None or low <= 1.02


def main() -> None:
    """Measure all activations and write the table."""
    head = ["activation", "shape", "by hand", "node", "by hand, µs", "time of that", "error by hand", "error"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    all_faster = True
    for name, function, other in (
        *((n, f, None) for n, f in WRITTEN.items()),
        *((n, *pair) for n, pair in LEFT.items()),
    ):
        for shape in SHAPES:
            line, faster = row(f"{name}, not written" if other else name, function, other, shape)
            print(line, flush=True)
            lines.append(line)
            all_faster = all_faster and faster
    told = (
        f"{datetime.date.today().isoformat()}, {ROUNDS} rounds; {describe_machine()}; onnxruntime "
        f"{ort.__version__}, torch"
        f" {torch.__version__}"
    )
    RESULTS.write_text("# Activations\n\n" + "\n\n".join([(__doc__ or "").strip(), told, "\n".join(lines)]) + "\n")
    sys.exit(not all_faster)


if __name__ == "__main__":
    main()
