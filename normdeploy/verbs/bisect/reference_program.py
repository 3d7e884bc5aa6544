"""List the operators of a reference and their inputs. The reference is a PyTorch graph or an ONNX file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import onnx
import torch

from ...graphs.proto_queries import module_path as module_of
from ...model import LoadedModel
from ...runtimes.float64_evaluator import Float64Evaluator, inferred_dtypes, inline_functions
from ...types import Array
from ..verify.reference_models import FileModel, Original
from .folded_norms import FoldedTensor, fold_parameters


class ReferenceProgram(ABC):
    """Operators of a reference, by name.

    Attributes:
        order: operator -> its position in the program.
    """

    order: dict[str, int]

    @abstractmethod
    def inputs_of(self, name: str) -> list[str]:
        """List the operators that ``name`` reads, except operators without inputs, such as constants.

        Returns:
            Names of operators.
        """

    @abstractmethod
    def tensor_operators(self, names: Iterable[str]) -> list[str]:
        """Select the operators whose result is one tensor.

        Returns:
            Names of operators.
        """

    @abstractmethod
    def module_of(self, name: str) -> str:
        """Find the module that an operator comes from.

        Returns:
            Its qualified path, "" if unknown.
        """

    @abstractmethod
    def operator_kind(self, name: str) -> str:
        """Describe the kind of an operator.

        Returns:
            For example "aten.layer_norm", or op and name of an ONNX node.
        """

    def describe_operator(self, name: str, module: str) -> str:
        """Describe an operator for a message.

        Returns:
            Its kind, and its module if known.
        """
        if module:
            return f"{self.operator_kind(name)} of {module}"
        return self.operator_kind(name)

    @abstractmethod
    def parameters_of(self, names: Iterable[str]) -> dict[str, Array]:
        """Collect the floating constants that the operators read.

        Returns:
            Name -> array in float64.
        """

    @abstractmethod
    def folded_parameters(self, names: Iterable[str]) -> dict[str, FoldedTensor]:
        """Fold the BatchNorms among the operators' parameters into the other parameters.

        Returns:
            Names of the parameter and the BatchNorm -> folded tensor.
        """

    @abstractmethod
    def scalars_of(self, names: Iterable[str]) -> list[float]:
        """Collect the single floating numbers that the operators read, such as epsilons.

        Returns:
            Distinct numbers.
        """

    @abstractmethod
    def output_operator(self, output: str) -> str:
        """Find the operator that computes an output.

        Returns:
            The operator's name.
        """

    def fixed_ancestors(self, names: Iterable[str]) -> list[str]:
        """List the operators that depend on no input and that ``names`` are computed from.

        Returns:
            Names in the program's order; empty for an ONNX file.
        """
        return []

    def stored_origins(self, name: str) -> list[str]:
        """List the parameters and buffers that an operator is computed from.

        Returns:
            Names of parameters and buffers; empty for an ONNX file.
        """
        return []

    @abstractmethod
    def first_reader_places(self) -> dict[str, int]:
        """Find the first operator that reads each parameter.

        Returns:
            Parameter -> position of the operator.
        """

    def stored_buffers(self) -> dict[str, Array]:
        """Collect the stored tensors that are not parameters.

        Returns:
            Name -> array, floating ones in float64; empty for an ONNX file.
        """
        return {}

    def onnx_nodes(self, names: Iterable[str]) -> list[onnx.NodeProto]:
        """Return the ONNX nodes of operators.

        Returns:
            Nodes; empty for a PyTorch graph.
        """
        return []

    def fixed_integers(self, name: str) -> Array | None:
        """Return the fixed integers that an ONNX node reads as ``name``.

        Returns:
            Integers or bools; None if the tensor is not fixed or has another type.
        """
        return None

    def operators_between(self, end: str, stops: Iterable[str]) -> list[str]:
        """List the operators that compute ``end`` from ``stops``.

        Returns:
            Names in the program's order, with ``end`` and without ``stops``.
        """
        names = set[str]()
        stack = [end]
        known = set(stops)
        while stack:
            name = stack.pop()
            if name not in names and name not in known:
                names.add(name)
                stack += self.inputs_of(name)
        return sorted(names, key=self.order.__getitem__)


def open_program(model: Original) -> ReferenceProgram:
    """Open the operators of a PyTorch model or an ONNX file.

    Returns:
        A program for the kind of the model.
    """
    if isinstance(model, FileModel):
        return FileProgram(model)
    return TorchProgram(model)


class TorchProgram(ReferenceProgram):
    """Operators of a model's PyTorch graph."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._nodes = {n.name: n for n in model.program.graph_module.graph.nodes}
        self._is_tensor = {n for n, node in self._nodes.items() if isinstance(node.meta.get("val"), torch.Tensor)}
        self.order = {name: place for place, name in enumerate(self._nodes)}
        # Operators that depend on inputs or parameters. Other operators, such as those of masks, are computed by the
        # exporter, which stores only the result.
        self._rooted = set[str]()
        for n, node in self._nodes.items():
            rooted = node.op == "placeholder" or any(s.name in self._rooted for s in node.all_input_nodes)
            if rooted and (n in self._is_tensor or self._gives_tensors(n)):
                self._rooted.add(n)

        # Operators that depend on inputs.
        self._fed = set[str]()
        for n, node in self._nodes.items():
            is_input = n in model.program.graph_signature.user_inputs
            if is_input or any(s.name in self._fed for s in node.all_input_nodes if s.name in self._is_tensor):
                self._fed.add(n)

    def fixed_ancestors(self, names: Iterable[str]) -> list[str]:
        is_fixed = (self._with_ancestors(names) & self._is_tensor) - self._fed
        return [name for name in self.order if name in is_fixed and self._nodes[name].op == "call_function"]

    def stored_origins(self, name: str) -> list[str]:
        targets = {s.arg.name: s.target for s in self._model.program.graph_signature.input_specs}
        if name in self._nodes:
            every = self._with_ancestors([name])
        else:
            every = set()
        return [target for source, target in targets.items() if source in every and target]

    def first_reader_places(self) -> dict[str, int]:
        targets = {s.target: s.arg.name for s in self._model.program.graph_signature.input_specs if s.target}
        read = {target: [self.order[user.name] for user in self._nodes[n].users] for target, n in targets.items()}
        return {target: min(places) for target, places in read.items() if places}

    def _with_ancestors(self, names: Iterable[str]) -> set[str]:
        """Return ``names`` and all operators that they are computed from."""
        seen = set[str]()
        stack = list(names)
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack += [s.name for s in self._nodes[name].all_input_nodes]
        return seen

    def stored_buffers(self) -> dict[str, Array]:
        program = self._model.program
        parameters = set(program.graph_signature.parameters)
        state = {**program.constants, **program.state_dict}
        tensors = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and n not in parameters}
        return {n: (t.double() if t.is_floating_point() else t).numpy() for n, t in tensors.items()}

    def inputs_of(self, name: str) -> list[str]:
        sources = self._nodes[name].all_input_nodes
        return [s.name for s in sources if s.op == "call_function" and s.name in self._rooted]

    def _gives_tensors(self, name: str) -> bool:
        value = self._nodes[name].meta.get("val")
        return isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)

    def tensor_operators(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._is_tensor]

    def module_of(self, name: str) -> str:
        if name in self._nodes:
            scopes = list(self._nodes[name].meta.get("nn_module_stack", {}).values())
        else:
            scopes = []
        if scopes:
            return str(scopes[-1][0])
        return ""

    def operator_kind(self, name: str) -> str:
        target = self._nodes[name].target
        schema = getattr(target, "_schema", None)
        if schema is not None:
            return str(schema.name).replace("::", ".")
        return getattr(target, "__name__", str(target))

    def parameters_of(self, names: Iterable[str]) -> dict[str, Array]:
        program = self._model.program
        targets = {s.arg.name: s.target for s in program.graph_signature.input_specs if getattr(s, "target", None)}
        state = {**program.constants, **program.state_dict}
        sources = (s.name for name in self._with_producers(names) for s in self._nodes[name].all_input_nodes)
        read = {targets[name] for name in sources if name in targets}
        tensors = {name: state[name] for name in sorted(read) if isinstance(state.get(name), torch.Tensor)}
        return {name: t.detach().double().numpy() for name, t in tensors.items() if t.is_floating_point()}

    def folded_parameters(self, names: Iterable[str]) -> dict[str, FoldedTensor]:
        return fold_parameters(self._model, self.parameters_of(names))

    def scalars_of(self, names: Iterable[str]) -> list[float]:
        nodes = [self._nodes[name] for name in self._with_producers(names)]
        arguments = (a for node in nodes for a in (*node.args, *node.kwargs.values()))
        return list(dict.fromkeys(a for a in arguments if isinstance(a, float)))

    def _with_producers(self, names: Iterable[str]) -> list[str]:
        """Return ``names``. For a name that selects one of several results of an operator, also return this
        operator.
        """
        names = list(names)
        return list(dict.fromkeys([*names, *(s for n in names for s in self.inputs_of(n) if s not in self._is_tensor)]))

    def output_operator(self, output: str) -> str:
        specs = [
            s.arg
            for s in self._model.program.graph_signature.output_specs
            if s.kind.name == "USER_OUTPUT" and hasattr(s.arg, "name")
        ]
        return str(dict(zip(self._model.outputs, specs, strict=False))[output].name)


class FileProgram(ReferenceProgram):
    """Operators of a reference ONNX file: its nodes, each named by a tensor that the node writes."""

    def __init__(self, model: FileModel) -> None:
        self._model = model
        proto = inline_functions(model.proto)
        self._exact = Float64Evaluator(proto, inferred_dtypes(proto))
        names = [name for node in self._exact.nodes for name in node.output if name]
        self.order = {name: place for place, name in enumerate(names)}
        sequences = ("Sequence", "SplitToSequence", "Optional")
        self._tensors = {
            name
            for name in names
            if not self._producing_node(name).op_type.startswith(sequences)
            or self._producing_node(name).op_type == "SequenceAt"
        }

    def _producing_node(self, name: str) -> onnx.NodeProto:
        return self._exact.nodes[self._exact.makers[name]]

    def inputs_of(self, name: str) -> list[str]:
        read = self._exact.read_names(self._producing_node(name))
        return [name for name in read if name in self.order and name not in self._exact.constants]

    def tensor_operators(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._tensors]

    def module_of(self, name: str) -> str:
        if name in self.order:
            return module_of(self._producing_node(name))
        return ""

    def operator_kind(self, name: str) -> str:
        node = self._producing_node(name)
        return f"{node.op_type} {node.name}".strip()

    def parameters_of(self, names: Iterable[str]) -> dict[str, Array]:
        return {name: value for name, value in self._constants_of(names).items() if value.size > 1}

    def _constants_of(self, names: Iterable[str]) -> dict[str, Array]:
        read = dict.fromkeys(r for name in names for r in self._exact.read_names(self._producing_node(name)))
        values = {name: self._exact.fixed_value(name, "f") for name in read}
        return {name: value for name, value in values.items() if value is not None}

    def folded_parameters(self, names: Iterable[str]) -> dict[str, FoldedTensor]:
        return fold_parameters(self._model, self.parameters_of(names))

    def scalars_of(self, names: Iterable[str]) -> list[float]:
        names = list(names)
        stated = [
            a.f for name in names for a in self._producing_node(name).attribute if a.type == onnx.AttributeProto.FLOAT
        ]
        stored = [value.item() for value in self._constants_of(names).values() if value.size == 1]
        return list(dict.fromkeys([*map(float, stated), *map(float, stored)]))

    def output_operator(self, output: str) -> str:
        return output

    def first_reader_places(self) -> dict[str, int]:
        places: dict[str, int] = {}
        for name, place in self.order.items():
            for read in self._exact.read_names(self._producing_node(name)):
                places.setdefault(read, place)
        return places

    def onnx_nodes(self, names: Iterable[str]) -> list[onnx.NodeProto]:
        return [self._producing_node(name) for name in names]

    def fixed_integers(self, name: str) -> Array | None:
        return self._exact.fixed_value(name, "iub")
