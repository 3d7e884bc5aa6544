"""Clean up a graph after export: fold constants, merge duplicates and resolve shape arithmetic.

This runs after the norms became single nodes, so an epsilon is an attribute and can't be mistaken for ``x + 0``.

The rules are in `cleaning`, one file per family, each with its premise and proof. onnxscript's rules are not used. Five
of its rules seemed exact but were not: ScatterND with a reduction, Clips that do not meet, Reshapes around a MatMul,
Pad into ConvInteger, and x + 0 at -0. Its evaluator computes LogSoftmax as log(softmax). This module uses only
onnxscript's walk over the graph, which infers shapes and follows them through sequences. Nodes that the walk misreads
are hidden from it (`cleaning.hidden_nodes`). ``benchmarks.attack.cleaning`` tests all of this on random graphs.

CPU seconds on a chain of LayerNormalization and MatMul nodes. Row 1 is all of ``simplify`` without the check; rows 2
and 3 are parts of onnxscript's optimizer:

=================================  =====  ======  =======
nodes                              5,000  20,000  100,000
=================================  =====  ======  =======
this module                          1.3     6.5       38
onnxscript's constant folding        0.7     2.6
onnxscript's basic rules             9.8     144
=================================  =====  ======  =======
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import FOLDED_FROM_KEY, fold_constants_ir

from ..evaluate import evaluator
from ..norms.norm_table import STANDARD, StatisticsKind
from ..storage.shared_weights import shared_array
from ..storage.weight_serialization import detach_weights, set_weight_locations
from ..types import Arrays, Progress
from .cleaning.constant_folding import ConstantFolder
from .cleaning.hidden_nodes import find_misread_by_folding, find_misread_by_merging, hide_nodes
from .cleaning.movement_rules import DataMovementPass
from .cleaning.rule_table import CleaningRules
from .ort_equivalence import require_equal_models
from .proto_queries import RANDOM
from .shape_inference import infer_types
from .static_reshapes import resolve_reshapes

__all__ = ["SimplifiedModel", "require_equal_models", "simplify"]

# Norm ops are not folded here. `rewriting.constant_evaluation` computes the norm of a constant in float64, or gives the
# reason why the norm stays.
_UNFOLDED = frozenset(op for op, row in STANDARD.items() if row.statistics is StatisticsKind.INPUT)
# Quantization ops are not folded. A quantized weight keeps its few bits, and runtimes look for the pair of
# QuantizeLinear and DequantizeLinear.
_QUANTIZING = frozenset(op for _, op in evaluator.QUANTIZATION)
# Opset of the newest op that the rules write (Reshape with allowzero).
_RULES_FROM = 14
_SELECTIONS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
# Maximum number of elements in the results of a folded node, if the results are positions, masks or rows of tables.
_MADE = 2**20
# Maximum number of elements of a constant that a folded node reads, if its results are not positions, masks or rows of
# tables.
_READ = 2**13
# Maximum number of elements in the results of a folded node, if they are not positions, masks or rows of tables.
_GROWN = 2**18
# Maximum number of elements of an initializer that takes part in the merging of equal initializers. The limit covers
# tables of positions, which some files store once per layer.
_ALIKE = 2**16
# Maximum number of inputs of a node. With more inputs, merging equal initializers takes minutes, because each merge
# scans all inputs.
_WIDE = 256
# Maximum number of rounds. Each round resolves values that the previous round made constant. All models so far needed
# two or three rounds.
_ROUNDS = 4


class SplitTiledSlices(ir.passes.InPlacePass):
    """Pass that replaces Slices that tile one axis of a tensor by one Split."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace Slices that tile an axis in the main graph.

        Returns: the model, changed in place, and whether it changed.
        """
        tiles: dict[tuple[ir.Value, int], dict[int, tuple[int, ir.Node]]] = defaultdict(dict)
        for node in model.graph:
            if (tile := _slice_bounds(node)) is not None:
                data, axis, start, end = tile
                # A dict keeps the graph's order.
                tiles[data, axis].setdefault(start, (end, node))
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
            # The Split reads the current input of ``first``, not ``data``. If ``data`` was the result of a Slice, an
            # earlier Split has replaced it.
            split = ir.node("Split", [first.inputs[0], lengths.outputs[0]], {"axis": axis}, num_outputs=len(sizes))
            ir.convenience.replace_nodes_and_values(
                model.graph, first, chosen, [lengths, split], [n.outputs[0] for n in chosen], split.outputs
            )
            modified = True
        return ir.passes.PassResult(model, modified)


def _slice_bounds(node: ir.Node) -> tuple[ir.Value, int, int, int] | None:
    """Return (data, axis, start, end) of a Slice along one axis of known size with step 1; None for any other node."""
    if (
        node.op_type != "Slice"
        or node.domain != ""
        or len(node.inputs) < 4
        or (data := node.inputs[0]) is None
        or data.shape is None
    ):
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
    if start < end:
        return (data, axis, start, end)
    return None


@dataclass(frozen=True)
class SimplifiedModel:
    """Result of `simplify`.

    Attributes:
        proto: the cleaned model, or the original one if cleaning failed.
        note: reason for the failure; "" otherwise.
        ran: whether onnxruntime ran both models on samples. Their outputs then agree within the bound.
    """

    proto: onnx.ModelProto
    note: str = ""
    ran: bool = False


def simplify(
    proto: onnx.ModelProto,
    samples: Sequence[Arrays] = (),
    *,
    resolves: bool = False,
    progress: Progress | None = None,
) -> SimplifiedModel:
    """Clean up ``proto`` (external data loaded) and check the result on ``samples``.

    The cleaning keeps:

    - norm ops and function bodies,
    - metadata under ``normdeploy.`` and the model's metadata,
    - dim names, and the names of inputs, outputs and remaining tensors,
    - initializers that are also inputs.

    The cleaning writes only ops of the default domain that exist in the file's opset. Before opset 14 the rules are
    skipped: only constants are folded, and duplicate and unused nodes removed.

    Args:
        proto: not changed.
        samples: inputs for ``require_equal_models``; if empty, the result is not checked.
        resolves: whether to first replace the computed sizes of Reshapes and Expands by constants where possible
            (`graphs.static_reshapes`).
        progress: called with (stage, done, total).

    Returns: the cleaned model; on any failure the original one with a note.
    """
    try:
        cleaned = _clean_model(proto, progress, resolves=resolves)
        if cleaned is None:
            return SimplifiedModel(proto)
        after, untouched = serialize_model(cleaned)
        if samples:
            require_equal_models(proto, after, samples, {name: weight.name for name, weight in untouched.items()})
        restore_weights(after, untouched)
    except Exception as error:
        # Cleaning is optional, so a failure in it must not stop the export.
        return SimplifiedModel(proto, f"the graph was not simplified: {str(error).strip() or type(error).__name__}")
    return SimplifiedModel(after, ran=bool(samples))


class _LazyWeight(ir.LazyTensor):
    """Large initializer of the original model, read only if a pass computes with it.

    Renaming the weight does not change the original model.
    """

    def __init__(self, proto: onnx.TensorProto) -> None:
        self.proto = proto
        super().__init__(
            lambda: _read_tensor(proto), dtype=ir.DataType(proto.data_type), shape=ir.Shape(proto.dims), name=proto.name
        )


def _read_tensor(proto: onnx.TensorProto) -> ir.TensorProtocol:
    array = shared_array(proto)
    if array is None:
        return ir.serde.TensorProtoTensor(proto)
    return ir.tensor(array, name=proto.name)


def open_model(light: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]) -> ir.Model:
    """Open the result of `storage.weight_serialization.detach_weights`.

    Args:
        light: model without large weights; changed in place.
        tensors: the large weights by name.

    Returns: the model, with weights that are read on demand.
    """
    set_weight_locations(light, dict.fromkeys(tensors, ("the model given", 0, 0)))
    model = ir.serde.deserialize_model(light)
    # The folding pass infers shapes node by node, and would treat a tensor without a type as a shape. So all types are
    # inferred first.
    kinds = {name: kind for name, (kind, _) in infer_types(light).items() if kind is not None}
    for node in model.graph:
        for value in node.outputs:
            if value.dtype is None and value.name in kinds:
                value.dtype = ir.DataType(kinds[value.name])
    for name, tensor in tensors.items():
        model.graph.initializers[name].const_value = _LazyWeight(tensor)
    return model


def serialize_model(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """Convert the model to a proto. Unchanged weights are only referred to, not copied.

    Returns: the proto, and the unchanged weights by their current names.
    """
    untouched = {
        name: v.const_value.proto
        for name, v in model.graph.initializers.items()
        if isinstance(v.const_value, _LazyWeight)
    }
    for name in untouched:
        model.graph.initializers[name].const_value = ir.tensor(0, name=name)
    proto = ir.serde.serialize_model(model)
    for initializer in proto.graph.initializer:
        if (weight := untouched.get(initializer.name)) is not None:
            reference = onnx.TensorProto(name=initializer.name, dims=weight.dims, data_type=weight.data_type)
            reference.data_location = onnx.TensorProto.EXTERNAL
            initializer.CopyFrom(reference)
    return proto, untouched


def restore_weights(proto: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
    """Replace references by copies of the weights, in place."""
    for initializer in proto.graph.initializer:
        if initializer.name in weights:
            name = initializer.name
            initializer.CopyFrom(weights[name])
            initializer.name = name


def _clean_model(
    proto: onnx.ModelProto,
    progress: Progress | None,
    *,
    resolves: bool,
) -> ir.Model | None:
    """Return the cleaned model; None if nothing changed, so that the file keeps its bytes."""
    light, tensors = detach_weights(proto)
    changed = resolves and resolve_reshapes(light)
    model = open_model(light, tensors)
    before = _collect_metadata(model)
    imports = dict(model.opset_imports)
    draws = _draws_random_numbers(model)
    functions = dict(model.functions)
    # The passes must not change the functions, so they are removed and restored after the passes.
    model.functions.clear()
    given = {v: v.const_value for v in model.graph.inputs if v.const_value is not None}
    # The caller may override a default value of an input, so the passes must not treat it as a constant.
    for value in given:
        value.const_value = None
        model.graph.initializers.pop(str(value.name), None)
    for done in range(_ROUNDS):
        if progress is not None:
            progress("simplify", done, _ROUNDS)
        if not _run_all_passes(model, draws):
            break
        changed = True
    if not changed:
        return None
    for value, default in given.items():
        value.const_value = default
        model.graph.register_initializer(value)
    common.NameFixPass()(model)
    model.functions.update(functions)
    model.opset_imports.update({domain: version for domain, version in imports.items() if domain})
    _restore_metadata(model, before)
    if progress is not None:
        progress("simplify", _ROUNDS, _ROUNDS)
    return model


def _draws_random_numbers(model: ir.Model) -> bool:
    """Return whether the model draws random numbers, so that two equal nodes may differ."""
    nodes = [*ir.traversal.RecursiveGraphIterator(model.graph), *(n for f in model.functions.values() for n in f)]
    return any(n.op_type in RANDOM or (n.op_type == "Dropout" and len(n.inputs) > 2) for n in nodes)


def _run_all_passes(model: ir.Model, draws: bool) -> bool:
    """Run one round of all passes and return whether anything changed."""
    folded = _fold_constants(model)
    wide = any(len(node.inputs) > _WIDE for node in model.graph)
    texts = any(v.dtype == ir.DataType.STRING for v in model.graph.initializers.values())
    ruled = model.opset_imports.get("", 0) >= _RULES_FROM
    results = [
        run(model).modified
        for run in (
            *([CleaningRules(), SplitTiledSlices(), DataMovementPass()] if ruled else []),
            common.RemoveUnusedNodesPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            # The pass pads strings by zero bytes before it compares them. It would confuse strings that end in zero
            # bytes.
            *([] if wide or texts else [common.DeduplicateInitializersPass(_ALIKE)]),
        )
    ]
    if not draws:
        with hide_nodes(find_misread_by_merging(model)):
            results.append(common.CommonSubexpressionEliminationPass()(model).modified)
    return folded or any(results)


def _fold_constants(model: ir.Model) -> bool:
    """Fold constants, infer shapes on the way, and return whether anything changed."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Identity" and node.domain == "" and not node.outputs[0].is_graph_output():
            # The pass would copy the declared shape of an Identity's output to its input.
            node.outputs[0].shape = None
    folder = ConstantFolder(_is_foldable, model.opset_imports.get("", 0))
    with hide_nodes([*find_misread_by_folding(model), *_protect_output_shapes(model)]):
        folded = fold_constants_ir(model, onnx_shape_inference=True, should_fold=folder)
    return folder.write_constants() or folded.modified


def _protect_output_shapes(model: ir.Model) -> list[ir.Node]:
    """Return each Identity that computes a graph output, if the declared shapes of its output and input differ."""
    return [
        node
        for node in model.graph
        if node.op_type == "Identity"
        and node.domain == ""
        and node.outputs[0].is_graph_output()
        and node.inputs[0] is not None
        and node.outputs[0].shape is not None
        and node.outputs[0].shape != node.inputs[0].shape
    ]


def _is_foldable(node: ir.Node) -> bool:
    """Return whether a node on constants is small enough to be folded.

    A folded node may read at most 8,192 elements and create at most 262,144 elements. Results of up to `_MADE` elements
    are allowed for positions and masks, and for selections that are not larger than their table, because other foldable
    nodes read such results. A Transpose of a weight without other readers is always folded.
    """
    for value in node.inputs:
        # Remove the pass's list of ancestors, because the lists grow quadratically along a chain of constants.
        if value is not None:
            value.meta.pop(FOLDED_FROM_KEY, None)
    if node.op_type in _UNFOLDED or node.op_type in _QUANTIZING:
        return False
    made = [_element_count(value) for value in node.outputs]
    if None in made:
        total = None
    else:
        total = sum(n or 0 for n in made)
    whole = all(value.dtype is not None and not value.dtype.is_floating_point() for value in node.outputs)
    if node.op_type in _SELECTIONS and node.inputs[0] is not None:
        table = _element_count(node.inputs[0])
    else:
        table = None
    if total is not None and total <= _MADE and (whole or (table is not None and (made[0] or 0) <= table)):
        return True
    large = [v for v in node.inputs if v is not None and v.const_value is not None and v.const_value.size > _READ]
    if node.op_type == "ConstantOfShape" or (total is not None and total > _GROWN):
        return False
    return not large or (node.op_type == "Transpose" and all(len(v.consumers()) == 1 for v in large))


def _element_count(value: ir.Value) -> int | None:
    """Return the number of elements of a tensor; None if its shape is not static."""
    if value.shape is None:
        dims = None
    else:
        dims = [d for d in value.shape if isinstance(d, int)]
    if dims is not None and value.shape is not None and len(dims) == len(value.shape):
        return math.prod(dims)
    return None


def _collect_metadata(model: ir.Model) -> dict[tuple[str, str], dict[str, str]]:
    """Return each node's metadata, by its outputs and by its first input."""
    metadata: dict[tuple[str, str], dict[str, str]] = {}
    for node in model.graph:
        for kind, values in (("made", node.outputs), ("read", node.inputs[:1])):
            for value in values:
                if value is not None and value.name and (node.metadata_props or kind == "made"):
                    # An empty entry is kept too, so that a node outside all modules gets no module later.
                    metadata.setdefault((kind, value.name), dict(node.metadata_props))
    return metadata


def _restore_metadata(model: ir.Model, before: Mapping[tuple[str, str], Mapping[str, str]]) -> None:
    """Remove the metadata that the passes added. A node that a pass wrote inherits the metadata of the node that it
    replaces.
    """
    for initializer in model.graph.initializers.values():
        initializer.metadata_props.pop(FOLDED_FROM_KEY, None)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for output in node.outputs:
            output.metadata_props.pop(FOLDED_FROM_KEY, None)
        if not node.metadata_props:
            places = [("made", str(o.name)) for o in node.outputs] + [
                ("read", str(i.name)) for i in node.inputs[:1] if i is not None
            ]
            node.metadata_props.update(next((before[place] for place in places if place in before), {}))
