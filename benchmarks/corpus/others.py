"""Run other optimizers over the corpus, each in a separate process with a time limit per file."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Self

import onnx

from models.case import NORMS

from .entry import Entry, nodes
from .judge import Truth, fits, ops, valid
from .ours import Row

# Time limit for one file in seconds; the slowest file that a tool finishes takes two seconds.
SECONDS = 60.0
_WORKER = Path(__file__).with_name("worker.py")


class Worker:
    """Process that runs one tool on one file after another, and is restarted when it dies or hangs."""

    def __init__(self, python: str, tool: str) -> None:
        self.python, self.tool = python, tool
        self.version = ""
        self._start()

    def _start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [self.python, str(_WORKER), self.tool],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        self.version = self._answer()

    def _answer(self) -> str:
        """Return the next line, or "crash ..." if none comes."""
        assert self._process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not ready.select(SECONDS):
                    self._process.kill()
                    self._process.wait()
                    return f"crash: nothing after {SECONDS:g} s"
                part = os.read(self._process.stdout.fileno(), 4096)
                if not part:
                    return f"crash: the process ended with {self._process.wait()}"
                line += part
        return line.decode().strip().splitlines()[-1]

    def run(self, source: Path, target: Path) -> str:
        """Optimize one file.

        Returns:
            "ok", "error ..." (the tool raised) or "crash ..." (it crashed its process, or did not end).
        """
        if self._process.poll() is not None:
            self._start()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{source}\t{target}\n".encode())
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def run(python: str, tool: str, files: Sequence[tuple[Entry, Path, Path | None]]) -> Iterator[Row]:
    """Run ``tool`` on every file; each has an optional reference file. Yields nothing if the tool is not installed.

    Yields:
        rows.
    """
    with Worker(python, tool) as worker, Judges() as judges, tempfile.TemporaryDirectory() as folder:
        if not worker.version.startswith("version "):
            print(f"{tool}: {worker.version}")
            return
        name = worker.version.removeprefix("version ")
        target = Path(folder) / "out.onnx"
        for entry, path, reference in files:
            target.unlink(missing_ok=True)
            answer = worker.run(path, target)
            row = judges.row(entry, name, path, target, reference) if answer == "ok" else f"crash: {answer}"
            if isinstance(row, str):
                if "NOT_IMPLEMENTED" in row and entry.dtype == "bfloat16":
                    row = row.replace("crash", "no kernel")
                original = onnx.load(path)
                row = Row(entry.name, name, fits(entry, original), False, (row,), before=nodes(original))
            yield row


class Judges:
    """Process that judges results, because a tool's output may crash onnxruntime."""

    def __init__(self) -> None:
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def row(self, entry: Entry, name: str, path: Path, target: Path, reference: Path | None) -> Row | str:
        """Judge one result.

        Returns:
            the row, or the reason for a crash.
        """
        try:
            return self._pool.submit(_row, entry, name, path, target, reference).result()
        except BrokenProcessPool:
            self._pool = self._new()
            return "crash: onnxruntime dies of the result"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _row(entry: Entry, name: str, path: Path, target: Path, reference: Path | None) -> Row:
    original, result = onnx.load(path), onnx.load(target)
    was, refusal = fits(entry, original), valid(result)
    faults = [f"invalid: {refusal}"] if refusal and not valid(original) else []
    error, bound = 0.0, 1.0
    try:
        truth = Truth(entry, original, onnx.load(reference) if reference else None)
    # onnxruntime can't run the original.
    except Exception:
        truth = None
    if truth is not None and entry.dtype != "bfloat16":
        try:
            error, bound = truth.error(result)
            faults += [f"wrong: off by {error:.2g}, allowed {bound:.2g}"] if error > bound else []
        # onnxruntime's errors share no base class.
        except Exception as e:
            faults.append(f"crash: can't be run: {type(e).__name__}: {' '.join(str(e).split())[:120]}")
    fused = not faults and fits(entry, result, original)
    became = " ".join(o for o in ops(result) if o in NORMS)
    return Row(entry.name, name, was, fused, tuple(faults), error, bound, nodes(original), nodes(result), became)
