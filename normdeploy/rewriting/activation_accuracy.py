"""Whether an activation costs accuracy as a standard node: onnxruntime runs both sides where the activation acts.

αx + β cancels where |β| is large, as in a clamp of a time of day to one day of it: (clip(x, lo, hi) − lo)/(hi − lo) is
exact to an ulp, and HardSigmoid with α = 1/(hi − lo) and β = −lo/(hi − lo) loses all digits that lo and hi share. The
rule is that of folds (`normdeploy.rewriting.rounding_verdicts`), with u the unit roundoff of float32 and y the results:

    error after ≤ max(2 · error before, 8u · max|y|)

Inputs: the argument t of the activation runs through [−½, 1½] for a clamp to 0 and 1, and through [−12, 12] else, where
float32's e^t, erf and tanh take all their values but for 1e-5; x = (t − β)/α. Where t is cubic x is drawn itself.
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
    """Whether ``nodes``, an activation of ``x``, may stand for what makes ``y``: by the module's rule, once for each
    kind in a graph; true where onnxruntime can't run the nodes before, which then are no better."""
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
    """The inputs of the module's docstring, in the rank of x."""
    # Random ones: those of a grid may be round numbers, whose products are exact.
    t = np.random.default_rng(29).uniform(*(_CLAMPED if form.atom == "Clip" else _SMOOTH), _PLACES)
    if form.argument.keys() <= {0, 1} and form.argument.get(1):
        t = (t - float(form.argument.get(0, 0))) / float(form.argument[1])
    return t.reshape(-1, *(1,) * max(0, len(graph.shape(x) or ()) - 1))
