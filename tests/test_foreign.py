"""Norms in ops of their owners': each becomes standard ONNX, equal to its owner's definition; what is ambiguous is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy import evaluate, rewrite
from normdeploy.evaluate_foreign import TABLE
from normdeploy.foreign_proof import SKIPS
from normdeploy.records import Finding
from tests.support import run_onnxruntime

U = {"float32": 2.0**-24, "float16": 2.0**-11}
RNG = np.random.default_rng(5)
VECTOR = RNG.uniform(0.5, 1.5, 64)


@dataclass(frozen=True)
class Case:
    """One foreign node on inputs of these shapes; parameters come from RNG. ``core``: the op that it must become."""

    op: str
    inputs: Sequence[tuple[int, ...] | None]
    core: str
    domain: str = "com.microsoft"
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    opset: int = 17
    data: int = 1  # how many of the first inputs are data, the others are initializers
    reference: str = ""  # the owner in evaluate_foreign's table, by default that of the domain
    nodes: int = 1  # of the result at most

    @property
    def id(self) -> str:
        said = "-".join(f"{k}={np.size(v) if np.size(v) > 1 else v}" for k, v in self.attrs.items() if k != "epsilon")
        return f"{self.op}-{self.opset}-{said}-{sum(i is not None for i in self.inputs)}to{self.outputs}"


H = (8,)
SHWC = (2, 5, 4, 8)
XS = ((2, 3, 8), (2, 3, 8))
CASES = [
    Case("LayerNormalization", [(2, 3, 8), H, H], "LayerNormalization", "", {"epsilon": 1e-6}, opset=13),
    Case("LayerNormalization", [(2, 3, 8), H], "LayerNormalization", "", {"axis": 2}, opset=11),
    Case("LayerNormalization", [(2, 3, 8), H, H], "LayerNormalization", "com.microsoft", {"axis": -1}, opset=18),
    Case("SimplifiedLayerNormalization", [(2, 3, 8), H], "RMSNormalization", "", {"epsilon": 1e-6}, opset=13),
    Case("SimplifiedLayerNormalization", [(2, 3, 8), H], "RMSNormalization", opset=21),
    Case("SimplifiedLayerNormalization", [(2, 4, 8), (4, 8)], "RMSNormalization", "", {"axis": 1}, opset=15),
    Case("SkipLayerNormalization", [*XS, H, H], "LayerNormalization", attrs={"epsilon": 1e-5}, data=2, nodes=2),
    Case("SkipLayerNormalization", [*XS, H, H, H], "LayerNormalization", outputs=4, data=2, nodes=11),
    Case("SkipLayerNormalization", [*XS, H, None, H], "LayerNormalization", data=2, nodes=3, opset=11),
    Case("SkipLayerNormalization", [(2, 3, 8), (3, 8), H, H], "LayerNormalization", data=2, nodes=2, opset=21),
    Case("SkipLayerNormalization", [(2, 3, 8), (1, 3, 8), H, H], "LayerNormalization", data=2, nodes=2),
    Case("SkipSimplifiedLayerNormalization", [*XS, H], "RMSNormalization", data=2, nodes=2, attrs={"epsilon": 1e-6}),
    Case("SkipSimplifiedLayerNormalization", [*XS, H, H], "RMSNormalization", data=2, nodes=3, opset=21),
    Case("GroupNorm", [(2, 5, 4, 8), H, H], "GroupNormalization", attrs={"groups": 4, "activation": 0}, nodes=3),
    Case("GroupNorm", [(2, 5, 4, 8), H, H], "GroupNormalization", attrs={"groups": 2, "activation": 1}, nodes=5, opset=21),
    Case("GroupNorm", [(2, 8, 4, 3), H, H], "LayerNormalization", attrs={"groups": 1, "activation": 0, "channels_last": 0}),
    Case("GroupNorm", [(2, 8, 4, 3), H, H], "InstanceNormalization", attrs={"groups": 8, "activation": 0, "channels_last": 0}),
    Case(
        "SkipGroupNorm",
        [(2, 5, 4, 8), H, H, (2, 5, 4, 8), H],
        "GroupNormalization",
        attrs={"groups": 4, "activation": 1},
        outputs=2,
        nodes=7,
    ),
    Case("SkipGroupNorm", [(2, 5, 4, 8), H, H, (2, 8)], "GroupNormalization", attrs={"groups": 4, "activation": 0}, nodes=5),
    Case("GroupNorm", [(2, 64, 4, 3), (64,), (64,)], "GroupNormalization", "", {"bSwish": 1}, opset=13, reference="TensorRT", nodes=3),
    Case("GroupNormalizationPlugin", [(2, 8, 4), H, H], "GroupNormalization", "", {"eps": 1e-3, "num_groups": 4}, reference="TensorRT"),
    Case("GroupNormalizationPlugin", [(2, 8, 4, 3), H, H], "GroupNormalization", "", {"num_groups": 2}, data=3, reference="TensorRT"),
    Case("GroupNormalizationPlugin", [(2, 8, 4, 3), H, H], "LayerNormalization", "trt", reference="TensorRT"),
    Case("LayerNorm", [(2, 3, 8), H, H], "LayerNormalization", "", {"epsilon": 1e-6}, reference="TensorRT"),
    Case("LayerNorm", [(2, 3, 8), (24,), (24,)], "LayerNormalization", "", {"axis": 1}, reference="TensorRT", opset=18),
    Case("LayerNormPlugin", [(2, 3, 8), H, H], "LayerNormalization", "", {"epsilon": 1e-6, "plugin_version": "1"}, reference="TensorRT"),
    Case(
        *("InstanceNormalization_TRT", [(2, 3, 5, 4)], "InstanceNormalization", ""),
        {"epsilon": 1e-3, "scales": VECTOR[:3], "bias": VECTOR[3:6], "relu": 1, "alpha": 0.25},
        reference="TensorRT",
        nodes=2,
    ),
    Case("InstanceNormalization_TRT", [(2, 3, 7), (3,), (3,)], "InstanceNormalization", "", {"epsilon": 1e-5}, reference="TensorRT"),
    Case(
        *("CustomSkipLayerNormPluginDynamic", [(3, 2, 8, 1, 1)] * 2, "LayerNormalization", ""),
        {"ld": 8, "type_id": 0, "plugin_version": "1", "gamma": VECTOR[:8], "beta": VECTOR[8:16], "bias": VECTOR[16:24]},
        data=2,
        reference="TensorRT",
        nodes=3,
    ),
    Case("GroupNormalization", [(2, 8, 5), (4,), (4,)], "GroupNormalization", "", {"num_groups": 4}, opset=18, reference="ONNX"),
    Case(
        "GroupNormalization",
        [(2, 8, 5), (4,), (4,)],
        "GroupNormalization",
        "",
        {"num_groups": 4},
        opset=20,
        data=3,
        reference="ONNX",
        nodes=7,
    ),
    Case("GroupNormalization", [(2, 8, 5, 3), (1,), (1,)], "LayerNormalization", "", {"num_groups": 1}, opset=19, reference="ONNX"),
]


def built(case: Case, dtype: str = "float32", dynamic: bool = True, names: Sequence[str] = ()) -> onnx.ModelProto:
    """A file with that node alone, its data of dynamic sizes where they may be, its parameters initializers."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    full, inputs, initializers, values = case.inputs[0], [], [], []
    channel = {"GroupNormalizationPlugin": 1, "GroupNormalization": 1, "InstanceNormalization_TRT": 1}.get(case.op, len(full) - 1)
    channel = 1 if (case.domain == "" and case.op == "GroupNorm") or case.attrs.get("channels_last") == 0 else channel
    channel = 2 if case.op.startswith("Custom") else channel
    fixed = {channel} if "axis" not in case.attrs else set(range(case.attrs["axis"], len(full)))
    for i, shape in enumerate(case.inputs):
        if shape is None:
            inputs.append("")
            continue
        inputs.append(f"i{i}")
        if i < case.data or i == SKIPS.get(case.op) or len(shape) == len(full):
            first = 0 if case.op == "SkipGroupNorm" else len(full) - len(shape)  # a skip is broadcast like any summand, or (N, C)
            free = [dynamic and n > 1 and n == full[a + first] and a + first not in fixed for a, n in enumerate(shape)]
            dims = [f"d{a + first}" if f else n for a, (f, n) in enumerate(zip(free, shape, strict=True))]
            values.append(helper.make_tensor_value_info(f"i{i}", kind, dims))
        else:
            initializers.append(numpy_helper.from_array(np.random.default_rng(i).uniform(0.5, 1.5, shape).astype(dtype), f"i{i}"))
    outputs = list(names) or [f"o{i}" for i in range(case.outputs)]
    attrs = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in case.attrs.items()}
    node = helper.make_node(case.op, inputs, outputs, name="foreign", domain=case.domain, **attrs)
    ends = [o for o in outputs if o]
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name=o) for o in ends], initializers)
    for out, o in zip(graph.output, ends, strict=True):
        statistic = o in ("o1", "o2") and case.op == "SkipLayerNormalization"
        dims = [d.dim_param or d.dim_value for d in values[0].type.tensor_type.shape.dim]
        out.CopyFrom(helper.make_tensor_value_info(o, TensorProto.FLOAT if statistic else kind, [*dims[:-1], 1] if statistic else dims))
    imports = [helper.make_opsetid("", case.opset), *([helper.make_opsetid(case.domain, 1)] if case.domain else [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def feeds_of(proto: onnx.ModelProto, scale: float = 1.0, offset: float = 0.0, sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(3), {}
    for value in proto.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value or (sizes or {}).get(d.dim_param, 2 + int(d.dim_param[1:])) for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = (offset + scale * rng.standard_normal(shape)).astype(kind)
    return feeds


def defined(case: Case, proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the owner's definition makes of it, in float64."""
    values = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer} | feeds
    inputs = [values[n].astype(np.float64) if n else None for n in proto.graph.node[0].input]
    attrs = {k: np.float64(np.float32(v)) if isinstance(v, float) else v for k, v in case.attrs.items()}
    function = TABLE.get((case.reference or "com.microsoft", case.op)) or evaluate.OPS[case.domain, case.op]
    found = function(inputs, attrs, case.opset, case.outputs)
    return [np.asarray(f) for f in (found if isinstance(found, tuple) else (found,))[: case.outputs]]


def the(findings: Sequence[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def agrees(got: np.ndarray, ref: np.ndarray, dtype: str, condition: float = 1.0) -> None:
    """Within 32 roundings of the largest value: a mean of a few dozen elements, a root, an affine, an activation."""
    assert got.shape == ref.shape
    assert np.abs(got.astype(np.float64) - ref).max() <= 32 * U[dtype] * condition * (1 + np.abs(ref).max())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_foreign_node_becomes_standard(case: Case) -> None:
    proto = built(case)
    held = proto.SerializeToString(deterministic=True)
    out, summary = rewrite.optimize(proto)
    assert proto.SerializeToString(deterministic=True) == held
    onnx.checker.check_model(out, full_check=True)
    assert [o.domain for o in out.opset_import] == [""]
    found = the(summary.findings)
    assert (found.status, summary.nodes_before) == ("fused", 1), found
    assert found.spelling.split(" ")[0] == case.op
    assert found.became.startswith(case.core)
    assert found.certificate is not None
    assert found.certificate.cases > 18  # those of the expansion and those of the fusion
    ops = [n.op_type for n in out.graph.node]
    assert ops.count(case.core) == 1
    assert len(ops) <= case.nodes, ops
    for sizes in (None, {f"d{a}": 5 - a for a in range(4)}):
        feeds = feeds_of(out, sizes=sizes)
        for got, ref in zip(run_onnxruntime(out, feeds), defined(case, proto, feeds), strict=True):
            agrees(got, ref, "float32")
    again, _ = rewrite.optimize(out)
    assert again.SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)


HALF = [c for c in CASES if c.outputs == 1]


@pytest.mark.parametrize("case", HALF, ids=lambda c: c.id)
def test_statistics_of_half_precision_are_taken_in_float32(case: Case) -> None:
    proto = built(case, "float16", dynamic=False)
    out, summary = rewrite.optimize(proto)
    onnx.checker.check_model(out, full_check=True)
    assert the(summary.findings).status in ("fused", "refused")  # an attribute's float32 vector need not fit into float16
    if summary.findings[0].status == "refused":
        assert "does not fit into float16" in summary.findings[0].reason
    feeds = feeds_of(proto, scale=300.0)  # squares overflow in float16
    got, ref = run_onnxruntime(out, feeds)[0], defined(case, proto, feeds)[0]
    agrees(got, ref, "float16")


KERNELS = [c for c in CASES if c.domain in ("", "com.microsoft") and "LayerNormalization" in c.op and c.op[0] != "C"]


@pytest.mark.parametrize("case", KERNELS, ids=lambda c: c.id)
def test_definition_is_what_onnxruntime_computes(case: Case) -> None:
    if (case.domain, case.op) in (("com.microsoft", "LayerNormalization"), ("com.microsoft", "SimplifiedLayerNormalization")):
        pytest.skip("no kernel of its own: onnxruntime has it in the default domain")
    names = ["o0", "", "", "o3"] if case.outputs == 4 else []  # its CPU kernel leaves mean and inv_std_var unwritten
    proto = built(case, names=names)
    for scale, offset in ((1.0, 0.0), (3e-3, 0.0), (1.0, 30.0)):
        feeds = feeds_of(proto, scale, offset)
        refs = defined(case, proto, feeds)
        for got, ref in zip(run_onnxruntime(proto, feeds), [refs[0], *refs[3:]], strict=True):
            agrees(got, ref, "float32", condition=1 + offset / scale)
