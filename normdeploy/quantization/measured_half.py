"""Convert a model to half precision, and leave blocks in float32 until the user's metrics are reached.

The rules of `normdeploy.precision` keep values in float32 that half precision can't represent. Whether the remaining
rounding errors matter depends on the model's use, so the metrics decide: each block of the model is measured alone,
and the blocks with the largest errors go back to float32. Strongly typed TensorRT obeys the resulting Casts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


@dataclass
class _BlockWriter:
    """Writer of the file for a choice of blocks.

    Attributes:
        requested: nodes that stay float32 by the user's request.
        blocks: all blocks, by name.
    """

    plan: HalfPlan
    requested: Mapping[int, Float32Region]
    blocks: Blocks

    def write(self, chosen: Blocks, errors: Mapping[str, float]) -> tuple[onnx.ModelProto, PrecisionReport]:
        """Write the file in which the blocks in ``chosen`` are half precision, and the other blocks are float32."""
        left = [block for name, block in self.blocks.items() if name not in chosen]
        return write_half(self.plan, {**block_regions(self.plan.view, left, errors), **self.requested})

    def emulate(self, chosen: Blocks) -> onnx.ModelProto:
        """Write the file of `write` for a run in float32, with each result rounded to its type."""
        return emulate_half(self.write(chosen, {})[0])

    def select(
        self,
        before: onnx.ModelProto,
        judge: accuracy.AccuracyJudge,
        float32: accuracy.Outputs,
        choosing: Sequence[Arrays],
        progress: Progress | None,
    ) -> LoweredSelection[HalfBlock]:
        """Select the blocks that become half precision.

        Args:
            float32: outputs of ``before`` on the judging samples.
            choosing: samples on which each block is measured alone.

        Raises:
            InputError: no selection reaches the metrics.
        """
        names = {name: name for name in self.blocks}
        every = LoweredSelection(before, self.blocks, self.emulate, ())
        return exclude_parts(every, judge, float32, choosing, names, BLOCKS, progress)

    def finer_writers(self, chosen: Blocks) -> Iterator[_BlockWriter]:
        """Divide blocks into parts.

        Yields:
            if some blocks are not in ``chosen``, a writer for the parts of these blocks, in whose files all other nodes
            are half precision; and a writer for the parts of all blocks.
        """
        left = {name: block for name, block in self.blocks.items() if name not in chosen}
        for blocks in (left, self.blocks) if left else ():
            places = sorted(i for block in blocks.values() for i in block.places)
            parts = split_at_heavy_nodes(self.plan.view, places)
            if len(parts) > len(blocks):
                yield replace(self, blocks={block.name: block for block in parts})


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
    blocks = {block.name: block for block in find_half_blocks(plan.view, kept)}
    writer = _BlockWriter(plan, requested, blocks)
    widest, _ = writer.write(blocks, {})
    form = plan.view.form
    judge, float32, notes = make_judge(before, policy, split, progress, optimize=False)
    judge.samples = [round_half_inputs(sample, widest, form) for sample in judge.samples]
    choosing = [round_half_inputs(sample, widest, form) for sample in split.calibrating]
    selected = writer.select(before, judge, float32, choosing, progress)
    made, account = writer.write(selected.plans, selected.errors)
    for finer in writer.finer_writers(selected.plans):
        try:
            trial = finer.select(before, judge, float32, choosing, progress)
        # All these parts are needed in float32.
        except InputError:
            continue
        smaller, account_of_trial = finer.write(trial.plans, trial.errors)
        if _count_slow_nodes(account_of_trial) < _count_slow_nodes(account):
            made, account, selected = smaller, account_of_trial, trial
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


def _count_slow_nodes(account: PrecisionReport) -> int:
    """Count the nodes that half precision does not make cheaper."""
    return account.kept + account.casts
