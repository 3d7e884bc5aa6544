"""Compare two models in onnxruntime, with its optimizer off, and report differences that rounding does not explain.

Both models run with all dynamic dims at their minimum, at an odd size in between, and at their maximum. The inputs are
random inputs that the model accepts, inputs at which the graph's constants take effect, and −0, ±Inf and NaN
(`normdeploy.graphs.threshold_inputs`).

The original model shows how much difference rounding explains. Its inputs, its parameters and the results of its
reductions are perturbed at random by up to 8u, where u is the unit roundoff of its coarsest type. Let d be the largest
change in an element's row (the last axis), y the row's largest element, and N the number of nodes. Then

    |after − before| ≤ 4 · d + 6 · √N · u · |y|       the second term as in `normdeploy.graphs.ort_equivalence`

Integers and booleans may differ by as much as the perturbations change an element of the row; if they change no
element, both results must be equal. At inputs where constants take effect, the inputs themselves are not perturbed.
Both models then get the same bits, so x > 5 gives the same result in both. Elements must be non-finite in both models
or in neither. A difference is confirmed with more perturbations before it is reported.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ..compare.element_errors import absolute_difference, largest_finite, largest_of_rows
from ..compare.number_text import format_pair
from ..compare.perturbation import explained_error, regrouping_error
from ..compare.verdict import farthest_beyond_bound
from ..graphs import ort_equivalence
from ..graphs.declared_inputs import STRING, declared_inputs
from ..graphs.dims import Dims, evaluate_dim
from ..graphs.graph_thresholds import find_thresholds
from ..graphs.proto_queries import may_draw
from ..graphs.shape_inference import infer_types
from ..graphs.threshold_inputs import draw_special_values, draw_threshold_values
from ..graphs.two_pass_group_norm import ONE_PASS, expand_group_norms
from ..model import Dim, InputSpec
from ..storage.image_metadata import image_ranges
from .perturbed_model import FLOATING, PATIENCE, PerturbableModel, short_error_message

# Sizes of a dynamic dim that the file does not limit
_BARE = (1, 7, 33)
# Seconds for all runs at larger sizes than the first. The time of a run is predicted from the smaller sizes
_SECONDS = 1.0
# A first run that takes fewer seconds is repeated, because a session's first run takes longer than later runs.
# At larger sizes, inputs near thresholds are run if all their runs take fewer seconds
_QUICK = 0.1
# Minimum seconds before a run at a larger size is terminated, whatever the smaller sizes predict
_LATER = 3.0
# Number of runs at each size, if the models differ only by rounding
_RUNS = 2
# Maximum number of input elements
_LARGEST = 2**24
# Maximum number of dims that are tried at their maximum one by one, if all maxima together take too long
_MOST_ALONE = 16
# Maximum number of sizes that a note lists
_NAMED = 16
# Maximum number of elements of a tensor whose shape the file states. Sizes with a larger tensor are not compared
_INNER = 2**28
# Total number of perturbed runs at each size. The next number is used if the results differ by more than the runs so
# far explain
_PERTURBED = (0, 1, 9)
_UNITS = 8
_FLUSHED = float(np.finfo(np.float32).smallest_normal)
_SPECIAL = " with NaN and Inf"


@dataclass
class KnownRun:
    """Run of the model in PyTorch, with which the rewritten model is compared before the original one runs.

    The original model need not run on these inputs if the rewritten one has PyTorch's outputs up to rounding.

    Attributes:
        sizes: size of each dynamic dim.
        feeds: inputs by name.
        outputs: PyTorch's outputs, in the model's order.
        seconds: processor seconds of the run.
        file: the last model that ran on ``feeds`` in a comparison; None if there is none.
        file_outputs: its outputs in onnxruntime.
    """

    sizes: Mapping[str, int]
    feeds: Mapping[str, np.ndarray]
    outputs: Sequence[Any]
    seconds: float
    file: onnx.ModelProto | None = None
    file_outputs: Sequence[Any] = ()


@dataclass(frozen=True)
class ModelDifference:
    """Difference between the two models.

    Attributes:
        message: description for the report.
        sizes: sizes at which they differ.
        fails: True if the rewritten model does not run at all.
    """

    message: str
    sizes: Mapping[str, int]
    fails: bool = False


# ------------------------------------------------------------------ inputs and sizes


def comparison_input_specs(proto: onnx.ModelProto) -> list[InputSpec]:
    """Derive input specs from the file alone.

    Integers may be 0 or 1, except in images, and dynamic dims take the sizes `_BARE`.

    Returns:
        one spec per declared input.

    Raises:
        _NotComparable: an input is not a tensor of numbers, or its rank is unknown.
    """
    specs = []
    ranges = image_ranges(proto)
    for stated in declared_inputs(proto.graph):
        if stated.dtype in ("", STRING):
            raise _NotComparable(f"input {stated.name!r} is not a numeric tensor")
        if stated.dims is None:
            raise _NotComparable(f"the file does not specify the rank of input {stated.name!r}")
        shape = tuple(Dim.from_size(d) if isinstance(d, int) else Dim(d, *_BARE) for d in stated.dims)
        specs.append(InputSpec(stated.name, stated.dtype, shape, ranges.get(stated.name)))
    return specs


class _NotComparable(Exception):
    """Raised if the original model cannot be compared; the message gives the reason."""

    pass


class _TimeExceeded(Exception):
    """Raised if a run takes or would take too long."""

    pass


def _plan_sizes(dims: Mapping[str, Dim]) -> list[dict[str, int]]:
    """Plan the sizes: all dims at their minimum, at an odd size in between, and at their maximum, without repeats."""
    plan = [{name: getattr(d, which) for name, d in dims.items()} for which in ("min", "max")]
    plan.insert(1, {name: _odd_size(d) for name, d in dims.items()})
    return [sizes for i, sizes in enumerate(plan) if sizes not in plan[:i]]


def _odd_size(dim: Dim) -> int:
    """Return the largest odd size (an odd multiple of a dim's step) between the extremes and up to the usual size;
    without one, return the usual size.
    """
    between = range(dim.opt, dim.min, -dim.step)
    return next((n for n in between if n // dim.step % 2 and n < dim.max), dim.opt)


def _describe_sizes(sizes: Mapping[str, int]) -> str:
    shown = [f"{name}={size}" for name, size in itertools.islice(sizes.items(), _NAMED)]
    if len(sizes) > _NAMED:
        more = f" and {len(sizes) - _NAMED} more"
    else:
        more = ""
    return ", ".join(shown) + more or "its sizes"


# ------------------------------------------------------------------ the model before


@dataclass
class BaselineRun:
    """Run of the original model at one size.

    Attributes:
        sizes: size of each dynamic dim.
        feeds: inputs by name.
        outputs: outputs in the model's order.
        moved: largest change of each element under perturbations, per output; None for outputs other than arrays.
        draws: number of perturbed runs so far.
        kind: kind of special inputs, for messages; "" for ordinary ones.
        move_inputs: True if the inputs are perturbed too.
        known: run in PyTorch on the same inputs; None if there is none.
        has_run: False if ``outputs`` are PyTorch's, because the original model has not run yet.
        may_run: False if a run of the original model would take too long.
    """

    sizes: dict[str, int]
    feeds: Mapping[str, np.ndarray]
    outputs: Sequence[Any]
    moved: list[np.ndarray | None] = field(default_factory=list)
    draws: int = 0
    kind: str = ""
    move_inputs: bool = True
    known: KnownRun | None = None
    has_run: bool = True
    may_run: bool = True

    @property
    def size_clause(self) -> str:
        """Return sizes and kind of inputs for messages."""
        return f"{_describe_sizes(self.sizes)}{self.kind}"


def _oversized_tensor(shapes: Mapping[str, Dims], sizes: Mapping[str, int]) -> str | None:
    """Return the name of a tensor that would be too large; None if there is none. Unknown dims count as 1."""
    for name, dims in shapes.items():
        known = [evaluate_dim(d, sizes) for d in dims]
        if math.prod(1 if n is None else n for n in known) > _INNER:
            return name
    return None


def _estimate_seconds(paces: Sequence[tuple[int, float]], elements: int) -> float:
    """Estimate the seconds of a run from the first and the last run.

    A part of the time is constant; the other part is assumed to grow in proportion to the elements.
    """
    if not paces:
        return 0.0
    (few, short), (many, long) = paces[0], paces[-1]
    slope = max((long - short) / (many - few) if many > few else 0.0, long / max(1, many) / 64)
    return min(long + slope * (elements - many), long * max(1.0, elements / max(1, many)))


class BaselineModel:
    """Original model, run at each size, with the error that rounding explains.

    Attributes:
        specs: specs of its inputs.
        failed: reason why it cannot be run at all; None if it can.
        notes: sizes that were left out, for the report.
    """

    def __init__(self, before: onnx.ModelProto, specs: Sequence[InputSpec], known: Sequence[KnownRun] = ()) -> None:
        """Load the model and run it at each size.

        Args:
            before: the original model.
            specs: specs of its inputs. If their names differ from the names in the file, the file's specs are used.
            known: runs of the same model in PyTorch. The long ones replace runs of ``before`` at the same sizes, except
                the first run, whose time decides which sizes are compared.
        """
        self.specs = specs
        # A short run is not worth replacing.
        self._known = [run for run in known if run.seconds >= _QUICK]
        self.notes: list[str] = []
        self.failed: str | None = None
        self._seen: list[BaselineRun] = []
        self._unit = ort_equivalence.unit_roundoff(before)
        self._relative = regrouping_error(len(before.graph.node), self._unit)
        try:
            bare = comparison_input_specs(before)
            if {s.name for s in bare} != {s.name for s in specs}:
                self.specs = bare
                self._known = []
            types = infer_types(before)
            self._shapes = {name: dims for name, (_, dims) in types.items() if dims is not None}
            floating = {name: kind for name, (kind, _) in types.items() if kind is not None and kind in FLOATING}
            # One pass of onnxruntime's GroupNormalization may lose more digits than an accurate rewrite. In half
            # precision it computes in float32, and the expansion would not.
            if self._unit <= ort_equivalence.UNIT_ROUNDOFF["float32"]:
                accurate = expand_group_norms(before)
            else:
                accurate = None
            self._model = PerturbableModel(accurate or before, floating=floating)
            self._may_draw = may_draw(before)
            self._edges = find_thresholds(before)
            self._run_all()
        except _NotComparable as e:
            self.failed = str(e)
        except Exception as e:
            # onnxruntime's exceptions share no base class.
            self.failed = f"onnxruntime can't load the original model: {short_error_message(e)}"

    def _run_all(self) -> None:
        dims = {d.name: d for spec in self.specs for d in spec.shape if d.name is not None}
        missing: list[str] = []
        # (number of input elements, seconds) of each run.
        paces: list[tuple[int, float]] = []
        plan = _plan_sizes(dims)
        spent = 0.0
        drawn = False
        for number, sizes in enumerate(plan):
            elements = sum(math.prod(spec.concrete_shape(sizes)) for spec in self.specs)
            if (inner := _oversized_tensor(self._shapes, sizes)) is not None:
                missing.append(f"{_describe_sizes(sizes)} (tensor {inner!r} would have more than {_INNER:,} elements)")
                continue
            needed = _RUNS * _estimate_seconds(paces, elements)
            known = self._known_at(sizes)
            if known is not None and paces:
                still = [_zero_movement(value) for value in known.outputs]
                seen = BaselineRun(dict(sizes), known.feeds, known.outputs, still, known=known, has_run=False)
                seen.may_run = elements <= _LARGEST and spent + needed <= _SECONDS
                self._seen.append(seen)
                if 2 * needed <= min(_QUICK, _SECONDS - spent):
                    spent += self._run_at_thresholds(sizes, number, budget=_SECONDS - spent, pace=needed / _RUNS)
                continue
            try:
                if elements > _LARGEST or spent + needed > _SECONDS:
                    raise _TimeExceeded
                feeds = self._draw_feeds(number, sizes) if known is None else known.feeds
                outputs, seconds = self._run_timed(feeds, max(_LATER, 4 * needed) if paces else PATIENCE)
                # The first run of a session takes longer.
                if not paces and (seconds < _QUICK or self._may_draw):
                    first, (outputs, seconds) = outputs, self._run_timed(feeds)
                    drawn = any(_is_random(a, b) for a, b in zip(first, outputs, strict=True))
            except _TimeExceeded:
                missing.append(f"{_describe_sizes(sizes)} ({elements:,} input elements would take too long)")
                # All dims at their maximum take too long: try each one alone.
                if number == 2 and len(dims) > 1:
                    least = {name: d.min for name, d in dims.items()}
                    # Each run draws every input, so one run for each of many dims would take quadratic time.
                    alone = itertools.islice(dims.items(), _MOST_ALONE)
                    plan += [each for name, d in alone if (each := least | {name: d.max}) not in plan]
                continue
            except Exception as e:
                # An error of onnxruntime or numpy: nothing can be compared at these sizes.
                missing.append(f"{_describe_sizes(sizes)} (the model failed to run: {short_error_message(e)})")
                continue
            if drawn:
                raise _NotComparable("the model draws random numbers: two runs of it differ")
            spent += needed
            paces.append((elements, seconds))
            still = [_zero_movement(value) for value in outputs]
            self._seen.append(BaselineRun(dict(sizes), feeds, outputs, still, known=known))
            if not paces[:-1] or 2 * needed <= min(_QUICK, _SECONDS - spent):
                spent += self._run_at_thresholds(sizes, number, budget=_SECONDS - spent, pace=seconds)
        if not self._seen:
            raise _NotComparable(f"the model can't be run at any of the sizes tried: {'; '.join(missing)}")
        if missing:
            compared = "; ".join(dict.fromkeys(_describe_sizes(s.sizes) for s in self._seen))
            self.notes.append(f"the whole model was compared at {compared}, but not at {'; '.join(missing)}")

    def _draw_feeds(self, number: int, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        return {s.name: s.sample(np.random.default_rng([number, i]), sizes) for i, s in enumerate(self.specs)}

    def _known_at(self, sizes: Mapping[str, int]) -> KnownRun | None:
        """Return the run in PyTorch at ``sizes``; None if there is none, or if the model may draw random numbers."""
        if self._may_draw:
            return None
        outputs = len(self._model.outputs)
        return next((run for run in self._known if run.sizes == sizes and len(run.outputs) == outputs), None)

    def _run_at_thresholds(self, sizes: Mapping[str, int], number: int, budget: float, pace: float) -> float:
        """Run the original model at inputs where its constants take effect, and at NaN and Inf.

        If the model rejects such inputs (an index beyond a table), they are not compared. If a run would take more than
        a part of ``budget``, it is skipped, and a note reports this.

        Returns:
            the seconds that all these runs took.
        """
        if 2 * _RUNS * pace > budget:
            self._add_note(
                "the whole model was compared only at random inputs, not near its thresholds: one run "
                f"takes {pace:.2g} s"
            )
            return 0.0
        spent = 0.0
        edges = self._edges

        def draw_at_thresholds(spec: InputSpec, rng: np.random.Generator) -> np.ndarray:
            return draw_threshold_values(spec, edges, rng, sizes)

        def draw_special(spec: InputSpec, rng: np.random.Generator) -> np.ndarray:
            return draw_special_values(spec, rng, sizes)

        # The seeds are arbitrary but fixed. Each kind of input has its own seed.
        kinds = ((24, " near its thresholds", draw_at_thresholds), (17, _SPECIAL, draw_special))
        for seed, kind, draw in kinds:
            rngs = [np.random.default_rng([number, i, seed]) for i in range(len(self.specs))]
            feeds = {spec.name: draw(spec, rng) for spec, rng in zip(self.specs, rngs, strict=True)}
            try:
                outputs, seconds = self._run_timed(feeds)
            except Exception:
                continue
            spent += _RUNS * seconds
            still = [_zero_movement(value) for value in outputs]
            self._seen.append(BaselineRun(dict(sizes), feeds, outputs, still, kind=kind, move_inputs=False))
        return spent

    def _run_timed(self, feeds: Mapping[str, np.ndarray], patience: float = PATIENCE) -> tuple[list[Any], float]:
        """Run the original model on ``feeds``.

        Returns:
            the outputs, and the seconds of processor time.

        Raises:
            _TimeExceeded: the run was terminated after ``patience`` seconds, at a larger size than the first.
        """
        begun = time.perf_counter()
        # Processor time, so that other work on the machine does not decide which sizes are compared.
        start = time.process_time()
        try:
            return self._model.run_perturbed(feeds, patience=patience), time.process_time() - start
        except Exception:
            if patience < PATIENCE and time.perf_counter() - begun >= patience:
                raise _TimeExceeded from None
            raise

    def find_difference(
        self, after: onnx.ModelProto, only: Mapping[str, int] | None = None, *, gains: bool = False
    ) -> ModelDifference | None:
        """Find the first difference that rounding does not explain.

        Digits that onnxruntime's one-pass GroupNormalization loses do not count as a difference, because the trial of
        each rewrite measures them. A note reports them.

        Args:
            after: the model to compare.
            only: compare at these sizes only; None for all.
            gains: True if a certificate states that an infinite input gives NaN instead of a number. At inputs with
                Inf, this does not count as a difference.

        Returns:
            the difference; None if rounding explains all.
        """
        found = self._first_difference(after, only, gains=gains)
        if found is not None and not found.fails:
            accurate = expand_group_norms(after)
        else:
            accurate = None
        if found is None or accurate is None or self._first_difference(accurate, only, gains=gains) is not None:
            return found
        self._add_note(f"{ONE_PASS}: {found.message}; with two passes over each group there is no difference")
        return None

    def _first_difference(
        self, after: onnx.ModelProto, only: Mapping[str, int] | None, *, gains: bool
    ) -> ModelDifference | None:
        try:
            model = PerturbableModel(after, self._model)
        except Exception as e:
            return ModelDifference(
                f"onnxruntime can load the original model but not the rewritten one: {short_error_message(e)}",
                self._seen[0].sizes,
                True,
            )
        for seen in self._seen:
            if only is not None and seen.sizes != only:
                continue
            try:
                worst = self._compare_at_size(seen, model, after, gains=gains and seen.kind == _SPECIAL)
            except MemoryError:
                # The models ran, but numpy ran out of memory when it compared their outputs in float64.
                self._add_note(f"the whole model was not compared at {_describe_sizes(seen.sizes)}: not enough memory")
                continue
            if worst is not None:
                return worst
        return None

    def _add_note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _compare_at_size(
        self, seen: BaselineRun, model: PerturbableModel, after: onnx.ModelProto, *, gains: bool
    ) -> ModelDifference | None:
        try:
            outputs = model.run_perturbed(seen.feeds, patience=4 * PATIENCE)
        except Exception as e:
            if not self._run_original(seen):
                return None
            message = (
                f"at {seen.size_clause}, onnxruntime runs the original model but not the rewritten one: "
                f"{short_error_message(e)}"
            )
            return ModelDifference(message, seen.sizes, True)
        if seen.known is not None:
            seen.known.file, seen.known.file_outputs = after, outputs
        # An output that PyTorch confirms is right, whatever the original model computes.
        is_array = all(isinstance(value, np.ndarray) for value in outputs)
        if not seen.has_run and is_array and self.compare_outputs(seen, outputs) is None:
            return None
        if not self._run_original(seen):
            return None
        if gains:
            outputs = [_drop_gained_numbers(old, new) for old, new in zip(seen.outputs, outputs, strict=True)]
        apart: str | None = None
        for draws in _PERTURBED:
            self._perturb_baseline(seen, draws)
            apart = self.compare_outputs(seen, outputs)
            if apart is None:
                return None
        return ModelDifference(f"at {seen.size_clause}, {apart}", seen.sizes)

    def _run_original(self, seen: BaselineRun) -> bool:
        """Run the original model in place of PyTorch, unless it has run.

        Returns:
            False if it does not run, so that nothing can be compared at these sizes.
        """
        if seen.has_run:
            return True
        if not seen.may_run:
            self._add_note(
                f"the whole model was not compared at {_describe_sizes(seen.sizes)}: a run of the original model would "
                "take too long"
            )
            return False
        try:
            seen.outputs = self._model.run_perturbed(seen.feeds)
        except Exception as e:
            # An error of onnxruntime.
            self._add_note(
                f"the whole model was not compared at {_describe_sizes(seen.sizes)}: the model failed to run: "
                f"{short_error_message(e)}"
            )
            return False
        seen.moved = [_zero_movement(value) for value in seen.outputs]
        seen.has_run = True
        return True

    def _perturb_baseline(self, seen: BaselineRun, draws: int) -> None:
        for number in range(seen.draws, draws):
            rng = np.random.default_rng([99, number])
            outputs = self._model.run_perturbed(seen.feeds, rng, _UNITS * self._unit, move_inputs=seen.move_inputs)
            for i, (old, new) in enumerate(zip(seen.outputs, outputs, strict=True)):
                if (moved := seen.moved[i]) is not None:
                    same_shape = old.shape == np.shape(new)
                    seen.moved[i] = np.maximum(moved, absolute_difference(new, old) if same_shape else np.inf)
        seen.draws = max(seen.draws, draws)

    def compare_outputs(self, seen: BaselineRun, outputs: Sequence[Any]) -> str | None:
        """Compare outputs with the outputs of a run of the original model.

        Args:
            seen: the run, with the changes under perturbations.
            outputs: outputs of the rewritten model.

        Returns:
            description of the worst difference; None if rounding explains all.
        """
        for name, old, new, moved in zip(self._model.outputs, seen.outputs, outputs, seen.moved, strict=True):
            if moved is None:
                continue
            if old.shape != np.shape(new) or old.dtype != new.dtype:
                return (
                    f"output {name!r} is {new.dtype}{list(np.shape(new))}, but {old.dtype}{list(old.shape)} "
                    "in the original model"
                )
            floating = old.dtype.kind == "f"
            if floating:
                bound = explained_error(old, moved, self._relative)
                # For a subnormal result, the rounding error is half of the smallest subnormal, whatever the value.
                bound = bound + self._relative / self._unit * float(np.finfo(old.dtype).smallest_subnormal)
                # A norm may divide such a rounding error by √epsilon, and kernels flush float32's subnormal numbers to
                # zero.
                bound = bound + min(_FLUSHED, float(np.finfo(old.dtype).smallest_normal))
            else:
                bound = largest_of_rows(moved)
            worst = farthest_beyond_bound(absolute_difference(new, old), bound)
            if worst is not None:
                at = worst.place
                if at:
                    where = f" at {list(at)}"
                else:
                    where = ""
                if floating:
                    room = f"; rounding explains a difference of at most {worst.allowed:.2g}"
                else:
                    room = ""
                ours, theirs = format_pair(new[at], old[at])
                return f"output {name!r} is {ours}{where}, but {theirs} in the original model{room}"
        return None


def _is_random(one: Any, other: Any) -> bool:
    """Return True if two runs on the same input differ by far more than rounding."""
    if not isinstance(one, np.ndarray) or one.dtype.kind not in "fiub":
        return False
    if one.shape != other.shape:
        return True
    return bool((absolute_difference(one, other) > 1e-3 * largest_finite(one)).any())


def _zero_movement(value: Any) -> np.ndarray | None:
    if isinstance(value, np.ndarray):
        return np.zeros(value.shape)
    return None


def _drop_gained_numbers(old: Any, new: Any) -> Any:
    """Replace each element of ``new`` that is not finite by the element of ``old`` if that is finite."""
    if not isinstance(old, np.ndarray) or old.dtype.kind != "f" or old.shape != np.shape(new):
        return new
    return np.where(np.isfinite(old) & ~np.isfinite(new), old, new).astype(new.dtype)
