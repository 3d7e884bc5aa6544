"""Corresponding tensors: a right file stays within the bound at each, a planted fault leaves it first where it
stands."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from normdeploy.compare.ulp_spacing import largest_rounded
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.graphs.proto_queries import module_path
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes.torch_runners import HALVES, HalfRunner
from normdeploy.verbs.verify.tensor_drift import measure_drift, pair_tensors


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return from_module(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), inputs=["x:float32[2,5,16]"])


@pytest.fixture(scope="module")
def proto(model: LoadedModel) -> onnx.ModelProto:
    return export_to_proto(model)


def test_a_right_file_is_within_the_bound_everywhere(model: LoadedModel, proto: onnx.ModelProto) -> None:
    points = measure_drift(model, proto, model.samples(0))
    assert {f"layers.{i}.norm{j}" for i in range(3) for j in (1, 2)} <= {p.module for p in points}
    assert all(points)
    assert len(points) == len(pair_tensors(model, proto))


def test_a_wrong_epsilon_leaves_the_bound_first_at_its_norm(model: LoadedModel, proto: onnx.ModelProto) -> None:
    wrong = onnx.ModelProto()
    wrong.CopyFrom(proto)
    norms = [n for n in wrong.graph.node if n.op_type == "LayerNormalization"]
    next(a for a in norms[2].attribute if a.name == "epsilon").f = 1e-3
    points = measure_drift(model, wrong, model.samples(0))
    assert next(p.module for p in points if not p) == "layers.1.norm1"


def test_half_is_computed_in_half(model: LoadedModel) -> None:
    feeds = model.samples(0)
    for precision, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        (value,) = HalfRunner(model, HALVES[precision]).infer(feeds).values()
        assert value.dtype.name == dtype


MADE_UP = "_empty_nn_module_stack_from_metadata_hook"


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("normdeploy.module", f"layers.0.{MADE_UP}", "layers.0"),
        ("normdeploy.module", MADE_UP, ""),
        ("pkg.torch.onnx.name_scopes", str(["", f"layers.0.{MADE_UP}", "add"]), "layers.0"),
        ("normdeploy.module", "layers.0.norm", "layers.0.norm"),
    ],
)
def test_a_module_that_torch_made_up_is_not_shown(key: str, value: str, wanted: str) -> None:
    node = onnx.NodeProto()
    node.metadata_props.add(key=key, value=value)
    assert module_path(node) == wanted


def test_scale_of_rounding_leaves_out_what_eager_gets_exactly() -> None:
    reference = np.array([-1e6, 0.1, math.nan])
    assert largest_rounded(reference.astype(np.float32), reference) == 0.1
    assert largest_rounded(reference, reference) == 1e6
