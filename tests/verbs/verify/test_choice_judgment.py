"""Files of detectors that pick among nearly equal scores: correct files pass, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import normdeploy
from normdeploy.errors import ExportError
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.verbs.bisect.file_bisection import search_faults
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.export_check import require_expected_outputs, run_expected
from normdeploy.verbs.verify.file_comparison import compare_files

PLACES, FEATURES, QUERIES, BATCH = 64, 16, 8, 4


class TwoStage(nn.Module):
    """Detector: scores of 64 places, the 8 best places as queries, and a decoder with self-attention.

    With ``levels``, the scores have a few levels, 0.25 apart, plus differences of about 1e-8. These differences are
    below the spacing of float32 numbers, but not of float64 numbers. So several of the picked scores are equal in
    float32, and random roundings hardly ever have the order of the file. Each rank has its own embedding, so the
    outputs depend on the order.
    """

    def __init__(self, *, levels: bool) -> None:
        super().__init__()
        self.levels = levels
        self.encoder = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.score_head = nn.Linear(FEATURES, 1)
        self.ranks = nn.Parameter(torch.randn(QUERIES, FEATURES))
        self.query = nn.Linear(FEATURES, FEATURES)
        self.key = nn.Linear(FEATURES, FEATURES)
        self.value = nn.Linear(FEATURES, FEATURES)
        self.box_head = nn.Linear(FEATURES, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.norm(self.encoder(x))
        scores = self.score_head(memory)[..., 0]
        if self.levels:
            scores = (scores * 4).round() / 4 + scores * 1e-8
        picks = scores.topk(QUERIES, dim=1).indices
        queries = memory.gather(1, picks[..., None].expand(-1, -1, FEATURES)) + self.ranks
        weights = (self.query(queries) @ self.key(queries).transpose(1, 2)).softmax(-1)
        return self.box_head(queries + weights @ self.value(queries))


@dataclass(frozen=True)
class Exported:
    """Detector and its exported file."""

    model: LoadedModel
    proto: onnx.ModelProto


def export_detector(folder: Path, *, levels: bool) -> Exported:
    torch.manual_seed(0)
    model = from_module(TwoStage(levels=levels).eval(), inputs=[f"x[batch,{PLACES},{FEATURES}]"])
    path = folder / "detector.onnx"
    normdeploy.export(model, output=path)
    return Exported(model, onnx.load(path))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export a detector with nearly equal scores. The check of the export must accept the file, too."""
    return export_detector(tmp_path_factory.mktemp("tied"), levels=True)


@pytest.fixture(scope="module")
def distinct(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export_detector(tmp_path_factory.mktemp("distinct"), levels=False)


def draw_feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((BATCH, PLACES, FEATURES)).astype(np.float32)}


def compare(exported: Exported, folder: Path, change: Callable[[onnx.GraphProto], None] | None = None) -> Comparison:
    proto = onnx.ModelProto()
    proto.CopyFrom(exported.proto)
    if change is not None:
        change(proto.graph)
    path = folder / "changed.onnx"
    onnx.save(proto, path)
    return compare_files(exported.model, path, inputs=draw_feeds())


def find_node(graph: onnx.GraphProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == op_type)


def find_weight(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def scale_weight(graph: onnx.GraphProto, name: str, factor: float) -> None:
    tensor = find_weight(graph, name)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name))


def insert_after(graph: onnx.GraphProto, tensor: str, node: onnx.NodeProto) -> None:
    """Let all readers of ``tensor`` read the result of ``node`` instead, which reads ``tensor``."""
    for reader in graph.node:
        reader.input[:] = [node.output[0] if name == tensor else name for name in reader.input]
    place = next(i for i, each in enumerate(graph.node) if tensor in each.output)
    graph.node.insert(place + 1, node)


def add_constant(graph: onnx.GraphProto, name: str, value: np.ndarray) -> str:
    graph.initializer.append(numpy_helper.from_array(value, name))
    return name


def pick_smallest(graph: onnx.GraphProto) -> None:
    next(a for a in find_node(graph, "TopK").attribute if a.name == "largest").i = 0


def reverse_picks(graph: onnx.GraphProto) -> None:
    ends = [
        add_constant(graph, name, np.array([value]))
        for name, value in (("s", -1), ("e", -QUERIES - 1), ("a", 1), ("d", -1))
    ]
    picks = find_node(graph, "TopK").output[1]
    insert_after(graph, picks, helper.make_node("Slice", [picks, *ends], ["reversed"]))


def pick_fewer(graph: onnx.GraphProto) -> None:
    """Pick 7 places, and use the last one twice."""
    top = find_node(graph, "TopK")
    top.input[1] = add_constant(graph, "fewer", np.array([QUERIES - 1]))
    places = add_constant(graph, "places", np.array([*range(QUERIES - 1), QUERIES - 2]))
    insert_after(graph, top.output[1], helper.make_node("Gather", [top.output[1], places], ["again"], axis=1))


def change_one_query(graph: onnx.GraphProto) -> None:
    change = np.zeros((QUERIES, FEATURES), np.float32)
    change[3, 5] = 1e-3
    queries = find_node(graph, "GatherElements").output[0]
    name = add_constant(graph, "change", change)
    insert_after(graph, queries, helper.make_node("Add", [queries, name], ["changed"], name="planted"))


def exchange_query_and_key(graph: onnx.GraphProto) -> None:
    for kind in ("bias", "weight.T"):
        query, key = find_weight(graph, f"query.{kind}"), find_weight(graph, f"key.{kind}")
        query.raw_data, key.raw_data = key.raw_data, query.raw_data


def gather_features(graph: onnx.GraphProto) -> None:
    """Gather along the features instead of the places."""
    gather = find_node(graph, "GatherElements")
    gather.attribute[0].i = 2
    size = add_constant(graph, "size", np.array(FEATURES))
    insert_after(graph, gather.input[1], helper.make_node("Mod", [gather.input[1], size], ["small"]))


def test_file_with_another_order_of_nearly_equal_scores_passes_with_a_note(tied: Exported, tmp_path: Path) -> None:
    result = compare(tied, tmp_path)
    assert result
    notes = [note for note in result.notes if "nearly equal scores" in note]
    assert len(notes) == 2
    assert all(word in notes[0] for word in ("changed.onnx in onnxruntime (optimizer off)", "picks", "input"))
    # The allowed error is that of roundings alone, not the distance of two queries.
    assert all(r.allowed < 1e-4 for r in result.results if r.file)


def test_file_without_near_ties_passes_without_a_note(distinct: Exported, tmp_path: Path) -> None:
    result = compare(distinct, tmp_path)
    assert result
    assert not any("nearly equal" in note for note in result.notes)


@pytest.mark.parametrize(
    "change",
    [pick_smallest, reverse_picks, pick_fewer, change_one_query, exchange_query_and_key, gather_features],
    ids=lambda change: change.__name__,
)
def test_planted_fault_beside_near_ties_is_found(
    tied: Exported, change: Callable[[onnx.GraphProto], None], tmp_path: Path
) -> None:
    result = compare(tied, tmp_path, change)
    assert {bool(r) for r in result.results if r.file} == {False}


def test_scores_in_an_order_that_rounding_does_not_explain_fail_with_both_scores(
    tied: Exported, tmp_path: Path
) -> None:
    failed = [r for r in compare(tied, tmp_path, pick_smallest).results if r.file]
    assert all("topk ranks the score" in r.reason and "rounding explains" in r.reason for r in failed)
    # The error stays a number, although the reason decides.
    assert all(np.isfinite(r.max_abs_error) for r in failed)


def test_score_head_that_is_off_by_a_ten_thousandth_fails(distinct: Exported, tmp_path: Path) -> None:
    # Some gaps are smaller than this change of the scores, but much larger than roundings.
    result = compare(distinct, tmp_path, lambda graph: scale_weight(graph, "encoder.weight.T", 1 + 1e-4))
    assert not result


def test_bisect_names_no_fault_of_a_file_with_another_order(tied: Exported, tmp_path: Path) -> None:
    path = tmp_path / "detector.onnx"
    onnx.save(tied.proto, path)
    result = search_faults(tied.model, path, inputs=draw_feeds())
    assert result
    assert not result.faults


def test_bisect_names_the_fault_beside_near_ties(tied: Exported, tmp_path: Path) -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(tied.proto)
    change_one_query(proto.graph)
    path = tmp_path / "changed.onnx"
    onnx.save(proto, path)
    result = search_faults(tied.model, path, inputs=draw_feeds())
    assert [fault.nodes for fault in result.faults] == [("Add planted",)]


class Ranked(nn.Module):
    """Return the box with the higher of two scores, which differ by ``gap`` units of 2^-24.

    A score has one rounding, and another one is drawn for the order. So no random roundings of the two scores reverse
    a gap of 3 units, which is 4.6 units of roundoff. But the scores have allowed errors, with a margin of four.
    """

    def __init__(self, gap: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.65, 0.65 - gap * 2.0**-24]))
        self.boxes = nn.Parameter(torch.tensor([[1.0], [2.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = (self.scores * x).topk(1, dim=-1).indices
        return self.boxes[best[:, 0]]


def export_reversed(gap: int, folder: Path) -> Exported:
    """Export a model whose file rounds the second score so much that both scores have the other order."""
    model = from_module(Ranked(gap).eval(), inputs=["x[batch,1]"])
    path = folder / "ranked.onnx"
    normdeploy.export(model, output=path)
    proto = onnx.load(path)
    scores = find_node(proto.graph, "TopK").input[0]
    factor = add_constant(proto.graph, "factor", np.array([1.0, 1.0 + gap * 2.0**-23], np.float32))
    insert_after(proto.graph, scores, helper.make_node("Mul", [scores, factor], ["rounded"]))
    return Exported(model, proto)


@pytest.mark.parametrize(("gap", "right"), [(3, True), (300, False)])
def test_choice_that_no_draw_makes_is_judged_by_the_allowed_error_of_scores(
    gap: int, right: bool, tmp_path: Path
) -> None:
    exported = export_reversed(gap, tmp_path)
    path = tmp_path / "reversed.onnx"
    onnx.save(exported.proto, path)
    result = compare_files(exported.model, path, inputs={"x": np.full((2, 1), 1.5, np.float32)})
    assert bool(result) is right
    assert any("topk ranks the score" in note for note in result.notes) is not right


@pytest.mark.parametrize(("gap", "right"), [(3, True), (300, False)])
def test_check_of_an_export_follows_the_choices_of_the_file(gap: int, right: bool, tmp_path: Path) -> None:
    exported = export_reversed(gap, tmp_path)
    expected = run_expected(exported.model)
    with nullcontext() if right else pytest.raises(ExportError, match="topk ranks the score"):
        assert require_expected_outputs(expected, exported.proto, lambda: exported.model, "onnxruntime") == []


class FirstToken(nn.Module):
    """Pools the first token of a kind, as CLIP does: the scores are integers with many ties."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = (ids == 3).int().argmax(-1)
        return ids.float().cumsum(-1).gather(1, place[:, None])


class RoundedScores(nn.Module):
    """Ties of floating scores that no rounding moves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = x.round().argmax(-1)
        return x.cumsum(-1).gather(1, place[:, None])


@pytest.mark.parametrize(
    ("module", "spec"), [(FirstToken(), "ids:int64[b,24]{0:5}"), (RoundedScores(), "x:float32[b,24]")]
)
def test_argmax_that_picks_the_last_of_equal_scores_fails(module: nn.Module, spec: str, tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    normdeploy.export(module.eval(), output=file, inputs=[spec])
    assert normdeploy.verify(module.eval(), [file], inputs=[spec], seeds=2)
    proto = onnx.load(file)
    node = next(node for node in proto.graph.node if node.op_type == "ArgMax")
    next(each for each in node.attribute if each.name == "select_last_index").i = 1
    onnx.save(proto, file)
    assert not normdeploy.verify(module.eval(), [file], inputs=[spec], seeds=2)
