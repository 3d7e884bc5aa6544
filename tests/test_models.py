"""Each row of ``models`` against torch's own op, or against the row's definition, in float64.

A float64 module is compared with ``TIGHT``: about ten float64 operations, conditioned by an offset of 100, leave some
1e-13; a wrong ddof (1/n), epsilon (seen on the small inputs) or axis is off by 1e-3 or more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from models.batch import BatchNorm2d
from models.group import GroupNorm
from models.plain import BatchNorm1d, PlainHolder
from models.registry import CASES, TRAINING, Case, samples
from models.text import Bert, PositionBatchNorm, TextBatchNorm, TextBatchNormByHand

TIGHT = 1e-11
ROWS = [
    "S0a",
    "S0b",
    "S0c",
    "S1a",
    "S1b",
    "S1c",
    "S1d",
    "S1e",
    "S2a",
    "S2b",
    "S2c",
    "S2d",
    "S2e",
    "S3a",
    "S3b",
    "S3c",
    "S4a",
    "S4b",
]

Outputs = tuple[torch.Tensor, ...]


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value wanted."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def battery(case: Case) -> dict[str, Outputs]:
    """Float64 inputs: plain, near 0 where epsilon shows (1e-12 and 1e-5), shifted, all equal."""
    normal = samples(case, torch.float64)
    if not normal[0].is_floating_point():
        return {"normal": normal}
    return {
        "normal": normal,
        "other seed": samples(case, torch.float64, seed=1),
        "tiny": tuple(1e-6 * t for t in normal),
        "small": tuple(3e-3 * t for t in normal),
        "shifted": tuple(t + 100 for t in normal),
        "constant": tuple(torch.full_like(t, 2.5) for t in normal),
    }


def unbiased_layer_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    a = x.numpy()
    x_hat = (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, ddof=1, keepdims=True) + 1e-5)
    return torch.from_numpy(x_hat) * gamma + beta


def layer_norm_of_batch(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x_hat = functional.layer_norm(x.movedim(0, -1), x.shape[:1], eps=1e-12).movedim(-1, 0)
    return x_hat * m.norm.gamma + m.norm.beta


def position_batch_norm(m: PositionBatchNorm, x: torch.Tensor) -> torch.Tensor:
    flat = functional.batch_norm(x.flatten(1), m.running_mean.flatten(), m.running_var.flatten(), eps=1e-5)
    return flat.view(x.shape) * m.gamma + m.beta


def batch_norm(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, m.running_mean.flatten(), m.running_var.flatten(), m.gamma, m.beta, eps=1e-5)


def four_norms(m: nn.Module, x: torch.Tensor) -> Outputs:
    ln = functional.layer_norm(x, x.shape[1:], m.ln.gamma, m.ln.beta)
    instance = functional.instance_norm(x, weight=m.norm_in.gamma, bias=m.norm_in.beta)
    return batch_norm(m.bn, x), ln, instance, functional.group_norm(x, 2, m.gn.gamma, m.gn.beta)


def encoder_layer(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer = m.layer
    x = functional.layer_norm(x + layer.self_attn(x, x, x)[0], (32,), layer.norm1.weight, layer.norm1.bias, 1e-5)
    y = layer.linear2(torch.relu(layer.linear1(x)))
    return functional.layer_norm(x + y, (32,), layer.norm2.weight, layer.norm2.bias, 1e-5)


def bert(m: Bert, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same weights in ``nn.TransformerEncoderLayer``, whose attention and order are torch's own."""
    x = m.word_embeddings.weight[ids] + m.position_embeddings.weight[: ids.shape[1]]
    x = functional.layer_norm(x, (32,), m.embeddings_norm.weight, m.embeddings_norm.bias, 1e-12)
    for layer in m.layers:
        own = nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", 1e-12, batch_first=True, dtype=torch.float64)
        attention = layer.attention
        projections = (attention.query, attention.key, attention.value)
        weights = {
            "self_attn.in_proj_weight": torch.cat([p.weight for p in projections]),
            "self_attn.in_proj_bias": torch.cat([p.bias for p in projections]),
        }
        parts = {"self_attn.out_proj": layer.attention_output, "linear1": layer.intermediate, "linear2": layer.output}
        for name, part in (parts | {"norm1": layer.attention_norm, "norm2": layer.output_norm}).items():
            weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
        own.load_state_dict(weights)
        x = own(x, src_key_padding_mask=mask == 0)
    return x


def layer_norm(shape: tuple[int, ...], eps: float = 1e-5) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """torch's op with the parameters of a hand-written module or of ``nn.LayerNorm``, or without any."""

    def reference(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        gamma, beta = (
            getattr(m, ours, getattr(m, theirs, None)) for ours, theirs in (("gamma", "weight"), ("beta", "bias"))
        )
        return functional.layer_norm(x, shape, gamma, beta, eps)

    return reference


REFERENCES: dict[str, Callable[..., torch.Tensor | Outputs]] = {
    "S0a": layer_norm((24,), 1e-12),
    "S0b": layer_norm_of_batch,
    "S0c": position_batch_norm,
    "S1a": lambda m, x: unbiased_layer_norm(x, m.gamma, m.beta),
    "S1b": batch_norm,
    "S1b_conv": lambda m, x: batch_norm(m[1], m[0](x)),
    "S1c": lambda m, x: functional.instance_norm(x, weight=m.gamma, bias=m.beta),
    "S1d": lambda m, x: functional.group_norm(x, 2, m.gamma, m.beta),
    "S1e": four_norms,
    "S2a": layer_norm((24,)),
    "S2a_plain": layer_norm((24,)),
    "S2a_torch": layer_norm((24,)),
    "S2b": layer_norm((5, 24)),
    "S2b_plain": layer_norm((5, 24)),
    "S2b_torch": layer_norm((5, 24)),
    "S2c": layer_norm((24,)),
    "S2d": encoder_layer,
    "S2d_bert": bert,
    "S2e": lambda m, x: functional.batch_norm(x, m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias),
    "S2e_hand": batch_norm,
    "S3a": lambda m, x: functional.layer_norm(x, x.shape[1:], m.gamma.view(x.shape[1:]), m.beta.view(x.shape[1:])),
    "S3b": (
        lambda m, x: functional.instance_norm(x.permute(0, 3, 1, 2), weight=m.gamma, bias=m.beta).permute(0, 2, 3, 1)
    ),
    "S3c": lambda m, x: functional.layer_norm(x, x.shape[1:]),
    "S4a": lambda m, x: batch_norm(m.norm, x),
    "S4a_linear": lambda m, x: batch_norm(m.norm, m.linear(x)),
    "S4b": lambda m, x: unbiased_layer_norm(x, m.norm.gamma, m.norm.beta),
}


def as_tuple(value: torch.Tensor | Outputs) -> Outputs:
    return value if isinstance(value, tuple) else (value,)


def test_every_row_has_a_case_and_every_case_a_reference() -> None:
    assert sorted({case.row for case in CASES}) == ROWS
    assert sorted(REFERENCES) == sorted(case.name for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_eval_equals_the_definition(case: Case) -> None:
    module = case.make().double()
    for name, inputs in battery(case).items():
        found, wanted = as_tuple(module(*inputs)), as_tuple(REFERENCES[case.name](module, *inputs))
        for one, other in zip(found, wanted, strict=True):
            assert difference(one, other) < TIGHT, name


@pytest.mark.parametrize("case", [case for case in CASES if case.row != "S2d"], ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-24), (torch.float16, 2**-11)], ids=["fp32", "fp16"])
@torch.no_grad()
def test_narrow_types_round_but_do_not_change_type(case: Case, dtype: torch.dtype, unit: float) -> None:
    module = case.make().to(dtype)
    inputs = samples(case, dtype)
    found = as_tuple(module(*inputs))
    module = module.double()  # the same, already rounded parameters
    wanted = as_tuple(REFERENCES[case.name](module, *(t.double() for t in inputs)))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        # some ten roundings of values not far above the largest output; a conv's or linear's sums are of that size too
        assert difference(one, other) < 16 * unit


STATELESS = [case for case in CASES if not {"folded", "BatchNormalization"} & set(case.expect) and case.row != "S2d"]


@pytest.mark.parametrize("case", STATELESS, ids=lambda case: case.name)
def test_norms_without_statistics_are_the_same_in_training_and_have_gradients(case: Case) -> None:
    module = case.make()
    inputs = samples(case)
    in_eval = module(*inputs)
    in_training = module.train()(*(t.requires_grad_() for t in inputs))
    assert torch.equal(in_eval, in_training)
    in_training.square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (*inputs, *module.parameters()))


def updates(shape: tuple[int, ...], count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * (step + 1) + step for step in range(count)]


def recurrence(
    batches: list[torch.Tensor], dims: tuple[int, ...], weight_of_new: float, ddof: int
) -> tuple[np.ndarray, np.ndarray]:
    """Running mean and variance as the row defines them, from 0 and 1."""
    mean, var = np.zeros(()), np.ones(())
    for batch in batches:
        a = batch.numpy()
        mean = mean + weight_of_new * (a.mean(dims) - mean)
        var = var + weight_of_new * (a.var(dims, ddof=ddof) - var)
    return mean, var


def check_training(
    module: nn.Module,
    norm: nn.Module | BatchNorm1d,
    batches: list[torch.Tensor],
    dims: tuple[int, ...],
    new: float,
    ddof: tuple[int, int],
) -> None:
    """Outputs of every update and the running statistics after all; ``ddof`` of the output and of the running value."""
    for batch in batches:
        a = batch.numpy()
        x_hat = (a - a.mean(dims, keepdims=True)) / np.sqrt(a.var(dims, ddof=ddof[0], keepdims=True) + 1e-5)
        assert difference(module(batch).detach(), torch.from_numpy(x_hat)) < TIGHT
    mean, var = recurrence(batches, dims, new, ddof[1])
    np.testing.assert_allclose(norm.running_mean.squeeze().numpy(), mean, rtol=TIGHT, atol=TIGHT)
    np.testing.assert_allclose(norm.running_var.squeeze().numpy(), var, rtol=TIGHT)


def test_s1b_trains_biased_in_output_and_running_value() -> None:
    norm = BatchNorm2d(4).double().train()
    batches = updates((3, 4, 5, 2))
    check_training(norm, norm, batches, (0, 2, 3), 0.1, (0, 0))
    theirs = nn.BatchNorm2d(4).double().train()
    for batch in batches:
        theirs(batch)
    torch.testing.assert_close(norm.running_mean, theirs.running_mean, rtol=TIGHT, atol=TIGHT)
    n = 3 * 5 * 2  # torch keeps the unbiased variance; only what came from batches differs, not the initial 1
    start = 0.9 ** len(batches)
    torch.testing.assert_close(
        (norm.running_var - start) * n / (n - 1), theirs.running_var - start, rtol=TIGHT, atol=TIGHT
    )


@pytest.mark.parametrize("update", ["blend", "step"])
def test_s0c_trains_with_a_momentum_that_weighs_the_old_value(update: str) -> None:
    norm = PositionBatchNorm(5, 3, momentum=0.9, update=update).double().train()  # type: ignore[arg-type]
    check_training(norm, norm, updates((6, 5, 3)), (0,), 0.1, (0, 0))
    assert norm.running_mean.shape == norm.running_var.shape == (5, 3)


@pytest.mark.parametrize("hand", [False, True])
def test_s2e_trains_biased_in_output_and_unbiased_in_the_running_value(hand: bool) -> None:
    module = (TextBatchNormByHand(5) if hand else TextBatchNorm(5)).double().train()
    norm = module if hand else module.norm
    batches = updates((3, 5, 4))
    check_training(module, norm, batches, (0, 2), 0.1, (0, 1))


def test_s4a_trains_unbiased_and_its_buffers_become_rows() -> None:
    norm = BatchNorm1d(4)
    norm.gamma, norm.beta, norm.running_mean, norm.running_var = (
        t.double() for t in (norm.gamma, norm.beta, norm.running_mean, norm.running_var)
    )
    assert norm.running_mean.shape == (4,)
    check_training(PlainHolder(norm), norm, updates((6, 4)), (0,), 0.1, (1, 1))
    assert norm.running_mean.shape == norm.running_var.shape == (1, 4)


def test_s4a_is_out_of_reach_of_its_holder() -> None:
    holder = TRAINING.make()
    assert not holder.training
    assert holder.norm.training
    assert holder.state_dict() == {}
    assert [p.shape for p in holder.norm.parameters()] == [(24,), (24,)]
    before = holder.norm.running_mean.clone()
    holder(*samples(TRAINING))
    assert not torch.equal(holder.norm.running_mean, before)


def test_training_an_eval_norm_does_not_touch_its_statistics() -> None:
    for case in CASES:
        module = case.make()
        before = {name: t.clone() for name, t in module.named_buffers()}
        module(*samples(case))
        assert all(torch.equal(t, before[name]) for name, t in module.named_buffers())


@pytest.mark.parametrize(("groups", "channels"), [(4, 6), (0, 6), (7, 6), (-1, 6)])
def test_s1d_refuses_channels_that_do_not_divide(groups: int, channels: int) -> None:
    with pytest.raises(ValueError, match=rf"{channels}.*{groups}"):
        GroupNorm(groups, channels)
