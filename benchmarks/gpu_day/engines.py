"""Build and run engines of whole models on a GPU. Each step, from the PyTorch model to the timed run, is a row.

    python -m benchmarks.gpu_day.engines RESULTS.json tensorrt|tensorrt-rtx [plugin]

If a model gives no engine, the run continues with the next model. Exits with 1 if a step failed, with 3 if one could
not run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import normdeploy
from normdeploy.errors import RuntimeUnavailable

from ..whole_models.subjects import SUBJECTS, Subject

NAMES = ("MiniLM, trained", "ResNet-50, GroupNorm", "UNet", "norms by hand")
FAILED, MISSING = 1, 3
Feeds = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """Result of one step.

    Attributes:
        status: "passed", "failed" or "not run".
        detail: figures, or the reason.
    """

    name: str
    status: str
    seconds: float
    detail: str


class Missing(Exception):
    """Something that a step needs is not installed."""


class Chain:
    """Steps of one model in one precision."""

    def __init__(self, subject: Subject, precision: str | None, runtime: str, norm_impl: str, folder: Path) -> None:
        self.subject, self.precision, self.runtime, self.norm_impl = subject, precision, runtime, norm_impl
        self.name = f"{subject.name}, {precision or 'fp32'}"
        self.onnx, self.engine = folder / "model.onnx", folder / "model.engine"
        self.net, self.args = subject.build(), subject.args(2)

    def steps(self) -> dict[str, Callable[[], str]]:
        """List the steps.

        Returns:
            name -> function that returns the figures.
        """
        more = {"runtime cache": self.runtime_cache, "EPContext": self.ep_context} if "rtx" in self.runtime else {}
        return {
            **{"export": self.export, "build": self.build, "verify": self.verify, "DLPack": self.dlpack},
            **{"CUDA graph": self.cuda_graph, **more, "bench": self.bench},
        }

    def export(self) -> str:
        """Export the model.

        Returns:
            number of norms.
        """
        fuse = "portable" if self.norm_impl == "plugin" else "standard"
        made = normdeploy.export(
            self.net, self.args, output=self.onnx, runtime=self.runtime, fuse=fuse, precision=self.precision
        )
        done = [f for f in made.summary.findings if f.status in ("fused", "folded")]
        return f"{len(done)} norms fused or folded"

    def build(self) -> str:
        """Build the engine.

        Returns:
            figures.
        """
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        targets = [".".join(map(str, capability))] if capability is not None and "rtx" in self.runtime else []
        built = normdeploy.build(
            self.onnx,
            self.engine,
            library=self.runtime,
            norm_impl=self.norm_impl,
            compute_capabilities=targets,
            timeout=120,
        )
        forms = Counter(norm.form for norm in built.norms)
        kinds = "".join(f", {count} norms as {form}" for form, count in forms.items())
        return f"{built.version}: {built.bytes / 1e6:.1f} MB, {built.layers} layers{kinds}"

    def verify(self) -> str:
        """Verify file and engine.

        Returns:
            the worst error.

        Raises:
            AssertionError: one is wrong.
        """
        compared = normdeploy.verify(self.net, [self.onnx, self.engine], self.args)
        missed = [m for m in compared.not_run if m.file == self.engine.name]
        if missed:
            raise Missing(missed[0].reason)
        wrong = [r for r in compared.results if not r]
        if wrong:
            raise AssertionError(f"{wrong[0].runtime}: {wrong[0].reason or f'error {wrong[0].max_abs_error:.3g}'}")
        worst = max(compared.results, key=lambda r: r.max_abs_error / r.allowed if r.allowed else 0.0)
        runtimes = ", ".join(dict.fromkeys(r.runtime for r in compared.results))
        return f"error {worst.max_abs_error:.2g} of {worst.allowed:.2g} allowed ({worst.runtime}); ran in {runtimes}"

    def dlpack(self) -> str:
        """Check that arrays on the CPU and tensors on the GPU give the same numbers, and that outputs are where the
        inputs were.

        Returns:
            figures.
        """
        with normdeploy.open_runner(self.engine) as runner:
            feeds = self._feeds(runner)
            here = runner.infer({name: tensor.cpu().numpy() for name, tensor in feeds.items()})
            there = runner.infer(feeds)
            torch.cuda.synchronize()
        return _same(here, there)

    def cuda_graph(self) -> str:
        """Check that a replayed graph gives the launched engine's numbers, also for inputs other than the recorded
        ones.

        Returns:
            figures.
        """
        with (
            normdeploy.open_runner(self.engine) as plain,
            normdeploy.open_runner(self.engine, cuda_graph=True) as graph,
        ):
            feeds = self._feeds(plain)
            graph.infer(feeds)
            feeds = {name: tensor.flip(0).contiguous() for name, tensor in feeds.items()}
            expected = {name: value.cpu().numpy() for name, value in plain.infer(feeds).items()}
            return _same(expected, graph.infer(feeds))

    def runtime_cache(self) -> str:
        """Check that the first run compiles, and that a second runner finds the result.

        Returns:
            figures.
        """
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            with normdeploy.open_runner(self.engine, runtime_cache=True) as runner:
                runner.infer(self._feeds(runner))
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        cache = self.engine.with_name(f"{self.engine.name}.runtime-cache")
        if not cache.is_file() or not cache.stat().st_size:
            raise AssertionError(f"no {cache.name} was written")
        return f"first run {seconds[0]:.2f} s, with the cache {seconds[1]:.2f} s, {cache.stat().st_size / 1e3:.0f} kB"

    def ep_context(self) -> str:
        """Check that onnxruntime's provider gives our numbers for the engine in an EPContext file.

        Returns:
            figures.
        """
        import onnxruntime

        try:
            import onnxruntime_ep_nv_tensorrt_rtx as provider
        except ImportError as error:
            raise Missing("onnxruntime-ep-nv-tensorrt-rtx-cu13 is not installed") from error
        file = self.onnx.with_name("context.onnx")
        normdeploy.build(self.onnx, file, library=self.runtime, ep_context="embed", timeout=120)
        onnxruntime.register_execution_provider_library(provider.get_ep_name(), provider.get_library_path())
        devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == provider.get_ep_name()]
        if not devices:
            raise Missing(f"{provider.get_ep_name()} finds no device")
        options = onnxruntime.SessionOptions()
        options.add_provider_for_devices(devices[:1], {})
        session = onnxruntime.InferenceSession(file, options)
        with normdeploy.open_runner(self.engine) as runner:
            feeds = {name: tensor.cpu().numpy() for name, tensor in self._feeds(runner).items()}
            expected = runner.infer(feeds)
        made = session.run(None, feeds)
        return _same(expected, dict(zip((o.name for o in session.get_outputs()), made, strict=True)))

    def bench(self) -> str:
        """Race model, file and engine.

        Returns:
            medians.
        """
        race = normdeploy.bench([self.net, self.onnx, self.engine], self.args, rounds=30)
        if not race:
            raise AssertionError("; ".join(f"{e.runtime}: {e.reason}" for e in race.entries if e.reason))
        return "; ".join(f"{e.runtime} {e.median:.3g} ms" for e in race.entries)

    def _feeds(self, runner: Any) -> Feeds:
        if not torch.cuda.is_available():
            raise Missing("torch sees no GPU")
        return {
            spec.name: tensor.cuda().to(getattr(torch, spec.dtype))
            for spec, tensor in zip(runner.inputs, self.args, strict=True)
        }


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Check that both are equal to the last bit, as one engine's numbers for one input must be."""
    for name, value in one.items():
        a, b = (v.cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in (value, other[name]))
        if not np.array_equal(a, b, equal_nan=True):
            raise AssertionError(f"{name!r} differs by {np.abs(a.astype(float) - b.astype(float)).max():.3g}")
    return "equal to the last bit"


def run(chain: Chain) -> list[Row]:
    """Run all steps in order; without a file or an engine, the later ones are left out.

    Returns:
        rows.
    """
    rows: list[Row] = []
    for step, act in chain.steps().items():
        start = time.perf_counter()
        try:
            status, detail = "passed", act()
        except (Missing, RuntimeUnavailable) as reason:
            status, detail = "not run", str(reason)
        # The purpose of the day is to find everything that breaks in a step.
        except Exception as error:
            status, detail = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        rows.append(Row(f"{chain.name}: {step}", status, round(time.perf_counter() - start, 1), detail))
        print(f"{rows[-1].name}: {status}, {detail}", flush=True)
        if status != "passed" and step in ("export", "build"):
            break
    return rows


def main(results: str, runtime: str, norm_impl: str = "native") -> int:
    """Run all models.

    Returns:
        exit code.
    """
    rows: list[Row] = []
    for subject in (s for s in SUBJECTS if s.name in NAMES):
        for precision in (None, "fp16"):
            with tempfile.TemporaryDirectory() as folder:
                rows += run(Chain(subject, precision, runtime, norm_impl, Path(folder)))
            Path(results).write_text(json.dumps([asdict(row) for row in rows]))
    statuses = {row.status for row in rows}
    if "failed" in statuses:
        return FAILED
    if "not run" in statuses:
        print(next(row.detail for row in rows if row.status == "not run"))
        return MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
