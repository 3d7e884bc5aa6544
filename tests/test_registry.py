"""The registry itself: every spelling computes the norm it is listed as, and no lookalike is one.

Wrongly listed models would make the tests of everything after them mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from models.lookalikes import Affine, Pure
from models.parts import AFFINES, MEANS, ROOTS, VARIANCES, pairwise
from models.registry import CASES, FIXED, LOOKALIKES, SMALL, SPELLINGS, TRAINING, Bank, Case, export_args, samples
from models.rms import SpelledRMSNorm
from models.spellings import Spelled, SpelledBatch, SpelledGroup
from models.streams import Unscaled

EVERYTHING = (*CASES, *SPELLINGS, *SMALL, *LOOKALIKES, FIXED, TRAINING)


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= bound * float(wanted.abs().max())


def affine(name: str, x_hat: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """What an affine of that name means, whatever the order in which it is computed."""
    one, none = torch.ones(()).double(), torch.zeros(()).double()
    scale = {
        "absent": one,
        "only_beta": one,
        "one_plus": 1 + gamma,
        "scalar": one * 1.5,
        "element": gamma.flatten()[0],
    }.get(name, gamma)
    shift = {"absent": none, "only_gamma": none, "scalar": one * 0.25, "element": beta.flatten()[0]}.get(name, beta)
    return x_hat * scale + shift


def words(case: Case) -> set[str]:
    return set(case.name.split("_")) | {name for name in AFFINES if f"_{name}" in case.name}


def named_affine(case: Case) -> str:
    """The affine in a case's name, the longest where one name begins another."""
    return max((name for name in AFFINES if f"_{name}_" in f"{case.name}_"), key=len)


def scales(case: Case) -> Iterator[torch.Tensor]:
    """Inputs at three scales: at the smaller ones epsilon decides."""
    (x,) = samples(case, torch.float64)
    yield from (x, x * 1e-2, x * 1e-5)


@pytest.mark.parametrize("prefix", ["ln", "gn"])
@torch.no_grad()
def test_spelled_norms_compute_their_norm(prefix: str) -> None:
    cases = [case for case in SPELLINGS if case.name.startswith(f"{prefix}_")]
    assert len(cases) > 30
    for case in cases:
        module = case.make().double()
        assert isinstance(module, Spelled | SpelledGroup)
        ddof = int("unbiased" in words(case))
        # an upcast to float32 narrows a float64 input; E[x²] − E[x]² cancels: 1e-16 over the variance relative to x²,
        # plus epsilon
        bound = 1e-5 if "upcast" in words(case) else 1e-11
        for x in scales(case):
            if "moments" in words(case) and "upcast" in words(case) and float(x.abs().max()) < 1e-3:
                continue  # float32's E[x²] − E[x]² of values near 1e-5 with an epsilon of 1e-12 is rounding alone
            y = x if prefix == "ln" else x.unflatten(1, (module.groups, -1))
            dims = module.dims if prefix == "ln" else (2, 3, 4)
            a = y.numpy()
            x_hat = torch.from_numpy(
                (a - a.mean(dims, keepdims=True)) / np.sqrt(a.var(dims, ddof=ddof, keepdims=True) + module.eps)
            ).view(x.shape)
            shape = module.gamma.shape if prefix == "ln" else (-1, 1, 1)
            wanted = affine(named_affine(case), x_hat, module.gamma.view(shape), module.beta.view(shape))
            try:
                close(module(x), wanted, bound)
            except AssertionError:
                raise AssertionError(f"{case.name} is not the norm of its name") from None


@torch.no_grad()
def test_spelled_batch_norms_compute_batch_norm() -> None:
    cases = [case for case in SPELLINGS if case.name.startswith("bn_")]
    assert len(cases) > 30
    for case in cases:
        module = case.make().double()
        (x,) = samples(case, torch.float64)
        wanted = x
        for part in module if isinstance(module, nn.Sequential) else (module,):
            if isinstance(part, SpelledBatch):
                x_hat = functional.batch_norm(wanted, part.running_mean, part.running_var, eps=1e-5)
                shape = (-1, *(1,) * (x.ndim - 2))
                wanted = affine(named_affine(case), x_hat, part.gamma.view(shape), part.beta.view(shape))
            else:
                wanted = part(wanted)
        close(module(x), wanted, 1e-12)


@torch.no_grad()
def test_rms_spellings_compute_rms_norm() -> None:
    cases = [case for case in SPELLINGS if case.row == "RMSNorm"]
    assert len(cases) > 30
    for case in cases:
        module = case.make()
        narrow = any(word in case.name for word in ("upcast", "llama", "gemma", "t5"))
        module = module.double()
        for x in scales(case):
            eps = {"rms_l2": 0.0}.get(case.name, getattr(module, "eps", 1e-6))
            x_hat = (
                functional.rms_norm(x, x.shape[-1:], eps=eps) if eps else x / x.square().mean(-1, keepdim=True).sqrt()
            )
            if isinstance(module, SpelledRMSNorm):
                wanted = affine(named_affine(case), x_hat, module.weight, module.bias)
            else:
                wanted = x_hat * (module.weight + float(case.name == "rms_gemma"))
            close(module(x), wanted, 1e-5 if narrow else 1e-12)


def candidates(rank: int) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Every set of dims that a norm may reduce, centred or not."""
    subsets = chain.from_iterable(combinations(range(rank), size) for size in range(1, rank + 1))
    yield from product(subsets, (True, False))


def is_some_norm(case: Case) -> bool:
    """Whether the case's function is a LayerNorm, InstanceNorm or RMSNorm (without affine) over any dims, at any
    epsilon and scale.

    y = s·c/sqrt(v + e) with c = x (minus its mean) and v the mean of c² means that (c/y)² is one straight line (v +
    e)/s² in v, over inputs of every scale, offset and dynamic size. The line is fitted by relative least squares.
    """
    module = case.make()
    function = module.function if isinstance(module, Affine | Pure | Unscaled) else module.double()
    sizes = [{}] + [{size[0]: size[3]} for spec in case.inputs for size in spec.shape if not isinstance(size, int)]
    inputs = [
        samples(case, torch.float64, dims)[0] * scale + shift
        for dims in sizes
        for scale in (1e-14, 1e-6, 3e-3, 1, 100)
        for shift in (0, scale)
    ]
    for dims, centred in candidates(inputs[0].ndim):
        lines, centres = [], []
        for x in inputs:
            c = x - x.mean(dims, keepdim=True) if centred else x
            v = c.square().mean(dims, keepdim=True).expand_as(x)
            ratio = c / function(x).detach().double()
            lines.append(torch.stack([v / ratio**2, 1 / ratio**2], -1)[ratio.isfinite() & (ratio != 0)])
            centres.append(ratio)
        rows = torch.cat(lines)
        weights = rows.abs().amax(0)
        fit = torch.linalg.lstsq(rows / weights, torch.ones(len(rows), 1, dtype=torch.float64)).solution
        if bool(((rows / weights) @ fit - 1).abs().max() < 1e-6) and all(bool((ratio > 0).all()) for ratio in centres):
            return True
    return False


FUNCTIONS = [case for case in LOOKALIKES if isinstance(case.make(), Pure | Affine)]


@pytest.mark.parametrize("case", [case for case in FUNCTIONS if not case.expect], ids=lambda case: case.name)
def test_a_lookalike_is_no_norm_over_any_dims_at_any_epsilon(case: Case) -> None:
    assert case.reason
    assert not is_some_norm(case)


@pytest.mark.parametrize(
    "name",
    ["gamma_of_another_axis", "gamma_across_the_norm", "equal_over_sum", "equal_over_too_many", "equal_unit_length"],
)
def test_the_test_for_norms_knows_norms(name: str) -> None:
    (case,) = (case for case in (*LOOKALIKES, *SPELLINGS) if case.name == name)
    assert is_some_norm(case)


def test_the_dynamic_lookalikes_are_norms_at_one_size() -> None:
    found = [case for case in LOOKALIKES if case.dynamic]
    assert [case.reason for case in found] == ["dynamic", "dynamic"]
    for case in found:
        fixed = tuple(replace(spec, shape=spec.sizes()) for spec in case.inputs)
        assert is_some_norm(replace(case, inputs=fixed))


def test_names_are_unique() -> None:
    names = [case.name for case in EVERYTHING]
    assert len(set(names)) == len(names)


def test_made_modules_are_seeded_in_eval_mode_and_hide_nothing() -> None:
    state = torch.get_rng_state()
    for case in EVERYTHING:
        module, again = case.make(), case.make()
        assert not any(m.training for m in module.modules())
        for (name, one), (_, other) in zip(module.state_dict().items(), again.state_dict().items(), strict=True):
            assert torch.equal(one, other), (case.name, name)
            assert one.numel() == 1 or not one.is_floating_point() or one.std() > 0.01, (case.name, name)
        assert all(t.isfinite().all() for t in (lambda y: y if isinstance(y, tuple) else (y,))(module(*samples(case))))
    assert torch.equal(state, torch.get_rng_state())


def test_lists_say_what_is_expected() -> None:
    assert all(case.expect and not case.reason for case in (*CASES, *SPELLINGS, *SMALL))
    assert all(case.reason or case.expect for case in LOOKALIKES)
    assert all(case.dynamic for case in (*CASES, *SPELLINGS, *SMALL))


def test_export_args() -> None:
    (case,) = (case for case in CASES if case.name == "S2d_bert")
    args, shapes = export_args(case, torch.float16, dynamic=True)
    assert [a.dtype for a in args] == [torch.int64, torch.int64]
    assert shapes is not None
    assert [sorted(axes) for axes in shapes] == [[0, 1], [0, 1]]
    assert shapes[0][0] is shapes[1][0]
    assert (shapes[0][1].__name__, shapes[0][1].min, shapes[0][1].max) == ("seq", 1, 16)
    assert export_args(CASES[0], torch.float16)[0][0].dtype == torch.float16
    assert export_args(CASES[0])[1] is None
    with pytest.raises(ValueError, match="two_consumers"):
        export_args(next(case for case in LOOKALIKES if case.name == "two_consumers"), dynamic=True)


def test_accepts_counts_and_chooses_among_equal_ops() -> None:
    case = replace(CASES[0], expect=("folded", "A|B", "A"))
    assert case.nodes == 2
    assert case.accepts(["A", "B"])
    assert case.accepts(["A", "A"])
    assert not case.accepts(["B", "B"])
    assert not case.accepts(["A"])
    assert not case.accepts(["A", "A", "A"])


def test_pairwise_meets_every_pair_in_few_rows() -> None:
    choices = tuple(tuple(table) for table in (MEANS, VARIANCES, ROOTS, AFFINES))
    rows = list(pairwise(*choices))
    for (i, one), (j, other) in combinations(enumerate(choices), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(one, other))
    assert len(rows) < 1.1 * len(VARIANCES) * len(AFFINES)


@torch.no_grad()
def test_a_bank_returns_what_its_members_return() -> None:
    cases = [case for case in CASES if case.name in ("S0a", "S1e", "S2d_bert")]
    bank = Bank(cases)
    inputs = bank.samples()
    outputs = bank(*inputs)
    assert len(inputs) == 4
    wanted = [cases[0].make()(inputs[0]), *cases[1].make()(inputs[1]), cases[2].make()(*inputs[2:])]
    assert all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True))
