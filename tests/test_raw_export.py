"""What torch's exporter writes of the hand-written models holds no norm op: none passes by being torch's own layer
already."""

from __future__ import annotations

import pytest
import torch

from models.registry import CASES, LOOKALIKES, SMALL, SPELLINGS, Bank, Case, export_args

NORM_OPS = {
    "BatchNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "LpNormalization",
    "MeanVarianceNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
}


def raw_ops(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> set[str]:
    """Op types of the unoptimized export at opset 21, those inside its functions included."""
    program = torch.onnx.export(module, args, dynamo=True, optimize=False, opset_version=21, verbose=False)
    assert program is not None
    proto = program.model_proto
    return {node.op_type for nodes in (proto.graph.node, *(f.node for f in proto.functions)) for node in nodes}


@pytest.mark.parametrize("case", [case for case in CASES if case.handwritten], ids=lambda case: case.name)
def test_a_hand_written_row_exports_without_norm_ops(case: Case) -> None:
    ops = raw_ops(case.make(), export_args(case)[0])
    assert {"Div", "Sqrt"} <= ops
    assert not ops & NORM_OPS


def test_hand_written_spellings_and_lookalikes_call_no_norm_of_torch() -> None:
    """Some 300 models in one program; what torch.export sees is enough, since the raw exporter translates op by op."""
    cases = [
        case for case in (*SPELLINGS, *SMALL, *LOOKALIKES) if case.handwritten and case.name != "weight_standardization"
    ]
    bank = Bank(cases).eval()
    program = torch.export.export(bank, bank.samples())
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert len(cases) > 300
    assert len(called) > 30
    assert not {target for target in called if "_norm" in target} - {"aten.linalg_vector_norm.default"}


@pytest.mark.parametrize(
    ("name", "op"),
    [("S2a_torch", "LayerNormalization"), ("S2c", "InstanceNormalization"), ("S2e", "BatchNormalization")],
)
def test_torch_s_own_layers_do_export_as_norm_ops(name: str, op: str) -> None:
    """The control: what this file asserts of the others does fail for these."""
    (case,) = (case for case in CASES if case.name == name)
    assert op in raw_ops(case.make(), export_args(case)[0])
