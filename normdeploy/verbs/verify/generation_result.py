"""Define the result of ``verify --generate``: the verdict on each token that a file generates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "tie", "fail"]


@dataclass(frozen=True, kw_only=True)
class GeneratedStep:
    """One token of one prompt.

    Attributes:
        step: number of the token, from 1.
        token: token that eager mode chooses. The next step reads this token, in eager mode and in the file.
        choice: token that the file chooses.
        margin: largest logit minus second largest logit, in float64.
        gap: distance of the logits of ``token`` and ``choice`` in float64; 0 if the two are equal.
        bound: allowed errors of the logits of ``token`` and ``choice`` together. Two correct evaluations may choose
            either token if ``gap`` is not larger.
        error: error of the logit that is nearest to its allowed error, or farthest beyond it.
        allowed: allowed error of that logit.
        verdict: "tie" if the tokens differ and rounding explains it; "fail" if a logit exceeds its allowed error, or if
            the tokens differ by more than rounding explains.
    """

    step: int
    token: int
    choice: int
    margin: float
    gap: float
    bound: float
    error: float
    allowed: float
    verdict: Verdict

    @property
    def differs(self) -> bool:
        """Return whether the file chooses another token than eager mode."""
        return self.token != self.choice


@dataclass(frozen=True, kw_only=True)
class GeneratedRow:
    """Tokens after one prompt.

    Attributes:
        batch: name of the batch of prompts.
        row: number of the prompt in its batch, from 1.
        prompt: token ids of the prompt, without padding.
        padding: number of padding tokens before the prompt.
        undecided: True if fewer random roundings were drawn than the rule requires, for lack of time. A failure may
            then pass with more time.
    """

    batch: str
    row: int
    prompt: tuple[int, ...]
    padding: int
    steps: tuple[GeneratedStep, ...]
    undecided: bool = False

    def __bool__(self) -> bool:
        return all(step.verdict != "fail" for step in self.steps)

    @property
    def equal(self) -> int:
        """Return how many tokens are equal before the first different token."""
        first = self.first_difference
        if first is None:
            return len(self.steps)
        return first.step - 1

    @property
    def first_difference(self) -> GeneratedStep | None:
        """Return the first token that differs from eager mode's; None if all are equal."""
        return next((step for step in self.steps if step.differs), None)

    @property
    def first_failure(self) -> GeneratedStep | None:
        """Return the first step that rounding does not explain; None if there is none."""
        return next((step for step in self.steps if step.verdict == "fail"), None)

    @property
    def worst(self) -> GeneratedStep:
        """Return the step with the largest error in units of its allowed error."""
        return max(self.steps, key=lambda step: step.error / step.allowed if step.allowed else step.error)

    @property
    def name(self) -> str:
        """Name the prompt for messages."""
        if self.row == 1 and not self.padding and "prompts" not in self.batch:
            return self.batch
        return f"{self.batch}, prompt {self.row}"


@dataclass(frozen=True, kw_only=True)
class FileGeneration:
    """Tokens that one file generates in one runtime.

    Attributes:
        failure: reason why the file does not run; "" if it runs.
        unrun: reason why the runtime can't run the file here, such as a missing kernel; "" if it can. The tokens are
            then neither right nor wrong.
    """

    file: str
    runtime: str
    rows: tuple[GeneratedRow, ...]
    failure: str = ""
    unrun: str = ""

    def __bool__(self) -> bool:
        return not self.failure and not self.unrun and all(self.rows)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Result of ``verify --generate``; true if every file ran and generates as eager mode does.

    Attributes:
        count: number of tokens after each prompt.
        reference: reason why the reference itself is wrong: eager mode with its cache differs from the model without a
            cache. "" if the two agree.
        limits: what was not tested, each as a phrase that follows the word "generates".
    """

    count: int
    files: tuple[FileGeneration, ...]
    reference: str = ""
    limits: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        ran = {made.file for made in self.files if not made.unrun}
        return not self.is_wrong and bool(self.files) and all(made.file in ran for made in self.files)

    @property
    def is_wrong(self) -> bool:
        """Return whether a file fails, or the reference. A file that no runtime can run here does not fail."""
        return bool(self.reference) or not all(made for made in self.files if not made.unrun)

    def describe_failures(self) -> Iterator[str]:
        """Describe each fault.

        Yields:
            One line for the reference, for each file that does not run, and for each prompt that fails.
        """
        if self.reference:
            yield f"fail: {self.reference}"
        for made in self.files:
            where = f"{made.file} in {made.runtime}"
            if made.failure:
                yield f"fail: {where}: {made.failure}"
            for row in made.rows:
                if (step := row.first_failure) is not None:
                    yield f"fail: {where}, {row.name}: {_describe_failure(step, row)}"

    def describe_unrun(self) -> Iterator[str]:
        """Describe each runtime that can't run a file here.

        Yields:
            One line for each file and runtime.
        """
        for made in self.files:
            if made.unrun:
                yield f"not run: {made.file} in {made.runtime}: {made.unrun}"

    def describe_ties(self) -> Iterator[str]:
        """Describe the first different token of each prompt whose differences rounding explains.

        Yields:
            One line for each such prompt.
        """
        for made in self.files:
            for row in filter(None, made.rows):
                if (step := row.first_difference) is not None:
                    yield (
                        f"tie: {made.file} in {made.runtime}, {row.name}: {_describe_choice(step)}, within the bound"
                        f" {step.bound:.2e} of rounding: either token is right"
                    )


def _describe_choice(step: GeneratedStep) -> str:
    return (
        f"token {step.step} is {step.choice}, eager's is {step.token}; their logits are {step.gap:.2e} apart in float64"
    )


def _describe_failure(step: GeneratedStep, row: GeneratedRow) -> str:
    """Describe the first failing step, and the first different token."""
    text = f"the logits of token {step.step} are off by {step.error:.2e}, allowed {step.allowed:.2e}"
    if row.undecided:
        more = "; too few random roundings were drawn, for lack of time: this may pass with a larger --max-seconds"
    else:
        more = ""
    different = row.first_difference
    if different is None:
        return f"{text}; all {len(row.steps)} tokens are equal to eager's{more}"
    verdict = "a tie" if different.gap <= different.bound else "no tie"
    return f"{text}; {_describe_choice(different)}, the bound is {different.bound:.2e}: {verdict}{more}"
