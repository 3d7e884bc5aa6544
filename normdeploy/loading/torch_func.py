"""Handle traces of models that use ``torch.func``.

In such a trace, each level that ``torch.func`` enters or leaves is a call of a Python function. Neither exporters nor
other evaluators of the graph support these calls.
"""

from __future__ import annotations

import traceback

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import ExportError

_LEVELS = "torch._functorch.predispatch"
_DERIVATIVES = "torch/_functorch/eager_transforms.py"
_NO_VALUES = "fake tensor in the exported program constant"


def inline_vmap(program: torch.export.ExportedProgram, name: str) -> torch.export.ExportedProgram:
    """Rewrite ``torch.vmap`` as operators on whole batches.

    Args:
        program: the trace of a module.
        name: name of the module's class, for messages.

    Returns:
        The rewritten program; ``program`` itself if it does not use vmap.

    Raises:
        ExportError: the model takes a derivative inside, or writes to a tensor's data.
    """
    if any(map(_is_shape_only, program.constants.values())):
        raise make_derivative_error(name)
    enters_level = any(
        getattr(node.target, "__module__", "") == _LEVELS
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )
    # With an empty decomposition table, every operator that the levels do not affect is kept.
    if enters_level:
        return program.run_decompositions({})
    return program


def is_derivative_failure(error: Exception) -> bool:
    """Return whether tracing failed at a derivative that the model takes in its forward.

    Returns:
        True for failures inside torch's derivative transforms.
    """
    if _NO_VALUES in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.replace("\\", "/").endswith(_DERIVATIVES) for frame in frames)


def make_derivative_error(name: str) -> ExportError:
    """Make the error for a model that takes a derivative in its forward.

    Args:
        name: name of the module's class.

    Returns:
        The error.
    """
    return ExportError(
        f"torch.export can't trace {name}: the trace would read constants without values, because the model "
        "differentiates in its forward (torch.func.grad, jvp, jacrev, torch.autograd.grad) or writes to a tensor's "
        ".data; write the derivative as operators, and change weights before the export"
    )


def _is_shape_only(constant: object) -> bool:
    """Return whether a constant is a tensor of the tracer, which has a shape but no values."""
    return isinstance(constant, FakeTensor) or (
        isinstance(constant, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(constant)
    )
