"""Find the places in a model that limit its dims: module and line of each size condition that torch.export meets."""

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
# Maximum number of characters that a message shows of a line of the model.
LONGEST = 80


def module_paths(module: nn.Module) -> dict[int, str]:
    """Map the ``id`` of each submodule to its name.

    Returns:
        id -> qualified name.
    """
    return {id(part): name for name, part in module.named_modules()}


def describe_location(names: Mapping[int, str], frames: Iterable[tuple[FrameType, int]]) -> str:
    """Describe the innermost of the frames that belongs to the model's code.

    Args:
        names: `module_paths` of the model.
        frames: (frame, line number), the outermost first.

    Returns:
        Text such as `` in module 'layers.0', line 12 of net.py (if x.sum() > 0:)``; unknown parts are left out.
    """
    path = None
    line = ""
    for frame, number in frames:
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module):
            path = names.get(id(part), path)
        file = frame.f_code.co_filename
        # Lines before the first module's forward belong to callers of normdeploy, not to the model.
        if path is not None and os.path.isabs(file) and not file.startswith((TORCH, OURS)):
            code = linecache.getline(file, number).strip()[:LONGEST]
            line = f"line {number} of {os.path.basename(file)}{f' ({code})' if code else ''}"
    parts = [f"module {path!r}" if path else "", line]
    return "".join(f" in {part}" if not order else f", {part}" for order, part in enumerate(filter(None, parts)))


def traceback_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the traceback with their lines, the outermost first.

    Yields:
        (frame, line number).
    """
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


@dataclass(frozen=True)
class _SizeCondition:
    """Condition on sizes that torch.export assumes to be true.

    Attributes:
        guard: the condition.
        names: symbol -> dim name.
        values: symbol -> size in the example.
        place: module and line that caused the condition, for messages.
    """

    guard: sympy.Basic
    names: Mapping[sympy.Symbol, str]
    values: Mapping[sympy.Symbol, int]
    place: str

    def fails_at(self, name: str | None, size: int | None) -> bool:
        """Return whether the condition is false if the dim ``name`` has the size ``size``. The size None means one more
        than the size in the example.
        """
        sizes = dict(self.values)
        for symbol, dim in self.names.items():
            if dim == name:
                sizes[symbol] = sizes.get(symbol, 0) + 1 if size is None else size
        # torch's division operators raise an error on division by zero.
        with contextlib.suppress(ArithmeticError, AssertionError):
            return bool(self.guard.xreplace({s: sympy.Integer(n) for s, n in sizes.items()}) == sympy.false)
        return False


@dataclass(frozen=True)
class TracedConditions:
    """Conditions on a model's sizes that torch.export assumed, in the order in which forward met them."""

    met: list[_SizeCondition] = field(default_factory=list)

    def place_limiting(self, name: str | None, size: int | None = None) -> str:
        """Find the place in the model that does not admit a size.

        Args:
            name: name of the dim.
            size: size of the dim. None means any other size than that of the example.

        Returns:
            Module and line as in `describe_location`; "" if unknown.
        """
        # torch adds no condition that follows from earlier conditions, so the last condition is the narrowest.
        for condition in reversed(self.met):
            if name in condition.names.values() and condition.fails_at(name, size):
                return condition.place
        # It is possible that no single condition fails, because only several conditions together fix the size.
        if size is None:
            return self.last_place([name])
        return ""

    def last_place(self, names: Collection[str | None]) -> str:
        """Find the last place with a condition on these dims.

        Returns:
            Module and line; "" if unknown.
        """
        return next((c.place for c in reversed(self.met) if not set(names).isdisjoint(c.names.values())), "")


@contextlib.contextmanager
def record_conditions(module: nn.Module) -> Iterator[TracedConditions]:
    """Collect the conditions that torch.export meets while it traces ``module``.

    Yields:
        The conditions. They are filled while the context runs.
    """
    conditions, modules = TracedConditions(), module_paths(module)
    log = ShapeEnv._log_guard

    def record_guard(env: ShapeEnv, prefix: str, g: Any, forcing_spec: bool) -> None:
        names = {symbol: name for symbol in g.free_symbols if (name := dim_of_symbol(env, symbol))}
        if names:
            values = {symbol: int(env.backed_var_to_val[symbol]) for symbol in names if symbol in env.backed_var_to_val}
            where = describe_location(modules, reversed(list(_iter_caller_frames())))
            # At the end, torch.export compares dims of the same name. These conditions belong to no place in a forward.
            if where:
                conditions.met.append(_SizeCondition(g, names, values, where))
        log(env, prefix, g, forcing_spec)

    ShapeEnv._log_guard = record_guard  # type: ignore[method-assign, assignment]
    try:
        yield conditions
    finally:
        ShapeEnv._log_guard = log  # type: ignore[method-assign]


def dim_of_symbol(env: ShapeEnv, symbol: sympy.Symbol) -> str:
    """Return the name of the dim that a symbol represents; "" if the dim has no name."""
    sources = env.var_to_sources.get(symbol, ())
    return next((name for source in sources if (name := env.source_name_to_debug_name.get(source.name))), "")


def _iter_caller_frames() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back
