"""Define the result of ``prove``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from ...findings.rendering import Renderable
from ...reports.proof_page import SCHEMA
from .constant_matching import RoundedConstant

if TYPE_CHECKING:
    from rich.console import Console


class Verdict(StrEnum):
    """Verdict about two files."""

    EQUAL = "equal"
    ROUNDED = "equal up to rounding"
    DIFFERENT = "different"
    UNKNOWN = "not known"


EXIT_CODES = {Verdict.EQUAL: 0, Verdict.ROUNDED: 0, Verdict.DIFFERENT: 1, Verdict.UNKNOWN: 2}


@dataclass(frozen=True)
class Place:
    """Node at which a file first leaves the other file.

    Attributes:
        op: type of the node.
        tensor: its first output.
        inputs: tensors that it reads. All of them are proved equal to tensors of the other file.
    """

    op: str
    tensor: str
    inputs: tuple[str, ...]

    def describe(self) -> str:
        """Describe the node in a few words."""
        return f"{self.op} → {self.tensor!r}"


@dataclass(frozen=True)
class ExactCast:
    """Cast to a narrower floating type whose rounding the proof left out.

    Both files hold the values that depend on the Cast in the same type.

    Attributes:
        tensor: tensor that it makes.
        type: name of its type, such as "float16".
    """

    tensor: str
    type: str


@dataclass(frozen=True)
class Counterexample:
    """Input at which both files were run in float64 and gave different results.

    Attributes:
        output: name of an output that differs, in the first file.
        index: position of the element with the largest difference.
        first: value of this element in the first file.
        second: value of this element in the second file.
        inputs: the inputs by their names in the first file.
        described: how the inputs were drawn.
    """

    output: str
    index: tuple[int, ...]
    first: float
    second: float
    inputs: Mapping[str, np.ndarray] = field(repr=False)
    described: str


@dataclass(frozen=True, repr=False)
class FileProof(Renderable):
    """Result of ``prove``; true if the files are proved equal, exactly or up to the rounding of stored constants.

    Attributes:
        verdict: the verdict.
        first: path of the first file.
        second: path of the second file.
        outputs: number of compared outputs.
        error_bits: the error probability of a proof is at most 2^-error_bits; 0 without a proof.
        sizes: sizes for which the proof holds, in words.
        rounded: constants of either file that count as rounded values of exact constants.
        casts: Casts of either file whose roundings the proof left out.
        reason: why the files are not proved equal; "" if they are.
        places: where each file first leaves the other one; None for a file that does not.
        counterexample: an input that shows the difference; None without one.
        notes: assumptions of the verdict.
        seconds: duration.
    """

    verdict: Verdict
    first: str
    second: str
    outputs: int
    error_bits: int
    sizes: str
    rounded: tuple[RoundedConstant, ...]
    casts: tuple[ExactCast, ...]
    reason: str
    places: tuple[Place | None, Place | None]
    counterexample: Counterexample | None
    notes: tuple[str, ...]
    seconds: float

    def __bool__(self) -> bool:
        return self.verdict in (Verdict.EQUAL, Verdict.ROUNDED)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command line: 0 proved, 1 different, 2 not known."""
        return EXIT_CODES[self.verdict]

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.verdict}: {self.first} and {self.second}" + (f": {self.reason}" if self.reason else "")

    def describe(self) -> str:
        """Say the verdict in one sentence."""
        if not self:
            return f"{self.verdict}: {self.reason}"
        held = f"in exact arithmetic, for all finite inputs, {self.sizes} (error probability 2^-{self.error_bits})"
        limits = (
            f" up to the rounding of {' and of '.join(self._list_roundings())}" if self.rounded or self.casts else ""
        )
        return f"proved equal{limits}: {_count(self.outputs, 'output')}, {held}"

    def _list_roundings(self) -> Iterator[str]:
        """Describe the roundings that the proof left out."""
        if self.rounded:
            worst = max(r.ulps for r in self.rounded)
            yield f"{_count(len(self.rounded), 'stored constant')} (at most {worst:.2g} ulp)"
        for name, count in Counter(cast.type for cast in self.casts).items():
            yield f"{_count(count, 'Cast')} to {name} (half an ulp of {name} each)"

    def to_json(self) -> dict[str, Any]:
        """Convert the result to JSON values with the schema ``normdeploy/prove/1``.

        Returns:
            all attributes except the inputs of the counterexample.
        """
        shown = None
        if self.counterexample is not None:
            shown = {
                "output": self.counterexample.output,
                "index": list(self.counterexample.index),
                "first": self.counterexample.first,
                "second": self.counterexample.second,
                "inputs": self.counterexample.described,
            }
        return {
            "schema": SCHEMA,
            "verdict": str(self.verdict),
            "first": self.first,
            "second": self.second,
            "outputs": self.outputs,
            "error_bits": self.error_bits,
            "sizes": self.sizes,
            "rounded": [asdict(r) for r in self.rounded],
            "casts": [asdict(c) for c in self.casts],
            "reason": self.reason,
            "places": [None if p is None else asdict(p) for p in self.places],
            "counterexample": shown,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def show(self, console: Console) -> None:
        from .prove_tables import show_proof

        show_proof(console, self)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
