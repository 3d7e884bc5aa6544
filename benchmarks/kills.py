"""Kill export, optimize, build and package with SIGKILL at random moments, and check the output afterwards.

    python -m benchmarks.kills --kills 200 --verbs export optimize build package

Each verb overwrites its earlier output, for two models in turn. Half of the kills are spread over the whole time of a
run and a little more, and half over the time in which it writes. A kill ends the process and all its children. After
each kill, the output must be the earlier output or the complete new output. At the end, one more run must leave only
its output in the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked import Server, server

RESULTS = Path(__file__).parent / "results" / "kills.md"
# Number of floats of each of the model's two weights. Writing them takes long enough for a kill to hit.
SIZE = 1 << 21

ENDS = ("left as before", "left the new output", "had ended before the kill")
VERBS = {
    "export": ["export", "MODEL.pt", "-o", "export/out.onnx", "-q"],
    "optimize": ["optimize", "MODEL.onnx", "-o", "optimize/out.onnx", "-q"],
    "build": ["build", "MODEL.onnx", "-o", "build/out.engine", "-q"],
    "package": ["package", "MODEL.onnx", "-o", "package/out", "--replace", "-q"],
}


@dataclass
class Tally:
    """Results for one verb.

    Attributes:
        seconds: duration of an undisturbed run.
        most_left: largest number of files besides the output.
        left: files besides the output after the last, complete run.
    """

    verb: str
    seconds: float
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    most_left: int = 0
    left: list[str] = field(default_factory=list)


def models(folder: Path) -> None:
    """Write two models: ``N.pt`` with two norms and two weights, and ``N.onnx`` as another tool would write it, with
    nothing fused.
    """
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, SIZE // 8)
            self.back = torch.nn.Linear(SIZE // 8, 8)
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.back(torch.relu(self.linear(x))))
            d = x - x.mean(-1, keepdim=True)
            return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5)

    for number in range(2):
        torch.manual_seed(number)
        program = torch.export.export(Net().eval(), (torch.randn(4, 8),))
        torch.export.save(program, folder / f"{number}.pt")
        torch.onnx.export(program, (), folder / f"{number}.onnx", dynamo=True, external_data=False, verbose=False)


def state(output: Path) -> str:
    """Hash a file, or a folder's names and files.

    Returns:
        hex digest; "" if it does not exist.
    """
    files = (
        sorted(p for p in output.rglob("*") if p.is_file()) if output.is_dir() else [output] if output.exists() else []
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(output.parent)}\0".encode() + file.read_bytes())
    return digest.hexdigest() if files else ""


def readable(verb: str, output: Path) -> bool:
    """Check if the output is complete, by reading it; used if the bytes of two runs may differ.

    Returns:
        true if it is.
    """
    if not output.exists():
        return False
    # TensorRT-RTX's engines contain their length.
    if verb == "build":
        return output.stat().st_size > SIZE and output.read_bytes()[1:4] == b"trt"
    if verb == "package":
        return any(output.rglob("config.pbtxt"))
    from normdeploy.storage.onnx_files import load_onnx

    return bool(load_onnx(output).graph.node)


def kill(runs: Server, folder: Path, verb: str, kills: int, rng: random.Random) -> Tally:
    """Run ``verb`` until it was killed ``kills`` times; before every tenth run the output is deleted.

    Returns:
        the results.
    """
    output = folder / VERBS[verb][VERBS[verb].index("-o") + 1]
    output.parent.mkdir()
    commands = [[a.replace("MODEL", str(n)) for a in VERBS[verb]] for n in range(2)]
    whole, measured = set(), []
    tally = Tally(verb, 0)
    for number in itertools.count(-4):
        # An undisturbed run, because the machine's load changes.
        if number < 0 or number % 25 == 0:
            done = runs.run(*commands[number % 2], cwd=folder, watch=output.parent)
            if done.returncode:
                raise SystemExit(f"{verb} fails without a kill: {done.stderr[-2000:]}")
            measured.append(done)
            whole.add(state(output))
        if number < 0:
            continue
        if tally.ends.total() - tally.ends[ENDS[2]] == kills:
            break
        if number % 10 == 9:
            shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)
        before, last = state(output), measured[-1]
        if number % 4 < 2:
            done = runs.run(*commands[number % 2], cwd=folder, kill_after=rng.uniform(0, 1.1 * last.seconds))
        else:
            writing = last.seconds - (
                last.appeared or 0.9 * last.seconds
                # The temporary file may vanish before it is read.
            )
            done = runs.run(*commands[number % 2], cwd=folder, kill_after=rng.uniform(0, writing), watch=output.parent)
        after = state(output)
        if done.returncode not in (0, -signal.SIGKILL):
            tally.broken.append(f"kill {number}: exit code {done.returncode}: {done.stderr[-300:]}")
        tally.ends[ENDS[2] if done.returncode == 0 else ENDS[0] if after == before else ENDS[1]] += 1
        if after != before and after not in whole:
            if not readable(verb, output):
                tally.broken.append(f"kill {number} left a broken output")
            whole.add(after)
        tally.most_left = max(tally.most_left, len(others(output)))
    tally.seconds = statistics.median(done.seconds for done in measured)
    runs.run(*commands[0], cwd=folder)
    tally.left = others(output)
    return tally


def others(output: Path) -> list[str]:
    """List the files next to the output.

    Returns:
        names.
    """
    return sorted(p.name for p in output.parent.iterdir() if p != output)


def table(tallies: Sequence[Tally], seed: int) -> str:
    """Format the results.

    Returns:
        Markdown.
    """
    counts = [
        [
            f"{t.seconds:.2f}",
            t.ends[ENDS[0]] + t.ends[ENDS[1]],
            *(t.ends[e] for e in ENDS),
            len(t.broken),
            t.most_left,
            len(t.left),
        ]
        for t in tallies
    ]
    rows = [f"| `{t.verb}` | {' | '.join(map(str, row))} |" for t, row in zip(tallies, counts, strict=True)]
    return f"""# Kills

`python -m benchmarks.kills --seed {seed}`: SIGKILL at a random moment of a run that writes over its earlier output, to
it and to the
processes that it started; before each tenth run the output was taken away. There are two models, taken in turn, so that
the old output is
not the new one. Half of the moments are spread evenly over 1.1 times the run's own time (seconds, in a process forked
from one that has all
imported, on a machine that does other work too), half over the time in which the run writes.

| verb | seconds | kills | {" | ".join(ENDS)} | broken outputs | leftovers, most | leftovers after one more run |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Leftovers are temporaries beside the output, whose lock tells that nobody writes them any more; the next run removes
them.
"""


def main() -> None:
    """Kill each verb and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    tallies = []
    with tempfile.TemporaryDirectory() as name, server() as runs:
        models(Path(name))
        for verb in options.verbs:
            tallies.append(kill(runs, Path(name), verb, options.kills, random.Random(f"{options.seed} {verb}")))
            print(tallies[-1], flush=True)
    options.output.write_text(table(tallies, options.seed))
    sys.exit(any(t.broken or t.left for t in tallies))


if __name__ == "__main__":
    main()
