"""Let ``len(x)`` of a tensor be a dynamic size while torch traces a model.

Python's ``len`` returns an int, so a traced ``len(x)`` fixes the first dim of x to the example's size, although
``x.shape[0]`` does not. The model's modules of Python code get a ``len`` that returns ``x.shape[0]``.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def _symbolic_len(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    return builtins.len(value)


@contextlib.contextmanager
def trace_len_symbolically(module: nn.Module) -> Iterator[None]:
    """Give the code of ``module`` a ``len`` that keeps dynamic sizes; torch's own code and code with a ``len`` of its
    own are left alone.
    """
    changed = [scope for scope in _code_scopes(module) if "len" not in scope]
    for scope in changed:
        scope["len"] = _symbolic_len
    try:
        yield
    finally:
        for scope in changed:
            del scope["len"]


def _code_scopes(module: nn.Module) -> list[dict[str, Any]]:
    """List the global names of all Python modules that define a part of ``module``, each once."""
    scopes: dict[int, dict[str, Any]] = {}
    for kind in {base for part in module.modules() for base in type(part).__mro__}:
        if kind is object or kind.__module__.partition(".")[0] in ("builtins", "torch"):
            continue
        forward = inspect.unwrap(kind.__dict__.get("forward", kind))
        for scope in (vars(sys.modules.get(kind.__module__, torch)), getattr(forward, "__globals__", {})):
            if scope.get("__name__") == kind.__module__:
                scopes[id(scope)] = scope
    return list(scopes.values())
