"""Load norm ops that installed packages define through the entry points ``normdeploy.norms``.

A package registers them under the domain of its ops, in its pyproject.toml:

    [project.entry-points."normdeploy.norms"]
    acme = "acme.norms:NORMS"

The object is a `GuestNorm`, a list or tuple of them, or a function without parameters that returns one of these.
Everything else follows from the row and the body, as for normdeploy's own ops. The node is recognized in files that
contain it, evaluated in float64, proved and reported, and it stays float32 in a half-precision file. Claims of the
package are not trusted: runtimes run the body, and the certificate is computed from the body. If a package writes a
form that computes another function than the norm, the form is refused like any wrong rewrite.

Such nodes are written only with ``fuse="portable"``, before normdeploy's own ops are tried.
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

# Domains, with their subdomains, that packages may not use: those of ONNX, onnxruntime and its extensions, PyTorch's
# exporters, TensorRT's plugins, and this project.
_TAKEN = ("ai.onnx", "com.microsoft", "com.ms", "org.pytorch", "pkg", "trt", DOMAIN)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_DOMAIN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_ROLES = ("X", "scale", "bias")


@dataclass(frozen=True)
class GuestPlugin:
    """TensorRT kernel of the op: a plugin that the package registers.

    The plugin node has the inputs of the op, in the same order, and the attributes of the op. The package claims that
    the kernel computes the same as the body. This is not proved: ``build`` reports it, and ``verify`` runs the kernel.

    Attributes:
        name: name of the plugin, as its creator registers it.
        namespace: namespace of the plugin.
        version: version of the plugin.
        register: function that registers the plugin. It is called without arguments in the process that builds, before
            TensorRT parses the file.
        attributes: further attributes that the creator needs, as pairs of a name and an int, float or str.
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
        op: name of the op. It must differ from the names of standard ops, normdeploy's own ops and other tools' norm
            ops, because TensorRT's parser ignores the domain.
        kind: kind of norm in reports, such as "ScaleNorm".
        inputs: names of the inputs, in the op's order: first "X", which is normalized, then "scale" and "bias". All
            listed inputs are required. X may have any shape; the form decides the shapes of scale and bias.
        attributes: names of the attributes. A node has all of them. "epsilon" is a float.
        body: nodes of standard ops in ONNX's textual syntax, valid at ``since`` and each newer opset. They compute Y,
            which has the shape and type of X, from the inputs; ``@name`` is an attribute. Alternatively, an
            onnx.FunctionProto.
        form: function of (norm, writer) that writes the norm as nodes and returns ``writer.done()``, or a refusal,
            ``writer.refuse(reason)``. ``norm`` is a `normdeploy.recognition.norm_facts.Norm`, ``writer`` a
            `normdeploy.forms.norm_writer.OpWriter`.
        since: lowest opset for which the body is valid, 17 or above. A file with a lower opset is converted to it.
        centered: True if the norm subtracts the mean.
        plugin: TensorRT kernel of the op, or None.
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
    """Norm op of a package after the check: its row for the norm table, the package's `GuestNorm`, and the package."""

    row: NormOp
    norm: GuestNorm
    extension: Extension


def third_party_row(domain: str | None, op: str) -> NormOp | None:
    """Find the row of a third-party norm op.

    Returns:
        the row, or None for every other node.

    Raises:
        ExtensionError: the package of the domain is broken.
    """
    if domain and not _is_reserved_domain(domain):
        guest = _norms_of_domain(domain).get(op)
    else:
        guest = None
    if guest is not None:
        return guest.row
    return None


def function_op_row(domain: str | None, op: str) -> NormOp | None:
    """Find the row of an op whose body is stored in the file: one of normdeploy's own ops, or a third-party op.

    Returns:
        the row, or None for every other op.
    """
    if domain == DOMAIN:
        return OURS.get(op)
    return third_party_row(domain, op)


def is_managed_op(domain: str | None, op: str) -> bool:
    """Check whether normdeploy writes the function of an op for each opset.

    The functions of all other ops belong to the file and stay unchanged.

    Returns:
        True for everything in this project's domain, and for third-party ops.
    """
    return domain == DOMAIN or third_party_row(domain, op) is not None


def third_party_norm(domain: str | None, op: str) -> ThirdPartyNorm | None:
    """Find a third-party norm op.

    Returns:
        the row and the package's norm, or None for every other node.
    """
    if domain and not _is_reserved_domain(domain):
        return _norms_of_domain(domain).get(op)
    return None


def norm_of_plugin(domain: str | None, name: str) -> ThirdPartyNorm | None:
    """Find the third-party norm op whose kernel is the plugin ``name``.

    Returns:
        the op, or None.
    """
    if not domain or _is_reserved_domain(domain):
        return None
    matching = (
        g for g in _norms_of_domain(domain).values() if g.norm.plugin is not None and g.norm.plugin.name == name
    )
    return next(matching, None)


def all_third_party_norms() -> tuple[ThirdPartyNorm, ...]:
    """Import all packages that define norm ops and load the ops.

    Returns:
        the ops in the order of their domains.

    Raises:
        ExtensionError: a package is broken, or two packages have ops of the same name.
    """
    guests: dict[str, ThirdPartyNorm] = {}
    for name in dict.fromkeys(e.name for e in extensions.installed_extensions(extensions.NORMS)):
        for one in _norms_of_domain(name).values():
            other = guests.setdefault(one.row.op, one)
            if other is not one:
                raise one.extension.make_error(
                    f"has an op {one.row.op!r}, but the package {other.row.package!r} has an op of the same "
                    "name, and TensorRT looks up ops by name only"
                )
    return tuple(guests.values())


def _is_reserved_domain(domain: str) -> bool:
    """Return True for a domain that no package may use."""
    return any(domain == taken or domain.startswith(f"{taken}.") for taken in _TAKEN)


def _norms_of_domain(domain: str) -> Mapping[str, ThirdPartyNorm]:
    extension = extensions.find_extension(extensions.NORMS, domain)
    if extension is None:
        return {}
    return _load_norms(extension)


@lru_cache(maxsize=64)
def _load_norms(extension: Extension) -> Mapping[str, ThirdPartyNorm]:
    """Load and check the norms of a package, by op name."""
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
            f"has the domain {domain!r}, which is reserved: the name of the entry point is the domain"
        )
    if not _DOMAIN.fullmatch(domain):
        raise extension.make_error(f"has the domain {domain!r}; use only letters, digits, _ and dots")
    guests: dict[str, ThirdPartyNorm] = {}
    for norm in several:
        if norm.op in guests:
            raise extension.make_error(f"has two ops named {norm.op!r}")
        guests[norm.op] = ThirdPartyNorm(build_row(extension, norm), norm, extension)
    return guests


def build_row(extension: Extension, norm: GuestNorm) -> NormOp:
    """Build the row of a package's norm op and check its body.

    Returns:
        the row.

    Raises:
        ExtensionError: the norm breaks the contract, or its body can't be read or is incorrect.
    """
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
    """Describe how the norm breaks the contract; None if it is valid."""
    words = [norm.op, norm.kind, *_as_word_list(norm.inputs), *_as_word_list(norm.attributes)]
    if not all(isinstance(word, str) and _NAME.fullmatch(word) for word in words):
        return f": its names are {words!r:.160}; each must consist of letters, digits and _"
    if not isinstance(norm.inputs, tuple) or norm.inputs != _ROLES[: len(norm.inputs)] or not norm.inputs:
        return f": its inputs are {norm.inputs!r}; expected a tuple: (X), (X, scale) or (X, scale, bias)"
    if not isinstance(norm.attributes, tuple) or len({*norm.attributes}) < len(norm.attributes):
        return f": its attributes are {norm.attributes!r}; expected a tuple of distinct names"
    if owner := _owner_of_name(norm.op):
        return f": that name belongs to {owner}; choose another"
    if not isinstance(norm.body, str | onnx.FunctionProto):
        return f": its body is a {type(norm.body).__name__}; expected a str or an onnx.FunctionProto"
    if not callable(norm.form):
        return f": its form is a {type(norm.form).__name__}; expected a function (norm, writer)"
    if type(norm.since) is not int or not 17 <= norm.since <= onnx.defs.onnx_opset_version():
        return f": its opset is {norm.since!r}; expected 17 to {onnx.defs.onnx_opset_version()}"
    if norm.plugin is not None and not isinstance(norm.plugin, GuestPlugin):
        return f": its plugin is a {type(norm.plugin).__name__}; expected a GuestPlugin"
    return None


def _as_word_list(names: object) -> list[Any]:
    if isinstance(names, tuple):
        return [*names]
    return []


def _owner_of_name(op: str) -> str | None:
    """Return the owner of an op name, None if it is free."""
    if any(schema.name == op for schema in _all_schemas()):
        return "ONNX"
    return next((str(r.owner) for r in ROWS if r.op == op), None)


@lru_cache
def _all_schemas() -> tuple[onnx.defs.OpSchema, ...]:
    return tuple(onnx.defs.get_all_schemas())


def _describe_body_error(row: NormOp, function: onnx.FunctionProto) -> str | None:
    """Describe the error in a body; None if it is correct."""
    wanted = (row.op, row.domains[0], row.inputs, row.outputs, {*row.attributes})
    held = (function.name, function.domain, tuple(function.input), tuple(function.output), {*function.attribute})
    for what, mine, its in zip(("name", "domain", "inputs", "outputs", "attributes"), wanted, held, strict=True):
        if mine != its:
            return f"has the {what} {its!r}, but the op has {mine!r}"
    if function.attribute_proto:
        return (
            f"has a default for {function.attribute_proto[0].name!r}; remove it, because each node passes every "
            "attribute"
        )
    made = {*function.input}
    for node in function.node:
        if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=row.since, domain=""):
            return (
                f"calls {node.domain + '.' if node.domain else ''}{node.op_type}, which is not a standard "
                f"op of opset {row.since}"
            )
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            return f"has control flow ({node.op_type})"
        if strange := [i for i in node.input if i and i not in made]:
            return f"reads {strange[0]!r}, which no earlier node computes"
        if strange := [a.ref_attr_name for a in node.attribute if a.ref_attr_name and a.ref_attr_name not in wanted[4]]:
            return f"reads the attribute {strange[0]!r}, which the op does not have"
        made |= {*node.output}
    if strange := [o for o in function.output if o not in made]:
        return f"does not compute {strange[0]!r}"
    return None
