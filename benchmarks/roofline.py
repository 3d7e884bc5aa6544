"""Estimate the share of memory bandwidth that the fused kernels can reach, from counts that need no GPU.

    python -m benchmarks.roofline [--types fp16] [--ops NAME ...]

For every op and layout, with static and dynamic sizes, two things are counted. The tests' emulator of PTX counts what
one block issues (accesses by width, instructions). For each compute capability, ptxas reports registers and spilled
bytes, and the rules of NVIDIA's ``cuda_occupancy.h`` give the warps that a multiprocessor then holds. Nothing is timed,
and no GPU is used.

The share is that of a roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): the time of the memory over the
longest of three times. The first is the bytes to move over the bandwidth. The second is the instructions over four per
clock and multiprocessor. The third is the bytes over those in flight, by Little's law (Volkov, "Better performance at
lower occupancy", GTC 2010): latency · bandwidth bytes must be in flight, and the resident warps load a limited number
before they wait. The instructions are PTX's; ptxas translates them to others. The model ignores caches, the tail of the
last blocks, and waits in reductions.

Writes ``benchmarks/results/roofline.json``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normdeploy_plugins._launch import ITEMSIZE
from normdeploy_plugins.ops import BY_NAME

from tests.plugins import counted
from tests.plugins.bindings.cases import HWC8, SIZES, Case, cases
from tests.plugins.occupancy import LIMITS

RESULTS = Path(__file__).parent / "results"
# Seconds from a load to its data. This is an assumption; measured values are between 400 and 800 ns.
LATENCY = 600e-9


@dataclass(frozen=True)
class Gpu:
    """GPU by the vendor's data sheet.

    Attributes:
        bandwidth: bytes a second.
        clock: with boost, in Hz.
    """

    name: str
    bandwidth: float
    multiprocessors: int
    clock: float


GPUS = {
    (8, 0): Gpu("A100 SXM 80 GB", 2.039e12, 108, 1.41e9),
    (8, 6): Gpu("RTX 3090", 0.936e12, 82, 1.70e9),
    (8, 9): Gpu("RTX 4090", 1.008e12, 128, 2.52e9),
    (9, 0): Gpu("H100 SXM", 3.35e12, 132, 1.98e9),
    (10, 0): Gpu("B200", 8.0e12, 148, 1.96e9),
    (12, 0): Gpu("RTX 5090", 1.792e12, 170, 2.41e9),
}


def share(gpu: Gpu, size: int, instructions: float, under_way: float) -> float:
    """Compute the share of the bandwidth.

    Args:
        size: bytes to move.
        instructions: of all warps.
        under_way: bytes in flight on one multiprocessor.

    Returns:
        between 0 and 1.
    """
    memory = size / gpu.bandwidth
    issue = instructions / (4 * gpu.multiprocessors * gpu.clock)
    waiting = size / (under_way * gpu.multiprocessors / LATENCY)
    return memory / max(memory, issue, waiting)


def measured(case: Case, tactic: int, capabilities: Iterable[tuple[int, int]] = ((9, 0),)) -> dict[str, Any]:
    """Count one tactic.

    Returns:
        a row of the results.
    """
    op, inputs, _ = case.call(SIZES[0])
    made = counted.kernel(case, (9, 0), tactic, SIZES[0])
    # Parts of a row; the last may be empty.
    blocks = range(case.attributes.get("splits", 1))
    found = counted.issued(case, made, blocks)
    large = [t for t in made.tensors if math.prod(t.shape) == math.prod(inputs[0].shape)]
    size = sum(math.prod(t.shape) * ITEMSIZE[t.dtype] for t in made.tensors)
    elements, tile, warps = math.prod(inputs[0].shape), made.tile, made.launch.warps
    instructions = found.instructions / len(blocks) * made.launch.grid
    each = max(1, tile.rows * tile.block // (32 * warps)) * ITEMSIZE[inputs[0].dtype]
    reads = max(1, len(large) - len(op.outputs)) if op.name != "NormStatistics" else 1
    row: dict[str, Any] = {
        "op": case.op,
        "layout": case.layout or ("NCHW" if len(inputs[0].shape) == 4 else "rows"),
        "format": "HWC8" if case.format == HWC8 else "LINEAR",
        "dtype": case.types[0],
        "sizes": "dynamic" if case.dynamic else "static",
        "tile": f"{tile.rows}x{tile.block}/{tile.warps}" + "L" * tile.loop + f" pack {tile.pack}" * (tile.pack > 1),
        "bytes": size,
        "accesses": {f"{name}.{kind}.{width}": n for (name, kind, width), n in sorted(found.accesses.items()) if n},
        "instructions": round(instructions / (elements / 32), 1),
        "gpus": {},
    }
    for capability in capabilities:
        gpu = GPUS[capability]
        registers, spilled, occupied = counted.kernel(case, capability, tactic, SIZES[0]).resources(capability)
        under_way = occupied * LIMITS[capability].warps * 32 * each * reads
        row["gpus"]["{}.{}".format(*capability)] = {
            "registers": registers,
            "spilled": spilled,
            "occupancy": round(occupied, 3),
            "share": round(share(gpu, size, instructions, under_way), 3),
        }
    return row


def rows(types: list[str], ops: list[str]) -> Iterator[dict[str, Any]]:
    """Yield for each case the tactic with the largest share on 9.0, the first if several are equal; TensorRT takes the
    fastest by its clock.

    Yields:
        rows.
    """
    for case in cases(types):
        # Two of the GPUs lack FP8, and int8 costs the same.
        if case.attributes.get("to") == "fp8":
            continue
        letters = zip(case.types, BY_NAME[case.op].types, strict=False)
        if any(kind != case.types[0] and letter != "F" for kind, letter in letters) or (ops and case.op not in ops):
            continue
        op, inputs, attributes = case.call(unknown=counted.Unknown()) if case.dynamic else case.call(SIZES[0])
        tried = [measured(case, tactic) for tactic in range(len(op.tiles(inputs, attributes)))]
        best = max(range(len(tried)), key=lambda i: tried[i]["gpus"]["9.0"]["share"])
        yield measured(case, best, GPUS)


def widths(row: dict[str, Any]) -> str:
    """Describe the accesses to x and y, the widest first.

    Returns:
        text.
    """
    words = []
    for name in ("x", "y"):
        kinds = {int(k.split(".")[2]): n for k, n in row["accesses"].items() if k.split(".")[0] == name}
        words += [f"{name} " + ", ".join(f"{n}×{w}" for w, n in sorted(kinds.items(), reverse=True))] if kinds else []
    return "; ".join(words)


def page(found: list[dict[str, Any]]) -> str:
    """Write the page.

    Returns:
        Markdown.
    """
    gpus = ", ".join(f"{g.name} ({c[0]}.{c[1]})" for c, g in GPUS.items())
    spilled = sum(g["spilled"] for r in found for g in r["gpus"].values())
    lines = [
        "# The kernels' costs, counted",
        "",
        "**Estimates: nothing here was timed.** What the kernels reach on an H200 is [measured](kernels.md), and is",
        "less: this model knows no wait of a reduction. `python -m benchmarks.roofline` writes this page and",
        "`roofline.json`; its head says how. Accesses: of one block's warps, count × bytes a thread; the few",
        "loads of 2 or 4 bytes beside those of 16 are each row's first element. Instructions: PTX's, of warps, for 32",
        "elements. Then for each compute capability: registers a thread · occupancy · the share of the bandwidth that",
        f"the roofline allows, with a latency of {LATENCY * 1e9:.0f} ns (assumed) and the data sheets' numbers of",
        f"{gpus}.",
        "Of several tactics the one of the largest share on 9.0.",
        f"Spilled bytes of all these kernels on all these GPUs together: {spilled}.",
        "",
        "![Estimated shares](roofline.png)",
    ]
    for dtype in dict.fromkeys(r["dtype"] for r in found):
        own = [r for r in found if r["dtype"] == dtype]
        names = list(own[0]["gpus"])
        lines += ["", f"## {dtype}", "", "| op | sizes | tile | accesses | instr. | " + " | ".join(names) + " |"]
        lines += ["|---|---|---|---|---|" + "---|" * len(names)]
        for r in own:
            form = f" {r['layout']}" + f" {r['format']}" * (r["format"] != "LINEAR")
            cells = [f"{g['registers']} · {g['occupancy']:.0%} · {g['share']:.0%}" for g in r["gpus"].values()]
            head = [r["op"] + form, r["sizes"], r["tile"], widths(r), str(r["instructions"])]
            lines.append("| " + " | ".join(head + cells) + " |")
    return "\n".join(lines) + "\n"


def plot(found: list[dict[str, Any]], file: Path) -> None:
    """Plot the shares of fp16 by GPU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    own = [r for r in found if r["dtype"] == "fp16"]
    figure, axis = pyplot.subplots(figsize=(9, 0.24 * len(own) + 1.5))
    for capability, gpu in GPUS.items():
        values = [r["gpus"]["{}.{}".format(*capability)]["share"] for r in own]
        axis.plot(values, range(len(own)), "o", markersize=3, label=gpu.name)
    labels = [f"{r['op']} {r['layout']} {r['format'] if r['format'] != 'LINEAR' else ''} {r['sizes']}" for r in own]
    axis.set_yticks(range(len(own)), labels, fontsize=6)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.02)
    axis.set_xlabel("share of the bandwidth, ESTIMATED from counts (fp16)")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Count all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=list(ITEMSIZE), default=["fp16"])
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("NORMDEPLOY_CACHE", folder)
        for row in rows(options.types, options.ops):
            found.append(row)
            print(row["op"], row["layout"], row["format"], row["dtype"], row["sizes"], row["gpus"]["9.0"], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "roofline.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "roofline.md").write_text(page(found))
    plot(found, options.out / "roofline.png")


if __name__ == "__main__":
    main()
