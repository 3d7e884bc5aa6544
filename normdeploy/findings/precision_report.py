"""Report the parts of a half-precision model that stay float32."""

from __future__ import annotations

from dataclasses import dataclass

from .rendering import ShortRepr


@dataclass(frozen=True, repr=False)
class Float32Region(ShortRepr):
    """One reason to keep a node, and what is kept with it, in float32.

    Attributes:
        kind: "norm", "statistics", "constant", "range", "positions", "angles", "scales", "logarithm", "logits", "no
            half form", "control flow" or "as written".
        tensor: tensor that the reason is about.
        value: largest magnitude seen of it; None if it was not measured.
        nodes: outputs of the nodes kept.
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
    """Result of a conversion to half precision.

    Attributes:
        to: "fp16" or "bf16".
        islands: float32 regions, in the graph's order.
        nodes: number of floating nodes of the main graph.
        kept: number of these that stay float32.
        casts: number of casts inserted.
        bytes: of the weights, before and after.
        calibrated: source of the calibration inputs: "given", "generated" or "".
        samples: number of inputs that calibration ran on.
        inputs: name -> type in the file.
        outputs: name -> type in the file.
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
