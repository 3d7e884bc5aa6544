"""Admit ops that are not algebraic by lemmas.

Each module states its lemma and proves it, and names the test with counterexamples that the prover must refuse.

`TABLE` lists the ops that a lemma admits. If the premise of the lemma does not hold, the proof fails and names the op.
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
