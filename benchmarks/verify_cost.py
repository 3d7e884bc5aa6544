"""Measure the cost of ``verify`` relative to ``export``: processor time and memory, with default options.

    python -m benchmarks.verify_cost [NAME …] [--all]        default: the sample

The sample is every sixth architecture of ``benchmarks/architectures``, in the catalogue's order, and those in
``SUSPECTS``. ``--all`` measures every one. It needs the libraries of ``tests/architectures/requirements.txt``.

Each architecture is exported and then verified once, in a process forked from one that has exported and verified a
small model, so that none pays for imports. Times are processor times that include child processes, so that other jobs
on the machine add little. Memory is the peak resident size during verify beyond the size before it, which includes the
model and the libraries.

Rows are stored in ``benchmarks/results/verify_cost.json`` as they are measured, and ``verify_cost.md`` is written from
them. A run with names replaces only those rows. No architecture is left out for its size.

The bounds: in the median of the sample, verify takes at most ``MOST_RATIO`` times as long as export. None takes more
than ``MOST_SECONDS``, or more than ``MOST_MEMORY`` GiB beyond the model. Exits with 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normdeploy
from normdeploy.verbs.bench.machine_info import describe_machine

from .architectures.catalogue import ARCHITECTURES, Architecture, declare_torchvision, made

RESULTS = Path(__file__).parent / "results" / "verify_cost.json"
MOST_RATIO, MOST_SECONDS, MOST_MEMORY = 2.0, 60.0, 4.0
EVERY = 6
# Architectures that may be slow: merged branches (MobileOne, RepViT, RepVGG), many channels (ResMLP), and every audio
# model
SUSPECTS = (
    *("MobileOne", "RepViT", "RepVGG", "ResMLP", "Wav2Vec2 (group norm)", "Wav2Vec2 (layer norm)", "HuBERT", "WavLM"),
    *("Wav2Vec2 Conformer", "AST", "Whisper", "EnCodec", "DAC"),
)
# Time limit for one architecture in seconds of wall time, on a machine with other jobs
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one architecture.

    Attributes:
        parameters: number of parameters in millions.
        export: processor seconds of ``export``.
        verify: processor seconds of ``verify``.
        memory: memory of ``verify`` in GiB.
        revision: commit that was measured.
        failed: reason for a failure; "" if the cost was measured.
    """

    name: str
    library: str
    parameters: float = 0.0
    export: float = 0.0
    verify: float = 0.0
    memory: float = 0.0
    verdict: str = ""
    revision: str = ""
    failed: str = ""

    @property
    def ratio(self) -> float:
        """Return verify's time over export's."""
        return self.verify / self.export


def sample() -> list[Architecture]:
    """List every sixth architecture and the suspects.

    Returns:
        architectures in the catalogue's order.
    """
    return [a for place, a in enumerate(ARCHITECTURES) if place % EVERY == 0 or a.name in SUSPECTS]


def measure(architecture: Architecture, folder: Path) -> Cost:
    """Export and verify in this process.

    Returns:
        the cost.
    """
    path = folder / "model.onnx"
    module = made(architecture)
    specs: dict[str, Any] = {"inputs": architecture.inputs, "dims": architecture.dims}
    export, _ = _seconds(lambda: normdeploy.export(module, output=path, **specs))
    before = _restart_peak()
    verify, comparison = _seconds(lambda: normdeploy.verify(module, path, **specs))
    return Cost(
        name=architecture.name,
        library=architecture.library,
        parameters=sum(p.numel() for p in module.parameters()) / 1e6,
        export=export,
        verify=verify,
        memory=_peak() - before,
        verdict=comparison.outcome,
        revision=_revision(),
    )


def _revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = sum(os.times()[:4])
    result = work()
    return sum(os.times()[:4]) - start, result


def _restart_peak() -> float:
    """Reset the peak resident size, and return the present size in GiB."""
    # Linux: proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    line = next(n for n in Path("/proc/self/status").read_text().splitlines() if n.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**20


def warm_up() -> None:
    """Import every library, and export and verify a small model; the rows' processes are forked from this state."""
    torch.set_num_threads(1)
    declare_torchvision()
    for library in ("transformers", "diffusers", "timm", "torchvision"):
        __import__(library)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        small = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
        normdeploy.export(small, output=path, inputs=("x:float32[2,4]",))
        normdeploy.verify(small, path, inputs=("x:float32[2,4]",))
    gc.collect()
    # Otherwise each garbage collection in a child would visit all imported objects and copy their pages.
    gc.freeze()


def measured_apart(architecture: Architecture) -> Cost:
    """Measure in a separate process.

    Returns:
        the cost.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "row.json"
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_child, args=(architecture, Path(folder), kept))
        child.start()
        child.join(_PATIENCE)
        reason = f"exit code {child.exitcode}"
        if child.is_alive():
            child.kill()
            child.join()
            reason = f"it took longer than {_PATIENCE:g} s on the clock"
        if kept.exists():
            return Cost(**json.loads(kept.read_text()))
    return Cost(name=architecture.name, library=architecture.library, revision=_revision(), failed=reason)


def _child(architecture: Architecture, folder: Path, kept: Path) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        cost = measure(architecture, folder)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        cost = Cost(name=architecture.name, library=architecture.library, revision=_revision(), failed=reason)
    part = kept.with_suffix(".part")
    part.write_text(json.dumps(asdict(cost)))
    part.replace(kept)


def missed(costs: Sequence[Cost]) -> list[str]:
    """List the exceeded bounds.

    Returns:
        a sentence for each.
    """
    told = []
    middle = statistics.median(c.ratio for c in costs)
    if middle > MOST_RATIO:
        told.append(f"verify takes {middle:.2f} times export's time in the median, at most {MOST_RATIO:g}")
    told += [f"{c.name}: {c.verify:.0f} s, at most {MOST_SECONDS:g}" for c in costs if c.verify > MOST_SECONDS]
    told += [f"{c.name}: {c.memory:.1f} GiB, at most {MOST_MEMORY:g}" for c in costs if c.memory > MOST_MEMORY]
    return told


def table(rows: Sequence[Cost]) -> str:
    """Write the page, the slowest first."""
    costs, failed = [c for c in rows if not c.failed], [c for c in rows if c.failed]
    sampled = {a.name for a in sample()}
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "onnx", "onnxruntime-gpu"))
    lines = [
        *("# What verify costs", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""),
        f"{len(costs)} of {len(ARCHITECTURES)} architectures, {sum(c.name in sampled for c in costs)} of the"
        f" {len(sampled)} in the sample; {describe_machine()}; {libraries}",
        "",
    ]
    if costs:
        lines += [
            f"- median of verify over export: {statistics.median(c.ratio for c in costs):.2f}, at most {MOST_RATIO:g}",
            f"- longest verify: {max(c.verify for c in costs):.1f} s of processor time, at most {MOST_SECONDS:g}",
            f"- most memory: {max(c.memory for c in costs):.2f} GiB beyond the model, at most {MOST_MEMORY:g}",
            *(f"- missed: {sentence}" for sentence in missed(costs)),
        ]
    lines += [
        "",
        "| model | library | million parameters | export, s | verify, s | ratio | GiB | verdict | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in sorted(costs, key=lambda c: -c.verify):
        numbers = f"{c.parameters:.2f} | {c.export:.1f} | {c.verify:.1f} | {c.ratio:.2f} | {c.memory:.2f}"
        lines.append(f"| {c.name} | {c.library} | {numbers} | {c.verdict} | {c.revision} |")
    lines += ["", *(f"- not measured: {c.name}: {c.failed}" for c in failed)]
    return "\n".join(lines).rstrip() + "\n"


def write(rows: Mapping[str, Cost]) -> None:
    """Write the rows and the page that shows them."""
    ordered = [rows[a.name] for a in ARCHITECTURES if a.name in rows]
    text = json.dumps([asdict(cost) for cost in ordered], indent=1, ensure_ascii=False)
    RESULTS.write_text(text + "\n")
    RESULTS.with_suffix(".md").write_text(table(ordered))


def kept() -> dict[str, Cost]:
    """Read the rows of earlier runs."""
    every = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return {row["name"]: Cost(**row) for row in every}


def main() -> int:
    """Measure those named, the sample, or all; write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify_cost")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    wanted = parser.parse_args()
    if unknown := set(wanted.names) - {a.name for a in ARCHITECTURES}:
        parser.error(f"no architecture is called {', '.join(sorted(unknown))}")
    chosen = list(ARCHITECTURES) if wanted.all else sample()
    if wanted.names:
        chosen = [a for a in ARCHITECTURES if a.name in wanted.names]
    warm_up()
    rows = kept()
    for architecture in chosen:
        rows[architecture.name] = cost = measured_apart(architecture)
        write(rows)
        print(cost, flush=True)
    costs = [c for c in rows.values() if not c.failed]
    return 1 if not costs or missed(costs) else 0


if __name__ == "__main__":
    sys.exit(main())
