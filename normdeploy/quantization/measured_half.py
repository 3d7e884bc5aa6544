"""Convert a model to half precision, and leave blocks in float32 until the user's metrics are reached.

The rules of `normdeploy.precision` keep values in float32 that half precision can't represent. Whether the remaining
rounding errors matter depends on the model's use, so the metrics decide: each block of the model is measured alone,
and the blocks with the largest errors go back to float32. Strongly typed TensorRT obeys the resulting Casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from ..compare.policy import Policy
from ..errors import InputError
from ..findings.precision_report import Float32Region, PrecisionReport
from ..precision.emulated_half import emulate_half
from ..precision.float32_regions import find_float32_regions
from ..precision.half_blocks import HalfBlock, block_regions, find_half_blocks, split_at_heavy_nodes
from ..precision.half_conversion import HalfPlan, write_half
from ..types import Arrays, Progress
from . import accuracy
from .half_evaluation import round_half_inputs
from .layer_exclusion import BLOCKS, LoweredSelection, exclude_parts
from .quantizer import make_judge
from .sample_split import SampleSplit

Blocks = Mapping[str, HalfBlock]


@dataclass(frozen=True)
class _Trial:
    """File that reaches the metrics."""

    selected: LoweredSelection[HalfBlock]
    proto: onnx.ModelProto
    account: PrecisionReport

    @property
    def cost(self) -> int:
        """Count the nodes that half precision does not make cheaper."""
        return self.account.kept + self.account.casts


@dataclass
class _BlockSearch:
    """Search for the blocks that become half precision.

    Attributes:
        requested: nodes that stay float32 by the user's request.
        before: the float32 model.
        float32: outputs of ``before`` on the judging samples.
        choosing: samples on which each block is measured alone.
    """

    plan: HalfPlan
    requested: Mapping[int, Float32Region]
    before: onnx.ModelProto
    judge: accuracy.AccuracyJudge
    float32: accuracy.Outputs
    choosing: Sequence[Arrays]
    progress: Progress | None

    def try_blocks(self, blocks: Sequence[HalfBlock]) -> _Trial:
        """Find the blocks that become half precision. Nodes outside the blocks are half precision.

        Raises:
            InputError: no choice of blocks reaches the metrics.
        """
        by_name = {block.name: block for block in blocks}
        every = LoweredSelection(self.before, by_name, lambda chosen: self._emulate(by_name, chosen), ())
        names = {name: name for name in by_name}
        selected = exclude_parts(every, self.judge, self.float32, self.choosing, names, BLOCKS, self.progress)
        return _Trial(selected, *self._write(by_name, selected.plans, selected.errors))

    def _write(
        self, blocks: Blocks, chosen: Blocks, errors: Mapping[str, float]
    ) -> tuple[onnx.ModelProto, PrecisionReport]:
        left = [block for name, block in blocks.items() if name not in chosen]
        return write_half(self.plan, {**block_regions(self.plan.view, left, errors), **self.requested})

    def _emulate(self, blocks: Blocks, chosen: Blocks) -> onnx.ModelProto:
        return emulate_half(self._write(blocks, chosen, {})[0])

    def find_cheapest(self, blocks: Sequence[HalfBlock]) -> _Trial:
        """Try whole blocks, the parts of the blocks that stay float32, and the parts of all blocks.

        Returns:
            the trial with the fewest nodes in float32, counting Casts.

        Raises:
            InputError: no trial reaches the metrics. The message is that of the whole blocks.
        """
        trials: list[_Trial] = []
        failures: list[InputError] = []
        candidates = [blocks, self._divide(blocks)]
        while candidates:
            tried = candidates.pop(0)
            try:
                trials.append(self.try_blocks(tried))
            except InputError as error:
                failures.append(error)
                continue
            if tried is blocks:
                left = [block for block in blocks if block.name not in trials[0].selected.plans]
                if not left:
                    # The metrics are reached with all blocks in half precision.
                    return trials[0]
                if len(left) < len(blocks):
                    candidates.append(self._divide(left))
        if not trials:
            raise failures[0]
        return min(trials, key=lambda trial: trial.cost)

    def _divide(self, blocks: Sequence[HalfBlock]) -> list[HalfBlock]:
        return split_at_heavy_nodes(self.plan.view, sorted(i for block in blocks for i in block.places))


def write_half_by_metric(
    plan: HalfPlan,
    requested: Mapping[int, Float32Region],
    before: onnx.ModelProto,
    policy: Policy,
    split: SampleSplit,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, PrecisionReport]:
    """Write a planned model in half precision, with as few blocks in float32 as the metrics allow.

    The blocks are modules. After whole modules were chosen, smaller parts of the chosen modules and of all modules are
    tried, and are taken if fewer nodes are then float32, counting Casts.

    Args:
        requested: index of a node -> its region, for nodes that stay float32 by the user's request.
        before: the float32 model, by which the metrics are measured.
        policy: metrics that the file must reach.
        split: samples that rank the blocks, and samples on which the metrics are measured.

    Returns:
        the converted model, and a report with the metrics, the steps and the error of each block.

    Raises:
        InputError: the float32 model misses a metric, or a metric is missed with only one block in half precision, or
            no node is left in half precision.
        GraphError: a type in the result is not valid.
    """
    kept, _ = find_float32_regions(plan.view, plan.carried, plan.wide_inputs, requested)
    blocks = find_half_blocks(plan.view, kept)
    widest, _ = write_half(plan, requested)
    form = plan.view.form
    judge, float32, notes = make_judge(before, policy, split, progress, optimize=False)
    judge.samples = [round_half_inputs(sample, widest, form) for sample in judge.samples]
    choosing = [round_half_inputs(sample, widest, form) for sample in split.calibrating]
    search = _BlockSearch(plan, requested, before, judge, float32, choosing, progress)
    found = search.find_cheapest(blocks)
    made, account, selected = found.proto, found.account, found.selected
    if account.kept == account.nodes:
        raise InputError(
            f"the metrics are reached only with every node in float32, so there is nothing in {form.name}; lower the"
            " threshold, or omit --precision"
        )
    account = replace(
        account,
        judged=selected.judged,
        exclusions=selected.exclusions,
        errors=dict(selected.errors),
        judging=split.sample_counts[1],
        moved=judge.measure_drift(judge.run_samples(emulate_half(made)), float32),
        notes=(*account.notes, *accuracy.few_sample_notes(selected.judged), *notes),
    )
    return made, account
