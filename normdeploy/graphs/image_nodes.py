"""Prepare images inside an ONNX graph: Cast, Transpose, and (u / divisor − mean) / std for each channel.

The nodes are written as torchvision computes the preparation. The rewrites then fold them into the first layer, with a
proof (`rewriting.affine_folding`). The Cast comes first, because TensorRT takes uint8 only for the input of a Cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx

from ..errors import InputError
from ..image_input import ImageInput
from ..storage.image_metadata import write_image_inputs
from ..storage.proto_traversal import iter_subgraphs, nodes_with_bodies, unique_name

_PREFIX = "normdeploy_image"


def insert_image_nodes(
    proto: onnx.ModelProto, images: Sequence[ImageInput], present: Sequence[ImageInput] = ()
) -> onnx.ModelProto:
    """Change image inputs of a model, so that it takes images as ``images`` describes them.

    Args:
        proto: the model. Its image inputs are floating-point tensors with the channels on axis 1.
        present: other image inputs, which the model already prepares itself.

    Returns:
        a new model, whose metadata describes the images.

    Raises:
        InputError: an image input is also an output, or the model does not state its shape.
    """
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    outputs = {value.name for value in made.graph.output}
    if unchanged := next((image.name for image in images if image.name in outputs), None):
        raise InputError(
            f"the input {unchanged!r} is also an output, so its images can't be changed; remove the output"
        )
    values = {value.name: value for value in made.graph.input}
    if bare := next((i.name for i in images if not values[i.name].type.tensor_type.HasField("shape")), None):
        raise InputError(
            f"the file does not state the shape of the input {bare!r}, so its images can't be changed; write the shape"
            " into the file"
        )
    taken = _tensor_names(made.graph)
    nodes: list[onnx.NodeProto] = []
    for image in images:
        value = values[image.name]
        prepared = unique_name(f"{image.name}_prepared", taken)
        _redirect_readers(made.graph, image.name, prepared)
        nodes += _write_nodes(made.graph, value, image, prepared, taken)
        _declare_image(value, image)
    own = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend([*nodes, *own])
    write_image_inputs(made, (*present, *images))
    return made


def _tensor_names(graph: onnx.GraphProto) -> set[str]:
    nodes = list(nodes_with_bodies(graph.node))
    names = {name for node in nodes for name in (*node.input, *node.output)}
    graphs = [graph, *(body for node in graph.node for body in iter_subgraphs(node))]
    return names | {value.name for each in graphs for value in (*each.input, *each.output, *each.initializer)}


def _redirect_readers(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Let every node that reads ``old`` read ``new``. A body that defines its own ``old`` is left unchanged."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                own = {v.name for v in (*body.input, *body.initializer)} | {o for n in body.node for o in n.output}
                if old not in own:
                    _redirect_readers(body, old, new)
    # A body may return a tensor of the graph around it.
    for value in graph.output:
        if value.name == old:
            value.name = new


def _write_nodes(
    graph: onnx.GraphProto, value: onnx.ValueInfoProto, image: ImageInput, prepared: str, taken: set[str]
) -> Iterable[onnx.NodeProto]:
    """Write the nodes from the images to ``prepared``, and add their constants to the graph."""
    elem_type = value.type.tensor_type.elem_type
    rank = len(value.type.tensor_type.shape.dim)
    steps: list[tuple[str, Sequence[np.ndarray], dict[str, object]]] = []
    if onnx.helper.np_dtype_to_tensor_dtype(np.dtype(image.dtype)) != elem_type:
        steps.append(("Cast", (), {"to": elem_type}))
    if image.channels_last:
        steps.append(("Transpose", (), {"perm": [0, rank - 1, *range(1, rank - 1)]}))
    if image.divisor != 1:
        steps.append(("Div", (np.array(image.divisor),), {}))
    vector = (1, -1, *[1] * (rank - 2))
    if any(image.mean):
        steps.append(("Sub", (np.reshape(image.mean, vector),), {}))
    if any(number != 1 for number in image.std):
        steps.append(("Div", (np.reshape(image.std, vector),), {}))
    if not steps:
        steps.append(("Identity", (), {}))
    source = image.name
    for number, (op, constants, attributes) in enumerate(steps):
        if number == len(steps) - 1:
            target = prepared
        else:
            target = unique_name(f"{_PREFIX}_{op.lower()}", taken)
        names = []
        for constant in constants:
            names.append(unique_name(f"{target}_constant", taken))
            # torchvision's constants have the dtype of the image.
            array = constant.astype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
            graph.initializer.append(onnx.numpy_helper.from_array(array, names[-1]))
        yield onnx.helper.make_node(op, [source, *names], [target], name=f"{target}_node", **attributes)
        source = target


def _declare_image(value: onnx.ValueInfoProto, image: ImageInput) -> None:
    """Change the declared dtype and shape of an input."""
    kind = value.type.tensor_type
    kind.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(image.dtype))
    if image.channels_last:
        dims = list(kind.shape.dim)
        copies = [onnx.TensorShapeProto.Dimension.FromString(d.SerializeToString()) for d in dims]
        del kind.shape.dim[:]
        kind.shape.dim.extend([copies[0], *copies[2:], copies[1]])
