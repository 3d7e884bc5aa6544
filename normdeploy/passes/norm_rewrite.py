"""Rewrite the norms of a model for another tool's pipeline, and tell if the rewrites changed the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx

from ..findings.records import Summary
from ..findings.rendering import Renderable, make_printable
from ..verb_options import ConversionOptions, as_keywords, repeat_option_field
from ..verbs.arguments.argument_validation import take_fields_as_arguments
from ..verbs.optimize.optimize_function import optimize
from ..verbs.optimize.optimize_options import OptimizeOptions
from .model_changes import is_changed

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class RewriteSettings:
    """Options of `normdeploy.optimize` that a pipeline's pass takes."""

    runtime: str = repeat_option_field(ConversionOptions, "runtime")
    provider: str = repeat_option_field(ConversionOptions, "provider")
    fuse: str = repeat_option_field(ConversionOptions, "fuse")
    strict: bool = repeat_option_field(ConversionOptions, "strict")
    strict_proof: bool = repeat_option_field(ConversionOptions, "strict_proof")
    compare_limit: int = repeat_option_field(ConversionOptions, "compare_limit")
    inputs: Sequence[str] = repeat_option_field(OptimizeOptions, "inputs")
    dims: Sequence[str] = repeat_option_field(OptimizeOptions, "dims")


@take_fields_as_arguments(RewriteSettings)
def read_settings(settings: RewriteSettings) -> RewriteSettings:
    """Validate the options of a pass when the pass is made, not when the pass runs.

    Returns:
        the validated options.

    Raises:
        InputError: an option has an unknown value.
    """
    return settings


@dataclass(frozen=True, repr=False)
class NormRewrite(Renderable):
    """Result of one call of a pass; ``print`` shows the table that ``normdeploy optimize`` prints.

    Attributes:
        summary: a finding for each norm, with its certificate or with the reason why the norm stays.
        notes: notes for the user.
        modified: True if the model was changed.
    """

    summary: Summary
    notes: tuple[str, ...]
    modified: bool

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{'modified' if self.modified else 'unmodified'}; {self.summary.summarize()}"

    def show(self, console: Console) -> None:
        from ..findings.console_tables import print_notes
        from ..findings.norm_tables import show_norms

        show_norms(console, make_printable(self.summary))
        print_notes(console, (*self.notes, *self.summary.notes))


@dataclass(frozen=True)
class RewrittenModel:
    """Model after the rewrites, with what was done.

    Attributes:
        proto: the rewritten model with its weights. If nothing was rewritten, the model that was passed in.
    """

    proto: onnx.ModelProto
    rewrite: NormRewrite


def rewrite_norms(proto: onnx.ModelProto, settings: RewriteSettings) -> RewrittenModel:
    """Fuse and fold the norms of a model, each with a proof, and leave its other nodes unchanged.

    Args:
        proto: the model with its weights; it is not changed.

    Returns:
        the model and what was done.

    Raises:
        NormdeployError: as for `normdeploy.optimize`.
    """
    result = optimize(proto, simplify=False, **as_keywords(settings))
    modified = is_changed(proto, result.proto)
    return RewrittenModel(
        result.proto if modified else proto,
        NormRewrite(result.summary, result.notes, modified),
    )
