"""Prepare images inside a traced program, as `normdeploy.graphs.image_nodes` does inside an ONNX graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind, TensorArgument
from torch.export.graph_signature import InputSpec as SignatureSpec

from ..image_input import ImageInput
from ..model import LoadedModel
from ..storage.image_metadata import convert_specs
from .program_signature import user_inputs

_PREFIX = "normdeploy_image"


def with_image_inputs(model: LoadedModel, images: Sequence[ImageInput]) -> LoadedModel:
    """Change image inputs of a model, so that it takes images as ``images`` describes them.

    Args:
        images: images for inputs of ``model``, which are floating-point tensors with the channels on axis 1.

    Returns:
        the model; ``model`` is not changed, and its weights are shared.
    """
    if not images:
        return model
    names = [spec.name for spec in model.inputs]
    tensors = [argument.name for argument in user_inputs(model.program) if isinstance(argument, TensorArgument)]
    placeholders = dict(zip(names, tensors, strict=True))
    return replace(
        model,
        program=_insert_operators(model.program, [(placeholders[image.name], image) for image in images]),
        inputs=convert_specs(model.inputs, images),
        claimed=convert_specs(model.claimed, images),
        images=(*model.images, *images),
        unprepared=model,
    )


def _insert_operators(
    program: torch.export.ExportedProgram, images: Sequence[tuple[str, ImageInput]]
) -> torch.export.ExportedProgram:
    """Insert the operators between placeholders and their readers, in a copy of the program's graph."""
    root = copy.deepcopy(program.graph_module)
    signature = copy.deepcopy(program.graph_signature)
    constants = dict(program.constants)
    graph = root.graph
    # The copy renames nodes such as "input", but the signature refers to nodes by name.
    for own, original in zip(graph.nodes, program.graph_module.graph.nodes, strict=True):
        own.name = original.name
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    last = list(placeholders.values())[-1]
    for name, image in images:
        editor = _ProgramEditor(graph, signature, constants, placeholders[name], last)
        last = editor.insert(image)
    root.recompile()
    return torch.export.ExportedProgram(
        root=root,
        graph=graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        constants=constants,
        verifiers=[program.verifier],
    )


class _ProgramEditor:
    """Insert the operators for one placeholder.

    Attributes:
        last: node after which the next operator is inserted.
    """

    def __init__(
        self, graph: torch.fx.Graph, signature: Any, constants: dict[str, Any], placeholder: torch.fx.Node, last: Any
    ) -> None:
        self._graph = graph
        self._signature = signature
        self._constants = constants
        self._placeholder = placeholder
        self.last = last

    def insert(self, image: ImageInput) -> torch.fx.Node:
        """Insert the operators, and change the placeholder's dtype and shape.

        Returns:
            the last inserted node.
        """
        placeholder = self._placeholder
        model_value = placeholder.meta["val"]
        shape = list(model_value.shape)
        if image.channels_last:
            shape = [shape[0], *shape[2:], shape[1]]
        readers = list(placeholder.users)
        with model_value.fake_mode:
            placeholder.meta["val"] = torch.empty(shape, dtype=getattr(torch, image.dtype))
        placeholder.meta.pop("tensor_meta", None)
        aten = torch.ops.aten
        node = placeholder
        node = self._call(aten.to.dtype, node, model_value.dtype)
        if image.channels_last:
            rank = len(shape)
            node = self._call(aten.permute.default, node, [0, rank - 1, *range(1, rank - 1)])
            node = self._call(aten.contiguous.default, node)
        if image.divisor != 1:
            node = self._call(aten.div.Tensor, node, self._constant("divisor", torch.tensor(image.divisor), node))
        vector = (1, -1, *[1] * (len(shape) - 2))
        if any(image.mean):
            mean = self._constant("mean", torch.tensor(image.mean, dtype=torch.float64).reshape(vector), node)
            node = self._call(aten.sub.Tensor, node, mean)
        if any(number != 1 for number in image.std):
            std = self._constant("std", torch.tensor(image.std, dtype=torch.float64).reshape(vector), node)
            node = self._call(aten.div.Tensor, node, std)
        for reader in readers:
            reader.replace_input_with(placeholder, node)
        for spec in self._signature.output_specs:
            if getattr(spec.arg, "name", None) == placeholder.name:
                spec.arg = TensorArgument(name=node.name)
        return self.last

    def _call(self, operator: Callable[..., Any], *arguments: Any) -> torch.fx.Node:
        """Insert one operator, and compute its fake value."""
        with self._graph.inserting_after(self.last):
            node = self._graph.call_function(operator, arguments)
        values = [each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in arguments]
        with self._placeholder.meta["val"].fake_mode:
            node.meta["val"] = operator(*values)
        self.last = node
        return node

    def _constant(self, what: str, tensor: torch.Tensor, like: torch.fx.Node) -> torch.fx.Node:
        """Add a constant of the program, in the dtype of ``like``."""
        fake = like.meta["val"]
        tensor = tensor.to(fake.dtype)
        target = f"{_PREFIX}_{what}_{self._placeholder.name}"
        self._constants[target] = tensor
        first = next(iter(self._graph.nodes))
        with self._graph.inserting_before(first):
            node = self._graph.placeholder(f"c_{target}")
        node.meta["val"] = fake.fake_mode.from_tensor(tensor, static_shapes=True)
        self._signature.input_specs.insert(
            0, SignatureSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), target, None)
        )
        return node
