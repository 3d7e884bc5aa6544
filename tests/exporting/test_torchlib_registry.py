"""torch's exporter lists the translation functions without parsing their sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onnxscript import values
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

import normdeploy
from normdeploy.exporting.torchlib_registry import list_functions_unparsed


def test_functions_listed_without_parsing_equal_the_parsed_ones() -> None:
    apis = pytest.importorskip("onnxscript._framework_apis.torch_2_5")

    def listed() -> list[tuple[Any, ...]]:
        return [(f.qualified_name, f.domain, f.name, f.function, f.is_complex) for f in apis.get_torchlib_ops()]

    parsed = listed()
    with list_functions_unparsed():
        unparsed = listed()
    assert len(parsed) > 100
    assert unparsed == parsed


def test_export_lists_functions_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = values.TracedOnnxFunction.function_ir
    read = ONNXRegistry.from_torchlib
    replaced = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        replaced.append(values.TracedOnnxFunction.function_ir is not parsed)
        return read(*args, **kwargs)

    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(recorded))
    normdeploy.export(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    assert replaced == [True]
    assert values.TracedOnnxFunction.function_ir is parsed
