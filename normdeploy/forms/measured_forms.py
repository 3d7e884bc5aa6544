"""Choose the form that a runtime runs best (``--runtime``), from measurements.

``python -m benchmarks.norm_forms`` writes ``norm_forms.json``. It has one row per runtime, kind, dtype and form, if the
runtime can run the form (`normdeploy.verbs.bench.norm_cases`). ``time`` is the time divided by the time of the
decomposed form (geometric mean over the measured sizes). ``excess`` is the largest error against float64, divided by
the allowed error of certificates (`normdeploy.rewriting.rounding_verdicts`). The allowed error is twice the error of
the nodes that exporters write, or the effect of statistics that are off by a few ulps of the largest element.

The best form is the fastest form with an excess of at most 1. For "onnxruntime-accurate", it is the form with the
smallest excess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ..option_values import ACCURATE, ANY, CUDA, OPENVINO, TENSORRT, USUAL

# Forms that write a norm as one node. With ``--runtime any``, all norms but group norms get such a form, so that other
# tools find the norm in the file.
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
    """Check whether the forms of this runtime are known from measurements or from its documentation.

    Returns:
        True for the runtimes in the table, and for CUDA, whose kernels are documented.
    """
    return runtime == CUDA or any(row.runtime == _runtime_in_table(runtime) for row in load_table())


def _runtime_in_table(runtime: str, dtype: str = "float32") -> str:
    """Return the runtime whose rows apply.

    The rows of onnxruntime apply to "any", because TensorRT runs these forms too. For TensorRT, ``build`` replaces them
    by TensorRT's best forms. OpenVINO computes every floating type in float32, and was measured in this type only.
    """
    if runtime in (ANY, ACCURATE) or (runtime == OPENVINO and dtype != "float32"):
        return USUAL
    return runtime


# Best forms for onnxruntime's CUDA provider. They were not measured; they follow from onnxruntime's list of kernels
# (docs/OperatorKernels.md) and its CUDA fusions. CUDA has kernels for LayerNormalization and InstanceNormalization. An
# Add before a layer norm is fused to SkipLayerNormalization, which is good. GroupNormalization has no kernel, so CUDA
# runs the nodes of its function body, which compute E[x²] − E[x]².
_DOCUMENTED = {"GroupNorm": "instance"}


# Forms (dtype, kind, form) for which onnxruntime has no kernel, or a kernel that computes in a narrower type. The list
# is for version 1.31, and a test checks it.
_WITHOUT = frozenset(
    {
        # InstanceNormalization has no double kernel; the file would not load.
        ("float64", "InstanceNorm", "standard"),
        ("float64", "GroupNorm", "instance"),
        ("float64", "LayerNorm", "instance"),
        # GroupNormalization computes in float32.
        ("float64", "GroupNorm", "standard"),
        # 1.31.1 crashes while it optimizes a file with several such Sums.
        ("float16", "ResidualLayerNorm", "sum"),
    }
)


# Smallest epsilon for which InstanceNormalization is used if a row may have one element. onnxruntime's kernel computes
# x·s + (b − mean·s) with s = scale/√(variance + ε). For one element, the exact result is b, but the kernel has an error
# of |x|·u/√ε, where u is the unit roundoff. For this ε the error is 2e-3 of |x|. PyTorch's default ε is 1e-5.
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
        epsilon: epsilon of the norm if its rows may have one element; 1 for all other norms.

    Returns:
        the form; the first of ``among`` if nothing was measured.
    """
    # The two restrictions apply to onnxruntime, in which files for OpenVINO are checked too.
    if runtime not in TENSORRT:
        among = [form for form in among if (dtype, kind, form) not in _WITHOUT] or among
        among = [form for form in among if epsilon >= _SMALL or (kind, form) not in _CANCELS] or among
    if runtime == CUDA:
        if _DOCUMENTED.get(kind) in among:
            return _DOCUMENTED[kind]
        return among[0]
    if runtime == ANY and kind != "GroupNorm":
        among = [form for form in among if form in _SINGLE] or among
    key = (_runtime_in_table(runtime, dtype), kind, dtype)
    own = [r for r in (load_table() if rows is None else rows) if (r.runtime, r.kind, r.dtype) == key]
    sound = [r for r in own if r.form in among and r.excess <= 1]
    if sound:
        return min(sound, key=lambda r: r.excess if runtime == ACCURATE else r.time).form
    return among[0]
