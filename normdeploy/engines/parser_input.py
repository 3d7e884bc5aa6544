"""Prepare what TensorRT's parser reads: the user's file, or a copy whose norms have other forms. Also read the sizes of
the inputs.
"""

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
from ..norms.third_party import function_op_row
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
    """Put the norms of a file in the requested form.

    Args:
        proto: model of the file. Its weights may be missing.
        shapes: input -> [min, opt, max] shapes. The opt shapes give the usual sizes.

    Returns:
        the new model, or None if the file itself can be parsed unchanged; and the form of each norm.
    """
    regrouped = has_regrouped_norms(proto)
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
    """Rename function inputs that the parser could mistake for arguments of a call; change ``proto`` in place."""
    calls = calls_by_function(proto)
    functions = [rename_colliding_inputs(f, calls.get((f.domain, f.name), ())) for f in proto.functions]
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in functions]
    del proto.functions[:]
    proto.functions.extend(functions)
    return proto


def has_regrouped_norms(proto: onnx.ModelProto) -> bool:
    """Check if the file has norms in onnxruntime's best form (`forms.group_norm`), as nodes or as an own op's body.
    TensorRT instead has one layer for the whole norm.

    Returns:
        true if a native build for TensorRT writes these norms as one node.
    """
    if any(_is_tuned(n) for n in proto.graph.node):
        return True
    if read_record(proto).get("export", {}).get("runtime", "tensorrt") in TENSORRT:
        return False
    reshaped = {n.output[0] for n in proto.graph.node if n.op_type == "Reshape"}
    return any(n.op_type == "InstanceNormalization" and n.input[0] in reshaped for n in proto.graph.node)


def _is_tuned(node: onnx.NodeProto) -> bool:
    row = function_op_row(node.domain, node.op_type)
    return row is not None and row.tuned


@contextlib.contextmanager
def file_for_parser(source: Path, changed: onnx.ModelProto | None, target: Path) -> Iterator[Path]:
    """Provide the file for the parser: the user's file, or the changed model in a temporary folder next to the engine.

    Yields:
        path of the file.
    """
    if changed is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        path = Path(folder) / source.name
        save_onnx(changed, path)
        yield path


def recorded_input_specs(proto: onnx.ModelProto) -> Sequence[InputSpec]:
    """Read the inputs from the record that ``export`` or ``optimize`` wrote into the file.

    Returns:
        inputs; empty if the record can't be read.
    """
    try:
        return read_record(proto).get("inputs", ())
    except GraphError:
        # Without a record, the user's profiles are used. If a profile is missing, an error names the input.
        return ()


def graph_inputs(proto: onnx.ModelProto) -> list[TensorSpec]:
    """List the inputs that the graph requires.

    Returns:
        name, type and shape of each.
    """
    return [tensor_spec(v) for v in required_inputs(proto.graph)]
