"""List the rows of the table as cases. Sizes are small. They are odd if an even size could hide a swapped axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from .batch import BatchNorm2d
from .case import Case, Input, Size, seeded
from .group import FourNorms, GroupNorm
from .instance import ChannelsLastInstanceNorm, DummyChannelNorm, InstanceNorm2d, TokenInstanceNorm
from .layer import FlatLayerNorm, LayerNorm, Norm, NormOverBatch, UnbiasedLayerNorm
from .plain import random_layer_norm, trained_batch_norm
from .text import Bert, EncoderLayer, PositionBatchNorm, TextBatchNorm, TextBatchNormByHand

BATCH = ("batch", 1, 3, 8)
SEQ = ("seq", 1, 5, 16)
HEIGHT = ("height", 2, 6, 16)
WIDTH = ("width", 2, 7, 16)
TEXT: tuple[Size, ...] = (BATCH, SEQ, 24)
IMAGE: tuple[Size, ...] = (BATCH, 8, HEIGHT, WIDTH)

LN, IN, GN, FOLDED = "LayerNormalization", "InstanceNormalization", "GroupNormalization", "folded"
# Expected op of a batch norm without a linear op next to it: one node with a scale and shift
BN = "BatchNormalization"


def case(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[Size, ...],
    *expect: str,
    row: str = "",
    handwritten: bool = True,
    more: tuple[Input, ...] = (),
    reason: str = "",
) -> Case:
    """Make the case of a row, with a float input ``x`` and the inputs ``more``.

    Args:
        row: name of the row, if ``name`` is not the name of the row.

    Returns:
        the case.
    """
    return Case(
        name, row or name, partial(seeded, build), (Input("x", "float32", shape), *more), expect, handwritten, reason
    )


def bert() -> nn.Module:
    """Build a small BERT.

    Returns:
        the module.
    """
    return Bert(vocabulary=99, hidden=32, heads=4, layers=2)


CASES: tuple[Case, ...] = (
    case("S0a", lambda: Norm(24), TEXT, LN),
    case("S0b", lambda: NormOverBatch(5), (("batch", 2, 4, 8), HEIGHT, WIDTH, 5), LN),
    case("S0c", lambda: PositionBatchNorm(5, 24), (BATCH, 5, 24), FOLDED),
    case("S1a", lambda: UnbiasedLayerNorm(24), TEXT, LN),
    case("S1b", lambda: BatchNorm2d(8), IMAGE, FOLDED),
    case(
        "S1b_conv",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), BatchNorm2d(8)),
        (BATCH, 3, HEIGHT, WIDTH),
        FOLDED,
        row="S1b",
    ),
    case("S1c", lambda: InstanceNorm2d(8), IMAGE, IN),
    case("S1d", lambda: GroupNorm(2, 8), IMAGE, GN),
    case("S1e", lambda: FourNorms((8, 6, 7), 2), (BATCH, 8, 6, 7), FOLDED, LN, IN, GN),
    case("S2a", lambda: LayerNorm([24]), TEXT, LN),
    case("S2a_plain", lambda: LayerNorm([24], affine=False), TEXT, LN, row="S2a"),
    case("S2a_torch", lambda: nn.LayerNorm(24), TEXT, LN, row="S2a", handwritten=False),
    case("S2b", lambda: LayerNorm([5, 24]), (BATCH, 5, 24), LN),
    case("S2b_plain", lambda: LayerNorm([5, 24], affine=False), TEXT, LN, row="S2b"),
    case("S2b_torch", lambda: nn.LayerNorm([5, 24]), (BATCH, 5, 24), LN, row="S2b", handwritten=False),
    case("S2c", lambda: TokenInstanceNorm(5), (BATCH, 5, 24), f"{IN}|{LN}", handwritten=False),
    case("S2d", lambda: EncoderLayer(32, 4), (BATCH, SEQ, 32), LN, LN, handwritten=False),
    Case(
        "S2d_bert",
        "S2d",
        partial(seeded, bert),
        (Input("ids", "int64", (BATCH, SEQ), 99), Input("mask", "int64", (BATCH, SEQ), 2)),
        (LN,) * 5,
        handwritten=False,
    ),
    case("S2e", lambda: TextBatchNorm(5), (BATCH, 5, 24), BN, handwritten=False),
    case("S2e_hand", lambda: TextBatchNormByHand(5), (BATCH, 5, 24), FOLDED, row="S2e"),
    case("S3a", lambda: FlatLayerNorm(4 * 3 * 5), (BATCH, 4, 3, 5), LN),
    case("S3b", lambda: ChannelsLastInstanceNorm(5), (BATCH, HEIGHT, WIDTH, 5), IN),
    case("S3c", lambda: DummyChannelNorm(), (BATCH, 4, 3, 5), f"{IN}|{LN}"),
    case("S4a", lambda: trained_batch_norm(24), (BATCH, 24), FOLDED),
    case("S4a_linear", lambda: trained_batch_norm(24, nn.Linear(10, 24, bias=False)), (BATCH, 10), FOLDED, row="S4a"),
    case("S4b", lambda: random_layer_norm(24), (BATCH, 24), LN),
)
"""Every row, the variants of a row after it."""

FIXED = case(
    "S2c_dynamic_positions", lambda: TokenInstanceNorm(5), (BATCH, SEQ, 24), f"{IN}|{LN}", row="S2c", handwritten=False
)
"""S2c asked for with dynamic positions: an error, since S is a channel count."""

TRAINING = case("S4a_training", lambda: trained_batch_norm(24, training=True), (BATCH, 24), row="S4a")
"""S4a whose holder is in eval mode but whose own flag is not: exporting it is an error that names ``norm``."""
