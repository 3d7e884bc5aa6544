"""Compare the tokens that decoder files generate with eager mode's: ``verify --generate``.

Eager mode generates greedily with its own cache (transformers' ``generate``). Each file then reads the same prompts and
eager's tokens one by one with its cache, so one tie does not make all later steps incomparable. Each step gives logits:

- the reference is the model without a cache, in float64, on the prompts and all tokens at once. It shares neither cache
  nor masks with eager's run or with the file;
- the allowed error of each logit is the default rule of ``verify`` (``normdeploy.compare.error_bounds``): random
  roundings of the reference, and the error of eager's run.

The file's choice at a step is its largest logit. If the choice is not eager's token, the distance of the two tokens'
logits in float64 decides. If the distance is within the two allowed errors together, rounding explains the choice: it
is a tie. Otherwise it is a fault.

Eager's own run must be within the allowed error that the roundings alone give. Otherwise eager's cache or its masks do
not compute the model's function, and no file can be judged by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx

from ...compare.element_errors import absolute_difference, first_true_index, nonfinite_mismatch
from ...compare.error_bounds import MOST_RATIO, ErrorBounds
from ...compare.ulp_spacing import EAGER_MULTIPLE
from ...errors import InputError, NormdeployError, RuntimeUnavailable
from ...graphs.declared_inputs import tensor_spec
from ...graphs.decomposed_dequantize import has_code_casts
from ...graphs.quantization_info import is_quantized
from ...inputs.file_inputs import read_recorded_inputs
from ...inputs.input_cases import NamedInputs
from ...inputs.token_prompts import IDS, MASK, USUAL_LENGTH, PromptBatch, draw_prompts, find_positions, read_prompts
from ...model import LoadedModel
from ...precision.type_conversion import FORMATS
from ...runtimes.cached_decoder import (
    LOGITS,
    PAST,
    POSITIONS,
    CachedDecoder,
    DecoderPorts,
    find_decoder_ports,
    follow_tokens,
    require_fitting_prompts,
)
from ...runtimes.named_runners import require_named_runner
from ...runtimes.ort_runner import OrtRunner, ort_title
from ...runtimes.rounding_noise import RoundingRunner
from ...runtimes.torch_runners import HALVES, HalfRunner
from ...runtimes.trt_runner import is_engine
from ...storage.onnx_files import load_small_weights
from ...storage.proto_traversal import required_inputs
from ...types import Array, Progress
from .compute_budget import BudgetClock
from .generation_result import FileGeneration, GeneratedRow, GeneratedStep, Generation, Verdict
from .reference_models import model_unit_roundoff
from .runtime_candidates import inspect_file


class GreedyResult(Protocol):
    """Tokens int64 [batch, count] and logits [batch, count, vocabulary] of a greedy run."""

    @property
    def tokens(self) -> Array: ...

    @property
    def logits(self) -> Array: ...


class Generator(Protocol):
    """Model in eager mode that generates greedily with its own cache.

    Attributes:
        vocabulary: number of token ids.
        window: number of positions that a layer with a sliding window sees; None without such a window.
    """

    vocabulary: int
    window: int | None

    def generate(self, ids: Array, mask: Array, count: int) -> GreedyResult: ...


@dataclass(frozen=True)
class DecoderFile:
    """File that generates.

    Attributes:
        most_past: largest number of past tokens that the file records; None if it records none.
        precision: "fp16" or "bf16" for a file in half precision, else "".
    """

    path: Path
    label: str
    ports: DecoderPorts
    most_past: int | None
    precision: str

    def half_beside(self, model: LoadedModel) -> str:
        """Return the half precision in which the file is judged; "" if the model is not more precise itself."""
        if self.precision and model_unit_roundoff(model) < FORMATS[self.precision].unit_roundoff:
            return self.precision
        return ""


class _DrawLimit:
    """Limit on random roundings by the time.

    Attributes:
        reached: True if roundings were refused since this was last set to False.
    """

    def __init__(self, clock: BudgetClock) -> None:
        self._clock = clock
        self.reached = False

    def allow(self) -> bool:
        """Return whether there is time for another rounding."""
        if self._clock.has_time(0.0):
            return True
        self.reached = True
        return False


@dataclass(frozen=True)
class _Answer:
    """Eager's tokens for a batch of prompts, the reference logits in float64 and their allowed errors."""

    prompts: PromptBatch
    tokens: Array
    reference: Array
    bounds: ErrorBounds
    draws: _DrawLimit


def check_generation(
    model: LoadedModel,
    generator: Generator,
    files: Sequence[Path],
    *,
    count: int,
    seeds: int = 3,
    inputs: Sequence[NamedInputs] | None = None,
    runners: Sequence[str] = (),
    clock: BudgetClock | None = None,
    progress: Progress | None = None,
) -> Generation:
    """Compare the tokens that files generate with those of a model in eager mode.

    Args:
        model: the model without a cache. It takes ``input_ids``, and ``attention_mask`` and ``position_ids`` if it has
            them, of shape [batch, length], and returns ``logits`` [batch, length, vocabulary].
        generator: the same model in eager mode.
        files: ONNX files with a cache.
        count: number of tokens after each prompt.
        seeds: number of random batches of prompts.
        inputs: the user's prompts; None to draw prompts.
        runners: names of further runtimes that run the files too.
        clock: limit on the time. One batch of prompts always runs.

    Returns:
        The verdict on each token.

    Raises:
        InputError: a file is not a decoder with a cache, is quantized or an engine; or the tokens exceed the positions
            of the model or of a file; or the prompts do not fit.
        NormdeployError: the model does not run in float64.
    """
    clock = clock or BudgetClock(float("inf"))
    tell = progress or (lambda stage, done, total: None)
    opened = [open_decoder(path) for path in files]
    batches, limits = _plan_prompts(model, generator, opened, count, seeds, inputs)
    for file in opened:
        for prompts in batches:
            try:
                require_fitting_prompts(file.ports, prompts)
            except InputError as error:
                raise InputError(f"{file.label}, {prompts.name}: {error}") from error
    made: list[FileGeneration] = []
    reasons: list[str] = []
    for half in dict.fromkeys(file.half_beside(model) for file in opened):
        reference = _Reference(model, generator, half, clock)
        answers: list[_Answer] = []
        for number, prompts in enumerate(batches):
            tell("generate", number, len(batches))
            if answers and inputs is None and clock.is_half_over():
                limits.append(f"on {number} of {len(batches)} batches of prompts, for lack of time")
                break
            answers.append(reference.answer(prompts, count))
        reasons += reference.faults
        for file in (f for f in opened if f.half_beside(model) == half):
            made += _run_everywhere(file, answers, reference.ratio, runners)
    limits += _describe_window(generator, batches, count)
    return Generation(
        count=count, files=tuple(made), reference="; ".join(dict.fromkeys(reasons)), limits=tuple(dict.fromkeys(limits))
    )


# ------------------------------------------------------------------ files and prompts


def open_decoder(path: Path) -> DecoderFile:
    """Read the inputs and outputs of a decoder file.

    Returns:
        The file.

    Raises:
        InputError: the file is not a decoder with a cache, is quantized or an engine.
    """
    if is_engine(path):
        raise InputError(f"{path.name} is an engine; --generate runs ONNX files, so pass the ONNX file of the engine")
    proto = load_small_weights(path)
    specs = map(tensor_spec, required_inputs(proto.graph))
    ports = find_decoder_ports(path.name, specs, [value.name for value in proto.graph.output])
    if is_quantized(proto) or has_code_casts(proto):
        raise InputError(
            f"{path.name} is quantized, and rounding does not explain its errors, so its tokens can't be judged; omit"
            " --generate, or pass the file before its quantization"
        )
    most_past = _most_past_tokens(proto) if ports.cache_length is None else ports.cache_length - 1
    return DecoderFile(path, path.name, ports, most_past, inspect_file(path).precision)


def _most_past_tokens(proto: onnx.ModelProto) -> int | None:
    """Return the largest number of past tokens in the export record of a file."""
    sizes = [
        dim.max
        for spec in read_recorded_inputs(proto).values()
        if spec.name.startswith(PAST)
        for dim in spec.shape[1:]
        if dim.is_dynamic
    ]
    return min(sizes, default=None)


def _plan_prompts(
    model: LoadedModel,
    generator: Generator,
    files: Sequence[DecoderFile],
    count: int,
    seeds: int,
    inputs: Sequence[NamedInputs] | None,
) -> tuple[list[PromptBatch], list[str]]:
    """Choose the prompts: the user's, or random tokens of one row and of two rows of different lengths.

    Returns:
        The batches, and limits of the verdict.
    """
    room, source = _find_room(model, files)
    dim = "cache={0}:{0}:{0}" if any(f.ports.cache_length is not None for f in files) else "past=0:8:{0}"
    if inputs is not None:
        batches = [read_prompts(given.name, given.feeds) for given in inputs]
        for prompts in batches:
            _require_room(prompts.ids.shape[1], count, room, source, prompts.name, dim)
            lowest = int(prompts.ids.min())
            highest = int(prompts.ids.max())
            if lowest < 0 or highest >= generator.vocabulary:
                wrong = lowest if lowest < 0 else highest
                raise InputError(
                    f"{prompts.name}: the token id {wrong} is not among the model's {generator.vocabulary} tokens;"
                    f" pass ids from 0 to {generator.vocabulary - 1}"
                )
        return batches, []
    _require_room(1, count, room, source, "", dim)
    length = min(USUAL_LENGTH, room - count + 1)
    batch = next((f.ports.fixed_batch for f in files if f.ports.fixed_batch is not None), None)
    limits = list[str]()
    draw = partial(draw_prompts, generator.vocabulary, length)
    takes_mask = all(f.ports.takes_mask for f in files)
    if not takes_mask:
        limits.append("without padding, because the file has no attention_mask")
    if batch is not None:
        limits.append(f"with {batch} prompts at once alone, which the file fixes")
        return [draw(seed, batch, equal_lengths=not takes_mask) for seed in range(seeds)], limits
    if not takes_mask:
        return [draw(seed) for seed in range(seeds)], limits
    return [draw(0), *(draw(seed, 2) for seed in range(seeds))], limits


def _find_room(model: LoadedModel, files: Sequence[DecoderFile]) -> tuple[int, str]:
    """Return how many tokens a run may read in all, and whose limit it is."""
    length = next(spec.shape[1] for spec in model.inputs if spec.name == IDS)
    room, source = length.max, "the model"
    for file in files:
        # The last run reads one token besides the past.
        if file.most_past is not None and file.most_past + 1 < room:
            room, source = file.most_past + 1, file.label
    return room, source


def _require_room(length: int, count: int, room: int, source: str, name: str, dim: str) -> None:
    """Raise InputError if the prompt and the tokens exceed the positions. The last token is not read."""
    if length + count - 1 <= room:
        return
    least = f"{name}: " if name else ""
    larger = dim.format(length + count)
    raise InputError(
        f"{least}{count} tokens after {length} of the prompt are read as {length + count - 1} positions, but {source}"
        f" takes {room}; generate at most {max(room - length + 1, 0)}, or export with --dim {larger} if the model has"
        " the positions"
    )


def _describe_window(generator: Generator, batches: Sequence[PromptBatch], count: int) -> Iterator[str]:
    window = generator.window
    longest = max((prompts.ids.shape[1] for prompts in batches), default=0) + count - 1
    if window is not None and longest <= window:
        yield f"within the sliding window alone ({longest} of {window} positions)"


# ------------------------------------------------------------------ the reference


class _Reference:
    """Eager's tokens, and the model without a cache in float64.

    Attributes:
        ratio: largest error of eager in units of the roundings, over the batches so far.
        faults: reasons why eager's run is not the model's function.
    """

    def __init__(self, model: LoadedModel, generator: Generator, half: str, clock: BudgetClock) -> None:
        self._model = model
        self._generator = generator
        self._half = HALVES.get(half)
        self._clock = clock
        self._runner = RoundingRunner(model)
        self.ratio = 1.0
        self.faults: list[str] = []

    def answer(self, prompts: PromptBatch, count: int) -> _Answer:
        run = self._generator.generate(prompts.ids, prompts.mask, count)
        if run.tokens.shape != (prompts.ids.shape[0], count):
            raise InputError(
                f"{prompts.name}: eager mode generated {run.tokens.shape[1]} tokens of {count}; the model's own"
                " generate ends earlier, so its tokens can't be compared"
            )
        feeds = self._whole_feeds(prompts.extend(run.tokens[:, :-1]))

        def cut(outputs: Mapping[str, Array]) -> dict[str, Array]:
            return {LOGITS: outputs[LOGITS][:, -count:]}

        reference = cut(self._runner.infer(feeds))
        rounded = partial(self._runner.run_rounded, feeds, half=self._half)
        if self._half is None:
            eager = run.logits
        else:
            # A file in half precision is judged beside eager mode in half precision. Its cache holds the same values.
            with HalfRunner(self._model, self._half) as runner:
                eager = cut(runner.infer(feeds))[LOGITS]
        draws = _DrawLimit(self._clock)
        bounds = ErrorBounds(reference, {LOGITS: eager}, lambda seed: cut(rounded(seed=seed)), draws.allow)
        # The first roundings always suffice for a passing file.
        draws.reached = False
        self._check_finite(prompts, reference[LOGITS])
        self._check_eager(prompts, run, reference[LOGITS], bounds)
        self.ratio = max(self.ratio, bounds.eager_ratio(LOGITS))
        return _Answer(prompts, run.tokens, reference[LOGITS], bounds, draws)

    def _whole_feeds(self, whole: PromptBatch) -> dict[str, Array]:
        size = next(spec.shape[1] for spec in self._model.inputs if spec.name == IDS)
        if not size.is_dynamic:
            # The model without a cache reads one length alone, so the rows are padded on the left.
            whole = whole.pad_to(size.opt)
        values = {IDS: whole.ids, MASK: whole.mask, POSITIONS: find_positions(whole.mask)}
        lacking = [spec.name for spec in self._model.inputs if spec.name not in values]
        if lacking:
            raise InputError(f"the model takes {lacking[0]!r}, which --generate does not know; it passes {[*values]}")
        return {spec.name: values[spec.name].astype(spec.dtype) for spec in self._model.inputs}

    def _check_finite(self, prompts: PromptBatch, reference: Array) -> None:
        """Note a fault if the logits of a step contain NaN or no finite number, because no token can be judged there.

        Single logits of -inf are right: a model may exclude tokens.
        """
        unusable = np.asarray(np.isnan(reference).any(-1) | ~np.isfinite(reference).any(-1))
        if unusable.any():
            row, step = first_true_index(unusable)
            self.faults.append(
                f"the model's own logits in float64 contain NaN or no finite number ({prompts.name}, prompt {row + 1},"
                f" token {step + 1}), so the files can't be judged"
            )

    def _check_eager(self, prompts: PromptBatch, run: GreedyResult, reference: Array, bounds: ErrorBounds) -> None:
        """Note a fault if eager's run with its cache exceeds what roundings of the model without a cache explain.

        The largest error of each step is compared, because few roundings may leave a single logit nearly unchanged.
        """
        error = absolute_difference(run.logits, reference).max(-1)
        allowed = EAGER_MULTIPLE * MOST_RATIO * bounds.rounding_units(LOGITS).max(-1)
        beyond = error > allowed
        if not beyond.any():
            return
        row, step = first_true_index(beyond)
        self.faults.append(
            f"eager mode with its cache is not the model without a cache ({prompts.name}, prompt {row + 1}, token"
            f" {step + 1}: the logits differ by {error[row, step]:.2e}, roundings explain"
            f" {allowed[row, step]:.2e}), so the files can't be judged"
        )


# ------------------------------------------------------------------ the verdict


def _run_everywhere(
    file: DecoderFile, answers: Sequence[_Answer], ratio: float, runners: Sequence[str]
) -> Iterator[FileGeneration]:
    openers: dict[str, Callable[[], Any]] = {ort_title("cpu", optimize=True): partial(OrtRunner, file.path)}
    further = map(require_named_runner, runners)
    openers |= {runner.title: partial(runner.open, file.path) for runner in further}
    for runtime, make in openers.items():
        rows: list[GeneratedRow] = []
        failure = ""
        unrun = ""
        with ExitStack() as stack:
            try:
                runner: Any = stack.enter_context(make())
                for answer in answers:
                    decoder = CachedDecoder(runner.infer, file.ports)
                    logits = follow_tokens(decoder, answer.prompts, answer.tokens)
                    rows += _judge_rows(answer, logits, ratio)
            except RuntimeUnavailable as error:
                unrun = str(error)
            except NormdeployError as error:
                failure = str(error)
        yield FileGeneration(file=file.label, runtime=runtime, rows=tuple(rows), failure=failure, unrun=unrun)


def _judge_rows(answer: _Answer, logits: Array, ratio: float) -> list[GeneratedRow]:
    if logits.shape != answer.reference.shape:
        raise InputError(f"its logits are {list(logits.shape)}, but the model's are {list(answer.reference.shape)}")
    error = absolute_difference(logits, answer.reference)
    answer.draws.reached = False
    allowed = answer.bounds.allowed_error(LOGITS, ratio, error)
    rows = []
    for row, tokens in enumerate(answer.tokens):
        steps = [
            _judge_step(
                step + 1,
                int(token),
                logits[row, step],
                answer.reference[row, step],
                error[row, step],
                allowed[row, step],
            )
            for step, token in enumerate(tokens)
        ]
        seen = answer.prompts.mask[row] != 0
        rows.append(
            GeneratedRow(
                batch=answer.prompts.name,
                row=row + 1,
                prompt=tuple(int(i) for i in answer.prompts.ids[row, seen]),
                padding=int((~seen).sum()),
                steps=tuple(steps),
                undecided=answer.draws.reached,
            )
        )
    return rows


def _judge_step(step: int, token: int, logits: Array, reference: Array, error: Array, allowed: Array) -> GeneratedStep:
    """Judge one step. The arrays hold one number for each token of the vocabulary."""
    # NaN is the largest number for argmax, so a NaN is chosen and then fails by its error.
    choice = int(logits.astype(np.float64).argmax())
    second, first = np.partition(reference, -2)[-2:] if reference.size > 1 else (reference[0], reference[0])
    if choice == token:
        gap = 0.0
    else:
        with np.errstate(invalid="ignore"):
            gap = abs(float(reference[token] - reference[choice]))
    bound = float(allowed[token] + allowed[choice])
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = int(np.nan_to_num(error / allowed, nan=0.0, posinf=np.inf).argmax())
    verdict: Verdict
    # The error of a logit is 0 if neither value is finite, so such logits are compared by themselves. The distance of
    # two infinite logits is NaN, and NaN is not a tie.
    wrong = nonfinite_mismatch(logits, reference).any() or (error > allowed).any()
    if wrong or (choice != token and not gap <= bound):
        verdict = "fail"
    elif choice != token:
        verdict = "tie"
    else:
        verdict = "pass"
    return GeneratedStep(
        step=step,
        token=token,
        choice=choice,
        margin=float(first - second),
        gap=gap,
        bound=bound,
        error=float(error[worst]),
        allowed=float(allowed[worst]),
        verdict=verdict,
    )
