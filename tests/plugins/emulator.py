"""Runs PTX on the CPU, one block after the other: what the GPU would be given, with the checks that a GPU does not
make.

Triton's interpreter runs a kernel's source tile by tile. This runs what was compiled of it: threads, vectors, masks as
predicates, shuffles, reductions through shared memory. The threads of a block go in lock step, apart after a branch
that not all take; `Fault` is raised where

- an address is outside every buffer, or not aligned to the width of its access,
- an input is written, an output read, or one byte of an output written twice with different values,
- a barrier or a shuffle is not reached by all threads of a block,
- a byte of shared memory is used by two threads, one of them writing, with no barrier between (so no order of warps can
  matter); two may write the same.

Only the instructions that our kernels compile to are known (``instructions.py``); another one is a KeyError here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .instructions import BANKS, SHARED, TYPES, Arithmetic, Array, Instruction, Program, literal, parse


class Fault(AssertionError):
    """What a GPU would not tell, or only as a wrong number."""


@dataclass
class Buffer:
    """Bytes from ``base`` on; ``written`` counts for an output, and is None for an input."""

    base: int
    data: Array
    written: Array | None = None


@dataclass
class Counts:
    """What was issued, an instruction of a warp once each: all of them, and those to global memory by (the buffer's
    place, "ld" or "st", bytes a thread)."""

    instructions: int = 0
    accesses: Counter[tuple[int, str, int]] = field(default_factory=Counter)


def warps(threads: Array) -> int:
    return int(threads.reshape(-1, 32).any(1).sum())


@dataclass
class Memory:
    buffers: list[Buffer] = field(default_factory=list)
    counts: Counts | None = None

    def count(self, buffer: Buffer, name: str, width: int, guard: Array) -> None:
        if self.counts is not None:
            place = next(i for i, b in enumerate(self.buffers) if b is buffer)
            self.counts.accesses[place, name, width] += warps(guard)

    def at(self, addresses: Array, width: int, *, write: bool) -> tuple[Buffer, Array]:
        """The buffer that all of ``addresses`` are in, and the index of each byte ``[threads, width]``."""
        if (addresses % np.uint64(width)).any():
            raise Fault(f"an access of {width} bytes at an address that is no multiple of it")
        for buffer in self.buffers:
            offsets = addresses.astype(np.int64) - buffer.base
            if (offsets >= 0).all() and (offsets + width <= len(buffer.data)).all():
                if write == (buffer.written is None):
                    raise Fault("an input is written" if write else "an output is read")
                return buffer, offsets[:, None] + np.arange(width)
        raise Fault(f"{'write' if write else 'read'} outside every buffer, at {[hex(a) for a in addresses[:4]]}")


def run(ptx: str, arguments: Sequence[int], blocks: Sequence[int], memory: Memory, shared: int, seed: int = 0) -> None:
    """The blocks with these numbers (``ctaid.x``); ``shared``: bytes of shared memory. ``arguments``: addresses and
    int32 numbers."""
    program = parse(ptx)
    assert len(arguments) == len(program.parameters)
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        for number in blocks:
            Block(program, dict(zip(program.parameters, arguments, strict=True)), number, memory, shared, rng).run()


class Block(Arithmetic):
    def __init__(
        self, program: Program, arguments: dict[str, int], number: int, memory: Memory, shared: int, rng: Any
    ) -> None:
        self.program, self.arguments, self.memory, self.rng = program, arguments, memory, rng
        self.thread = np.arange(program.threads, dtype=np.uint32)
        self.special = {"%tid.x": self.thread, "%ctaid.x": np.full_like(self.thread, number)}
        self.everyone = np.ones(program.threads, bool)
        self.registers: dict[str, Array] = {}
        self.shared = np.zeros(shared, np.uint8)
        self.barrier()

    def run(self) -> None:
        paths = {0: self.everyone}  # where threads go on, and which; the least advanced first, so that paths meet again
        while paths:
            at = min(paths)
            active = paths.pop(at)
            instruction = self.program.instructions[at]
            if self.memory.counts is not None:
                self.memory.counts.instructions += warps(active)
            guard = active if instruction.guard is None else active & self.guard(instruction.guard)
            name, onwards = instruction.parts[0], active
            if name in ("bra", "ret"):
                onwards = active & ~guard
                if name == "bra":
                    self.join(paths, self.program.labels[instruction.operands[0]], guard)
            elif name in ("bar", "shfl", "redux", "ldmatrix", "stmatrix") and not guard.all():
                raise Fault(f"{name}, which not all threads reach")
            elif name == "bar":
                self.barrier()
            elif name in ("ld", "st"):
                (self.load if name == "ld" else self.store)(instruction, guard)
            elif name in ("ldmatrix", "stmatrix"):
                self.matrices(instruction, guard)
            else:
                self.compute(instruction, guard)
            self.join(paths, at + 1, onwards)

    @staticmethod
    def join(paths: dict[int, Array], at: int, threads: Array) -> None:
        if threads.any():
            paths[at] = paths[at] | threads if at in paths else threads

    # ------------------------------------------------------------------ operands

    def guard(self, name: str) -> Array:
        return self.read(name.lstrip("!"), TYPES["pred"]) ^ name.startswith("!")

    def read(self, operand: str, dtype: Any) -> Array:
        """An operand as bits of ``dtype``, one for each thread."""
        if operand in self.special:
            held = self.special[operand]
        elif operand.startswith("%"):
            if operand not in self.registers:  # the unused half of a pair may have no value: then it is any
                bits = self.rng.integers(
                    0, 2 if dtype is TYPES["pred"] else 256, (self.program.threads, dtype.itemsize), np.uint8
                )
                return bits.view(dtype)[:, 0]
            held = self.registers[operand]
        elif operand.startswith("{"):
            return self.packed(operand, dtype)
        else:
            return np.full(self.program.threads, literal(operand, dtype))
        return held.view(dtype) if held.dtype.itemsize == dtype.itemsize else held.astype(dtype)

    def packed(self, operand: str, dtype: Any) -> Array:
        parts = operand.strip("{} ").split(",")
        width = np.dtype(f"u{dtype.itemsize // len(parts)}")
        return np.stack([self.read(p.strip(), width) for p in parts], 1).view(dtype)[:, 0]

    def write(self, operand: str, value: Array, guard: Array) -> None:
        """``value`` into a register of the same width, or into the parts of a vector, lowest first."""
        if operand.startswith("{"):
            parts = [p.strip() for p in operand.strip("{} ").split(",")]
            bits = (
                np.ascontiguousarray(value)
                .view(np.dtype(f"u{value.dtype.itemsize // len(parts)}"))
                .reshape(len(value), len(parts))
            )
            for part, column in zip(parts, bits.T, strict=True):
                if part != "_":
                    self.write(part, np.ascontiguousarray(column), guard)
            return
        bank = BANKS[operand.rstrip("0123456789")]
        value = np.broadcast_to(value, guard.shape)
        if value.dtype.kind in "iu" and value.dtype.itemsize == 1:  # in a register of two or four, its sign extended
            value = value.astype(np.dtype(f"{value.dtype.kind}{bank.itemsize}"))
        bits = value if value.dtype == bank else np.ascontiguousarray(value).view(bank)
        held = self.registers.get(operand)
        self.registers[operand] = (
            bits.copy() if guard.all() else np.where(guard, bits, 0 if held is None else held).astype(bank)
        )

    # ------------------------------------------------------------------ memory

    def barrier(self) -> None:
        """From here on, nobody has used shared memory: the thread that wrote or read each byte; -1 for none, -2 for
        several."""
        self.writer = np.full(len(self.shared), -1)
        self.reader = np.full(len(self.shared), -1)

    def address(self, operand: str) -> Array:
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        return self.read(base, np.dtype("u8")) + np.uint64(int(offset or 0))

    def load(self, instruction: Instruction, guard: Array) -> None:
        space, target, source = instruction.parts[1], instruction.operands[0], instruction.operands[1]
        if space == "param":
            kind = TYPES[instruction.parts[2]]
            bank = BANKS[target.rstrip("0123456789")]
            wide = np.dtype(f"{kind.kind}{bank.itemsize}")  # ld.param.s32 into 64 bits extends the sign
            value = np.array([self.arguments[source.strip("[] ")]]).astype(kind).astype(wide)
            self.write(target, np.full(self.program.threads, value[0]), guard)
            return
        item, count = TYPES[instruction.parts[-1]].itemsize, len(target.split(","))
        addresses = self.address(source)[guard]
        value = np.zeros((self.program.threads, item * count), np.uint8)
        if len(addresses):
            if space == "shared":
                value[guard] = self.take(addresses, item * count, self.thread[guard])
            else:
                buffer, index = self.memory.at(addresses, item * count, write=False)
                self.memory.count(buffer, "ld", item * count, guard)
                value[guard] = buffer.data[index]
        parts = [t.strip() for t in target.strip("{} ").split(",")]
        for part, column in zip(parts, value.view(np.dtype(f"u{item}")).T, strict=True):
            self.write(part, np.ascontiguousarray(column), guard)

    def store(self, instruction: Instruction, guard: Array) -> None:
        (target, source), item = instruction.operands, np.dtype(f"u{TYPES[instruction.parts[-1]].itemsize}")
        columns = [self.read(s.strip(), item) for s in source.strip("{} ").split(",")]
        value = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8)[guard]
        addresses = self.address(target)[guard]
        if not len(addresses):
            return
        if instruction.parts[1] == "shared":
            self.keep(addresses, value, self.thread[guard])
            return
        buffer, index = self.memory.at(addresses, value.shape[1], write=True)
        self.memory.count(buffer, "st", value.shape[1], guard)
        assert buffer.written is not None
        again = buffer.written[index] > 0
        buffer.data[index] = np.where(again, buffer.data[index], value)
        if (buffer.data[index] != value).any():
            raise Fault("one byte of an output is written with two values")
        np.add.at(buffer.written, index, 1)

    def matrices(self, instruction: Instruction, guard: Array) -> None:
        """8 × 8 matrices of 16 bits: thread 8i + r of a warp has the address of row r of the i-th, and thread 4r + w
        elements 2w and 2w + 1 of row r of each, or (``trans``) of column r."""
        write = instruction.parts[0] == "stmatrix"
        address, registers = instruction.operands if write else instruction.operands[::-1]
        rows = self.address(address).reshape(-1, 32)
        along, across = np.arange(32)[:, None] // 4, 2 * (np.arange(32)[:, None] % 4) + np.arange(2)
        row, column = (across, along) if "trans" in instruction.parts else (along, across)
        for i, register in enumerate(registers.strip("{} ").split(",")):
            first = rows[:, 8 * i : 8 * i + 8]
            if (first % np.uint64(16)).any():
                raise Fault("a row of a matrix is not aligned to 16 bytes")
            places = (first[:, row] + 2 * column.astype(np.uint64)).reshape(-1)
            threads = np.repeat(self.thread, 2)
            if write:
                self.keep(places, self.read(register.strip(), np.dtype("u4")).view(np.uint8).reshape(-1, 2), threads)
            else:
                self.write(register.strip(), self.take(places, 2, threads).reshape(-1).view(np.uint32), guard)

    def shared_at(self, addresses: Array, width: int, threads: Array) -> tuple[Array, Array]:
        """The index of each byte of shared memory, and the thread that uses it."""
        offsets = addresses.astype(np.int64) - SHARED
        if (offsets % width).any() or (offsets < 0).any() or (offsets + width > len(self.shared)).any():
            raise Fault(f"shared memory of {len(self.shared)} bytes at {offsets.min()} to {offsets.max()}, by {width}")
        index = offsets[:, None] + np.arange(width)
        return index, np.broadcast_to(threads.astype(np.int64)[:, None], index.shape)

    def take(self, addresses: Array, width: int, threads: Array) -> Array:
        index, own = self.shared_at(addresses, width, threads)
        if others(self.writer, index, own).any():
            raise Fault("shared memory that another thread wrote is read before a barrier")
        mark(self.reader, index, own)
        return self.shared[index]

    def keep(self, addresses: Array, value: Array, threads: Array) -> None:
        """Several threads may write the same value to one place."""
        index, own = self.shared_at(addresses, value.shape[1], threads)
        if others(self.reader, index, own).any():
            raise Fault("shared memory that another thread read is written before a barrier")
        before, written = self.shared[index], others(self.writer, index, own)
        self.shared[index] = value
        if (self.shared[index] != value).any() or (before != value)[written].any():
            raise Fault("two threads write two values to the same shared memory")
        mark(self.writer, index, own)


def others(users: Array, index: Array, own: Array) -> Array:
    return (users[index] != -1) & (users[index] != own)


def mark(users: Array, index: Array, own: Array) -> None:
    """Each byte's user: ``own``, or -2 where there are several."""
    several = others(users, index, own)
    users[index] = own
    users[index[several | (users[index] != own)]] = -2
