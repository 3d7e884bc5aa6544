"""Trace models of transformers with transformers' own exporter, if torch.export alone can't trace them.

`transformers.exporters` (since 5.23) replaces parts of a model that can't be traced while torch.export runs. It also
computes arguments outside of the trace, for example the positions of patches from the sizes of the images. Such
arguments become constants of the trace, together with the inputs that they are computed from.

No version of transformers is required: if the exporter is missing, or has another interface, it is not used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..compare.perturbation import regrouping_error
from ..errors import ExportError
from .constant_inputs import fix_inputs
from .example_call import ExampleCall, name_arguments
from .torch_pickles import first_line, join_names
from .torch_state import preserve_torch_state, silence_logger

# Inputs that are never constants, because a file is made for all texts.
_TEXTS = frozenset({"input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask"})
# Number of names that a message lists.
_SHOWN = 4


@dataclass(frozen=True)
class TransformersExporter:
    """Exporter of the installed transformers.

    Attributes:
        version: version of transformers.
        exporters: the modules `transformers.exporters.exporter_dynamo` and `transformers.exporters.utils`.
    """

    version: str
    exporters: tuple[Any, Any]

    @property
    def name(self) -> str:
        """Return the name for reports and records."""
        return f"transformers' exporter {self.version}"

    def trace_call(
        self, module: nn.Module, call: ExampleCall, shapes: Any, defer_asserts: bool
    ) -> torch.export.ExportedProgram:
        """Trace a module.

        Args:
            shapes: dynamic dims by argument, as for torch.export; None if all dims are static.
            defer_asserts: True to leave the conditions on sizes to asserts that run with the program.

        Returns:
            The program, which takes the call's arguments by keyword.

        Raises:
            ExportError: the exporter returns no program.
        """
        dynamo, _ = self.exporters
        config = dynamo.DynamoConfig(dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=defer_asserts)
        with silence_logger("transformers"):
            result = dynamo.DynamoExporter().export(module, name_arguments(module, call), config)
        program = getattr(result, "program", result)
        if not isinstance(program, torch.export.ExportedProgram):
            raise ExportError(f"{self.name} returns {type(program).__name__}, not an ExportedProgram")
        return program

    def fix_derived_arguments(
        self, module: nn.Module, arguments: Mapping[str, Any], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Make arguments that the exporter computes constants of ``module``, together with the arguments that they are
        computed from.

        Args:
            arguments: keyword arguments of the example call.
            constants: parameters of forward that are constants already.

        Returns:
            The arguments that became constants, by name.

        Raises:
            ExportError: such an argument can't be a constant, because it contains data instead of sizes.
        """
        every = {**arguments, **constants}
        derived = self._derive_arguments(module, every)
        if not derived:
            return {}
        sources = {name: arguments[name] for name in arguments if self._is_source(module, every, name, derived)}
        if not all(map(_is_size, sources, sources.values())):
            raise ExportError(
                f"it computes {join_names(sorted(derived), _SHOWN)} outside of the file from "
                f"{join_names(sorted(sources), _SHOWN)}"
            )
        fix_inputs(module, {**sources, **derived})
        return sources

    def _derive_arguments(self, module: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the arguments that the exporter computes outside of the trace.

        Returns:
            Argument -> value, for new arguments and for arguments that get a value of another type.
        """
        _, utils = self.exporters
        with torch.no_grad(), preserve_torch_state():
            _, prepared, _ = utils.prepare_for_export(module, dict(arguments))
        return {
            name: value
            for name, value in prepared.items()
            if value is not None and type(value) is not type(arguments.get(name))
        }

    def _is_source(
        self, module: nn.Module, arguments: Mapping[str, Any], name: str, derived: Mapping[str, Any]
    ) -> bool:
        """Return whether ``derived`` was computed from the argument ``name``: without it, the result is different."""
        others = {key: value for key, value in arguments.items() if key != name}
        try:
            again = self._derive_arguments(module, others)
        except Exception:
            # transformers' code may raise any exception if an argument is missing.
            return True
        return again.keys() != derived.keys() or not all(_is_same(again[key], derived[key]) for key in derived)


def find_transformers_exporter(module: nn.Module) -> TransformersExporter | None:
    """Find the exporter of the installed transformers.

    Returns:
        The exporter; None if no part of ``module`` is a model of transformers, or if the installed version has no
        exporter that supports the installed torch.
    """
    # A model of transformers can exist only if transformers was imported.
    library = sys.modules.get("transformers")
    base = getattr(library, "PreTrainedModel", None)
    if not isinstance(base, type) or not any(isinstance(part, base) for part in module.modules()):
        return None
    try:
        from transformers.exporters import exporter_dynamo, utils

        with silence_logger("transformers"):
            exporter_dynamo.DynamoExporter()
        return TransformersExporter(str(getattr(library, "__version__", "")), (exporter_dynamo, utils))
    except Exception:
        # An older version has no exporter, and a version may refuse the installed torch with any exception.
        return None


def require_same_outputs(
    program: torch.export.ExportedProgram, arguments: Mapping[str, Any], expected: Sequence[Any]
) -> None:
    """Require that a program returns what the module returned, up to rounding. The exporter replaces code of the
    module, for example by code for images of equal sizes.

    Args:
        expected: leaves of the module's result.

    Raises:
        ExportError: the results differ, or the program does not run.
    """
    try:
        with torch.no_grad(), preserve_torch_state():
            results = pytree.tree_leaves(program.module()(**arguments))
    except Exception as error:
        # An assert of the program may raise any exception.
        raise ExportError(f"its trace does not run: {first_line(error)}") from error
    if len(results) != len(expected):
        raise ExportError(f"its trace returns {len(results)} values, but the module returns {len(expected)}")
    for one, other in zip(results, expected, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            _require_same_tensor(one, other, len(program.graph.nodes))


def _require_same_tensor(one: torch.Tensor, other: torch.Tensor, nodes: int) -> None:
    """Require equal shapes, dtypes and integers, and floating values that differ by rounding at most.

    Args:
        one: result of the trace.
        other: result of the module.
        nodes: number of nodes of the trace.

    Raises:
        ExportError: the tensors differ.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ExportError(
            f"its trace returns {one.dtype}{list(one.shape)}, but the module returns {other.dtype}{list(other.shape)}"
        )
    if not one.is_floating_point():
        if not torch.equal(one, other):
            raise ExportError(f"its trace differs from the module in {int((one != other).sum())} elements")
        return
    # NaN and infinities must be the same.
    ordinary = one.isfinite() & other.isfinite()
    same = (one == other) | (one.isnan() & other.isnan())
    if not bool((ordinary | same).all()):
        raise ExportError("its trace and the module have NaN or infinities at different places")
    if not bool(ordinary.any()):
        return
    # The module computes the same function with other operators, so the bound is that of regrouping.
    unit = torch.finfo(one.dtype).eps / 2
    allowed = regrouping_error(nodes, unit) * float(other[ordinary].abs().max())
    difference = float((one - other)[ordinary].abs().max())
    if not difference <= allowed:
        raise ExportError(f"its trace differs from the module by {difference:.2g}, but rounding by {allowed:.2g}")


def _is_size(name: str, value: Any) -> bool:
    """Return whether an argument is a size, which can be a constant: integers that are neither a text nor a mask."""
    if not isinstance(value, torch.Tensor) or name in _TEXTS or "mask" in name:
        return False
    return not value.is_floating_point() and value.dtype != torch.bool


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
