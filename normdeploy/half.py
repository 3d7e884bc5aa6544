"""The model run by torch in half precision: what a correct evaluation of a half-precision file may be off by.

A file of half precision holds the model's parameters rounded, and computes in them; the model in float32 says nothing of what that
costs. Here the graph's float32 is float16 or bfloat16 throughout, as ``model.half()`` would have it: parameters, buffers, constants and
dtypes written in the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_aggregate

from .model import Model
from .runtimes import RunResult
from .runtimes.eager import EagerRunner

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalfRunner(EagerRunner):
    """``model`` run by torch on the CPU in half precision; ``precision`` is "fp16" or "bf16". Takes the model's own inputs.

    ``model`` itself is not changed.
    """

    def __init__(self, model: Model, precision: str) -> None:
        super().__init__(model)
        self._type = TYPES[precision]
        self.name = f"eager in {precision}"
        self._bfloat16 = precision == "bf16"
        self._graph = copy.deepcopy(self._graph)
        self._lifted = {name: self._narrow(value) for name, value in self._lifted.items()}
        for module in (m for m in self._graph.modules() if isinstance(m, torch.fx.GraphModule)):
            for node in module.graph.nodes:
                if node.op == "get_attr" and isinstance(held := getattr(module, str(node.target), None), torch.Tensor):
                    module.register_buffer(str(node.target), self._narrow(held.detach()))
                elif node.target is torch.ops.aten._assert_tensor_metadata.default:
                    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
                elif node.op == "call_function":
                    node.args = map_aggregate(node.args, self._narrow)  # type: ignore[assignment]
                    node.kwargs = map_aggregate(node.kwargs, self._narrow)  # type: ignore[assignment]

    def _inputs(self, feeds: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
        return [self._narrow(tensor) for tensor in super()._inputs(feeds)]

    def infer(self, feeds: Mapping[str, np.ndarray]) -> RunResult:
        """
        Raises:
            InputError: the feeds do not fit the model's inputs, or torch has no form of an operator in this precision.
        """
        return super().infer(feeds)

    def _narrow(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._type if value in (torch.float32, torch.float64) else value
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
            return value.to(self._type)
        return value
