"""Export torch models to ONNX with the dynamo exporter, and check the result against the request.

The exporter's own optimizer stays off because it deletes every epsilon up to 1e-8. Instead, ``simplify`` cleans up the
graph after the norms have become single nodes. This module gives dims the user's names, keeps each node's qualified
module path, and removes all paths of the user's file system. If torch silently fixed a dim that was requested as
dynamic, the export fails. ``exporter_fixes`` changes nodes that onnxruntime would not run.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch

from ..errors import ExportError, InputError
from ..graphs.proto_queries import module_from_scope
from ..graphs.type_opsets import raise_opset_for_types
from ..loading.dynamic_squeezes import dynamic_axes_kept
from ..loading.torch_state import PROCESS_STATE, silence_logger
from ..model import LoadedModel
from ..option_values import TORCH_OPSETS
from ..storage.export_record import read_record, write_record
from ..storage.onnx_files import fill_shared_weights
from ..storage.shared_weights import Weights, is_shareable_weight, share_array
from ..types import Progress
from .complex_operands import write_complex_as_real
from .custom_translations import Table, translation_table
from .exporter_fixes import apply_fixes
from .masked_attention_fix import fix_hidden_rows
from .number_operands import promote_number_operands
from .split_sequences import write_splits
from .torchlib_registry import list_functions_unparsed
from .translation_faults import require_translatable

__all__ = [
    "CLASS",
    "MODULE",
    "TORCH_OPSETS",
    "export_to_proto",
    "export_without_weights",
    "read_record",
    "write_record",
]

# Key of a node's metadata: qualified path of the module that created the node.
MODULE = "normdeploy.module"
# Key of a node's metadata: class of the module that created the node.
CLASS = "normdeploy.class"
# Size of a dim with a step, as torch writes it.
_MULTIPLE = re.compile(r"(?P<factor>\d+)\*(?P<symbol>[A-Za-z_]\w*)")
_SCOPES = {MODULE: "pkg.torch.onnx.name_scopes", CLASS: "pkg.torch.onnx.class_hierarchy"}


def export_to_proto(
    model: LoadedModel,
    *,
    opset: int = 21,
    custom_translation_table: Table | None = None,
    progress: Progress | None = None,
) -> onnx.ModelProto:
    """Export ``model`` with its weights in the proto; ``model.program`` is not changed.

    The arguments and exceptions are those of `export_without_weights`.

    Returns:
        the ONNX model.
    """
    proto, weights = export_without_weights(
        model, opset=opset, custom_translation_table=custom_translation_table, progress=progress
    )
    proto = fill_shared_weights(proto)
    # The model refers to these arrays, so they must not be freed earlier.
    del weights
    return proto


def export_without_weights(
    model: LoadedModel,
    *,
    opset: int = 21,
    custom_translation_table: Table | None = None,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, Weights]:
    """Export ``model`` with its large weights separate.

    The proto refers to the weights (`normdeploy.storage.shared_weights`). The weights are in the memory of
    ``model.program``, which must not change as long as the weights are used. Inputs, outputs and dynamic dims have the
    names that the model gives them. Nodes have ``normdeploy.module`` and ``normdeploy.class`` as metadata.

    Args:
        opset: 18 to 25. 23 and above write Attention nodes, which TensorRT can't build.
        custom_translation_table: operator -> onnxscript function; it overrides functions of installed packages
            (``normdeploy.translations``).
        progress: function that is called with (stage, done, total).

    Returns:
        the ONNX model, and the weights.

    Raises:
        ExportError: the opset is out of range, or torch can't express the model in ONNX.
        InputError: a dim that was requested as dynamic became fixed.
    """
    if not isinstance(opset, int) or opset not in TORCH_OPSETS:
        raise ExportError(
            f"opset {opset!r} can't be exported; torch exports {TORCH_OPSETS.start} to {TORCH_OPSETS.stop - 1} (21 "
            "suits every runtime)"
        )
    table = translation_table(model.program, custom_translation_table)
    require_translatable(model.program, own=table)
    if progress is not None:
        progress("export", 0, 2)
    try:
        with (
            silence_torch(),
            torch.no_grad(),
            promote_number_operands(model.program),
            write_complex_as_real(model.program),
            dynamic_axes_kept(model.program),
            list_functions_unparsed(),
        ):
            # Gradients are off: with gradients, torch 2.13 writes views into attentions such as those of T5, and can't
            # decompose these views.
            program = torch.onnx.export(
                model.program,
                dynamo=True,
                optimize=False,
                opset_version=opset,
                verbose=False,
                custom_translation_table=table or None,
            )
    except Exception as error:
        raise ExportError(_describe_export_error(error, model.program)) from error
    # Only the old exporter returns None.
    assert program is not None
    if progress is not None:
        progress("export", 1, 2)
    graph = _finish_export(program.model, model)
    proto, weights = _serialize_model(graph)
    proto = raise_opset_for_types(proto)
    proto.ir_version = max(
        proto.ir_version, onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    )
    proto.producer_name, proto.producer_version = "normdeploy", version("normdeploy")
    if progress is not None:
        progress("export", 2, 2)
    return proto, weights


def _serialize_model(model: ir.Model) -> tuple[onnx.ModelProto, Weights]:
    """Serialize the model with its large weights separate."""
    arrays = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and is_shareable_weight(tensor.dtype.numpy(), tuple(tensor.shape.numpy())):
            arrays[name] = tensor.numpy()
            value.const_value = ir.tensor(0, name=name)
    proto = ir.serde.serialize_model(model)
    weights = Weights()
    for initializer in proto.graph.initializer:
        if (array := arrays.pop(initializer.name, None)) is not None:
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            initializer.CopyFrom(onnx.TensorProto(name=initializer.name, data_type=kind, dims=array.shape))
            share_array(initializer, array, weights)
    return proto, weights


def _finish_export(exported: ir.Model, model: LoadedModel) -> ir.Model:
    """Inline functions, fix nodes, and give names and metadata their final form."""
    common.InlinePass()(exported)
    apply_fixes(exported.graph)
    write_splits(exported.graph)
    common.RemoveUnusedOpsetsPass()(exported)
    # One tensor may be two outputs, so this pass runs before the outputs get their names.
    common.OutputFixPass()(exported)
    _rename_graph_io(exported.graph, model)
    # This fix reads metadata that the next step removes.
    fix_hidden_rows(exported.graph)
    _trim_metadata(exported)
    _transpose_linear_weights(exported.graph)
    # A user's name may equal a name that the exporter invented, so this pass makes names unique.
    common.NameFixPass()(exported)
    return exported


# ------------------------------------------------------------------ names and dims


def _rename_graph_io(graph: ir.Graph, model: LoadedModel) -> None:
    """Give inputs, outputs and dims the user's names."""
    for kind, values, names in (
        ("inputs", graph.inputs, [i.name for i in model.inputs]),
        ("outputs", graph.outputs, list(model.outputs)),
    ):
        if len(values) != len(names):
            raise ExportError(
                f"the exported graph has {len(values)} {kind} ({[v.name for v in values]}), but the model has"
                f" {len(names)} ({names})"
            )
        for value, name in zip(values, names, strict=True):
            value.name = name
    _rename_dims(graph, _user_dim_names(graph, model))


def _user_dim_names(graph: ir.Graph, model: LoadedModel) -> dict[str, str]:
    """Map torch's symbols, or expressions of symbols, to the user's names. The names come from the inputs, whose dims
    have both a symbol and a name.

    Raises:
        InputError: a dim requested as dynamic is fixed in the graph, or one size has two names.
    """
    names: dict[str, str] = {}
    for value, spec in zip(graph.inputs, model.inputs, strict=True):
        for axis, (exported, wanted) in enumerate(zip(value.shape or (), spec.shape, strict=True)):
            if wanted.name is None or wanted.min == wanted.max:
                continue
            size = _dim_value(exported)
            if isinstance(size, int):
                raise InputError(
                    f"dim {wanted.name!r} (axis {axis} of input {spec.name!r}) was requested to range from "
                    f"{wanted.min} to {wanted.max}, but the model fixes it at {size}; pass {size}, or change the "
                    "code that fixes it (a channel count, a view, a loop)"
                )
            given = names.setdefault(str(size), wanted.name)
            if given != wanted.name:
                raise InputError(
                    f"dims {given!r} and {wanted.name!r} (axis {axis} of input {spec.name!r}) have two names, but "
                    "the model needs them equal; use one name for both"
                )
    return names


def _rename_dims(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Rename the symbols in every shape of the graph, also in expressions ("2*s77 + 1").

    All symbols are renamed at once, so that two symbols may exchange their names.
    """
    for value in _all_values(graph):
        if value.shape is not None and not value.shape.is_static():
            sizes = [_dim_value(dim) for dim in value.shape]
            value.shape = ir.Shape([_rename_size(s, names) if isinstance(s, str) else s for s in sizes])


def _rename_size(size: str, names: Mapping[str, str]) -> str:
    """Write a size with the users' names instead of torch's symbols. If the sizes of "height" are 32*s7, 16*s7 becomes
    height//2 and 64*s7 becomes 2*height.
    """
    if size in names:
        return names[size]
    for expression, name in names.items():
        multiple = _MULTIPLE.fullmatch(expression)
        if multiple is None:
            continue
        step = int(multiple["factor"])
        symbol = multiple["symbol"]
        own = _MULTIPLE.fullmatch(size)
        if own is not None and own["symbol"] == symbol and int(own["factor"]) % step == 0:
            return f"{int(own['factor']) // step}*{name}"
        if own is not None and own["symbol"] == symbol and step % int(own["factor"]) == 0:
            return f"{name}//{step // int(own['factor'])}"
        if size == symbol:
            return f"{name}//{step}"
        size = re.sub(rf"\b{symbol}\b", f"({name}//{step})", size)
    return re.sub(r"\w+", lambda m: names.get(m[0], m[0]), size)


def _dim_value(dim: int | ir.SymbolicDim) -> int | str | None:
    """Return a dim's size or symbol. A dim that torch fixed late is a symbol with a name such as "5", which becomes a
    size.
    """
    if isinstance(dim, int) or dim.value is None:
        if isinstance(dim, int):
            return dim
        return None
    if dim.value.isdecimal():
        return int(dim.value)
    return dim.value


def _all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs


# ------------------------------------------------------------------ metadata and weights


def _trim_metadata(model: ir.Model) -> None:
    """Keep each node's module path and class, and remove its other metadata, which quote the user's source code and
    paths.
    """
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        graph.doc_string = None
    for value in _all_values(model.graph):
        value.metadata_props.clear()
        value.doc_string = None
        if value.const_value is not None:
            value.const_value.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        kept = {
            ours: place
            for ours, theirs in _SCOPES.items()
            if (place := module_from_scope(node.metadata_props.get(theirs, "")))
        }
        node.metadata_props.clear()
        node.metadata_props.update(kept)
        node.doc_string = None


def _transpose_linear_weights(graph: ir.Graph) -> None:
    """Store the weights of linear layers in the layout that MatMul reads.

    Large weights stay views of torch's weights (`storage.shared_weights`). Small weights are copied by torch, which is
    three times as fast as NumPy.
    """
    for node in graph:
        if node.op_type == "Transpose" and node.domain == "":
            weight = node.inputs[0]
        else:
            weight = None
        if weight is None or not weight.is_initializer() or len(weight.uses()) > 1 or node.outputs[0].is_graph_output():
            continue
        tensor = getattr(weight.const_value, "raw", None)
        if not isinstance(tensor, torch.Tensor):
            continue
        perm = node.attributes.get_ints("perm", tuple(reversed(range(tensor.dim()))))
        name = f"{weight.name}.T"
        data = ir.tensor_adapters.TorchTensor(tensor.detach().permute(*perm), name=name)
        if tensor.dim() != 2 or not is_shareable_weight(data.dtype.numpy(), tuple(data.shape.numpy())):
            data = ir.tensor_adapters.TorchTensor(data.raw.contiguous(), name=name)
        turned = ir.Value(
            name=name, type=weight.type, shape=ir.Shape([tensor.shape[p] for p in perm]), const_value=data
        )
        graph.register_initializer(turned)
        node.outputs[0].replace_all_uses_with(turned)
        graph.remove(node, safe=True)
        graph.initializers.pop(str(weight.name))


# ------------------------------------------------------------------ torch's output


@contextmanager
def silence_torch() -> Iterator[None]:
    """Discard torch's warnings, prints and logs within the context. Errors are still raised."""
    with (
        PROCESS_STATE,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        silence_logger("torch"),
        silence_logger("onnxscript"),
        silence_logger("onnx_ir"),
    ):
        warnings.simplefilter("ignore")
        yield


def _describe_export_error(error: BaseException, program: torch.export.ExportedProgram) -> str:
    """Summarize torch's chain of exceptions in one line: the missing operator and its module, or
    the innermost cause.
    """
    target = None
    while True:
        target = re.search(r"Error when translating node .*?target=(?:torch\.ops\.)?([\w.]+)", str(error)) or target
        if error.__cause__ is None:
            break
        error = error.__cause__
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if target:
        module = _module_clause(program, target[1])
    else:
        module = ""
    if missing := re.search(r"No ONNX function found for .*?'([\w.]+)'", text):
        return (
            f"ONNX has no equivalent of the operator {missing[1]}{module}; write that part of the model with other "
            f"operators, or {_translation_advice(missing[1])}"
        )
    if target:
        where = f" (operator {target[1]}{module})"
    else:
        where = ""
    if "SymbolicTensor" in text:
        return (
            f"torch's exporter can't write an argument that depends on a dynamic size{where}: fix that size, write "
            f"the operator with only tensors, or {_translation_advice(target[1] if target else 'acme.op')}"
        )
    return f"torch could not export the model{where}: {text}"


def _translation_advice(operator: str) -> str:
    """Say how to translate an operator; the command line has no option for it."""
    namespace, _, name = operator.partition(".")
    key = f"{namespace}::{name.partition('.')[0]}"
    return (
        "translate it to ONNX: in Python, normdeploy.export(model, ..., custom_translation_table={"
        f"{key!r}: FUNCTION}}); for the command line, in an installed package with the entry point"
        " normdeploy.translations"
    )


def _module_clause(program: torch.export.ExportedProgram, operator: str) -> str:
    """Return text such as " in module 'layers.0'" for the module that calls the operator; "" if the module is unknown.

    In the program, the operator's name may have a prefix, as in special_bessel_j0.
    """
    name = operator.split(".")[1]
    for node in program.graph.nodes:
        if node.op == "call_function" and "." in str(node.target):
            called = str(node.target).split(".")[1]
        else:
            called = ""
        if (called == name or called.endswith(f"_{name}")) and node.meta.get("nn_module_stack"):
            path = list(node.meta["nn_module_stack"].values())[-1][0]
            if path:
                return f" in module {path!r}"
            return ""
    return ""
