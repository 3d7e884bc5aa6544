"""Compute the results in a model that depend only on parameters, as exporters do when they fold constants.

An example is a discretized state matrix, exp(-exp(A_log) · step), which is not a simple function of one parameter. The
trace of the model contains its formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...inputs.array_conversion import to_numpy
from ...model import LoadedModel
from ...runtimes.torch_runners import lifted_values
from ...types import Array

# Maximum number of elements of a result that is compared with weights.
_LARGEST = 2**22
# Allowed error in units of roundoff of the model's type. It is large, because the operations may include exponentials.
_ROUNDINGS = 64


def iter_constant_results(model: LoadedModel) -> Iterator[tuple[str, Array]]:
    """Run the nodes of the trace that depend on parameters, buffers and constants alone.

    Yields:
        (node name, floating-point result in the model's dtype), without results of more than `_LARGEST` elements.
    """
    known: dict[torch.fx.Node, Any] = {}
    given = lifted_values(model.program)
    for node in model.program.graph.nodes:
        if node.op == "placeholder":
            if node.name in given:
                known[node] = given[node.name]
            continue
        arguments = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, torch.fx.Node)]
        if node.op != "call_function" or not arguments or any(a not in known for a in arguments):
            continue
        args, kwargs = tree_map(lambda a: known[a] if isinstance(a, torch.fx.Node) else a, (node.args, node.kwargs))
        try:
            with torch.no_grad():
                result = node.target(*args, **kwargs)
        except Exception:
            # Any operator can raise any exception. A result that can't be computed here explains no weight.
            continue
        if sum(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)) > _LARGEST:
            continue
        known[node] = result
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            yield node.name, to_numpy(result.contiguous())


def is_rounding_of(array: Array, computed: Array) -> bool:
    """Check whether ``array`` of a file equals ``computed`` up to rounding and the order of operations.

    Args:
        computed: array with the same number of elements, in the order of ``array``.

    Returns:
        True if each element is within `_ROUNDINGS` roundoffs of ``computed``'s type plus one of the file's own type.
    """
    own, theirs = (ml_dtypes.finfo(a.dtype) for a in (array, computed))
    exact = computed.reshape(-1).astype(np.float64)
    away = np.abs(array.reshape(-1).astype(np.float64) - exact)
    relative = _ROUNDINGS * float(theirs.eps) / 2 + float(own.eps) / 2
    return bool((away <= relative * np.abs(exact) + float(own.smallest_subnormal)).all())
