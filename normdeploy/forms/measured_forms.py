"""Which form of a norm its runtime runs best: the choice of ``--runtime``, made from what was measured.

``norm_forms.json`` is written by ``python -m benchmarks.norm_forms``, one row for each runtime, kind, type and form
that runs (`normdeploy.verbs.bench.norm_cases`): ``time`` over that of the decomposed form (geometric mean over the
sizes measured), and ``excess``, the largest error against float64 over what is allowed, which is the rule of
certificates (`normdeploy.rewriting.rounding_verdicts`): twice the error of the nodes that exporters write, or what
statistics with a few units of the largest element cost. The best form is the fastest of those whose excess is at most
1; for "onnxruntime-accurate" the one of least excess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ..option_values import ACCURATE, ANY, CUDA, TENSORRT, USUAL

# what "any" writes of all but group norms: one node, in which readers find the norm
_SINGLE = frozenset({"standard", "narrow", "sum"})


@dataclass(frozen=True)
class MeasuredForm:
    """One line of the table."""

    runtime: str
    kind: str
    dtype: str
    form: str
    time: float
    excess: float


@cache
def load_table() -> tuple[MeasuredForm, ...]:
    """The rows of ``norm_forms.json``."""
    content = json.loads(resources.files(__package__).joinpath("norm_forms.json").read_text())
    return tuple(MeasuredForm(**row) for row in content["rows"])


def is_measured(runtime: str) -> bool:
    """Whether the table has forms of this runtime, or they are known from its documents."""
    return runtime == CUDA or any(row.runtime == _runtime_in_table(runtime) for row in load_table())


def _runtime_in_table(runtime: str) -> str:
    """The runtime of which the rows are: "any" takes onnxruntime's, which TensorRT runs as well (``build`` writes its
    own of them)."""
    if runtime in (ANY, ACCURATE):
        return USUAL
    return runtime


# Not measured, for want of a GPU: what onnxruntime's list of kernels (docs/OperatorKernels.md) and its CUDA fusions
# say. It has kernels for LayerNormalization and InstanceNormalization there; an Add before a layer norm becomes
# SkipLayerNormalization, which is wanted; GroupNormalization is none, and is computed node by node, by E[x²]
# − E[x]².
_DOCUMENTED = {"GroupNorm": "instance"}


# Forms that onnxruntime has no kernel for, or one that computes in a narrower type (facts about 1.31, which a test asks
# it for again).
_WITHOUT = frozenset(
    {
        # InstanceNormalization: no double kernel, the file would not load
        ("float64", "InstanceNorm", "standard"),
        ("float64", "GroupNorm", "instance"),
        ("float64", "LayerNorm", "instance"),
        # GroupNormalization computes in float32
        ("float64", "GroupNorm", "standard"),
        # several such Sums in a file, and 1.31.1 crashes while it optimizes
        ("float16", "ResidualLayerNorm", "sum"),
    }
)


# onnxruntime's InstanceNormalization computes x·s + (b − mean·s), s = scale/√(variance + ε), and so loses |x|·u/√ε
# where the others have x − mean = 0 in rows of one place: 2e-3 of |x| for this ε. PyTorch's is 1e-5.
_SMALL = 1e-9
_CANCELS = frozenset({("InstanceNorm", "standard"), ("GroupNorm", "instance"), ("LayerNorm", "instance")})


def best_form(
    kind: str,
    runtime: str,
    dtype: str,
    among: Sequence[str],
    rows: Sequence[MeasuredForm] | None = None,
    epsilon: float = 1.0,
) -> str:
    """The form to write of those in ``among``, its first one where nothing was measured.

    ``rows``: another table than the measured one. ``epsilon``: of a norm whose rows may have one place.
    """
    # which have no float64 at all
    if runtime not in TENSORRT:
        among = [form for form in among if (dtype, kind, form) not in _WITHOUT] or among
        among = [form for form in among if epsilon >= _SMALL or (kind, form) not in _CANCELS] or among
    if runtime == CUDA:
        if _DOCUMENTED.get(kind) in among:
            return _DOCUMENTED[kind]
        return among[0]
    if runtime == ANY and kind != "GroupNorm":
        among = [form for form in among if form in _SINGLE] or among
    key = (_runtime_in_table(runtime), kind, dtype)
    own = [r for r in (load_table() if rows is None else rows) if (r.runtime, r.kind, r.dtype) == key]
    sound = [r for r in own if r.form in among and r.excess <= 1]
    if sound:
        return min(sound, key=lambda r: r.excess if runtime == ACCURATE else r.time).form
    return among[0]
