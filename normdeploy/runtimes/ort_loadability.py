"""Whether onnxruntime loads and runs a file that is to be written. One that it does not is an error, and nothing is
written.

Which file has to run: one that ``export`` makes, unless it is for another runtime or holds ops of a domain of the
user's own, whose library is not known here; one that ``optimize`` makes, with the same exceptions, where it is the file
given that does not load, or that no values of its inputs make run. bfloat16, of which onnxruntime's CPU provider
computes next to nothing, is judged in float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ..errors import ExportError, GraphError
from ..graphs import ort_equivalence
from ..graphs.proto_queries import captured_names, module_path
from ..graphs.shape_inference import infer_types
from ..option_values import ANY, TENSORRT
from ..rewriting.perturbed_model import PATIENCE, PerturbableModel, short_error_message
from ..storage.proto_traversal import iter_bodies
from ..storage.weight_serialization import detach_weights
from ..types import Arrays

_OURS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "normdeploy")
_NO_KERNEL = ("NOT_IMPLEMENTED", "is not a registered function/op", "No Op registered for")
_NO_MEMORY = ("bad_alloc", "Failed to allocate", "allocate memory")


@dataclass(frozen=True)
class LoadFailure:
    """``message``: why the file does not run, in onnxruntime's words where it names no op; ``loads``: it does not run
    only.

    ``kernels``: nothing is missing but kernels of the CPU. ``foreign``: nothing but the kernels of ops in domains that
    are neither ONNX's nor onnxruntime's nor ours.
    """

    message: str
    loads: bool = False
    kernels: bool = False
    foreign: bool = False


def find_load_failure(proto: onnx.ModelProto, samples: Sequence[Arrays] = ()) -> LoadFailure | None:
    """Why onnxruntime does not load ``proto``, or runs it on none of ``samples``; None where it does."""
    try:
        model = PerturbableModel(proto)
    except Exception as error:
        # onnxruntime's exceptions share no base class
        missing = _find_ops_without_kernel(proto)
        if missing:
            message = f"onnxruntime has no kernel for {'; '.join(missing)}"
        else:
            message = f"onnxruntime can't load it: {short_error_message(error)}"
        foreign = bool(missing) and not any(missing.values())
        if foreign:
            rest = _cut_out_foreign_ops(proto)
        else:
            rest = None
        return (None if rest is None else find_load_failure(rest)) or LoadFailure(
            message, kernels=bool(missing), foreign=foreign
        )
    message = ""
    for feeds in samples:
        start = time.monotonic()
        try:
            model.run_perturbed(feeds)
        except Exception as error:
            # Such a run was ended by us, or by want of memory: a larger machine may run the model.
            if time.monotonic() - start >= PATIENCE or any(words in str(error) for words in _NO_MEMORY):
                return None
            message = message or short_error_message(error)
        else:
            return None
    if message:
        return LoadFailure(f"onnxruntime loads it and does not run it: {message}", loads=True)
    return None


def require_runnable(
    proto: onnx.ModelProto, samples: Sequence[Arrays], runtime: str, eager: Callable[[Arrays], str]
) -> list[str]:
    """The notes on a file that ``export`` made, where that may be written.

    Args:
        samples: inputs that it should run on.
        runtime: the one that it is for.
        eager: why PyTorch does not run the model on a sample, "" where it does.

    Raises:
        ExportError: onnxruntime does not load or run it.
    """
    fault = find_load_failure(proto, samples)
    if fault is None:
        return []
    if runtime in TENSORRT or fault.foreign:
        return [f"the file was not run: {fault.message}"]
    if fault.loads and all(eager(feeds) for feeds in samples):
        # the samples are to blame: that nothing was compared is noted already
        return []
    raise ExportError(
        f"the file would not run, and nothing is written: {fault.message}. Change that part of the model (float64 to"
        " float32, say); or give --runtime tensorrt for a file that onnxruntime need not run"
    )


def require_runnable_optimized(
    proto: onnx.ModelProto, before: Callable[[], onnx.ModelProto], runtime: str, provider: str, *, runs: bool
) -> None:
    """Require that onnxruntime loads what ``optimize`` made, unless ops of other libraries alone keep it from that, and
    runs it where the values of inputs do not matter.

    Args:
        proto: the result.
        before: returns the file given.
        runtime, provider: what the result is for.
        runs: whether it may be run, which takes memory.

    Raises:
        GraphError: onnxruntime does not load or run ``proto``; says whether it loads and runs the file given.
    """
    if runtime in TENSORRT:
        return
    if runs:
        samples = _make_deciding_samples(proto)
    else:
        samples = []
    fault = find_load_failure(proto, samples)
    if fault is None:
        return
    read = before()
    given = find_load_failure(read, samples)
    if given is None:
        does = "runs" if fault.loads else "loads"
        raise GraphError(
            f"onnxruntime {does} the file given and not what was made of it, so nothing is written: {fault.message};"
            " please report it"
        )
    # Without a stated runtime, the file may be for one that has the kernels of ONNX's ops.
    elsewhere = provider == "cuda" or (runtime == ANY and _is_pure_onnx(read))
    if not given.foreign and not (given.kernels and elsewhere):
        raise GraphError(
            f"the file given does not run, and nothing is written: {given.message}. Mend the file; or say what runs it,"
            f" by --runtime tensorrt{'' if given.loads else ', or --runtime onnxruntime --provider cuda'}"
        )


def require_runnable_half(proto: onnx.ModelProto, samples: Sequence[Arrays], to: str) -> None:
    """
    Raises:
        GraphError: a half-precision file does not run, where the float32 model does.
    """
    fault = find_load_failure(proto, samples)
    if fault is not None:
        raise GraphError(
            f"the file would not run in {to}, and nothing is written: {fault.message}; leave --precision out, and"
            " please report it"
        )


# ------------------------------------------------------------------ whether the values of inputs matter

# With these, the values of floats decide which nodes run, how many elements a tensor has, or which element is read.
_DECIDING = frozenset(
    {
        "ArgMax",
        "ArgMin",
        "Compress",
        "If",
        "Loop",
        "NonMaxSuppression",
        "NonZero",
        "Range",
        "Scan",
        "TopK",
        "Unique",
    }
)
_MOST_ELEMENTS = 2**24


def _make_deciding_samples(proto: onnx.ModelProto) -> list[Arrays]:
    """Return an input of a model that runs on all values of its inputs or on none; [] if the values may matter.

    The inputs of such a model are floats of stated sizes, and nothing makes an index, a size or a condition of them.
    """
    sizes = [dims for _, dims in infer_types(proto).values() if dims is not None]
    if any(math.prod(n for n in dims if isinstance(n, int)) > _MOST_ELEMENTS for dims in sizes):
        return []
    defaults = {tensor.name for tensor in proto.graph.initializer}
    feeds: dict[str, np.ndarray] = {}
    for value in proto.graph.input:
        if value.name in defaults:
            continue
        kind = value.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type not in _NUMPY_FLOATS or not kind.HasField("shape") or min(dims, default=1) < 1:
            return []
        feeds[value.name] = np.ones(dims, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    if any(_may_decide_by_value(node) for function in proto.functions for node in function.node):
        return []
    moved = set(feeds)
    for node in proto.graph.node:
        if moved.isdisjoint(node.input) and moved.isdisjoint(captured_names(node)):
            continue
        if _may_decide_by_value(node):
            return []
        if node.op_type not in {"Shape", "Size"}:
            moved.update(node.output)
    return [feeds]


def _may_decide_by_value(node: onnx.NodeProto) -> bool:
    """Return whether the values that a node reads may decide which nodes run, or on which elements."""
    if node.op_type == "Cast":
        return all(attribute.i not in _FLOATING for attribute in node.attribute if attribute.name == "to")
    return node.op_type in _DECIDING


# ------------------------------------------------------------------ which ops are to blame


def _find_ops_without_kernel(proto: onnx.ModelProto) -> dict[str, bool]:
    """Return each op that onnxruntime has no kernel for in its types, with the first such node, and whether it ought to
    know it. Of bodies and functions, only ops in domains of others."""
    known = {name: kind for name, (kind, _) in infer_types(proto).items()}
    written = {(f.domain, f.name) for f in proto.functions}
    constants = {t.name: t for t in proto.graph.initializer if int(np.prod(t.dims)) <= 64}
    asked: set[tuple[object, ...]] = set()
    refused: dict[str, bool] = {}
    foreign = [node for body in iter_bodies(proto) for node in body.node if node.domain not in _OURS]
    for node in (*proto.graph.node, *foreign):
        kinds = tuple(known.get(name) for name in node.input)
        key = (node.domain, node.op_type, kinds)
        if (
            key in asked
            or (node.domain, node.op_type) in written
            or any(a.HasField("g") or a.graphs for a in node.attribute)
        ):
            continue
        asked.add(key)
        if _is_refused_alone(proto, node, known, constants):
            floating = next((k for k in kinds if k in _FLOATING), None)
            if floating is not None:
                of = f" of {onnx.helper.tensor_dtype_to_np_dtype(floating).name}"
            else:
                of = ""
            if node.domain:
                domain = f"{node.domain}."
            else:
                domain = ""
            if path := module_path(node):
                where = f" in module {path!r}"
            else:
                where = ""
            refused[f"{domain}{node.op_type}{of} (node {node.name or node.output[0]!r}{where})"] = node.domain in _OURS
    return refused


def _is_pure_onnx(proto: onnx.ModelProto) -> bool:
    """Return whether each node is an op of ONNX."""
    nodes = [node for body in iter_bodies(proto) for node in body.node]
    return all(node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type) for node in nodes)


_NUMPY_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
_FLOATING = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _cut_out_foreign_ops(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model without the main graph's ops of other libraries, whose results become inputs.

    Returns:
        None if nothing states the type of such a result, or if the graph's outputs are such results alone.
    """
    written = {(f.domain, f.name) for f in proto.functions}
    known = infer_types(proto)
    nodes: list[onnx.NodeProto] = []
    made: dict[str, onnx.ValueInfoProto] = {}
    for node in proto.graph.node:
        if node.domain in _OURS or (node.domain, node.op_type) in written:
            nodes.append(node)
            continue
        for name in filter(None, node.output):
            kind, dims = known.get(name, (None, None))
            if kind is None:
                return None
            made[name] = onnx.helper.make_tensor_value_info(name, kind, dims)
    outputs = [value for value in proto.graph.output if value.name not in made]
    if not made or not outputs:
        return None
    graph = onnx.GraphProto(name="rest", node=nodes, initializer=proto.graph.initializer, output=outputs)
    graph.input.extend((*proto.graph.input, *made.values()))
    return onnx.ModelProto(
        ir_version=proto.ir_version, graph=graph, opset_import=proto.opset_import, functions=proto.functions
    )


def _is_refused_alone(
    proto: onnx.ModelProto,
    node: onnx.NodeProto,
    known: Mapping[str, int | None],
    constants: Mapping[str, onnx.TensorProto],
) -> bool:
    """Whether onnxruntime says of a node by itself that it has no kernel for it."""
    read = [name for name in dict.fromkeys(node.input) if name]
    graph = onnx.GraphProto(
        name="one", node=[node], initializer=[constants[name] for name in read if name in constants]
    )
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, known.get(name) or 1, None) for name in read if name not in constants
    )
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    model = onnx.ModelProto(ir_version=proto.ir_version, graph=graph, opset_import=proto.opset_import)
    try:
        ort_equivalence.open_session_without_weights(detach_weights(model, smallest=2**62)[0], {})
    except Exception as error:
        return any(words in str(error) for words in _NO_KERNEL)
    return False
