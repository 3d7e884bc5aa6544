"""Describe an op's kernel launch by values that four users share: Triton's interpreter, the ahead-of-time compiler, GPU
tests and TensorRT.

Sizes are ints or TensorRT's symbolic expressions. Expressions support only ``+ − * //`` and ``==``, with an int on the
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# An int, or a symbolic expression of TensorRT.
Size = Any
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1, "fp8e4nv": 1}
# Values of an attribute ``to`` -> Triton's name of the type.
QUANTIZED = {"int8": "i8", "fp8": "fp8e4nv"}
# Texts that an attribute may have. A plugin node stores the position of a text in this tuple, because the bindings of
# TensorRT 10.9 to 10.15 corrupt texts under NumPy 2.
TEXTS = ("none", "relu", "silu", "int8", "fp8")


class Unknown:
    """Size that is unknown when the engine is built. No other value is computed from this size."""

    is_fake = True


@dataclass(frozen=True)
class Tensor:
    """Shape and Triton's name of the type (fp32, fp16, bf16; i8 or fp8e4nv for a quantized output)."""

    shape: tuple[Size, ...]
    dtype: str


@dataclass(frozen=True)
class Tile:
    """Work of one program: ``rows`` × ``block`` elements by ``warps`` warps.

    Attributes:
        loop: True if the program loops over further blocks, for rows longer than ``block``.
        pack: number of groups that are side by side in the tile, or number of channels of one group in one row of the
            tile.
    """

    rows: int
    block: int
    warps: int
    loop: bool = False
    pack: int = 1


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel, with a one-dimensional grid.

    The arguments are the op's inputs, ``scalars`` (int32) in order, its outputs, and ``constants``. A tensor may have
    more than 2³¹ elements, but sizes and TensorRT's expressions are int32. So neither the number of rows nor the length
    of a row may reach 2³¹. No expression is larger than these two, because only dims within the rows, within a row, and
    blocks of rows are multiplied.

    Raises:
        ValueError: a known size is too large.
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
    """Check that a known size is below 2³¹.

    Raises:
        ValueError: the size is 2³¹ or more.
    """
    if isinstance(size, int) and size >= 2**31:
        raise ValueError(
            f"{name} is {size}, but kernels support only sizes below 2**31 = {2**31}; keep this norm unchanged"
        )


@dataclass(frozen=True)
class Op:
    """One op of the domain ``normdeploy``.

    Attributes:
        types: one letter for each input, then for each output. T is the data's type. P is the parameters' type: the
            data's type or fp32. F is fp32. Q is the quantized type of the attribute ``to``.
        attributes: name -> Python type.
        tiles: function that lists the tactics, the default first. It may use only constant sizes.
        launch: makes the launch of a tactic.
        reference: computes the op on float64 arrays, with attributes as keywords.
        shapes: computes the outputs' shapes from the inputs' shapes, which may be symbolic; None if each output has the
            shape of the first input.
        required: attribute -> allowed values.
        beside: for inputs (N, C, H, W) that are stored as (N, H, W, C): returns the op, inputs and attributes that
            compute the same result in this memory format.
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
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    beside: Callable[[Sequence[Tensor], dict[str, Any]], Call | None] | None = None

    def encoded(self, attributes: Mapping[str, Any]) -> dict[str, int | float]:
        """Encode attributes for a plugin node.

        Returns:
            numbers, in the order of registration.
        """
        return {
            name: TEXTS.index(attributes[name]) if kind is str else kind(attributes[name])
            for name, kind in self.attributes.items()
        }

    def decoded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Decode attributes from arrays of one number.

        Returns:
            attributes, with texts in place of their positions.

        Raises:
            ValueError: an attribute is missing or has an invalid value.
        """
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
        """Describe the outputs.

        Returns:
            shape and type of each.
        """
        shapes = self.shapes(inputs, attributes) if self.shapes else [inputs[0].shape] * len(self.outputs)
        kinds = self.types[len(self.inputs) :]
        named = {"F": "fp32", "Q": QUANTIZED.get(attributes.get("to", ""), "")}
        return [Tensor(shape, named.get(kind, inputs[0].dtype)) for shape, kind in zip(shapes, kinds, strict=True)]


Call = tuple[Op, list[Tensor], dict[str, Any]]


def in_channels_last(op: Op, inputs: Sequence[Tensor], attributes: dict[str, Any]) -> Call | None:
    """Find the op that computes ``op`` if x and y are in TensorRT's format HWC8.

    HWC8 pads the channels to a multiple of 8, and exists for half precision only. If nothing is padded, it is (N, H, W,
    C).

    Returns:
        op, inputs and attributes; None if no op computes this.
    """
    x = inputs[0]
    channels = constant(x.shape[1]) if len(x.shape) == 4 else None
    if op.beside is None or attributes.get("channels_last") or not channels or channels % 8:
        return None
    samples, _, *positions = x.shape
    return op.beside([Tensor((samples, *positions, channels), x.dtype), *inputs[1:]], attributes)


def constant(size: Size) -> int | None:
    """Return the value of a size that is known when the engine is built.

    Returns:
        the value; None for a dynamic size, and while TensorRT calls with placeholder shapes.
    """
    if isinstance(size, int):
        return size
    return None if size.is_fake or not size.is_constant else int(size.constant_value())


def constant_product(sizes: Iterable[Size]) -> int | None:
    """Multiply sizes if all are constant. No symbolic arithmetic is used, because TensorRT forbids it while it requests
    the tactics.

    Returns:
        the product, or None.
    """
    result = 1
    for size in sizes:
        value = constant(size)
        if value is None:
            return None
        result *= value
    return result


def product(sizes: Iterable[Size]) -> Size:
    """Multiply sizes. Constants are multiplied first, and an expression is multiplied by their product on its right,
    because TensorRT has no ``int * expression``.

    Returns:
        an int if all sizes are constant, else an expression.
    """
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
    """Return the shape of a tensor with one number for each row, and the same rank as ``shape``.

    Returns:
        ``shape`` with 1 in place of the dims from ``axis`` on.
    """
    return (*shape[:axis], *(1,) * len(shape[axis:]))


def cdiv(size: Size, divisor: int) -> Size:
    """Divide and round up.

    Returns:
        int or expression.
    """
    return size if divisor == 1 else (size + (divisor - 1)) // divisor


def programs(size: Size) -> Size:
    """Return a grid of ``size`` programs.

    Returns:
        at least 1, because CUDA refuses a grid of 0. For an empty batch, there is one program, all of whose rows are
        masked.
    """
    return size + (size == 0) * 1


def next_power_of_2(n: int) -> int:
    """Round up to a power of 2.

    Returns:
        at least 1.
    """
    return 1 << max(n - 1, 0).bit_length()


# Maximum number of elements that one program keeps in registers. With 16,384 elements and 8 or more warps, nothing
# spills in any type (tests/plugins/test_aot.py).
REGISTER_TILE = 16384
# Maximum number of warps by default. With more warps, the warps wait longer for each other in every reduction: on an
# H200, a LayerNorm of 16,384 columns took 109 µs with 16 or 32 warps, and 75 µs with 8 (benchmarks/results/kernels.md).
USUAL_WARPS = 8
# Tactics for a program that reads a row in pieces, as (elements of a piece, warps), the default first. 8 elements per
# thread, which are one access of 16 bytes in half precision, take 40 to 56 registers in most kernels. 16 elements per
# thread take 64 registers and more (benchmarks/results/roofline.md).
LOOPED = ((4096, 16), (2048, 8), (8192, 16), (1024, 4))
# Tactics as in LOOPED for rows that are known to be longer than REGISTER_TILE. On an H200, rows of 65,536 elements took
# 112 µs with pieces of 1024 elements, 107 µs with 4096, 93 µs with 8192 and 80 µs with 16,384. Groups of 20,480
# elements took 85 µs with 4096, 92 µs with 8192 and 108 µs with 16,384.
LONG = ((8192, 16), (4096, 16), (16384, 16))
# Minimum number of elements per program with which a block has enough loads in flight. Rows shorter than this share a
# program.
SMALL_TILE = 2048


def warps_for(elements: int, per_thread: int) -> int:
    """Return the number of warps for ``elements`` with ``per_thread`` elements per thread.

    Returns:
        1 to 32.
    """
    return min(32, max(1, elements // (32 * per_thread)))


def usual_warps(elements: int) -> int:
    """Return the default number of warps. A thread gets 16 elements, or more if the number of warps would exceed
    USUAL_WARPS.

    Returns:
        1 to USUAL_WARPS.
    """
    return min(USUAL_WARPS, warps_for(elements, 16))


def row_tiles(n: int | None, *, heavy: bool = False) -> list[Tile]:
    """List the tactics for rows of ``n`` contiguous elements.

    Args:
        n: length of a row; None if it is known only at run time.
        heavy: True if the kernel computes or reads more for each element than a norm alone. Then tactics with fewer
            threads, or with pieces instead of idle lanes, come first, because they are faster.

    Returns:
        tactics, the default first.
    """
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
    # If the length of a row is not a multiple of 4, loads are only 2 bytes wide. In this case, a program of one warp
    # needs half as many instructions.
    if n % 4 and block <= 256:
        tiles.insert(0, Tile(256 // block, block, 1))
    pieces = in_pieces(n, block)
    first = heavy and block > SMALL_TILE // 2
    tiles = [*pieces, *tiles] if first else [*tiles, *pieces]
    return [t for t in dict.fromkeys(tiles) if t.rows * t.block // (32 * t.warps) <= 64]


def in_pieces(n: int, block: int) -> list[Tile]:
    """Return the tile that reads a row of ``n`` elements in pieces, if pieces are faster although ``block`` elements
    fit into registers.

    Returns:
        a list of one tile; an empty list if pieces have no advantage.
    """
    piece = n & -n
    idle = 4 * (block - n) >= block
    # Without pieces, more than a third of the lanes would be idle, for example for rows of 5120 or 10240 elements.
    if idle and piece >= 256:
        return [Tile(max(1, 1024 // piece), piece, warps_for(max(1024, piece), 8), loop=True)]
    # This applies, for example, to rows of 1152 elements.
    if idle and piece == 128:
        return [Tile(1, 512, 2, loop=True)]
    # A tile of this size leaves no registers for a second block on the multiprocessor.
    if block == REGISTER_TILE:
        return [Tile(1, *LOOPED[0], loop=True)]
    return []


def row_launch(kernel: Any, x: Tensor, axis: int, tile: Tile, constants: dict[str, Any], **scalars: Size) -> Launch:
    """Make the launch of a kernel over rows. The dims from ``axis`` on form a row. The product of the dims before
    ``axis`` is the number of rows.

    Returns:
        the launch.
    """
    rows, n = product(x.shape[:axis]), product(x.shape[axis:])
    return Launch(
        kernel,
        programs(cdiv(rows, tile.rows)),
        {"rows": rows, "n": n} | scalars,
        constants | {"ROWS": tile.rows, "BLOCK": tile.block, "LOOP": tile.loop},
        tile.warps,
    )
