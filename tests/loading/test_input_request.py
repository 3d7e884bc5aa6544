"""What the user says of the inputs, and what the program says of them: dims with ranges, and values that can't crash
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim as ExportDim

from normdeploy.errors import ExportError, InputError
from normdeploy.loading import from_module, load
from normdeploy.loading.input_request import parse_input_request
from normdeploy.loading.program_signature import match_requested_inputs
from normdeploy.model import Dim, LoadedModel


def test_the_documented_forms() -> None:
    wishes = parse_input_request(
        ["ids:int64[batch,seq]{0:30522}", "x:float32[batch, 3, 224, 224]", "y[]", "m:bool[batch]"], ["batch=1:8:64"]
    )
    ids, x, y, m = wishes.inputs
    assert (ids.name, ids.dtype, ids.range) == ("ids", "int64", (0, 30522))
    assert ids.shape == (Dim("batch", 1, 8, 64), Dim("seq", 1, 8, 64))
    assert x.shape == (Dim("batch", 1, 8, 64), Dim.from_size(3), Dim.from_size(224), Dim.from_size(224))
    assert (y.dtype, y.shape) == ("", ())
    assert (m.dtype, m.range) == ("bool", None)
    assert wishes.stated == {"batch"}


def test_inline_ranges_and_aliases() -> None:
    wishes = parse_input_request(["a:half[n=2:4:8]{-1:1.5}", "b:long[n]{-3:0}", "input.1/x-y[n]{1e-3:1}"], [])
    assert [wish.dtype for wish in wishes.inputs] == ["float16", "int64", ""]
    assert [wish.range for wish in wishes.inputs] == [(-1, 1.5), (-3, 0), (0.001, 1)]
    assert {wish.shape for wish in wishes.inputs} == {(Dim("n", 2, 4, 8),)}
    assert parse_input_request(["a[n=4:4:4]"], []).inputs[0].shape == (Dim.from_size(4),)  # one size is no dynamic dim


@pytest.mark.parametrize(
    ("inputs", "dims", "message"),
    [
        (["x"], [], "can't be read"),
        (["x:float32"], [], "can't be read"),
        (["x[2"], [], "can't be read"),
        (["x:float33[2]"], [], "unknown dtype 'float33'"),
        (["x[0]"], [], "dim '0'"),
        (["x[-1]"], [], "dim '-1'"),
        (["x[2,,3]"], [], "dim ''"),
        (["x[b=8]"], [], "b=MIN:OPT:MAX"),
        (["x[b=8:4:2]"], [], "0 <= min <= opt <= max"),
        (["x[b=0:0:0]"], [], "max >= 1"),
        (["x[2]{5:5}"], [], "no valid value"),
        (["x[2]{0:1e999}"], [], "no valid value"),
        (["x[2]{a:b}"], [], "range"),
        (["x[2]{}"], [], "range"),
        (["x[2]", "x[3]"], [], "'x' is passed 2 times"),
        (["x[b=1:2:3]", "y[b=1:2:4]"], [], "'b' is declared twice: b=1:2:3, and b=1:2:4"),
        (["x[b=1:2:3]"], ["b=1:2:4"], "'b' is declared twice"),
        (["x[b]"], ["b"], "NAME=MIN:OPT:MAX"),
        (["x[b]"], ["b=1:2"], "can't be read"),
    ],
)
def test_what_can_not_be_read(inputs: list[str], dims: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_input_request(inputs, dims)
    assert message in str(caught.value)


class Encoder(nn.Module):
    """The index arithmetic of text encoders: token and type tables, a position table reached by an arange, an additive
    mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.types, self.places = nn.Embedding(50, 8), nn.Embedding(2, 8), nn.Embedding(12, 8)

    def forward(self, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(0).expand(ids.shape)
        x = self.tokens(ids) + self.types(types.view(-1)).view(*types.shape, 8) + self.places(places)
        return x + (1.0 - mask.to(torch.float32))[..., None] * -1e4


class Roberta(nn.Module):
    """Positions counted over the tokens that are not padding, from padding_idx + 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(14, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids.ne(1).int()
        places = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1
        return self.tokens(ids) + self.places(places)


class Positions(nn.Module):
    """Position ids as an input, shifted by two as OPT and BART do."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(10, 4)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.places(position_ids + 2)


class Fields(nn.Module):
    """Categories with an offset for each field into one table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, 7, 11]))
        self.table = nn.EmbeddingBag(20, 4)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.table(fields + self.offsets)


class Indexing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(6, 5))

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = torch.gather(self.table, 1, b)
        return self.table[a], gathered, torch.index_select(self.table, 0, c), torch.nn.functional.one_hot(d - 1, 4)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, keep: torch.Tensor, soft: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        x = x.masked_fill(keep.bool(), 0.0) + (1.0 - soft)[:, None] * -10000.0
        return torch.where(flag != 0, x, -x)


def _bounds(module: nn.Module, inputs: Sequence[str], dims: Sequence[str] = ()) -> LoadedModel:
    return from_module(module.eval(), inputs=inputs, dims=dims)


def _ranges(model: LoadedModel) -> dict[str, Any]:
    return {spec.name: spec.range for spec in model.inputs}


TEXT = ["ids:int64[batch,seq]", "types:int64[batch,seq]", "mask:int64[batch,seq]"]


def test_ranges_from_tables_and_masks() -> None:
    model = _bounds(Encoder(), TEXT)
    assert _ranges(model) == {"ids": (0, 50), "types": (0, 2), "mask": (0, 2)}
    assert model.named_dims == {"batch": Dim("batch", 1, 8, 64), "seq": Dim("seq", 1, 8, 12)}


def test_positions_limit_a_dim() -> None:
    with pytest.raises(InputError, match=r"seq=1:8:64.*1 to 12.*places\.weight.*12 usable rows"):
        _bounds(Encoder(), TEXT, ["seq=1:8:64"])
    assert _bounds(Encoder(), TEXT, ["seq=1:8:12"]).named_dims["seq"] == Dim("seq", 1, 8, 12)
    assert _bounds(Roberta(), ["ids:int64[batch,seq]"]).named_dims["seq"].max == 12  # 14 rows, counted from 2


def test_a_table_that_grows_with_the_dim_does_not_limit_it() -> None:
    class Picked(nn.Module):
        def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            return x[torch.arange(x.shape[0])] + x[row]

    model = _bounds(Picked(), ["x[n=3:8:64]", "row:int64[n]"])
    assert model.named_dims["n"].max == 64
    assert _ranges(model)["row"] == (0, 3)  # what the smallest size holds


def test_ranges_through_offsets() -> None:
    assert _ranges(_bounds(Positions(), ["position_ids:int64[batch,seq]"])) == {"position_ids": (-2, 8)}
    assert _ranges(_bounds(Fields(), ["fields:int64[batch,3]"])) == {"fields": (0, 9)}


class Behind(nn.Module):
    """Values that are moved back by a stored tensor, another number in each column."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.register_buffer("back", torch.tensor([1, 3, 2]))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.table(fields - self.back)


def test_ranges_behind_what_is_taken_off() -> None:
    """The least value is that of the column which loses most, the largest that of the one which loses least."""
    assert _ranges(_bounds(Behind(), ["fields:int64[batch,3]"])) == {"fields": (3, 10)}


def test_ranges_of_other_indexing() -> None:
    model = _bounds(Indexing(), ["a:int64[n]", "b:int64[6,2]", "c:int64[n]", "d:int64[n]"])
    assert _ranges(model) == {"a": (0, 6), "b": (0, 5), "c": (0, 6), "d": (1, 5)}


def test_masks() -> None:
    model = _bounds(Masked(), ["x[n,4]", "keep[n,4]", "soft[n]", "flag:int64[n,4]"])
    assert _ranges(model) == {"x": None, "keep": (0.0, 1.0), "soft": (0.0, 1.0), "flag": (0, 2)}


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Encoder(), TEXT),
        (Roberta(), ["ids:int64[batch,seq]"]),
        (Positions(), ["position_ids:int64[batch,seq]"]),
        (Fields(), ["fields:int64[batch,3]"]),
        (Indexing(), ["a:int64[n]", "b:int64[6,2]", "c:int64[n]", "d:int64[n]"]),
        (Masked(), ["x[n,4]", "keep[n,4]", "soft[n]", "flag:int64[n,4]"]),
    ],
)
def test_random_inputs_run_at_every_end_of_the_ranges(module: nn.Module, inputs: list[str]) -> None:
    model = _bounds(module, inputs)
    run = model.program.module()
    for seed in range(10):
        for sizes in (
            {},
            {n: d.min for n, d in model.named_dims.items()},
            {n: d.max for n, d in model.named_dims.items()},
        ):
            samples = model.samples(seed, sizes)
            result = run(*(torch.from_numpy(np.asarray(value)) for value in samples.values()))
            for leaf in result if isinstance(result, tuple) else (result,):
                assert torch.isfinite(leaf.double()).all()


def test_a_stated_range_of_values_wins_where_it_fits() -> None:
    model = _bounds(Encoder(), ["ids:int64[batch,seq]{5:9}", *TEXT[1:]])
    assert _ranges(model)["ids"] == (5, 9)
    assert set(np.unique(model.samples(0)["ids"])) <= {5, 6, 7, 8}
    with pytest.raises(InputError, match=r"ids.*\{0:51\}.*tokens\.weight.*\{0:50\}"):
        _bounds(Encoder(), ["ids:int64[batch,seq]{0:51}", *TEXT[1:]])


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1] // 2, 2).sum(-1)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Quarters(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 4) + 1


class Instance(nn.Module):
    """A channel count that the layer fixes (S2c)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(5, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.unsqueeze(-1)).squeeze(-1)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _named(module: nn.Module, *inputs: str) -> dict[str, Dim]:
    return _bounds(module, inputs).named_dims


def test_unstated_ranges_adapt_to_the_model() -> None:
    assert _named(Halves(), "x[b,s]")["s"] == Dim("s", 2, 8, 64, step=2)
    assert _named(Table(), "x[b,s,4]")["s"] == Dim("s", 1, 8, 12)
    assert _named(Sum(), "x[b,s]", "y[b,s]") == {"b": Dim("b", 1, 8, 64), "s": Dim("s", 1, 8, 64)}
    assert _named(Halves(), "x[b,s=2:8:64]")["s"] == Dim("s", 2, 8, 64, step=2)


@pytest.mark.parametrize(
    ("module", "inputs", "parts"),
    [
        (Fixed(), ["x[b,f]"], ["'f'", "f=1:8:64", "size 8"]),
        (Fixed(), ["x[b,f=1:16:32]"], ["f=16", "the Linear expects 8 features but got 16"]),
        (Instance(), ["x[b,c,l]"], ["'c'", "c=1:8:64", "size 5", "write 5"]),
        (Instance(), ["x[b,c=1:5:9,l]"], ["'c'", "c=1:5:9", "size 5"]),
        (Table(), ["x[b,s=1:8:64,4]"], ["s=1:8:64", "from 1 to 12"]),
        (Halves(), ["x[b,s=1:8:64]"], ["s=1:8:64", "multiples of 2"]),
        (Sum(), ["x[b,s]", "y[b,8]"], ["'s'", "s=1:8:64", "size 8"]),
        (Sum(), ["x[b,s]", "y[b,t]"], ["'s'", "'t'", "always equal"]),
        (Sum(), ["x[b,3]", "y[b,4]"], ["float32[8, 3]", "float32[8, 4]", "does not run"]),
    ],
)
def test_dims_that_can_not_be_had_are_named(module: nn.Module, inputs: list[str], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        _bounds(module, inputs)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert "dynamic_shapes" not in str(caught.value)


@pytest.mark.parametrize("name", ["N", "S", "E", "I", "beta", "s0", "min", "lambda", "_n"])
def test_any_name_will_do(name: str) -> None:
    assert list(_named(Halves(), f"x[b,{name}]")) == ["b", name]


def test_the_example_does_not_specialise() -> None:
    """Sizes 0 and 1 are constants to torch.export, and equal sizes may hide that two dims differ."""
    assert _named(Sum(), "x[b=1:1:8,3]", "y[b,3]")["b"] == Dim("b", 1, 1, 8)
    model = from_module(Sum().eval(), (torch.ones(1, 3), torch.ones(1, 3)), inputs=["x[b,3]", "y[b,3]"])
    assert model.named_dims["b"].is_dynamic
    run = model.program.module()
    assert run(torch.ones(5, 3), torch.ones(5, 3)).shape == (5, 3)
    assert run(torch.ones(1, 3), torch.ones(1, 3)).shape == (1, 3)


def _program(module: nn.Module, args: tuple[Any, ...], shapes: Any, path: Path) -> Path:
    torch.export.save(torch.export.export(module.eval(), args, dynamic_shapes=shapes, strict=False), path)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shape = {0: ExportDim("batch", min=1, max=16), 1: ExportDim("seq", min=2, max=12)}
    ids, types, mask = torch.zeros(3, 3, 7, dtype=torch.int64).unbind()
    return _program(Encoder(), (ids, types, mask), (shape, shape, shape), tmp_path / "m.pt2")


def test_inputs_of_a_program(saved: Path) -> None:
    model = load(saved)
    assert [(spec.name, spec.dtype, spec.range) for spec in model.inputs] == [
        ("ids", "int64", (0, 50)),
        ("types", "int64", (0, 2)),
        ("mask", "int64", (0, 2)),
    ]
    assert {spec.shape for spec in model.inputs} == {(Dim("d0", 1, 3, 16), Dim("d1", 2, 7, 12))}


def test_names_and_ranges_for_a_program(saved: Path) -> None:
    model = load(saved, inputs=["a[batch,seq]", "b[batch,seq]", "c[batch,seq]"], dims=["seq=2:4:8"])
    assert [spec.name for spec in model.inputs] == ["a", "b", "c"]
    assert model.named_dims == {"batch": Dim("batch", 1, 3, 16), "seq": Dim("seq", 2, 4, 8)}
    assert load(saved, inputs=["types[batch,seq]{0:1}"]).inputs[1].range == (0, 1)
    assert load(saved, dims=["d1=3:4:5"]).named_dims["d1"] == Dim("d1", 3, 4, 5)


@pytest.mark.parametrize(
    ("inputs", "dims", "message"),
    [
        (["ids:int32[b,s]"], [], "int32.*expects int64"),
        (["ids[b]"], [], r"1 dims.*expects 2"),
        (["ids[b,7]"], [], "fixed size 7.*dynamic in the program"),
        (["ids[b,s]", "other[b,s]"], [], "'other' is not one of the program's inputs: ids, types, mask"),
        (["ids[b,s]", "types[b,t]"], [], "'s' and 't' are always equal"),
        ([], ["d1=1:4:12"], "d1=1:4:12.*2 to 12"),
        ([], ["d1=2:4:13"], "d1=2:4:13.*2 to 12"),
        ([], ["seq=2:4:8"], "'seq' is not in any input: the dynamic dims are d0, d1"),
    ],
)
def test_wishes_that_contradict_a_program(saved: Path, inputs: list[str], dims: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(saved, inputs=inputs, dims=dims)


def test_a_program_exported_fixed_can_not_become_dynamic(tmp_path: Path) -> None:
    path = _program(Sum(), (torch.ones(3, 4), torch.ones(3, 4)), None, tmp_path / "m.pt2")
    assert [spec.shape for spec in load(path).inputs] == [(Dim.from_size(3), Dim.from_size(4))] * 2
    with pytest.raises(InputError, match=r"'batch' .*batch=1:8:64.*fixed size 3"):
        load(path, inputs=["x[batch,4]", "y[batch,4]"])
    with pytest.raises(InputError, match=r"the program fixes all sizes.*export the module again with dynamic_shapes"):
        load(path, dims=["batch=1:2:8"])
    with pytest.raises(InputError, match="size 5, but the program expects 3"):
        load(path, inputs=["x[5,4]"])


def test_conditions_of_a_program_move_the_ends_of_its_ranges(tmp_path: Path) -> None:
    """``batch * seq`` must be a multiple of 4: at batch 3 the sizes 4, 8, ... of seq are left."""
    batch, seq = ExportDim("batch", min=1, max=16), ExportDim("seq", min=1, max=30)
    path = _program(Quarters(), (torch.ones(3, 8),), ({0: batch, 1: seq},), tmp_path / "m.pt2")
    model = load(path)
    run = model.program.module()
    assert model.named_dims["d1"] == Dim("d1", 4, 8, 28, step=4)
    for name, dim in model.named_dims.items():
        for size in (dim.min, dim.opt, dim.max):
            run(torch.ones(*model.inputs[0].concrete_shape({name: size})))
    with pytest.raises(InputError, match=r"size 1, at which the program's condition .* fails"):
        load(path, dims=["d1=1:8:28"])


def test_dependent_dims_are_refused(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x]) + y

    n = ExportDim("n", min=2, max=16)
    path = _program(Twice(), (torch.ones(3), torch.ones(6)), ({0: n}, {0: 2 * n}), tmp_path / "m.pt2")
    with pytest.raises(InputError, match="depend on each other"):
        load(path)


def test_dims_named_by_dynamic_shapes() -> None:
    batch = ExportDim("batch", min=1, max=9)
    for shapes in ({"x": {0: batch}, "y": {0: batch}}, ({0: batch}, (batch, None))):
        model = from_module(Sum().eval(), (torch.ones(3, 4), torch.ones(3, 4)), dynamic_shapes=shapes)
        assert model.named_dims == {"batch": Dim("batch", 1, 3, 9)}
    model = from_module(
        Sum().eval(), (torch.ones(3, 4), torch.ones(3, 4)), dynamic_shapes=({0: ExportDim.AUTO}, {0: ExportDim.AUTO})
    )
    assert list(model.named_dims) == ["d0"]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": {1: ExportDim("f", min=1, max=64)}}, r"'f' .*dynamic.*size 8"),
        ({"z": {0: ExportDim("b", min=1, max=64)}}, "dynamic_shapes do not fit"),
    ],
)
def test_dynamic_shapes_that_do_not_fit(shapes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_module(Fixed().eval(), (torch.ones(3, 8),), dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], r"needs example inputs.*--input.*Sum\(x, y\)"),
        (["x[2]"], "it also needs 'y': describe it with --input 'y:"),
        (["z[2]", "x[2]"], r"'z' is not a parameter of Sum"),
        (["a[2]", "b[2]", "c[2]"], "too many"),
    ],
)
def test_inputs_that_do_not_fit_the_forward(inputs: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _bounds(Sum(), inputs)


def test_inputs_by_position_keep_their_own_names() -> None:
    model = _bounds(Sum(), ["left[b]", "right[b]"])
    assert [spec.name for spec in model.inputs] == ["left", "right"]
    assert [spec.name for spec in _bounds(Sum(), ["y[b]", "x[b]"]).inputs] == [
        "x",
        "y",
    ]  # by name: in the forward's order


def test_flags_that_contradict_each_other() -> None:
    shapes = ({0: ExportDim("b", min=1, max=9)}, None)
    with pytest.raises(InputError, match="passed twice"):
        from_module(Sum().eval(), (torch.ones(2, 3),) * 2, inputs=["x[b,3]", "y[b,3]"], dynamic_shapes=shapes)
    with pytest.raises(InputError, match="without example arguments"):
        from_module(Sum().eval(), inputs=["x[2,3]", "y[2,3]"], dynamic_shapes=shapes)
    with pytest.raises(InputError, match="'c' is not in any input: the dynamic dims are b"):
        _bounds(Sum(), ["x[b]", "y[b]"], ["c=1:2:3"])


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_what_torch_export_can_not_trace() -> None:
    with pytest.raises(ExportError, match="can't trace Branching"):
        _bounds(Branching(), ["x[b]"])


def test_complex_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="complex64"):
        from_module(Sum().eval(), (torch.ones(2, dtype=torch.complex64),) * 2)


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3, 5), lambda: torch.ones(3, 4, 1), lambda: torch.ones(3, 4, dtype=torch.float16)]
)
def test_examples_that_contradict_the_inputs(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(InputError, match="example"):
        from_module(Sum().eval(), (make(), make()), inputs=["x:float32[b,4]", "y:float32[b,4]"])


FIVE = ["ids", "mask", "positions", "kinds", "labels"]


def test_one_original_name_may_be_kept_where_all_are_renamed() -> None:
    wishes = parse_input_request([f"{name}:int64[n]" for name in ("ids", "a", "b", "c", "labels")], []).inputs
    assert match_requested_inputs(FIVE, wishes, "the inputs of Net") == list(wishes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["ids", "labels", "a", "b", "c"], "'labels' is the name of input 5: move it there"),
        (
            ["ids", "maks"],
            r"the input 'maks' is not one of .* \(is 'mask' meant\?\); use those names, or pass all 5 .* \(passed: 2\)",
        ),
        (["ids", "maks", "positions", "kinds", "labels"], r"\(is 'mask' meant\?\); use that name"),
        (["a", "b"], r"pass all 5 in their order under any names \(passed: 2\)"),
    ],
)
def test_names_that_do_not_fit_are_explained(given: list[str], said: str) -> None:
    wishes = parse_input_request([f"{name}:int64[n]" for name in given], []).inputs
    with pytest.raises(InputError, match=said):
        match_requested_inputs(FIVE, wishes, "the inputs of Net")


class TwoInputs(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right


def test_a_live_module_takes_kept_and_new_names_too() -> None:
    assert [spec.name for spec in from_module(TwoInputs().eval(), inputs=["left[2,4]", "other[2,4]"]).inputs] == [
        "left",
        "other",
    ]
    with pytest.raises(
        InputError, match=r"'rihgt' is not a parameter .*is 'right' meant\?.*'left' only in its own position"
    ):
        from_module(TwoInputs().eval(), inputs=["rihgt[2,4]", "left[2,4]"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fp32", "float32"), ("F16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("Long", "int64")],
)
def test_types_in_every_usual_spelling(name: str, kind: str) -> None:
    assert parse_input_request([f"x:{name}[n]"], []).inputs[0].dtype == kind
