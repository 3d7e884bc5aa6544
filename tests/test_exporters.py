"""Files as exporters write them: each expressible norm becomes one node or folds away, lookalikes are refused, nothing
gets worse.

A part of the corpus (``benchmarks/corpus``): what TensorFlow's, JAX's and PaddlePaddle's exporters wrote, kept beside
their writers, and some of the models through torch's exporters, the old one included, and through what onnxruntime
makes of them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest

from benchmarks.corpus import exact, torch_files
from benchmarks.corpus.derived import derived
from benchmarks.corpus.entry import Entry, foreign, nodes
from benchmarks.corpus.judge import Truth, fits
from benchmarks.corpus.ours import measured
from models import registry

FOREIGN = list(foreign())
MODELS = (
    *("S0a", "S1e", "S2b_plain", "S2e", "reused_hat", "modulated", "GroupNorm_2", "rms_llama", "levit_block"),
    *("gn_8_4d_biased_pow_minus_half_one_plus", "bn_alone_sqrt_after", "bn_after_transposed_rsqrt_before"),
    *("normalize", "unbiased_dynamic", "relu_between"),
)


@cache
def torch_made() -> tuple[tuple[Entry, onnx.ModelProto], ...]:
    return tuple(torch_files.written([c for c in torch_files.cases() if c.name in MODELS]))


@pytest.mark.parametrize(("entry", "proto"), FOREIGN, ids=[e.name for e, _ in FOREIGN])
def test_other_frameworks_files(entry: Entry, proto: onnx.ModelProto) -> None:
    assert measured(entry, proto).faults == ()


@pytest.mark.parametrize("exporter", ["torch dynamo", "torch dynamo optimized", "torch TorchScript"])
def test_torch_s_exporters(exporter: str) -> None:
    rows = [measured(entry, proto) for entry, proto in torch_made() if entry.exporter == exporter]
    assert len(rows) >= len(MODELS) - 2  # TorchScript's has no form of some operators
    assert {r.name: r.faults for r in rows if r.faults} == {}


def test_files_that_went_through_other_tools() -> None:
    originals = {e.name: p for e, p in torch_made()}
    rows = [measured(e, p, originals.get(e.reference)) for e, p in derived(torch_made())]
    assert {r.name.split("-")[-1] for r in rows} >= {"extended", "statistics_wide", "all_half"}
    assert {r.name: r.faults for r in rows if r.faults} == {}


def test_what_was_written_is_what_is_claimed() -> None:
    """The corpus is worth nothing if its files are fused already, or all alike."""
    open_ = [e for e, p in FOREIGN if e.expressible and not fits(e, p)]
    assert len(open_) > 100
    assert {e.exporter for e in open_} == {"tf2onnx", "jax2onnx", "paddle2onnx"}
    assert {e.expect for e in open_} >= {
        ("LayerNormalization",),
        ("RMSNormalization",),
        ("GroupNormalization",),
        ("InstanceNormalization",),
    }
    assert sum(not e.expressible for e, _ in FOREIGN) >= 10
    assert all(nodes(p) >= 1 for _, p in FOREIGN)


# ------------------------------------------------------------------ the judge itself


def planted(fault: str) -> tuple[Entry, onnx.ModelProto, onnx.ModelProto]:
    """A layer norm by hand, and a single node that is almost it."""
    entry, proto = next((e, p) for e, p in FOREIGN if e.spelling == "haiku" and not e.dynamic)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    gamma, beta = (v for v in constants.values() if v.shape == (1, 1, 16))
    if fault == "gamma":
        gamma = gamma * np.float32(1 + 1e-4)
    node = onnx.helper.make_node(
        "LayerNormalization",
        [proto.graph.input[0].name, "g", "b"],
        [proto.graph.output[0].name],
        epsilon=1e-6 if fault == "epsilon" else 1e-5,
    )
    tensors = [onnx.numpy_helper.from_array(v, n) for n, v in (("g", gamma), ("b", beta))]
    graph = onnx.helper.make_graph([node], "planted", proto.graph.input, proto.graph.output, tensors)
    return entry, proto, onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize("fault", ["", "gamma", "epsilon"])
def test_wrong_numbers_are_seen(fault: str) -> None:
    entry, original, result = planted(fault)
    error, bound = Truth(entry, original).error(result)
    assert (error <= bound) == (not fault)
    assert fits(entry, result)
    assert not fits(entry, original)


def test_a_lost_epsilon_is_seen() -> None:
    """On the all-zero input: 0/0 where the original gives beta."""
    entry, original, result = planted("")
    next(a for a in result.graph.node[0].attribute if a.name == "epsilon").f = 0.0
    assert Truth(entry, original).error(result)[0] == np.inf


def test_the_truth_is_float64_and_rounds_constants_as_the_file_does() -> None:
    """An epsilon of 1e-12 that is cast to float16 is zero there, where that is asked for; data that is cast is never
    rounded."""
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        agraph (float[4] x) => (float[4] y, float[4] z)
        <float eps = {1e-12}>
        {
            h = Cast<to = 10>(eps)
            e = Cast<to = 1>(h)
            y = Add(x, e)
            n = Cast<to = 10>(x)
            z = Cast<to = 1>(n)
        }"""
    x = np.array([0.0, 0.1, 1e-9, 3.0], np.float32)
    for rounded, epsilon in ((False, np.float32(1e-12)), (True, 0.0)):
        y, z = exact.outputs(onnx.parser.parse_model(text), {"x": x}, rounded)
        assert y.dtype == np.float64
        assert (y == x.astype(np.float64) + epsilon).all()
        assert (z == x).all()


def test_models_named_here_exist() -> None:
    names = {c.name for c in (*registry.CASES, *registry.SPELLINGS, *registry.SMALL, *registry.LOOKALIKES)}
    assert set(MODELS) <= names
