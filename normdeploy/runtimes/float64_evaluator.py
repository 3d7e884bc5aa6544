"""Evaluate any part of a file's nodes in float64, with replacements for nodes and inputs.

``bisect`` runs its trials with this evaluator. ``verify`` uses it if the reference is an ONNX file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from ..errors import GraphError, InputError, RuntimeUnavailable
from ..evaluate import evaluator
from ..graphs.file_graph import widen_to_float64
from ..graphs.proto_queries import called_functions, captured_names
from ..graphs.shape_inference import infer_types
from ..norms.third_party import is_managed_op
from ..precision.emulated_half import widen_node
from ..precision.preparation import file_opset
from ..precision.type_conversion import FORMATS, initializer_values
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import copy_model, function_key, functions_by_key, iter_bodies
from ..types import Array, Arrays
from . import RunResult, control_flow, sequence_ops
from .data_independent import DataIndependent, find_data_independent, is_index_or_scalar, is_integer_type
from .ort_runner import OrtRunner

_OF_SHAPES = ("Shape", "Size")
# Errors that numpy and Python raise if operands do not fit an op, for example integers instead of floats, or fractions
# as axes.
_UNFIT = (
    *(ArithmeticError, LookupError, ValueError, TypeError, AssertionError, AttributeError, MemoryError),
    StopIteration,
)


class NotEvaluated(Exception):
    """Raised if a node can be computed neither in float64 nor by onnxruntime."""


@dataclass(frozen=True)
class NodeChange:
    """Replacements for an evaluation.

    Attributes:
        nodes: position -> node to compute instead of the node at this position.
        inputs: (position of the node, index of its input) -> function applied to that input.
        given: values of tensors that the file does not have.
    """

    nodes: Mapping[int, onnx.NodeProto] = field(default_factory=dict)
    inputs: Mapping[tuple[int, int], Callable[[Array], Array]] = field(default_factory=dict)
    given: Arrays = field(default_factory=dict)


def inline_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Inline the functions of ``proto``, except the functions of normdeploy's own ops, which the evaluator computes
    directly.

    Returns:
        An inlined copy, or ``proto`` itself if there is nothing to inline.
    """
    foreign = [(f.domain, f.name) for f in proto.functions if not is_managed_op(f.domain, f.name)]
    if foreign:
        return onnx.inliner.inline_selected_functions(_fill_function_defaults(proto), foreign)
    return proto


def _fill_function_defaults(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Write the default values of functions' attributes into their calls. onnx's inliner leaves the defaults out."""
    defaults = {key: f.attribute_proto for key, f in functions_by_key(proto).items()}
    if not any(defaults.values()):
        return proto
    filled = copy_model(proto)
    for body in iter_bodies(filled):
        for node in body.node:
            held = {a.name for a in node.attribute}
            missing = defaults.get(function_key(node), ())
            node.attribute.extend(a for a in missing if a.name not in held)
    return filled


def tensor_values(known: Mapping[str, Any]) -> dict[str, Array]:
    """Select the values that are tensors. Sequences, which are lists here, are left out.

    Returns:
        Name -> array.
    """
    return {name: value for name, value in known.items() if not isinstance(value, list)}


def inferred_dtypes(proto: onnx.ModelProto) -> dict[str, np.dtype]:
    """Infer the dtypes of the graph's tensors.

    Returns:
        Name -> numpy dtype, for each tensor whose type ONNX's inference finds.
    """
    return {
        name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        for name, (kind, _) in infer_types(proto).items()
        if kind
    }


class Float64Evaluator:
    """Evaluator of the main graph of ``proto``. Nodes are identified by their positions in the graph.

    Args:
        types: tensor name -> dtype in the file, for nodes that only onnxruntime can run.
    """

    def __init__(self, proto: onnx.ModelProto, types: Mapping[str, np.dtype]) -> None:
        self.proto = proto
        self.types = types
        self.nodes = list(proto.graph.node)
        self.makers = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self.weights = {t.name: t for t in proto.graph.initializer}
        self.inputs = {v.name for v in proto.graph.input} - set(self.weights)
        # Tensors whose values the file alone determines.
        self.constants = set(self.weights)
        # Constants, and tensors computed from shapes and constants alone.
        self.sizes = set(self.weights)
        for node in self.nodes:
            read = self.read_names(node)
            if all(name in self.constants for name in read):
                self.constants.update(node.output)
            if node.op_type in _OF_SHAPES or all(name in self.sizes for name in read):
                self.sizes.update(node.output)
        self.settled = self._find_data_independent()
        self._wide: dict[str, Array] = {}
        self._bodies: dict[tuple[str, str], Float64Evaluator] = {}
        # First output -> node, for nodes that ran in onnxruntime in the file's own types because they can't be computed
        # in float64.
        self.narrow: dict[str, onnx.NodeProto] = {}
        # Nodes for which onnxruntime also has no float64 kernel, by the name of their first output.
        self._without_kernel: set[str] = set()

    def _find_data_independent(self) -> DataIndependent[int]:
        nodes = dict(enumerate(self.nodes))
        reads = {place: self.read_names(node) for place, node in nodes.items()}
        given = {name for name in self.inputs if name in self.types and is_integer_type(self.types[name])}
        given |= {name for name, tensor in self.weights.items() if is_index_or_scalar(tensor)}
        return find_data_independent(nodes, reads, self.types, given)

    def apply_stated_types(self, place: int, inputs: Sequence[Any], stated: dict[str, Array]) -> Sequence[Any]:
        """Round the operands of a node to the file's types, if the node turns settled floats into integers.

        Settled floats and integers are defined in `data_independent`. A node that computes settled floats is also
        evaluated in the file's types.

        Args:
            inputs: the operands in float64.
            stated: name -> settled float that was already computed and rounded to its type. If the node computes
                settled floats, its outputs are added here.

        Returns:
            The rounded operands for a node that turns settled floats into integers; ``inputs`` for any other node.
        """
        if place not in self.settled.integers | self.settled.floats:
            return inputs
        node = self.nodes[place]
        operands = [
            stated[name]
            if name in stated
            else value
            if value is None
            else widen_to_float64(self.round_to_file_type(name, np.asarray(value)))
            for name, value in zip(node.input, inputs, strict=True)
        ]
        if place in self.settled.integers:
            return operands
        for name, value in zip(node.output, self.evaluate_node(node, operands, stated), strict=False):
            if name and value is not None:
                stated[name] = widen_to_float64(self.round_to_file_type(name, value))
        return inputs

    def read_names(self, node: onnx.NodeProto) -> list[str]:
        """List the tensors of the main graph that a node reads, including tensors that its bodies read.

        Returns:
            Names without repetition.
        """
        outer = self.makers.keys() | self.weights.keys() | self.inputs if node.attribute else ()
        return list(
            dict.fromkeys([*filter(None, node.input), *sorted(name for name in captured_names(node) if name in outer)])
        )

    def nodes_between(self, ends: Iterable[str], stops: Collection[str] = ()) -> list[int]:
        """Find the nodes that compute ``ends`` from ``stops``.

        Returns:
            Positions of the nodes, in order.
        """
        nodes: set[int] = set()
        stack = list(ends)
        while stack:
            name = stack.pop()
            place = self.makers.get(name)
            if place is not None and place not in nodes and name not in stops:
                nodes.add(place)
                stack += self.read_names(self.nodes[place])
        return sorted(nodes)

    def evaluate_nodes(
        self, places: Sequence[int], known: Arrays, change: NodeChange | None = None
    ) -> dict[str, Array]:
        """Compute the outputs of the nodes at ``places``.

        Args:
            known: name -> value, for tensors that are already computed.
            change: replacements for nodes and inputs.

        Returns:
            Name -> float64 array (integers keep their type), including ``known`` and given values.

        Raises:
            NotEvaluated: a node or a tensor that it reads can't be computed.
        """
        change = change or NodeChange()
        results = {**known, **change.given}
        stated: dict[str, Array] = {}
        with evaluator.silence_numpy():
            for place in places:
                node = change.nodes.get(place, self.nodes[place])
                if all(name in results for name in node.output if name):
                    continue
                inputs = [self.tensor_value(name, results) if name else None for name in node.input]
                if node is self.nodes[place]:
                    inputs = list(self.apply_stated_types(place, inputs, stated))
                for (where, i), function in change.inputs.items():
                    if where == place:
                        inputs[i] = function(np.asarray(inputs[i]))
                for name, value in zip(node.output, self.evaluate_node(node, inputs, results), strict=False):
                    if name and name not in known and value is not None:
                        results[name] = value
        return results

    def tensor_value(self, name: str, known: Arrays) -> Array:
        """Get a tensor's value from ``known``, the weights, or the constant nodes.

        Returns:
            The array, floats in float64.

        Raises:
            NotEvaluated: the tensor is not constant and not in ``known``.
        """
        if name in known:
            return known[name]
        if name not in self._wide:
            if name in self.weights:
                self._wide[name] = widen_to_float64(initializer_values(self.weights[name]))
            elif name in self.constants:
                self._wide |= self.evaluate_nodes(self.nodes_between([name], self._wide), self._wide)
            else:
                raise NotEvaluated(f"the value of {name!r} is unknown")
        return self._wide[name]

    def fixed_value(self, name: str, kinds: str) -> Array | None:
        """Compute a constant.

        Args:
            kinds: allowed kinds of dtype, as numpy names them: "f" or "iub".

        Returns:
            The array, floats in float64. None if the tensor is not constant, can't be computed, or has another kind.
        """
        if not name or name not in self.constants:
            return None
        try:
            value = self.tensor_value(name, {})
        except NotEvaluated:
            return None
        if isinstance(value, list) or np.asarray(value).dtype.kind not in kinds:
            return None
        return np.asarray(value)

    def evaluate_node(self, node: onnx.NodeProto, inputs: Sequence[Any], known: Arrays) -> Sequence[Any]:
        """Compute one node.

        Returns:
            Its outputs: arrays (floats in float64), lists of arrays for sequences, None for an omitted output.

        Raises:
            NotEvaluated: the node can't be computed.
        """
        if node.op_type in control_flow.OPS and is_standard(node):
            return self._run_bodies(node, inputs, known)
        try:
            if node.op_type == "CastLike":
                kind = widen_to_float64(self.round_to_file_type(node.input[1], np.asarray(inputs[1]))).dtype
                return (np.asarray(inputs[0]).astype(kind),)
            attrs = {a.name: _attribute_array(onnx.helper.get_attribute_value(a)) for a in node.attribute}
            if node.op_type in sequence_ops.OPS and is_standard(node):
                return (sequence_ops.OPS[node.op_type](inputs, attrs),)
            if node.domain == "ai.onnx":
                domain = ""
            else:
                domain = node.domain
            return evaluator.evaluate_node(
                node.op_type, inputs, attrs, opset=file_opset(self.proto), domain=domain, outputs=len(node.output)
            )
        except evaluator.UnsupportedOp:
            return self._run_in_runtime(node, inputs, known)
        except _UNFIT as error:
            try:
                # The evaluator refuses cases that ONNX leaves undefined, such as an axis that is named twice.
                # onnxruntime may compute them.
                return self._run_in_runtime(node, inputs, known)
            except NotEvaluated:
                pass
            raise NotEvaluated(f"{node.op_type} {node.name!r}: {type(error).__name__}: {error}") from error

    def _run_bodies(self, node: onnx.NodeProto, inputs: Sequence[Any], known: Arrays) -> Sequence[Array | None]:
        """Run control flow with its bodies in float64. A form that `control_flow` does not implement runs in
        onnxruntime.
        """

        # The bodies of a replacement node differ from those of the file's node. Each body's evaluator is made once for
        # all iterations.
        bodies: dict[str, Float64Evaluator] = {}
        around: dict[str, list[str]] = {}

        def run_body(name: str, given: Sequence[Any]) -> list[Any]:
            graph = control_flow.body_graph(node, name)
            if name not in bodies:
                bodies[name] = self._body_evaluator(node, name)
                around[name] = control_flow.names_captured_by(node, name)
            body = bodies[name]
            feeds = dict(zip((v.name for v in graph.input), map(sequence_ops.as_array_or_sequence, given), strict=True))
            feeds |= {seen: self.tensor_value(seen, known) for seen in around[name]}
            made = body.evaluate_nodes(range(len(body.nodes)), feeds)
            return [body.tensor_value(v.name, made) for v in graph.output]

        try:
            opset = file_opset(self.proto)
            if self._is_file_node(node):
                return control_flow.run_control_flow(node, inputs, opset, run_body)
            return control_flow.run_control_flow(node, inputs, opset, run_body, control_flow.MOST_TRIED)
        except control_flow.TooManyIterations as error:
            if self._is_file_node(node):
                return self._run_in_runtime(node, inputs, known)
            raise NotEvaluated(str(error)) from error
        except (evaluator.UnsupportedOp, NotEvaluated):
            return self._run_in_runtime(node, inputs, known)

    def _body_evaluator(self, node: onnx.NodeProto, name: str) -> Float64Evaluator:
        """Return the evaluator of a body. It is cached for a node of the file and made anew for a replacement."""
        first = next(filter(None, node.output))
        if not self._is_file_node(node):
            return self._make_body_evaluator(node, name)
        if (first, name) not in self._bodies:
            self._bodies[first, name] = self._make_body_evaluator(node, name)
        return self._bodies[first, name]

    def _is_file_node(self, node: onnx.NodeProto) -> bool:
        """Return whether a node belongs to the file and is not a replacement."""
        return node is self.nodes[self.makers[next(filter(None, node.output))]]

    def _make_body_evaluator(self, node: onnx.NodeProto, name: str) -> Float64Evaluator:
        model = control_flow.body_model(node, name, self.proto, self.types)
        return type(self)(model, inferred_dtypes(model))

    def _run_in_runtime(
        self, node: onnx.NodeProto, inputs: Sequence[Array | None], known: Arrays
    ) -> list[Array | None]:
        given = {name: value for name, value in zip(node.input, inputs, strict=True) if name and value is not None}
        given |= {name: self.tensor_value(name, known) for name in self.read_names(node) if name not in given}
        if any(isinstance(value, list) for value in given.values()):
            raise NotEvaluated(f"{node.op_type} {node.name!r} reads a sequence, and has no float64 implementation")
        ran = self._run_float64_kernel(node, given)
        if ran is None:
            feeds = {name: self.round_to_file_type(name, value) for name, value in given.items()}
            self.narrow[next(filter(None, node.output))] = node
            model = extract_nodes(self, [node], [name for name in node.output if name], feeds)
            if any(self.types.get(name, value.dtype) != value.dtype for name, value in feeds.items()):
                # The node's inputs do not have the file's types, so its outputs may not have them either.
                for output in model.graph.output:
                    output.ClearField("type")
            try:
                ran = self._run_single_node(model, feeds)
            except RuntimeError as error:
                # onnxruntime's Python binding rejects a sequence with its own RuntimeError.
                raise NotEvaluated(
                    f"{node.op_type} {node.name!r} returns a sequence, and has no float64 implementation"
                ) from error
            except (GraphError, InputError, RuntimeUnavailable) as error:
                raise NotEvaluated(
                    f"{node.op_type} {node.name!r} has no float64 implementation, and can't run alone: {error}"
                ) from error
        return [
            (ran[name] if ran[name].dtype == object else widen_to_float64(ran[name])) if name else None
            for name in node.output
        ]

    def _run_float64_kernel(self, node: onnx.NodeProto, given: Arrays) -> RunResult | None:
        """Run one node in onnxruntime's own float64 kernel.

        Returns:
            Output name -> array, or None if onnxruntime has no such kernel for the op.
        """
        first = next(filter(None, node.output))
        if first in self._without_kernel or not is_standard(node) or any(a.HasField("g") for a in node.attribute):
            return None
        model = extract_nodes(self, [node], [name for name in node.output if name], given)
        for output in model.graph.output:
            output.ClearField("type")
        try:
            return self._run_single_node(model, given)
        except (GraphError, InputError, RuntimeUnavailable, RuntimeError):
            self._without_kernel.add(first)
            return None

    def _run_single_node(self, model: onnx.ModelProto, feeds: Arrays) -> RunResult:
        with OrtRunner(model, optimize=False) as runner:
            return runner.infer({name: feeds[name] for name in feeds if name not in self.constants})

    def round_to_file_type(self, name: str, value: Array) -> Array:
        """Convert ``value`` to the dtype that the tensor ``name`` has in the file.

        Returns:
            The converted array; for an unknown tensor, float64 becomes float32.
        """
        with np.errstate(all="ignore"):
            dtype = self.types.get(name, np.dtype(np.float32) if value.dtype == np.float64 else value.dtype)
            return np.asarray(value).astype(dtype)


def _attribute_array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return initializer_values(value)
    return value


def extract_nodes(
    exact: Float64Evaluator, nodes: Sequence[onnx.NodeProto], ends: Sequence[str], given: Arrays
) -> onnx.ModelProto:
    """Build a model from some nodes of a file. The model returns ``ends`` and includes the weights and functions that
    it needs.

    Args:
        nodes: nodes of the file, in order.
        ends: names of the model's outputs.
        given: values of tensors that the nodes read and do not write, in the file's types.

    Returns:
        The model. Constants in ``given`` are initializers; other given tensors are inputs of the given shapes.
    """
    model = onnx.ModelProto(ir_version=exact.proto.ir_version, opset_import=exact.proto.opset_import)
    model.producer_name = "normdeploy bisect"
    graph = model.graph
    graph.name = "cut"
    graph.node.extend(nodes)
    written = {name for node in nodes for name in node.output}
    for name in dict.fromkeys(name for node in nodes for name in exact.read_names(node) if name not in written):
        if name in exact.constants and name in given:
            graph.initializer.append(onnx.numpy_helper.from_array(np.array(given[name], order="C"), name))
        elif name in exact.weights:
            graph.initializer.append(exact.weights[name])
        else:
            graph.input.append(
                onnx.helper.make_tensor_value_info(name, _elem_type(given[name].dtype), given[name].shape)
            )
    for name in ends:
        dtype = exact.types.get(name)
        graph.output.append(
            onnx.ValueInfoProto(name=name)
            if dtype is None
            else onnx.helper.make_tensor_value_info(name, _elem_type(dtype), None)
        )
    model.functions.extend(called_functions(functions_by_key(exact.proto), graph))
    return model


def _elem_type(dtype: np.dtype) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def with_float32_region(
    proto: onnx.ModelProto, places: Collection[int], types: Mapping[str, np.dtype]
) -> onnx.ModelProto:
    """Copy a model so that the nodes at ``places`` compute in float32 instead of half precision, between Casts.

    Values that only these nodes read stay float32. Graph outputs and values that other nodes read keep their types.

    Returns:
        The changed copy.

    Raises:
        GraphError: one of the nodes has a body that contains half precision.
    """
    halves = {form.dtype: form.onnx for form in FORMATS.values()}
    proto = copy_model(proto)
    nodes = list(proto.graph.node)
    outside = {i for p, node in enumerate(nodes) if p not in places for i in (*node.input, *captured_names(node))}
    outside |= {v.name for v in proto.graph.output}
    wide: dict[str, str] = {}
    written: list[onnx.NodeProto] = []
    for place, node in enumerate(nodes):
        if place not in places:
            written.append(node)
            continue
        widen_node(node)
        for i, name in enumerate(node.input):
            if types.get(name) in halves:
                if name not in wide:
                    wide[name] = f"{name}_in_float32"
                    written.append(onnx.helper.make_node("Cast", [name], [wide[name]], to=onnx.TensorProto.FLOAT))
                node.input[i] = wide[name]
        written.append(node)
        for i, name in enumerate(node.output):
            if name and types.get(name) in halves:
                node.output[i] = wide[name] = f"{name}_in_float32"
                if name in outside:
                    written.append(onnx.helper.make_node("Cast", [wide[name]], [name], to=halves[types[name]]))
    del proto.graph.node[:]
    proto.graph.node.extend(written)
    return proto
