"""Reports the parts of a half-precision model that stayed float32."""

from __future__ import annotations

from dataclasses import dataclass

from .rendering import ShortRepr


@dataclass(frozen=True, repr=False)
class Float32Region(ShortRepr):
    """One reason to keep a node, and what is kept with it, in float32.

    ``kind``: "norm", "statistics", "constant", "range", "positions", "angles", "scales", "logarithm", "logits", "no
    half form", "control flow" or "as written"; ``tensor``: what the reason speaks of; ``value``: the largest magnitude
    seen of it, None where none was looked for; ``nodes``: outputs of the nodes kept.
    """

    kind: str
    op: str
    module: str
    tensor: str
    reason: str
    value: float | None = None
    nodes: tuple[str, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.kind}, {self.op} {self.module or self.tensor!r}, {len(self.nodes)} nodes: {self.reason}"


@dataclass(frozen=True, repr=False)
class PrecisionReport(ShortRepr):
    """What became of a model's precision.

    ``islands``: what stayed float32, in the graph's order; ``nodes``: how many nodes of the main graph compute floating
    numbers, ``kept`` how many of them in float32; ``casts`` were inserted; ``bytes``: of the weights, before and after.
    ``samples``: inputs that calibration ran on, ``calibrated``: whose they were ("given", "generated" or "");
    ``inputs`` and ``outputs`` of the file: name -> type.
    """

    to: str
    islands: tuple[Float32Region, ...]
    nodes: int
    kept: int
    casts: int
    bytes: tuple[int, int]
    calibrated: str
    samples: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    notes: tuple[str, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.to}: {self.kept} of {self.nodes} floating nodes in float32, {self.casts} Casts"
