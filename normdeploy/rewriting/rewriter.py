"""Decide on the proposals of transforms and apply them. Transforms only propose; only this module changes the graph.

The steps for each proposal, in this order:

1. Pair the results before the rewrite with those after it, and prove that each pair is one function.
2. Plan a trial, in which onnxruntime runs both sides of the rewrite.
3. Seal the new nodes: record them as they were proved, so that a later change of them is detected.
4. Insert the nodes into the graph.
5. Add the certificate to the finding.

A rewrite whose proof fails is never applied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..findings.records import Certificate, Finding
from ..graphs.graph import Graph
from ..proof.identity_check import Identity
from ..proof.proof_errors import NotProved
from . import certification, rewrite_recording, rounding_verdicts
from .certification import Failure, Rewrite
from .proposals import NodeReplacement, Proposal, Propose, ProposeResult, Remark, RewriteTarget, StoredTensor, Sweep
from .proved_nodes import NodeSeal, require_sealed, seal_nodes
from .rewrite_ledger import LedgerEntry, RewriteLedger, RewriteOptions, RewriteStep

# Name of the stage in which onnxruntime runs both sides of each rewrite
ROUNDING = "rounding"
# Maximum bytes of pending trials. One session for all trials would save little compared to sessions of a few tens of
# trials
_WAITING = 2**21
# Number of nodes after which progress is reported
_EVERY = 16

Outcome = LedgerEntry | Finding | Remark | None
"""The entry of an applied proposal; otherwise the finding or remark to record, or None."""


@dataclass(frozen=True)
class DecidedProposal:
    """Proved proposal, with its rewrites.

    Attributes:
        proposal: the proposal.
        rewrites: both sides of each pair.
        certificate: certificate of the proof; None if the transform compared the nodes itself.
        identity: proof of the pairs; None without pairs.
        free_lengths: as in `certification.ProvedRewrites`.
    """

    proposal: Proposal
    rewrites: Sequence[Rewrite] = ()
    certificate: Certificate | None = None
    identity: Identity | None = None
    free_lengths: tuple[int, ...] = ()


class Rewriter:
    """Apply the transforms to one graph in one pass.

    Attributes:
        graph: the graph.
        wanted: options of the rewrite.
        ledger: entries and findings.
        seconds: seconds of each stage.
        opset: lowest opset that defines all nodes written so far.
    """

    def __init__(self, graph: Graph, wanted: RewriteOptions) -> None:
        self.graph = graph
        self.wanted = wanted
        self.ledger = RewriteLedger()
        self.seconds: dict[str, float] = {ROUNDING: 0.0}
        self.opset = 0
        self._shared: dict[tuple[object, ...], gs.Tensor] = {}
        self._proofs: dict[object, Identity | NotProved] = {}
        self._sealed: list[tuple[gs.Node, NodeSeal]] = []
        self._target = RewriteTarget(wanted, self.ledger.entry_of, self.ledger.entries_behind, self._shared)

    def remaining_seals(self) -> list[NodeSeal]:
        """List the seals of nodes that are still in the graph.

        Returns:
            the seals, as the nodes were proved.
        """
        return [seal for node, seal in self._sealed if self.graph.is_alive(node)]

    def build_proto(self) -> onnx.ModelProto:
        """Build the model as it is now.

        Returns:
            a new model.

        Raises:
            ExportError: a node differs from its proved form.
        """
        made = self.graph.to_proto()
        require_sealed(made, self.remaining_seals())
        return made

    def apply(self, stage: str, propose: Propose) -> None:
        """Run one transform at every node and apply its proposals."""
        with self._time_stage(stage):
            nodes = self.graph.nodes
            progress = self.wanted.progress
            for i, node in enumerate(nodes):
                if progress is not None and i % _EVERY == 0:
                    progress(stage, i, len(nodes))
                if self.graph.is_alive(node) and node.outputs:
                    self._ask_transform(propose, node, stage)
            if progress is not None:
                progress(stage, len(nodes), len(nodes))

    def apply_cleanup(self, stage: str, sweep: Sweep) -> None:
        """Apply the proposals of a cleanup in order."""
        with self._time_stage(stage):
            for node, told in sweep(self._target):
                self._record_outcome(
                    self._take_proposal(told, RewriteStep(self.wanted.place, stage, node.outputs[0].name))
                )

    def apply_decided(self, stage: str, decided: DecidedProposal) -> None:
        """Apply one proved proposal, for a caller that traverses the graph itself."""
        self._make_rewrite(decided, RewriteStep(self.wanted.place, stage, decided.proposal.finding.tensor))

    def apply_verdicts(self, *, decides: bool) -> None:
        """Run the remaining trials and add all outcomes to the certificates.

        Args:
            decides: True to undo rewrites with gross errors.
        """
        ledger = self.ledger
        if self.wanted.progress is not None and ledger.pending_trial_count:
            self.wanted.progress(ROUNDING, ledger.verdict_count, ledger.verdict_count + ledger.pending_trial_count)
        self._run_trials()
        ledger.apply_verdicts(self.wanted.runtime, decides=decides)

    @contextmanager
    def _time_stage(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        ran = self.seconds[ROUNDING]
        yield
        self.seconds[stage] = time.perf_counter() - began - (self.seconds[ROUNDING] - ran)

    def _ask_transform(self, propose: Propose, node: gs.Node, stage: str) -> None:
        known = self.wanted.undone_at(stage, node)
        if known is not None:
            if not any(f.tensor == known.tensor and f.status == "undone" for f in self.ledger.findings):
                self.ledger.entries.append(LedgerEntry(known))
            return
        try:
            step = RewriteStep(self.wanted.place, stage, node.outputs[0].name)
            outcome = self._take_proposal(propose(self.graph, node, self._target), step)
        except evaluator.UnsupportedOp as error:
            # The transform needs a constant that would take too long to compute. The graph is still unchanged.
            module = self.graph.module(node)
            outcome = Finding("unknown", "refused", node.outputs[0].name, module, reason=str(error))
        self._record_outcome(outcome)
        if self.ledger.pending_trial_count >= rounding_verdicts.BATCH or self.ledger.waiting_bytes > _WAITING:
            self._run_trials()

    def _run_trials(self) -> None:
        began = time.perf_counter()
        self.ledger.run_trials()
        self.seconds[ROUNDING] += time.perf_counter() - began

    # ------------------------------------------------------------------ deciding

    def _take_proposal(self, told: ProposeResult, step: RewriteStep, entry: LedgerEntry | None = None) -> Outcome:
        """Apply a proposal, or one of its alternatives.

        Args:
            entry: existing entry for the finding; None for a new one.
        """
        if not isinstance(told, Proposal):
            return told
        if told.opset > self.wanted.limit:
            # The file's opset is fixed, and it lacks a node of this proposal.
            return None
        decided = self.prove_proposal(told)
        if isinstance(decided, DecidedProposal):
            return self._make_rewrite(decided, step, entry)
        if told.instead is not None:
            return self._take_proposal(told.instead(), step, entry)
        for other in told.otherwise(decided) if told.otherwise is not None else ():
            outcome = self._take_proposal(other, step, entry)
            if isinstance(outcome, LedgerEntry) or (isinstance(outcome, Finding) and outcome.status == "kept"):
                return outcome
        return told.unproved(decided)

    def prove_proposal(self, proposal: Proposal) -> DecidedProposal | Failure:
        """Prove a proposal without changing the graph.

        Returns:
            the decided proposal, or the failure.
        """
        if proposal.sides is not None:
            certificate = certification.certify_sides(proposal.sides)
            if certificate:
                return DecidedProposal(proposal, (), certificate)
            return certificate
        if not proposal.pairs:
            return DecidedProposal(proposal)
        proved = certification.prove_pairs(
            self.graph,
            self._proofs,
            proposal.pairs,
            expressions=proposal.expressions,
            partly_hidden=proposal.partly_hidden,
        )
        if isinstance(proved, certification.ProvedRewrites):
            return DecidedProposal(proposal, proved.rewrites, proved.certificate, proved.identity, proved.free_lengths)
        return proved

    # ------------------------------------------------------------------ doing

    def _make_rewrite(
        self, decided: DecidedProposal, step: RewriteStep, entry: LedgerEntry | None = None
    ) -> LedgerEntry:
        proposal = decided.proposal
        own = entry or LedgerEntry(proposal.finding)
        self._plan_trial(proposal, decided.rewrites, own, step)
        if proposal.stored is None:
            stored = proposal
        else:
            stored = proposal.stored(proposal)
        self._record_rewrite(decided, stored, step)
        self._sealed += seal_nodes(self.graph, stored.nodes)
        for change in stored.changes:
            self._replace_nodes(change)
        for constant in stored.values:
            self._store_constant(constant)
        self._shared.update(stored.shared)
        self.opset = max(self.opset, stored.opset)
        revise = stored.revise or _with_certificate
        if stored.revised_entries:
            last = stored.changes[-1].old.name
            self.ledger.revise_findings(
                last, stored.revised_entries, step, lambda finding: revise(finding, decided.certificate)
            )
            return self._follow_up(stored, own, step)
        own.finding = revise(stored.finding, decided.certificate)
        if entry is None:
            own.steps.append(step)
            (self.ledger.non_norm_entries if stored.only_for_speed else self.ledger.entries).append(own)
        return self._follow_up(stored, own, step)

    def _record_rewrite(self, decided: DecidedProposal, stored: Proposal, step: RewriteStep) -> None:
        """Record both sides for a certificate file, before the graph is changed."""
        if self.wanted.recorder is None:
            return
        proposal = decided.proposal
        sides = rewrite_recording.ProvedSides(
            [(rewrite.before, rewrite.after) for rewrite in decided.rewrites],
            decided.certificate,
            decided.identity,
            decided.free_lengths,
            converted=[id(n) for n in stored.nodes] != [id(n) for n in proposal.nodes],
            writes=stored.written_names,
        )
        self.wanted.recorder.records.append(
            rewrite_recording.record_rewrite(self.graph, step.place, step.stage, proposal, sides)
        )

    def _plan_trial(self, proposal: Proposal, rewrites: Sequence[Rewrite], own: LedgerEntry, step: RewriteStep) -> None:
        """Plan the onnxruntime run of both sides before the graph is changed."""
        if proposal.kind is not None and self.ledger.is_one_of_many(proposal.kind, own):
            return
        if proposal.trial is None:
            trial = None
        else:
            trial = proposal.trial(rewrites, self.ledger.pending_trial_count)
        if trial is not None:
            if proposal.revised_entries:
                entry = proposal.revised_entries[0]
            else:
                entry = own
            self.ledger.plan_trial(entry, step, trial, proposal.finding if proposal.only_for_speed else None)

    def _replace_nodes(self, change: NodeReplacement) -> None:
        node = change.nodes[-1]
        self.graph.replace(change.old, change.nodes, change.shape, place=change.output, origin=change.origin)
        for output, old in change.also.items():
            self.graph.redirect_readers(old, node, output)

    def _store_constant(self, constant: StoredTensor) -> None:
        """Turn a tensor into an initializer.

        The proof of a node that reads the tensor holds for every value of the tensor, so also for this constant. Such a
        node is sealed again, because its input has become an initializer.
        """
        readers = {id(node) for node in self.graph.all_consumers_of(constant.tensor)}
        self.graph.freeze_tensor(constant.tensor, constant.value)
        sealed: list[tuple[gs.Node, NodeSeal]] = []
        for node, seal in self._sealed:
            if id(node) in readers:
                sealed += seal_nodes(self.graph, [node])
            else:
                sealed += [(node, seal)]
        self._sealed = sealed

    def _follow_up(self, proposal: Proposal, own: LedgerEntry, step: RewriteStep) -> LedgerEntry:
        """Try the follow-up of an applied proposal."""
        if proposal.then is None:
            return own
        if proposal.joined is None:
            self._take_proposal(proposal.then(), step)
            return own
        first = own.finding
        if isinstance(self._take_proposal(proposal.then(), step, own), LedgerEntry):
            own.finding = proposal.joined(first, own.finding)
        return own

    def _record_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Remark):
            for entry in outcome.entries:
                entry.finding = outcome.revise(entry.finding)
        if isinstance(outcome, Finding) and not self.ledger.has_same_finding(outcome):
            self.ledger.entries.append(LedgerEntry(outcome))


def _with_certificate(finding: Finding, certificate: Certificate | None) -> Finding:
    return replace(finding, certificate=certificate)
