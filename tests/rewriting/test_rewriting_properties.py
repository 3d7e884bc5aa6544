"""Generated norms through ``optimize``: every spelling becomes its node, no lookalike is taken for a norm, and no
number changes.

The models come from ``norm_generator`` and ``norm_lookalikes``, which know nothing of normdeploy. A failure prints the
choice vector and the whole text of the model. NORMDEPLOY_GRAPHS is how many new ones are drawn, where it is set.
"""

from __future__ import annotations

import logging
import os
import warnings

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from models.case import norm_ops
from normdeploy.findings.records import Summary
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.norm_generator import Example, generate
from tests.norm_generator_heldout import HELD_OUT
from tests.norm_lookalikes import generate_lookalike
from tests.norm_spellings import KNOWN
from tests.norm_writers import Choices
from tests.support import run_onnxruntime

BOOKS = {"known": KNOWN, "held out": KNOWN.merged(HELD_OUT)}
SIZES: tuple[dict[str, int], ...] = ({}, {"B": 2, "S": 7, "L": 8})
# the same ones in every run, so that a red one can be repeated; `make test-random` draws new ones until one fails
RANDOM = int(os.environ.get("NORMDEPLOY_GRAPHS", "0"))
graphs = settings(
    max_examples=RANDOM or 600,
    deadline=None,
    derandomize=not RANDOM,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
# an export takes a second: no shrinking, the vector and the text are printed as they were drawn
exports = settings(graphs, max_examples=RANDOM // 80 or 7, phases=[Phase.explicit, Phase.generate])


def drawn(data: st.DataObject) -> Choices:
    return Choices(lambda point, options: data.draw(st.sampled_from(options), label=point))


def exported(example: Example) -> onnx.ModelProto:
    """The graph as drawn, or the source as the dynamo exporter writes it at opset 21, without its optimizer (which
    loses epsilons)."""
    if example.proto is not None:
        return example.proto
    shapes = {axis: torch.export.Dim(name) for axis, name in example.dynamic.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            example.module(),
            (torch.from_numpy(example.inputs()),),
            dynamo=True,
            optimize=False,
            opset_version=21,
            input_names=["x"],
            dynamic_shapes=(shapes,) if shapes else None,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def exact(example: Example, x: np.ndarray) -> list[np.ndarray]:
    """What the example means, in float64: its definition, or (a lookalike) its own text."""
    if example.definition is not None:
        return list(example.definition(x.astype(np.float64)))
    if example.exact_proto is not None:
        return ReferenceEvaluator(example.exact_proto).run(None, {"x": x.astype(np.float64)})
    with torch.no_grad():
        return [example.module(exact=True)(torch.from_numpy(x.astype(np.float64))).numpy()]


def allowed(example: Example, x: np.ndarray, want: np.ndarray, norms: int) -> float:
    """8 u (1 + max|x|/σ) for each norm passed (DESIGN.md, "rounding"), σ the smallest deviation of a sample that is not
    constant."""
    unit = np.finfo(example.dtype).eps / 2
    rows = x.astype(np.float64).reshape(len(x), -1)
    ratio = max(np.abs(row).max() / row.std() for row in rows if row.std() > 0)
    return 8 * max(1, norms) * unit * (1 + ratio) * max(1.0, np.nanmax(np.abs(want)))


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """The largest absolute difference; NaN, which fails every bound, where only one of them is NaN."""
    both = np.isnan(got) & np.isnan(want)
    return float(np.abs(np.where(both, 0.0, got) - np.where(both, 0.0, want)).max())


def showing_more(example: Example) -> int:
    """How many norms are spelled so that they answer NaN where their definition answers 0, which no node may hide.

    x/(v·(1/√v)) is such a spelling of x/√v: with an Inf in its row v·(1/√v) is Inf·0, and all the row is NaN. A row of
    the RMS norm is 0 then, but for the one place; with a mean taken off it is NaN in either.
    """
    if example.case.kind != "RMSNorm":
        return 0
    return sum(choice == "v * rsqrt(v)" for point, choice in example.vector.items() if point.split("#")[0] == "root")


def problems(example: Example, proto: onnx.ModelProto, out: onnx.ModelProto, summary: Summary) -> list[str]:
    """What is wrong with the result; empty where nothing is."""
    ops = [node.op_type for node in out.graph.node]
    norms, (least, most) = norm_ops(out.graph.node, example.case.kind == "GroupNorm"), example.nodes
    wrong = []
    undone = [f for f in summary.findings if f.status == "undone"]
    right = 0 < len(undone) <= showing_more(example)  # these have to stay as they are
    least -= len(undone) if right else 0
    if not least <= len(norms) <= most or not example.only_ops.issuperset(norms):
        wrong.append(f"norm nodes {norms}, expected {least} to {most} of {sorted(example.only_ops)}")
    if (left := example.forbidden.intersection(ops)) and not right:
        wrong.append(f"left decomposed: {sorted(left)}")
    fused = [f for f in summary.findings if f.status == "fused"]
    if len(fused) > most:
        wrong.append(f"{len(fused)} findings claim to be fused")
    if undone and not right:
        wrong.append(f"a certificate failed: {undone}")
    for sizes in SIZES:
        x = example.inputs(5, **sizes)
        for before, after, want in zip(
            run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x}), exact(example, x), strict=True
        ):
            # nodes that nobody rewrote give what they gave; a norm is as near to the truth as its type allows
            reference = want if norms or example.definition is not None else before.astype(np.float64)
            bound, error = allowed(example, x, want, most), distance(after, reference)
            if not error <= max(bound, 2 * distance(before, reference)):
                wrong.append(f"error {error:.3g} at {x.shape}, allowed {bound:.3g}")
    return wrong


def check(example: Example) -> None:
    proto = exported(example)
    sent = proto.SerializeToString()
    out, summary = optimize_norms(proto)
    onnx.checker.check_model(out, full_check=True)
    wrong = problems(example, proto, out, summary)
    if proto.SerializeToString() != sent:
        wrong.append("optimize changed its argument")
    if wrong:
        found = "\n".join(f"{f.kind} {f.status} {f.tensor}: {f.reason or f.became}" for f in summary.findings)
        pytest.fail("\n".join([*wrong, found, repr(example), onnx.printer.to_text(out.graph)]), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("book", list(BOOKS))
@given(data=st.data())
@graphs
def test_graphs_become_their_norm(book: str, data: st.DataObject) -> None:
    check(generate(drawn(data), BOOKS[book], "onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("book", list(BOOKS))
@given(data=st.data())
@graphs
def test_graph_lookalikes_stay(book: str, data: st.DataObject) -> None:
    check(generate_lookalike(drawn(data), BOOKS[book], "onnx"))


@pytest.mark.parametrize("book", list(BOOKS))
@given(data=st.data())
@exports
def test_exports_become_their_norm(book: str, data: st.DataObject) -> None:
    check(generate(drawn(data), BOOKS[book], "torch"))


@pytest.mark.parametrize("book", list(BOOKS))
@given(data=st.data())
@exports
def test_exported_lookalikes_stay(book: str, data: st.DataObject) -> None:
    check(generate_lookalike(drawn(data), BOOKS[book], "torch"))


def test_the_check_can_fail() -> None:
    """A norm left as it was, and one written in the place of a lookalike, are both seen."""
    norm = generate(Choices.replayed({"case": "LN last"}), KNOWN, "onnx")
    lookalike = generate_lookalike(Choices.replayed({"case": "last"}), KNOWN, "onnx", "std + eps")
    assert norm.proto is not None
    assert lookalike.proto is not None
    out, summary = optimize_norms(norm.proto)
    assert not problems(norm, norm.proto, out, summary)
    assert problems(norm, norm.proto, norm.proto, summary)  # left decomposed
    assert problems(lookalike, lookalike.proto, out, summary)  # another node's numbers
    assert problems(norm, norm.proto, lookalike.proto, summary)
