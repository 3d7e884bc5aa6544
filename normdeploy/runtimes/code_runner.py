"""Run the exported graph as generated Python code, operator by operator or compiled by ``torch.compile``."""

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
    """Run ``model`` on the CPU in its own dtype, for timing.

    The other torch runners inspect each node before it runs, which takes longer than a small node itself.

    Args:
        compiled: True to compile the code at the first call, with the default backend of ``torch.compile``.
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
        """Run the model once.

        Returns:
            Output name -> array.

        Raises:
            InputError: the feeds do not fit the model's inputs, or the model does not run on them.
            RuntimeUnavailable: ``torch.compile`` can't compile the model here.
        """
        run = self.prepare(feeds)
        try:
            return self._name_outputs(run())
        except Exception as error:
            # Errors of inductor and dynamo share no base class, and operators raise exceptions of any type.
            message = " ".join(str(error).split())[:300] or type(error).__name__
            if self._compiled:
                raise RuntimeUnavailable(f"torch.compile can't compile the model here: {message}") from error
            raise InputError(
                f"the model does not run on these inputs: {message}; pass sizes and values that it accepts"
            ) from error

    def prepare(self, feeds: Arrays) -> Callable[[], Sequence[Any]]:
        """Convert the feeds and collect the parameters, so that the returned function only runs the model.

        If the graph writes to its parameters, every call copies them first.

        Returns:
            A function that runs the model once and returns its outputs in order.

        Raises:
            InputError: the feeds do not fit the model's inputs.
        """
        inputs = self._input_tensors(feeds)
        arguments = self._graph_arguments(inputs, self._lifted)

        def run_once() -> Sequence[Any]:
            with torch.no_grad(), _without_amx() if self._bfloat16 else nullcontext():
                return self._code(*(self._graph_arguments(inputs, self._lifted) if self._mutates else arguments))

        return run_once
