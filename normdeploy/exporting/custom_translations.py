"""Collect translations of custom operators to ONNX. They come from the caller, from installed packages and from this
project.

``torch.onnx.export`` takes the collected table as ``custom_translation_table``. A package with operators of the
namespace ``acme`` (``torch.ops.acme.*``) registers its table in its pyproject.toml:

    [project.entry-points."normdeploy.translations"]
    acme = "acme.onnx:TABLE"

TABLE maps operators, written ``torch.ops.acme.norm.default`` or "acme::norm", to onnxscript functions. An operator may
have several functions: the first function that fits is used. TABLE may also be a function without parameters that
returns such a mapping.

`normdeploy.extensions` describes how packages are found and trusted. A package's code runs only if the model has
operators of the package's namespace. No other content of a model file can cause it to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import extensions
from ..errors import InputError
from ..loading import recurrent_ops
from . import all_true_translation, atan2_translation, attention_translation, log_translations, quantize_translations
from .repeat_interleave_translation import TRANSLATIONS

# Namespaces of torch's and this project's operators. An installed package may not redefine these operators.
_TORCHS = frozenset({"aten", "prim", "prims", "higher_order", "normdeploy"})

Table = Mapping[Any, Any]


def translation_table(program: torch.export.ExportedProgram, given: Table | None) -> dict[Any, Any]:
    """Build the table for ``program``.

    The table contains, in this order, this project's translations, translations of installed packages for the program's
    operators, and ``given``. Later entries override earlier entries.

    Returns:
        operator -> function, or a list of functions.

    Raises:
        InputError: a key is not an operator of torch, or a value is not a function.
        ExtensionError: a package's table can't be loaded.
    """
    wanted = sorted(_operator_namespaces(program) - _TORCHS)
    ours = (
        TRANSLATIONS,
        all_true_translation.TRANSLATIONS,
        atan2_translation.TRANSLATIONS,
        recurrent_ops.TRANSLATIONS,
        log_translations.TRANSLATIONS,
        attention_translation.attention_translations(program),
    )
    table: dict[Any, Any] = {key: function for each in ours for key, function in each.items()}
    if quantize_translations.NAMESPACE in wanted:
        table |= quantize_translations.quantize_translations()
    for extension in (e for e in extensions.installed_extensions(extensions.TRANSLATIONS) if e.name in wanted):
        table |= _validate_table(_load_table(extension), f"the table of {extension.value}")
    return table | _validate_table(given or {}, "custom_translation_table")


def _operator_namespaces(program: torch.export.ExportedProgram) -> set[str]:
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)}


def _load_table(extension: extensions.Extension) -> Table:
    table = extension.load()
    if callable(table) and not isinstance(table, Mapping):
        table = extension.run("fails", table)
    if not isinstance(table, Mapping):
        raise extension.make_error(f"is a {type(table).__name__}, not a mapping of operators to onnxscript functions")
    return table


def _validate_table(table: Table, name: str) -> dict[Any, Any]:
    """Check the types of a table and resolve its keys to overloads."""
    if not isinstance(table, Mapping):
        raise InputError(
            f"{name} is a {type(table).__name__}, not a mapping of torch operators to onnxscript functions"
        )
    checked = {}
    for key, functions in table.items():
        if isinstance(functions, list | tuple):
            several = functions
        else:
            several = (functions,)
        if not several or not all(map(callable, several)):
            raise InputError(
                f"{name} translates {key} by {functions!r}; pass an onnxscript function, or a list of them"
            )
        checked[_resolve_operator(key, name)] = functions
    return checked


def _resolve_operator(key: Any, name: str) -> Any:
    """Resolve a key to an operator's overload. The key is an overload, an operator (for its default overload), or a
    text such as "acme::norm" or "acme::norm.Tensor".
    """
    if isinstance(key, torch._ops.OpOverloadPacket):
        if "default" in key.overloads():
            return key.default
        return getattr(key, key.overloads()[0])
    if isinstance(key, str):
        namespace, _, rest = key.partition("::")
        operator, _, overload = rest.partition(".")
        if namespace and operator:
            packet = getattr(getattr(torch.ops, namespace), operator, None)
        else:
            packet = None
        overloaded = getattr(packet, overload or "default", None)
        if overloaded is None:
            raise InputError(
                f"{name} names the operator {key!r}, which is not registered; write namespace::name, and import the "
                "module that registers it"
            )
        return overloaded
    if not callable(key):
        raise InputError(
            f"{name} has the key {key!r}; use an operator such as torch.ops.acme.norm.default, or its name 'acme::norm'"
        )
    return key
