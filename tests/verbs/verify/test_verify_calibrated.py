"""A file that ``--quantize`` made passes its own ``verify``, on inputs beyond its calibrated ranges too, and no fault
hides behind these."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.compare.policy import parse_policy
from normdeploy.graphs.quantization_info import RECORD, quantized_ranges, read_recorded_ranges
from normdeploy.model import LoadedModel
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.file_comparison import compare_files
from normdeploy.verbs.verify.quantization_budget import ROUNDED, UNROUNDED
from tests import quantized_files as files
from tests.verbs.verify.test_verify_quantized import WRONG, weight_zero_point

FEW = 0.5  # of what the generated inputs reach: every range is too narrow for these


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    return {"net": files.net(), "conv": files.conv()}


@pytest.fixture(scope="module")
def quantized(models: dict[str, LoadedModel], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The model quantized on samples of half the usual size; each once."""
    folder = tmp_path_factory.mktemp("calibrated")

    def made(name: str, to: str = "int8", runtime: str = "any", fuse: str = "standard") -> Path:
        path = folder / f"{name}_{to}_{runtime}_{fuse}.onnx"
        if not path.exists():
            plain = folder / f"{name}.onnx"
            if not plain.exists():
                onnx.save(files.export_to_proto(models[name]), plain)
            samples = [{k: v * FEW for k, v in s.items()} for s in files.samples(models[name], 16)]
            feeds = {k: np.concatenate([s[k] for s in samples]).astype(np.float32) for k in samples[0]}
            normdeploy.optimize(plain, path, quantize=to, runtime=runtime, fuse=fuse, calibrate=[feeds])
        return path

    return made


def compared(model: LoadedModel, path: Path) -> Comparison:
    return compare_files(model, [path], seeds=3, policy=parse_policy(None, None))


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {r.runtime: r.verdict for r in comparison.results if r.file}


@pytest.mark.parametrize("name", ["net", "conv"])
@pytest.mark.parametrize(
    ("to", "runtime", "fuse"),
    [
        ("int8", "any", "standard"),
        ("int8", "onnxruntime", "standard"),
        ("int8", "any", "portable"),
        ("fp8", "tensorrt", "standard"),
    ],
)
def test_it_passes_and_says_what_is_cut_off(
    name: str, to: str, runtime: str, fuse: str, models: dict[str, LoadedModel], quantized: Callable[..., Path]
) -> None:
    comparison = compared(models[name], quantized(name, to, runtime, fuse))
    assert comparison, [(r.runtime, r.reason) for r in comparison.results if not r]
    assert {ROUNDED, UNROUNDED} <= set(verdicts(comparison))
    (note,) = [n for n in comparison.notes if "exceed the calibrated ranges" in n]
    assert "Clipped values are not judged" in note


def zero_point_of_the_first(proto: onnx.ModelProto) -> None:
    """Before a norm it would add nearly one number to all channels, which the norm takes off; behind one whose gamma is
    moved the channels add up to zero."""
    node = next(iter(files.weights(proto)))
    files.own_constants(proto, node)
    files.replace_constant(proto, node.input[2], np.full(files.constant(proto, node.input[2]).shape, 9))


FAULTS = [zero_point_of_the_first, *(fault for fault in WRONG if fault is not weight_zero_point)]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["net", "conv"])
def test_no_fault_hides_behind_it(
    name: str,
    fault: Callable[[onnx.ModelProto], None],
    models: dict[str, LoadedModel],
    quantized: Callable[..., Path],
) -> None:
    wrong = files.edited(quantized(name), "wrong.onnx", fault)
    assert verdicts(compared(models[name], wrong))[UNROUNDED] == "fail"


@pytest.mark.parametrize("factor", [0.25, 0.9, 1.1, 8.0])
@pytest.mark.parametrize("name", ["net", "conv"])
def test_a_range_that_calibration_did_not_give_fails(
    name: str, factor: float, models: dict[str, LoadedModel], quantized: Callable[..., Path]
) -> None:
    """On both sides of a pair: wider ones too, which would otherwise widen their own budget."""

    def scaled(proto: onnx.ModelProto) -> None:
        files.scale_pair(proto, files.activations(proto)[1], factor)

    comparison = compared(models[name], files.edited(quantized(name), "wrong.onnx", scaled))
    assert verdicts(comparison)[UNROUNDED] == "fail"
    reason = next(r.reason for r in comparison.results if r.runtime == UNROUNDED)
    assert "its scale or zero point was changed later" in reason


def test_without_the_record_ranges_are_judged_as_those_of_any_file(
    models: dict[str, LoadedModel], quantized: Callable[..., Path]
) -> None:
    def forgotten(proto: onnx.ModelProto) -> None:
        for p in proto.metadata_props:
            if p.key == RECORD:
                p.value = json.dumps({k: v for k, v in json.loads(p.value).items() if k != "ranges"})

    comparison = compared(models["net"], files.edited(quantized("net"), "other.onnx", forgotten))
    assert verdicts(comparison)[UNROUNDED] == "fail"
    assert "saturates" in next(r.reason for r in comparison.results if r.runtime == UNROUNDED)


def test_the_record_is_what_the_scales_say(quantized: Callable[..., Path]) -> None:
    proto = onnx.load(quantized("net"))
    assert read_recorded_ranges(proto) == quantized_ranges(proto)
    assert len(quantized_ranges(proto)) == len({n.input[0] for n in files.activations(proto)})


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_quantized_file_as_the_reference(
    fault: Callable[[onnx.ModelProto], None] | None, models: dict[str, LoadedModel], quantized: Callable[..., Path]
) -> None:
    """What `optimize` makes of it, or a fault in a copy: without rounding both sides are not rounded."""
    path = files.edited(quantized("net"), "copy.onnx", fault or (lambda proto: None))
    comparison = normdeploy.verify(str(quantized("net")), [str(path)], seeds=3)
    assert verdicts(comparison)[UNROUNDED] == ("pass" if fault is None else "fail")
    assert bool(comparison) == (fault is None)
