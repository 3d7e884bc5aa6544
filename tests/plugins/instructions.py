"""PTX's instructions: how they are read, and what those that use no memory compute, for all threads of a block at once.

Approximate instructions (``div.full``, ``ex2.approx``) err by as much as the PTX manual allows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
TYPES: dict[str, Any] = {
    f"{k}{b}": np.dtype(f"{'i' if k == 's' else 'u'}{b // 8}") for k in "sub" for b in (8, 16, 32, 64)
}
TYPES |= {"f32": np.dtype(np.float32), "pred": np.dtype(bool)}
HALVES: dict[str, Any] = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
BANKS = {"%p": np.dtype(bool), "%rs": np.dtype("u2"), "%r": np.dtype("u4"), "%rd": np.dtype("u8")}


def _least(pick: Callable[..., Any]) -> Callable[..., Any]:
    """+0 is larger than −0, whichever stands first."""
    return lambda a, b: np.where((a == 0) & (b == 0), -((-a) + (-b)), pick(a, b)).astype(a.dtype)


def _greatest(pick: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: np.where((a == 0) & (b == 0), a + b, pick(a, b)).astype(a.dtype)


_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    # of numbers; a NaN is dropped where the other is none, but for .NaN (PTX ISA, "Floating Point Instructions: min"
    # and "max")
    "min": _least(np.fmin),
    "max": _greatest(np.fmax),
    "min.NaN": _least(np.minimum),
    "max.NaN": _greatest(np.maximum),
}
_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
SHARED = 1 << 20  # where a block's shared memory begins, in its own address space


@dataclass(frozen=True)
class Instruction:
    guard: str | None  # a predicate's name, with "!" before it where it is negated
    parts: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """``labels``: the index of the instruction behind each; ``parameters``: names, in order."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]
    threads: int


_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]\s]+")


@functools.lru_cache(maxsize=64)
def parse(ptx: str) -> Program:
    """A module with one entry, as Triton writes it."""
    head = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    threads = re.search(r"\.reqntid (\d+)", ptx)
    assert head is not None
    assert threads is not None
    instructions, labels = [], {}
    for line in ptx[head.end() :].splitlines():
        text = re.sub(r"//.*", "", line).strip().removesuffix(";")
        if text.endswith(":"):
            labels[text[:-1]] = len(instructions)
        match = re.match(r"(?:@(!?%p\d+)\s+)?([a-z][\w.]*)\s*(.*)", text)
        if match:
            guard, opcode, rest = match.groups()
            instructions.append(Instruction(guard, tuple(opcode.split(".")), tuple(_OPERAND.findall(rest))))
    return Program(
        tuple(instructions), labels, tuple(re.findall(r"(\w+_param_\d+)", head.group(1))), int(threads.group(1))
    )


class Arithmetic:
    """``read`` and ``write`` are the block's: of registers and numbers, into registers."""

    thread: Array

    def read(self, operand: str, dtype: Any) -> Array:
        raise NotImplementedError

    def write(self, operand: str, value: Array, guard: Array) -> None:
        raise NotImplementedError

    def compute(self, instruction: Instruction, guard: Array) -> None:
        target, sources = instruction.operands[0], instruction.operands[1:]
        if instruction.parts[0] == "mov" and target.startswith("{"):
            width = {"b32": "u4", "b64": "u8"}[instruction.parts[1]]
            self.write(target, self.read(sources[0], np.dtype(width)), guard)
            return
        kind = instruction.parts[-1]
        if instruction.parts[0] == "cvt":
            value = self.convert(instruction.parts, sources)
        elif kind in ("s16x2", "u16x2"):
            halves = [self.read(s, np.dtype("u4")).view(np.dtype(f"{kind[0].replace('s', 'i')}2")) for s in sources]
            value = binary(instruction.parts)(*halves).view(np.uint32)
        elif kind in ("f32x2", "f16x2", "bf16x2", "f16", "bf16") or instruction.parts[-2:] == ("rn", "bf16"):
            value = self.small(instruction.parts, sources)
        else:
            value = self.plain(instruction.parts, sources, TYPES[kind])
        self.write(target, value, guard)

    def plain(self, parts: tuple[str, ...], sources: tuple[str, ...], kind: Any) -> Array:
        name = parts[0]
        if name == "selp":
            return np.where(
                self.read(sources[2], np.dtype(bool)), self.read(sources[0], kind), self.read(sources[1], kind)
            )
        if name in ("shl", "shr"):
            by = self.read(sources[1], np.dtype("u4")).astype(kind)
            return (
                np.left_shift(self.read(sources[0], kind), by)
                if name == "shl"
                else np.right_shift(self.read(sources[0], kind), by)
            )
        if name == "shfl":
            other = self.read(sources[1], np.dtype("u4"))
            lane = self.thread ^ other if parts[2] == "bfly" else self.thread & ~np.uint32(31) | other & np.uint32(31)
            return self.read(sources[0], kind)[lane]
        if name == "redux":  # over the 32 threads of a warp
            of = {"max": np.max, "min": np.min}[parts[2]]
            return np.repeat(of(self.read(sources[0], kind).reshape(-1, 32), axis=1), 32)
        if name in ("mul", "mad") and parts[1] in ("wide", "hi"):
            if kind.itemsize == 8:
                exact = [
                    int(x) * int(y) >> 64
                    for x, y in zip(self.read(sources[0], kind), self.read(sources[1], kind), strict=True)
                ]
                return np.array(exact, kind)
            wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
            result = self.read(sources[0], kind).astype(wide) * self.read(sources[1], kind).astype(wide)
            if parts[1] == "hi":
                return (result >> np.array(8 * kind.itemsize, wide)).astype(kind)
            return result + self.read(sources[2], wide) if name == "mad" else result
        a = [self.read(s, kind) for s in sources]
        if name == "setp":
            return _COMPARE[parts[1]](*a)
        if name == "mad":
            return a[0] * a[1] + a[2]
        if name == "fma":
            return (a[0].astype(np.float64) * a[1] + a[2]).astype(np.float32)
        if name in ("div", "rem") and kind.kind in "iu":
            return truncated(name, a[0], a[1])
        if name == "div":
            quotient = a[0] / a[1]
            return self.approximate(quotient, 2) if "full" in parts else quotient
        if name == "prmt":
            octets = np.stack([a[0], a[1]], 1).view(np.uint8)
            selector = int(a[2][0])
            assert not selector & 0x8888
            return np.ascontiguousarray(octets[:, [selector >> 4 * i & 7 for i in range(4)]]).view(np.uint32)[:, 0]
        unary = {
            "mov": lambda v: v,
            "not": np.invert,
            "neg": np.negative,
            "abs": np.abs,
            "sqrt": np.sqrt,
            "ex2": lambda v: self.approximate(np.exp2(v.astype(np.float64)).astype(np.float32), 2),
            # to the top and back again, which extends the sign of a signed one
            "bfe": lambda v, start, length: v << (8 * kind.itemsize - start - length) >> (8 * kind.itemsize - length),
        }
        return (unary[name] if name in unary else binary(parts))(*a)

    def small(self, parts: tuple[str, ...], sources: tuple[str, ...]) -> Array:
        """Two float32 at once, half precision by ones and twos, and (``add.rn.f32.bf16``) half precision with a
        float32."""
        kind = parts[-1].removesuffix("x2")
        dtype = HALVES.get(kind, TYPES["f32"])
        operation = {"fma": lambda a, b, c: a * b + c, "abs": np.abs}.get(parts[0]) or binary(parts)
        if parts[-2] == "f32":
            kinds = [dtype] * (len(sources) - 1) + [TYPES["f32"]]
            return operation(*(self.read(s, k).astype(np.float64) for s, k in zip(sources, kinds, strict=True))).astype(
                np.float32
            )
        wide = np.dtype(f"u{dtype.itemsize * (2 if parts[-1].endswith('x2') else 1)}")
        values = [self.read(s, wide).view(dtype).astype(np.float64) for s in sources]
        return np.ascontiguousarray(operation(*values).astype(dtype)).view(wide)

    def convert(self, parts: tuple[str, ...], sources: tuple[str, ...]) -> Array:
        target, source = parts[-2:]
        if target == "e4m3x2":
            return self.to_fp8(source, sources)
        if target.endswith("x2"):  # the first source is the upper half
            halves = [self.read(s, TYPES["f32"]).astype(HALVES[target[:-2]]).view(np.uint16) for s in reversed(sources)]
            return np.stack(halves, 1).view(np.uint32)[:, 0]
        kinds = TYPES | HALVES
        value = self.read(sources[0], kinds[source])
        return toward_zero(value, kinds[target]) if "rz" in parts else value.astype(kinds[target])

    def to_fp8(self, source: str, sources: tuple[str, ...]) -> Array:
        """Two numbers as E4M3, satfinite: what is above 448, an infinity too, becomes 448, a NaN stays one. Of two
        float32 the first is the upper half."""
        if source == "f16x2":
            both = self.read(sources[0], np.dtype("u4")).view(np.uint16).reshape(-1, 2).view(np.float16)
        else:
            both = np.stack([self.read(s, TYPES["f32"]) for s in reversed(sources)], 1)
        limited = np.clip(both.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return np.ascontiguousarray(limited).view(np.uint16)[:, 0]

    def approximate(self, exact: Array, ulps: int) -> Array:
        """``exact`` off by up to ``ulps``, as if at random; equal results are off equally, as on a GPU, where threads
        that hold copies of one element go on with one number. What is 0 or not finite stays."""
        mixed = exact.view(np.uint32).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
        off = (mixed % np.uint64(2 * ulps + 1)).astype(np.float32) - np.float32(ulps)
        moved = exact + off * np.spacing(exact)
        return np.where(np.isfinite(moved) & (exact != 0), moved, exact)


def toward_zero(value: Array, kind: Any) -> Array:
    """Rounded to the nearest and, where that is larger, back by one place; no infinity of a finite number."""
    rounded = value.astype(kind)
    larger = np.abs(rounded.astype(np.float64)) > np.abs(value.astype(np.float64))
    return np.where(larger, np.nextafter(rounded, np.zeros_like(rounded)), rounded)


def binary(parts: tuple[str, ...]) -> Callable[..., Any]:
    return _BINARY[f"{parts[0]}.NaN" if "NaN" in parts else parts[0]]


def truncated(name: str, a: Array, b: Array) -> Array:
    """Integer division towards 0; by 0 it is all ones, as PTX leaves it open."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    quotient = (np.abs(a) // np.abs(safe) * np.sign(a) * np.sign(safe)).astype(a.dtype)
    if name == "div":
        return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)
    return np.where(b == 0, a, a - quotient * safe)


@functools.lru_cache(maxsize=4096)
def literal(text: str, dtype: Any) -> Any:
    """A number as PTX writes it: decimal, hexadecimal, 0f and 0d floats by their bits, or the name of shared memory."""
    if text.startswith("global_smem"):
        return np.array(SHARED + int(text.partition("+")[2] or 0)).astype(dtype)
    if text.startswith("0f"):
        return np.array([int(text[2:], 16)], np.uint32).view(dtype)[0]
    value = int(text.rstrip("U"), 0)
    return np.array([value & (1 << 8 * dtype.itemsize) - 1], np.dtype(f"u{dtype.itemsize}")).view(dtype)[0]
