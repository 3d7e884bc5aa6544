"""The audit of weights: right files of other tools raise no alarm, one changed number does."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from normdeploy.verbs.verify import derived_tensors, weight_origin
from normdeploy.verbs.verify.derived_tensors import mark_differences
from normdeploy.verbs.verify.reference_models import open_original
from normdeploy.verbs.verify.row_matching import RowMatcher
from normdeploy.verbs.verify.weight_audit import audit_weights
from normdeploy.verbs.verify.weight_origin import AuditedWeight
from tests.work import count_calls

Array = np.ndarray[Any, Any]


def file_of(weights: Mapping[str, Array], *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Build a file that holds ``weights``; the audit reads BatchNorms of its nodes and nothing else."""
    some = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 7, 7])
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 4, 7, 7])
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph([*nodes, helper.make_node("Identity", ["x"], ["y"])], "g", [some], [result], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def audited(model: Mapping[str, Array], file: Mapping[str, Array], *nodes: onnx.NodeProto) -> list[AuditedWeight]:
    return audit_weights(open_original(file_of(model, *nodes)), file_of(file), "file.onnx")


def altered(model: Mapping[str, Array], file: Mapping[str, Array], *nodes: onnx.NodeProto) -> list[str]:
    return [weight.name for weight in audited(model, file, *nodes) if not weight]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def batch_norm(rng: np.random.Generator) -> tuple[onnx.NodeProto, dict[str, Array]]:
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["z"])
    drawn = {name: rng.normal(size=8).astype("f") for name in "sbm"}
    return node, drawn | {"v": rng.uniform(0.5, 2, 8).astype("f")}


def test_subnormal_half_weights_of_a_fold_are_no_alteration(rng: np.random.Generator) -> None:
    node, norm = batch_norm(rng)
    weight = rng.normal(size=(8, 4, 3, 3)).astype("f") * np.float32(0.1)
    weight[0, 0] *= np.float32(3e-5)
    scale = norm["s"] / np.sqrt(norm["v"] + 1e-5)
    folded = (weight * scale[:, None, None, None]).astype(np.float16)
    assert altered({"w": weight} | norm, {"w_2": folded}, node) == []
    folded[3, 2, 1, 1] *= np.float16(1.01)
    assert altered({"w": weight} | norm, {"w_2": folded}, node) == ["w_2"]


@pytest.mark.parametrize("shape", [(8,), (1, 8, 1, 1), (8, 1, 1)])
def test_a_folded_bias_of_any_shape_beside_variances_beyond_half_is_no_alteration(
    shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    node, norm = batch_norm(rng)
    norm["v"] = rng.uniform(7e4, 2e5, 8).astype("f")
    bias = (300 * rng.normal(size=shape)).astype("f")
    scale = norm["s"] / np.sqrt(norm["v"].astype("d") + 1e-5)
    folded = ((bias.reshape(8) - norm["m"]) * scale + norm["b"]).astype(np.float16)
    (weight,) = audited({"bias": bias} | norm, {"y_bias": folded}, node)
    assert (str(weight.origin), weight.parameter.startswith("bias")) == ("folded", True)


def test_numbers_beyond_half_may_be_infinite_or_clipped_and_the_others_count(rng: np.random.Generator) -> None:
    weight = rng.normal(size=64).astype("f")
    weight[5] = 2e5
    for stands_for in (np.inf, 65504, 1e4):
        half = np.where(weight > 65504, stands_for, weight).astype(np.float16)
        assert altered({"w": weight}, {"w": half}) == []
        half[9] *= np.float16(1.1)
        assert altered({"w": weight}, {"w": half}) == ["w"]


DERIVED = {
    "negative exponential of a logarithm": lambda p: -np.exp(p),
    "softplus": lambda p: np.logaddexp(0, p),
    "sigmoid": lambda p: 1 / (1 + np.exp(-p)),
    "one plus gamma": lambda p: 1 + p,
}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_function_of_a_parameter_as_it_is_initialized_is_no_alteration(name: str, dtype: Any) -> None:
    model = {"A_log": np.log(np.tile(np.arange(1, 9, dtype="f"), (8, 1)))}
    assert altered(model, {"A": DERIVED[name](model["A_log"]).astype(dtype)}) == []


def test_packed_rows_times_numbers_are_no_alteration(rng: np.random.Generator) -> None:
    model = {"weight": rng.normal(size=(15, 5)).astype("f"), "bias": rng.normal(size=15).astype("f")}
    packed, bias = model["weight"].copy(), model["bias"].copy()
    # The query carries the scale of the attention.
    packed[:5] *= np.float32(0.35)
    bias[:5] *= np.float32(0.35)
    # A weight norm rounds its rows once more.
    packed[9] = np.nextafter(packed[9], np.float32(9))
    assert altered(model, {"packed": packed[None], "bias_2": bias}) == []
    packed[2, 3] *= np.float32(1.001)
    bias[1] *= np.float32(1.001)
    assert sorted(altered(model, {"packed": packed[None], "bias_2": bias})) == ["bias_2", "packed"]


def test_tables_that_share_zeros_and_ones_with_a_parameter_are_no_alteration(rng: np.random.Generator) -> None:
    angles = np.arange(16) * np.pi / 2
    table = np.where(np.abs(np.cos(angles)) < 1e-9, 0, np.cos(angles)).astype("f")
    table[-2:] = 0.3, 0.7
    assert altered({"bias": np.zeros(16, "f"), "gamma": np.ones(16, "f")}, {"cosines": table}) == []
    trained = rng.normal(size=16).astype("f")
    changed = trained.copy()
    changed[4] *= np.float32(1.001)
    assert altered({"bias": trained}, {"bias": changed}) == ["bias"]


def test_an_adapter_merged_into_its_matrix_is_no_alteration(rng: np.random.Generator) -> None:
    model = {
        "w": rng.normal(size=(16, 12)),
        "up": rng.normal(size=(16, 2)) * 1e-3,
        "down": rng.normal(size=(2, 12)),
    }
    model = {name: value.astype("f") for name, value in model.items()}
    merged = (model["w"] + 2 * model["up"] @ model["down"]).astype("f")
    assert altered(model, {"merged": merged.T.copy()}) == []
    stale = model["w"] * (1 + 1e-3 * rng.normal(size=(16, 12)))
    assert altered({"w": model["w"]}, {"w": stale.astype("f")}) == ["w"]


def test_a_scalar_beside_another_is_compared_without_a_crash() -> None:
    assert altered({"logit_scale": np.float32(2.5)}, {"temperature": np.float32(2.51)}) == []


@pytest.mark.parametrize("rows", [(2, 3), (0, 39)], ids=["inside", "at the ends"])
def test_rows_of_a_table_that_change_places_are_an_alteration(rng: np.random.Generator, rows: tuple[int, int]) -> None:
    table = rng.normal(size=(40, 6)).astype("f")
    exchanged = table.copy()
    exchanged[list(rows)] = table[list(rows[::-1])]
    assert altered({"table": table}, {"table": exchanged}) == ["table"]
    assert altered({"table": table}, {"turned": exchanged.T.copy()}) == ["turned"]


def test_gates_in_the_order_of_another_framework_are_no_alteration(rng: np.random.Generator) -> None:
    gates = [rng.normal(size=(5, 6)).astype("f") for _ in range(3)]
    reset, update, new = gates
    file = {"gru": np.concatenate([update, reset, new])[None]}
    assert altered({"weight_ih_l0": np.concatenate([reset, update, new])}, file) == []


def test_strings_that_are_no_text_are_left_alone(rng: np.random.Generator) -> None:
    file = file_of({"w": rng.normal(size=(4, 4)).astype("f")})
    file.graph.initializer.append(helper.make_tensor("words", onnx.TensorProto.STRING, [1], [b"\xff"]))
    assert audit_weights(open_original(file), file, "file.onnx") == []


def test_a_function_that_is_infinite_explains_no_number(rng: np.random.Generator) -> None:
    """log of a bias that is zero is no derivation of every vector of its length."""
    bias = rng.normal(size=64).astype("f")
    changed = bias.copy()
    changed[3] += np.float32(1e-4)
    zeros = np.zeros(64, np.float32)
    assert altered({"bias": bias, "zeros": zeros}, {"bias": changed, "zeros": zeros}) == ["bias"]


@pytest.mark.parametrize("same", [True, False])
def test_audit_of_many_weights_takes_no_time_of_their_square(same: bool, rng: np.random.Generator) -> None:
    # 4,000 weights took three minutes, each compared with all.
    drawn = rng.normal(size=(4000, 4)).astype("f")
    # The first and the last element are those of all others.
    drawn[:, [0, 3]] = 1
    weights = {f"w{i}": np.ones(4, "f") if same else row for i, row in enumerate(drawn)}
    file = file_of(weights)

    def audit() -> None:
        assert audit_weights(open_original(file), file, "file.onnx") == []

    # Each weight compared with all others would take 16,000,000 comparisons.
    assert count_calls(audit) < 4_000_000


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float16", "float64"])
def test_audit_finds_a_weight_in_every_type(kind: str, rng: np.random.Generator) -> None:
    weight = rng.normal(size=(4, 5)).astype("f")
    assert audited({"w": weight}, {"w_2": weight.T.astype(np.dtype(getattr(ml_dtypes, kind, kind)))}) == []


def test_audit_weight_in_another_order_of_dims_is_the_models(rng: np.random.Generator) -> None:
    weight = rng.normal(size=(3, 4, 5)).astype("f")
    file = {"half": weight.transpose(2, 0, 1).astype(np.float16), "again": weight.transpose(1, 2, 0)}
    assert audited({"w": weight}, file) == []


def test_audit_of_a_folded_weight_asks_no_other_parameter_than_that_of_its_name(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {f"w{i}": rng.standard_normal((8, 8)).astype(np.float32) for i in range(20)}
    # Some are named as torch's exporter names what it transposes, and some as a name that is taken.
    names = {name: name + ("", ".T_2", "_2")[i % 3] for i, name in enumerate(model)}
    file = {names[n]: (value * rng.uniform(1, 2, (8, 1))).astype(np.float32) for n, value in model.items()}
    compared = list[int]()

    def counted(*args: Any) -> Any:
        compared.append(1)
        return mark_differences(*args)

    monkeypatch.setattr(weight_origin, "mark_differences", counted)
    assert [weight.parameter for weight in audited(model, file)] == [*model]
    # Four of each: as it is, times one number, and times a number for each channel of each axis. Any other parameter
    # takes four too.
    assert len(compared) <= 4 * len(model)


def test_audit_finds_clipped_numbers_of_half_precision(rng: np.random.Generator) -> None:
    wide = rng.standard_normal((8, 8)).astype(np.float32)
    wide[0, 0] = 1e6
    narrow = np.clip(wide, -65504, 65504).astype(np.float16)
    assert altered({"w": wide}, {"w": narrow}) == []


def test_derivation_looks_at_some_elements_first(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {f"w{i}": rng.standard_normal((128, 128)).astype(np.float32) for i in range(8)}
    looked = list[int]()

    def counted(array: Array, *args: Any) -> Array:
        looked.append(array.size)
        return mark_differences(array, *args)

    monkeypatch.setattr(derived_tensors, "mark_differences", counted)
    off = model["w1"].astype(np.float64) * 1.001
    form = derived_tensors.FloatSpacing.of_dtype(np.float32)
    assert derived_tensors.find_derivation(off, model, form) is None
    # Hundreds of functions and pairs: on all elements they took 10 million.
    assert len(looked) > 400
    assert sum(looked) <= 64 * len(looked)
    assert derived_tensors.find_derivation(-np.exp(model["w2"].astype(np.float64)).T, model, form) == "-exp w2"
    assert derived_tensors.find_derivation((model["w3"] + model["w4"]).astype(np.float64), model, form) == "w3 + w4"


def test_rows_hold_no_copy_of_the_model(rng: np.random.Generator) -> None:
    tables = [rng.standard_normal((1024, 256)).astype(np.float32) for _ in range(8)]
    array = tables[0][:64] * np.float32(2)
    array[5] += 1
    rows = RowMatcher(tables)
    tracemalloc.start()
    try:
        assert rows.matched_share(array) == 0
        assert not rows.is_scaled(array)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The model is 8 MB. All tables in float64, and their directions, took 60.
    assert peak < 16e6


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("units", [0, 1, 4, 12])
def test_one_element_of_a_half_gamma_that_is_off_is_an_alteration(units: int, dtype: Any) -> None:
    """One unit may be another rounding; more of a single element are no fold by 1 and no relu of a positive number."""
    gamma = np.ones(32, np.float32)
    changed = gamma.copy()
    changed[3] += units * float(ml_dtypes.finfo(dtype).eps)
    assert altered({"gamma": gamma}, {"gamma": changed.astype(dtype)}) == (["gamma"] if units > 1 else [])
