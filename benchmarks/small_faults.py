"""Plant small faults in exported files, and count those that export's check and ``verify`` let pass.

``python -m benchmarks.small_faults`` writes ``benchmarks/results/small_faults.md``. Each fault is planted in the file
that ``export`` writes, after the rewrites and before the check.

The file with the fault runs in float64, and so does the file without it. The size of a fault is the largest difference
of the two in a row, divided by the error that rounding explains in this row: the larger one of eager's error and the
largest of 48 random roundings. A fault of a size below 1 can't be told apart from rounding. The check allows 4 times
the explained error, plus a part for regrouped sums (`normdeploy.compare.perturbation`). So a fault is *missed* if it
passes the check and its size is above 4. ``verify`` runs for each fault that passes.

The part for regrouped sums decides most rows: 6·√N·u of a row's largest element is 1 to 9 times as much as the draws
explain, and if it explains a difference, nothing is drawn. So the scale of the draws, which eager's errors give, lets
few faults pass. It matters for long sums, such as those of a patch embedding.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from models.layer import Norm, UnbiasedLayerNorm
from models.small import BasicBlock, ConvNeXtBlock, DiTBlock, LlamaBlock, ResnetBlock, SeparableConv
from normdeploy.compare.element_errors import absolute_difference, largest_of_rows
from normdeploy.compare.error_bounds import MOST_RUNS
from normdeploy.errors import ExportError
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.verbs.prove.counterexamples import FAILURES, Float64File
from normdeploy.verbs.prove.file_pair import OpenFile
from normdeploy.verbs.verify.export_check import ExpectedOutputs, require_expected_outputs, run_expected
from normdeploy.verbs.verify.followed_choices import FollowedRuns, follow_file
from normdeploy.verbs.verify.rounding_effect import RoundingEffect

from .planted_faults import Encoder

RESULTS = Path(__file__).with_name("results") / "small_faults.md"
COLUMNS = ("model", "fault", "size", "export's check", "with the draws as they are", "verify")
# Sizes of faults: below 1 nothing can tell the fault from rounding; the check promises nothing below 4.
EXPLAINED, ALLOWED = 1.0, 4.0
EPSILONS = (1.01, 1.1, 2.0, 10.0)
ULPS = (1, 8, 64, 1024)
CHANNELS = (1e-6, 1e-5, 1e-4, 1e-3)
# Scalar constants in this range that are added are epsilons.
_SMALLEST_EPSILON, _LARGEST_EPSILON = 1e-12, 1e-2

# ------------------------------------------------------------------ models


class Patches(nn.Module):
    """Normalize pixels and embed patches of 768 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 8, 16, 16)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.embedding((pixels - 0.5) / 0.25)


class DeepConvolutions(nn.Module):
    """Eight convolutions of 64 channels with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
        for _ in range(7):
            layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def _positive_part(x: torch.Tensor) -> torch.Tensor:
    """Compute 2·relu(x) without a Relu, which a fault would leave out."""
    return x + x.abs()


class Queries(nn.Module):
    """Keep the two queries with the highest scores. Two scores are nearly equal for about half of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.boxes = nn.Linear(32, 6), nn.Linear(32, 6)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16)
        # The same sum in another order: the input is symmetric.
        with torch.no_grad():
            self.scores.weight[1] = self.scores.weight[0].flip(0)
            self.scores.bias[:2] = 4.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, x.flip(-1)], -1)
        scores = self.scores(both)
        scores = torch.cat([scores[..., :1] + _positive_part(x[..., :1]), scores[..., 1:]], -1)
        best = scores.topk(2, -1).indices
        return torch.gather(self.boxes(both), -1, best), self.head(self.norm(both))


class Compared(nn.Module):
    """Choose between two branches by a comparison, which no other run can follow.

    The compared sums are nearly equal for about half of the tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.score, self.norm, self.head = nn.Linear(32, 1, bias=False), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, x.flip(-1)], -1)
        differ = self.score(both) + _positive_part(x[..., :1]) > self.score(both.flip(-1))
        y = self.head(self.norm(both))
        return torch.where(differ, y, -y)


class Experts(nn.Module):
    """Route each token to one of four experts. Two scores are nearly equal for some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(32), nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0].flip(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, x.flip(-1)], -1)
        scores = self.router(both)
        scores = torch.cat([scores[..., :1] + _positive_part(x[..., :1]), scores[..., 1:]], -1)
        weights, chosen = scores.softmax(-1).topk(1, -1)
        y = self.norm(both)
        results = torch.stack([expert(y) for expert in self.experts], -2)
        picked = torch.gather(results, -2, chosen[..., None].expand(*chosen.shape, 32))
        return both + (weights[..., None] * picked).sum(-2)


class Classes(nn.Module):
    """Return logits and the class, with LayerNorm and a clamp before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.norm(x).clamp(-2.0, 2.0))
        return logits, logits.argmax(-1)


class Gelu(nn.Module):
    """Feed-forward layer with the exact GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclass(frozen=True)
class Subject:
    """Model with the specifications of its inputs."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Sequence[str]


_TOKENS = ("x[2,7,32]",)
SUBJECTS = (
    Subject("LayerNorm by hand", lambda: Norm((32,)), _TOKENS),
    Subject("LayerNorm with ddof 1", lambda: UnbiasedLayerNorm(32), _TOKENS),
    Subject("encoder of two layers", lambda: Encoder(2, 64, 4, 128), ("ids:int64[2,7]{0:1000}",)),
    Subject("Llama block", lambda: LlamaBlock(32, 4), _TOKENS),
    Subject("UNet block", lambda: ResnetBlock(8, 16, 12, by_hand=True), ("x[2,8,9,9]", "time[2,12]")),
    Subject("ResNet block", lambda: BasicBlock(8, 16), ("x[2,8,9,9]",)),
    Subject("MobileNet block", lambda: SeparableConv(8, 16), ("x[2,8,9,9]",)),
    Subject("ConvNeXt block", lambda: ConvNeXtBlock(16), ("x[2,16,9,9]",)),
    Subject("DiT block", lambda: DiTBlock(32, 4), ("x[2,7,32]", "condition[2,32]")),
    Subject("GELU", Gelu, _TOKENS),
    Subject("patch embedding", Patches, ("pixels[2,3,32,32]{0:1}",)),
    Subject("deep convolutions", DeepConvolutions, ("x[2,3,12,12]",)),
    Subject("queries by topk, near-ties", Queries, ("x[2,7,16]",)),
    Subject("experts by topk, near-ties", Experts, ("x[2,7,16]",)),
    Subject("comparison, near-ties", Compared, ("x[2,7,16]",)),
    Subject("classes by argmax", Classes, _TOKENS),
)

# ------------------------------------------------------------------ faults

Planted = tuple[str, onnx.ModelProto]


def _copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(proto)
    return copied


def _with_weight(proto: onnx.ModelProto, name: str, change: Callable[[np.ndarray], None]) -> onnx.ModelProto:
    planted = _copy(proto)
    (tensor,) = (t for t in planted.graph.initializer if t.name == name)
    values = numpy_helper.to_array(tensor).copy()
    change(values)
    tensor.CopyFrom(numpy_helper.from_array(values, name))
    return planted


def _floats(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    return {name: value for name, value in arrays.items() if value.dtype == np.float32}


def _read_by(proto: onnx.ModelProto, op_types: Sequence[str], index: int) -> Iterator[tuple[onnx.NodeProto, str]]:
    held = _floats(proto)
    for node in proto.graph.node:
        if node.op_type in op_types and len(node.input) > index and node.input[index] in held:
            yield node, node.input[index]


def plant_epsilons(proto: onnx.ModelProto) -> Iterator[Planted]:
    """Multiply the epsilon of the first norm."""
    for place, node in enumerate(proto.graph.node):
        for at, attribute in enumerate(node.attribute):
            if attribute.name != "epsilon":
                continue
            for factor in EPSILONS:
                planted = _copy(proto)
                planted.graph.node[place].attribute[at].f = attribute.f * factor
                yield f"epsilon × {factor:g}", planted
            return
    for name, value in _floats(proto).items():
        added = any(name in node.input and node.op_type == "Add" for node in proto.graph.node)
        if value.size == 1 and added and _SMALLEST_EPSILON < float(value.item()) < _LARGEST_EPSILON:
            for factor in EPSILONS:
                yield f"epsilon × {factor:g}", _with_weight(proto, name, lambda v, f=factor: np.multiply(v, f, out=v))
            return


def plant_ulps(proto: onnx.ModelProto) -> Iterator[Planted]:
    """Move the largest element of the largest weight by units in the last place."""
    weights = {name: value for name, value in _floats(proto).items() if value.ndim > 1}
    name = max(weights, key=lambda each: weights[each].size, default=None)
    if name is None:
        return
    place = np.unravel_index(int(np.abs(weights[name]).argmax()), weights[name].shape)
    for units in ULPS:

        def move(values: np.ndarray, units: int = units) -> None:
            """Move the element."""
            values[place] += units * np.spacing(np.abs(values[place]))

        yield f"weight moved by {units} ulp", _with_weight(proto, name, move)


def plant_channels(proto: onnx.ModelProto) -> Iterator[Planted]:
    """Multiply one channel of the first norm's scale or bias, or of a convolution's bias if no norm is left."""
    norms = ("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization")
    for what, index in (("scale", 1), ("bias", 2)):
        found = list(_read_by(proto, norms, index))
        if not found and what == "bias":
            found = list(_read_by(proto, ("Conv", "Gemm"), 2))
        if not found:
            continue
        _, name = found[0]
        channel = int(np.abs(_floats(proto)[name]).argmax())
        for relative in CHANNELS:

            def scale(values: np.ndarray, relative: float = relative, channel: int = channel) -> None:
                """Scale the channel."""
                values.reshape(-1)[channel] *= np.float32(1 + relative)

            yield f"one {what} × (1 + {relative:g})", _with_weight(proto, name, scale)


def plant_ddof(proto: onnx.ModelProto) -> Iterator[Planted]:
    """Divide the variance of the first LayerNormalization by n − 1, by means of its scale."""
    for _, name in _read_by(proto, ("LayerNormalization",), 1):
        values = _floats(proto)[name]
        factor = np.float32(math.sqrt((values.size - 1) / values.size))
        yield "ddof 1 for 0", _with_weight(proto, name, lambda v, f=factor: np.multiply(v, f, out=v))
        return


def plant_structures(proto: onnx.ModelProto) -> Iterator[Planted]:
    """Leave out a clip, swap axes, or take the other GELU."""
    done = set[str]()
    for place, node in enumerate(proto.graph.node):
        planted = _copy(proto)
        changed = planted.graph.node[place]
        if node.op_type in ("Clip", "Relu") and "clip" not in done:
            done.add("clip")
            changed.CopyFrom(onnx.helper.make_node("Identity", [node.input[0]], node.output))
            yield f"{node.op_type} left out", planted
        elif node.op_type == "Softmax" and "softmax" not in done:
            done.add("softmax")
            del changed.attribute[:]
            changed.attribute.append(onnx.helper.make_attribute("axis", -2))
            yield "softmax over the other axis", planted
        elif node.op_type == "Gelu" and "gelu" not in done:
            done.add("gelu")
            is_tanh = any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)
            del changed.attribute[:]
            changed.attribute.append(onnx.helper.make_attribute("approximate", "none" if is_tanh else "tanh"))
            yield f"GELU by {'erf for tanh' if is_tanh else 'tanh for erf'}", planted


FAULTS = (plant_epsilons, plant_ulps, plant_channels, plant_ddof, plant_structures)

# ------------------------------------------------------------------ measurement


@dataclass(frozen=True)
class FaultRow:
    """Results for one fault.

    Attributes:
        size: size of the fault (see the module's docstring); None if the file does not run in float64.
        refused: True if export's check refuses the file.
        refused_unscaled: True if it refuses the file with draws that eager's errors do not scale.
        verified: "passes" or "fails" for a file that export's check accepts.
    """

    model: str
    fault: str
    size: float | None
    refused: bool
    refused_unscaled: bool
    verified: str = ""

    @property
    def is_missed(self) -> bool:
        """Return True if the fault is larger than the check allows and passes."""
        return not self.refused and self.size is not None and self.size > ALLOWED

    def as_cells(self) -> list[str]:
        """Return the row of the table."""
        size = "unknown" if self.size is None else f"{self.size:.2g}"
        words = {True: "refuses", False: "passes"}
        missed = "**passes**" if self.is_missed else words[self.refused]
        return [self.model, self.fault, size, missed, words[self.refused_unscaled], self.verified]


class _Rounding:
    """Error that rounding explains in each row of the outputs, on the inputs of export's check."""

    def __init__(self, model: LoadedModel, proto: onnx.ModelProto, wanted: ExpectedOutputs) -> None:
        self._plain = Float64File(OpenFile(proto, "right"))
        self._names = [output.name for output in proto.graph.output]
        self._cases = []
        for run in wanted.runs:
            choices = follow_file(model, proto, run.feeds, optimize=False, provider="cpu")
            if isinstance(choices, FollowedRuns):
                effect = RoundingEffect(model, run.feeds, wanted.unit, choices.eager, choices.follower)
            else:
                effect = RoundingEffect(model, run.feeds, wanted.unit, run.outputs)
            with unscaled():
                effect.draw(MOST_RUNS)
            rows = [largest_of_rows(effect.moved[output]) for output in run.outputs]
            self._cases.append((run.feeds, self._plain.run(run.feeds, {}), rows))

    def fault_size(self, planted: onnx.ModelProto) -> float | None:
        """Compute the size of a fault."""
        file = Float64File(OpenFile(planted, "planted"))
        size = 0.0
        for feeds, right, rows in self._cases:
            try:
                wrong = file.run(feeds, {})
            except FAILURES:
                return None
            for name, row in zip(self._names, rows, strict=True):
                apart = largest_of_rows(absolute_difference(wrong[name], right[name]))
                with np.errstate(divide="ignore", invalid="ignore"):
                    size = max(size, float(np.nan_to_num(apart / row, nan=0.0).max(initial=0.0)))
        return size


@contextmanager
def unscaled() -> Iterator[None]:
    """Switch the scale of the draws off."""
    with unittest.mock.patch.object(RoundingEffect, "_scale", return_value=1.0):
        yield


def refuses(wanted: ExpectedOutputs, proto: onnx.ModelProto, model: LoadedModel) -> bool:
    """Return True if export's check refuses a file."""
    try:
        notes = require_expected_outputs(wanted, proto, lambda: model, "onnxruntime")
    except ExportError:
        return True
    if notes:
        raise AssertionError(notes)
    return False


def measure_subject(subject: Subject, folder: Path) -> list[FaultRow]:
    """Export a model and plant all faults that its file has a place for.

    Returns:
        one row per fault; the first one has no fault.
    """
    torch.manual_seed(0)
    module = subject.build().eval()
    with torch.no_grad():
        # Trained numbers differ from 0 and 1.
        for each in module.modules():
            if "Norm" in type(each).__name__:
                for parameter in each.parameters(recurse=False):
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
    inputs = list(subject.inputs)
    proto = normdeploy.export(module, inputs=inputs, check=False).proto
    model = from_module(module, inputs=inputs)
    wanted = run_expected(model)
    rounding = _Rounding(model, proto, wanted)
    rows = []
    planted = [("none", proto), *(each for plant in FAULTS for each in plant(proto))]
    for fault, file in planted:
        size = rounding.fault_size(file)
        refused = refuses(wanted, file, model)
        with unscaled():
            refused_unscaled = refuses(wanted, file, model)
        row = FaultRow(subject.name, fault, size, refused, refused_unscaled)
        if not refused:
            onnx.save(file, folder / "planted.onnx")
            found = normdeploy.verify(module, folder / "planted.onnx", inputs=inputs, seeds=1, max_seconds=2)
            row = replace(row, verified="passes" if found else "fails")
        rows.append(row)
        print(" | ".join(row.as_cells()), flush=True)
    return rows


def summarize(rows: Sequence[FaultRow]) -> str:
    """Count the faults."""
    faults = [row for row in rows if row.fault != "none"]
    right = [row for row in rows if row.fault == "none"]
    large = [row for row in faults if row.size is None or row.size > ALLOWED]
    missed = [row for row in large if not row.refused]
    unscaled_only = [row for row in missed if row.refused_unscaled]
    unnoticed = [row for row in missed if row.verified == "passes"]
    return (
        f"{len(right)} right files, {sum(row.refused for row in right)} refused. {len(faults)} faults, {len(large)} of"
        f" a size above {ALLOWED:g}: export's check lets {len(missed)} of these pass, {len(unscaled_only)} of them only"
        f" because eager's errors scale the draws, and ``verify`` passes {len(unnoticed)} of the {len(missed)}."
        f" {sum(row.size is not None and row.size < EXPLAINED for row in faults)} faults have a size below"
        f" {EXPLAINED:g}; {sum(row.refused for row in faults if row.size is not None and row.size < EXPLAINED)} of them"
        " are refused."
    )


def main() -> None:
    """Plant all faults and write the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    start = time.perf_counter()
    rows = list[FaultRow]()
    with tempfile.TemporaryDirectory() as folder:
        for subject in SUBJECTS:
            if not wanted or any(word in subject.name for word in wanted):
                rows += measure_subject(subject, Path(folder))
    print(summarize(rows), f"{time.perf_counter() - start:.0f} s")
    if wanted:
        return
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.as_cells() for row in rows)]
    head = f"# Small faults in exported files\n\n{__doc__}\n{summarize(rows)}\n"
    RESULTS.write_text("\n".join([head, *(f"| {' | '.join(line)} |" for line in lines), ""]))


if __name__ == "__main__":
    main()
