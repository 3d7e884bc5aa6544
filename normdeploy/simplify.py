"""Cleaning up what the exporter left: constants folded, duplicates merged, shape arithmetic resolved, nothing lost.

Run after the norms are single nodes: an epsilon that is an attribute can't be taken for ``x + 0`` any more. The work is done by
the public passes of onnx_ir and those rules of onnxscript that are exact. Three of the latter's default rules are not used:

- ``x + 0``, ``x - 0``, ``x * 1``, ``x / 1`` compare by a tolerance (1e-8 absolute, 1e-5 relative) and so delete small epsilons and
  change scales; ours compare exactly.
- ``slice_split_rule`` tries every pair of nodes. It is the one part of onnxscript's optimizer that grows with the square of
  the graph; ``SplitTiledSlices`` does the same, and more, in one walk.
- folding BatchNormalization into its neighbours is left to the project's own passes, which certify it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime as ort
import torch
from onnxscript.optimizer import FOLDED_FROM_KEY, fold_constants_ir
from onnxscript.rewriter import RULE_NAME_TAG, RewritePass, RewriteRuleClassBase, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules

from .errors import ExportError
from .files import detached, refer

_NORMS = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "GroupNormalization",
        "InstanceNormalization",
        "BatchNormalization",
        "MeanVarianceNormalization",
    }
)
_UNIT_ROUNDOFF = {
    onnx.TensorProto.BFLOAT16: 2.0**-8,
    onnx.TensorProto.FLOAT16: 2.0**-11,
    onnx.TensorProto.FLOAT: 2.0**-24,
    onnx.TensorProto.DOUBLE: 2.0**-53,
}
_ROUNDS = 4  # each resolves what the one before made constant; the models seen settle in two or three


class _Neutral(RewriteRuleClassBase):
    """``x ∘ c`` is x where c is one number, exactly the neutral element, and does not broadcast x to a higher rank."""

    def __init__(self, op_type: str, neutral: float) -> None:
        super().__init__(name=f"{op_type}Neutral")
        self._op_type, self._neutral = op_type, neutral

    def pattern(self, op: Any, x: Any, c: Any) -> Any:
        return getattr(op, self._op_type)(x, c)

    def check(self, context: Any, x: ir.Value, c: ir.Value, **_: Any) -> bool:
        constant = c.const_value
        if constant is None or constant.size != 1 or c.is_graph_input():
            return False
        rank = len(constant.shape)
        return (rank == 0 or (x.shape is not None and rank <= len(x.shape))) and constant.numpy().item() == self._neutral

    def rewrite(self, op: Any, x: ir.Value, c: ir.Value) -> Any:
        return op.Identity(x)


_RULES = RewriteRuleSet(
    [
        *_Neutral.rule("Add", 0.0).commute(),
        *_Neutral.rule("Mul", 1.0).commute(),
        _Neutral.rule("Sub", 0.0),
        _Neutral.rule("Div", 1.0),
        rules.two_reshapes_matmul_reshape_rule,
        rules.one_reshape_matmul_reshape_rule,
        rules.cast_constant_of_shape_rule,
        rules.cast_constant_of_shape_without_value_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.materialize_reshape_shape_rule,
        rules.min_min_rule,
        rules.max_max_rule,
        rules.min_max_rule,
        rules.max_min_rule,
        rules.successive_clip_relu_rule,
        rules.successive_relu_clip_rule,
        rules.successive_relu_rule,
        rules.successive_clip_rule,
        rules.cast_cast_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.flatten_to_reshape_rule,
        rules.reshape_reshape_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
        rules.no_op_dynamic_scatter_nd_rule,
        rules.no_op_static_scatter_nd_rule,
        rules.normalize_pad_format_conv_rule,
        rules.normalize_pad_format_conv_integer_rule,
        rules.fuse_pad_into_conv_rule,
        rules.fuse_pad_into_conv_integer_rule,
        rules.remove_optional_bias_from_conv_rule,
        rules.remove_optional_bias_from_conv_transpose_rule,
        rules.remove_optional_bias_from_qlinear_conv_rule,
        rules.remove_optional_bias_from_gemm_rule,
    ]
)


class SplitTiledSlices(ir.passes.InPlacePass):
    """Slices that tile one axis of a tensor become one Split."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        tiles: dict[tuple[ir.Value, int], dict[int, tuple[int, ir.Node]]] = defaultdict(dict)
        for node in model.graph:
            if (tile := _tile(node)) is not None:
                data, axis, start, end = tile
                tiles[data, axis].setdefault(start, (end, node))  # in the graph's order
        modified = False
        for (data, axis), pieces in tiles.items():
            chosen: list[ir.Node] = []
            sizes: list[int] = []
            while (cut := sum(sizes)) in pieces:
                end, node = pieces[cut]
                chosen.append(node)
                sizes.append(end - cut)
            if len(chosen) < 2 or cut != data.shape[axis]:  # type: ignore[index]
                continue
            first = next(node for _, node in pieces.values() if node in chosen)
            lengths = ir.node("Constant", [], {"value_ints": sizes})
            split = ir.node("Split", [data, lengths.outputs[0]], {"axis": axis}, num_outputs=len(sizes))
            ir.convenience.replace_nodes_and_values(
                model.graph, first, chosen, [lengths, split], [n.outputs[0] for n in chosen], split.outputs
            )
            modified = True
        return ir.passes.PassResult(model, modified)


def _tile(node: ir.Node) -> tuple[ir.Value, int, int, int] | None:
    """(data, axis, start, end) of a Slice along one axis of known size with step 1; None for everything else."""
    if node.op_type != "Slice" or node.domain != "" or len(node.inputs) < 4 or (data := node.inputs[0]) is None or data.shape is None:
        return None
    given = [None if v is None else ir.convenience.get_const_tensor(v) for v in node.inputs[1:]]
    if any(t is None or t.size != 1 for t in given):
        return None
    start, end, axis, *step = (int(t.numpy().item()) for t in given)  # type: ignore[union-attr]
    axis %= len(data.shape)
    size = data.shape[axis]
    if not isinstance(size, int) or step not in ([], [1]):
        return None
    start, end, _ = slice(start, end).indices(size)
    return (data, axis, start, end) if start < end else None


@dataclass(frozen=True)
class Simplified:
    """``proto`` is the cleaned model, or the one given where that failed; ``note`` then says why, and is "" otherwise."""

    proto: onnx.ModelProto
    note: str = ""


def simplify(
    proto: onnx.ModelProto, samples: Sequence[Mapping[str, np.ndarray]] = (), *, progress: Callable[[str, int, int], None] | None = None
) -> Simplified:
    """Clean up ``proto`` (opset 13 or later, external data loaded) and check the result on ``samples``.

    Kept as they are: the norm ops, function bodies, metadata under ``normdeploy.``, the model's metadata, dim names, the names of
    inputs, outputs and surviving tensors. No op outside the default domain and none newer than the file's opset is written.

    Args:
        proto: not changed.
        samples: inputs for ``check_equal``; empty: not checked.
        progress: called with (stage, done, total).
    """
    try:
        after = _cleaned(proto, progress)
        if samples:
            check_equal(proto, after, samples)
    except Exception as error:
        # Cleaning up is a convenience: whatever goes wrong in it must not cost the user the export.
        return Simplified(proto, f"the graph was left unsimplified: {str(error).strip() or type(error).__name__}")
    return Simplified(after)


def check_equal(before: onnx.ModelProto, after: onnx.ModelProto, samples: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Run both on each sample in onnxruntime, its own optimizer off, and compare every output.

    Cleaning up is meant to be exact, and mostly is, bit for bit. What may differ is the rounding of the nodes that were folded into
    constants or regrouped, N at most (the nodes before). N roundings of relative size u add up to less than λ·√N·u with a probability
    of 1 − 2N·exp(−λ²/2) (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019); with λ = 6 that is
    1 − 3e-8·N. So the bound is 6·√N·u·max|before| for each output, u the unit roundoff of the coarsest floating type in the graph.
    Integers, and the places of NaN and Inf, must be equal.

    Raises:
        ExportError: an output differs by more; the message names it and both values.
    """
    first, second = _session(before), _session(after)
    names = [o.name for o in before.graph.output]
    relative = 6 * math.sqrt(len(before.graph.node)) * _unit_roundoff(before)
    for sample in samples:
        feeds = {name: _ort_value(sample[name]) for name in (i.name for i in first.get_inputs())}
        for name, old, new in zip(names, _run(first, names, feeds), _run(second, names, feeds), strict=True):
            difference = _difference(old, new)
            bound = relative * float(np.abs(old, where=np.isfinite(old), out=np.zeros(old.shape)).max(initial=0.0))
            if difference > bound:
                raise ExportError(
                    f"simplifying changed the output {name!r} by {difference:.3g}, but rounding explains no more than {bound:.3g}"
                )


def _cleaned(proto: onnx.ModelProto, progress: Callable[[str, int, int], None] | None) -> onnx.ModelProto:
    model = ir.serde.deserialize_model(proto)
    metadata = {output.name: dict(node.metadata_props) for node in model.graph for output in node.outputs}
    imports = dict(model.opset_imports)
    functions = dict(model.functions)
    model.functions.clear()  # out of the passes' reach
    for done in range(_ROUNDS):
        if progress is not None:
            progress("simplify", done, _ROUNDS)
        if not _round(model):
            break
    common.OutputFixPass()(model)
    common.NameFixPass()(model)
    model.functions.update(functions)
    model.opset_imports.update({domain: version for domain, version in imports.items() if domain})
    _tidy_metadata(model, metadata)
    if progress is not None:
        progress("simplify", _ROUNDS, _ROUNDS)
    return ir.serde.serialize_model(model)


def _round(model: ir.Model) -> bool:
    """One round of all passes; False where nothing changed."""
    folded = fold_constants_ir(model, onnx_shape_inference=True, should_fold=lambda node: False if node.op_type in _NORMS else None)
    results = [
        run(model).modified
        for run in (
            RewritePass(_RULES),
            SplitTiledSlices(),
            common.RemoveUnusedNodesPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            common.DeduplicateInitializersPass(),
            common.CommonSubexpressionEliminationPass(),
        )
    ]
    return bool(folded.modified or any(results))


def _tidy_metadata(model: ir.Model, before: Mapping[str | None, Mapping[str, str]]) -> None:
    """Drop what the optimizers noted for themselves; a node they wrote takes the metadata of the node that made its output before."""
    for value in model.graph.initializers.values():
        value.metadata_props.pop(FOLDED_FROM_KEY, None)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.pop(RULE_NAME_TAG, None)
        for output in node.outputs:
            output.metadata_props.pop(FOLDED_FROM_KEY, None)
            for key, text in before.get(output.name, {}).items():
                node.metadata_props.setdefault(key, text)


def _session(proto: onnx.ModelProto) -> ort.InferenceSession:
    """A session without optimizations, over the weights where they lie: neither serialized nor repacked."""
    light, tensors = detached(proto)
    refer(light, {name: ("held by the session", 0, math.prod(t.dims) * ir.DataType(t.data_type).itemsize) for name, t in tensors.items()})
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # an exception says it better
    options.add_session_config_entry("session.disable_prepacking", "1")
    values = [_ort_value(onnx.numpy_helper.to_array(t)) for t in tensors.values()]
    options.add_external_initializers(list(tensors), values)
    return ort.InferenceSession(light.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _ort_value(array: np.ndarray) -> ort.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _run(session: ort.InferenceSession, names: Sequence[str], feeds: Mapping[str, ort.OrtValue]) -> list[np.ndarray]:
    return [
        torch.from_dlpack(v).float().numpy() if v.data_type() == "tensor(bfloat16)" else v.numpy()
        for v in session.run_with_ort_values(names, feeds)
    ]


def _unit_roundoff(proto: onnx.ModelProto) -> float:
    """Of the coarsest floating type that the graph computes in."""
    types = {t.data_type for t in proto.graph.initializer} | {
        v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)
    }
    types |= {a.i for node in proto.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    return max((u for kind, u in _UNIT_ROUNDOFF.items() if kind in types), default=_UNIT_ROUNDOFF[onnx.TensorProto.FLOAT])


def _difference(old: np.ndarray, new: np.ndarray) -> float:
    """The largest |old − new|, infinite where shape, type or the places of NaN and Inf differ."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return math.inf
    if np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
        return 0.0
    if old.dtype.kind != "f":
        return math.inf
    finite = np.isfinite(old)
    if not np.array_equal(old[~finite], new[~finite], equal_nan=True) or not np.isfinite(new[finite]).all():
        return math.inf
    return float(np.abs(old[finite].astype(np.float64) - new[finite]).max())
