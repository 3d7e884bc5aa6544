"""Two models side by side in onnxruntime, its optimizer off: whether they differ by more than rounding explains.

They run at each dynamic dim's minimum, an odd size between and its maximum, on random inputs that the model takes; on
inputs at which the graph's own constants act, and on −0, ±Inf and NaN (`normdeploy.graphs.threshold_inputs`). What
rounding
explains the model before says itself: its inputs, parameters and the results of its reductions are perturbed by up to
8u at random (u the unit roundoff of the coarsest type in it), and with d the largest change in an element's row (the
last axis) and y the row's largest element

    |after − before| ≤ 4 · d + 6 · √N · u · |y|       N nodes; the second term as in `normdeploy.graphs.ort_equivalence`

Integers and booleans may differ by as much as perturbations move an element of the row, and where nothing moves they
are equal. At the inputs where constants act the inputs themselves are not perturbed: both models get the same bits, and
x > 5 is decided alike. What is not finite before is not finite after, and the other way round. A difference is
confirmed with more perturbations before it is believed.
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
from .perturbed_model import FLOATING, PATIENCE, PerturbableModel, short_error_message

# sizes of a dynamic dim of which a file says nothing
_BARE = (1, 7, 33)
# for the runs at larger sizes than the first, all together, as the smaller ones promise
_SECONDS = 1.0
# seconds of a run that is worth another, to know how long one takes
_QUICK = 0.1
# seconds after which a run is ended that small ones let expect to take less than a second
_LATER = 3.0
# of the models at each size, where rounding alone sets them apart
_RUNS = 2
# input elements
_LARGEST = 2**24
# dims of which each is tried at its maximum by itself
_MOST_ALONE = 16
# sizes in a note
_NAMED = 16
# elements of any tensor, as far as its shape is stated
_INNER = 2**28
# perturbed runs at each size: more where the results differ by more than those so far explain
_PERTURBED = (0, 1, 9)
_UNITS = 8
_FLUSHED = float(np.finfo(np.float32).smallest_normal)
_SPECIAL = " with NaN and Inf"


@dataclass(frozen=True)
class ModelDifference:
    """Where after and before differ; ``fails`` where after does not run at all."""

    message: str
    sizes: Mapping[str, int]
    fails: bool = False


# ------------------------------------------------------------------ inputs and sizes


def comparison_input_specs(proto: onnx.ModelProto) -> list[InputSpec]:
    """What a file alone says of its inputs: of integers nothing, and 0 and 1 are taken; a dynamic dim is taken at
    `_BARE`."""
    specs = []
    for stated in declared_inputs(proto.graph):
        if stated.dtype in ("", STRING):
            raise _NotComparable(f"the input {stated.name!r} is no tensor of numbers")
        if stated.dims is None:
            raise _NotComparable(f"the file does not state the rank of its input {stated.name!r}")
        shape = tuple(Dim.from_size(d) if isinstance(d, int) else Dim(d, *_BARE) for d in stated.dims)
        specs.append(InputSpec(stated.name, stated.dtype, shape))
    return specs


class _NotComparable(Exception):
    pass


class _TimeExceeded(Exception):
    pass


def _plan_sizes(dims: Mapping[str, Dim]) -> list[dict[str, int]]:
    """All dims at their minimum, at an odd size between, at their maximum."""
    plan = [{name: getattr(d, which) for name, d in dims.items()} for which in ("min", "max")]
    plan.insert(1, {name: _odd_size(d) for name, d in dims.items()})
    return [sizes for i, sizes in enumerate(plan) if sizes not in plan[:i]]


def _odd_size(dim: Dim) -> int:
    """An odd size between the extremes, near the usual one from below; that one where there is none."""
    return next((n for n in range(dim.opt, dim.min, -1) if n % 2 and n < dim.max), dim.opt)


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
    """The model before at one size: inputs, outputs and how far each element moves under perturbations."""

    sizes: dict[str, int]
    feeds: dict[str, np.ndarray]
    outputs: list[Any]
    # by output, None where it is no array
    moved: list[np.ndarray | None] = field(default_factory=list)
    draws: int = 0
    # of the inputs, where they are no ordinary ones
    kind: str = ""
    move_inputs: bool = True

    @property
    def size_clause(self) -> str:
        return f"{_describe_sizes(self.sizes)}{self.kind}"


def _oversized_tensor(shapes: Mapping[str, Dims], sizes: Mapping[str, int]) -> str | None:
    """A tensor that would be too large; dims that are not known count as 1."""
    for name, dims in shapes.items():
        known = [evaluate_dim(d, sizes) for d in dims]
        if math.prod(1 if n is None else n for n in known) > _INNER:
            return name
    return None


def _estimate_seconds(paces: Sequence[tuple[int, float]], elements: int) -> float:
    """What a run will take, going by the first and the last: at most in proportion to that, and what does not grow is
    not multiplied."""
    if not paces:
        return 0.0
    (few, short), (many, long) = paces[0], paces[-1]
    slope = max((long - short) / (many - few) if many > few else 0.0, long / max(1, many) / 64)
    return min(long + slope * (elements - many), long * max(1.0, elements / max(1, many)))


class BaselineModel:
    """The model before, run at each size, and asked how far rounding may carry another that is the same function.

    ``failed``: why it can't be run at all, None where it can; ``notes``: the sizes that were left out.
    """

    def __init__(self, before: onnx.ModelProto, specs: Sequence[InputSpec]) -> None:
        self.specs = specs
        self.notes: list[str] = []
        self.failed: str | None = None
        self._seen: list[BaselineRun] = []
        self._unit = ort_equivalence.unit_roundoff(before)
        self._relative = regrouping_error(len(before.graph.node), self._unit)
        try:
            bare = comparison_input_specs(before)
            if {s.name for s in bare} != {s.name for s in specs}:
                self.specs = bare
            known = infer_types(before)
            self._shapes = {name: dims for name, (_, dims) in known.items() if dims is not None}
            floating = {name: kind for name, (kind, _) in known.items() if kind is not None and kind in FLOATING}
            self._model = PerturbableModel(before, floating=floating)
            self._may_draw = may_draw(before)
            self._edges = find_thresholds(before)
            self._run_all()
        except _NotComparable as e:
            self.failed = str(e)
        except Exception as e:
            # onnxruntime's exceptions share no base class
            self.failed = f"onnxruntime can't load the model before: {short_error_message(e)}"

    def _run_all(self) -> None:
        dims = {d.name: d for spec in self.specs for d in spec.shape if d.name is not None}
        missing: list[str] = []
        # (input elements, seconds) of each run
        paces: list[tuple[int, float]] = []
        plan = _plan_sizes(dims)
        spent = 0.0
        drawn = False
        for number, sizes in enumerate(plan):
            elements = sum(math.prod(spec.concrete_shape(sizes)) for spec in self.specs)
            if (inner := _oversized_tensor(self._shapes, sizes)) is not None:
                missing.append(
                    f"{_describe_sizes(sizes)} (the tensor {inner!r} would have more than {_INNER:,} elements)"
                )
                continue
            needed = _RUNS * _estimate_seconds(paces, elements)
            try:
                if elements > _LARGEST or spent + needed > _SECONDS:
                    raise _TimeExceeded
                feeds = {s.name: s.sample(np.random.default_rng([number, i]), sizes) for i, s in enumerate(self.specs)}
                outputs, seconds = self._run_timed(feeds, max(_LATER, 4 * needed) if paces else PATIENCE)
                # the first run of a session takes longer
                if not paces and (seconds < _QUICK or self._may_draw):
                    first, (outputs, seconds) = outputs, self._run_timed(feeds)
                    drawn = any(_is_random(a, b) for a, b in zip(first, outputs, strict=True))
            except _TimeExceeded:
                missing.append(f"{_describe_sizes(sizes)} ({elements:,} input elements would take too long)")
                # all at their maximum: each by itself, then
                if number == 2 and len(dims) > 1:
                    least = {name: d.min for name, d in dims.items()}
                    # Each run draws every input, so that one for each of many dims takes the time of their square.
                    alone = itertools.islice(dims.items(), _MOST_ALONE)
                    plan += [each for name, d in alone if (each := least | {name: d.max}) not in plan]
                continue
            except Exception as e:
                # of onnxruntime or of numpy: whatever it is, nothing can be compared there
                missing.append(f"{_describe_sizes(sizes)} (the model does not run there: {short_error_message(e)})")
                continue
            if drawn:
                raise _NotComparable("it draws random numbers: two runs of it differ")
            spent += needed
            paces.append((elements, seconds))
            self._seen.append(BaselineRun(dict(sizes), feeds, outputs, [_zero_movement(value) for value in outputs]))
            if not paces[:-1] or _SECONDS - spent > 2 * needed:
                spent += self._run_at_thresholds(sizes, number, budget=_SECONDS - spent, pace=seconds)
        if not self._seen:
            raise _NotComparable(f"it runs at none of the sizes tried: {'; '.join(missing)}")
        if missing:
            compared = "; ".join(dict.fromkeys(_describe_sizes(s.sizes) for s in self._seen))
            self.notes.append(f"the whole model was compared at {compared}, and not at {'; '.join(missing)}")

    def _run_at_thresholds(self, sizes: Mapping[str, int], number: int, budget: float, pace: float) -> float:
        """Run the model before where its constants act, and on numbers that are none; the seconds that took.

        The model may refuse such inputs (an index beyond a table): then they are not compared. A run of more than a
        part of ``budget`` is not worth a second one.
        """
        if 2 * _RUNS * pace > budget:
            self._add_note(
                f"the whole model was compared at random inputs alone, and not where its constants act: a run takes"
                f" {pace:.2g} s"
            )
            return 0.0
        spent = 0.0
        edges = self._edges

        def draw_at_thresholds(spec: InputSpec, rng: np.random.Generator) -> np.ndarray:
            return draw_threshold_values(spec, edges, rng, sizes)

        def draw_special(spec: InputSpec, rng: np.random.Generator) -> np.ndarray:
            return draw_special_values(spec, rng, sizes)

        for kind, draw in ((" where its constants act", draw_at_thresholds), (_SPECIAL, draw_special)):
            rngs = [np.random.default_rng([number, i, len(kind)]) for i in range(len(self.specs))]
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
        """What the model before makes of ``feeds``, and how many seconds of processor time that took.

        Raises:
            _TooLong: it was ended after ``patience`` seconds, at a larger size than the first.
        """
        begun = time.perf_counter()
        # so that other work on the machine does not decide which sizes are compared
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
        """The first difference that rounding can't explain, None where there is none.

        What onnxruntime's one pass of GroupNormalization loses is no difference between the models: each rewrite's own
        trial measures it. It is noted.

        ``only``: at these sizes. ``gains``: a certificate says that an infinite input gives NaN where it gave a number
        before, so that is no difference at inputs that hold Inf.
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
                f"onnxruntime can't load the result, and loads the model before: {short_error_message(e)}",
                self._seen[0].sizes,
                True,
            )
        for seen in self._seen:
            if only is not None and seen.sizes != only:
                continue
            try:
                worst = self._compare_at_size(seen, model, gains=gains and seen.kind == _SPECIAL)
            except MemoryError:
                # of numpy, which computes in float64: the models themselves ran
                self._add_note(
                    f"the whole model was not compared at {_describe_sizes(seen.sizes)}: there is not enough memory "
                    f"for it"
                )
                continue
            if worst is not None:
                return worst
        return None

    def _add_note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _compare_at_size(self, seen: BaselineRun, model: PerturbableModel, *, gains: bool) -> ModelDifference | None:
        try:
            outputs = model.run_perturbed(seen.feeds, patience=4 * PATIENCE)
        except Exception as e:
            message = (
                f"at {seen.size_clause} the result does not run in onnxruntime, where the model before does: "
                f"{short_error_message(e)}"
            )
            return ModelDifference(message, seen.sizes, True)
        if gains:
            outputs = [_drop_gained_numbers(old, new) for old, new in zip(seen.outputs, outputs, strict=True)]
        apart: str | None = None
        for draws in _PERTURBED:
            self._perturb_baseline(seen, draws)
            apart = self.compare_outputs(seen, outputs)
            if apart is None:
                return None
        return ModelDifference(f"at {seen.size_clause} {apart}", seen.sizes)

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
        for name, old, new, moved in zip(self._model.outputs, seen.outputs, outputs, seen.moved, strict=True):
            if moved is None:
                continue
            if old.shape != np.shape(new) or old.dtype != new.dtype:
                return (
                    f"the output {name!r} is {new.dtype}{list(np.shape(new))}, where the model before makes"
                    f" {old.dtype}{list(old.shape)}"
                )
            floating = old.dtype.kind == "f"
            if floating:
                bound = explained_error(old, moved, self._relative)
                # Below the normal numbers a rounding is half of the smallest one, whatever the value.
                bound = bound + self._relative / self._unit * float(np.finfo(old.dtype).smallest_subnormal)
                # A norm divides such a rounding by √epsilon; and kernels flush float32's subnormal numbers to zero.
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
                    room = f", and rounding explains {worst.allowed:.2g}"
                else:
                    room = ""
                return f"the output {name!r} is {new[at]}{where}, where it was {old[at]} before{room}"
        return None


def _is_random(one: Any, other: Any) -> bool:
    """Whether two runs on the same input differ by far more than rounding."""
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
    """``new`` with the numbers of ``old`` where it alone is not finite."""
    if not isinstance(old, np.ndarray) or old.dtype.kind != "f" or old.shape != np.shape(new):
        return new
    return np.where(np.isfinite(old) & ~np.isfinite(new), old, new).astype(new.dtype)
