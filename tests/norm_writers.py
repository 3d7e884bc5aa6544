"""Writers: the same calls become PyTorch source text, or the nodes of an ONNX graph.

A norm is spelled once, as calls on a ``Writer`` (``w.sub(x, w.mean(x, axes))``), and comes out by either route.
Whatever can be said in more than one way is drawn from ``Choices``, which records the choice vector, so that a failing
example can be printed and replayed. Nothing here imports normdeploy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Size = int | str  # a str names a dynamic dim ("B"), or is a product of dims ("B*S")
Draw = Callable[[str, Sequence[Any]], Any]
Tables = Mapping[str, Mapping[str, "Spelling"]]


@dataclass(frozen=True)
class Spelling:
    """One way to write something; ``when`` says where it can be used."""

    write: Callable[..., Any]
    when: Callable[..., bool]


class Book(dict[str, dict[str, Spelling]]):
    """The spellings known at each point of choice."""

    def spelling(
        self, point: str, name: str, when: Callable[..., bool] = lambda *_: True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(write: Callable[..., Any]) -> Callable[..., Any]:
            self.setdefault(point, {})[name] = Spelling(write, when)
            return write

        return register

    def merged(self, other: Book) -> Book:
        """Both books' spellings."""
        return Book({point: {**self.get(point, {}), **other.get(point, {})} for point in {**self, **other}})


def random_draw(seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    return lambda _, options: options[int(rng.integers(len(options)))]


class Choices:
    """Draws, and remembers what was drawn: the choice vector."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._seen: Counter[str] = Counter()
        self.vector: dict[str, Any] = {}

    def __call__(self, point: str, options: Sequence[Any]) -> Any:
        self._seen[point] += 1
        key = point if self._seen[point] == 1 else f"{point}#{self._seen[point]}"
        self.vector[key] = self._draw(key, list(options))
        return self.vector[key]

    @classmethod
    def seeded(cls, seed: int) -> Choices:
        return cls(random_draw(seed))

    @classmethod
    def replayed(cls, vector: Mapping[str, Any], draw: Draw | None = None) -> Choices:
        """The same choices again; ``draw`` (default: the first option) for what the vector does not hold."""

        def choose(key: str, options: Sequence[Any]) -> Any:
            if key in vector:
                return next(option for option in options if json.dumps(option) == json.dumps(vector[key]))
            return draw(key, options) if draw else options[0]

        return cls(choose)


@dataclass(frozen=True)
class T:
    """A tensor in the text being written."""

    name: str
    shape: tuple[Size, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)


Operand = T | float


def broadcast(*shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    rank = max(map(len, shapes))
    columns = zip(*[(1,) * (rank - len(s)) + s for s in shapes], strict=True)
    return tuple(next((size for size in column if size != 1), 1) for column in columns)


@dataclass
class Writer:
    """What both writers share: the choices, the book, the parameters, and everything that is made of smaller calls."""

    choices: Choices
    book: Tables
    dtype: str = "float32"
    params: dict[str, np.ndarray] = field(default_factory=dict)
    dims: dict[str, tuple[T, int]] = field(default_factory=dict)  # dynamic dim -> where a shape shows it
    count: int = 0

    def spell(self, point: str, *args: Any) -> Any:
        """Write one of the spellings known at ``point``."""
        usable = {name: s for name, s in self.book[point].items() if s.when(self, *args)}
        return usable[self.choices(point, list(usable))].write(self, *args)

    def fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}{self.count}"

    def size(self, x: T, axes: Sequence[int]) -> int | None:
        """How many elements ``axes`` hold; None where that is dynamic."""
        sizes = [x.shape[a] for a in axes]
        return None if any(isinstance(s, str) for s in sizes) else int(np.prod([int(s) for s in sizes]))

    def n(self, x: T, axes: Sequence[int]) -> Operand:
        """The number of elements as a number, or computed from the shape."""
        size = self.size(x, axes)
        return self.shape_product(x, axes) if size is None else float(size)

    # --- elementwise; both writers implement binary, unary and power ---
    def add(self, a: Operand, b: Operand) -> T:
        return self.binary("add", a, b)

    def sub(self, a: Operand, b: Operand) -> T:
        return self.binary("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> T:
        return self.binary("mul", a, b)

    def div(self, a: Operand, b: Operand) -> T:
        return self.binary("div", a, b)

    def reduced(self, x: T, axes: Sequence[int], keepdims: bool) -> tuple[Size, ...]:
        sizes = [1 if a in axes else s for a, s in enumerate(x.shape)]
        return tuple(sizes) if keepdims else tuple(s for a, s in enumerate(sizes) if a not in axes)

    def binary(self, op: str, a: Operand, b: Operand) -> T:
        raise NotImplementedError

    def unary(self, op: str, a: T) -> T:
        raise NotImplementedError

    def power(self, a: T, exponent: float) -> T:
        raise NotImplementedError

    def clamp_min(self, a: T, low: float) -> T:
        raise NotImplementedError

    def reduce(self, op: str, x: T, axes: Sequence[int], keepdims: bool = True) -> T:
        raise NotImplementedError

    def moments(self, x: T, axes: Sequence[int], ddof: int, want: str) -> tuple[T, ...]:
        """torch's own var, std, or var_mean over ``axes``, dims kept."""
        raise NotImplementedError

    def reshape(self, x: T, shape: tuple[Size, ...]) -> T:
        raise NotImplementedError

    def transpose(self, x: T, perm: Sequence[int]) -> T:
        raise NotImplementedError

    def unsqueeze(self, x: T, axes: Sequence[int]) -> T:
        raise NotImplementedError

    def expand(self, x: T, like: T) -> T:
        raise NotImplementedError

    def cast(self, x: T, dtype: str) -> T:
        raise NotImplementedError

    def take(self, x: T, axis: int, start: int, stop: int) -> T:
        raise NotImplementedError

    def shape_product(self, x: T, axes: Sequence[int]) -> T:
        raise NotImplementedError

    def param(self, name: str, values: np.ndarray) -> T:
        raise NotImplementedError


@dataclass
class TorchWriter(Writer):
    """Writes the forward of an ``nn.Module``."""

    lines: list[str] = field(default_factory=list)

    def new(self, hint: str, text: str, shape: tuple[Size, ...], dtype: str) -> T:
        name = self.fresh(hint)
        self.lines.append(f"{name} = {text}")
        return T(name, shape, dtype)

    def input(self, name: str, shape: tuple[Size, ...]) -> T:
        x = T(name, shape, self.dtype)
        self.dims.update({s: (x, a) for a, s in enumerate(shape) if isinstance(s, str)})
        return x

    def param(self, name: str, values: np.ndarray) -> T:
        name = self.fresh(name)
        self.params[name] = values
        return T(f"self.{name}", values.shape, self.dtype)

    def binary(self, op: str, a: Operand, b: Operand) -> T:
        sign = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[op]
        tensors = [t for t in (a, b) if isinstance(t, T)]
        left, right = (t.name if isinstance(t, T) else repr(t) for t in (a, b))
        return self.new("t", f"{left} {sign} {right}", broadcast(*(t.shape for t in tensors)), tensors[0].dtype)

    def unary(self, op: str, a: T) -> T:
        return self.new("t", f"-{a.name}" if op == "neg" else f"torch.{op}({a.name})", a.shape, a.dtype)

    def power(self, a: T, exponent: float) -> T:
        return self.new(
            "t", f"{a.name}.pow({exponent:g})" if exponent > 0 else f"{a.name} ** {exponent:g}", a.shape, a.dtype
        )

    def clamp_min(self, a: T, low: float) -> T:
        return self.new("t", f"{a.name}.clamp(min={low!r})", a.shape, a.dtype)

    def reduce(self, op: str, x: T, axes: Sequence[int], keepdims: bool = True) -> T:
        dims = ", ".join(map(str, axes))
        dims = f"({dims},)" if len(axes) == 1 else f"({dims})"
        text = {
            "l2": f"torch.linalg.vector_norm({x.name}, dim={dims}, keepdim={keepdims})",
            "l1": f"torch.linalg.vector_norm({x.name}, ord=1, dim={dims}, keepdim={keepdims})",
            "max": f"torch.amax({x.name}, dim={dims}, keepdim={keepdims})",
        }.get(op, f"{x.name}.{op}({dims}, keepdim={keepdims})")
        return self.new("r", text, self.reduced(x, axes, keepdims), x.dtype)

    def moments(self, x: T, axes: Sequence[int], ddof: int, want: str) -> tuple[T, ...]:
        shape = self.reduced(x, axes, True)
        names = [self.fresh("v"), self.fresh("m")] if want == "var_mean" else [self.fresh("v")]
        self.lines.append(
            f"{', '.join(names)} = torch.{want}({x.name}, dim={tuple(axes)}, correction={ddof}, keepdim=True)"
        )
        return tuple(T(name, shape, x.dtype) for name in names)

    def size_text(self, size: Size) -> str:
        if isinstance(size, str) and size in self.dims:
            x, axis = self.dims[size]
            return f"{x.name}.shape[{axis}]"
        return "-1" if isinstance(size, str) else str(size)

    def reshape(self, x: T, shape: tuple[Size, ...]) -> T:
        dynamic = [a for a, s in enumerate(shape) if isinstance(s, str)]
        sizes = [self.size_text(s) for s in shape]
        if "-1" not in sizes:
            infer = self.choices("reshape.infer", [None, *(dynamic if len(dynamic) == 1 else range(len(shape)))])
            if infer is not None:
                sizes[infer] = "-1"
        return self.new("s", f"{x.name}.reshape({', '.join(sizes)})", shape, x.dtype)

    def transpose(self, x: T, perm: Sequence[int]) -> T:
        return self.new("p", f"{x.name}.permute({', '.join(map(str, perm))})", tuple(x.shape[a] for a in perm), x.dtype)

    def unsqueeze(self, x: T, axes: Sequence[int]) -> T:
        text, shape = x.name, list(x.shape)
        for axis in sorted(axes):
            text += f".unsqueeze({axis})"
            shape.insert(axis, 1)
        return self.new("s", text, tuple(shape), x.dtype)

    def expand(self, x: T, like: T) -> T:
        return self.new("s", f"{x.name}.expand_as({like.name})", like.shape, x.dtype)

    def cast(self, x: T, dtype: str) -> T:
        return self.new("c", f"{x.name}.to({dtype})", x.shape, dtype)

    def take(self, x: T, axis: int, start: int, stop: int) -> T:
        shape = tuple(stop - start if a == axis else s for a, s in enumerate(x.shape))
        return self.new("k", f"{x.name}.narrow({axis}, {start}, {stop - start})", shape, x.dtype)

    def shape_product(self, x: T, axes: Sequence[int]) -> T:
        name = self.fresh("n")
        self.lines.append(f"{name} = " + " * ".join(f"{x.name}.shape[{a}]" for a in axes))
        return T(name, (), x.dtype)

    def raw(self, text: str, shape: tuple[Size, ...], dtype: str) -> T:
        """An expression that only torch can say."""
        return self.new("q", text, shape, dtype)

    def source(self, inputs: Sequence[T], outputs: Sequence[T]) -> str:
        """The module as text. The line of dtypes is the one thing that an exact evaluation replaces."""
        body = "\n".join(f"        {line}" for line in [*self.lines, f"return {', '.join(t.name for t in outputs)}"])
        held = (
            "\n".join(
                f'        self.register_buffer("{n}", params["{n}"])  # {tuple(v.shape)}'
                for n, v in self.params.items()
            )
            or "        pass"
        )
        arguments = "".join(f", {x.name}" for x in inputs)
        return (
            "import torch\nimport torch.nn.functional as F\n"
            "float16, float32, float64 = torch.float16, torch.float32, torch.float64\n\n\n"
            "class Norm(torch.nn.Module):\n    def __init__(self, params):\n        super().__init__()\n"
            f"{held}\n\n    def forward(self{arguments}):\n{body}\n"
        )
