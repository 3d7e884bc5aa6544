"""The note on weights that are not copies of a parameter says whether that is an error."""

from __future__ import annotations

import pytest

from normdeploy.verbs.verify.comparison_notes import note_computed_weights
from normdeploy.verbs.verify.weight_origin import AuditedWeight, WeightOrigin


def audited(name: str, origin: WeightOrigin, elements: int = 4) -> AuditedWeight:
    return AuditedWeight(file="m.onnx", name=name, module="", elements=elements, origin=origin)


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 that matches no parameter (c0)"), (2, "2 that match no parameter (c0, c1)")]
)
def test_constants_of_an_exporter_are_no_alarm(count: int, words: str) -> None:
    weights = [audited("w", WeightOrigin.FOLDED), *(audited(f"c{i}", WeightOrigin.COMPUTED) for i in range(count))]
    (note,) = note_computed_weights(weights)
    assert note == (
        f"m.onnx: weights not copied from a parameter: 1 folded (w); {words}. An exporter computes such constants;"
        " this alone is not an error"
    )


def test_folds_alone_need_no_reason() -> None:
    (note,) = note_computed_weights([audited("w", WeightOrigin.FOLDED)])
    assert note == "m.onnx: weights not copied from a parameter: 1 folded (w)"
