"""The rewriter: decides what transforms propose, and does it. Nobody else proves, tries, edits, seals or tells.

Of each proposal, in this order: the results before and after are paired and proved to be one function; a run of both
sides in onnxruntime is planned; the nodes are sealed as they were proved, and put into the graph; the finding gets its
certificate. A rewrite whose certificate fails is never made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from ..evaluate import evaluate
from ..graphs.graph import Graph
from ..proof.errors import NotProved
from ..proof.evaluation import Identity
from ..records import Certificate, Finding
from . import certify, rounding
from .certify import Failure, Rewrite
from .ledger import Entry, Ledger, Step, Wanted
from .proposal import Change, Proposal, Propose, Remark, StoredValue, Sweep, Target, Told
from .sealed import Seal, require_sealed, seals

ROUNDING = "rounding"  # the stage in which onnxruntime runs both sides of each rewrite
# Bytes that trials may take until they are run: a session for some tens of them costs little more than one for all.
_WAITING = 2**21
_EVERY = 16  # nodes, after which progress is told

Outcome = Entry | Finding | Remark | None
"""An entry where a proposal was made, else what is told."""


@dataclass(frozen=True)
class Decided:
    """A proposal that may be made, and its rewrites; no certificate where the transform compared the nodes itself."""

    proposal: Proposal
    rewrites: Sequence[Rewrite] = ()
    certificate: Certificate | None = None


class Rewriter:
    """One pass of the transforms over one graph."""

    def __init__(self, graph: Graph, wanted: Wanted) -> None:
        self.graph, self.wanted = graph, wanted
        self.ledger = Ledger()
        self.seconds: dict[str, float] = {ROUNDING: 0.0}
        # The lowest opset that has the nodes written so far.
        self.opset = 0
        self._shared: dict[tuple[object, ...], gs.Tensor] = {}
        self._proofs: dict[object, Identity | NotProved] = {}
        self._sealed: list[tuple[gs.Node, Seal]] = []
        self._target = Target(wanted, self.ledger.entry_of, self.ledger.entries_behind, self._shared)

    def seals(self) -> list[Seal]:
        """Return the seals of the nodes that are left, as they were proved."""
        return [seal for node, seal in self._sealed if self.graph.alive(node)]

    def proto(self) -> onnx.ModelProto:
        """Return the model as it is now.

        Raises:
            ExportError: a node is not in it as it was proved.
        """
        made = self.graph.to_proto()
        require_sealed(made, self.seals())
        return made

    def apply(self, stage: str, propose: Propose) -> None:
        """Ask one transform at every node, and do what it proposes."""
        with self._timed(stage):
            nodes, progress = self.graph.nodes, self.wanted.progress
            for i, node in enumerate(nodes):
                if progress is not None and i % _EVERY == 0:
                    progress(stage, i, len(nodes))
                if self.graph.alive(node) and node.outputs:
                    self._ask(propose, node, stage)
            if progress is not None:
                progress(stage, len(nodes), len(nodes))

    def clean(self, stage: str, sweep: Sweep) -> None:
        """Do what a cleanup proposes, one after the other."""
        with self._timed(stage):
            for node, told in sweep(self._target):
                self._tell(self._take(told, Step(self.wanted.place, stage, node.outputs[0].name)))

    def make(self, stage: str, decided: Decided) -> None:
        """Make one proposal that was proved, for a caller which goes through the graph by itself."""
        self._make(decided, Step(self.wanted.place, stage, decided.proposal.finding.tensor))

    def judge(self, *, decides: bool) -> None:
        """Run the trials that are left, and complete the certificates by all verdicts."""
        ledger = self.ledger
        if self.wanted.progress is not None and ledger.trials:
            self.wanted.progress(ROUNDING, ledger.verdicts, ledger.verdicts + ledger.trials)
        self._run_trials()
        ledger.judge(self.wanted.runtime, decides=decides)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began, ran = time.perf_counter(), self.seconds[ROUNDING]
        yield
        self.seconds[stage] = time.perf_counter() - began - (self.seconds[ROUNDING] - ran)

    def _ask(self, propose: Propose, node: gs.Node, stage: str) -> None:
        known = self.wanted.undone_at(stage, node)
        if known is not None:
            if not any(f.tensor == known.tensor and f.status == "undone" for f in self.ledger.findings):
                self.ledger.entries.append(Entry(known))
            return
        try:
            step = Step(self.wanted.place, stage, node.outputs[0].name)
            outcome = self._take(propose(self.graph, node, self._target), step)
        except evaluate.Unsupported as error:  # a constant that would take too long; nothing was edited yet
            module = self.graph.module(node)
            outcome = Finding("unknown", "refused", node.outputs[0].name, module, reason=str(error))
        self._tell(outcome)
        if self.ledger.trials >= rounding.BATCH or self.ledger.waiting_bytes > _WAITING:
            self._run_trials()

    def _run_trials(self) -> None:
        began = time.perf_counter()
        self.ledger.run_trials()
        self.seconds[ROUNDING] += time.perf_counter() - began

    # ------------------------------------------------------------------ deciding

    def _take(self, told: Told, step: Step, entry: Entry | None = None) -> Outcome:
        """Make a proposal, or what it names to be tried in its place.

        Args:
            entry: which the finding belongs to, where it is there already.
        """
        if not isinstance(told, Proposal):
            return told
        decided = self.prove(told)
        if isinstance(decided, Decided):
            return self._make(decided, step, entry)
        if told.instead is not None:
            return self._take(told.instead(), step, entry)
        for other in told.otherwise(decided) if told.otherwise is not None else ():
            outcome = self._take(other, step, entry)
            if isinstance(outcome, Entry) or (isinstance(outcome, Finding) and outcome.status == "kept"):
                return outcome
        return told.unproved(decided)

    def prove(self, proposal: Proposal) -> Decided | Failure:
        """Prove what a proposal says, and change nothing."""
        if proposal.sides is not None:
            certificate = certify.certified_sides(proposal.sides)
            return Decided(proposal, (), certificate) if certificate else certificate
        if not proposal.pairs:
            return Decided(proposal)
        proved = certify.decide(
            self.graph,
            self._proofs,
            proposal.pairs,
            expressions=proposal.expressions,
            partly_hidden=proposal.partly_hidden,
        )
        return Decided(proposal, proved.rewrites, proved.certificate) if isinstance(proved, certify.Proved) else proved

    # ------------------------------------------------------------------ doing

    def _make(self, decided: Decided, step: Step, entry: Entry | None = None) -> Entry:
        proposal = decided.proposal
        own = entry or Entry(proposal.finding)
        self._plan_trial(proposal, decided.rewrites, own, step)
        stored = proposal if proposal.stored is None else proposal.stored(proposal)
        self._sealed += seals(self.graph, stored.nodes)
        for change in stored.changes:
            self._change(change)
        for constant in stored.values:
            self._store(constant)
        self._shared.update(stored.shared)
        self.opset = max(self.opset, stored.opset)
        revise = stored.revise or _with_certificate
        if stored.upon:
            last = stored.changes[-1].old.name
            self.ledger.revise(last, stored.upon, step, lambda finding: revise(finding, decided.certificate))
            return self._follow(stored, own, step)
        own.finding = revise(stored.finding, decided.certificate)
        if entry is None:
            own.steps.append(step)
            (self.ledger.aside if stored.only_for_speed else self.ledger.entries).append(own)
        return self._follow(stored, own, step)

    def _plan_trial(self, proposal: Proposal, rewrites: Sequence[Rewrite], own: Entry, step: Step) -> None:
        """Plan onnxruntime's run of both sides, before the graph is changed."""
        if proposal.kind is not None and self.ledger.is_one_of_many(proposal.kind, own):
            return
        trial = None if proposal.trial is None else proposal.trial(rewrites, self.ledger.trials)
        if trial is not None:
            entry = proposal.upon[0] if proposal.upon else own
            self.ledger.plan(entry, step, trial, proposal.finding if proposal.only_for_speed else None)

    def _change(self, change: Change) -> None:
        node = change.nodes[-1]
        self.graph.replace(change.old, change.nodes, change.shape, place=change.output, origin=change.origin)
        for output, old in change.also.items():
            self.graph.take_over(old, node, output)

    def _store(self, constant: StoredValue) -> None:
        """Let a tensor be an initializer.

        What was proved of a node that reads it holds for the number as well: the node is sealed anew.
        """
        readers = {id(node) for node in self.graph.every_consumer(constant.tensor)}
        self.graph.settle(constant.tensor, constant.value)
        sealed: list[tuple[gs.Node, Seal]] = []
        for node, seal in self._sealed:
            sealed += seals(self.graph, [node]) if id(node) in readers else [(node, seal)]
        self._sealed = sealed

    def _follow(self, proposal: Proposal, own: Entry, step: Step) -> Entry:
        """Try what a proposal that was made makes possible."""
        if proposal.then is None:
            return own
        if proposal.joined is None:
            self._take(proposal.then(), step)
            return own
        first = own.finding
        if isinstance(self._take(proposal.then(), step, own), Entry):
            own.finding = proposal.joined(first, own.finding)
        return own

    def _tell(self, outcome: Outcome) -> None:
        if isinstance(outcome, Remark):
            for entry in outcome.upon:
                entry.finding = outcome.revise(entry.finding)
        if isinstance(outcome, Finding) and not self.ledger.knows(outcome):
            self.ledger.entries.append(Entry(outcome))


def _with_certificate(finding: Finding, certificate: Certificate | None) -> Finding:
    return replace(finding, certificate=certificate)
