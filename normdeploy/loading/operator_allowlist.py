"""Check with allowlists that the nodes of an untrusted program only call operators that compute on tensors.

torch also registers operators that end the process (``prim.rpc_async``), write files (``aten.save``) or access the
network (``c10d``), and each of its releases adds more. So the target of a node must be an operator of torch's
dispatcher. The operator's namespace must be listed here, or a module that the user named must have registered it.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .. import extensions
from .model_factories import import_user_module
from .shape_expressions import split_words

_OF_TENSORS = split_words("aten prims quantized_decomposed")
_HIGHER_ORDER = split_words(
    "cond while_loop scan associative_scan map_impl map wrap_with_set_grad_enabled wrap_with_autocast wrap strict_mode"
    " hints_wrapper invoke_subgraph tag_activation_checkpoint out_dtype flex_attention auto_functionalized"
    " auto_functionalized_v2"
)
# Namespaces that torch itself registers, when it is imported or in modules that it imports later. They do not count as
# a user's namespaces even if they appear while a user's module is imported.
OF_TORCH = split_words(
    "aten prim prims quantized _quantized quantized_decomposed quantization sparse onednn mkl mkldnn mkldnn_prepacked"
    " c10d c10d_functional _c10d_functional _c10d_functional_autograd _dtensor fsdp symm_mem profiler inductor"
    " inductor_prims _inductor_test static_runtime _test export rpc streams debugprims debug_mode_ops rngprims _native"
    " flex_lib onnx onnx_symbolic higher_order"
)
# Operators of aten that do not compute: from_file maps a file into memory, _print writes to the terminal.
_NOT_COMPUTED = split_words("from_file _print")
# Module of torch that registers the operators of PT2E's quantized programs.
_QUANTIZED = "torch.ao.quantization.fx._decomposed"

_SYMBOLIC = re.compile(
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift|getitem)"
    r"|math\.(trunc|ceil|floor|sqrt)|torch\.(sym_\w+|_sym_sqrt)"
)
_OPERATOR = re.compile(r"torch\.ops\.(?P<namespace>\w+)\.(?P<name>\w+)\.(?P<overload>\w+)")
_HIGHER = re.compile(r"torch\.ops\.higher_order\.(?P<name>\w+)")


@dataclass(frozen=True)
class OperatorAllowlist:
    """Operators that a node may call.

    Attributes:
        own: namespaces that modules named by the user registered, or that installed packages translate.
        known: target -> whether it is allowed, for targets that were already checked.
    """

    own: frozenset[str] = frozenset()
    # A program names the same few targets many times, so decisions are cached.
    known: dict[str, bool] = field(default_factory=dict)

    def is_allowed(self, target: str) -> bool:
        """Return whether a node may have this target.

        Returns:
            True for arithmetic on sizes and for an allowed operator on tensors.
        """
        if target not in self.known:
            self.known[target] = self._decide_target(target)
        return self.known[target]

    def _decide_target(self, target: str) -> bool:
        if _SYMBOLIC.fullmatch(target):
            return True
        if match := _HIGHER.fullmatch(target):
            return match["name"] in _HIGHER_ORDER
        match = _OPERATOR.fullmatch(target)
        if match is None or match["namespace"] not in _OF_TENSORS | self.own or match["name"] in _NOT_COMPUTED:
            return False
        if match["namespace"] == "quantized_decomposed":
            _register_quantized_ops()
        return _is_registered(match["namespace"], match["name"], match["overload"])


def _is_registered(namespace: str, name: str, overload: str) -> bool:
    """Return whether the dispatcher has the operator. torch.ops also finds operators that only TorchScript has, such as
    ``aten.save``.
    """
    try:
        torch._C._dispatch_find_schema_or_throw(f"{namespace}::{name}", overload if overload != "default" else "")
    except RuntimeError:
        return False
    return True


def _register_quantized_ops() -> None:
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(_QUANTIZED)


def _allowed_namespaces() -> frozenset[str]:
    return frozenset(name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names())


def import_operators(imports: Sequence[str]) -> OperatorAllowlist:
    """Import the modules that the user named, and allow the operators that they register.

    Operators that installed packages translate are allowed too. If one of the modules was imported earlier, its
    operators can't be determined. Then all namespaces except torch's own are allowed.

    Returns:
        The allowlist.

    Raises:
        InputError: a module can't be imported.
    """
    before = frozenset() if any(name in sys.modules for name in imports) else _allowed_namespaces()
    for name in imports:
        import_user_module(name, "--import")
    registered = _allowed_namespaces() - before if imports else frozenset()
    installed = {extension.name for extension in extensions.installed_extensions(extensions.TRANSLATIONS)}
    return OperatorAllowlist((registered | installed) - OF_TORCH)
