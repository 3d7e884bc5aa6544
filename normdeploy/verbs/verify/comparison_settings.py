"""What ``verify`` and ``bisect`` compare on, and by which rules, read from what was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from ...compare.policy import Policy, parse_policy
from ...errors import InputError
from ...inputs.dataset import open_dataset
from ...inputs.input_cases import NamedInputs, read_inputs
from ...runtimes.third_party_runner import require_runtime
from ...types import PathLike
from .compute_budget import ComparisonBudget
from .io_matching import list_pairs
from .policy_file import PolicyFile, read_policy
from .reference_models import Original
from .verify_options import ComparisonOptions


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """Reads the arguments of ``verify``: a policy file, completed by the options given beside it."""

    seeds: int
    inputs: list[NamedInputs] | None
    most: int | None
    budget: ComparisonBudget
    policy: Policy
    dataset: PathLike | None
    labels: str | None
    names: list[str | tuple[str, str]]
    runners: Sequence[str]

    @classmethod
    def from_options(cls, options: ComparisonOptions, budget: ComparisonBudget, runners: Sequence[str] = ()) -> Self:
        """Read files of rules and inputs.

        Raises:
            InputError: one can't be read, or labels are given without a dataset.
        """
        if options.policy is None:
            policies = PolicyFile()
        else:
            policies = read_policy(options.policy)
        rules = (
            parse_policy(options.tolerance, options.metric)
            .merge_under(policies.policy)
            .require_default(options.also_default)
        )
        for name in runners:
            require_runtime(name)
        if options.labels is not None and options.dataset is None:
            raise InputError(
                f"the labels {options.labels!r} are a part of a dataset, and none is given; give it with --dataset, or"
                " leave them out"
            )
        # A file names the labels for whoever asks.
        if options.labels is None and rules.labeled_metrics:
            labels = policies.labels
        else:
            labels = options.labels
        return cls(
            seeds=options.seeds,
            inputs=None if options.feeds is None else read_inputs(options.feeds),
            most=policies.most if options.max_elements is None else options.max_elements,
            budget=budget,
            policy=rules,
            dataset=options.dataset,
            labels=labels,
            names=[*policies.names.items(), *list_pairs(options.map)],
            runners=runners,
        )

    def as_keywords(self, model: Original) -> dict[str, Any]:
        """Return the keywords of ``verbs.verify.file_comparison`` and of ``verbs.bisect.file_bisection``, the
        dataset opened."""
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
