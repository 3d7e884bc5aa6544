"""How an op becomes one kernel launch: values that the interpreter, the ahead-of-time compiler, a GPU test and TensorRT
all read.

Sizes are ints or TensorRT's symbolic expressions; those know ``+ − * //`` and ``==`` with an int on the right, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Size = Any  # int or a symbolic expression of TensorRT
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1, "fp8e4nv": 1}
QUANTIZED = {"int8": "i8", "fp8": "fp8e4nv"}  # what an attribute ``to`` may be, and Triton's name of that type
# Texts that an attribute may hold; plugin nodes hold their places here. The bindings of TensorRT 10.9 to 10.15 garble
# texts under NumPy 2.
TEXTS = ("none", "relu", "silu", "int8", "fp8")


class Unknown:
    """A size that is not known when the engine is built and that nothing is computed from."""

    is_fake = True


@dataclass(frozen=True)
class Tensor:
    """Shape and Triton's name of the type (fp32, fp16, bf16; of a quantized output i8 or fp8e4nv)."""

    shape: tuple[Size, ...]
    dtype: str


@dataclass(frozen=True)
class Tile:
    """What one program works on: ``rows`` × ``block`` elements by ``warps`` warps; ``loop`` over further blocks where
    the row is longer; ``pack``: how many groups lie side by side in it, or channels of one group in one row of it."""

    rows: int
    block: int
    warps: int
    loop: bool = False
    pack: int = 1


@dataclass(frozen=True)
class Launch:
    """One kernel, one launch, a grid of one dim. Arguments: the op's inputs, ``scalars`` (int32) in order, its outputs,
    ``constants``.

    A tensor may hold more than 2³¹ elements, but sizes and TensorRT's expressions are int32: no number of rows nor the
    length of one may reach 2³¹. None of the expressions is larger than both: rows, a row, and blocks of rows are all
    that is ever multiplied out.

    Raises ValueError where a size that is known is too large.
    """

    kernel: Any
    grid: Size
    scalars: dict[str, Size]
    constants: dict[str, Any]
    warps: int

    def __post_init__(self) -> None:
        for name, size in {"grid": self.grid, **self.scalars}.items():
            check_size(name, size)


def check_size(name: str, size: Size) -> None:
    if isinstance(size, int) and size >= 2**31:
        raise ValueError(
            f"{name} is {size}, but kernels support only sizes below 2**31 = {2**31}; keep this norm unchanged"
        )


@dataclass(frozen=True)
class Op:
    """One op of the domain ``normdeploy``.

    ``types`` has a letter for each input, then for each output: T the type of the data, P that of parameters (the
    data's, or fp32), F fp32, Q the quantized type that the attribute ``to`` says. ``outputs`` gives the outputs' shapes
    from the inputs' (None: each is like the first input); shapes may be symbolic. ``tiles`` lists the tactics, the
    default first; it may look at constant sizes alone. ``reference`` takes and gives float64 arrays; attributes go by
    name.
    """

    name: str
    inputs: tuple[str, ...]
    types: str
    attributes: dict[str, type]
    tiles: Callable[[Sequence[Tensor], dict[str, Any]], list[Tile]]
    launch: Callable[[Sequence[Tensor], dict[str, Any], Tile], Launch]
    reference: Callable[..., Any]
    outputs: tuple[str, ...] = ("y",)
    shapes: Callable[[Sequence[Tensor], dict[str, Any]], list[tuple[Size, ...]]] | None = None
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # attribute: the values that it may have
    # of inputs (N, C, H, W) whose memory is (N, H, W, C): the op, inputs and attributes that compute the same there
    beside: Callable[[Sequence[Tensor], dict[str, Any]], Call | None] | None = None

    def encoded(self, attributes: Mapping[str, Any]) -> dict[str, int | float]:
        """The attributes as a plugin node holds them, in the order in which they are registered."""
        return {
            name: TEXTS.index(attributes[name]) if kind is str else kind(attributes[name])
            for name, kind in self.attributes.items()
        }

    def decoded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes from arrays of one number. Raises ValueError where one is missing or can't be what it is."""
        missing = [name for name in self.attributes if name not in given]
        if missing:
            raise ValueError(f"{self.name}: the node lacks {', '.join(missing)}; plugins have no defaults")
        read: dict[str, Any] = {}
        for name, kind in self.attributes.items():
            if given[name].size != 1:
                raise ValueError(f"{self.name}: {name} has {given[name].size} numbers; expected one")
            value = given[name].item()
            read[name] = TEXTS[value] if kind is str and value in range(len(TEXTS)) else value
            allowed = self.required.get(name)
            if allowed and read[name] not in allowed:
                raise ValueError(
                    f"{self.name}: {name} is {read[name]!r}; expected one of {', '.join(map(repr, allowed))}"
                )
        return read

    def output_tensors(self, inputs: Sequence[Tensor], attributes: dict[str, Any]) -> list[Tensor]:
        shapes = self.shapes(inputs, attributes) if self.shapes else [inputs[0].shape] * len(self.outputs)
        kinds = self.types[len(self.inputs) :]
        named = {"F": "fp32", "Q": QUANTIZED.get(attributes.get("to", ""), "")}
        return [Tensor(shape, named.get(kind, inputs[0].dtype)) for shape, kind in zip(shapes, kinds, strict=True)]


Call = tuple[Op, list[Tensor], dict[str, Any]]


def in_channels_last(op: Op, inputs: Sequence[Tensor], attributes: dict[str, Any]) -> Call | None:
    """What computes ``op`` where x and y are in TensorRT's format HWC8, None where nothing does. HWC8 pads the channels
    to a multiple of 8 and holds half precision alone; without padding it is (N, H, W, C)."""
    x = inputs[0]
    channels = constant(x.shape[1]) if len(x.shape) == 4 else None
    if op.beside is None or attributes.get("channels_last") or not channels or channels % 8:
        return None
    samples, _, *positions = x.shape
    return op.beside([Tensor((samples, *positions, channels), x.dtype), *inputs[1:]], attributes)


def constant(size: Size) -> int | None:
    """The value of a size that is known when the engine is built, None for a dynamic one (also while TensorRT asks with
    fake shapes)."""
    if isinstance(size, int):
        return size
    return None if size.is_fake or not size.is_constant else int(size.constant_value())


def constant_product(sizes: Iterable[Size]) -> int | None:
    """The product where every size is constant; does no symbolic arithmetic, which TensorRT forbids while it asks for
    tactics."""
    result = 1
    for size in sizes:
        value = constant(size)
        if value is None:
            return None
        result *= value
    return result


def product(sizes: Iterable[Size]) -> Size:
    """The product, an int where it is constant; constants are multiplied first, from the right (TensorRT has no ``int *
    expression``)."""
    factor, symbolic = 1, None
    for size in sizes:
        value = constant(size)
        if value is not None:
            factor *= value
        else:
            symbolic = size if symbolic is None else symbolic * size
    if symbolic is None:
        return factor
    return symbolic if factor == 1 else symbolic * factor


def one_each(shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
    """The shape of one number for each row, of the same rank: the dims from ``axis`` on are 1."""
    return (*shape[:axis], *(1,) * len(shape[axis:]))


def cdiv(size: Size, divisor: int) -> Size:
    return size if divisor == 1 else (size + (divisor - 1)) // divisor


def programs(size: Size) -> Size:
    """A grid of ``size`` programs; one (whose rows are all masked) where the batch is empty, as CUDA refuses a grid of
    0."""
    return size + (size == 0) * 1


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# Elements that one program keeps in registers: at 16,384 and 8 or more warps nothing spills in any type
# (tests/plugins/test_aot.py).
REGISTER_TILE = 16384
# More warps than 8 wait for each other in every reduction: on an H200 a LayerNorm of 16,384 columns took 109 µs with 16
# or 32 of them and 75 µs with 8 (benchmarks/results/kernels.md).
USUAL_WARPS = 8
# Elements and warps of a program that reads a longer row piece by piece. 8 elements a thread, one access of 16 bytes in
# half precision, take 40 to 56 registers in most kernels, 16 take 64 and more (benchmarks/results/roofline.md).
LOOPED = ((4096, 16), (2048, 8), (8192, 16), (1024, 4))
# The same for rows that are known to be longer than REGISTER_TILE: on an H200 rows of 65,536 took 112 µs by 1024
# elements at a time, 107 by 4096, 93 by 8192 and 80 by 16,384; groups of 20,480 took 85 by 4096, 92 by 8192 and 108 by
# 16,384.
LONG = ((8192, 16), (4096, 16), (16384, 16))
# From about this many elements a program on, a block has enough loads in flight; smaller rows share a program.
SMALL_TILE = 2048


def warps_for(elements: int, per_thread: int) -> int:
    return min(32, max(1, elements // (32 * per_thread)))


def usual_warps(elements: int) -> int:
    """16 elements a thread, or more where that would be more warps than USUAL_WARPS."""
    return min(USUAL_WARPS, warps_for(elements, 16))


def row_tiles(n: int | None, *, heavy: bool = False) -> list[Tile]:
    """Tactics for rows of ``n`` contiguous elements, the default first; None is a length known only when the engine
    runs. What is ``heavy`` computes or reads more for each element than a norm alone: fewer threads, and pieces in
    place of idle lanes, are then faster."""
    if n is None:
        return [Tile(1, size, warps, loop=True) for size, warps in LOOPED]
    if next_power_of_2(n) > REGISTER_TILE:
        return [Tile(1, size, warps, loop=True) for size, warps in LONG]
    block = next_power_of_2(n)
    tiles = [
        Tile(max(1, size // block), block, usual_warps(max(size, block)))
        for size in (SMALL_TILE, SMALL_TILE // 2, 2 * SMALL_TILE)
    ]
    tiles += [Tile(tiles[0].rows, block, warps_for(tiles[0].rows * block, per)) for per in (16, 8, 32)]
    if heavy:
        one = max(SMALL_TILE // 2, block)
        tiles.insert(0, Tile(one // block, block, min(USUAL_WARPS, warps_for(one, 32))))
    if n % 4 and block <= 256:  # of 2 bytes at once: a warp for itself then needs half as many instructions
        tiles.insert(0, Tile(256 // block, block, 1))
    pieces = in_pieces(n, block)
    first = heavy and block > SMALL_TILE // 2
    tiles = [*pieces, *tiles] if first else [*tiles, *pieces]
    return [t for t in dict.fromkeys(tiles) if t.rows * t.block // (32 * t.warps) <= 64]


def in_pieces(n: int, block: int) -> list[Tile]:
    """The tile that reads a row of ``n`` elements piece by piece though ``block`` elements fit into registers; none
    where nothing speaks for it."""
    piece = n & -n
    idle = 4 * (block - n) >= block
    if idle and piece >= 256:  # 5120 and 10240: more than a third of the lanes would be idle
        return [Tile(max(1, 1024 // piece), piece, warps_for(max(1024, piece), 8), loop=True)]
    if idle and piece == 128:  # 1152
        return [Tile(1, 512, 2, loop=True)]
    if block == REGISTER_TILE:  # which a block holds, and no other beside it
        return [Tile(1, *LOOPED[0], loop=True)]
    return []


def row_launch(kernel: Any, x: Tensor, axis: int, tile: Tile, constants: dict[str, Any], **scalars: Size) -> Launch:
    """A kernel over rows: dims from ``axis`` on are a row, those before it count the rows."""
    rows, n = product(x.shape[:axis]), product(x.shape[axis:])
    return Launch(
        kernel,
        programs(cdiv(rows, tile.rows)),
        {"rows": rows, "n": n} | scalars,
        constants | {"ROWS": tile.rows, "BLOCK": tile.block, "LOOP": tile.loop},
        tile.warps,
    )
