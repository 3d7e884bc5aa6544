"""List the tensors of a PyTorch or ONNX model, and the biases that result from folding its BatchNorms.

``weight_audit`` compares weights with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import torch

from ...inputs.array_conversion import to_numpy
from ...loading.train_mode_checks import bind_node_arguments, operator_name
from ...model import LoadedModel
from ...precision.type_conversion import initializer_values
from ...storage.proto_traversal import attribute_graphs, attribute_value
from ...types import Array, Arrays
from .bias_shifts import BatchNormShifts, BiasShift, FixedShift, Shifts
from .reference_models import FileModel, Original


def model_tensors_by_name(model: Original) -> dict[str, Array]:
    """List the non-empty floating-point parameters, buffers and constants of a model.

    Returns:
        name -> array.
    """
    if isinstance(model, FileModel):
        every = [(t.name, initializer_values(t)) for t in iter_initializers(model.proto.graph)]
        every += [
            (n.output[0], initializer_values(a.t))
            for n in model.proto.graph.node
            if n.op_type == "Constant"
            for a in n.attribute
            if a.name == "value" and a.t.data_type != onnx.TensorProto.STRING
        ]
        return {name: value for name, value in every if value.size and value.dtype.kind not in "iubSOc"}
    program = model.program
    state = {**program.constants, **program.state_dict}
    return {
        name: to_numpy(value.detach().contiguous())
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
    }


def iter_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """List the initializers of a graph and its bodies, except those of strings, which may not be valid text.

    Yields:
        the initializers.
    """
    yield from (tensor for tensor in graph.initializer if tensor.data_type != onnx.TensorProto.STRING)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in attribute_graphs(attribute):
                yield from iter_initializers(inner)


@dataclass(frozen=True)
class BatchNorm:
    """Names of the tensors of a BatchNorm; None for a tensor that the BatchNorm does not have."""

    owner: str
    epsilon: float
    weight: str | None
    bias: str | None
    mean: str | None
    variance: str | None

    def read_vectors(self, stored: Arrays) -> NormVectors | None:
        """Read the BatchNorm's numbers from ``stored``.

        Returns:
            float64 vectors [C]; None if the variance is not stored. A missing weight counts as 1, a missing bias or
            mean as 0.
        """
        variance = stored.get(self.variance or "")
        if variance is None:
            return None
        channels = variance.size

        def channel_vector(name: str | None, default: float) -> Array:
            own = stored.get(name or "")
            if own is None:
                return np.full(channels, default)
            return own.astype(np.float64).reshape(-1)

        gamma = channel_vector(self.weight, 1.0)
        variance = variance.astype(np.float64).reshape(-1)
        return NormVectors(
            variance=variance,
            gamma=gamma,
            scale=gamma / np.sqrt(variance + self.epsilon),
            mean=channel_vector(self.mean, 0.0),
            shift=channel_vector(self.bias, 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class NormVectors:
    """Vectors [C] of a BatchNorm, which computes (x - mean) * scale + shift in each channel.

    Attributes:
        scale: gamma / sqrt(variance + epsilon).
    """

    variance: Array
    gamma: Array
    scale: Array
    mean: Array
    shift: Array


def iter_batch_norms(model: Original) -> Iterator[BatchNorm]:
    """List the BatchNorms of a model with stored statistics.

    Yields:
        the names of each BatchNorm's tensors.
    """
    yield from _batch_norms_of_file(model) if isinstance(model, FileModel) else _batch_norms_of_program(model)


def iter_bias_shifts(model: Original, stored: Arrays) -> Iterator[Shifts]:
    """Compute every bias with each BatchNorm of its width folded in, with scale = weight / sqrt(var + eps).

    Yields:
        for each BatchNorm, the shifted biases and then the scale.
    """
    biases: dict[int, dict[str, Array]] = {}
    stacked: dict[int, Array] = {}
    for norm in iter_batch_norms(model):
        vectors = norm.read_vectors(stored)
        if vectors is None:
            continue
        scale = vectors.scale
        if scale.size not in biases:
            # Paddle adds a bias of shape (1, C, 1, 1) in a separate node.
            fitting = {n: v.reshape(-1) for n, v in stored.items() if v.size == scale.size == max(v.shape, default=1)}
            biases[scale.size] = {"no bias": np.zeros(scale.size)} | fitting
            stacked[scale.size] = np.stack([v.astype(np.float64) for v in biases[scale.size].values()])
        yield BatchNormShifts(
            sources=[f"{bias} by the BatchNorm {norm.owner}" for bias in biases[scale.size]],
            biases=stacked[scale.size],
            mean=vectors.mean,
            scale=scale,
            shift=vectors.shift,
        )
        yield FixedShift(BiasShift(f"the BatchNorm {norm.owner}", scale, np.abs(scale)))


def fold_batch_norms(model: Original, stored: Arrays) -> dict[str, Array]:
    """Fold each BatchNorm into every weight with as many output channels as the BatchNorm.

    Returns:
        "parameter by BatchNorm" -> folded weight.
    """
    scales = [(s.shift.source, s.shift.values) for s in iter_bias_shifts(model, stored) if isinstance(s, FixedShift)]
    return {
        f"{parameter} by {name}": weight * scale.reshape(-1, *(1,) * (weight.ndim - 1))
        for name, scale in scales
        for parameter, weight in stored.items()
        if weight.ndim > 1 and len(weight) == scale.size
    }


def _batch_norms_of_program(model: LoadedModel) -> Iterator[BatchNorm]:
    signature = model.program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in model.program.graph.nodes:
        if node.op != "call_function" or "batch_norm" not in operator_name(node):
            continue
        given = bind_node_arguments(node)
        by_name = {
            key: names.get(getattr(given.get(key), "name", ""))
            for key in ("weight", "bias", "running_mean", "running_var")
        }
        if "eps" in given and by_name["running_var"] is not None:
            owner = by_name["running_var"].rpartition(".")[0]
            yield BatchNorm(
                owner,
                float(given["eps"]),
                by_name["weight"],
                by_name["bias"],
                by_name["running_mean"],
                by_name["running_var"],
            )


def _batch_norms_of_file(model: FileModel) -> Iterator[BatchNorm]:
    for node in model.proto.graph.node:
        if node.op_type == "BatchNormalization" and len(node.input) == 5:
            epsilon = attribute_value(node, "epsilon", float(np.float32(1e-5)))
            yield BatchNorm(node.name or node.output[0], epsilon, *node.input[1:5])
