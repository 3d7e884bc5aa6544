"""Norm ops that installed packages bring: the entry points ``normdeploy.norms``, and how they are looked at.

A package names them by the domain of its ops, in its pyproject.toml:

    [project.entry-points."normdeploy.norms"]
    acme = "acme.norms:NORMS"

The object is a `GuestNorm`, several in a list or tuple, or a function without parameters that returns these. From the
row and the body all else follows, as for our own ops: the node is recognized in files that have it, evaluated in
float64, proved, kept in float32 in half precision, told of in reports. Nothing that the package says is believed: the
body is what the file runs, and the certificate is computed from it; a form that writes something else than the norm
that it was given is refused like any wrong rewrite.

Such nodes are written with ``fuse="portable"`` alone, before our own ops are tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import onnx

from .. import extensions
from ..extensions import Extension
from . import function_bodies
from .norm_op import DOMAIN, NormOp, OpOwner
from .norm_table import OURS, ROWS

# of ONNX, onnxruntime and its extensions, PyTorch's exporters, TensorRT's plugins, and ours
_TAKEN = ("ai.onnx", "com.microsoft", "com.ms", "org.pytorch", "pkg", "trt", DOMAIN)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_DOMAIN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_ROLES = ("X", "scale", "bias")


@dataclass(frozen=True)
class GuestPlugin:
    """The op's kernel in TensorRT: a plugin that the package registers there.

    The plugin node has the op's inputs, in their order, and its attributes. That the kernel computes what the body
    says is the package's claim, which nothing here proves: ``build`` says so in its account, and ``verify`` runs it.

    Attributes:
        name: of the plugin, as its creator registers it.
        namespace: of the plugin.
        version: of the plugin.
        register: called without arguments, in the process that builds, before TensorRT parses the file.
        attributes: more of them, which the creator asks for: pairs of a name and an int, float or str.
    """

    name: str
    namespace: str
    version: str = "1"
    register: Callable[[], object] | None = None
    attributes: tuple[tuple[str, int | float | str], ...] = ()


@dataclass(frozen=True)
class GuestNorm:
    """One norm op of a package.

    Attributes:
        op: its name: none of the standard's, of ours or of another tool's norm op (TensorRT's parser goes by the name
            alone).
        kind: what reports call the norm, such as "ScaleNorm".
        inputs: what they mean, in the op's order: "X" first, which is normalized, then "scale" and "bias". All must be
            given. X may have any shape; the others' are the form's affair.
        attributes: their names; a node has all of them. One called "epsilon" is a float.
        body: nodes of standard ops in ONNX's textual syntax, valid at ``since`` and each newer opset, that compute Y,
            of X's shape and type, from the inputs; ``@name`` is an attribute. Or a whole onnx.FunctionProto.
        form: (norm, writer) -> the norm as nodes (``writer.done()``), or why it is none of this op
            (``writer.refuse(reason)``). ``norm`` is a `normdeploy.recognition.norm_facts.Norm`, ``writer`` a
            `normdeploy.forms.norm_writer.OpWriter`.
        since: the lowest opset for which the body holds, 17 or above. A file of a lower one is raised to it.
        centered: whether it takes the mean off.
        plugin: its kernel in TensorRT, where there is one.
    """

    op: str
    kind: str
    inputs: tuple[str, ...]
    attributes: tuple[str, ...]
    body: str | onnx.FunctionProto
    form: Callable[[Any, Any], Any]
    since: int = 18
    centered: bool = True
    plugin: GuestPlugin | None = None


@dataclass(frozen=True)
class ThirdPartyNorm:
    """A norm op that was looked at: its row in the table of norm ops, and what its package says beside it."""

    row: NormOp
    norm: GuestNorm
    extension: Extension


def third_party_row(domain: str | None, op: str) -> NormOp | None:
    """The row of a norm op that a package brings; None of every other node.

    Raises:
        ExtensionError: the package that brings the domain is broken.
    """
    if domain and not _is_reserved_domain(domain):
        guest = _norms_of_domain(domain).get(op)
    else:
        guest = None
    if guest is not None:
        return guest.row
    return None


def function_op_row(domain: str | None, op: str) -> NormOp | None:
    """The row of an op whose body travels in the file: one of ours, or a package's."""
    if domain == DOMAIN:
        return OURS.get(op)
    return third_party_row(domain, op)


def is_managed_op(domain: str | None, op: str) -> bool:
    """Whether a node or function is none of the file's own, but one that is written anew for each opset: all of our
    domain, and the ops of packages."""
    return domain == DOMAIN or third_party_row(domain, op) is not None


def third_party_norm(domain: str | None, op: str) -> ThirdPartyNorm | None:
    """As `row`, with what the package says beside it."""
    if domain and not _is_reserved_domain(domain):
        return _norms_of_domain(domain).get(op)
    return None


def norm_of_plugin(domain: str | None, name: str) -> ThirdPartyNorm | None:
    """The norm op of a package whose kernel is a plugin of that name, in the domain in which its node is written."""
    if not domain or _is_reserved_domain(domain):
        return None
    matching = (
        g for g in _norms_of_domain(domain).values() if g.norm.plugin is not None and g.norm.plugin.name == name
    )
    return next(matching, None)


def all_third_party_norms() -> tuple[ThirdPartyNorm, ...]:
    """All that packages bring, in the order of their domains; their packages are imported.

    Raises:
        ExtensionError: one is broken, or two have ops of one name.
    """
    guests: dict[str, ThirdPartyNorm] = {}
    for name in dict.fromkeys(e.name for e in extensions.installed_extensions(extensions.NORMS)):
        for one in _norms_of_domain(name).values():
            other = guests.setdefault(one.row.op, one)
            if other is not one:
                raise one.extension.make_error(
                    f"has an op {one.row.op!r}, and so has the package {other.row.package!r}; TensorRT goes by the name"
                    " alone"
                )
    return tuple(guests.values())


def _is_reserved_domain(domain: str) -> bool:
    return any(domain == taken or domain.startswith(f"{taken}.") for taken in _TAKEN)


def _norms_of_domain(domain: str) -> Mapping[str, ThirdPartyNorm]:
    extension = extensions.find_extension(extensions.NORMS, domain)
    if extension is None:
        return {}
    return _load_norms(extension)


@lru_cache(maxsize=64)
def _load_norms(extension: Extension) -> Mapping[str, ThirdPartyNorm]:
    brought: Any = extension.load()
    if callable(brought) and not isinstance(brought, GuestNorm):
        brought = extension.run("fails", brought)
    if isinstance(brought, GuestNorm):
        several = [brought]
    else:
        several = brought
    if not isinstance(several, list | tuple) or not all(isinstance(norm, GuestNorm) for norm in several):
        raise extension.make_error(f"is {brought!r:.80}, not a GuestNorm or a list of them")
    domain = extension.name
    if _is_reserved_domain(domain):
        raise extension.make_error(
            f"has the domain {domain!r}, which is taken: the name of the entry point is the domain"
        )
    if not _DOMAIN.fullmatch(domain):
        raise extension.make_error(f"has the domain {domain!r}; one is of letters, digits, _ and dots")
    guests: dict[str, ThirdPartyNorm] = {}
    for norm in several:
        if norm.op in guests:
            raise extension.make_error(f"has two ops {norm.op!r}")
        guests[norm.op] = ThirdPartyNorm(build_row(extension, norm), norm, extension)
    return guests


def build_row(extension: Extension, norm: GuestNorm) -> NormOp:
    if wrong := _describe_contract_error(norm):
        raise extension.make_error(f"has an op {norm.op!r:.80}{wrong}")
    if isinstance(norm.body, str):
        text = norm.body
    else:
        text = norm.body.SerializeToString(deterministic=True)
    if norm.plugin is not None:
        plugin = norm.plugin.name
    else:
        plugin = ""
    made = NormOp(
        norm.op,
        OpOwner.GUEST,
        norm.kind,
        norm.inputs,
        norm.attributes,
        since=norm.since,
        domains=(extension.name,),
        centered=norm.centered,
        plugin=plugin,
        tensorrt=(9, 0),
        body=text,
        package=extension.package,
    )
    function = extension.run(
        f"has an op {norm.op!r} whose body can't be read", function_bodies.norm_function_body, made, norm.since
    )
    if wrong := _describe_body_error(made, function):
        raise extension.make_error(f"has an op {norm.op!r} whose body {wrong}")
    return made


def _describe_contract_error(norm: GuestNorm) -> str | None:
    """Describe the breach of the contract, None if it is kept."""
    words = [norm.op, norm.kind, *_as_word_list(norm.inputs), *_as_word_list(norm.attributes)]
    if not all(isinstance(word, str) and _NAME.fullmatch(word) for word in words):
        return f": its names are {words!r:.160}; each is a word of letters, digits and _"
    if not isinstance(norm.inputs, tuple) or norm.inputs != _ROLES[: len(norm.inputs)] or not norm.inputs:
        return f": its inputs are {norm.inputs!r}; they are (X), (X, scale) or (X, scale, bias), a tuple of texts"
    if not isinstance(norm.attributes, tuple) or len({*norm.attributes}) < len(norm.attributes):
        return f": its attributes are {norm.attributes!r}; they are a tuple of different names"
    if owner := _owner_of_name(norm.op):
        return f": that name is taken, {owner} has it; choose another"
    if not isinstance(norm.body, str | onnx.FunctionProto):
        return f": its body is a {type(norm.body).__name__}; it is a text or an onnx.FunctionProto"
    if not callable(norm.form):
        return f": its form is a {type(norm.form).__name__}; it is a function (norm, writer)"
    if type(norm.since) is not int or not 17 <= norm.since <= onnx.defs.onnx_opset_version():
        return f": its opset is {norm.since!r}; it is 17 to {onnx.defs.onnx_opset_version()}"
    if norm.plugin is not None and not isinstance(norm.plugin, GuestPlugin):
        return f": its plugin is a {type(norm.plugin).__name__}; it is a GuestPlugin"
    return None


def _as_word_list(names: object) -> list[Any]:
    if isinstance(names, tuple):
        return [*names]
    return []


def _owner_of_name(op: str) -> str | None:
    """Return the owner of an op name, None if nobody owns it."""
    if any(schema.name == op for schema in _all_schemas()):
        return "ONNX"
    return next((str(r.owner) for r in ROWS if r.op == op), None)


@lru_cache
def _all_schemas() -> tuple[onnx.defs.OpSchema, ...]:
    return tuple(onnx.defs.get_all_schemas())


def _describe_body_error(row: NormOp, function: onnx.FunctionProto) -> str | None:
    """Describe the error in a body, None if it is correct."""
    wanted = (row.op, row.domains[0], row.inputs, row.outputs, {*row.attributes})
    held = (function.name, function.domain, tuple(function.input), tuple(function.output), {*function.attribute})
    for what, mine, its in zip(("name", "domain", "inputs", "outputs", "attributes"), wanted, held, strict=True):
        if mine != its:
            return f"has the {what} {its!r}, and the op {mine!r}"
    if function.attribute_proto:
        return f"has a default for {function.attribute_proto[0].name!r}; nodes give every attribute"
    made = {*function.input}
    for node in function.node:
        if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=row.since, domain=""):
            return (
                f"calls {node.domain + '.' if node.domain else ''}{node.op_type}, no standard op of opset {row.since}"
            )
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            return f"has control flow ({node.op_type})"
        if strange := [i for i in node.input if i and i not in made]:
            return f"reads {strange[0]!r}, which nothing before it makes"
        if strange := [a.ref_attr_name for a in node.attribute if a.ref_attr_name and a.ref_attr_name not in wanted[4]]:
            return f"reads the attribute {strange[0]!r}, which the op has not"
        made |= {*node.output}
    if strange := [o for o in function.output if o not in made]:
        return f"does not make {strange[0]!r}"
    return None
