"""Run a model of more than 2.2 GB through every stage.

Measured are peak memory, bytes written, and the longest pause of the progress bar.

    python benchmarks/large.py [GIGABYTES] [FOLDER]       default: 2.4, a temporary folder

The model has linear layers and hand-written layer norms with random float32 weights, saved as a .pt2. Then ``export``,
``optimize``, ``verify`` and ``build`` run, each in a fresh process on its own terminal. A pause is a time in which
neither the stage nor the length of the bar changes, although its clock and its pulse go on. Memory is sampled every 50
ms over the process and its children from ``smaps_rollup``: owned memory (Pss_Anon + Pss_Shmem), and everything mapped
(Pss, which includes pages of mapped files that the system can reclaim). Written bytes are the bytes of write calls.
Writes ``benchmarks/results/large.md``.

The requirements: owned memory of at most 3 × the model's size, and at most one written copy of the model per step.
"""

from __future__ import annotations

import os
import platform
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "large.md"
WIDTH = 8192
MEASURE = 3.0

MAKE = """
import sys, torch
width, layers, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.rand(width) + 0.5), torch.nn.Parameter(torch.randn(width))
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias

torch.manual_seed(0)
model = torch.nn.Sequential(*[part for _ in range(layers) for part in (torch.nn.Linear(width, width), Norm())]).eval()
example = torch.randn(2, width)
torch.export.save(torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1,
max=8)},)), path)
"""


@dataclass
class Seen:
    """Measurements of one step.

    Attributes:
        owned: peak in bytes.
        mapped: peak in bytes.
        written: bytes.
        stages: stages that the bar showed.
        still: longest pause of the bar in seconds, and its stage.
        status: exit code.
        tail: end of the output.
    """

    command: str
    seconds: float = 0.0
    owned: int = 0
    mapped: int = 0
    written: int = 0
    stages: list[str] = field(default_factory=list)
    still: tuple[float, str] = (0.0, "")
    status: int = 0
    tail: str = ""


def watch(arguments: list[str]) -> Seen:
    """Run ``normdeploy`` on a terminal, and watch its bar and its memory.

    Returns:
        measurements.
    """
    seen = Seen(" ".join(Path(a).name if os.sep in a else a for a in arguments))
    ours, theirs = pty.openpty()
    start = last = time.perf_counter()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "normdeploy", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=ROOT,
    )
    os.close(theirs)
    shown, text = "", ""
    while True:
        ready, _, _ = select.select([ours], [], [], 0.05)
        try:
            piece = os.read(ours, 1 << 16).decode(errors="replace") if ready else ""
        # The terminal's other end is closed.
        except OSError:
            break
        text = (text + piece)[-20_000:]
        for line in re.findall(
            r"([a-z][\w ]*?)\s+([━╸╺]{40})\s+\d+:\d\d:\d\d", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", piece)
        ):
            bar = line[0] + line[1]
            if bar != shown:
                now = time.perf_counter()
                seen.still = max(seen.still, (now - last, shown and re.split(r"[━╸╺]", shown)[0].strip()))
                shown, last = bar, now
            if line[0] not in seen.stages:
                seen.stages.append(line[0])
        _sample(process.pid, seen)
    seen.status = process.wait()
    seen.seconds = time.perf_counter() - start
    seen.tail = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", text)[-1500:]
    return seen


def _sample(pid: int, seen: Seen) -> None:
    owned = mapped = written = 0
    for one in _tree(pid):
        try:
            # Includes children that have ended.
            sizes = dict(re.findall(r"^(Pss\w*):\s+(\d+) kB", Path(f"/proc/{one}/smaps_rollup").read_text(), re.M))
            written += int(re.findall(r"^wchar: (\d+)", Path(f"/proc/{one}/io").read_text(), re.M)[0])
        # The process has just ended.
        except (OSError, IndexError):
            continue
        owned += 1024 * (int(sizes.get("Pss_Anon", 0)) + int(sizes.get("Pss_Shmem", 0)))
        mapped += 1024 * int(sizes.get("Pss", 0))
    seen.owned, seen.mapped, seen.written = max(seen.owned, owned), max(seen.mapped, mapped), max(seen.written, written)


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(inner for child in children for inner in _tree(int(child)))]


def table(steps: list[Seen], size: int) -> str:
    """Format the measurements.

    Returns:
        Markdown.
    """
    rows = [
        "| step | seconds | peak owned | × size | peak mapped | written | longest stage without a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in steps:
        still = f"{s.still[0]:.1f} s ({s.still[1] or 'before the first stage'})"
        gigabytes = (
            f"{s.owned / 1e9:.2f} GB | {s.owned / size:.2f} | {s.mapped / 1e9:.2f} GB | {s.written / 1e9:.2f} GB"
        )
        rows.append(
            f"| `{s.command}`{'' if s.status == 0 else f' (exit {s.status})'} | {s.seconds:.0f} | {gigabytes} |"
            f" {still} |"
        )
    return "\n".join(rows)


def main(gigabytes: float, folder: Path) -> int:
    """Run all steps and write the table.

    Returns:
        exit code.
    """
    layers = round(gigabytes * 1e9 / (4 * WIDTH * (WIDTH + 3)))
    model, file, again, engine = (folder / name for name in ("model.pt2", "model.onnx", "again.onnx", "model.engine"))
    subprocess.run([sys.executable, "-c", MAKE, str(WIDTH), str(layers), str(model)], check=True)
    size = model.stat().st_size
    steps = []
    for arguments in (
        ["export", str(model), "-o", str(file)],
        ["optimize", str(file), "-o", str(again)],
        ["verify", str(model), str(file)],
        ["build", str(file), "-o", str(engine), "--profile", "d0=1:2:8"],
    ):
        steps.append(watch(arguments))
        print(table(steps[-1:], size).splitlines()[-1], steps[-1].stages, flush=True)
        if steps[-1].status:
            print(steps[-1].tail)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "onnx", "onnxruntime-gpu", "tensorrt-rtx"))
    load = max(0, round(os.getloadavg()[2] - 1))
    worst = max(s.owned for s in steps) / size
    text = f"""# A model of {size / 1e9:.2f} GB

Written by `benchmarks/large.py` on {date.today()}: {os.cpu_count()} cores, Python {platform.python_version()},
{libraries}; {load} processes beside it on average. {layers} linear layers of {WIDTH} × {WIDTH} with layer norms by
hand, float32. Owned: memory that only the process and its children hold; mapped: with the pages of mapped files.

{table(steps, size)}

At most {worst:.2f} × the size is owned (measure: {MEASURE:g}).
"""
    RESULT.write_text(text)
    print(text)
    return 0 if worst <= MEASURE and not any(s.status for s in steps) else 1


if __name__ == "__main__":
    wanted = float(sys.argv[1]) if len(sys.argv) > 1 else 2.4
    if len(sys.argv) > 2:
        sys.exit(main(wanted, Path(sys.argv[2])))
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(wanted, Path(place)))
