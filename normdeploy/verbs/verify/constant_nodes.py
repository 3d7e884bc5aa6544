"""Computes what a model makes of its parameters alone, as exporters do when they fold constants.

A discretized state matrix, exp(-exp(A_log) · step), is no simple function of one parameter. The model's own trace says
how it is made, so nothing has to be guessed.
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

# elements of a result
_LARGEST = 2**22
# units of roundoff in the model's type: of a chain of some operations, exponentials among them
_ROUNDINGS = 64


def iter_constant_results(model: LoadedModel) -> Iterator[tuple[str, Array]]:
    """Run the nodes of the trace that depend on parameters, buffers and constants alone.

    Returns:
        Name of a node -> its floating result in the model's type. Results above `_LARGEST` elements are left out.
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
            # of any operator: what can't be computed here explains no weight
            continue
        if sum(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)) > _LARGEST:
            continue
        known[node] = result
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            yield node.name, to_numpy(result.contiguous())


def is_rounding_of(array: Array, computed: Array) -> bool:
    """Return whether ``array`` of a file is ``computed``, by another order of operations and rounded to its own type.

    Args:
        computed: of the same number of elements, in the order of ``array``.
    """
    own, theirs = (ml_dtypes.finfo(a.dtype) for a in (array, computed))
    exact = computed.reshape(-1).astype(np.float64)
    away = np.abs(array.reshape(-1).astype(np.float64) - exact)
    relative = _ROUNDINGS * float(theirs.eps) / 2 + float(own.eps) / 2
    return bool((away <= relative * np.abs(exact) + float(own.smallest_subnormal)).all())
