"""Rename model-local functions that have the name of a known op while the passes run.

A model-local function and an op may have the same domain and name. onnx.proto lets each runtime decide which of the two
is used "in case of any conflicts". If onnxruntime 1.31 has a kernel for this domain and name, it runs the kernel
(com.microsoft.Gelu, every standard op). Otherwise it runs the function's body. An example is
com.microsoft.SimplifiedLayerNormalization, because onnxruntime has this op only in the default domain. So the meaning
of such a node is uncertain: the node is neither read as the op nor replaced by the body.

`rename_clashing_functions` hides the name before recognition. `RenamedFunctions.restore_names` restores it, so that the
file keeps its author's names.
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

# Domains in which every name may belong to an op.
_OWNED = (*STANDARD, "com.microsoft")
# Names of the ops that the passes know, without domains, because some tables look up the name alone.
_MEANT = frozenset({op for _, op in (*evaluator.OPS, *TABLE)} | OURS.keys())

# domain, name, overload
Key = tuple[str, str, str]


@dataclass(frozen=True)
class RenamedFunctions:
    """Functions that were renamed.

    Attributes:
        names: key of each renamed function, which contains the new name -> name of the function in the file.
    """

    names: Mapping[Key, str]

    def restore_names(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Restore the names of the file in ``proto``, in place.

        Returns:
            ``proto``.
        """
        if self.names:
            for function in proto.functions:
                function.name = self.names.get(function_key(function), function.name)
            for node in _all_nodes(proto):
                node.op_type = self.names.get(function_key(node), node.op_type)
        return proto

    def written_clash(self, proto: onnx.ModelProto) -> str | None:
        """Find a function whose original name is used by a node that was written after `rename_clashing_functions`.

        `restore_names` would turn that node into a call of the function. A conversion to another opset can cause this
        too, because the new opset has other standard names.

        Returns:
            the name, or None if no node clashes.
        """
        taken = {(domain, name, overload) for (domain, _, overload), name in self.names.items()}
        if not taken:
            return None
        return next((node.op_type for node in _all_nodes(proto) if function_key(node) in taken), None)

    @property
    def standard_clash(self) -> str | None:
        """Return the name of a function in ONNX's own domain; None if there is none."""
        return next((name for (domain, _, _), name in self.names.items() if domain == ""), None)


def function_key(named: onnx.NodeProto | onnx.FunctionProto) -> Key:
    """Build the key by which a node calls a function.

    Returns:
        domain ("" for ONNX's), name and overload.
    """
    if isinstance(named, onnx.NodeProto):
        name = named.op_type
    else:
        name = named.name
    return "" if named.domain in STANDARD else named.domain, name, named.overload


def is_clashing(function: onnx.FunctionProto) -> bool:
    """Check whether a function's name may be read as that of an op.

    Functions of own and third-party ops are checked by their bodies (`graphs.function_ops`), except for overloads,
    which this project never writes.

    Returns:
        True if the name may be read as an op.
    """
    if is_managed_op(function.domain, function.name):
        return bool(function.overload)
    return function.domain in _OWNED or function.name in _MEANT or onnx.defs.has(function.name, domain="")


def rename_clashing_functions(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, RenamedFunctions]:
    """Rename the functions of ``proto`` that shadow an op.

    Returns:
        a copy, or ``proto`` itself if no function shadows an op; and the renamed functions.
    """
    shadowed = [function_key(f) for f in proto.functions if is_clashing(f)]
    if not shadowed:
        return proto, RenamedFunctions({})
    out = copy_model(proto)
    taken = {f.name for f in out.functions} | {n.op_type for n in _all_nodes(out)}
    fresh: dict[Key, str] = {}
    for domain, name, overload in shadowed:
        # Reports may show the new name, so it is readable. No op has a name of this form.
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
    """Yield every node of the graph, the functions, and the bodies in them."""
    for holder in (proto.graph, *proto.functions):
        for node in holder.node:
            yield node
            yield from (inner for body in iter_subgraphs(node) for inner in body.node)
