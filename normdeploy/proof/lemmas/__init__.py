"""Admit ops outside algebra by lemmas: each file holds a statement, its proof, and the name of a test that breaks it.

`TABLE` holds the ops that a lemma admits. If the premise of a lemma does not hold, the op is refused by its name.
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
