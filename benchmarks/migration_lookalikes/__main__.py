"""Check that every migration of γ and β into linear layers is exact, and that every other case is refused.

``python -m benchmarks.migration_lookalikes [--count 10000] [--first 0] [--seed N …]`` draws graphs that look as if a
norm's γ and β could move into the linear layers after it. A tenth of the graphs are plain: a migration is expected,
which shows that the test is not empty. ``normdeploy.quantization.scale_migration.migrate_scales`` migrates each graph,
and both graphs are compared in float64 by onnx's reference evaluator, on inputs of several sizes and kinds (see
``judge``). In every second graph the inputs of linear layers are also conditioned, by random powers of two and shifts,
or by factors whose inverses have three binary digits. The generators do not use the rules of the migration. A false
migration is printed with its seed.

It writes ``benchmarks/results/migration_lookalikes.md``. It exits with 1 in these cases: a migration is false or fails
with an exception; a refusal has no reason; the given graph is changed; a plain one is not migrated; the judge misses a
planted fault.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from normdeploy.errors import NormdeployError
from normdeploy.quantization.scale_migration import InputCondition, migrate_scales
from normdeploy.verbs.bench.machine_info import describe_machine

from . import planted
from .graphs import Drawn, drawn
from .judge import fault, runs

RESULTS = Path(__file__).parents[1] / "results"
# Number of plain graphs in which every fault is planted
PLANTED = 40


@dataclass
class Tally:
    """Counts of the results.

    Attributes:
        invalid: drawn graphs that no input fits; drawn again, not counted.
        migrated: graphs in which something was moved.
        rejected: graphs that could not be read.
        crashed: exceptions other than normdeploy's errors.
    """

    graphs: int = 0
    invalid: int = 0
    migrated: int = 0
    moves: int = 0
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    plain: int = 0
    plain_left: list[int] = field(default_factory=list)
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)
    false: list[tuple[int, str]] = field(default_factory=list)
    crashed: list[tuple[int, str]] = field(default_factory=list)


def conditions(proto: onnx.ModelProto, rng: np.random.Generator) -> dict[str, InputCondition]:
    """Draw conditions for the inputs of MatMul, Gemm and Conv, by the widths of their stored weights.

    Returns:
        tensor -> condition.
    """
    weights = {t.name: t.dims for t in proto.graph.initializer}
    made = {}
    for node in proto.graph.node:
        if node.op_type not in ("MatMul", "Gemm", "Conv") or node.input[1] not in weights or rng.random() < 0.3:
            continue
        dims, attributes = weights[node.input[1]], {a.name: a.i for a in node.attribute}
        if node.op_type == "Conv":
            width = dims[1] * attributes.get("group", 1)
        else:
            width = dims[-1 if attributes.get("transB") or len(dims) == 1 else -2]
        scale = 2.0 ** rng.integers(-3, 4, width)
        shift = rng.integers(-4, 5, width) / 4 if rng.random() < 0.4 else None
        # W·s is rounded; if it meets only a shift, no rounding of W explains the difference.
        if shift is None:
            scale = scale * 8 / rng.integers(4, 9, width)
        made[node.input[0]] = InputCondition(scale, shift)
    return made


def judged(seed: int, graph: Drawn, tally: Tally) -> None:
    """Migrate and judge one graph, and count the result."""
    rng = np.random.default_rng((29, seed))
    conditioned = conditions(graph.proto, rng) if seed % 2 and not graph.plain else {}
    before = graph.proto.SerializeToString()
    try:
        after, moves = migrate_scales(graph.proto, conditioned)
    except NormdeployError as error:
        tally.rejected[" ".join(str(error).split())[:90]] += 1
        return
    except Exception as error:
        tally.crashed.append((seed, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"))
        return
    if graph.proto.SerializeToString() != before:
        tally.false.append((seed, "the graph that was given is changed"))
    made = [m for m in moves if m.status == "made"]
    tally.moves += len(made)
    tally.migrated += bool(made)
    for move in moves:
        if move.status == "refused":
            tally.refusals[without_names(move.reason)] += 1
            if not move.reason:
                tally.false.append((seed, f"a refusal without a reason, of {move.norm!r}"))
        elif not move.certificate:
            tally.false.append((seed, f"a migration without a proof, of {move.norm!r}"))
    if graph.plain:
        tally.plain += 1
        if not made:
            tally.plain_left.append(seed)
    if reason := fault(onnx.ModelProto.FromString(before), after, seed):
        tally.false.append((seed, f"{'migrated' if made else 'nothing moved'}: {reason} ({'; '.join(graph.words)})"))


def without_names(reason: str) -> str:
    """Replace names in a reason.

    Returns:
        the text.
    """
    return " ".join(word if not word.startswith("'") else "…" for word in reason.split())[:100]


def missed() -> list[str]:
    """List planted faults that the judge misses, and right migrations that it rejects.

    Returns:
        a text for each.
    """
    found, done, seed = [], 0, 0
    while done < PLANTED:
        graph, seed = drawn(seed), seed + 1
        if not graph.plain or not tells(graph.proto):
            continue
        done += 1
        if reason := fault(graph.proto, planted.right(graph.proto), seed):
            found.append(f"a right migration of graph {seed - 1} is refused: {reason}")
        found += [
            f"{name} is not seen in graph {seed - 1}"
            for name, make in planted.FAULTS.items()
            if not fault(graph.proto, make(graph.proto), seed)
        ]
    return found


def tells(proto: onnx.ModelProto) -> bool:
    """Check that every fault changes an output: β exists, no two numbers are equal, and no residual reads the norm.

    Returns:
        true if it does.
    """
    stored = [numpy_helper.to_array(t) for t in proto.graph.initializer]
    norm = next(n for n in proto.graph.node if n.op_type in planted.NORMS)
    readers = {n.op_type for n in proto.graph.node if norm.output[0] in n.input}
    return (
        readers == {"MatMul"} and len(norm.input) == 3 and all(len(np.unique(a)) > 1 and (a != 0).all() for a in stored)
    )


def write(tally: Tally, unseen: Sequence[str], seconds: float) -> str:
    """Write the page.

    Returns:
        the verdict.
    """
    verdict = "\n".join(
        (
            f"- {tally.graphs} graphs judged ({tally.invalid} more were drawn that no input fits), {seconds:.0f} s;"
            f" {describe_machine()}; {datetime.date.today().isoformat()}",
            f"- something was moved in {tally.migrated} of them, {tally.moves} moves in all; false: {len(tally.false)};"
            f" crashed: {len(tally.crashed)}",
            f"- plain graphs: {tally.plain}, of which {tally.plain_left or 'none'} not migrated",
            f"- planted faults: {len(planted.FAULTS)} kinds in {PLANTED} graphs each; not seen: {len(unseen)}",
        )
    )
    reasons = "\n".join(f"| {n} | {r} |" for r, n in tally.refusals.most_common(40))
    false = "\n".join(f"- graph {seed}: {reason}" for seed, reason in tally.false[:50])
    crashed = "\n".join(f"- graph {seed}: {reason}" for seed, reason in tally.crashed[:50])
    rejected = "\n".join(f"- {n} ×: {r}" for r, n in tally.rejected.most_common(10))
    (RESULTS / "migration_lookalikes.md").write_text(
        f"# Migrations among lookalikes\n\n{(__doc__ or '').strip()}\n\n{verdict}\n\n"
        + (f"False:\n\n{false}\n\n" if false else "")
        + (f"Crashed, so that nothing was written:\n\n{crashed}\n\n" if crashed else "")
        + (f"Not read at all:\n\n{rejected}\n\n" if rejected else "")
        + f"| refusals | reason |\n|---|---|\n{reasons}\n"
    )
    return verdict


def main() -> None:
    """Draw, migrate and judge the graphs."""
    parser = argparse.ArgumentParser(prog="benchmarks.migration_lookalikes", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first graph's seed")
    parser.add_argument("--seed", type=int, nargs="*", help="these graphs alone, with the choices that made them")
    given = parser.parse_args()
    tally, start = Tally(), time.process_time()
    if given.seed is not None:
        for seed in given.seed:
            judged(seed, drawn(seed), tally)
            print(seed, *drawn(seed).words, sep="\n  ")
        print(*tally.false, *tally.crashed, tally.refusals, sep="\n")
        sys.exit(bool(tally.false))
    unseen, seed = missed(), given.first
    print(*unseen, sep="\n")
    while tally.graphs < given.count:
        graph = drawn(seed)
        if runs(graph.proto):
            tally.graphs += 1
            known = len(tally.false)
            judged(seed, graph, tally)
            for false in tally.false[known:]:
                print(*false, flush=True)
            if tally.graphs % 1000 == 0:
                print(f"{tally.graphs} judged, {tally.moves} moves, {len(tally.false)} false", flush=True)
        else:
            tally.invalid += 1
        seed += 1
    print(write(tally, unseen, time.process_time() - start))
    sys.exit(bool(tally.false or tally.crashed or unseen or tally.plain_left))


if __name__ == "__main__":
    main()
