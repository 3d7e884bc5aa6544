"""Measure the speed of the fused kernels on a GPU, against torch and, if installed, Liger-Kernel and quack.

    python benchmarks/kernels.py [--ops NAME ...] [--dtypes fp16 bf16 fp32] [--mib 256] [--dry-run]

For each op, type and size, CUDA events measure many calls, and the median is reported. Calls rotate through buffers
that together have at least four times the size of the L2 cache, so that no call finds its data in the cache. The GPU is
kept busy while the calls are queued, so it never waits for Python. ``share`` is the reached share of the memory
bandwidth. It is the number of bytes that must be read and written, divided by the time and by the bandwidth of a
device-to-device copy in the same run. Every tactic of our kernels is timed: ``default`` is the first tactic, and
``best`` is the tactic that TensorRT would choose. The outputs of all contestants are compared.

Writes ``benchmarks/results/kernels.json``, ``kernels.md`` and, if matplotlib is installed, ``kernels.png``. Two options
need no GPU: ``--dry-run`` compiles every kernel and lists the runs, ``--page`` writes the page and the plot from
``kernels.json``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from normdeploy_plugins._aot import compile_launch
from normdeploy_plugins._launch import ITEMSIZE, Launch, Op, Tensor, Tile
from normdeploy_plugins.driver import Kernel
from normdeploy_plugins.ops import BY_NAME

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STORED = DTYPES | {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}
# Quantizing ops that are timed, one of each kind: with a scale as input, and with a computed scale per row
QUANTIZING = ("LayerNormQuantize", "RMSNormDynamicQuantize")
REPEATS = 60
EPS = 1e-5
COLUMNS = (768, 1024, 2048, 4096, 5120, 8192, 16384)
Call = Callable[..., Any]


@dataclass(frozen=True)
class Trial:
    """One op at one size.

    Attributes:
        shapes: of the inputs.
        others: contestants that compute the same.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    attributes: dict[str, Any]
    others: dict[str, Call]

    @property
    def size(self) -> str:
        """Return the shape of x as text."""
        return "x".join(map(str, self.shapes[0]))

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Describe inputs and outputs.

        Returns:
            inputs and outputs.
        """
        op = BY_NAME[self.op]
        inputs = [
            Tensor(shape, "fp32" if kind == "F" else self.dtype)
            for shape, kind in zip(self.shapes, op.types, strict=False)
        ]
        return inputs, op.output_tensors(inputs, self.attributes)

    def bytes(self) -> int:
        """Count the bytes of inputs and outputs.

        Returns:
            number of bytes.
        """
        inputs, outputs = self.tensors()
        return sum(torch.Size(t.shape).numel() * ITEMSIZE[t.dtype] for t in (*inputs, *outputs))


def installed(name: str, function: str) -> Any:
    """Import a function of an optional library.

    Returns:
        the function, or None if the library is not installed.
    """
    import importlib

    try:
        return getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError):
        return None


_WIDE: dict[int, torch.Tensor] = {}


def wide(t: torch.Tensor) -> torch.Tensor:
    """Convert a parameter to fp32, once; quack's LayerNorm accepts nothing else.

    Returns:
        the parameter in fp32.
    """
    if t.data_ptr() not in _WIDE:
        _WIDE[t.data_ptr()] = t.float()
    return _WIDE[t.data_ptr()]


def contestants(eager: Call, more: dict[str, Call | None]) -> dict[str, Call]:
    """Collect the calls to time.

    Returns:
        name -> call, without those that are not installed.
    """
    return {"eager": eager, "compile": torch.compile(eager, dynamic=False)} | {
        name: call for name, call in more.items() if call
    }


def trials(ops: list[str], dtypes: list[str], mib: int) -> Iterator[Trial]:
    """Yield the grid: rows of 768 to 16,384 columns, and the group norms of Stable Diffusion, each with at least
    ``mib`` MiB in x.

    Yields:
        trials.
    """
    layer_norm, rms_norm = torch.nn.functional.layer_norm, torch.nn.functional.rms_norm
    liger_ln, liger_rms = (
        installed("liger_kernel.ops.layer_norm", "LigerLayerNormFunction"),
        installed("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
    )
    quack_rms, quack_ln = installed("quack", "rmsnorm"), installed("quack.rmsnorm", "layernorm_fwd")

    def add_layer_norm(x: Any, r: Any, g: Any, b: Any) -> Any:
        """Add and normalize with torch.

        Returns:
            norm and sum.
        """
        total = x + r
        return layer_norm(total, g.shape, g, b, EPS), total

    def add_rms_norm(x: Any, r: Any, g: Any) -> Any:
        """Add and normalize with torch.

        Returns:
            norm and sum.
        """
        total = x + r
        return rms_norm(total, g.shape, g, EPS), total

    def modulated(x: Any, scale: Any, shift: Any) -> Any:
        """Normalize and modulate with torch.

        Returns:
            like x.
        """
        return layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift

    def to_int8(x: Any, g: Any, b: Any, scale: Any) -> Any:
        """Normalize and quantize with torch.

        Returns:
            int8.
        """
        return (layer_norm(x, g.shape, g, b, EPS).float() / scale).round().clamp(-128, 127).to(torch.int8)

    def to_fp8(x: Any, g: Any) -> Any:
        """Normalize and quantize by row with torch.

        Returns:
            FP8 values and scales.
        """
        y = rms_norm(x, g.shape, g, EPS).float()
        scale = y.abs().amax(-1, keepdim=True).clamp(min=EPS) / 448
        return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    rows: dict[str, tuple[int, dict[str, Any], dict[str, Call]]] = {
        "LayerNorm": (
            1,
            {"epsilon": EPS, "axis": -1, "ddof": 0},
            contestants(
                lambda x, g, b: layer_norm(x, g.shape, g, b, EPS),
                {
                    "liger": liger_ln and (lambda x, g, b: liger_ln.apply(x, g, b, EPS)),
                    "quack": quack_ln and (lambda x, g, b: quack_ln(x, wide(g), wide(b), EPS)),
                },
            ),
        ),
        "RMSNorm": (
            1,
            {"epsilon": EPS, "axis": -1, "offset": 0.0},
            contestants(
                lambda x, g: rms_norm(x, g.shape, g, EPS),
                {
                    "liger": liger_rms and (lambda x, g: liger_rms.apply(x, g, EPS)),
                    "quack": quack_rms and (lambda x, g: quack_rms(x, g, eps=EPS)),
                },
            ),
        ),
        "AddLayerNorm": (2, {"epsilon": EPS}, contestants(add_layer_norm, {})),
        "AddRMSNorm": (
            2,
            {"epsilon": EPS, "offset": 0.0},
            contestants(
                add_rms_norm,
                {"quack": quack_rms and (lambda x, r, g: quack_rms(x, g, residual=r, eps=EPS, prenorm=True))},
            ),
        ),
        "StdNorm": (
            1,
            {"epsilon": EPS, "axis": -1, "ddof": 1},
            contestants(lambda x, g, b: g * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + EPS) + b, {}),
        ),
        "LayerNormQuantize": (1, {"epsilon": EPS, "axis": -1, "to": "int8"}, contestants(to_int8, {})),
        "RMSNormDynamicQuantize": (
            1,
            {"epsilon": EPS, "axis": -1, "least": EPS, "to": "fp8"},
            contestants(to_fp8, {}),
        ),
    }
    for name in (n for n in ops if n in rows):
        full, attributes, others = rows[name]
        for dtype in dtypes:
            for n in COLUMNS:
                count = mib * 2**20 // (n * ITEMSIZE[dtype])
                small = tuple((1,) if i == "y_scale" else (n,) for i in BY_NAME[name].inputs[full:])
                yield Trial(name, ((count, n),) * full + small, dtype, attributes, others)
    if "ModulatedLayerNorm" in ops:
        for dtype in dtypes:
            for d in (1152, 3072):
                batch = max(1, mib * 2**20 // (1024 * d * ITEMSIZE[dtype]))
                shapes = ((batch, 1024, d), (batch, 1, d), (batch, 1, d))
                yield Trial("ModulatedLayerNorm", shapes, dtype, {"epsilon": EPS}, contestants(modulated, {}))
    yield from images(ops, dtypes, mib)


def images(ops: list[str], dtypes: list[str], mib: int) -> Iterator[Trial]:
    """Yield the trials of norms of images.

    Yields:
        trials.
    """
    functional = torch.nn.functional
    group = {"epsilon": EPS, "num_groups": 32, "channels_last": 0}

    def channels(x: Any, g: Any, b: Any) -> Any:
        """Normalize over the channels with torch.

        Returns:
            like x.
        """
        return functional.layer_norm(x.permute(0, 2, 3, 1), g.shape, g, b, EPS).permute(0, 3, 1, 2)

    def last(x: Any, g: Any, b: Any) -> Any:
        """Apply a group norm and SiLU to channels-last data with torch.

        Returns:
            like x.
        """
        return functional.silu(functional.group_norm(x.permute(0, 3, 1, 2), 32, g, b, EPS)).permute(0, 2, 3, 1)

    table: list[tuple[str, dict[str, Any], Call, bool]] = [
        ("GroupNormSiLU", group, lambda x, g, b: functional.silu(functional.group_norm(x, 32, g, b, EPS)), False),
        ("GroupNormSiLU", group | {"channels_last": 1}, last, True),
        (
            "InstanceNorm",
            {"epsilon": EPS},
            lambda x, g, b: functional.instance_norm(x, weight=g, bias=b, eps=EPS),
            False,
        ),
        ("ChannelLayerNorm", {"epsilon": EPS}, channels, False),
        (
            "ScaleShift",
            {"axis": 1, "activation": "silu"},
            lambda x, g, b: functional.silu(x * g[:, None, None] + b[:, None, None]),
            False,
        ),
    ]
    for name, attributes, eager, channels_last in table:
        for dtype in dtypes if name in ops else []:
            for c, side in ((320, 64), (640, 32), (1280, 16), (128, 256)):
                batch = max(1, mib * 2**20 // (c * side * side * ITEMSIZE[dtype]))
                shape = (batch, side, side, c) if channels_last else (batch, c, side, side)
                yield Trial(name, (shape, (c,), (c,)), dtype, attributes, contestants(eager, {}))


def launches(trial: Trial, capability: tuple[int, int]) -> Iterator[tuple[Tile, Launch, Any]]:
    """Compile every tactic.

    Yields:
        the tile, the launch, and the compiled kernel.
    """
    op: Op = BY_NAME[trial.op]
    inputs, outputs = trial.tensors()
    for tile in op.tiles(inputs, trial.attributes):
        launch = op.launch(inputs, trial.attributes, tile)
        yield tile, launch, compile_launch(op, launch, inputs, outputs, capability)


def microseconds(call: Callable[[int], Any], rotations: int) -> float:
    """Time ``call(i)`` for i = 0, 1, … over the buffers. The GPU is kept busy while the calls are queued, so it never
    waits.

    Returns:
        median in µs.
    """
    for i in range(rotations):
        call(i)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    torch.cuda._sleep(200_000_000)
    marks[0].record()
    for i in range(REPEATS):
        call(i % rotations)
        marks[i + 1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def copy_bandwidth() -> float:
    """Measure a device-to-device copy of 1 GiB.

    Returns:
        bytes a second, read and written.
    """
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / (1e-6 * microseconds(lambda _: target.copy_(source), 1))


def tile_name(tile: Tile) -> str:
    """Name a tactic as on the page.

    Returns:
        rows x elements / warps, with L for a loop.
    """
    return f"{tile.rows}x{tile.block}/{tile.warps}" + "L" * tile.loop


def measured(trial: Trial, capability: tuple[int, int], bandwidth: float) -> dict[str, Any]:
    """Time all tactics and contestants of a trial, and compare their outputs.

    Returns:
        a row of the results.
    """
    inputs, outputs = trial.tensors()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    rotations = max(2, -(-4 * cache // trial.bytes()))

    def filled(t: Tensor, index: int) -> torch.Tensor:
        """Fill an input.

        Returns:
            tensor on the GPU.
        """
        if t.shape == (1,):
            return torch.full(t.shape, 0.02, device="cuda", dtype=STORED[t.dtype])
        return torch.randn(t.shape, device="cuda", dtype=STORED[t.dtype]) + (1 if index else 0)

    def poisoned(t: Tensor) -> torch.Tensor:
        """Fill an output with a value that no kernel writes.

        Returns:
            tensor on the GPU.
        """
        return torch.full(t.shape, 85 if t.dtype == "i8" else torch.nan, device="cuda", dtype=STORED[t.dtype])

    sets = [[filled(t, i) for i, t in enumerate(inputs)] for _ in range(rotations)]
    results = [poisoned(t) for t in outputs]
    stream = torch.cuda.current_stream().cuda_stream
    ours, pointers = {}, [[t.data_ptr() for t in held] for held in sets]
    for tile, launch, compiled in launches(trial, capability):
        kernel = Kernel.load(compiled.name, compiled.ptx.encode(), compiled.warps * 32, compiled.shared)
        extra, out = [launch.scalars[a] for a in compiled.arguments], [t.data_ptr() for t in results]
        ours[tile_name(tile)] = microseconds(
            lambda i, k=kernel, g=launch.grid, e=extra, o=out: k.launch(g, pointers[i], e, o, stream), rotations
        )
    times: dict[str, float] = {"default": next(iter(ours.values())), "best": min(ours.values())}
    differences = {}
    for name, call in trial.others.items():
        try:
            made = call(*sets[(REPEATS - 1) % rotations])
            times[name] = microseconds(lambda i, c=call: c(*sets[i]), rotations)
        # A contestant that can't run at a size is named, and the others go on.
        except Exception as error:
            differences[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        first = made[0] if isinstance(made, tuple) else made
        differences[name] = float((first.float() - results[0].float()).abs().max())
    return {
        "op": trial.op,
        "dtype": trial.dtype,
        "size": trial.size,
        "channels_last": trial.attributes.get("channels_last"),
        "bytes": trial.bytes(),
        "microseconds": {k: round(v, 2) for k, v in times.items()},
        "share": {k: round(trial.bytes() / (1e-6 * v) / bandwidth, 4) for k, v in times.items()},
        "tactics": {k: round(v, 2) for k, v in ours.items()},
        "difference": differences,
    }


_PACKAGES = {"torch": "torch", "triton": "triton", "liger-kernel": "liger_kernel", "quack-kernels": "quack"}


def versions() -> dict[str, str]:
    """List the versions of the packages.

    Returns:
        name -> version, or "not installed" if the package is missing or its import fails.
    """
    import importlib
    from importlib import metadata

    found = {}
    for name, module in _PACKAGES.items():
        try:
            importlib.import_module(module)
            found[name] = metadata.version(name)
        except (ImportError, metadata.PackageNotFoundError):
            found[name] = "not installed"
    return found


def plot(rows: list[dict[str, Any]], title: str, file: Path) -> None:
    """Plot the shares by op and type."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops, dtypes = (list(dict.fromkeys(r[key] for r in rows)) for key in ("op", "dtype"))
    figure, axes = pyplot.subplots(len(ops), len(dtypes), figsize=(6 * len(dtypes), 1.9 * len(ops)), squeeze=False)
    for (op, dtype), axis in zip(itertools.product(ops, dtypes), axes.flat, strict=True):
        own = [r for r in rows if (r["op"], r["dtype"]) == (op, dtype)]
        for contestant in dict.fromkeys(name for r in own for name in r["share"]):
            axis.plot([r["share"].get(contestant) for r in own], marker="o", markersize=3, label=contestant)
        axis.set_xticks(range(len(own)), [r["size"] for r in own], fontsize=5)
        axis.set_ylabel("share", fontsize=6)
        axis.tick_params("y", labelsize=6)
        axis.set_title(f"{op} {dtype}", fontsize=8)
        axis.set_ylim(0, 1)
    axes[0, 0].legend(fontsize=6)
    figure.suptitle(f"Share of the copy's bandwidth. {title}", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(file, dpi=70)


def page(found: dict[str, Any], name: str = "kernels") -> str:
    """Write the page: a summary for each op, then every row.

    Args:
        name: of the JSON file and the plot, without suffix.

    Returns:
        Markdown.
    """
    rows = found["rows"]
    names = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version != "not installed")
    missing = [name for name, version in found["versions"].items() if version == "not installed"]
    lines = [
        "# The kernels, measured",
        "",
        f"On one {found['gpu']}, {found['date']}; {names}; not installed there: {', '.join(missing) or 'none'}.",
        "`python -m benchmarks.kernels` measures, and writes this page and `" + name + ".json`; its head says how.",
        "",
        "**Kernels ran alone, compiled ahead of time and launched through CUDA's driver; no TensorRT engine did.** A",
        "share is the bytes that have to be read and written, over the time, over the bandwidth of a copy on the same",
        f"GPU ({_terabytes(found)} TB/s, bytes read and written together). *default*: our first tactic; *best*: the",
        "fastest of all, which TensorRT picks by its clock when it builds; *eager* and *compile*: the same formula in",
        "torch and through `torch.compile`. *Faster*: by 3 % or more.",
        "",
        *found.get("notes", []),
        f"![Shares]({name}.png)",
        "",
        *_summary(rows),
        "",
        "Rows where `torch.compile` is faster than the best of ours: " + "; ".join(_lost(rows)) + ".",
    ]
    for op, dtype in dict.fromkeys((r["op"], r["dtype"]) for r in rows):
        own = [r for r in rows if (r["op"], r["dtype"]) == (op, dtype)]
        contestants = list(dict.fromkeys(name for r in own for name in r["share"]))
        lines += ["", f"## {op} {dtype}", "", "| size | MiB | tactic | " + " | ".join(contestants) + " |"]
        lines += ["|---|---|---|" + "---|" * len(contestants)]
        for r in own:
            cells = [_cell(r, name) for name in contestants]
            size = r["size"] + (" NHWC" if r["channels_last"] else "")
            best = min(r["tactics"], key=r["tactics"].get)
            lines.append(f"| {size} | {r['bytes'] / 2**20:.0f} | {best} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _terabytes(found: dict[str, Any]) -> str:
    return f"{found['copy_bytes_per_second'] / 1e12:.2f}"


def _cell(row: dict[str, Any], contestant: str) -> str:
    if contestant not in row["share"]:
        return "not run"
    return f"{row['microseconds'][contestant]:.0f} µs, {row['share'][contestant]:.0%}"


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line for each op: the range of the shares, and the number of rows in which torch is faster."""
    lines = ["| op | rows | default | best | eager | compile | compile faster than default | than best |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for op, last in dict.fromkeys((r["op"], r["channels_last"]) for r in rows):
        own = [r for r in rows if (r["op"], r["channels_last"]) == (op, last)]
        cells = []
        for name in ("default", "best", "eager", "compile"):
            shares = [r["share"][name] for r in own if name in r["share"]]
            cells.append(f"{min(shares):.0%} to {max(shares):.0%}" if shares else "not run")
        for name in ("default", "best"):
            cells.append(str(sum(_faster(r, "compile", name) for r in own)))
        lines.append(f"| {op}{' NHWC' if last else ''} | {len(own)} | " + " | ".join(cells) + " |")
    return lines


def _lost(rows: list[dict[str, Any]]) -> list[str]:
    """List the rows in which torch.compile is faster than every tactic of ours, with both shares."""
    lost = [r for r in rows if _faster(r, "compile", "best")]
    names = [f"{r['op']} {r['dtype']} {r['size']}" for r in lost]
    shares = [f" ({r['share']['compile']:.0%}, ours {r['share']['best']:.0%})" for r in lost]
    return [name + share for name, share in zip(names, shares, strict=True)] or ["none"]


def _faster(row: dict[str, Any], one: str, other: str) -> bool:
    """Check if ``one`` took at least 3 % less time than ``other``; smaller differences are noise."""
    times = row["microseconds"]
    return one in times and times[one] < 0.97 * times[other]


def publish(results: Path) -> None:
    """Write the page from the JSON file ``results``, and the plot if matplotlib is installed."""
    found = json.loads(results.read_text())
    results.with_suffix(".md").write_text(page(found, results.stem))
    title = f"{found['gpu']}, {found['date']}, copy {_terabytes(found)} TB/s"
    try:
        plot(found["rows"], title, results.with_suffix(".png"))
    except ImportError:
        print("matplotlib is not installed: no plot")


def main() -> None:
    """Run the trials, or only compile them or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    without = ("GroupNorm", "NormStatistics", "LayerNormApply", "GroupNormApply")
    default = [
        name for name, op in BY_NAME.items() if name not in without and ("Q" not in op.types or name in QUANTIZING)
    ]
    parser.add_argument("--ops", nargs="+", choices=default, default=default)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.json")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        publish(options.out)
        return
    planned = trials(options.ops, options.dtypes, options.mib)
    if options.dry_run:
        for trial in planned:
            tactics = [tile_name(t) for t, _, _ in launches(trial, (9, 0))]
            size = f"{trial.size:20} {trial.bytes() / 2**20:8.1f} MiB"
            print(f"{trial.op:20} {trial.dtype} {size}  {', '.join(tactics)}  beside {', '.join(trial.others)}")
        return
    if not torch.cuda.is_available():
        raise SystemExit(
            "no GPU here: nothing was measured (--dry-run compiles the kernels and lists what would be run)"
        )
    bandwidth, capability = copy_bandwidth(), torch.cuda.get_device_capability()
    head = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "copy_bytes_per_second": bandwidth,
        "versions": versions(),
    }
    print(f"{head['gpu']}, copy {bandwidth / 1e12:.3f} TB/s")
    rows = []
    for trial in planned:
        rows.append(measured(trial, capability, bandwidth))
        shares = "  ".join(f"{name} {share:.1%}" for name, share in rows[-1]["share"].items())
        print(f"{trial.op:20} {trial.dtype} {trial.size:20} {shares}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        _WIDE.clear()
    publish(options.out)


if __name__ == "__main__":
    main()
