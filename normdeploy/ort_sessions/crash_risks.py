"""Find nodes at which onnxruntime may end its process, without an error that Python could catch.

onnxruntime 1.31 checks divisors for 0 and indices for their range. Other cases are unchecked and end the process:

- SIGFPE: an integer division whose result does not fit its type, an STFT frame without samples, and a count of groups,
  heads or parts that is zero.
- SIGSEGV or SIGABRT: a negative number of batch dims, a sparse constant in a function and, in some ops, a tensor
  without elements.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.shape_inference
from onnx import TensorProto, numpy_helper

from ..errors import escape_line
from ..storage.onnx_domains import is_standard, qualified_op
from ..storage.proto_traversal import attribute_value, iter_subgraphs, nodes_with_bodies

_WIDE = frozenset({TensorProto.INT32, TensorProto.INT64})
# Op -> attributes by which the op's kernel divides. Names of ops outside ONNX's domain contain the domain.
_COUNTS = {
    "Attention": ("q_num_heads", "kv_num_heads"),
    "ConvTranspose": ("group",),
    "com.microsoft.GroupQueryAttention": ("num_heads", "kv_num_heads"),
    "com.microsoft.SparseAttention": ("num_heads", "kv_num_heads"),
}
# A multiple of this number becomes 0 in a kernel, which then divides by 0. Microsoft's ops truncate counts to 32 bits.
# The ops in `_BLOCKS` square their block size in 64 bits and divide by the square.
_CUT = 2**32
_BLOCKS = frozenset({"DepthToSpace", "SpaceToDepth"})
# Ops that end the process if a tensor that they read has no element.
_NEED_ELEMENTS = frozenset(
    {
        "Attention",
        "GRU",
        "InstanceNormalization",
        "LSTM",
        "RoiAlign",
        "STFT",
        "Unique",
        "ai.onnx.ml.FeatureVectorizer",
        "com.microsoft.DynamicQuantizeLSTM",
        "com.microsoft.Inverse",
        "com.microsoft.LinearAttention",
        "com.microsoft.MoE",
        "com.microsoft.MultiHeadAttention",
        "com.microsoft.QAttention",
        "com.microsoft.QMoE",
        "com.microsoft.RotaryEmbedding",
        "com.microsoft.SkipLayerNormalization",
        "com.microsoft.SkipSimplifiedLayerNormalization",
    }
)
# Op -> position of an input -> minimum number of its dims. These ops read a dim's size without checking that the input
# has that dim.
_LEAST_RANKS = {
    "AffineGrid": {1: 1},
    "Attention": {4: 3, 5: 3},
    "ConvInteger": {0: 3, 1: 3},
    "DFT": {0: 1},
    "QLinearConv": {0: 3, 3: 3},
    "STFT": {0: 1, 2: 1},
    "com.microsoft.CropAndResize": {0: 4, 1: 2, 2: 1},
    "com.microsoft.QMoE": {2: 3, 5: 3},
}
# Ops whose outputs may have no element, whatever the sizes of their inputs.
_MAY_BE_EMPTY = frozenset({"Compress", "NonMaxSuppression", "NonZero"})
_SIZES = frozenset({"Shape", "Size"})
# Ops that only move elements: each element of the result is an element of the data.
_MOVERS = frozenset(
    {
        "Concat",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
# Op -> position of the input that has the result's type. The position is 0 for all other ops.
_TYPED_BY = {"CastLike": 1, "OneHot": 2, "Where": 1}
_INTEGERS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
# Names that occur in every file with a risky node. A file without any of these names has no risky node.
_OPS = {*_BLOCKS, *_COUNTS, *_LEAST_RANKS, *_NEED_ELEMENTS, "Div", "GatherND", "Mod", "SplitToSequence", "sparse_value"}
MENTIONS = re.compile("|".join(sorted(op.rpartition(".")[2] for op in _OPS)).encode())
_SHOWN = 3
# Maximum size in bytes of a model for which shapes are inferred. Shape inference copies the model.
_INFERRED = 1 << 28


def find_crash_risks(model: onnx.ModelProto) -> list[str]:
    """Find the nodes that may end the process.

    Returns: one line per node, with its label and the reason. At most 3 nodes are listed, followed by the number of
        further nodes. [] for nearly every model.
    """
    risks = _RiskScope(model.graph).find_risks()
    for function in model.functions:
        risks += _RiskScope(function).find_risks()
        # onnxruntime 1.31 ends with SIGSEGV when it opens some of the files with a sparse constant in a function. The
        # crash depends on the number of other nodes.
        risks += [
            f"{node_label(node)} of the function {escape_line(function.name)} has a sparse value"
            for node in nodes_with_bodies(function.node)
            if any(attribute.HasField("sparse_tensor") for attribute in node.attribute)
        ]
    risks += _find_rank_risks(model)
    needing = _find_nonempty_requirements(model)
    if needing and _may_hold_empty_tensor(model):
        risks += needing
    return _abbreviate_risks(risks)


def find_empty_input_risks(model: onnx.ModelProto) -> list[str]:
    """Find the nodes that may end the process if an input of the model has no element.

    Returns: one line per node. At most 3 nodes are listed, followed by the number of further nodes.
    """
    return _abbreviate_risks(_find_nonempty_requirements(model))


def _abbreviate_risks(risks: list[str]) -> list[str]:
    if len(risks) <= _SHOWN:
        return risks
    return [*risks[:_SHOWN], f"{len(risks) - _SHOWN} more nodes like these"]


def _find_nonempty_requirements(model: onnx.ModelProto) -> list[str]:
    """List the nodes that end the process if a tensor that they read has no element."""
    return [
        f"{node_label(node)} may get a tensor without an element"
        for body in (model.graph, *model.functions)
        for node in nodes_with_bodies(body.node)
        if qualified_op(node) in _NEED_ELEMENTS
    ]


def _may_hold_empty_tensor(model: onnx.ModelProto) -> bool:
    """Return whether a tensor may have no element although each input of the model has elements."""
    graphs = [model.graph, *(graph for node in model.graph.node for graph in iter_subgraphs(node))]
    if any(0 in tensor.dims for graph in graphs for tensor in graph.initializer):
        return True
    nodes = [node for body in (model.graph, *model.functions) for node in nodes_with_bodies(body.node)]
    if any(
        node.op_type in _MAY_BE_EMPTY or ((constant := _constant_tensor(node)) is not None and 0 in constant.dims)
        for node in nodes
    ):
        return True
    return _infers_empty_tensor(model)


def _infers_empty_tensor(model: onnx.ModelProto) -> bool:
    """Return whether, according to the sizes in the file, a tensor of the main graph has no element."""
    return any(dims is not None and 0 in dims for dims in _infer_dims(model).values())


def _infer_dims(model: onnx.ModelProto) -> dict[str, list[int | None] | None]:
    """Return the dims of the main graph's values. An unknown size is None. If the rank is unknown, None replaces all
    dims.
    """
    inferred = model
    if model.ByteSize() <= _INFERRED:
        # Errors are ignored: onnxruntime infers shapes too and reports them.
        with contextlib.suppress(Exception):
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    dims: dict[str, list[int | None] | None] = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        kind = value.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
        dims[value.name] = sizes if kind.HasField("shape") else None
    return dims | {tensor.name: list(tensor.dims) for tensor in inferred.graph.initializer}


def _find_rank_risks(model: onnx.ModelProto) -> list[str]:
    """List the nodes that end the process because a tensor that they read may have too few dims."""
    nodes = [node for node in model.graph.node if qualified_op(node) in _LEAST_RANKS]
    if nodes:
        dims = _infer_dims(model)
    else:
        dims = {}
    risks = []
    for node in nodes:
        for place, least in _LEAST_RANKS[qualified_op(node)].items():
            if place < len(node.input):
                name = node.input[place]
            else:
                name = ""
            known = dims.get(name)
            if name and (known is None or len(known) < least):
                risks.append(f"{node_label(node)} may get {escape_line(name)!r} with fewer than {least} dims")
    return risks


class _RiskScope:
    """Scope of names: a graph with the bodies inside it, or a function. It finds the node that computes a name and the
    name's type.
    """

    def __init__(self, body: onnx.GraphProto | onnx.FunctionProto) -> None:
        self._nodes = list(nodes_with_bodies(body.node))
        self._makers: dict[str, onnx.NodeProto] = {}
        # Names that more than one body defines. The node that computes such a name is unknown.
        self._ambiguous: set[str] = set()
        for node in self._nodes:
            for name in filter(None, node.output):
                if name in self._makers:
                    self._ambiguous.add(name)
                self._makers[name] = node
        self._types: dict[str, int] = {}
        self._constants: dict[str, TensorProto] = {}
        if isinstance(body, onnx.GraphProto):
            graphs = [body]
        else:
            graphs = []
        graphs += [graph for node in body.node for graph in iter_subgraphs(node)]
        for graph in graphs:
            for value in (*graph.input, *graph.output, *graph.value_info):
                self._types[value.name] = value.type.tensor_type.elem_type
            for tensor in graph.initializer:
                self._types[tensor.name] = tensor.data_type
                self._constants[tensor.name] = tensor
        # A caller may override the default value of an input, so the value is not constant.
        for value in body.input if isinstance(body, onnx.GraphProto) else ():
            self._constants.pop(value.name, None)

    def find_risks(self) -> list[str]:
        """List this body's risky nodes.

        Returns: one line per node with its label and the reason.
        """
        return [f"{node_label(node)} {why}" for node in self._nodes if (why := self._describe_risk(node))]

    def _describe_risk(self, node: onnx.NodeProto) -> str:
        counts = _COUNTS.get(qualified_op(node), ())
        zero = [f"{a.name} = {a.i}" for a in node.attribute if a.name in counts and a.i % _CUT == 0]
        if zero:
            return f"has {zero[0]} and divides by it"
        if qualified_op(node) == "com.microsoft.Inverse":
            return "inverts a matrix that may not be square"
        if qualified_op(node) == "ai.onnx.ml.FeatureVectorizer" and any(n < 0 for a in node.attribute for n in a.ints):
            return "has a negative size in inputdimensions"
        if not is_standard(node):
            return ""
        if node.op_type in {"Div", "Mod"} and len(node.input) == 2:
            return self._describe_division_risk(node)
        if node.op_type == "STFT" and len(node.input) > 3 and self._may_contain(node.input[3], 0):
            return "has a frame length from an input, which may be 0"
        if node.op_type == "SplitToSequence" and len(node.input) > 1 and self._may_contain(node.input[1], 0):
            return "splits into parts of a size that may be 0"
        stated = {a.name: a.i for a in node.attribute}
        if node.op_type == "GatherND" and stated.get("batch_dims", 0) < 0:
            return f"has batch_dims = {stated['batch_dims']}"
        if node.op_type in _BLOCKS and stated.get("blocksize", 1) % _CUT == 0:
            return f"has blocksize = {stated['blocksize']}, whose square is 0 in 64 bits"
        return ""

    def _describe_division_risk(self, node: onnx.NodeProto) -> str:
        kind = self._elem_type_of(node.input[0])
        # An unknown type may be an integer.
        if kind not in _WIDE and kind != TensorProto.UNDEFINED:
            return ""
        least = [np.iinfo(t).min for t in (np.int32, np.int64)]
        if not self._may_contain(node.input[1], -1) or not any(self._may_contain(node.input[0], n) for n in least):
            return ""
        return f"may divide the smallest integer, {least[1] if kind != TensorProto.INT32 else least[0]}, by -1"

    def _may_contain(self, name: str, number: int) -> bool:
        """Return whether an element of a value may be ``number``.

        The value is traced back to constants, sizes and ops that only move elements. A value of any other origin may
        contain any number.
        """
        waiting = [name]
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            maker = self._makers.get(name)
            if name in self._ambiguous:
                return True
            if maker is None:
                constant = self._constants.get(name)
            else:
                constant = _constant_tensor(maker)
            if constant is not None:
                if _contains_number(constant, number):
                    return True
            elif maker is not None and maker.op_type in _SIZES and is_standard(maker):
                if number == 0:
                    return True
            elif maker is not None and maker.op_type in _MOVERS and is_standard(maker):
                if maker.op_type == "Concat":
                    waiting += maker.input
                else:
                    waiting += maker.input[:1]
            else:
                return True
        return False

    def _elem_type_of(self, name: str) -> int:
        """Return the elem_type of a value, or UNDEFINED."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            if kind := self._types.get(name, 0):
                return kind
            maker = self._makers.get(name)
            if maker is None or name in self._ambiguous or not any(maker.input):
                if maker is None:
                    constant = None
                else:
                    constant = _constant_tensor(maker)
                if constant is None:
                    return TensorProto.UNDEFINED
                return constant.data_type
            if maker.op_type in _INTEGERS:
                return TensorProto.INT64
            if maker.op_type == "Cast":
                return attribute_value(maker, "to", TensorProto.UNDEFINED)
            place = _TYPED_BY.get(maker.op_type, 0)
            if place < len(maker.input):
                name = maker.input[place]
            else:
                name = ""
        return TensorProto.UNDEFINED


def _constant_tensor(node: onnx.NodeProto) -> TensorProto | None:
    """Return the tensor of a Constant; None for any other node."""
    if node.op_type != "Constant":
        return None
    stated: Mapping[str, onnx.AttributeProto] = {a.name: a for a in node.attribute}
    if "value" in stated:
        return stated["value"].t
    if "value_int" in stated:
        return numpy_helper.from_array(np.array(stated["value_int"].i))
    if "value_ints" in stated:
        return numpy_helper.from_array(np.array(list(stated["value_ints"].ints), np.int64))
    return None


def _contains_number(constant: TensorProto, number: int) -> bool:
    if constant.data_location == TensorProto.EXTERNAL:
        return True
    return bool((numpy_helper.to_array(constant) == number).any())


def node_label(node: onnx.NodeProto) -> str:
    """Return the node's op, name and first output for messages.

    Returns: for example "Div 'div_3' (output 'y')".
    """
    if node.name:
        named = f" {node.name!r}"
    else:
        named = ""
    if node.output:
        made = f" (output {node.output[0]!r})"
    else:
        made = ""
    return escape_line(f"{node.op_type}{named}{made}")
