"""Test normdeploy on one file of the corpus.

The norms must be fused or refused as expected, the result must not be worse, and a second run must change nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import onnx

from models.case import NORMS
from normdeploy.graphs.simplification import simplify
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.rewriting.proposals import COMPUTED

from .entry import Entry, nodes
from .judge import Truth, fits, ops, valid


@dataclass(frozen=True)
class Row:
    """Result of a tool for one file.

    Attributes:
        was: True if every norm already was a standard node in the file.
        fused: True if every norm is a standard node in the result.
        faults: requirements that the result violates.
        before: number of nodes before.
        after: number of nodes after.
    """

    name: str
    tool: str
    was: bool
    fused: bool
    faults: tuple[str, ...]
    error: float = 0.0
    bound: float = 0.0
    before: int = 0
    after: int = 0
    became: str = ""
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0


def measured(entry: Entry, original: onnx.ModelProto, reference: onnx.ModelProto | None = None) -> Row:
    """Run ``normdeploy.rewriting.norm_optimizer.optimize_norms`` and ``simplify`` on the file, and check everything
    they promise.

    Returns:
        the row.
    """
    start = time.perf_counter()
    result, summary = optimize_norms(original)
    seconds = time.perf_counter() - start
    faults: list[str] = []
    was, fused = fits(entry, original), fits(entry, result, original)
    rewritten = [f for f in summary.findings if f.status in ("fused", "folded")]
    if entry.expressible and not fused:
        faults.append("missed")
    # A scale and shift may follow any norm, and nodes that depend on constants alone are computed.
    if not entry.expressible and any(f.kind != "scale and shift" and f.became != COMPUTED for f in rewritten):
        faults.append("a lookalike was rewritten")
    faults += [f"undone: {f.reason}" for f in summary.findings if f.status == "undone"]
    faults += [f"no certificate: {f.became}" for f in rewritten if not f.certificate and f.became != COMPUTED]
    if not valid(original) and (refusal := valid(result)):
        faults.append(f"the checker refuses it: {refusal}")
    if any(n.domain == "normdeploy" for n in result.graph.node):
        faults.append("a node of our own")
    again = optimize_norms(result)[0]
    if again.SerializeToString(deterministic=True) != result.SerializeToString(deterministic=True):
        faults.append("another result the second time")
    final = simplify(result).proto
    limit = nodes(original) if entry.limit is None else entry.limit
    grouped = sum(n.op_type == "GroupNormalization" for n in original.graph.node)
    # By default each becomes five nodes that onnxruntime has kernels for.
    limit += 4 * grouped
    if nodes(final) > limit:
        faults.append(f"{nodes(final)} nodes, {limit} as its exporter leaves it")
    error, bound = 0.0, 1.0
    try:
        truth = Truth(entry, original, reference)
        error, bound = max((truth.error(result), truth.error(final)), key=lambda pair: pair[0] / (pair[1] or 1e-300))
        if error > bound:
            faults.append(f"off by {error:.2g}, allowed {bound:.2g}")
    # onnxruntime's errors share no base class.
    except Exception as e:
        faults.append(f"can't be run: {type(e).__name__}: {' '.join(str(e).split())[:160]}")
    return Row(
        entry.name,
        "normdeploy",
        was,
        fused,
        tuple(faults),
        error,
        bound,
        nodes(original),
        nodes(result),
        " ".join(o for o in ops(result) if o in NORMS),
        tuple(f"{f.kind} {f.status}: {f.reason}" for f in summary.findings if f.reason),
        seconds,
    )
