"""Check, before a file is written, that onnxruntime loads and runs it. A failure is an error, and nothing is written.

A file that ``export`` makes must run. There are two exemptions: files for another runtime, and files with ops of the
user's own domain, whose library is unknown here. A file that ``optimize`` makes must load, with the same exemptions. If
no input value decides whether the file runs, it must also run. bfloat16 is tested in float32, because onnxruntime's CPU
provider has almost no kernels for it.
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
from ..ort_sessions.opset_limits import describe_unloadable_opset
from ..rewriting.perturbed_model import PATIENCE, PerturbableModel, short_error_message
from ..storage.onnx_domains import default_domain_opset
from ..storage.proto_traversal import iter_bodies
from ..storage.weight_serialization import detach_weights
from ..types import Arrays

_OURS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "normdeploy")
_NO_KERNEL = ("NOT_IMPLEMENTED", "is not a registered function/op", "No Op registered for")
_NO_MEMORY = ("bad_alloc", "Failed to allocate", "allocate memory")


@dataclass(frozen=True)
class LoadFailure:
    """Reason why onnxruntime does not load or run a file.

    Attributes:
        message: the reason: the ops without a kernel, or onnxruntime's own message if every op has a kernel.
        loads: the file loads, but does not run.
        kernels: only CPU kernels are missing.
        foreign: kernels are missing only for ops of domains other than ONNX's, onnxruntime's and normdeploy's.
    """

    message: str
    loads: bool = False
    kernels: bool = False
    foreign: bool = False


def find_load_failure(proto: onnx.ModelProto, samples: Sequence[Arrays] = ()) -> LoadFailure | None:
    """Find the reason why onnxruntime does not load ``proto`` or does not run it on any of ``samples``.

    Returns:
        The reason; None if ``proto`` loads and, if there are samples, runs on at least one of them.
    """
    try:
        model = PerturbableModel(proto)
    except Exception as error:
        # onnxruntime's exceptions share no base class.
        # Without this check, every op of the file would seem to lack a kernel.
        if unloadable := describe_unloadable_opset(default_domain_opset(proto)):
            return LoadFailure(unloadable)
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
            # The run reached the time limit or ran out of memory. A larger machine may run the model.
            if time.monotonic() - start >= PATIENCE or any(words in str(error) for words in _NO_MEMORY):
                return None
            message = message or short_error_message(error)
        else:
            return None
    if message:
        return LoadFailure(f"onnxruntime loads it but does not run it: {message}", loads=True)
    return None


def require_runnable(
    proto: onnx.ModelProto, samples: Sequence[Arrays], runtime: str, eager: Callable[[Arrays], str]
) -> list[str]:
    """Check that a file made by ``export`` may be written.

    Args:
        samples: inputs on which the file should run.
        runtime: the runtime that the file is for.
        eager: function that returns the reason why PyTorch does not run the model on a sample, "" if PyTorch does.

    Returns:
        Notes on the file, for example that the file was not run.

    Raises:
        ExportError: onnxruntime does not load or run the file.
    """
    fault = find_load_failure(proto, samples)
    if fault is None:
        return []
    if runtime in TENSORRT or fault.foreign:
        return [f"the file was not run: {fault.message}"]
    if fault.loads and all(eager(feeds) for feeds in samples):
        # PyTorch does not run on the samples either, so the file is not at fault. A note already says that nothing was
        # compared.
        return []
    raise ExportError(
        f"the file would not run, so nothing was written: {fault.message}. Change that part of the model (for "
        "example, float64 to float32), or pass --runtime tensorrt if onnxruntime does not have to run the file"
    )


def require_runnable_optimized(
    proto: onnx.ModelProto, before: Callable[[], onnx.ModelProto], runtime: str, provider: str, *, runs: bool
) -> None:
    """Require that onnxruntime loads the result of ``optimize``. If no input value decides whether it runs, require
    that it runs too.

    Two failures are accepted. In the first, only ops of other libraries prevent the user's file from loading. In the
    second, only CPU kernels are missing and the file is for another provider or runtime.

    Args:
        proto: the result.
        before: function that returns the user's file.
        runtime: the runtime of the result.
        provider: the execution provider of the result.
        runs: True to also run the result, which takes memory.

    Raises:
        GraphError: onnxruntime does not load or run ``proto``; the message says whether onnxruntime loads and runs the
            user's file.
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
            f"onnxruntime {does} the input file but not the optimized file, so nothing was written: {fault.message}; "
            "please report it"
        )
    # Without a stated runtime, the file may be for a runtime that has kernels for all of ONNX's ops.
    elsewhere = provider == "cuda" or (runtime == ANY and _is_pure_onnx(read))
    if not given.foreign and not (given.kernels and elsewhere):
        raise GraphError(
            f"the input file does not run, so nothing was written: {given.message}. Fix the file, or pass the "
            "runtime that runs it: --runtime "
            f"tensorrt{'' if given.loads else ', or --runtime onnxruntime --provider cuda'}"
        )


def require_runnable_half(proto: onnx.ModelProto, samples: Sequence[Arrays], to: str) -> None:
    """Require that a half-precision file runs.

    Raises:
        GraphError: the half-precision file does not run although the float32 model does.
    """
    fault = find_load_failure(proto, samples)
    if fault is not None:
        raise GraphError(
            f"the file would not run in {to}, so nothing was written: {fault.message}; omit --precision, and please "
            "report it"
        )


# ------------------------------------------------------------------ dependence on input values

# Ops with which float values decide which nodes run, how many elements a tensor has, or which element is read.
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
    """Make a sample for a model whose input values do not decide whether it runs.

    Such a model has floating inputs of stated sizes and computes no index, size or condition from their values.

    Returns:
        A list with one sample, in which every value is 1. [] if the values may decide whether the model runs, or a
        tensor is too large.
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


# ------------------------------------------------------------------ ops without a kernel


def _find_ops_without_kernel(proto: onnx.ModelProto) -> dict[str, bool]:
    """Find ops for which onnxruntime has no kernel in the types that the model uses. In bodies and functions, find only
    ops of domains other than ONNX's.

    Returns:
        Description of each op with its first node -> True if onnxruntime should know the op's domain.
    """
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
    """Return whether every node is an op of ONNX itself."""
    nodes = [node for body in iter_bodies(proto) for node in body.node]
    return all(node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type) for node in nodes)


_NUMPY_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
_FLOATING = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _cut_out_foreign_ops(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Remove the main graph's ops of other libraries. Results of the removed ops become inputs.

    Returns:
        The reduced model. None if the graph has no such ops, if the type of such a result is unknown, or if all graph
        outputs are such results.
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
    """Return whether onnxruntime reports a missing kernel for a model that contains only this node."""
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
