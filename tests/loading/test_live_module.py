"""Live modules: nested inputs and outputs, their names, and what is taken off before."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from normdeploy.errors import InputError, LoadError
from normdeploy.loading import from_module
from normdeploy.model import Dim
from tests.loading.test_loading import INPUTS, _same


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput: a dict with attributes, known to pytree by its keys."""


pytree._register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    serialized_type_name=f"{__name__}.Output",
)


class Nested(nn.Module):
    def forward(
        self, batch: dict[str, Any], scale: float = 1.0, *, mask: torch.Tensor | None = None, extra: Any = None
    ) -> Output:
        ids, pair = batch["ids"], batch["more"]["pair"]
        x = torch.nn.functional.one_hot(ids, 5).float() * scale + pair[0][:, None, None]
        if mask is not None:
            x = x * mask[..., None]
        return Output(last=x, hidden=(x + 1, x + 2), pair=Pair(x, -x))


def test_live_module_with_nested_inputs_kwargs_and_a_model_output() -> None:
    ids, a, b, mask = torch.randint(0, 5, (2, 3)), torch.randn(2), torch.randn(2), torch.rand(2, 3)
    module = Nested().eval()
    args, kwargs = ({"ids": ids, "more": {"pair": (a, b)}}, 2.0), {"mask": mask, "extra": None}
    model = from_module(
        module,
        args,
        kwargs,
        inputs=["batch_ids[batch,seq]", "batch_more_pair_0[batch]", "mask[batch,seq]"],
        dims=["batch=1:2:9"],
    )
    assert [spec.name for spec in model.inputs] == ["batch_ids", "batch_more_pair_0", "batch_more_pair_1", "mask"]
    assert model.inputs[0].range == (0, 5)
    assert model.inputs[3].shape == (Dim("batch", 1, 2, 9), Dim("seq", 1, 3, 64))
    assert model.inputs[2].shape == (Dim.from_size(2),)
    assert model.outputs == ("last", "hidden_0", "hidden_1", "pair_first", "pair_second")
    result = model.program.module()(*args, **kwargs)
    expected = module(*args, **kwargs)
    assert isinstance(result, Output)
    torch.testing.assert_close(result["hidden"][1], expected["hidden"][1], rtol=0, atol=0)


def test_kwargs_in_any_order_come_in_the_order_of_the_forward() -> None:
    class Three(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return a + 2 * b + 3 * c

    kwargs = {"c": torch.ones(2), "b": torch.ones(2, 1), "a": torch.ones(1)}
    model = from_module(Three().eval(), kwargs=kwargs)
    assert [spec.name for spec in model.inputs] == ["a", "b", "c"]
    assert [len(spec.shape) for spec in model.inputs] == [1, 2, 1]
    names = [node.name for node in model.program.graph.nodes if node.op == "placeholder"]
    assert names == ["a", "b", "c"]


def test_the_same_tensor_twice() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x - 2 * y

    x = torch.ones(3)
    model = from_module(Sum().eval(), (x, x), inputs=["x[n]", "y[n]"])
    torch.testing.assert_close(model.program.module()(torch.ones(4), torch.zeros(4)), torch.ones(4))


def test_names_of_outputs(tmp_path: Path) -> None:
    class Several(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how

        def forward(self, x: torch.Tensor) -> Any:
            given = {"x": 2 * x, "output_x": x + 1}
            return {
                "one": x,
                "tuple": (x, None, x + 1),
                "dict": {"a": x, "b": [x]},
                "named": Pair(x, x),
                "input": given,
            }[self.how]

    expected = {
        "one": ("output",),
        "tuple": ("output_0", "output_2"),
        "dict": ("a", "b_0"),
        "named": ("first", "second"),
        "input": ("output_output_x", "output_x"),
    }
    for how, names in expected.items():
        assert from_module(Several(how).eval(), (torch.ones(2),)).outputs == names


def test_wrappers_are_taken_off(net: Any) -> None:
    wrapped: Any
    for wrapped in (nn.DataParallel(net), torch.compile(net), nn.DataParallel(torch.compile(net))):  # type: ignore[arg-type]
        wrapped.eval()
        _same(from_module(wrapped, (torch.randn(4, 3),), inputs=INPUTS), net)


def test_weight_norm_is_copied() -> None:
    with pytest.warns(FutureWarning):
        module = nn.utils.weight_norm(nn.Linear(3, 2)).eval()
    module(torch.randn(4, 3))  # now .weight is the result of a computation, which copy.deepcopy refuses
    weight = module.weight
    _same(from_module(module, (torch.randn(4, 3),), inputs=INPUTS), module)
    assert module.weight is not None
    assert weight.grad_fn is not None


def test_modules_that_can_not_be_taken() -> None:
    with pytest.raises(InputError, match="got function"):
        from_module(lambda x: x, (torch.ones(2),))  # type: ignore[arg-type]
    module = nn.Linear(3, 2).eval()
    module.generator = (x for x in ())  # type: ignore[assignment]
    with pytest.raises(LoadError, match="can't be copied"):
        from_module(module, (torch.ones(2, 3),))
    with pytest.raises(InputError, match="contain no tensor"):
        from_module(nn.Linear(3, 2).eval(), (3,))
    with pytest.raises(InputError, match=r"do not fit Linear\(input\)"):
        from_module(nn.Linear(3, 2).eval(), (torch.ones(2, 3), torch.ones(1)))
