"""Speed of the fused kernels on a GPU, beside torch and, where they are installed, Liger-Kernel and quack.

    python benchmarks/kernels.py [--ops NAME ...] [--dtypes fp16 bf16 fp32] [--mib 256] [--dry-run]

For each op, type and size: the time of one call by events around it, the median of many, over buffers that are rotated
so that nothing is found in the cache (together at least four times the L2); while the GPU works through the calls,
nothing waits for Python. ``share`` is the bytes that have to be read and written, over the time, over the bandwidth of
a device-to-device copy measured in the same run. Every tactic of ours is timed: ``default`` is the first, ``best`` what
TensorRT would choose. All compute the same in one run, outputs compared. Writes ``benchmarks/results/kernels.json``
and, where matplotlib is at hand, ``kernels.png``. ``--dry-run`` needs no GPU: it compiles every kernel and lists what
would be run.
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
from normdeploy_plugins._launch import ITEMSIZE, Launch, Op, Tensor
from normdeploy_plugins.driver import Kernel
from normdeploy_plugins.ops import BY_NAME

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
REPEATS = 60
EPS = 1e-5
COLUMNS = (1024, 2048, 4096, 8192, 16384)
Call = Callable[..., Any]


@dataclass(frozen=True)
class Trial:
    """One op at one size: ``shapes`` of its inputs and the attributes; ``others`` computes the same by other means."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    attributes: dict[str, Any]
    others: dict[str, Call]

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shapes[0]))

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        op = BY_NAME[self.op]
        inputs = [
            Tensor(shape, "fp32" if kind == "F" else self.dtype)
            for shape, kind in zip(self.shapes, op.types, strict=False)
        ]
        return inputs, op.output_tensors(inputs, self.attributes)

    def bytes(self) -> int:
        inputs, outputs = self.tensors()
        return sum(torch.Size(t.shape).numel() * ITEMSIZE[t.dtype] for t in (*inputs, *outputs))


def installed(name: str, function: str) -> Call | None:
    import importlib

    try:
        return getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError):
        return None


_WIDE: dict[int, torch.Tensor] = {}


def wide(t: torch.Tensor) -> torch.Tensor:
    """A parameter in fp32, converted once: quack's LayerNorm takes nothing else."""
    if t.data_ptr() not in _WIDE:
        _WIDE[t.data_ptr()] = t.float()
    return _WIDE[t.data_ptr()]


def contestants(eager: Call, more: dict[str, Call | None]) -> dict[str, Call]:
    return {"eager": eager, "compile": torch.compile(eager, dynamic=False)} | {
        name: call for name, call in more.items() if call
    }


def trials(ops: list[str], dtypes: list[str], mib: int) -> Iterator[Trial]:
    """The grid: rows of 1,024 to 16,384 columns, and the group norms of Stable Diffusion, each with at least ``mib``
    MiB in x."""
    layer_norm, rms_norm = torch.nn.functional.layer_norm, torch.nn.functional.rms_norm
    liger_ln, liger_rms = (
        installed("liger_kernel.ops.layer_norm", "LigerLayerNormFunction"),
        installed("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
    )
    quack_rms, quack_ln = installed("quack", "rmsnorm"), installed("quack.rmsnorm", "layernorm_fwd")

    def add_layer_norm(x: Any, r: Any, g: Any, b: Any) -> Any:
        total = x + r
        return layer_norm(total, g.shape, g, b, EPS), total

    def add_rms_norm(x: Any, r: Any, g: Any) -> Any:
        total = x + r
        return rms_norm(total, g.shape, g, EPS), total

    def modulated(x: Any, scale: Any, shift: Any) -> Any:
        return layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift

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
    }
    for name in (n for n in ops if n in rows):
        full, attributes, others = rows[name]
        for dtype in dtypes:
            for n in COLUMNS:
                count = mib * 2**20 // (n * ITEMSIZE[dtype])
                small = len(BY_NAME[name].inputs) - full
                yield Trial(name, ((count, n),) * full + ((n,),) * small, dtype, attributes, others)
    if "ModulatedLayerNorm" in ops:
        for dtype in dtypes:
            for d in (1152, 3072):
                batch = max(1, mib * 2**20 // (1024 * d * ITEMSIZE[dtype]))
                shapes = ((batch, 1024, d), (batch, 1, d), (batch, 1, d))
                yield Trial("ModulatedLayerNorm", shapes, dtype, {"epsilon": EPS}, contestants(modulated, {}))
    yield from images(ops, dtypes, mib)


def images(ops: list[str], dtypes: list[str], mib: int) -> Iterator[Trial]:
    functional = torch.nn.functional
    group = {"epsilon": EPS, "num_groups": 32, "channels_last": 0}

    def channels(x: Any, g: Any, b: Any) -> Any:
        return functional.layer_norm(x.permute(0, 2, 3, 1), g.shape, g, b, EPS).permute(0, 3, 1, 2)

    def last(x: Any, g: Any, b: Any) -> Any:
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


def launches(trial: Trial, capability: tuple[int, int]) -> Iterator[tuple[Any, Launch, Any]]:
    """Every tactic: the tile, the launch, and the compiled kernel."""
    op: Op = BY_NAME[trial.op]
    inputs, outputs = trial.tensors()
    for tile in op.tiles(inputs, trial.attributes):
        launch = op.launch(inputs, trial.attributes, tile)
        yield tile, launch, compile_launch(op, launch, inputs, outputs, capability)


def microseconds(call: Callable[[int], Any], rotations: int) -> float:
    """Median time of ``call(i)``, i going round the buffers; the GPU is kept busy while the calls are queued, so it
    never waits."""
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
    """Bytes a second that a device-to-device copy of 1 GiB reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / (1e-6 * microseconds(lambda _: target.copy_(source), 1))


def measured(trial: Trial, capability: tuple[int, int], bandwidth: float) -> dict[str, Any]:
    inputs, outputs = trial.tensors()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    rotations = max(2, -(-4 * cache // trial.bytes()))

    def filled(t: Tensor, index: int) -> torch.Tensor:
        return torch.randn(t.shape, device="cuda", dtype=DTYPES[t.dtype]) + (1 if index else 0)

    sets = [[filled(t, i) for i, t in enumerate(inputs)] for _ in range(rotations)]
    results = [torch.full(t.shape, torch.nan, device="cuda", dtype=DTYPES[t.dtype]) for t in outputs]
    stream = torch.cuda.current_stream().cuda_stream
    ours, pointers = {}, [[t.data_ptr() for t in held] for held in sets]
    for tile, launch, compiled in launches(trial, capability):
        kernel = Kernel.load(compiled.name, compiled.ptx.encode(), compiled.warps * 32, compiled.shared)
        extra, out = [launch.scalars[a] for a in compiled.arguments], [t.data_ptr() for t in results]
        ours[f"{tile.rows}x{tile.block}/{tile.warps}{'L' if tile.loop else ''}"] = microseconds(
            lambda i, k=kernel, g=launch.grid, e=extra, o=out: k.launch(g, pointers[i], e, o, stream), rotations
        )
    times: dict[str, float] = {"default": next(iter(ours.values())), "best": min(ours.values())}
    differences = {}
    for name, call in trial.others.items():
        try:
            made = call(*sets[(REPEATS - 1) % rotations])
            times[name] = microseconds(lambda i, c=call: c(*sets[i]), rotations)
        except Exception as error:  # a contestant that can't run at a size is named, and the rest goes on
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


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("torch", "triton", "liger-kernel", "quack-kernels"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def plot(rows: list[dict[str, Any]], title: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys((r["op"], r["dtype"]) for r in rows))
    figure, axes = pyplot.subplots(len(names), 1, figsize=(9, 2.4 * len(names)), squeeze=False)
    for (op, dtype), axis in zip(names, axes[:, 0], strict=True):
        own = [r for r in rows if (r["op"], r["dtype"]) == (op, dtype)]
        for contestant in dict.fromkeys(name for r in own for name in r["share"]):
            axis.plot([r["share"].get(contestant) for r in own], marker="o", label=contestant)
        axis.set_xticks(range(len(own)), [r["size"] for r in own], fontsize=7)
        axis.set_ylabel("share of the copy's bandwidth", fontsize=7)
        axis.set_title(f"{op} {dtype}", fontsize=9)
        axis.set_ylim(0)
        axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    without = ("GroupNorm", "NormStatistics", "LayerNormApply", "GroupNormApply")
    default = [name for name, op in BY_NAME.items() if name not in without and "Q" not in op.types]
    parser.add_argument("--ops", nargs="+", choices=default, default=default)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.json")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    planned = trials(options.ops, options.dtypes, options.mib)
    if options.dry_run:
        for trial in planned:
            tactics = [f"{t.rows}x{t.block}/{t.warps}" for t, _, _ in launches(trial, (9, 0))]
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
    try:
        plot(rows, f"{head['gpu']}, {head['date']}, copy {bandwidth / 1e12:.2f} TB/s", options.out.with_suffix(".png"))
    except ImportError:
        print("matplotlib is not installed: no plot")


if __name__ == "__main__":
    main()
