"""What ``verify`` costs beside ``export``: processor time and memory, with default options.

    python -m benchmarks.verify_cost [PART OF A NAME …]        default: every architecture whose library is installed

Each architecture of ``benchmarks/architectures`` is exported and verified in a fresh process, which has exported and
verified another model before, so that neither pays for imports. Both take turns, ``ROUNDS`` times each, and the median
of each counts; it is processor time, that of child processes included. Memory is the highest resident size during
verify beyond that before it, which holds the model and the libraries. Writes ``benchmarks/results/verify_cost.md``.

The bounds: verify takes at most ``MOST_RATIO`` times as long as export in the median of all architectures; none takes
more than ``MOST_SECONDS``, or more than ``MOST_MEMORY`` GiB beyond the model. Exits with 1 where one is missed.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normdeploy
from normdeploy.verbs.bench.machine import machine

from .architectures.catalogue import ARCHITECTURES, Architecture, made

RESULTS = Path(__file__).parent / "results"
ROUNDS = 2
MOST_RATIO, MOST_SECONDS, MOST_MEMORY = 2.0, 60.0, 4.0
# Of one architecture on the clock, beside other jobs on the machine.
_PATIENCE = 900.0


@dataclass(frozen=True)
class Cost:
    """One architecture: processor seconds of export and of verify, GiB of verify; ``failed``: why there are none."""

    name: str
    library: str
    export: float = 0.0
    verify: float = 0.0
    memory: float = 0.0
    verdict: str = ""
    failed: str = ""

    @property
    def ratio(self) -> float:
        """Return verify's time over export's."""
        return self.verify / self.export


def measure(architecture: Architecture) -> Cost:
    """Export and verify in turn in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        small = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
        normdeploy.export(small, output=path, inputs=("x:float32[2,4]",))
        normdeploy.verify(small, path, inputs=("x:float32[2,4]",))
        module = made(architecture)
        specs: dict[str, Any] = {"inputs": architecture.inputs, "dims": architecture.dims}
        exports, verifies, memory, verdict = list[float](), list[float](), 0.0, ""
        for _ in range(ROUNDS):
            exports.append(_seconds(lambda: normdeploy.export(module, output=path, **specs))[0])
            before = _restart_peak()
            seconds, comparison = _seconds(lambda: normdeploy.verify(module, path, **specs))
            verifies.append(seconds)
            memory = max(memory, _peak() - before)
            verdict = comparison.outcome
    return Cost(
        name=architecture.name,
        library=architecture.library,
        export=statistics.median(exports),
        verify=statistics.median(verifies),
        memory=memory,
        verdict=verdict,
    )


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = sum(os.times()[:4])
    result = work()
    return sum(os.times()[:4]) - start, result


def _restart_peak() -> float:
    """Begin to measure the highest resident size anew: the present one, in GiB."""
    # Linux: proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    line = next(n for n in Path("/proc/self/status").read_text().splitlines() if n.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**20


def measured_apart(architecture: Architecture) -> Cost:
    """Measure in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.verify_cost", "--one", architecture.name]
    try:
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return Cost(architecture.name, architecture.library, failed=f"it took longer than {_PATIENCE:g} s on the clock")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Cost(architecture.name, architecture.library, failed=f"exit code {done.returncode}: {last[:200]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def missed(costs: Sequence[Cost]) -> list[str]:
    """Return the bounds that are not kept, a sentence each."""
    told = []
    middle = statistics.median(c.ratio for c in costs)
    if middle > MOST_RATIO:
        told.append(f"verify takes {middle:.2f} times export's time in the median, at most {MOST_RATIO:g}")
    told += [f"{c.name}: {c.verify:.0f} s, at most {MOST_SECONDS:g}" for c in costs if c.verify > MOST_SECONDS]
    told += [f"{c.name}: {c.memory:.1f} GiB, at most {MOST_MEMORY:g}" for c in costs if c.memory > MOST_MEMORY]
    return told


def table(costs: Sequence[Cost], failed: Sequence[Cost]) -> str:
    """Write the page, the slowest first."""
    middle = statistics.median(c.ratio for c in costs)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "onnx", "onnxruntime-gpu"))
    lines = [
        *("# What verify costs", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""),
        *(f"{len(costs)} of {len(ARCHITECTURES)} architectures; {machine()}; {libraries}", ""),
        f"- median of verify over export: {middle:.2f}, at most {MOST_RATIO:g}",
        f"- longest verify: {max(c.verify for c in costs):.1f} s of processor time, at most {MOST_SECONDS:g}",
        f"- most memory: {max(c.memory for c in costs):.2f} GiB beyond the model, at most {MOST_MEMORY:g}",
        *(f"- missed: {sentence}" for sentence in missed(costs)),
        *("", "| model | library | export, s | verify, s | ratio | GiB | verdict |", "|---|---|---|---|---|---|---|"),
    ]
    for c in sorted(costs, key=lambda c: -c.verify):
        times = f"{c.export:.1f} | {c.verify:.1f} | {c.ratio:.2f} | {c.memory:.2f}"
        lines.append(f"| {c.name} | {c.library} | {times} | {c.verdict} |")
    lines += ["", *(f"- not measured: {c.name}: {c.failed}" for c in failed)]
    return "\n".join(lines).rstrip() + "\n"


def main(names: Sequence[str]) -> None:
    """Measure those of the names, or all, and write the page."""
    costs, failed = list[Cost](), list[Cost]()
    for architecture in ARCHITECTURES:
        if names and not any(part.lower() in architecture.name.lower() for part in names):
            continue
        if importlib.util.find_spec(architecture.library) is None:
            continue
        cost = measured_apart(architecture)
        (failed if cost.failed else costs).append(cost)
        print(cost, flush=True)
    if costs:
        (RESULTS / "verify_cost.md").write_text(table(costs, failed))
    raise SystemExit(1 if not costs or missed(costs) else 0)


if __name__ == "__main__":
    if "--one" in sys.argv:
        wanted = next(a for a in ARCHITECTURES if a.name == sys.argv[-1])
        print(json.dumps(asdict(measure(wanted))))
    else:
        main(sys.argv[1:])
