"""Choose the form of each norm in a TensorRT engine (``build --norm-impl``): native node, function body, or plugin
node.

    native  the file unchanged, except for norms that the library can't read or misreads (`normdeploy.norms.norm_table`)
    plugin  our kernels for every norm that they accept
    auto    our kernels if TensorRT has no single fused layer: this project's own ops and RMSNorm; native for
            LayerNormalization, GroupNormalization, InstanceNormalization and BatchNormalization, which TensorRT fuses
            with pointwise neighbors by itself. This choice is derived from how TensorRT works. It was not measured on a
            GPU.

Every new node is proved equal to the nodes that it replaces (`engines.plugin_proof`). If the proof fails, or no kernel
accepts the norm, the norm stays unchanged, and its `Implementation` gives the reason. TensorRT-RTX's ONNX parser
accepts no plugins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from ..contrib.name_clashes import rename_clashing_functions
from ..errors import InputError, RuntimeUnavailable
from ..findings.records import Certificate
from ..graphs.function_ops import inline_calls
from ..graphs.proto_queries import module_path
from ..graphs.region import RefusedError
from ..graphs.shape_completion import ShapedGraph
from ..norms import third_party
from ..norms.function_bodies import VERSION, norm_function_body, rename_colliding_inputs
from ..norms.norm_table import DOMAIN, OURS, STANDARD, NormOp, Version
from ..norms.third_party import function_op_row
from ..option_values import NORM_IMPLS
from ..rewriting.rewrite_ledger import RewriteOptions
from ..rewriting.rewriter import DecidedProposal, Rewriter
from ..storage.onnx_domains import default_domain_opset, is_standard
from ..storage.proto_traversal import attribute_value, iter_subgraphs
from . import native_forms
from .plugin_nodes import PluginPlan, PluginPlanner
from .plugin_plans import plan_plugin, plan_scale_shift, qualified_op_name
from .plugin_proof import propose_plan

# First version of TensorRT with plugins that are compiled ahead of time (aot_impl).
PLUGINS_SINCE = (10, 9)
_IR_OF_FUNCTIONS = 8
STAGE = "engine"
# Name of a norm's form: one of normdeploy's own ops is replaced by the nodes of its function body.
WRITTEN_OUT = "standard nodes"

Writer = Callable[[PluginPlanner, gs.Node], PluginPlan]


@dataclass(frozen=True)
class Implementation:
    """Form of one norm of the file in the engine's network.

    Attributes:
        module: qualified path; "" if the file does not record it.
        op: op of the norm in the file, for example "LayerNormalization" or "normdeploy.AddLayerNorm".
        form: "native node", "function body", "standard nodes", "plugin RMSNorm", or the nodes that replaced it.
        reason: reason for this form; "" if it needs no explanation.
    """

    node: str
    module: str
    op: str
    form: str
    reason: str = ""


TABLE: dict[str, NormOp] = {row.name: row for row in (*STANDARD.values(), *OURS.values()) if row.plugin}
# Op that some version of TensorRT's parser can't read -> function that plans its replacement.
OLDER: dict[str, Writer] = {
    "GroupNormalization": native_forms.to_instance_norm,
    "RMSNormalization": native_forms.to_own_rms_norm,
}


def _parser_supports(row: NormOp, runtime: str, version: Version) -> bool:
    """Check if a runtime's parser reads the op correctly. An unknown version () counts as the newest."""
    return runtime == "tensorrt-rtx" or not version or version >= row.tensorrt


def check_norm_impl(norm_impl: str, runtime: str) -> None:
    """Check the value of --norm-impl for a runtime.

    Raises:
        InputError: the value is unknown, or the runtime accepts no plugins.
    """
    if norm_impl not in NORM_IMPLS:
        raise InputError(f"unknown norm implementation {norm_impl!r}; choose one of {', '.join(NORM_IMPLS)}")
    if norm_impl == "plugin" and runtime == "tensorrt-rtx":
        raise InputError(
            "TensorRT-RTX's ONNX parser supports no plugins, so its engines can't contain our kernels; choose "
            "--norm-impl native or auto, or --library tensorrt"
        )


def plugins_available(norm_impl: str, runtime: str, version: str) -> bool:
    """Check if some norms may become plugins. normdeploy's own ops are useful only if they may become plugins, because
    otherwise the parser inlines their bodies.

    Returns:
        true if the kernels can be used.

    Raises:
        RuntimeUnavailable: plugins are requested, but triton is missing or the library is too old for them.
    """
    return bool(_load_kernels(norm_impl, runtime, parse_version(version))[0])


def parse_version(version: str) -> Version:
    """Parse the numbers of a version.

    Returns:
        numbers, for example (10, 15, 1, 29); () if unknown.
    """
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)  # type: ignore[index]


def needs_native_rewrite(proto: onnx.ModelProto, runtime: str, version: str) -> bool:
    """Check if a native build has to rewrite a norm of the main graph.

    Args:
        proto: the model. Its weights may be missing.

    Returns:
        true if the parser can't read some norm, or misreads it.
    """
    known = parse_version(version)
    opset = default_domain_opset(proto)
    if any(_is_quantizing_norm(n) for n in proto.graph.node):
        return True
    return any(
        _describe_misread(n.op_type, opset, _num_groups(n), runtime, known) for n in proto.graph.node if is_standard(n)
    )


def implement_norms(
    proto: onnx.ModelProto, *, norm_impl: str, runtime: str, version: str = "", sizes: Mapping[str, int] | None = None
) -> tuple[onnx.ModelProto, tuple[Implementation, ...]]:
    """Rewrite every norm of the main graph to the form that ``norm_impl`` selects, ready for TensorRT's parser.

    Args:
        proto: model with weights, as ``norm_optimizer.optimize_norms`` leaves it; every op of the domain ``normdeploy``
            counts as one of normdeploy's own ops. The model is not changed.
        norm_impl: "native", "plugin" or "auto".
        runtime: "tensorrt" or "tensorrt-rtx".
        version: version of the runtime; "" counts as the newest.
        sizes: usual sizes of dynamic dims. If a norm has few but long rows at these sizes, its kernel runs in two
            launches (`normdeploy.engines.plugin_nodes`).

    Returns:
        the model for the parser, and the form of each norm.

    Raises:
        InputError: see ``check_norm_impl``.
        RuntimeUnavailable: plugins are requested, but triton is missing or the library is too old for them.
        GraphError: the model can't be read.
    """
    check_norm_impl(norm_impl, runtime)
    known = parse_version(version)
    ops, lacking = _load_kernels(norm_impl, runtime, known)
    # If a function of the file has the same name as a node's op, TensorRT's parser calls the function for the node,
    # even if the domains differ. So functions with such a name are renamed first, and they keep the new names.
    proto, _ = rename_clashing_functions(proto)
    graph = ShapedGraph(proto)
    build = _ImplementationBuild(
        PluginPlanner(graph, ops, sizes or {}), Rewriter(graph, RewriteOptions()), norm_impl, runtime, known, lacking
    )
    account = []
    for node in graph.nodes:
        if graph.is_alive(node) and (told := _implement_norm(build, node)) is not None:
            account.append(told)
    account += _list_inner_norms(proto)
    made = build.rewriter.build_proto()
    made = inline_calls(made, [n for n in made.graph.node if _is_quantizing_norm(n)])
    return _keep_called_functions(made), tuple(account)


def count_plugins(proto: onnx.ModelProto) -> int:
    """Count the plugin nodes, both ours and those of installed packages.

    Returns:
        number of nodes in the main graph.
    """
    return sum(_is_plugin(n) for n in proto.graph.node)


def list_plugin_packages(proto: onnx.ModelProto) -> list[tuple[str, str]]:
    """List the plugins of installed packages that ``proto`` uses.

    Returns:
        (domain, name) of each plugin, sorted.
    """
    return sorted({(n.domain, n.op_type) for n in proto.graph.node if n.domain != DOMAIN and _is_plugin(n)})


def _load_kernels(norm_impl: str, runtime: str, version: Version) -> tuple[Mapping[str, Any], str]:
    """Return the kernels by name, and the reason if no kernel is available."""
    if norm_impl == "native" or runtime == "tensorrt-rtx":
        return {}, "TensorRT-RTX's ONNX parser supports no plugins" if norm_impl != "native" else ""
    lacking = ""
    if version and version < PLUGINS_SINCE:
        lacking = (
            f"TensorRT {'.'.join(map(str, version[:2]))} does not support kernels compiled ahead of time; 10.9 and "
            "newer do (pip install 'tensorrt>=10.9')"
        )
    else:
        try:
            from normdeploy_plugins.ops import BY_NAME
        except ImportError:
            lacking = "the kernels are compiled with triton, which is not installed; pip install triton"
        else:
            return BY_NAME, ""
    if norm_impl == "plugin":
        raise RuntimeUnavailable(f"can't build with plugins: {lacking}")
    return {}, lacking


@dataclass(frozen=True)
class _ImplementationBuild:
    """State of the rewrite of one file's norms.

    Attributes:
        lacking: reason why kernels are missing; "" if they are available.
    """

    planner: PluginPlanner
    rewriter: Rewriter
    norm_impl: str
    runtime: str
    version: Version
    lacking: str


def _implement_norm(build: _ImplementationBuild, node: gs.Node) -> Implementation | None:
    norm_impl = build.norm_impl
    graph = build.planner.graph
    brought = third_party.third_party_row(node.domain, node.op)
    if brought is None:
        op = qualified_op_name(node)
    else:
        op = brought.name
    row = brought or TABLE.get(op)
    # The record uses the names in the file, so it is prepared before the plan changes the nodes.
    told = partial(Implementation, node.name or node.outputs[0].name, graph.module(node))
    if row is None:
        planned = plan_scale_shift(build.planner, node) if norm_impl == "plugin" else None
        if planned is None or _apply_plan(build, planned):
            return None
        return told("Mul and Add", planned.became)
    reason = ""
    if norm_impl == "plugin" or (norm_impl == "auto" and not row.layer):
        became, reason = _try_plan(build, node, plan_plugin) if not build.lacking else ("", build.lacking)
        if became:
            return told(op, became)
    elif norm_impl == "auto":
        reason = "TensorRT has its own layer for it"
    attributes = graph.attrs(node)
    if not node.domain:
        wrong = _describe_misread(node.op, graph.opset, attributes.get("num_groups", 0), build.runtime, build.version)
    else:
        wrong = ""
    if wrong:
        writer = native_forms.to_layer_norm if attributes.get("num_groups") == 1 else OLDER.get(op)
        became, why = _try_plan(build, node, writer) if writer is not None else ("", "")
        if became:
            return told(op, became, "; ".join(filter(None, (reason, wrong))))
        reason = "; ".join(filter(None, (reason, wrong, why)))
    if row.body:
        form = "function body"
    else:
        form = "native node"
    return told(op, WRITTEN_OUT if row.quantizes else form, reason)


def _describe_misread(op: str, opset: int, groups: int, runtime: str, version: Version) -> str:
    """Describe the fault of a standard node in this runtime; "" if there is none."""
    if op == "GroupNormalization" and groups == 1:
        # TensorRT#4756. TensorRT-RTX 1.7 builds the same network: axes (2, 3), one group. For TensorRT-RTX 1.4 to 1.6,
        # only the layers were compared.
        return "TensorRT treats GroupNormalization with one group as InstanceNormalization"
    row = TABLE.get(op)
    if (
        row is not None
        and not _parser_supports(row, runtime, version)
        and (op != "GroupNormalization" or opset >= row.since)
    ):
        return (
            f"{op} is supported from version {'.'.join(map(str, row.tensorrt))} on; this is "
            f"{'.'.join(map(str, version[:2]))}"
        )
    return ""


def _try_plan(build: _ImplementationBuild, node: gs.Node, writer: Writer) -> tuple[str, str]:
    """Return the new form of a norm and "". If the norm stays unchanged, return "" and the reason."""
    try:
        planned = writer(build.planner, node)
    except RefusedError as kept:
        return "", str(kept)
    why = _apply_plan(build, planned)
    if why:
        return ("", why)
    return (planned.became, "")


def _apply_plan(build: _ImplementationBuild, planned: PluginPlan) -> str:
    """Replace the old nodes by the new nodes if a proof shows that they are equal. Return "" after a replacement, else
    the reason.
    """
    decided = build.rewriter.prove_proposal(propose_plan(build.planner.graph, planned))
    if isinstance(decided, DecidedProposal):
        build.rewriter.apply_decided(STAGE, decided)
        return ""
    if isinstance(decided, Certificate):
        reason = decided.note
    else:
        reason = decided.reason
    return f"it is not proved to compute the same as the file's nodes: {reason}"


def _list_inner_norms(proto: onnx.ModelProto) -> Iterator[Implementation]:
    """Yield the norms in bodies and functions, which stay unchanged."""
    bodies = [
        (n, "a body of If, Loop or Scan") for node in proto.graph.node for g in iter_subgraphs(node) for n in g.node
    ]
    others = [f for f in proto.functions if not third_party.is_managed_op(f.domain, f.name)]
    inside = [(n, f"the function {f.domain}.{f.name}") for f in others for n in f.node]
    for node, place in (*bodies, *inside):
        brought = function_op_row(node.domain, node.op_type)
        if brought is None:
            op = node.op_type
        else:
            op = brought.name
        if third_party.third_party_row(node.domain, node.op_type) or (
            op in TABLE and node.domain in ("", "ai.onnx", DOMAIN)
        ):
            if brought is None:
                form = "native node"
            else:
                form = "function body"
            yield Implementation(
                node.name or node.output[0], module_path(node), op, form, f"it is in {place}, which is not changed"
            )


# ------------------------------------------------------------------ functions


def _keep_called_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Keep the functions that are still called, and change ``proto`` in place.

    TensorRT's parser looks for a function by its name alone, before it looks for a plugin. So a function with a
    plugin's name is renamed.
    """
    nodes = [
        n for holder in (proto.graph, *proto.functions) for node in holder.node for n in (node, *_body_nodes(node))
    ]
    calls = [n for n in nodes if not _is_plugin(n)]
    called = {(n.domain, n.op_type) for n in calls if third_party.is_managed_op(n.domain, n.op_type)}
    kept = [
        f for f in proto.functions if not third_party.is_managed_op(f.domain, f.name) or (f.domain, f.name) in called
    ]
    defined = {(f.domain, f.name) for f in kept}
    opset = default_domain_opset(proto)
    rows = [function_op_row(*op) for op in sorted(called - defined)]
    kept += [norm_function_body(row, opset) for row in rows if row is not None and opset >= row.since]
    kept = [rename_colliding_inputs(f, (n for n in calls if (n.domain, n.op_type) == (f.domain, f.name))) for f in kept]
    taken = {n.op_type for n in nodes if _is_plugin(n)}
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in kept]
    for function in functions:
        if function.name in taken:
            name = f"{function.name}Body"
            while any(f.name == name for f in functions):
                name += "_"
            for call in (c for c in (*calls, *(n for f in functions for n in f.node)) if not _is_plugin(c)):
                if (call.domain, call.op_type) == (function.domain, function.name):
                    call.op_type = name
            function.name = name
    del proto.functions[:]
    proto.functions.extend(functions)
    if functions:
        proto.ir_version = max(proto.ir_version, _IR_OF_FUNCTIONS)
    domains = {
        n.domain for n in nodes if n.domain == DOMAIN or _is_plugin(n) or third_party.is_managed_op(n.domain, n.op_type)
    }
    for domain in sorted(domains - {o.domain for o in proto.opset_import}):
        proto.opset_import.add(domain=domain, version=VERSION)
    return proto


def _body_nodes(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [n for graph in iter_subgraphs(node) for n in graph.node]


def _is_plugin(node: onnx.NodeProto) -> bool:
    if not any(a.name == "plugin_namespace" for a in node.attribute):
        return False
    return node.domain == DOMAIN or third_party.norm_of_plugin(node.domain, node.op_type) is not None


def _is_quantizing_norm(node: onnx.NodeProto) -> bool:
    """Check if a node is one of normdeploy's own ops, contains a norm and QuantizeLinear, and is not a plugin.

    TensorRT-RTX's parser (1.7) reads a function with QuantizeLinear only once; at the second call it fails, because the
    layer's name is already used.
    """
    row = function_op_row(node.domain, node.op_type)
    return row is not None and bool(row.quantizes) and not _is_plugin(node)


def _num_groups(node: onnx.NodeProto) -> int:
    return attribute_value(node, "num_groups", 0)
