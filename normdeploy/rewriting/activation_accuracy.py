"""Check that a standard node of an activation is accurate.

onnxruntime runs the nodes before the rewrite and the standard node on inputs that cover the activation's range.

αx + β cancels if |β| is large. For example, (clip(x, lo, hi) − lo)/(hi − lo) clamps a time to one day and is exact to
an ulp. HardSigmoid with α = 1/(hi − lo) and β = −lo/(hi − lo) loses all digits that lo and hi share. The rule is the
same as for folds (`normdeploy.rewriting.rounding_verdicts`). u is the unit roundoff of float32, and y the results:

    error after ≤ max(2 · error before, 8u · max|y|)

Inputs: the argument t of the activation covers [−½, 1½] for a clamp to 0 and 1, else [−12, 12]. On [−12, 12], erf, tanh
and the sigmoid reach their limits to within 1e-5. x = (t − β)/α. If t is cubic in x, x itself is drawn from this range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from ..compare.rewrite_errors import sum_rounding_error
from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..proof.pointwise_forms import PointwiseForm
from .certification import pair_of, rewrite_of
from .rounding_cases import RoundingCase
from .rounding_verdicts import TrialOutcome, make_case_trial, make_whole_input, run_trials

_PLACES = 257
_CLAMPED = (-0.5, 1.5)
_SMOOTH = (-12.0, 12.0)


def is_activation_accurate(
    graph: Graph, form: PointwiseForm, x: gs.Tensor, y: gs.Tensor, nodes: Sequence[gs.Node]
) -> bool:
    """Check by the module's rule whether ``nodes``, an activation of ``x``, may replace the nodes that compute ``y``.

    Each kind of activation is tried once per graph.

    Returns:
        True if the error is allowed, or if onnxruntime cannot run the nodes before the rewrite. False if onnxruntime
        runs only the nodes before the rewrite, or if no trial can be made.
    """
    rewrite = rewrite_of(graph, pair_of(graph, y, [x], nodes[-1].outputs[0]))
    if isinstance(rewrite, Refusal):
        return False
    key = ("accurate", rewrite.before.template, rewrite.after.template)
    if key not in graph.memo:
        sizes = dict.fromkeys((*rewrite.before.symbols, *rewrite.after.symbols), 1)
        case = RoundingCase((_activation_inputs(graph, form, x),), ("normal",), rewrite.before.bind(sizes))
        chosen = make_whole_input(
            case, np.dtype(np.float32), lambda y, unit: sum_rounding_error(float(np.abs(y).max()), unit)
        )
        tried = make_case_trial(rewrite, chosen, opset=1, number=0)
        graph.memo[key] = tried is not None and _is_verdict_acceptable(run_trials([tried])[0])
    return bool(graph.memo[key])


def _is_verdict_acceptable(outcome: TrialOutcome) -> bool:
    if outcome.after is None:
        return outcome.gross is None
    return bool(outcome.after)


def _activation_inputs(graph: Graph, form: PointwiseForm, x: gs.Tensor) -> np.ndarray:
    """Draw the inputs of the module's docstring, in the rank of ``x``."""
    # The inputs are random, because the points of a grid may be round numbers with exact products.
    t = np.random.default_rng(29).uniform(*(_CLAMPED if form.atom == "Clip" else _SMOOTH), _PLACES)
    if form.argument.keys() <= {0, 1} and form.argument.get(1):
        t = (t - float(form.argument.get(0, 0))) / float(form.argument[1])
    return t.reshape(-1, *(1,) * max(0, len(graph.shape(x) or ()) - 1))
