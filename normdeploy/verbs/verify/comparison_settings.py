"""Read the inputs and rules of ``verify`` and ``bisect`` from their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ...compare.metrics import Metric
from ...compare.policy import ALL, Policy, parse_allclose, parse_policy
from ...errors import InputError
from ...inputs.dataset import open_dataset
from ...inputs.image_dataset import Preprocessing
from ...inputs.input_cases import NamedInputs, read_inputs
from ...runtimes.named_runners import require_named_runner
from ...types import PathLike
from ..arguments.preprocessing_choice import resolve_preprocessing
from ..arguments.user_functions import is_function_name
from ..arguments.user_metrics import metric_importer
from .compute_budget import ComparisonBudget
from .io_matching import list_pairs
from .policy_file import PolicyFile, read_policy
from .reference_models import Original
from .verify_options import ComparisonOptions


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """Inputs and rules of a comparison, from a policy file and from options.

    Attributes:
        seeds: number of random inputs at the usual sizes.
        inputs: the user's inputs; None to generate inputs.
        most: largest generated input, in elements; None for the default limit.
        labels: array or column of the dataset that holds the right classes.
        preprocessing: preparation of the dataset's files; None for arrays.
        names: name in a file -> name in the model, or (name in a file, name in the model).
        runners: names of further runtimes.
        runs_own_code: True if the user names a function as MODULE:FUNCTION.
    """

    seeds: int
    inputs: list[NamedInputs] | None
    most: int | None
    budget: ComparisonBudget
    policy: Policy
    dataset: PathLike | None
    labels: str | None
    preprocessing: Preprocessing | None
    names: list[str | tuple[str, str]]
    runners: Sequence[str]
    runs_own_code: bool = False

    @classmethod
    def from_options(cls, options: ComparisonOptions, budget: ComparisonBudget, runners: Sequence[str] = ()) -> Self:
        """Read the policy file and the user's inputs.

        Options override the policy file.

        Args:
            runners: names of further runtimes.

        Returns:
            the settings.

        Raises:
            InputError: a file can't be read, or labels were given without a dataset.
        """
        trust = bool(getattr(options, "trust", False))
        own = metric_importer(trust=trust)
        if options.policy is None:
            policies = PolicyFile()
        else:
            policies = read_policy(options.policy, own)
        rules = _parse_rules(options, own).merge_under(policies.policy).require_default(options.also_default)
        if options.preprocess is not None and options.dataset is None:
            raise InputError("--preprocess prepares the files of a folder; pass the folder with --dataset")
        for name in runners:
            require_named_runner(name)
        if options.labels is not None and options.dataset is None:
            raise InputError(
                f"the labels {options.labels!r} are part of a dataset, but no dataset was passed; pass it with"
                " --dataset, or omit the labels"
            )
        # The labels that a policy file names apply only to metrics that need labels.
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
            preprocessing=resolve_preprocessing(options.preprocess, trust=trust),
            names=[*policies.names.items(), *list_pairs(options.map)],
            runners=runners,
            runs_own_code=is_function_name(options.preprocess) or rules.has_own_metrics,
        )

    def as_keywords(self, model: Original) -> dict[str, Any]:
        """Convert the settings to keywords of ``verbs.verify.file_comparison`` and ``verbs.bisect.file_bisection``.

        Args:
            model: the reference, whose inputs the dataset must match.

        Returns:
            keyword arguments, with the dataset opened.
        """
        preprocessing = None if self.preprocessing is None else self.preprocessing.for_images(model.images)
        dataset = () if self.dataset is None else open_dataset(self.dataset, model, self.labels, preprocessing)
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


def _parse_rules(options: ComparisonOptions, own: Callable[[str], Metric]) -> Policy:
    """Parse the rules that the options state."""
    rules = parse_policy(options.tolerance, options.metric, own)
    allclose = parse_allclose(options.atol, options.rtol)
    if allclose and "tolerance" in rules.rules.get(ALL, {}):
        raise InputError(
            f"--atol and --rtol state the tolerance of every output, and so does --tolerance"
            f" ({rules.rules[ALL]['tolerance']}); pass one of them, or --tolerance OUTPUT=ABS:REL for single outputs"
        )
    return rules.merge_under(allclose)
