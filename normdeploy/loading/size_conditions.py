"""Where a model limits its dims: the module and the line at which torch.export meets each condition on a size."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Letters of a line of the model.
LONGEST = 80


def module_paths(module: nn.Module) -> dict[int, str]:
    """Map the ``id`` of each module in it to its name."""
    return {id(part): name for name, part in module.named_modules()}


def describe_location(names: Mapping[int, str], frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return `` in module 'layers.0', line 12 of net.py (if x.sum() > 0:)``, as far as the frames tell.

    Args:
        names: `module_paths` of the model.
        frames: with the number of the line that each is at, the outermost first.
    """
    path = None
    line = ""
    for frame, number in frames:
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module):
            path = names.get(id(part), path)
        file = frame.f_code.co_filename
        # Lines outside of any forward are those that call us.
        if path is not None and os.path.isabs(file) and not file.startswith((TORCH, OURS)):
            code = linecache.getline(file, number).strip()[:LONGEST]
            line = f"line {number} of {os.path.basename(file)}{f' ({code})' if code else ''}"
    parts = [f"module {path!r}" if path else "", line]
    return "".join(f" in {part}" if not order else f", {part}" for order, part in enumerate(filter(None, parts)))


def traceback_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the traceback with their lines, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


@dataclass(frozen=True)
class _SizeCondition:
    """``guard``: what torch.export takes for true; ``names``: the dims that its symbols stand for; ``values``: their
    sizes in the example."""

    guard: sympy.Basic
    names: Mapping[sympy.Symbol, str]
    values: Mapping[sympy.Symbol, int]
    place: str

    def fails_at(self, name: str | None, size: int | None) -> bool:
        """Return whether it is false where that dim has ``size`` (None: another than in the example)."""
        sizes = dict(self.values)
        for symbol, dim in self.names.items():
            if dim == name:
                sizes[symbol] = sizes.get(symbol, 0) + 1 if size is None else size
        # torch's own divisions raise where a size makes them divide by zero.
        with contextlib.suppress(ArithmeticError, AssertionError):
            return bool(self.guard.xreplace({s: sympy.Integer(n) for s, n in sizes.items()}) == sympy.false)
        return False


@dataclass(frozen=True)
class TracedConditions:
    """What torch.export took for true of the sizes of a model, in the order of its forward."""

    met: list[_SizeCondition] = field(default_factory=list)

    def place_limiting(self, name: str | None, size: int | None = None) -> str:
        """Return the place that does not take ``size`` (None: any other than the example's) for the dim; "" where
        none is known."""
        # torch adds no condition that follows from those before, so the last is the narrowest.
        for condition in reversed(self.met):
            if name in condition.names.values() and condition.fails_at(name, size):
                return condition.place
        # Several conditions together may leave one size alone.
        if size is None:
            return self.last_place([name])
        return ""

    def last_place(self, names: Collection[str | None]) -> str:
        """Return the last place that asks for a size of these dims; "" where none is known."""
        return next((c.place for c in reversed(self.met) if not set(names).isdisjoint(c.names.values())), "")


@contextlib.contextmanager
def record_conditions(module: nn.Module) -> Iterator[TracedConditions]:
    """Collect the conditions that torch.export meets while it traces ``module``."""
    conditions, modules = TracedConditions(), module_paths(module)
    log = ShapeEnv._log_guard

    def record_guard(env: ShapeEnv, prefix: str, g: Any, forcing_spec: bool) -> None:
        names = {symbol: name for symbol in g.free_symbols if (name := _dim_of_symbol(env, symbol))}
        if names:
            values = {symbol: int(env.backed_var_to_val[symbol]) for symbol in names if symbol in env.backed_var_to_val}
            where = describe_location(modules, reversed(list(_iter_caller_frames())))
            # At its end torch.export compares the dims of one name, outside of any forward.
            if where:
                conditions.met.append(_SizeCondition(g, names, values, where))
        log(env, prefix, g, forcing_spec)

    ShapeEnv._log_guard = record_guard  # type: ignore[method-assign, assignment]
    try:
        yield conditions
    finally:
        ShapeEnv._log_guard = log  # type: ignore[method-assign]


def _dim_of_symbol(env: ShapeEnv, symbol: sympy.Symbol) -> str:
    """Return the name of the dim that the symbol stands for; "" where it has none."""
    sources = env.var_to_sources.get(symbol, ())
    return next((name for source in sources if (name := env.source_name_to_debug_name.get(source.name))), "")


def _iter_caller_frames() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back
