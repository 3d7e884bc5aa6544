"""Compare a module with its trace at given sizes of its dims."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..errors import InputError
from ..model import InputSpec, LoadedModel, TraceRun
from .program_signature import with_constant_inputs
from .torch_state import preserve_torch_state, seed_torch

# Operator of the asserts to which torch defers its guards.
ASSERT = torch.ops.aten._assert_scalar.default
# Maximum number of parameters of a model that is compared. Each run copies the module.
MOST_PARAMETERS = 2**28
# Minimum bytes of weights that a run of the module does not copy. For fewer, a copy takes less time than the guard.
LARGE = 2**25
# Allowed difference of outputs, in units of the output dtype's epsilon. The module and its trace run the same
# operators. Results differ only if several threads add the terms of a sum in another order.
_ROUNDINGS = 256


class TraceComparison:
    """Comparison of a module with its trace, which runs without its asserts.

    Attributes:
        model: the traced model.
        fresh: function that makes a copy of the module, because a run may change it. With ``shared=True``, the copy's
            parameters share the module's memory.
        runs: runs of the trace that agree with the module.
    """

    def __init__(self, model: LoadedModel, fresh: Callable[..., nn.Module]) -> None:
        self.model = model
        self.fresh = fresh
        self.runs: list[TraceRun] = []
        self._agreed: dict[tuple[tuple[str, int], ...], bool | None] = {}

    @property
    def is_possible(self) -> bool:
        """Return whether the module is small enough to be copied."""
        return sum(value.numel() for value in self.model.program.state_dict.values()) <= MOST_PARAMETERS

    def agrees_at(self, sizes: Mapping[str, int]) -> bool | None:
        """Compare the outputs of the module and the trace on one random sample.

        Args:
            sizes: dim name -> size.

        Returns:
            True if they agree; False if they differ or only the trace fails; None if the module itself does not run.
        """
        key = tuple(sorted(sizes.items()))
        if key not in self._agreed:
            self._agreed[key] = self._compare(sizes)
        return self._agreed[key]

    def _compare(self, sizes: Mapping[str, int]) -> bool | None:
        program = self.model.program
        try:
            feeds = self.model.samples(0, sizes)
            tensors = [_sample_to_tensor(spec, feeds[spec.name]) for spec in self.model.inputs]
        except InputError:
            # The sample would have too many values.
            return None
        flat = with_constant_inputs(program, tensors)
        try:
            wanted = self._run_module(flat)
        except Exception:
            # The user's forward may raise an exception of any type.
            return None
        begun = time.perf_counter()
        start = time.process_time()
        try:
            with torch.no_grad(), preserve_torch_state(), seed_torch():
                given = tree_leaves(_AssertFreeInterpreter(self._make_graph()).run(*flat, enable_io_processing=False))
        except Exception:
            # torch may raise an exception of any type.
            return False
        run = TraceRun(
            program=program,
            feeds=feeds,
            outputs=given,
            seconds=time.perf_counter() - begun,
            processor_seconds=time.process_time() - start,
        )
        agree = len(wanted) == len(given) and all(map(_values_agree, wanted, given))
        if agree:
            self.runs.append(run)
        return agree

    def _run_module(self, flat: Sequence[Any]) -> list[Any]:
        """Run a copy of the module on copies of the inputs.

        Returns:
            Its flattened results.
        """
        if sum(value.nbytes for value in self.model.program.state_dict.values()) >= LARGE:
            module = self.fresh(shared=True)
            with suppress(Exception), ParameterGuard(module):
                return self._call_module(module, flat)
        return self._call_module(self.fresh(), flat)

    def _call_module(self, module: nn.Module, flat: Sequence[Any]) -> list[Any]:
        own = [value.clone() if isinstance(value, torch.Tensor) else value for value in flat]
        args, kwargs = tree_unflatten(own, self.model.program.call_spec.in_spec)
        # A forward that draws random numbers draws the same numbers in the trace.
        with torch.no_grad(), preserve_torch_state(), seed_torch():
            return tree_leaves(module(*args, **kwargs))

    def _make_graph(self) -> torch.fx.GraphModule:
        """Make a module of the trace whose run does not change the program."""
        graph = self.model.program.module(check_guards=False)
        if self.model.written:
            return copy.deepcopy(graph)
        return graph


class ParameterGuard(TorchDispatchMode):
    """Context in which an operator that writes to a parameter of a module raises an error before it writes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._places = {_memory_place(parameter) for parameter in module.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator.

        Returns:
            Its result.

        Raises:
            RuntimeError: it would write to a parameter.
        """
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            stated = func._schema.arguments
            given = {argument.name: value for argument, value in zip(stated, args, strict=False)} | kwargs
            written = [given.get(argument.name) for argument in stated if _is_written(argument)]
            tensors = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
            if any(_memory_place(tensor) in self._places for tensor in tensors):
                raise RuntimeError(f"{func} writes to a parameter")
        return func(*args, **kwargs)


def _memory_place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _AssertFreeInterpreter(torch.fx.Interpreter):
    """Interpreter that runs the graph without its asserts."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator.

        Returns:
            The operator's result; None for an assert.
        """
        if target is ASSERT:
            return None
        return super().call_function(target, args, kwargs)


def _sample_to_tensor(given: InputSpec, value: np.ndarray) -> torch.Tensor:
    if given.dtype == "bfloat16":
        plain = value.astype(np.float32)
    else:
        plain = value
    return torch.from_numpy(plain).to(getattr(torch, given.dtype))


def _values_agree(wanted: Any, given: Any) -> bool:
    if not isinstance(wanted, torch.Tensor) or not isinstance(given, torch.Tensor):
        return bool(wanted == given)
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return False
    if not wanted.dtype.is_floating_point or not wanted.numel():
        return torch.equal(wanted, given)
    room = _ROUNDINGS * torch.finfo(wanted.dtype).eps * float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(wanted, given, rtol=0.0, atol=room, equal_nan=True)
