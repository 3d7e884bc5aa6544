"""The maps of a classifier are compared as arrays, in the order of their classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from normdeploy import verify
from normdeploy.graphs.classifier_maps import map_values_to_array, replace_map_outputs

WEIGHTS = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def classifier(
    classes: list[int] | list[str], weights: np.ndarray = WEIGHTS, intercepts: tuple[float, ...] = (0.1, 0.2, 0.3)
) -> onnx.ModelProto:
    """As skl2onnx writes it: scores of a linear classifier, and a map from class to score for each row."""
    strings = isinstance(classes[0], str)
    kind = TensorProto.STRING if strings else TensorProto.INT64
    linear = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        coefficients=weights.reshape(-1).tolist(),
        intercepts=intercepts,
        multi_class=1,
        post_transform="SOFTMAX",
        **{"classlabels_strings" if strings else "classlabels_ints": classes},
    )
    zipped = helper.make_node(
        "ZipMap",
        ["scores"],
        ["maps"],
        domain="ai.onnx.ml",
        **{"classlabels_strings" if strings else "classlabels_int64s": classes},
    )
    score = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_value_info("maps", helper.make_sequence_type_proto(helper.make_map_type_proto(kind, score)))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 4])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph([linear, zipped], "classifier", [x], [maps])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def saved(path: Path, proto: onnx.ModelProto) -> Path:
    onnx.save(proto, path)
    return path


def test_maps_are_arrays_in_the_order_of_their_keys() -> None:
    rows = [{2: 0.5, 0: 0.25, 10: 1.0}, {0: 1.0, 2: 2.0, 10: 3.0}]
    assert map_values_to_array(rows).tolist() == [[0.25, 0.5, 1.0], [1.0, 2.0, 3.0]]


def test_a_model_without_maps_stays_as_it_is() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { y = Abs(x) }'
    )
    assert replace_map_outputs(proto) is proto


@pytest.mark.parametrize("classes", [[2, 0, 1], ["b", "a", "c"]])
def test_a_classifier_with_maps_is_verified_and_wrong_ones_are_not(
    classes: list[int] | list[str], tmp_path: Path
) -> None:
    reference = saved(tmp_path / "right.onnx", classifier(classes))
    assert verify(reference, saved(tmp_path / "same.onnx", classifier(classes)), seeds=1)
    # The same scores in another order, with their classes.
    turned = classifier(classes[::-1], WEIGHTS[::-1], (0.3, 0.2, 0.1))
    assert verify(reference, saved(tmp_path / "turned.onnx", turned), seeds=1)
    assert not verify(reference, saved(tmp_path / "labels.onnx", classifier(classes[::-1])), seeds=1)
    assert not verify(reference, saved(tmp_path / "weights.onnx", classifier(classes, WEIGHTS * 1.01)), seeds=1)
