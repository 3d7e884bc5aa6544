"""What the parser is given: the user's file, or a model with its norms in other forms; and the sizes of its inputs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from ..errors import GraphError
from ..graphs.declared_inputs import tensor_spec
from ..model import InputSpec, Shapes, TensorSpec
from ..norms.function_bodies import calls_by_function, functions_to_rename, rename_colliding_inputs
from ..option_values import TENSORRT
from ..rewriting import norm_optimizer
from ..storage.export_record import read_record
from ..storage.onnx_files import load_onnx, save_onnx
from ..storage.proto_traversal import required_inputs
from ..types import Progress
from . import norm_implementations
from .norm_implementations import Implementation


def implement_requested_norms(
    source: Path,
    proto: onnx.ModelProto,
    norm_impl: str,
    runtime: str,
    version: str,
    shapes: Mapping[str, Shapes],
    progress: Progress | None,
) -> tuple[onnx.ModelProto | None, tuple[Implementation, ...]]:
    """The model with its norms in the wanted form, None where that is the file itself; and the account of them."""
    regrouped = _has_regrouped_norms(proto)
    if (
        norm_impl == "native"
        and not regrouped
        and not norm_implementations.needs_native_rewrite(proto, runtime, version)
    ):
        return (_separate_function_inputs(load_onnx(source)) if functions_to_rename(proto) else None), ()
    if norm_implementations.plugins_available(norm_impl, runtime, version):
        fuse = "portable"
    else:
        fuse = "standard"
    usual = {
        d: n
        for i in graph_inputs(proto)
        if i.name in shapes
        for d, n in zip(i.shape, shapes[i.name][1], strict=True)
        if isinstance(d, str)
    }
    whole = load_onnx(source)
    if norm_impl != "native" or regrouped:
        whole, _ = norm_optimizer.optimize_norms(whole, runtime=runtime, fuse=fuse, progress=progress)
    return norm_implementations.implement_norms(
        whole, norm_impl=norm_impl, runtime=runtime, version=version, sizes=usual
    )


def _separate_function_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto``, changed in place, with functions whose inputs the parser can't mistake for what a call gives."""
    calls = calls_by_function(proto)
    functions = [rename_colliding_inputs(f, calls.get((f.domain, f.name), ())) for f in proto.functions]
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in functions]
    del proto.functions[:]
    proto.functions.extend(functions)
    return proto


def _has_regrouped_norms(proto: onnx.ModelProto) -> bool:
    """Whether this project wrote group norms as onnxruntime runs them best (`forms.group_norm`); TensorRT has a layer
    for the whole norm."""
    if read_record(proto).get("export", {}).get("runtime", "tensorrt") in TENSORRT:
        return False
    reshaped = {n.output[0] for n in proto.graph.node if n.op_type == "Reshape"}
    return any(n.op_type == "InstanceNormalization" and n.input[0] in reshaped for n in proto.graph.node)


@contextlib.contextmanager
def file_for_parser(source: Path, changed: onnx.ModelProto | None, target: Path) -> Iterator[Path]:
    """The file for the parser: the user's own, or a changed model in a folder beside the engine, which is gone
    afterwards."""
    if changed is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        path = Path(folder) / source.name
        save_onnx(changed, path)
        yield path


def recorded_input_specs(proto: onnx.ModelProto) -> Sequence[InputSpec]:
    try:
        return read_record(proto).get("inputs", ())
    except GraphError:
        # then the user's profiles must do, or are missed by name
        return ()


def graph_inputs(proto: onnx.ModelProto) -> list[TensorSpec]:
    return [tensor_spec(v) for v in required_inputs(proto.graph)]
