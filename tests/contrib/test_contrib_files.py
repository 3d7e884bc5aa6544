"""Norms in ops of their owners': each becomes standard ONNX, equal to its owner's definition; what is ambiguous is
refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from normdeploy.contrib import contrib_ops as foreign_ops
from normdeploy.contrib.expansion_writer import ExpansionWriter
from normdeploy.contrib.shape_assumptions import SKIPS
from normdeploy.evaluate import evaluator
from normdeploy.findings.records import Finding
from normdeploy.norms import onnx_norms
from normdeploy.rewriting import norm_optimizer
from normdeploy.storage.nonstandard_norms import is_nonstandard_norm
from tests.foreign_references import TABLE
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
    reference: str = ""  # the owner in the table of `tests.foreign_references`, by default that of the domain
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
    Case(
        "GroupNorm", [(2, 5, 4, 8), H, H], "GroupNormalization", attrs={"groups": 2, "activation": 1}, nodes=5, opset=21
    ),
    Case(
        "GroupNorm",
        [(2, 8, 4, 3), H, H],
        "LayerNormalization",
        attrs={"groups": 1, "activation": 0, "channels_last": 0},
    ),
    Case(
        "GroupNorm",
        [(2, 8, 4, 3), H, H],
        "InstanceNormalization",
        attrs={"groups": 8, "activation": 0, "channels_last": 0},
    ),
    Case(
        "SkipGroupNorm",
        [(2, 5, 4, 8), H, H, (2, 5, 4, 8), H],
        "GroupNormalization",
        attrs={"groups": 4, "activation": 1},
        outputs=2,
        nodes=7,
    ),
    Case(
        "SkipGroupNorm",
        [(2, 5, 4, 8), H, H, (2, 8)],
        "GroupNormalization",
        attrs={"groups": 4, "activation": 0},
        nodes=5,
    ),
    Case("GatedRMSNorm", [(2, 3, 8), H, (2, 3, 8)], "RMSNormalization", nodes=4),
    Case("GatedRMSNorm", [(2, 3, 24), H, (2, 3, 24)], "RMSNormalization", attrs={"epsilon": 0.1}, opset=21, nodes=6),
    Case("GatedRMSNorm", [(2, 3, 24), H, (2, 3, 24)], "RMSNormalization", attrs={"activation": "sigmoid"}, nodes=5),
    Case("BranchwiseRMSNorm", [(2, 3, 4, 8), H], "RMSNormalization"),
    Case("BranchwiseRMSNorm", [(2, 3, 8)], "RMSNormalization", attrs={"epsilon": 0.1}),
    Case("BranchwiseRMSNorm", [(2, 3, 32), H], "RMSNormalization", attrs={"num_branches": 4}, nodes=3),
    Case("BranchwiseRMSNorm", [(2, 3, 32), (32,)], "RMSNormalization", attrs={"num_branches": 4}, nodes=5),
    Case("BranchwiseRMSNorm", [(2, 3, 32), (4, 8)], "RMSNormalization", attrs={"num_branches": 4}, nodes=4),
    Case("BranchwiseRMSNorm", [(2, 3, 32)], "RMSNormalization", attrs={"num_branches": 4}, nodes=3),
    Case(
        "GroupNorm",
        [(2, 64, 4, 3), (64,), (64,)],
        "GroupNormalization",
        "",
        {"bSwish": 1},
        opset=13,
        reference="TensorRT",
        nodes=3,
    ),
    Case(
        "GroupNormalizationPlugin",
        [(2, 8, 4), H, H],
        "GroupNormalization",
        "",
        {"eps": 1e-3, "num_groups": 4},
        reference="TensorRT",
    ),
    Case(
        "GroupNormalizationPlugin",
        [(2, 8, 4, 3), H, H],
        "GroupNormalization",
        "",
        {"num_groups": 2},
        data=3,
        reference="TensorRT",
    ),
    Case("GroupNormalizationPlugin", [(2, 8, 4, 3), H, H], "LayerNormalization", "trt", reference="TensorRT"),
    Case("LayerNorm", [(2, 3, 8), H, H], "LayerNormalization", "", {"epsilon": 1e-6}, reference="TensorRT"),
    Case("LayerNorm", [(2, 3, 8), (24,), (24,)], "LayerNormalization", "", {"axis": 1}, reference="TensorRT", opset=18),
    Case(
        "LayerNormPlugin",
        [(2, 3, 8), H, H],
        "LayerNormalization",
        "",
        {"epsilon": 1e-6, "plugin_version": "1"},
        reference="TensorRT",
    ),
    Case(
        *("InstanceNormalization_TRT", [(2, 3, 5, 4)], "InstanceNormalization", ""),
        {"epsilon": 1e-3, "scales": VECTOR[:3], "bias": VECTOR[3:6], "relu": 1, "alpha": 0.25},
        reference="TensorRT",
        nodes=2,
    ),
    Case(
        "InstanceNormalization_TRT",
        [(2, 3, 7), (3,), (3,)],
        "InstanceNormalization",
        "",
        {"epsilon": 1e-5},
        reference="TensorRT",
    ),
    Case(
        *("CustomSkipLayerNormPluginDynamic", [(3, 2, 8, 1, 1)] * 2, "LayerNormalization", ""),
        {
            "ld": 8,
            "type_id": 0,
            "plugin_version": "1",
            "gamma": VECTOR[:8],
            "beta": VECTOR[8:16],
            "bias": VECTOR[16:24],
        },
        data=2,
        reference="TensorRT",
        nodes=3,
    ),
    Case(
        "GroupNormalization",
        [(2, 8, 5), (4,), (4,)],
        "GroupNormalization",
        "",
        {"num_groups": 4},
        opset=18,
        reference="ONNX",
    ),
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
    Case(
        "GroupNormalization",
        [(2, 8, 5, 3), (1,), (1,)],
        "LayerNormalization",
        "",
        {"num_groups": 1},
        opset=19,
        reference="ONNX",
    ),
]


def built(case: Case, dtype: str = "float32", dynamic: bool = True, names: Sequence[str] = ()) -> onnx.ModelProto:
    """A file with that node alone, its data of dynamic sizes where they may be, its parameters initializers."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    full, inputs, initializers, values = case.inputs[0], [], [], []
    channel = {"GroupNormalizationPlugin": 1, "GroupNormalization": 1, "InstanceNormalization_TRT": 1}.get(
        case.op, len(full) - 1
    )
    channel = 1 if (case.domain == "" and case.op == "GroupNorm") or case.attrs.get("channels_last") == 0 else channel
    channel = 2 if case.op.startswith("Custom") else channel
    fixed = {channel} if "axis" not in case.attrs else set(range(case.attrs["axis"], len(full)))
    for i, shape in enumerate(case.inputs):
        if shape is None:
            inputs.append("")
            continue
        inputs.append(f"i{i}")
        if i < case.data or i == SKIPS.get(case.op) or len(shape) == len(full):
            first = (
                0 if case.op == "SkipGroupNorm" else len(full) - len(shape)
            )  # a skip is broadcast like any summand, or (N, C)
            free = [dynamic and n > 1 and n == full[a + first] and a + first not in fixed for a, n in enumerate(shape)]
            dims = [f"d{a + first}" if f else n for a, (f, n) in enumerate(zip(free, shape, strict=True))]
            values.append(helper.make_tensor_value_info(f"i{i}", kind, dims))
        else:
            initializers.append(
                numpy_helper.from_array(np.random.default_rng(i).uniform(0.5, 1.5, shape).astype(dtype), f"i{i}")
            )
    outputs = list(names) or [f"o{i}" for i in range(case.outputs)]
    attrs = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in case.attrs.items()}
    node = helper.make_node(case.op, inputs, outputs, name="foreign", domain=case.domain, **attrs)
    ends = [o for o in outputs if o]
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name=o) for o in ends], initializers)
    for out, o in zip(graph.output, ends, strict=True):
        statistic = o in ("o1", "o2") and case.op == "SkipLayerNormalization"
        dims = [d.dim_param or d.dim_value for d in values[0].type.tensor_type.shape.dim]
        out.CopyFrom(
            helper.make_tensor_value_info(
                o, TensorProto.FLOAT if statistic else kind, [*dims[:-1], 1] if statistic else dims
            )
        )
    imports = [helper.make_opsetid("", case.opset), *([helper.make_opsetid(case.domain, 1)] if case.domain else [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def feeds_of(
    proto: onnx.ModelProto, scale: float = 1.0, offset: float = 0.0, sizes: dict[str, int] | None = None
) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(3), {}
    for value in proto.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [
            d.dim_value or (sizes or {}).get(d.dim_param, 2 + int(d.dim_param[1:]))
            for d in value.type.tensor_type.shape.dim
        ]
        feeds[value.name] = (offset + scale * rng.standard_normal(shape)).astype(kind)
    return feeds


def defined(case: Case, proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the owner's definition makes of it, in float64."""
    values = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer} | feeds
    inputs = [values[n].astype(np.float64) if n else None for n in proto.graph.node[0].input]
    attrs = {k: np.float64(np.float32(v)) if isinstance(v, float) else v for k, v in case.attrs.items()}
    function = TABLE.get((case.reference or "com.microsoft", case.op)) or evaluator.OPS[case.domain, case.op]
    found = function(inputs, attrs, case.opset, case.outputs)
    return [np.asarray(f) for f in (found if isinstance(found, tuple) else (found,))[: case.outputs]]


def single(case: Case) -> str:
    """A runtime for which a norm is one node."""
    return "tensorrt" if case.core == "GroupNormalization" else "any"


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
    out, summary = norm_optimizer.optimize_norms(proto, runtime=single(case))
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
    again, _ = norm_optimizer.optimize_norms(out, runtime=single(case))
    assert again.SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)


HALF = [c for c in CASES if c.outputs == 1]


@pytest.mark.parametrize("case", HALF, ids=lambda c: c.id)
def test_statistics_of_half_precision_are_taken_in_float32(case: Case) -> None:
    proto = built(case, "float16", dynamic=False)
    out, summary = norm_optimizer.optimize_norms(proto)
    onnx.checker.check_model(out, full_check=True)
    assert the(summary.findings).status in (
        "fused",
        "refused",
    )  # an attribute's float32 vector need not fit into float16
    if summary.findings[0].status == "refused":
        assert "is out of range for float16" in summary.findings[0].reason
    feeds = feeds_of(proto, scale=300.0)  # squares overflow in float16
    got, ref = run_onnxruntime(out, feeds)[0], defined(case, proto, feeds)[0]
    agrees(got, ref, "float16")


WITH_KERNEL = ("LayerNormalization", "GatedRMSNorm", "BranchwiseRMSNorm")
KERNELS = [c for c in CASES if c.domain in ("", "com.microsoft") and c.op.endswith(WITH_KERNEL) and c.op[0] != "C"]


@pytest.mark.parametrize("case", KERNELS, ids=lambda c: c.id)
def test_definition_is_what_onnxruntime_computes(case: Case) -> None:
    if (case.domain, case.op) in (
        ("com.microsoft", "LayerNormalization"),
        ("com.microsoft", "SimplifiedLayerNormalization"),
    ):
        pytest.skip("no kernel of its own: onnxruntime has it in the default domain")
    names = ["o0", "", "", "o3"] if case.outputs == 4 else []  # its CPU kernel leaves mean and inv_std_var unwritten
    proto = built(case, names=names)
    for scale, offset in ((1.0, 0.0), (3e-3, 0.0), (1.0, 30.0)):
        feeds = feeds_of(proto, scale, offset)
        refs = defined(case, proto, feeds)
        for got, ref in zip(run_onnxruntime(proto, feeds), [refs[0], *refs[3:]], strict=True):
            agrees(got, ref, "float32", condition=1 + offset / scale)


def file(text: str, opset: int = 17, domain: str = "com.microsoft") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "{domain}": 1]> g {text}')


X, VECTORS = (
    "(float[B,S,8] x, float[B,S,8] s) => (float[B,S,8] y)",
    "<float[8] g = {1,2,3,4,5,6,7,8}, float[8] b = {1,1,1,1,1,1,1,1}>",
)
REFUSED = {
    "an epsilon that is compiled in": ("{ y = LayerNormPlugin(x, g, b) }", "its epsilon is missing"),
    "a plugin of the same name without an affine": (
        "{ y = LayerNorm <epsilon: float = 0.001> (x) }",
        "it has 1 inputs; expected 3",
    ),
    "an attribute that onnxruntime ignores": (
        "{ y = SimplifiedLayerNormalization <fast = 1> (x, g) }",
        "attribute 'fast' has an unknown",
    ),
    "an input too many": ("{ y = SimplifiedLayerNormalization (x, g, b) }", "it has 3 inputs; expected 2"),
    "three inputs too many": (
        "{ y = SimplifiedLayerNormalization (x, g, b, s, s) }",
        "it has 5 inputs; expected 2",
    ),
    "an attribute nobody documents": (
        "{ y = LayerNorm <epsilon: float = 0.001, fast = 1> (x, g, b) }",
        "attribute 'fast' has an unknown",
    ),
    "two epsilons": ("{ y = LayerNorm <epsilon: float = 0.001, eps: float = 0.1> (x, g, b) }", "it has two epsilons"),
    "an interleaved plugin": (
        '{ y = CustomSkipLayerNormPluginDynamic <plugin_version = "3", gamma = [1.0], beta = [1.0]> (x, s) }',
        "version 3, type_id 0 computes in int8",
    ),
    "no vector": ("{ y = CustomSkipLayerNormPluginDynamic <ld = 8, beta = [1.0]> (x, s) }", "its gamma is missing"),
    "no epsilon": (
        "{ y = InstanceNormalization_TRT <scales = [1.0], bias = [1.0]> (x) }",
        "its epsilon is missing",
    ),
    "a mean that it does not take": (
        "{ y, m = com.microsoft.SkipSimplifiedLayerNormalization (x, s, g) }",
        "its mean output is used",
    ),
    "another activation": (
        "{ y = com.microsoft.GroupNorm <groups = 2, activation = 7> (x, g, b) }",
        "its activation is 7",
    ),
    "unknown": (
        "{ y = com.microsoft.GatedLayerNorm (x, g, s) }",
        "GatedLayerNorm (com.microsoft) has no known definition",
    ),
    "a gate through another activation": (
        '{ y = com.microsoft.GatedRMSNorm <activation = "tanh"> (x, g, s) }',
        "its activation is 'tanh'; expected 'silu', 'swish' or 'sigmoid'",
    ),
    "heads that don't divide": (
        "<float[3] c = {1,2,3}> { y = com.microsoft.GatedRMSNorm (x, c, s) }",
        "the last size 8 of 'x' is not divisible by 3",
    ),
    "branches that don't divide": (
        "{ y = com.microsoft.BranchwiseRMSNorm <num_branches = 3> (x, g) }",
        "its last size 8 is not divisible into 3 branches",
    ),
    "fewer than no branches": (
        "{ y = com.microsoft.BranchwiseRMSNorm <num_branches = -1> (x, g) }",
        "its number of branches is -1",
    ),
    "a plugin that nobody knows": (
        "{ y = LayerNormPluginDynamic (x, g, b) }",
        "LayerNormPluginDynamic has no known definition",
    ),
    "per-channel scale at opset 18": (
        "<float[4] c = {1,2,3,4}> { y = GroupNormalization <num_groups = 2> (x, c, c) }",
        "'c' has 4 values; at opset 18, expected one per group: 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_is_refused_by_name(name: str) -> None:
    text, reason = REFUSED[name]
    proto = file(f"{X} {VECTORS if 'float[' not in text else ''} {text}", 18 if "opset 18" in name else 17)
    out, summary = norm_optimizer.optimize_norms(proto)
    found = the(summary.findings)
    assert (found.status, found.tensor) == ("refused", "y")
    assert reason in found.reason
    assert [n.op_type for n in out.graph.node] == [n.op_type for n in proto.graph.node]


@pytest.mark.parametrize("given", ["<fast = 1> (x, g)", "(x, g, b)"])
def test_a_norm_that_is_not_read_is_told_once_with_what_scales_it(given: str) -> None:
    proto = file(f"{X} {VECTORS} {{ n = SimplifiedLayerNormalization {given} y = Mul (n, s) }}")
    _, summary = norm_optimizer.optimize_norms(proto)
    found = the(summary.findings)
    assert (found.status, found.tensor, found.spelling) == ("refused", "n", "SimplifiedLayerNormalization")


def test_type_that_is_not_known_is_refused_by_name() -> None:
    proto = file(
        "(float[B,8] x) => (float[B,8] y) <float[8] g = {1,2,3,4,5,6,7,8}> { z = Strange (x) y ="
        " SimplifiedLayerNormalization (z, g) }"
    )
    found = the(norm_optimizer.optimize_norms(proto)[1].findings)
    assert (found.status, found.reason) == (
        "refused",
        "SimplifiedLayerNormalization: the type of 'z' is unknown: it must be a floating-point type",
    )


def test_node_that_a_function_of_the_file_defines_is_no_plugin() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[B,8] x) => (float[B,8] y) { y = own.LayerNorm(x) }
        <domain: "own", opset_import: ["": 17]> LayerNorm (x) => (y) { y = Relu(x) }"""
    proto = onnx.parser.parse_model(text)
    out, summary = norm_optimizer.optimize_norms(proto)
    assert not summary.findings
    assert out.graph.node[0].op_type == "LayerNorm"


def test_bodies_and_functions_are_read_too() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "own": 1]>
        g (bool c, float[B,8] x, float[B,8] s) => (float[B,8] y) <float[8] g = {1,2,3,4,5,6,7,8}> {
            z = If (c) <
                then_branch = t () => (float[B,8] a) { a = com.microsoft.SkipLayerNormalization(x, s, g) },
                else_branch = e () => (float[B,8] b) { b = Add(x, s) }>
            y = own.f(z, g)
        }
        <domain: "own", opset_import: ["": 17, "com.microsoft": 1]>
        f (a, g) => (b) { b = com.microsoft.LayerNormalization(a, g) }"""
    proto = onnx.parser.parse_model(text)
    out, summary = norm_optimizer.optimize_norms(proto)
    onnx.checker.check_model(out, full_check=True)
    assert [o.domain for o in out.opset_import] == ["", "own"]
    assert [o.domain for o in out.functions[0].opset_import] == [""]
    places = {f.place: (f.status, f.spelling) for f in summary.findings}
    assert places == {
        "then_branch of If 'z'": ("fused", "SkipLayerNormalization (com.microsoft)"),
        "function own.f": ("fused", "LayerNormalization (com.microsoft)"),
    }
    rng = np.random.default_rng(0)
    x, s = rng.standard_normal((2, 3, 8)).astype(np.float32)
    (got,) = run_onnxruntime(out, {"c": np.array(True), "x": x, "s": s})
    gamma = np.arange(1.0, 9.0)
    inner, *_ = evaluator.evaluate_node(
        "SkipLayerNormalization", [x.astype(float), s.astype(float), gamma], {}, opset=1, domain="com.microsoft"
    )
    ref, *_ = evaluator.evaluate_node("LayerNormalization", [inner, gamma], {}, opset=17)
    agrees(got, ref, "float32")


EMBEDDING = """(int32[B,S] ids, int32[B,S] kinds, int32[B,S] mask, int32[B,S] place) => (float[B,S,8] y{outputs}) {{
    y{names} = com.microsoft.EmbedLayerNormalization <epsilon: float = 1e-05{attrs}> ({inputs}) }}"""
EMBEDDINGS = {
    "all": (["ids", "kinds", "w", "p", "t", "g", "b", "mask"], ", m", ", int32[B] m", ", mask_index_type = 1"),
    "no segments": (["ids", "", "w", "p", "", "g", "b"], ", m", ", int32[B] m", ""),
    "no mask": (["ids", "kinds", "w", "p", "t", "g", "b"], ", m", ", int32[B] m", ""),
    "given positions": (["ids", "kinds", "w", "p", "t", "g", "b", "", "place"], ", , z", ", float[B,S,8] z", ""),
}


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding_norm_is_a_sum_of_gathers(name: str, opset: int) -> None:
    inputs, names, outputs, attrs = EMBEDDINGS[name]
    proto = file(
        EMBEDDING.format(inputs=", ".join(i or '""' for i in inputs), names=names, outputs=outputs, attrs=attrs), opset
    )
    for i, (t, shape) in enumerate({"w": (20, 8), "p": (12, 8), "t": (2, 8), "g": (8,), "b": (8,)}.items()):
        proto.graph.initializer.append(
            numpy_helper.from_array(np.random.default_rng(i).standard_normal(shape).astype(np.float32), t)
        )
    used = {"ids": 20, "kinds": 2, "mask": 2, "place": 12}
    kept = [v for v in proto.graph.input if v.name in inputs]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.integers(0, used[v.name], (3, 5)).astype(np.int32) for v in kept}
    out, summary = norm_optimizer.optimize_norms(proto)
    onnx.checker.check_model(out, full_check=True)
    assert [o.domain for o in out.opset_import] == [""]
    assert the(summary.findings).status == "fused"
    values = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer} | feeds
    reference = TABLE["com.microsoft", "EmbedLayerNormalization"]
    found = reference([values.get(i) for i in inputs], {"epsilon": np.float64(np.float32(1e-5))}, opset, 3)
    refs = [f for f, n in zip(found, proto.graph.node[0].output, strict=False) if n]
    for got, kernel, ref in zip(run_onnxruntime(out, feeds), run_onnxruntime(proto, feeds), refs, strict=True):
        if ref.dtype.kind == "i":
            np.testing.assert_array_equal(got, ref)
            np.testing.assert_array_equal(kernel, ref)
        else:
            agrees(got, ref, "float32")
            agrees(kernel, ref, "float32")


def misread(w: ExpansionWriter, attrs: dict[str, Any]) -> None:
    """A SkipLayerNormalization whose second summand is forgotten."""
    w.expand_definition(onnx_norms.layer_norm, {"epsilon": 1e-12}, (w.input_name(0), w.input_name(2), w.input_name(3)))


def test_misread_definition_fails_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    op = foreign_ops.ONNXRUNTIME_OPS["SkipLayerNormalization"]
    monkeypatch.setitem(
        foreign_ops.ONNXRUNTIME_OPS,
        "SkipLayerNormalization",
        replace(op, check=None, write=misread),
    )
    proto = file(f"{X} {VECTORS} {{ y = com.microsoft.SkipLayerNormalization (x, s, g, b) }}")
    out, summary = norm_optimizer.optimize_norms(proto)
    found = the(summary.findings)
    assert found.status == "undone"
    assert not found.certificate
    assert [n.op_type for n in out.graph.node] == ["SkipLayerNormalization"]


def test_node_that_is_not_fused_is_standard_all_the_same() -> None:
    """Behind an op that nobody knows the shape is lost, and recognition needs it."""
    text = "(float[B,T,8] x) => (float[B,T,8] y) <float[8] g = {1,2,3,4,5,6,7,8}> "
    proto = file(text + "{ a = com.microsoft.Inverse (x) y = com.microsoft.SkipLayerNormalization (a, a, g) }")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    out, summary = norm_optimizer.optimize_norms(proto)
    found = the(summary.findings)
    assert (found.status, found.became) == ("refused", "now 9 standard nodes")
    assert "unknown" in found.reason
    assert {n.op_type for n in out.graph.node} <= {"Inverse", "Add", "ReduceMean", "Sub", "Mul", "Sqrt", "Div"}


def test_residual_stream_carries_the_shape_past_an_op_that_nobody_knows() -> None:
    text = "(float[B,S,8] x) => (float[B,S,8] y) <float[8] g = {1,2,3,4,5,6,7,8}> "
    block = "{0} = com.microsoft.Strange ({1}) {2} = com.microsoft.SkipLayerNormalization ({0}, {1}, g)"
    proto = file(
        f"{text} {{ a = LayerNormalization (x, g) {block.format('b', 'a', 'c')} {block.format('d', 'c', 'y')} }}"
    )
    out, summary = norm_optimizer.optimize_norms(proto)
    assert [f.status for f in summary.findings] == ["kept", "fused", "fused"]
    assert [n.op_type for n in out.graph.node] == ["LayerNormalization", *["Strange", "Add", "LayerNormalization"] * 2]
    assert "com.microsoft" in [o.domain for o in out.opset_import]


def test_result_of_a_contrib_layer_norm_has_its_scale_s_type() -> None:
    """onnxruntime's LayerNormalization(1): Y is of type V, that of scale and B."""
    text = "(float16[B,8] x, float[8] g) => (float[B,8] y) { y = LayerNormalization <epsilon: float = 0.001> (x, g) }"
    proto = file(text, 13)
    out, summary = norm_optimizer.optimize_norms(proto)
    onnx.checker.check_model(out, full_check=True)
    assert the(summary.findings).status == "fused"
    feeds: dict[str, np.ndarray] = {
        "x": np.random.default_rng(0).standard_normal((3, 8)).astype(np.float16),
        "g": VECTOR[:8].astype(np.float32),
    }
    ref, *_ = evaluator.evaluate_node(
        "LayerNormalization", [v.astype(float) for v in feeds.values()], {"epsilon": np.float32(1e-3)}, opset=17
    )
    (got,) = run_onnxruntime(out, feeds)
    assert got.dtype == np.float32
    agrees(got, ref, "float32")


@pytest.mark.parametrize(
    "behind", ["GroupNorm <groups = 4, activation = 0>", "LayerNormalization", "SkipLayerNormalization"]
)
def test_each_foreign_norm_behind_one_that_is_not_read_has_a_finding(behind: str) -> None:
    """Recognition gives up at the tensor between them, which is of both."""
    said = "a, " if behind.startswith("Skip") else ""
    text = (
        "(float[2,3,4,8] x, float[8] g) => (float[2,3,4,8] y, float[2,3,4,8] z) { a = com.microsoft.GroupNorm <groups ="
        " 4> (x, g, g)"
    )
    calls = " ".join(f"{out} = com.microsoft.{behind} (a, {said}g, g)" for out in ("y", "z"))
    _, summary = norm_optimizer.optimize_norms(file(f"{text} {calls} }}", 17))
    assert sorted(f.tensor for f in summary.findings) == ["a", "y", "z"]
    assert all(f.reason for f in summary.findings if f.status != "fused")


def test_norm_that_is_part_of_a_larger_one_is_told_once() -> None:
    """A modulation behind a plugin without one of its own: both are one LayerNormalization."""
    text = "(float[B,S,8] x, float[B,1,8] m, float[B,1,8] t) => (float[B,S,8] y) <float[8] g = {1,1,1,1,1,1,1,1}> "
    proto = file(text + "{ a = com.microsoft.LayerNormalization (x, g) z = Mul (a, m) y = Add (z, t) }")
    out, summary = norm_optimizer.optimize_norms(proto)
    found = the(summary.findings)
    assert (found.status, found.tensor, found.spelling) == ("fused", "y", "LayerNormalization (com.microsoft)")
    assert [n.op_type for n in out.graph.node] == ["LayerNormalization"]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("shape", ["N, 4, H, W", "2, 4, 5, 3", "N, 4, L"])
def test_standard_group_norm_takes_the_form_that_every_runtime_computes(groups: int, shape: str) -> None:
    text = f"(float[{shape}] x) => (float[{shape}] y) <float[4] g = {{1,2,3,4}}, float[4] b = {{4,3,2,1}}>"
    proto = file(f"{text} {{ y = GroupNormalization <num_groups = {groups}> (x, g, b) }}", 21)
    out, summary = norm_optimizer.optimize_norms(proto, runtime="tensorrt")
    onnx.checker.check_model(out, full_check=True)
    (node,) = out.graph.node
    assert node.op_type == {1: "LayerNormalization", 2: "GroupNormalization", 4: "InstanceNormalization"}[groups]
    assert the(summary.findings).status == ("kept" if groups == 2 else "fused")
    x = np.random.default_rng(1).standard_normal([2, 4, 5, 3][: len(shape.split(","))]).astype(np.float32)
    (ref,) = evaluator.evaluate_node(
        "GroupNormalization",
        [x.astype(float), np.arange(1.0, 5.0), np.arange(4.0, 0.0, -1)],
        {"num_groups": groups},
        opset=21,
    )
    agrees(run_onnxruntime(out, {"x": x})[0], ref, "float32")
    if groups == 2:  # and the form for all, which becomes one node again
        fast, told = norm_optimizer.optimize_norms(proto)
        assert [n.op_type for n in fast.graph.node if n.op_type.endswith("Normalization")] == [
            "InstanceNormalization",
            "BatchNormalization",
        ]
        assert the(told.findings).status == "fused"
        agrees(run_onnxruntime(fast, {"x": x})[0], ref, "float32")
        again, back = norm_optimizer.optimize_norms(fast, runtime="tensorrt")
        assert [n.op_type for n in again.graph.node] == ["GroupNormalization"]
        assert the(back.findings).status == "fused"
        kept, _ = norm_optimizer.optimize_norms(fast, runtime="onnxruntime")
        assert [n.op_type for n in kept.graph.node] == [n.op_type for n in fast.graph.node]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two post-norm blocks by torch's exporter at opset 18, with dynamic batch and length."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.up, self.down = torch.nn.Linear(16, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
            self.first, self.second = torch.nn.LayerNorm(16, eps=1e-12), torch.nn.LayerNorm(16, eps=1e-5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x + self.mix(x))
            return self.second(x + self.down(torch.nn.functional.gelu(self.up(x))))

    torch.manual_seed(0)
    net = torch.nn.Sequential(Block(), Block()).eval()
    path = tmp_path_factory.mktemp("encoder") / "encoder.onnx"
    dims = {0: torch.export.Dim("batch", min=1, max=8), 1: torch.export.Dim("length", min=1, max=64)}
    torch.onnx.export(
        net, (torch.randn(2, 5, 16),), path, opset_version=18, dynamo=True, dynamic_shapes=(dims,), external_data=False
    )
    return path


def by_onnxruntime(path: Path) -> onnx.ModelProto:
    """What its offline optimization at the level "extended" writes."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_suffix(".extended.onnx"))
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


def by_transformers(path: Path) -> onnx.ModelProto:
    """What the optimizer for BERT, which comes with onnxruntime, writes."""
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    written = path.with_suffix(".bert.onnx")
    optimizer.optimize_model(str(path), model_type="bert", num_heads=0, hidden_size=0, opt_level=0).save_model_to_file(
        str(written)
    )
    return onnx.load(written)


@pytest.mark.parametrize("optimized", [by_onnxruntime, by_transformers])
def test_files_that_onnxruntime_optimized_are_standard_again(
    encoder: Path, optimized: Callable[[Path], onnx.ModelProto]
) -> None:
    proto = optimized(encoder)
    assert [n.op_type for n in proto.graph.node].count("SkipLayerNormalization") == 4
    out, summary = norm_optimizer.optimize_norms(proto)
    onnx.checker.check_model(out, full_check=True)
    assert [f.status for f in summary.findings] == ["fused"] * 4
    assert {f.spelling for f in summary.findings} == {"SkipLayerNormalization (com.microsoft)"}
    ops = [n.op_type for n in out.graph.node]
    assert ops.count("LayerNormalization") == 4
    assert summary.opset == 18
    for sizes in ((2, 5), (3, 7)):
        x = np.random.default_rng(0).standard_normal((*sizes, 16)).astype(np.float32)
        feeds = {proto.graph.input[0].name: x}
        agrees(
            run_onnxruntime(out, feeds)[0], run_onnxruntime(proto, feeds)[0].astype(np.float64), "float32", condition=4
        )  # layers


MALFORMED = {
    "an input left out": 'y = SimplifiedLayerNormalization ("", g)',
    "no inputs": "y = LayerNorm ()",
    "an axis too far": "y = com.microsoft.LayerNormalization <axis = 5> (x, g, b)",
    "no groups": "y = com.microsoft.GroupNorm <groups = 0, activation = 0> (x, g, b)",
    "an output that it does not have": "y, z = LayerNorm <axis = -1> (x, g, b)",
    "groups that don't divide": "y = com.microsoft.GroupNorm <groups = 3, activation = 0> (x, g, b)",
    "vectors of two lengths": (
        "y = CustomSkipLayerNormPluginDynamic <gamma = [1.0, 1.0], beta = [0.0, 0.0, 0.0]> (x, s)"
    ),
    "a text for a number": 'y = LayerNorm <epsilon = "small"> (x, g, b)',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_node_is_refused_without_a_traceback(name: str) -> None:
    proto = file(f"{X} {VECTORS} {{ {MALFORMED[name]} }}")
    out, summary = norm_optimizer.optimize_norms(proto, strict=True)
    assert the(summary.findings).status == "refused"
    assert list(out.graph.node) == list(proto.graph.node)


@pytest.mark.parametrize("opset", [7, 16, 17, 18, 20, 21, 24])
def test_each_norm_that_is_read_though_onnx_does_not_know_it_has_a_meaning(opset: int) -> None:
    known = {
        "GroupNormalization": 18 <= opset < 21,
        "LayerNormalization": opset < 17,
        "RMSNormalization": False,
        "Softmax": False,
    }
    known |= dict.fromkeys((*foreign_ops.PLUGINS, "SimplifiedLayerNormalization"), True)
    for op, meant in known.items():
        assert is_nonstandard_norm(op, opset) == meant
        for domain in ("", "ai.onnx"):
            assert (
                foreign_ops.foreign_op_of(helper.make_node(op, ["x"], ["y"], domain=domain), opset) is not None
            ) == meant
