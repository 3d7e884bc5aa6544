"""The exported graph as torch runs it in a program: its Python code, operator by operator, or compiled by
``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..errors import InputError, RuntimeUnavailable
from ..model import LoadedModel
from ..types import Arrays
from . import RunResult
from .torch_runners import EagerRunner, _without_amx


class CodeRunner(EagerRunner):
    """``model`` on the CPU in its own type, to be timed: what looks at each node before it runs takes longer than a
    small node.

    Args:
        compiled: by ``torch.compile`` with its default backend, at the first call.
    """

    def __init__(self, model: LoadedModel, *, compiled: bool = False) -> None:
        super().__init__(model)
        if compiled:
            self.name = "torch.compile"
        else:
            self.name = "eager"
        self._compiled = compiled
        self._code: Callable[..., Sequence[Any]]
        if compiled:
            self._code = torch.compile(self._graph)
        else:
            self._code = self._graph

    def infer(self, feeds: Arrays) -> RunResult:
        """
        Raises:
            InputError: the feeds do not fit the model's inputs, or the model does not run on them.
            RuntimeUnavailable: ``torch.compile`` can't compile it here.
        """
        run = self.prepare(feeds)
        try:
            return self._name_outputs(run())
        except Exception as error:
            # inductor's and dynamo's errors share no base class, and operators raise what they like
            message = " ".join(str(error).split())[:300] or type(error).__name__
            if self._compiled:
                raise RuntimeUnavailable(f"torch.compile can't compile the model here: {message}") from error
            raise InputError(
                f"the model does not run on these inputs: {message}; give sizes and values that it takes"
            ) from error

    def prepare(self, feeds: Arrays) -> Callable[[], Sequence[Any]]:
        """The run alone, inputs and parameters at hand. Where the graph writes to its parameters, every call copies
        them first.

        Raises:
            InputError: the feeds do not fit the model's inputs.
        """
        inputs = self._input_tensors(feeds)
        arguments = self._graph_arguments(inputs, self._lifted)

        def run_once() -> Sequence[Any]:
            with torch.no_grad(), _without_amx() if self._bfloat16 else nullcontext():
                return self._code(*(self._graph_arguments(inputs, self._lifted) if self._mutates else arguments))

        return run_once
