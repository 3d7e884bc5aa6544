"""Wrap the reference of a comparison: a PyTorch model, or an ONNX file or session (``verify a.onnx b.onnx``).

An ONNX file is evaluated in float64 node by node (``runtimes.onnx_float64``). For a PyTorch model, eager mode is the
correct evaluation in the model's own type. For an ONNX file, it is onnxruntime with its optimizer off, or the given
session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import torch

from ...errors import GraphError, InputError, NormdeployError, RuntimeUnavailable
from ...graphs.classifier_maps import replace_map_outputs
from ...graphs.decomposed_dequantize import MANY, has_code_casts
from ...inputs.file_inputs import FileInputs, describe_file_inputs
from ...model import InputSpec, LoadedModel, ModelSignature
from ...runtimes import HeldRunner, Runner, RunResult
from ...runtimes.fake_quantize import rounds_to_grid
from ...runtimes.float64_evaluator import inline_functions
from ...runtimes.onnx_float64 import OnnxFloat64Runner
from ...runtimes.ort_runner import OrtRunner, run_session
from ...runtimes.rounding_noise import RoundingRunner
from ...runtimes.size_search import find_runnable_sizes
from ...runtimes.torch_runners import EagerRunner, HalfRunner
from ...storage.image_metadata import read_image_inputs
from ...storage.onnx_files import load_onnx, normalize_model
from ...types import Arrays
from .io_matching import TensorEnd, graph_ends

# Name of the runtime that replaces eager mode for an ONNX reference.
AS_IT_IS = "the reference itself"
_COMPARING = frozenset({"aten::bucketize", "aten::searchsorted", "aten::logit"})
# Runtimes of the reference itself.
OWN = (EagerRunner.name, AS_IT_IS)

Float64 = RoundingRunner | OnnxFloat64Runner


def runtime_label(runtime: str) -> str:
    """Name the model that a runtime of ``OWN`` runs, for messages.

    Returns:
        "the reference" or "the model".
    """
    if runtime == AS_IT_IS:
        return "the reference"
    return "the model"


@dataclass(frozen=True, kw_only=True)
class FileModel(ModelSignature):
    """ONNX model that other files are compared with.

    Attributes:
        path: the file; None for a model from memory.
        session: the user's session, which runs instead of a new session; None if the user gave no session.
        guessed: True if the sizes of the dims are guessed. The model then need not run at all sizes that are tried.
    """

    proto: onnx.ModelProto
    label: str
    path: Path | None = None
    session: Any = None
    guessed: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def float64_runner(self) -> OnnxFloat64Runner:
        """Return the float64 evaluator. It is created on first use, and after a run it keeps the weights in float64."""
        return OnnxFloat64Runner(self.proto)

    @cached_property
    def coarsest_unit(self) -> float:
        """Return the unit roundoff of its coarsest floating type; 0 if it has none."""
        return self.float64_runner.unit

    def release_runner(self) -> None:
        """Release ``float64_runner``."""
        self.__dict__.pop("float64_runner", None)

    def with_inlined_functions(self) -> Self:
        """Inline the functions of the model. onnxruntime runs the result in a new session.

        Returns:
            the model, unchanged if it has no functions.
        """
        proto = inline_functions(self.proto)
        if proto is self.proto:
            return self
        return replace(self, proto=proto, path=None, session=None)


Original = LoadedModel | FileModel


class FloatReference:
    """Model in float64. Its evaluator is created on first use, and released when it is not needed for a while."""

    def __init__(self, model: Original) -> None:
        self._model = model

    @cached_property
    def float64_runner(self) -> Float64:
        """Return the float64 evaluator of the model."""
        if isinstance(self._model, FileModel):
            return self._model.float64_runner
        return RoundingRunner(self._model)

    def describe_narrow_nodes(self) -> list[str]:
        """List the nodes of a reference file that ran in their own types because they have no float64 form.

        Returns:
            their descriptions.
        """
        if isinstance(self._model, FileModel):
            return self._model.float64_runner.describe_narrow_nodes()
        return []

    def release_runner(self) -> None:
        """Release the evaluator."""
        self.__dict__.pop("float64_runner", None)
        if isinstance(self._model, FileModel):
            self._model.release_runner()


def model_label(model: Original) -> str:
    """Name the model for messages.

    Returns:
        the file's label or "the model".
    """
    if isinstance(model, FileModel):
        return model.label
    return "the model"


def own_precision_runner(model: Original, half: torch.dtype | None) -> tuple[str, Callable[[], Runner]]:
    """Choose the runner that evaluates the model correctly in the model's own type, or in ``half``.

    Returns:
        (name of the runtime, function that opens the runner).
    """
    if isinstance(model, FileModel):
        return AS_IT_IS, partial(_OwnPrecisionRunner, model, half)
    return EagerRunner.name, partial(EagerRunner, model) if half is None else partial(HalfRunner, model, half)


def model_unit_roundoff(model: Original) -> float:
    """Find the unit roundoff of the coarsest floating type in the model's graph.

    Returns:
        the roundoff; 0 if it has no floating type.
    """
    if isinstance(model, FileModel):
        return model.coarsest_unit
    values = [node.meta.get("val") for node in model.program.graph.nodes]
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
    return max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=0.0)


def find_unused_inputs(model: Original) -> frozenset[str]:
    """Find the inputs of a PyTorch model that none of its nodes reads.

    Returns:
        their names; none for an ONNX model.
    """
    if isinstance(model, FileModel):
        return frozenset()
    return frozenset(spec.name for spec, node in pair_tensor_inputs(model) if not _is_value_read(node))


def pair_tensor_inputs(model: LoadedModel) -> list[tuple[InputSpec, torch.fx.Node]]:
    """Pair the inputs of a PyTorch model with their nodes.

    Returns:
        the pairs; [] if they can't be assigned.
    """
    given = set(model.program.graph_signature.user_inputs)
    nodes = [n for n in model.program.graph.nodes if n.op == "placeholder" and n.name in given]
    tensors = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if len(tensors) == len(model.inputs):
        return list(zip(model.inputs, tensors, strict=True))
    return []


def _is_value_read(node: torch.fx.Node) -> bool:
    """Return whether values of a tensor are read. If only its sizes are read, other inputs have the same sizes."""
    return any(user.target is not torch.ops.aten.sym_size.int for user in node.users)


def rounds_itself(model: Original) -> bool:
    """Check whether a PyTorch model rounds as its quantized file does.

    Such a file is compared with the model directly, without an error budget.

    Returns:
        True if an operator rounds to a quantization grid.
    """
    if isinstance(model, FileModel):
        return False
    schemas = [getattr(node.target, "_schema", None) for node in model.program.graph.nodes]
    return any(rounds_to_grid(schema.name) for schema in schemas if schema is not None)


def stores_codes(model: Original) -> bool:
    """Check whether a model stores weights as quantization codes.

    Returns:
        True if it does.
    """
    if isinstance(model, FileModel):
        return has_code_casts(model.proto)
    held = [*model.program.state_dict.values(), *model.program.constants.values()]
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    return any(tensor.dtype in (torch.int8, torch.uint8) and tensor.numel() >= MANY for tensor in tensors)


def compares_inside(model: Original) -> bool:
    """Check whether an operator of a PyTorch model compares its operand with bounds inside its kernel.

    A file may compute such an operator by separate comparisons, which treat a NaN as a number beyond a bound.

    Returns:
        True if the model has one.
    """
    if isinstance(model, FileModel):
        return False
    schemas = [getattr(node.target, "_schema", None) for node in model.program.graph.nodes]
    return any(schema.name in _COMPARING for schema in schemas if schema is not None)


def count_flops(model: Original) -> float:
    """Count the floating-point operations of one run at the opt sizes, as far as torch counts them.

    For an ONNX file, two operations are counted for each weight and each row of the inputs, as in matrix products.

    Returns:
        the count; 0 if the model does not run.
    """
    if isinstance(model, FileModel):
        weights = sum(int(np.prod(t.dims)) for t in model.proto.graph.initializer)
        return 2.0 * weights * max((int(np.prod(spec.concrete_shape({})[:-1])) for spec in model.inputs), default=1)
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with FlopCounterMode(display=False) as counter, EagerRunner(model) as runner:
            runner.infer(model.samples(0))
    except InputError:
        # The comparison itself reports that the model does not run, and on which input.
        return 0.0
    return float(counter.get_total_flops())


def model_outputs(model: Original) -> list[TensorEnd]:
    """List the outputs of the model.

    Returns:
        one `TensorEnd` for each output, with kind and shape as far as the model states them.
    """
    if isinstance(model, FileModel):
        return graph_ends(model.proto.graph)[1]
    values = {n.name: n.meta.get("val") for n in model.program.graph.nodes}
    specs = [
        s for s in model.program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT" and hasattr(s.arg, "name")
    ]
    outputs = []
    for name, spec in zip(model.outputs, specs, strict=False):
        value = values.get(spec.arg.name)
        if len(specs) != len(model.outputs) or not isinstance(value, torch.Tensor):
            outputs.append(TensorEnd(name))
            continue
        if value.is_floating_point():
            kind = "f"
        elif value.dtype == torch.bool:
            kind = "b"
        else:
            kind = "i"
        outputs.append(TensorEnd(name, kind, tuple(d if isinstance(d, int) else None for d in value.shape)))
    return outputs


class _OwnPrecisionRunner(HeldRunner):
    """Runner of an ONNX model in onnxruntime, without its optimizer.

    In half precision, or if onnxruntime has no kernel, the nodes are evaluated one by one and their results are
    rounded.
    """

    name = AS_IT_IS

    def __init__(self, model: FileModel, half: torch.dtype | None) -> None:
        self._model = model
        self._half = half
        self._asked = False
        self._runner: OrtRunner | None = None
        if half is None and model.session is None:
            try:
                self._runner = OrtRunner(model.path or model.proto, optimize=False)
            except RuntimeUnavailable:
                if not model.coarsest_unit:
                    raise

    def infer(self, feeds: Arrays) -> RunResult:
        outputs = self._run_model(feeds)
        # On the first input, a second run checks that the results are deterministic.
        if not self._asked:
            self._asked = True
            again = self._run_model(feeds)
            if any(value.tobytes() != again[name].tobytes() for name, value in outputs.items()):
                raise InputError(
                    f"{self._model.label} returns different outputs for the same inputs, so they can't be compared"
                )
        return outputs

    def _run_model(self, feeds: Arrays) -> RunResult:
        if self._half is None and self._model.session is not None:
            return run_session(self._model.session, feeds, "the session that was passed")
        if self._runner is not None:
            return self._runner.infer(feeds)
        try:
            return self._model.float64_runner.run_in_half(feeds, self._half)
        except NormdeployError as error:
            # The sizes or values do not fit the model. `OrtRunner` also raises InputError in this case.
            raise InputError(str(error)) from error

    def _free_model(self) -> None:
        self._runner = None


# ------------------------------------------------------------------ opening a reference


def is_ort_session(source: object) -> bool:
    """Check whether ``source`` is an onnxruntime.InferenceSession, of this onnxruntime or another.

    Returns:
        True for a session.
    """
    return type(source).__name__ == "InferenceSession" and hasattr(source, "run_with_ort_values")


def open_original(source: Any, inputs: Sequence[str] = (), dims: Sequence[str] = ()) -> FileModel:
    """Open an ONNX file, a ModelProto with its weights loaded, or a session as the reference.

    Args:
        inputs: sizes and values of an input, for example "ids:int64[batch,seq]{0:30522}".
        dims: range of a named dim, for example "batch=1:8:64".

    Returns:
        the reference.

    Raises:
        GraphError: the file is broken, or the session does not contain its model.
        InputError: a given input or dim does not fit the model, or an input or output is not a numeric tensor.
    """
    path = None
    session = None
    if is_ort_session(source):
        session = source
        given = getattr(source, "_model_path", None) or getattr(source, "_model_bytes", None)
        if given is None:
            raise GraphError("the session does not contain its model; pass the ONNX file or the ModelProto")
        if isinstance(given, str):
            source = given
        else:
            source = onnx.load_from_string(bytes(given))
    if isinstance(source, onnx.ModelProto):
        proto = normalize_model(source)
        label = source.graph.name or "the reference"
    else:
        path = Path(source)
        proto = load_onnx(path)
        label = path.name
    proto = replace_map_outputs(proto)
    found = describe_file_inputs(proto, inputs, dims, label)
    outputs = []
    for v in proto.graph.output:
        if not v.type.tensor_type.elem_type and v.type.WhichOneof("value") not in (None, "tensor_type"):
            raise InputError(
                f"{label}: the output {v.name!r} is not a tensor, so it can't be compared; remove it from the"
                " file's outputs"
            )
        if v.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            raise InputError(
                f"{label}: the output {v.name!r} is a tensor of strings, so it can't be compared; make the"
                " index, or the scores from which it is computed, an output of the file, or remove it"
            )
        outputs.append(v.name)
    model = FileModel(
        inputs=found.specs,
        outputs=tuple(outputs),
        kind="onnx",
        images=read_image_inputs(proto),
        proto=proto,
        label=label,
        path=path,
        session=session,
        guessed=bool(found.guessed),
    )
    model = _at_sizes_that_run(model, found.guessed)
    return replace(model, notes=tuple(_describe_guesses(model, found)))


def _at_sizes_that_run(model: FileModel, guessed: Sequence[str]) -> FileModel:
    """Choose larger usual sizes if the model does not run at the guessed sizes.

    Returns:
        the model with sizes at which it runs; unchanged if no such sizes are found.
    """

    if not guessed:
        return model

    def can_run(sizes: Mapping[str, int]) -> bool:
        try:
            own.infer(model.samples(0, sizes))
        except NormdeployError:
            return False
        return True

    try:
        with _OwnPrecisionRunner(model, None) as own:
            sizes = find_runnable_sizes(model, guessed, can_run)
    except NormdeployError:
        # The model can't be opened, which the comparison reports.
        return model
    dims = {
        name: replace(dim, opt=sizes[name], max=max(dim.max, sizes[name]))
        for name, dim in model.named_dims.items()
        if name in sizes
    }
    inputs = tuple(spec.with_ranges_of(dims) for spec in model.inputs)
    return replace(model, inputs=inputs)


def _describe_guesses(model: FileModel, found: FileInputs) -> Iterator[str]:
    """Yield notes on guessed sizes and values of the inputs."""
    if found.guessed:
        largest = max(model.named_dims[name].max for name in found.guessed)
        yield (
            f"{model.label} does not state the sizes of {', '.join(found.guessed)}: 1 to {largest} were tried;"
            " state them with --dim NAME=MIN:OPT:MAX"
        )
    if found.open:
        yield (
            f"{model.label} does not state the values of {', '.join(found.open)}: mostly 0 and 1 were used;"
            " state them with --input or --inputs"
        )
