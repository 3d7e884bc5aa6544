"""Model-local functions that are named like a known op. They are renamed while the passes run, so that nothing takes
one for the op.

onnx.proto leaves it to each runtime which of the two counts, "in case of any conflicts" between a model-local function
and an op of that domain and name. onnxruntime 1.31 runs its kernel where it has one (com.microsoft.Gelu, every standard
op) and the function's body where it has none (com.microsoft.SimplifiedLayerNormalization, which is an op of the default
domain there). So the meaning of such a node is not
certain: it is neither read as the op nor replaced by the body. `rename_clashing_functions` hides the name before
anything is recognised, and `RenamedFunctions.restore_names` puts it back, so that the file still says what its author
wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx

from ..evaluate import evaluator
from ..norms.norm_table import OURS
from ..norms.third_party import is_managed_op
from ..proof.contrib_definitions import TABLE
from ..storage.onnx_domains import STANDARD
from ..storage.proto_traversal import copy_model, iter_subgraphs

# whose every name has an owner
_OWNED = (*STANDARD, "com.microsoft")
# some tables go by the name alone, so the domain doesn't matter
_MEANT = frozenset({op for _, op in (*evaluator.OPS, *TABLE)} | OURS.keys())

# domain, name, overload
Key = tuple[str, str, str]


@dataclass(frozen=True)
class RenamedFunctions:
    """``names``: the key of each function that was renamed, with the name that stands now -> its name in the file."""

    names: Mapping[Key, str]

    def restore_names(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """``proto``, changed in place, with the names of the file."""
        if self.names:
            for function in proto.functions:
                function.name = self.names.get(function_key(function), function.name)
            for node in _all_nodes(proto):
                node.op_type = self.names.get(function_key(node), node.op_type)
        return proto

    def written_clash(self, proto: onnx.ModelProto) -> str | None:
        """Return the function whose name a node bears that was written since `rename_clashing_functions`; None where
        there is none. `restore_names` would make that node a call.

        A file that came to another opset may have it without a new node: the standard names of that opset are others.
        """
        taken = {(domain, name, overload) for (domain, _, overload), name in self.names.items()}
        if not taken:
            return None
        return next((node.op_type for node in _all_nodes(proto) if function_key(node) in taken), None)

    @property
    def standard_clash(self) -> str | None:
        """The name of a function that is in ONNX's own domain; None where there is none."""
        return next((name for (domain, _, _), name in self.names.items() if domain == ""), None)


def function_key(named: onnx.NodeProto | onnx.FunctionProto) -> Key:
    """What a node calls, or a function is called by."""
    if isinstance(named, onnx.NodeProto):
        name = named.op_type
    else:
        name = named.name
    return "" if named.domain in STANDARD else named.domain, name, named.overload


def is_clashing(function: onnx.FunctionProto) -> bool:
    """Whether a function's name may be read as that of an op.

    Those of our own domain and of packages' ops are judged by their bodies (`graphs.function_ops`), but for overloads,
    which we never write.
    """
    if is_managed_op(function.domain, function.name):
        return bool(function.overload)
    return function.domain in _OWNED or function.name in _MEANT or onnx.defs.has(function.name, domain="")


def rename_clashing_functions(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, RenamedFunctions]:
    """``proto`` with other names for the functions that shadow an op: itself where none does, else a copy."""
    shadowed = [function_key(f) for f in proto.functions if is_clashing(f)]
    if not shadowed:
        return proto, RenamedFunctions({})
    out = copy_model(proto)
    taken = {f.name for f in out.functions} | {n.op_type for n in _all_nodes(out)}
    fresh: dict[Key, str] = {}
    for domain, name, overload in shadowed:
        # readable, for it may come into a report; no op is called so
        private = f"{name} of the file"
        while private in taken:
            private += "'"
        taken.add(private)
        fresh[domain, name, overload] = private
    for function in out.functions:
        function.name = fresh.get(function_key(function), function.name)
    for node in _all_nodes(out):
        node.op_type = fresh.get(function_key(node), node.op_type)
    return out, RenamedFunctions(
        {(domain, private, overload): name for (domain, name, overload), private in fresh.items()}
    )


def _all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the graph, the functions, and the bodies in them."""
    for holder in (proto.graph, *proto.functions):
        for node in holder.node:
            yield node
            yield from (inner for body in iter_subgraphs(node) for inner in body.node)
