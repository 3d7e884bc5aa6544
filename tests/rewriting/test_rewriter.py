"""The rewriter: what is proposed is made where it is proved, and told; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx
import onnx_graphsurgeon as gs
import pytest

from normdeploy.errors import ExportError
from normdeploy.findings.records import Certificate, Finding
from normdeploy.graphs.graph import Graph
from normdeploy.rewriting.certification import Failure, pair_of
from normdeploy.rewriting.proposals import (
    NodeReplacement,
    Proposal,
    ProposeResult,
    Remark,
    RewriteTarget,
    ignore_failure,
)
from normdeploy.rewriting.proved_nodes import require_sealed
from normdeploy.rewriting.rewrite_ledger import LedgerEntry, RewriteOptions, RewriteStep
from normdeploy.rewriting.rewriter import Rewriter

BODY = "{ n = Neg(b) y = Sub(a, n) }"


def rewriter_of(body: str = BODY, wanted: RewriteOptions | None = None) -> Rewriter:
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[N] a, float[N] b) => (float[N] y) {body}'
    return Rewriter(Graph(onnx.parser.parse_model(text)), wanted or RewriteOptions())


def proposal_of(graph: Graph, node: gs.Node, op: str) -> Proposal | None:
    """Propose ``op`` of a and b for Sub(a, Neg(b)): Add is right, everything else is wrong."""
    if node.op != "Sub":
        return None
    a, negated = node.inputs
    maker, (y,) = graph.producer(negated), node.outputs
    assert maker is not None
    made = graph.make_node(op, [a, maker.inputs[0]], y)
    pair = pair_of(graph, y, [a, maker.inputs[0]], made.outputs[0])
    return Proposal(
        Finding("sum", "fused", y.name, became=op), (pair,), (NodeReplacement(y, (made,)),), unproved=ignore_failure
    )


def propose(op: str, **more: object) -> Callable[[Graph, gs.Node, RewriteTarget], ProposeResult]:
    def at(graph: Graph, node: gs.Node, target: RewriteTarget) -> ProposeResult:
        proposal = proposal_of(graph, node, op)
        return None if proposal is None else replace(proposal, **more)

    return at


def ops(rewriter: Rewriter) -> list[str]:
    return [node.op_type for node in rewriter.graph.to_proto().graph.node]


def test_a_proved_proposal_is_made_and_told_with_its_certificate() -> None:
    rewriter = rewriter_of()
    rewriter.apply("sums", propose("Add"))
    assert ops(rewriter) == ["Add"]
    (entry,) = rewriter.ledger.entries
    assert entry.steps == [RewriteStep("", "sums", "y")]
    assert entry.finding.became == "Add"
    assert entry.finding.certificate
    assert rewriter.ledger.steps_taken() == [(RewriteStep("", "sums", "y"), entry.finding)]


@pytest.mark.parametrize("op", ["Sub", "Mul", "Max"])
def test_what_is_not_proved_is_not_made(op: str) -> None:
    rewriter = rewriter_of()
    rewriter.apply("sums", propose(op))
    assert ops(rewriter) == ["Neg", "Sub"]
    assert rewriter.ledger.entries == []
    assert rewriter.remaining_seals() == []


def test_the_failure_is_told_as_the_transform_says() -> None:
    failures: list[Failure] = []

    def unproved(failure: Failure) -> Finding:
        failures.append(failure)
        return Finding("sum", "undone", "y", reason="it differs")

    rewriter = rewriter_of()
    rewriter.apply("sums", propose("Mul", unproved=unproved))
    assert [f.reason for f in rewriter.ledger.findings] == ["it differs"]
    (failure,) = failures
    assert isinstance(failure, Certificate)
    assert not failure


def test_the_first_alternative_that_is_proved_is_made() -> None:
    def attempt(graph: Graph, node: gs.Node, target: RewriteTarget) -> ProposeResult:
        wrong = proposal_of(graph, node, "Mul")
        if wrong is None:
            return None
        others = (proposal_of(graph, node, op) for op in ("Max", "Add", "Min"))
        return replace(wrong, otherwise=lambda failure: others)

    rewriter = rewriter_of()
    rewriter.apply("sums", attempt)
    assert ops(rewriter) == ["Add"]
    assert [f.became for f in rewriter.ledger.findings] == ["Add"]


def test_what_counts_instead_is_told_whatever_comes_of_it() -> None:
    kept = Finding("sum", "kept", "y", reason="it is already one node")
    rewriter = rewriter_of()
    rewriter.apply("sums", propose("Mul", instead=lambda: kept))
    assert rewriter.ledger.findings == [kept]


def test_a_step_that_is_not_to_be_taken_again_is_left_out_and_told() -> None:
    told = Finding("sum", "undone", "y", reason="it was undone")
    rewriter = rewriter_of(wanted=RewriteOptions(undone={RewriteStep("", "sums", "y"): told}))
    rewriter.apply("sums", propose("Add"))
    assert ops(rewriter) == ["Neg", "Sub"]
    assert rewriter.ledger.findings == [told]


def test_a_rewrite_for_speed_is_no_finding_but_can_be_taken_back() -> None:
    rewriter = rewriter_of()
    rewriter.apply("sums", propose("Add", only_for_speed=True))
    assert ops(rewriter) == ["Add"]
    assert rewriter.ledger.findings == []
    ((step, told),) = rewriter.ledger.steps_taken()
    assert (step.stage, told.became) == ("sums", "Add")


def test_a_rewrite_of_a_norm_changes_its_finding_and_adds_a_step() -> None:
    rewriter = rewriter_of()
    norm = LedgerEntry(Finding("LayerNorm", "fused", "b", became="LayerNormalization"), [RewriteStep("", "norms", "b")])
    rewriter.ledger.entries.append(norm)

    def note(finding: Finding, certificate: Certificate | None) -> Finding:
        return replace(finding, notes=("a sum",))

    rewriter.apply("sums", propose("Add", revised_entries=(norm,), revise=note))
    assert rewriter.ledger.entries == [norm]
    assert norm.finding.notes == ("a sum",)
    assert [step.stage for step in norm.steps] == ["norms", "sums"]


def test_a_remark_changes_findings_alone() -> None:
    rewriter = rewriter_of()
    norm = LedgerEntry(Finding("LayerNorm", "fused", "b"), [RewriteStep("", "norms", "b")])
    rewriter.ledger.entries.append(norm)
    remark = Remark([norm], lambda finding: replace(finding, notes=("it stays",)))
    rewriter.apply("sums", lambda graph, node, target: remark if node.op == "Sub" else None)
    assert norm.finding.notes == ("it stays",)
    assert [step.stage for step in norm.steps] == ["norms"]
    assert ops(rewriter) == ["Neg", "Sub"]


def test_what_follows_is_tried_once_a_proposal_is_made() -> None:
    """-(-a) - (-b): first the sum, then what reads its result."""

    def at(graph: Graph, node: gs.Node, target: RewriteTarget) -> ProposeResult:
        proposal = proposal_of(graph, node, "Add") if node.outputs[0].name == "s" else None
        if proposal is None:
            return None
        (reader,) = graph.consumers(node.outputs[0])
        (y,) = reader.outputs
        made = graph.make_node("Mul", [reader.inputs[0], reader.inputs[0]], y)
        pair = pair_of(graph, y, [reader.inputs[0]], made.outputs[0])
        told = Finding("square", "fused", y.name, became="Mul")
        then = Proposal(told, (pair,), (NodeReplacement(y, (made,)),), unproved=ignore_failure)
        return replace(proposal, then=lambda: then)

    rewriter = rewriter_of("{ n = Neg(b) s = Sub(a, n) two = Constant <value_float = 2.0> () y = Pow(s, two) }")
    rewriter.apply("sums", at)
    assert [f.became for f in rewriter.ledger.findings] == ["Add", "Mul"]
    assert "Pow" not in ops(rewriter)


def test_what_was_made_is_sealed() -> None:
    rewriter = rewriter_of()
    rewriter.apply("sums", propose("Add"))
    proto = rewriter.graph.to_proto()
    require_sealed(proto, rewriter.remaining_seals())
    proto.graph.node[0].op_type = "Sub"
    with pytest.raises(ExportError, match="in the file differs from the proved one"):
        require_sealed(proto, rewriter.remaining_seals())
