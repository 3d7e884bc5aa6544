"""Run both files in float64 on random inputs, to show that they differ."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...graphs.file_graph import widen_to_float64
from ...runtimes.float64_evaluator import Float64Evaluator, NotEvaluated, inferred_dtypes
from ...storage.file_replacement import write_bytes
from ...types import PathLike
from .file_pair import FilePair, OpenFile, draw_feeds
from .proof_result import Counterexample

# Scales of the inputs. Small inputs show an epsilon, large inputs show a clamp.
_SCALES = (1.0, 1e-3, 30.0, 0.0)
# Upper limits of integers
_LIMITS = (2, 50, 1000)
# A difference counts if it exceeds this multiple of the effect of moving inputs, constants and results by an ulp.
_NOISE = 2.0**10
_HALF_ULP = 2.0**-53
# Errors of a file that can't run in float64
FAILURES = (NotEvaluated, ValueError, TypeError, IndexError, KeyError, MemoryError, ArithmeticError)


class Float64File:
    """Runs a file in float64."""

    def __init__(self, file: OpenFile) -> None:
        self._evaluator = Float64Evaluator(file.proto, inferred_dtypes(file.proto))
        self._outputs = list(file.outputs)

    @property
    def is_exact(self) -> bool:
        """Return False if a node ran in onnxruntime in the file's own type."""
        return not self._evaluator.narrow

    def run(self, feeds: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the file.

        Args:
            feeds: inputs by name.
            exact: float64 numbers that replace constants, by name.

        Returns:
            outputs by name.

        Raises:
            NotEvaluated: a node can't be computed.
        """
        places = self._evaluator.nodes_between(self._outputs)
        return self._read_outputs(self._evaluator.evaluate_nodes(places, _widened(feeds) | dict(exact)))

    def run_nudged(self, feeds: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the file with inputs, constants and the result of each node moved by about an ulp.

        The results must move too: if a value is subtracted from itself, moved inputs show no rounding error.

        Args:
            feeds: inputs by name.
            constants: constants in float64, by name.

        Returns:
            outputs by name.

        Raises:
            NotEvaluated: a node can't be computed.
        """
        rng = np.random.default_rng(0)
        known = {name: _nudge(value, rng) for name, value in (_widened(feeds) | dict(constants)).items()}
        for place in self._evaluator.nodes_between(self._outputs):
            results = self._evaluator.evaluate_nodes([place], known)
            known = {name: value if name in known else _nudge(value, rng) for name, value in results.items()}
        return self._read_outputs(known)

    def _read_outputs(self, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.asarray(self._evaluator.tensor_value(name, dict(results))) for name in self._outputs}


def _widened(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: widen_to_float64(np.asarray(value)) for name, value in feeds.items()}


@dataclass(frozen=True)
class Difference:
    """Largest difference that was found.

    Attributes:
        shown: the counterexample; None if all results agree.
        relative: the difference, relative to the largest element of the output.
        ran: number of inputs on which both files ran.
        is_exact: all nodes ran in float64.
        failed: error of the last input on which a file failed.
    """

    shown: Counterexample | None
    relative: float
    ran: int
    is_exact: bool
    failed: str


def find_difference(
    pair: FilePair,
    sizes: Sequence[Mapping[str, int]],
    exact: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]] = ({}, {}),
    *,
    deadline: float = math.inf,
) -> Difference:
    """Run both files in float64 on random inputs.

    Args:
        sizes: sizes of the open dims to try.
        exact: float64 numbers that replace rounded constants, for each file.
        deadline: time limit, as `time.process_time` counts. No input is tried after it.

    Returns:
        the largest difference beyond rounding errors.
    """
    runners = [Float64File(pair.first), Float64File(pair.second)]
    constants = [
        {name: value for name, value in file.constants.items() if value.dtype.kind == "f"} | dict(exact[k])
        for k, file in enumerate((pair.first, pair.second))
    ]
    best: Counterexample | None = None
    largest = 0.0
    ran = 0
    failed = ""
    for described, feeds in _iter_feeds(pair, sizes):
        if time.process_time() > deadline:
            failed = failed or "the time limit was reached"
            break
        try:
            results, moved = [], []
            for k, runner in enumerate(runners):
                named = {ports[k].name: feeds[ports[0].name] for ports in pair.inputs}
                results.append(runner.run(named, exact[k]))
                moved.append(runner.run_nudged(named, constants[k]))
        except FAILURES as error:
            failed = f"{type(error).__name__}: {error}"
            continue
        ran += 1
        for one, other in pair.outputs:
            noise = [
                _effect(r[port.name], m[port.name]) for r, m, port in zip(results, moved, (one, other), strict=True)
            ]
            found = _compare(results[0][one.name], results[1][other.name], max(noise))
            if found is not None and found[1] > largest:
                index, largest = found
                best = Counterexample(
                    one.name,
                    index,
                    _element(results[0][one.name], index),
                    _element(results[1][other.name], index),
                    feeds,
                    described,
                )
        if largest > 1e-3:
            break
    return Difference(best, largest, ran, all(r.is_exact for r in runners), failed)


def _element(array: np.ndarray, index: tuple[int, ...]) -> float:
    try:
        return float(array[index])
    # Results of different shapes have no common element.
    except (IndexError, ValueError, TypeError):
        return float("nan")


def _iter_feeds(pair: FilePair, sizes: Sequence[Mapping[str, int]]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    ports = [one for one, _ in pair.inputs]
    whole = any(p.elem_type not in (1, 10, 11, 16) for p in ports)
    for size in sizes:
        shapes = pair.shapes_at(size)
        for limit in _LIMITS if whole else _LIMITS[:1]:
            for scale in _SCALES:
                drawn = draw_feeds(ports, shapes, np.random.default_rng(0), limit)
                feeds = {n: (v * v.dtype.type(scale) if v.dtype.kind == "f" else v) for n, v in drawn.items()}
                told = f"{scale:g} · numpy.random.default_rng(0).standard_normal"
                if whole:
                    told += f", integers below {limit}"
                if size:
                    told += ", " + ", ".join(f"{name}={n}" for name, n in size.items() if name.isprintable())
                yield told, feeds


def _nudge(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Change floats by about an ulp of float64, up or down at random.

    Whole numbers stay, because they may be sizes or positions.
    """
    value = np.asarray(value)
    if value.dtype.kind != "f":
        return value
    moved = value.astype(np.float64) * (1.0 + 2 * _HALF_ULP * rng.choice((-1.0, 1.0), value.shape))
    return np.where(value == np.rint(value), value, moved)


def _effect(value: np.ndarray, moved: np.ndarray) -> float:
    """Measure how far the moved inputs and results took an output."""
    if value.shape != moved.shape or value.dtype.kind != "f":
        return 0.0
    with np.errstate(invalid="ignore"):
        change = np.abs(moved.astype(np.float64) - value.astype(np.float64))
    return float(np.max(change, initial=0.0, where=np.isfinite(change)))


def _compare(one: np.ndarray, other: np.ndarray, effect: float) -> tuple[tuple[int, ...], float] | None:
    """Compare one output.

    Args:
        effect: the effect of roundings in float64 on the output.

    Returns:
        position and size of the largest relative difference; None if rounding explains all differences.
    """
    if one.shape != other.shape:
        return (), 1.0
    if one.size == 0:
        return None
    if one.dtype.kind not in "f":
        wrong = one != other
        if not wrong.any():
            return None
        return tuple(int(i) for i in np.argwhere(wrong)[0]), 1.0
    a, b = (v.astype(np.float64) for v in (one, other))
    # Only finite numbers are compared.
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return None
    a, b = (np.where(finite, v, 0.0) for v in (a, b))
    scale = float(np.abs(a).max(initial=0.0))
    noise = _NOISE * effect + 2.0**-44 * scale
    difference = np.abs(a - b)
    index: Any = np.unravel_index(int(np.argmax(difference)), difference.shape)
    if not difference[index] > noise:
        return None
    return tuple(int(i) for i in index), float(difference[index] / max(scale, 1e-300))


def write_npz(path: PathLike, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into an .npz file."""
    content = io.BytesIO()
    np.savez(content, **dict(arrays))  # type: ignore[arg-type]
    write_bytes(Path(path), content.getvalue())
