"""Define the result of ``inspect_engine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engines.layer_info import EngineLayer
from ...findings.rendering import Renderable
from .engine_norms import EngineNorm

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class EngineBuild:
    """Layers and norms of one engine.

    Attributes:
        path: file with the layers.
        onnx: the ONNX file; "" without one. In this case, the norms were guessed from names.
        profile: file with the times of the layers; "" without one.
        layers: layers of the optimization profile that was timed, or of the first one.
        norms: norms of the ONNX file in its order, or guessed norms in the order of their layers.
        runs: number of runs that were timed; None if unknown.
        total_ms: mean time of all layers in milliseconds; None without times.
        norm_ms: mean time of all layers of norms. A layer of two norms counts once.
        reformat_ms: mean time of all reformats before and after norms.
        notes: what could not be read or matched.
    """

    path: str
    onnx: str
    profile: str
    layers: tuple[EngineLayer, ...]
    norms: tuple[EngineNorm, ...]
    runs: int | None = None
    total_ms: float | None = None
    norm_ms: float | None = None
    reformat_ms: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NormChange:
    """Difference of one norm between two engines.

    Attributes:
        name: the norm's name.
        kind: LayerNorm, RMSNorm, ...; "" if unknown.
        first: index of the norm in the first build; None if the norm is only in the second one.
        second: index of the norm in the second build; None if the norm is only in the first one.
        changed: the facts that changed: "form", "fused with", "types", "reformats", "time" or "only in one".
        factor: time in the second build divided by the time in the first one, with the reformats around the norm; None
            if a time is unknown or 0.
    """

    name: str
    kind: str
    first: int | None
    second: int | None
    changed: tuple[str, ...]
    factor: float | None = None


@dataclass(frozen=True, repr=False)
class EngineReport(Renderable):
    """Result of ``inspect_engine``.

    Attributes:
        builds: one engine, or two to compare.
        changes: one record per norm of either build; empty for one engine.
        seconds: duration.
    """

    builds: tuple[EngineBuild, ...]
    changes: tuple[NormChange, ...] = ()
    seconds: float = 0.0

    def summarize(self) -> str:
        """Return the main facts in one line."""
        counts = ", ".join(f"{len(build.norms)} norms in {len(build.layers)} layers" for build in self.builds)
        if not self.changes:
            return counts
        return f"{counts}; {sum(bool(change.changed) for change in self.changes)} norms changed"

    def show(self, console: Console) -> None:
        from .engine_tables import show_engines

        show_engines(console, self)
