"""Lemmas on ops outside of algebra: a file each, with its statement, its proof, and a test that breaks it.

`TABLE` holds the ops that a lemma lets in. Where the premise of a lemma is not met, the op is refused by its name.
"""

from __future__ import annotations

from ..op_definitions import Op
from . import absolute, attention, casts, clamp, congruence, constant_row, log_exp

TABLE: dict[str, Op] = {
    **absolute.TABLE,
    **attention.TABLE,
    **casts.TABLE,
    **clamp.TABLE,
    **congruence.TABLE,
    **constant_row.TABLE,
    **log_exp.TABLE,
}
