"""Every row of the table of systems, in fp32 and fp16, static and dynamic: export, fuse, run in onnxruntime, build for
TensorRT-RTX."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache

import numpy as np
import onnx
import pytest
import torch

from models import registry
from models.case import Case, norm_ops
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.findings.records import Summary
from normdeploy.graphs.simplification import simplify
from normdeploy.loading import from_module
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
VARIANTS = [
    pytest.param(case, dtype, dynamic, id=f"{case.name}-{dtype}-{'dynamic' if dynamic else 'static'}")
    for case in registry.CASES
    for dtype in DTYPES
    for dynamic in ((False, True) if case.dynamic else (False,))
]
DECOMPOSED = ("ReduceMean", "ReduceSum", "Pow")


def specs(case: Case, dtype: torch.dtype, dynamic: bool) -> tuple[list[str], list[str]]:
    """``--input`` and ``--dim`` as a user would give them."""
    inputs, dims = [], {}
    for spec in case.inputs:
        sizes = []
        for size in spec.shape:
            if isinstance(size, int) or not dynamic:
                sizes.append(str(size if isinstance(size, int) else size[2]))
            else:
                name, low, opt, high = size
                dims[name] = f"{name}={low}:{opt}:{high}"
                sizes.append(name)
        kind = str(dtype).removeprefix("torch.") if "float" in spec.dtype else spec.dtype
        inputs.append(
            f"{spec.name}:{kind}[{','.join(sizes)}]" + ("" if "float" in spec.dtype else f"{{0:{spec.high}}}")
        )
    return inputs, list(dims.values())


@cache
def exported(name: str, dtype: str, dynamic: bool) -> tuple[torch.nn.Module, onnx.ModelProto, Summary]:
    case = next(c for c in registry.CASES if c.name == name)
    module = case.make().to(DTYPES[dtype])
    inputs, dims = specs(case, DTYPES[dtype], dynamic)
    proto, summary = optimize_norms(export_to_proto(from_module(module, inputs=inputs, dims=dims)))
    simplified = simplify(proto)
    assert simplified.note == ""
    return module, simplified.proto, summary


def outputs(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]


@pytest.mark.parametrize(("case", "dtype", "dynamic"), VARIANTS)
def test_row(case: Case, dtype: str, dynamic: bool) -> None:
    module, proto, summary = exported(case.name, dtype, dynamic)
    onnx.checker.check_model(proto, full_check=True)
    ops = Counter(n.op_type for n in proto.graph.node)
    assert case.accepts(norm_ops(proto.graph.node, "GroupNormalization" in case.expect)), (ops, summary.findings)
    assert not any(ops[op] for op in DECOMPOSED if op not in case.expect), ops
    assert all(f.certificate for f in summary.findings if f.status in ("fused", "folded"))
    names = [d[0] for spec in case.inputs for d in spec.shape if not isinstance(d, int)] if dynamic else []
    for dims in ({}, dict.fromkeys(names, 3)):
        if dims and any(
            not low <= 3 <= high
            for s in case.inputs
            for n, low, _, high in (d for d in s.shape if not isinstance(d, int))
        ):
            continue
        same_as_eager(case, module, proto, DTYPES[dtype], dims)


def same_as_eager(
    case: Case, module: torch.nn.Module, proto: onnx.ModelProto, dtype: torch.dtype, dims: dict[str, int]
) -> None:
    """onnxruntime against the module in float64 on the same values: within 4 times eager's own error in the model's
    type, and 16 u of the largest output (another order of the sums, one rounding of a folded weight)."""
    generator = torch.Generator().manual_seed(5)
    values = [s.sample(generator, dims) for s in case.inputs]
    values = [v.to(dtype) if v.is_floating_point() else v for v in values]
    with torch.no_grad():
        eager = outputs(module(*values))
        exact = outputs(copy.deepcopy(module).double()(*(v.double() if v.is_floating_point() else v for v in values)))
    got = run_onnxruntime(proto, {i.name: v.numpy() for i, v in zip(proto.graph.input, values, strict=True)})
    unit = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}[dtype]
    for found, own, reference in zip(got, eager, exact, strict=True):
        bound = 4 * float((own.double() - reference).abs().max()) + 16 * unit * float(reference.abs().max())
        assert float(np.abs(found.astype(np.float64) - reference.numpy()).max()) <= bound


@pytest.mark.parametrize(("case", "dtype", "dynamic"), VARIANTS)
def test_row_builds_for_tensorrt_rtx(case: Case, dtype: str, dynamic: bool) -> None:
    """A real engine for compute capability 8.9 (in this process: the subprocess of ``normdeploy build`` has tests of
    its own)."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    _, proto, _ = exported(case.name, dtype, dynamic)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse(proto.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    assert network.num_layers > 0
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    if dynamic:
        profile = builder.create_optimization_profile()
        for spec in case.inputs:
            low, opt, high = ([d if isinstance(d, int) else d[k] for d in spec.shape] for k in (1, 2, 3))
            profile.set_shape(spec.name, low, opt, high)
        config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None


def test_there_are_18_rows() -> None:
    table = {
        f"S{n}"
        for n in [
            "0a",
            "0b",
            "0c",
            "1a",
            "1b",
            "1c",
            "1d",
            "1e",
            "2a",
            "2b",
            "2c",
            "2d",
            "2e",
            "3a",
            "3b",
            "3c",
            "4a",
            "4b",
        ]
    }
    assert {c.row for c in registry.CASES} == table
