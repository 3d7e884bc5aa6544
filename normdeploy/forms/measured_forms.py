"""Choose the form that a runtime runs best, for ``--runtime``, from measurements.

``python -m benchmarks.norm_forms`` writes ``norm_forms.json``, one row for each runtime, kind, dtype and form that runs
(`normdeploy.verbs.bench.norm_cases`). ``time`` is relative to the decomposed form (geometric mean over the measured
sizes). ``excess`` is the largest error against float64 over the allowed error of certificates
(`normdeploy.rewriting.rounding_verdicts`). That is twice the error of the nodes that exporters write, or the cost of
statistics with an error of a few units of the largest element.

The best form is the fastest of those with excess at most 1. For "onnxruntime-accurate" it is the one of least excess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ..option_values import ACCURATE, ANY, CUDA, TENSORRT, USUAL

# For "any", all norms but group norms are one node, so that readers find the norm in it.
_SINGLE = frozenset({"standard", "narrow", "sum"})


@dataclass(frozen=True)
class MeasuredForm:
    """One row of the table."""

    runtime: str
    kind: str
    dtype: str
    form: str
    time: float
    excess: float


@cache
def load_table() -> tuple[MeasuredForm, ...]:
    """Load the rows of ``norm_forms.json``.

    Returns:
        the rows, cached.
    """
    content = json.loads(resources.files(__package__).joinpath("norm_forms.json").read_text())
    return tuple(MeasuredForm(**row) for row in content["rows"])


def is_measured(runtime: str) -> bool:
    """Check whether the table has forms for this runtime, or its documents state them.

    Returns:
        True for CUDA, which is documented, and for runtimes of the table.
    """
    return runtime == CUDA or any(row.runtime == _runtime_in_table(runtime) for row in load_table())


def _runtime_in_table(runtime: str) -> str:
    """Return the runtime whose rows apply.

    "any" takes onnxruntime's, which TensorRT runs as well; ``build`` writes TensorRT's own forms from them.
    """
    if runtime in (ANY, ACCURATE):
        return USUAL
    return runtime


# Not measured for lack of a GPU; taken from onnxruntime's list of kernels (docs/OperatorKernels.md) and its CUDA
# fusions. CUDA has kernels for LayerNormalization and InstanceNormalization. An Add before a layer norm becomes
# SkipLayerNormalization, as wanted. GroupNormalization has no kernel and is computed node by node, by E[x²] − E[x]².
_DOCUMENTED = {"GroupNorm": "instance"}


# Forms without an onnxruntime kernel, or with one that computes in a narrower type. These are facts about 1.31, which a
# test checks again.
_WITHOUT = frozenset(
    {
        # InstanceNormalization has no double kernel; the file would not load.
        ("float64", "InstanceNorm", "standard"),
        ("float64", "GroupNorm", "instance"),
        ("float64", "LayerNorm", "instance"),
        # GroupNormalization computes in float32
        ("float64", "GroupNorm", "standard"),
        # 1.31.1 crashes while it optimizes a file with several such Sums.
        ("float16", "ResidualLayerNorm", "sum"),
    }
)


# onnxruntime's InstanceNormalization computes x·s + (b − mean·s), s = scale/√(variance + ε). In rows of one element the
# other forms have x − mean = 0, but this one loses |x|·u/√ε: 2e-3 of |x| for this ε. PyTorch's default ε is 1e-5.
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
    """Choose the form to write from those in ``among``.

    Args:
        dtype: name of the dtype of x, for example "float16".
        rows: rows to use instead of the measured table.
        epsilon: epsilon of a norm whose rows may have one element, otherwise 1.

    Returns:
        the form; the first of ``among`` if nothing was measured.
    """
    # These facts are onnxruntime's; TensorRT has no float64 at all.
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
