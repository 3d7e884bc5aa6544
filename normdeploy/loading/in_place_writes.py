"""Find the buffers and inputs that forward changes.

An ONNX file can't express such writes: it keeps no values for the next run and does not change its inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.nn.modules.module import register_module_buffer_registration_hook

from .program_signature import user_inputs

__all__ = ["buffer_write_notes", "find_written_buffers", "input_write_notes", "record_buffer_assignments"]


def buffer_write_notes(buffers: tuple[str, ...]) -> list[str]:
    """Write a note for each buffer that forward changes.

    Args:
        buffers: paths of the buffers.

    Returns:
        One note per buffer.
    """
    notes = []
    for buffer in buffers:
        module, _, name = buffer.rpartition(".")
        if module:
            owner = f"of module {module!r}"
        else:
            owner = "of the model itself"
        notes.append(
            f"the buffer {name!r} {owner} is written in forward; the file does not keep it between runs: if the next "
            "run needs it, make it an input and an output of the model"
        )
    return notes


def input_write_notes(program: torch.export.ExportedProgram) -> list[str]:
    """Write a note for each input that forward changes in place.

    Returns:
        One note per input.
    """
    inputs = [item.name for item in user_inputs(program)]
    found = dict.fromkeys(
        [*program.graph_signature.user_inputs_to_mutate.values(), *_iter_written_placeholders(program, inputs)]
    )
    return [
        f"forward changes its input {name!r} in place; the file computes the same outputs and does not change the "
        "array that is passed"
        for name in found
    ]


def find_written_buffers(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Find the buffers and constants that the graph changes, directly or through views.

    Returns:
        Their paths.
    """
    signature = program.graph_signature
    state = {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target is not None
    }
    found = [
        *signature.buffers_to_mutate.values(),
        *(state[name] for name in _iter_written_placeholders(program, state)),
    ]
    return tuple(dict.fromkeys(found))


def _iter_written_placeholders(program: torch.export.ExportedProgram, names: Collection[str]) -> Iterator[str]:
    """Yield the placeholders among ``names`` that the graph changes, directly or through views."""
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            for given, argument in zip(node.args, node.target._schema.arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    yield from (name for name in _iter_memory_owners(given) if name in names)


def _iter_memory_owners(given: Any) -> Iterator[str]:
    """Yield the names of the given tensors, and of the tensors whose memory they view."""
    for node in given if isinstance(given, list | tuple) else [given]:
        while isinstance(node, torch.fx.Node):
            yield node.name
            target = node.target
            aliases = isinstance(target, torch._ops.OpOverload) and any(
                result.alias_info is not None for result in target._schema.returns
            )
            # The node takes an item from a list of views. split and unbind return such lists.
            item = getattr(target, "__name__", "") == "getitem"
            if (aliases or item) and node.args:
                node = node.args[0]
            else:
                node = None


@contextmanager
def record_buffer_assignments(module: nn.Module) -> Iterator[dict[str, None]]:
    """Record the buffers of ``module`` to which another tensor is assigned within the context.

    torch.export drops such an assignment silently.

    Yields:
        Dict whose keys are the paths of these buffers. It is filled while the context runs.
    """
    found: dict[str, None] = {}
    paths = {id(part): path for path, part in module.named_modules()}
    thread = threading.get_ident()

    def record_assignment(part: nn.Module, name: str, value: torch.Tensor | None) -> None:
        path = paths.get(id(part))
        if path is not None and threading.get_ident() == thread and part._buffers.get(name) is not value:
            found[f"{path}.{name}" if path else name] = None

    hook = register_module_buffer_registration_hook(record_assignment)
    try:
        yield found
    finally:
        hook.remove()
