"""Find the layers of an engine that compute each norm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...engines.layer_info import EngineLayer, LayerTensor, list_float_types
from ...engines.layer_kinds import REFORMAT_PREFIX, LayerKind
from .norm_nodes import NormNodes


class NormForm(StrEnum):
    """Form of a norm in an engine. The values appear in tables."""

    PLUGIN = "plugin"
    NATIVE = "native normalization"
    KERNEL = "one compiled kernel"
    REGION = "compiled region"
    POINTWISE = "one pointwise layer"
    REDUCTION = "one reduction"
    CONVOLUTION = "folded into a convolution"
    MATMUL = "folded into a matrix product"
    OTHER = "one layer"
    SEVERAL = "several layers"
    ABSENT = "in no layer"


_FORMS = {
    LayerKind.PLUGIN: NormForm.PLUGIN,
    LayerKind.NORMALIZATION: NormForm.NATIVE,
    LayerKind.KERNEL: NormForm.KERNEL,
    LayerKind.REGION: NormForm.REGION,
    LayerKind.POINTWISE: NormForm.POINTWISE,
    LayerKind.REDUCTION: NormForm.REDUCTION,
    LayerKind.CONVOLUTION: NormForm.CONVOLUTION,
    LayerKind.MATMUL: NormForm.MATMUL,
}
# Layers of these kinds can't compute a part of a norm.
_NOT_NORMS = (LayerKind.REFORMAT, LayerKind.NONE)


@dataclass(frozen=True, kw_only=True)
class EngineNorm:
    """Norm of the model in an engine.

    Attributes:
        kind: LayerNorm, RMSNorm, ...; "" if the norm was guessed from names.
        module: qualified module path, or the part of the names that its nodes share; "" if unknown.
        tensor: the norm's result in the ONNX file; "" without a file.
        form: how the engine computes the norm.
        layers: indices of the norm's layers.
        layer_types: TensorRT's types of the layers, such as "kgen"; for a plugin, the plugin's name.
        fused_with: ops of the layers that do not belong to the norm, or names of nodes if the ops are unknown.
        shared_with: names of other norms that are computed by one of the layers.
        missing: names of the norm's nodes that are in no layer.
        inputs: floating types of the layers' inputs, without constants.
        outputs: floating types of the layers' outputs.
        layouts: memory layouts of the inputs and outputs.
        ms: mean time of the layers in milliseconds, including all that is fused with the norm; None if unknown.
        share: ``ms`` divided by the time of all layers.
        reformats: indices of the reformats before and after the layers.
        reformat_ms: mean time of the reformats in milliseconds.
    """

    kind: str
    module: str
    tensor: str
    form: NormForm
    layers: tuple[int, ...] = ()
    layer_types: tuple[str, ...] = ()
    fused_with: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    ms: float | None = None
    share: float | None = None
    reformats: tuple[int, ...] = ()
    reformat_ms: float | None = None

    @property
    def name(self) -> str:
        """Return the module path, or the tensor in parentheses if the path is unknown."""
        return self.module or f"({self.tensor})"


class NormPlacer:
    """Find the layers of norms by the names of nodes.

    Args:
        layers: layers of one optimization profile.
        io_tensors: names of the engine's inputs and outputs.
        ops: name of a node -> op type; empty without an ONNX file.
        total_ms: mean time of all layers in milliseconds; None if unknown.
    """

    def __init__(
        self,
        layers: Sequence[EngineLayer],
        io_tensors: Collection[str],
        ops: Mapping[str, str],
        total_ms: float | None,
    ) -> None:
        self._layers = layers
        self._io_tensors = io_tensors
        self._ops = ops
        self._total_ms = total_ms
        self._by_node: defaultdict[str, list[int]] = defaultdict(list)
        # `optimize`, `export` and `build` name a new node by its output and its op: "y_LayerNormalization".
        self._by_prefix: defaultdict[str, list[int]] = defaultdict(list)
        self._readers: defaultdict[str, list[int]] = defaultdict(list)
        self._writers: defaultdict[str, list[int]] = defaultdict(list)
        self._reformat_targets: defaultdict[str, list[int]] = defaultdict(list)
        for index, layer in enumerate(layers):
            if layer.kind not in _NOT_NORMS:
                for name in dict.fromkeys((*layer.nodes, *layer.callers)):
                    self._by_node[name].append(index)
                    self._by_prefix[name.rpartition("_")[0]].append(index)
            for tensor in layer.inputs:
                self._readers[tensor.name].append(index)
            for tensor in layer.outputs:
                self._writers[tensor.name].append(index)
            if found := REFORMAT_PREFIX.match(layer.name):
                self._reformat_targets[layer.name[found.end() :]].append(index)

    def place_norms(self, norms: Sequence[NormNodes]) -> tuple[EngineNorm, ...]:
        """Describe how the engine computes each norm.

        Returns:
            as many norms, in the same order.
        """
        found = [self._layers_of(norm) for norm in norms]
        users: defaultdict[int, list[int]] = defaultdict(list)
        for number, indices in enumerate(found):
            for index in indices:
                users[index].append(number)
        return tuple(
            self._describe(norm, indices, self._norms_beside(number, indices, users, norms))
            for number, (norm, indices) in enumerate(zip(norms, found, strict=True))
        )

    def _layers_of(self, norm: NormNodes) -> tuple[int, ...]:
        """Return the indices of a norm's layers.

        The engine may be built from a file in which the norm has other nodes, so the nodes may have other names. If no
        layer has a name of the norm's nodes, new names that contain the norm's result count, and then the tensors that
        layers write.
        """
        own = {index for name in norm.nodes for index in self._by_node.get(name, ())} | norm.layers
        if not own:
            own = set(self._by_prefix.get(norm.tensor, ()) if norm.tensor else ())
        if not own:
            written = (index for output in norm.outputs for index in self._writers.get(output, ()))
            own = {index for index in written if self._layers[index].kind not in _NOT_NORMS}
        return tuple(sorted(own))

    def _norms_beside(
        self,
        number: int,
        indices: Iterable[int],
        users: Mapping[int, Sequence[int]],
        norms: Sequence[NormNodes],
    ) -> tuple[NormNodes, ...]:
        """Return the other norms that use a norm's layers."""
        others = dict.fromkeys(other for index in indices for other in users[index] if other != number)
        return tuple(norms[other] for other in others)

    def _describe(self, norm: NormNodes, indices: tuple[int, ...], others: Sequence[NormNodes]) -> EngineNorm:
        own = [self._layers[index] for index in indices]
        present = {name for layer in own for name in (*layer.nodes, *layer.callers)}
        reformats = self._reformats_around(indices)
        inputs, outputs = self._outer_tensors(own)
        ms = sum_times(own)
        return EngineNorm(
            kind=norm.kind,
            module=norm.module,
            tensor=norm.tensor,
            form=_form_of(own),
            layers=indices,
            layer_types=tuple(dict.fromkeys(layer.plugin or layer.type or str(layer.kind) for layer in own)),
            fused_with=self._fused_ops(norm, own, others),
            shared_with=tuple(dict.fromkeys(other.module or other.tensor for other in others)),
            missing=tuple(name for name in norm.nodes if name not in present) if own else (),
            inputs=list_float_types(inputs),
            outputs=list_float_types(outputs),
            layouts=tuple(dict.fromkeys(t.layout for t in (*inputs, *outputs) if t.layout)),
            ms=ms,
            share=ms / self._total_ms if ms is not None and self._total_ms else None,
            reformats=reformats,
            reformat_ms=sum_times([self._layers[index] for index in reformats]),
        )

    def _fused_ops(self, norm: NormNodes, own: Sequence[EngineLayer], others: Iterable[NormNodes]) -> tuple[str, ...]:
        """List the ops that the norm's layers compute in addition to norms; names of nodes if the ops are unknown."""
        norms = {*norm.nodes, *(name for other in others for name in other.nodes)}
        foreign = dict.fromkeys(name for layer in own for name in layer.nodes if name not in norms)
        callers = {name for layer in own for name in layer.callers}
        if callers & norms:
            # The norm is a call of a function, and the layer lists the nodes in its body.
            foreign = {name: None for name in foreign if name in self._ops}
        if not self._ops:
            return tuple(foreign)
        # Layers without metadata are named after weights too, and weights are not nodes.
        return tuple(dict.fromkeys(self._ops[name] for name in foreign if name in self._ops))

    def _outer_tensors(self, own: Sequence[EngineLayer]) -> tuple[list[LayerTensor], list[LayerTensor]]:
        """Return the tensors that the layers read from and write to other layers, without constants if possible."""
        written = {t.name for layer in own for t in layer.outputs}
        read = {t.name for layer in own for t in layer.inputs}
        inputs = [t for layer in own for t in layer.inputs if t.name not in written]
        data = [t for t in inputs if t.name in self._writers or t.name in self._io_tensors]
        outputs = [t for layer in own for t in layer.outputs]
        return data or inputs, [t for t in outputs if t.name not in read] or outputs

    def _reformats_around(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the reformats whose output a norm's layer reads, or that read its output."""
        near: set[int] = set()
        for index in indices:
            layer = self._layers[index]
            near.update(self._reformat_targets.get(layer.name, ()))
            for tensor in layer.inputs:
                near.update(self._writers.get(tensor.name, ()))
            for tensor in layer.outputs:
                near.update(self._readers.get(tensor.name, ()))
        return tuple(sorted(index for index in near if self._layers[index].kind is LayerKind.REFORMAT))


def _form_of(own: Sequence[EngineLayer]) -> NormForm:
    if not own:
        return NormForm.ABSENT
    if len(own) > 1:
        return NormForm.SEVERAL
    return _FORMS.get(own[0].kind, NormForm.OTHER)


def sum_times(layers: Iterable[EngineLayer]) -> float | None:
    """Add the times of layers.

    Returns:
        milliseconds; None if no layer has a time.
    """
    times = [layer.ms for layer in layers if layer.ms is not None]
    if not times:
        return None
    return math.fsum(times)
