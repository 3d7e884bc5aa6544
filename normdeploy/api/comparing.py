"""What ``verify`` and ``bisect`` compare on, and by which rules, read from what was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..errors import InputError
from ..runtimes.guests import required
from ..types import PathLike
from ..verbs.verify.cases import Given, Inputs, read
from ..verbs.verify.dataset import open_dataset
from ..verbs.verify.names import pairs_of
from ..verbs.verify.originals import Original
from ..verbs.verify.policy import Policy, Thresholds, Tolerances, policy_of
from ..verbs.verify.policy_file import PolicyFile, read_policy
from ..verbs.verify.spending import Budget


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """The arguments of ``verify`` (``api.verify``), a file of rules read and completed by what was given beside it."""

    seeds: int
    inputs: list[Given] | None
    most: int | None
    budget: Budget
    policy: Policy
    dataset: PathLike | None
    labels: str | None
    names: list[str | tuple[str, str]]
    runners: Sequence[str]

    @classmethod
    def of(
        cls,
        *,
        seeds: int,
        feeds: Inputs | None,
        max_elements: int | None,
        budget: Budget,
        tolerance: Tolerances | None,
        metric: Thresholds | None,
        policy: PathLike | None,
        also_default: bool,
        dataset: PathLike | None,
        labels: str | None,
        map: Sequence[str] | Mapping[str, str],
        runners: Sequence[str],
    ) -> Self:
        """Read files of rules and inputs.

        Raises:
            InputError: one can't be read, or labels are given without a dataset.
        """
        policies = PolicyFile() if policy is None else read_policy(policy)
        rules = policy_of(tolerance, metric).over(policies.policy).requiring(also_default)
        for name in runners:
            required(name)
        if labels is not None and dataset is None:
            raise InputError(
                f"the labels {labels!r} are a part of a dataset, and none is given; give it with --dataset, or leave"
                " them out"
            )
        return cls(
            seeds=seeds,
            inputs=None if feeds is None else read(feeds),
            most=policies.most if max_elements is None else max_elements,
            budget=budget,
            policy=rules,
            dataset=dataset,
            # A file names them for whoever asks.
            labels=policies.labels if labels is None and rules.labelled else labels,
            names=[*policies.names.items(), *pairs_of(map)],
            runners=runners,
        )

    def keywords(self, model: Original) -> dict[str, Any]:
        """Return the keywords of ``verbs.verify.verify`` and of ``verbs.bisect.bisect``, the dataset opened."""
        dataset = () if self.dataset is None else open_dataset(self.dataset, model, self.labels)
        return {
            "seeds": self.seeds,
            "inputs": self.inputs,
            "most": self.most,
            "budget": self.budget,
            "policy": self.policy,
            "names": self.names,
            "dataset": dataset,
            "runners": self.runners,
        }
