"""List the nodes of each norm by the names that TensorRT's ONNX parser gives them.

With an ONNX file, the norms are recognized in the file. Without one, they are guessed from the names of nodes and
kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ...engines.layer_info import EngineLayer
from ...engines.layer_kinds import LayerKind
from ...findings.records import Finding
from ...recognition.lookalikes import find_lookalikes
from ...rewriting import norm_optimizer
from ...storage.node_order import with_sorted_nodes
from ...storage.onnx_files import load_onnx
from ...storage.proto_traversal import iter_bodies
from ...storage.weight_serialization import share_large_weights
from ...types import PathLike, Progress

# Part of a name that belongs to a norm: "norm1", "layer_norm", "LayerNormalization", "input_layernorm", "ln_2", "bn1"
_NORM_WORD = re.compile(r"norm(?!al(?!iz))|(?:^|[._])(?:ln|bn|gn)(?:_?(?:\d+|f|pre|post))?(?=$|[._])", re.IGNORECASE)
# Longer names are not searched.
_LONGEST = 1000
# Ops that TensorRT's parser turns into constants, not into layers
_NO_LAYER = ("Constant",)


@dataclass(frozen=True, kw_only=True)
class NormNodes:
    """Nodes of one norm.

    Attributes:
        kind: LayerNorm, RMSNorm, ...; "" if it is unknown.
        module: qualified module path, or the part of the names that all nodes share; "" if unknown.
        tensor: the norm's result in the ONNX file; "" without a file.
        nodes: names of the nodes, as TensorRT's parser gives them.
        outputs: tensors that the nodes write.
        layers: indices of layers that belong to the norm although no name of a node says so.
    """

    kind: str
    module: str
    tensor: str
    nodes: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class OnnxNorms:
    """Norms and nodes of an ONNX file.

    Attributes:
        norms: the norms, in the graph's order.
        ops: name of each node -> op type.
        outputs: name of each node -> names of its outputs. The name is "node_of_" and the first output if the file has
            none.
    """

    norms: tuple[NormNodes, ...]
    ops: Mapping[str, str]
    outputs: Mapping[str, tuple[str, ...]]


def name_node(node: onnx.NodeProto) -> str:
    """Name a node as TensorRT's ONNX parser does: a node without a name gets the name of its first output.

    Returns:
        the name; "" for a node without a name and outputs.
    """
    if node.name or not node.output:
        return node.name
    return f"node_of_{node.output[0]}"


def read_onnx_norms(path: PathLike, progress: Progress | None = None) -> OnnxNorms:
    """Recognize the norms of an ONNX file.

    Returns:
        the norms with the names of their nodes.

    Raises:
        GraphError: the file is missing or broken.
    """
    proto, weights = share_large_weights(with_sorted_nodes(load_onnx(path)))
    _, summary = norm_optimizer.optimize_norms(proto, progress=progress, census=True, weights=weights)
    findings = [*summary.findings, *find_lookalikes(proto, summary.findings)]
    named = {name_node(node): node for node in _iter_nodes(proto)}
    by_output = {output: name for name, node in named.items() for output in node.output if output}
    norms = tuple(_nodes_of_finding(finding, by_output, named) for finding in findings)
    ops = {name: node.op_type for name, node in named.items()}
    outputs = {name: tuple(filter(None, node.output)) for name, node in named.items()}
    return OnnxNorms(norms, ops, outputs)


def _iter_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes. Nodes of the main graph come last, so that they win if a body has the same name."""
    for body in iter_bodies(proto):
        yield from body.node
    yield from proto.graph.node


def _nodes_of_finding(finding: Finding, by_output: Mapping[str, str], named: Mapping[str, onnx.NodeProto]) -> NormNodes:
    outputs = finding.tensors or (finding.tensor,)
    names = dict.fromkeys(by_output[output] for output in outputs if output in by_output)
    return NormNodes(
        kind=finding.kind,
        module=finding.module,
        tensor=finding.tensor,
        nodes=tuple(name for name in names if named[name].op_type not in _NO_LAYER),
        outputs=tuple(dict.fromkeys((*outputs, finding.tensor))),
    )


def guess_norms(layers: Sequence[EngineLayer]) -> tuple[NormNodes, ...]:
    """Guess the norms of an engine from the names of nodes, plugins and kernels.

    Returns:
        the norms, in the order of their first layers. Nodes whose names share a path with a norm's name in it, such as
        "/encoder/norm1", count as one norm.
    """
    groups: dict[str, _Group] = {}
    for index, layer in enumerate(layers):
        if layer.kind in (LayerKind.REFORMAT, LayerKind.NONE):
            continue
        keyed = [(key, name) for name in (*layer.callers, *layer.nodes) if (key := norm_path(name))]
        for key, name in keyed:
            groups.setdefault(key, _Group([], set())).nodes.append(name)
        if not keyed and _is_norm_layer(layer):
            group = groups.setdefault(layer.name, _Group([], set()))
            group.layers.add(index)
            # The names do not tell which of the nodes belong to the norm.
            group.nodes.extend(layer.nodes)
    return tuple(
        NormNodes(
            kind="", module=key, tensor="", nodes=tuple(dict.fromkeys(group.nodes)), layers=frozenset(group.layers)
        )
        for key, group in groups.items()
    )


@dataclass(frozen=True)
class _Group:
    nodes: list[str]
    layers: set[int]


def norm_path(name: str) -> str:
    """Return the part of a node's name that belongs to a norm.

    Returns:
        the name up to the last segment that sounds like a norm, such as "/encoder/norm1" for "/encoder/norm1/Sqrt"; ""
        if none does.
    """
    if len(name) > _LONGEST:
        return ""
    segments = name.split("/")
    for end in range(len(segments), 0, -1):
        if _NORM_WORD.search(segments[end - 1]):
            return "/".join(segments[:end])
    return ""


def _is_norm_layer(layer: EngineLayer) -> bool:
    """Check if a layer whose nodes' names tell nothing computes a norm."""
    if layer.kind is LayerKind.NORMALIZATION:
        return True
    if layer.kind is LayerKind.PLUGIN:
        return bool(norm_path(layer.plugin) or norm_path(layer.name))
    return layer.kind is LayerKind.KERNEL and sounds_like_norm_kernel(layer.name)


def sounds_like_norm_kernel(name: str) -> bool:
    """Check if a kernel of the compiler Myelin computes a mean and then a root.

    Myelin names a kernel by its operations, for example "__myl_MeanSubMulMeanAddSqrtDivMulAdd".
    """
    _, mean, rest = name.partition("Mean")
    return bool(mean) and ("Sqrt" in rest or "Rsq" in rest)
