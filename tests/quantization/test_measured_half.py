"""Half precision by metrics: which blocks go back to float32, and what the report says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.compare.metrics import cosine
from normdeploy.errors import InputError
from normdeploy.precision.emulated_half import emulate_half
from tests.half_graphs import text
from tests.support import run_onnxruntime

WIDTH = 16
LAYERS = 8
# The layer that adds 1000 and subtracts it again: float16 numbers near 1000 are 0.5 apart.
COARSE = 5
# A layer before it that does the same
ALSO = 4
RNG = np.random.default_rng(0)
SAMPLES = [{"x": RNG.standard_normal((32, WIDTH)).astype(np.float32)} for _ in range(4)]
OTHERS = {"x": RNG.standard_normal((64, WIDTH)).astype(np.float32)}


def stack(*, named: bool, coarse: Sequence[int] = (COARSE,), layers: int = LAYERS) -> onnx.ModelProto:
    """Layers of one matrix product each; with ``named``, each node has its module. Coarse layers share a module."""
    body, before = [], "x"
    for k in range(layers):
        after = f"h{k}"
        body.append(f"m{k} = MatMul({before}, w{k})")
        if k in coarse:
            body.append(f"a{k} = Add(m{k}, large) r{k} = Relu(a{k}) {after} = Sub(r{k}, large)")
        else:
            body.append(f"{after} = Tanh(m{k})")
        before = after
    weights = {f"w{k}": RNG.standard_normal((WIDTH, WIDTH)) / 2 for k in range(layers)}
    proto = text(
        " ".join([*body, f"y = Identity({before})"]),
        f"float[b,{WIDTH}] x",
        f"float[b,{WIDTH}] y",
        large=np.array(1000.0),
        **weights,
    )
    for node in proto.graph.node if named else ():
        digits = "".join(c for c in node.output[0] if c.isdigit()) or str(layers - 1)
        digits = str(COARSE) if int(digits) in coarse else digits
        node.metadata_props.add(key="normdeploy.module", value=f"net.layers.{digits}")
    return proto


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_only_the_coarse_layer_goes_back_to_float32(named: bool, to: str) -> None:
    proto = stack(named=named)
    plain = normdeploy.optimize(proto, precision=to, calibrate=SAMPLES)
    threshold = 0.9999 if to == "fp16" else 0.99
    wanted = f"cosine>={threshold}"
    result = normdeploy.optimize(proto, precision=to, calibrate=SAMPLES, metric=wanted)
    assert plain.proto is not None
    assert result.proto is not None
    assert plain.precision is not None
    assert result.precision is not None
    assert plain.precision.kept == 0
    (region,) = result.precision.islands
    assert region.kind == "metric"
    assert {f"a{COARSE}", f"r{COARSE}", f"h{COARSE}"} <= set(region.nodes) <= {f"{c}{COARSE}" for c in "marh"}
    assert result.precision.casts == 2
    assert all(j.met for j in result.precision.judged)
    assert result.precision.judging == 128
    assert result.precision.exclusions
    # samples that chose nothing
    (right,) = run_onnxruntime(proto, OTHERS)
    (made,) = run_onnxruntime(emulate_half(result.proto), OTHERS)
    (coarse,) = run_onnxruntime(emulate_half(plain.proto), OTHERS)
    assert cosine(made, right) >= threshold > cosine(coarse, right)


def test_nothing_goes_back_if_the_metric_is_reached_at_once() -> None:
    result = normdeploy.optimize(stack(named=True), precision="fp16", calibrate=SAMPLES, metric="cosine>=0.5")
    assert result.precision is not None
    assert (result.precision.kept, result.precision.errors, result.precision.exclusions) == (0, {}, ())


def test_a_block_whose_parts_are_all_needed_stays_float32_as_a_whole() -> None:
    proto = stack(named=True, coarse=(ALSO, COARSE))
    result = normdeploy.optimize(proto, precision="fp16", calibrate=SAMPLES, keep_io=True, metric="cosine>=0.9999")
    assert result.precision is not None
    (region,) = result.precision.islands
    assert {f"h{ALSO}", f"h{COARSE}"} <= set(region.nodes)
    assert all(j.met for j in result.precision.judged)


def test_parts_of_blocks_are_found_where_each_whole_block_is_needed() -> None:
    coarse = range(0, 12, 2)
    proto = stack(named=False, coarse=coarse, layers=12)
    for node in proto.graph.node:
        digits = "".join(c for c in node.output[0] if c.isdigit()) or "11"
        node.metadata_props.add(key="normdeploy.module", value=f"net.layers.{int(digits) // 2}")
    result = normdeploy.optimize(proto, precision="fp16", calibrate=SAMPLES, keep_io=True, metric="cosine>=0.99")
    assert result.precision is not None
    kept = {name for region in result.precision.islands for name in region.nodes}
    assert {f"a{k}" for k in coarse} <= kept
    # Whole blocks would keep every product.
    assert not {f"m{k}" for k in range(12)} <= kept


def test_a_module_includes_the_modules_inside_it() -> None:
    proto = stack(named=True)
    first = [node for node in proto.graph.node if node.metadata_props][:4]
    for node in first:
        node.metadata_props[0].value = "net.stem"
    result = normdeploy.optimize(proto, precision="fp16", calibrate=SAMPLES, keep_float=["net.layers"])
    assert result.precision is not None
    assert result.precision.kept == result.precision.nodes - len(first)


def test_to_keep_every_node_in_float32_is_an_error() -> None:
    for pattern in ("*", "net.layers"):
        with pytest.raises(InputError, match=r"keeps all \d+ floating-point nodes in float32.*omit --precision"):
            normdeploy.optimize(stack(named=True), precision="fp16", calibrate=SAMPLES, keep_float=[pattern])


def test_a_metric_that_only_float32_reaches_is_an_error() -> None:
    with pytest.raises(InputError, match=r"in half precision; the threshold is 1 - 1e-08|every node in float32"):
        normdeploy.optimize(stack(named=True), precision="fp16", calibrate=SAMPLES, metric="cosine>=0.99999999")


def test_requested_modules_and_results_stay_float32() -> None:
    for pattern, nodes in (("net.layers.5", {"m5", "a5", "r5", "h5"}), ("h[12]", {"h1", "h2"}), ("*.0", {"m0", "h0"})):
        result = normdeploy.optimize(stack(named=True), precision="fp16", calibrate=SAMPLES, keep_float=[pattern])
        assert result.precision is not None
        assert {name for region in result.precision.islands for name in region.nodes} == nodes
        assert {region.kind for region in result.precision.islands} == {"requested"}
    with pytest.raises(InputError, match=r"no module or result .* matches 'layers.5'.*'net.layers.5'"):
        normdeploy.optimize(stack(named=True), precision="fp16", calibrate=SAMPLES, keep_float=["layers.5"])


def test_a_quantized_file_in_half_precision_keeps_the_coarse_layer_in_float32() -> None:
    """Without the metric, the float16 part of the file is what misses it."""
    request = {"quantize": "int8", "runtime": "tensorrt-rtx", "precision": "fp16", "calibrate": SAMPLES}
    result = normdeploy.optimize(stack(named=True), metric="cosine>=0.97", **request)
    assert result.precision is not None
    assert result.quantization is not None
    assert {region.kind for region in result.precision.islands} == {"metric"}
    assert any(f"h{COARSE}" in region.nodes for region in result.precision.islands)
    assert all(j.met for j in result.quantization.judged)


def test_the_options_need_samples_and_a_lower_type() -> None:
    with pytest.raises(InputError, match="a metric needs samples"):
        normdeploy.optimize(stack(named=True), precision="fp16", metric="cosine>=0.9")
    with pytest.raises(InputError, match=r"also pass quantize .* or precision"):
        normdeploy.optimize(stack(named=True), keep_float=["net.layers.5"])
