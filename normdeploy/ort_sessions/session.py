"""Open onnxruntime sessions. No other module opens sessions of models.

If a model has nodes that may end the process, its session first runs each set of feeds in a child
(`normdeploy.ort_sessions.trial_process`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ..types import Arrays, PathLike
from .child_process import REHEARSE_ALL
from .crash_risks import MENTIONS, find_crash_risks, find_empty_input_risks
from .opset_limits import describe_unloadable_opset
from .trial_process import TrialProcess

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Session entry (onnxruntime_session_options_config_keys.h) for exact integer products. On x86 processors without VNNI,
# onnxruntime by default adds pairs of uint8 · int8 products in 16 bits, which saturate. This entry selects kernels that
# do not saturate, so the results are those that the file defines.
EXACT_INTEGERS = {"session.x64quantprecision": "1"}
# With EXACT_INTEGERS, onnxruntime 1.31 refuses a file in which several nodes read the same int8 weight or zero point.
# If all weights are inside the file, each node gets its own copy of the weight or zero point. Otherwise this entry is
# used instead of EXACT_INTEGERS. It keeps onnxruntime from converting products of int8 weights to products of uint8 and
# int8.
_NO_UNSIGNED = {"optimization.disable_specified_optimizers": "QDQS8ToU8Transformer"}
# onnxruntime 1.31 fuses a MatMul and the DequantizeLinear of its 2-, 4- or 8-bit weight into MatMulNBits. By default,
# the kernel of MatMulNBits also rounds the other operand to 8 bits, which the file does not specify. This entry turns
# that rounding off.
FLOAT_OPERANDS = {"session.qdq_matmulnbits_accuracy_level": "1"}
_QUANTIZERS = re.compile(rb"[Qq]uantizeLinear")
# Minimum severity of onnxruntime's log messages. Only fatal errors are logged, because onnxruntime's exceptions are
# clearer than its log.
_FATAL = 4
# Matches the beginning of an error about a failing node.
_UNKNOWN_OPSET = re.compile(r"Opset (?P<opset>\d+) is under development")
_NODE = re.compile(
    r"^(?:\[ONNXRuntimeError\] : \d+ : \w+ : )?Non-zero status code returned while running (?P<op>\w+) node\."
    r" Name:'(?P<name>[^']*)' (?:Status Message: )?"
)
# Matches a source file of onnxruntime with a line number, and a C++ function with its parameter types.
_PLACE = re.compile(r"/\S+:\d+ [^()]*\([^()]*\)(?: const)? ")


class _TrialFirstSession(ort.InferenceSession):
    """Session that runs its feeds in a child process before it runs them in this process.

    Attributes:
        rehearsal: the child process; None until it is needed.
        start: function that starts the child process when the first feed without an element comes.
    """

    rehearsal: TrialProcess | None
    start: Callable[[], TrialProcess]

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        """Run the feeds in the child, then here.

        Returns: the outputs, as `InferenceSession.run` returns them.
        """
        self.run_in_trial_process(input_feed)
        return super().run(output_names, input_feed, run_options)

    def run_with_ort_values(self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None) -> Any:
        """Run the feeds in the child, then here.

        Returns: the outputs as OrtValues.
        """
        self.run_in_trial_process(input_dict_ort_values)
        return super().run_with_ort_values(output_names, input_dict_ort_values, run_options)

    def run_in_trial_process(self, feeds: Mapping[str, Any]) -> None:
        """Run the feeds in the child process. Start it first if a feed without an element requires it; do nothing if no
        child is needed.
        """
        if self.rehearsal is None and any(map(_is_empty_value, feeds.values())):
            self.rehearsal = self.start()
        if self.rehearsal is not None:
            self.rehearsal.run(_feeds_to_numpy(feeds))


def _is_empty_value(value: Any) -> bool:
    return 0 in (value.shape() if isinstance(value, ort.OrtValue) else np.shape(value))


def ort_value_to_numpy(value: ort.OrtValue) -> np.ndarray:
    """Copy an OrtValue into an array.

    Returns: an array of the same dtype; bfloat16 is ``ml_dtypes.bfloat16``.
    """
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    if value.tensor_size_in_bytes():
        data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    else:
        data = b""
    return np.frombuffer(data, dtype=ml_dtypes.bfloat16).reshape(value.shape()).copy()


def to_ort(array: np.ndarray) -> ort.OrtValue:
    """Wrap an array as an OrtValue.

    Returns: a value that shares the array's memory if the memory is contiguous. Sharing is safe, because onnxruntime
        never writes to inputs.
    """
    array = np.asarray(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _feeds_to_numpy(feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: ort_value_to_numpy(v) if isinstance(v, ort.OrtValue) else np.asarray(v) for name, v in feeds.items()}


def run_in_trial_process(session: ort.InferenceSession, feeds: Arrays) -> None:
    """Run the feeds in the session's child process, if the session has one.

    Callers need this for feeds that are bound to memory, because the session's `run` does not get them.

    Raises:
        RuntimeCrash: onnxruntime ends its process on these feeds.
    """
    if isinstance(session, _TrialFirstSession):
        session.run_in_trial_process(feeds)


def open_session(
    model: PathLike | bytes,
    *,
    optimize: bool = False,
    provider: str = "cpu",
    settings: Mapping[str, str] | None = None,
    threads: int = 0,
    entries: Mapping[str, str] | None = None,
    initializers: Mapping[str, ort.OrtValue] | None = None,
    saved: Path | None = None,
    rehearsed: bool = True,
) -> ort.InferenceSession:
    """Open an onnxruntime session.

    Args:
        model: path or bytes of a model. A path is required if weights are external or the model exceeds 2 GB.
        optimize: True runs all of onnxruntime's graph optimizations, False none.
        provider: "cpu" or "cuda". With "cuda", onnxruntime runs nodes without a CUDA kernel on the CPU.
        settings: provider options.
        threads: number of threads per operator; 0 uses one thread per core.
        entries: entries of the session's configuration. onnxruntime_session_options_config_keys.h lists their names.
        initializers: values of external weights, used in place without a copy.
        saved: path for the optimized graph.
        rehearsed: True to open and run a model that may end the process in a child process first (only with "cpu").

    Returns: the open session.

    Raises:
        RuntimeCrash: onnxruntime ends the process that opens the model. Running the session may also raise
            RuntimeCrash.
        Exception: onnxruntime refuses the model; its exceptions share no base class.
    """
    held = initializers or {}
    if rehearsed and provider == "cpu":
        risks = _read_crash_risks(model)
    else:
        risks = _CrashRisks()

    def start_trial_process() -> TrialProcess:
        """Start a child that opens the same model with the same options.

        Returns: the child process. Its errors name the risky nodes.
        """
        if isinstance(model, bytes):
            content = model
        else:
            content = b""
        if isinstance(model, bytes):
            path = ""
        else:
            path = os.path.abspath(model)
        request = {"path": path, "optimize": optimize, "entries": dict(entries or {})}
        return TrialProcess(request, content, _feeds_to_numpy(held), risks.always or risks.empty)

    rehearsal = start_trial_process() if risks.always or risks.unknown else None

    def create_session(more: Mapping[str, str], unshared: bytes = b"") -> ort.InferenceSession:
        """Open the session with additional configuration entries.

        Args:
            more: additional entries. The caller's entries override them.
            unshared: bytes of a changed model to open in place of ``model``.

        Returns: a session that tries each run in a child if the model is risky.
        """
        options = ort.SessionOptions()
        options.log_severity_level = _FATAL
        options.intra_op_num_threads = threads
        level = ort.GraphOptimizationLevel
        if optimize:
            options.graph_optimization_level = level.ORT_ENABLE_ALL
        else:
            options.graph_optimization_level = level.ORT_DISABLE_ALL
        if saved is not None:
            options.optimized_model_filepath = os.fspath(saved)
        for name, value in {**more, **(entries or {})}.items():
            options.add_session_config_entry(name, value)
        if held:
            options.add_external_initializers(list(held), list(held.values()))
        providers: list[Any] = [(PROVIDERS[provider], dict(settings or {}))]
        source = unshared or (model if isinstance(model, bytes) else os.fspath(model))
        if not (risks.always or risks.empty or risks.unknown):
            return ort.InferenceSession(source, options, providers=providers)
        session = _TrialFirstSession(source, options, providers=providers)
        session.rehearsal = rehearsal
        session.start = start_trial_process
        return session

    # Only the optimizer selects kernels that saturate, so EXACT_INTEGERS is needed only with the optimizer.
    if optimize and not _lacks_zero_points(model):
        with contextlib.suppress(Exception):
            return create_session(EXACT_INTEGERS)
        if (unshared := _unshare_quantizer_inputs(model)) and rehearsal is None:
            with contextlib.suppress(Exception):
                return create_session(EXACT_INTEGERS, unshared)
        with contextlib.suppress(Exception):
            return create_session(_NO_UNSIGNED)
    return create_session({})


def _unshare_quantizer_inputs(model: PathLike | bytes) -> bytes:
    """Give each quantizer its own copy of the int8 tensors that it shares with other quantizers.

    Returns: the changed model; b"" if nothing is shared or weights are outside the file.
    """
    proto = _parse_model(model, _QUANTIZERS)
    tensors = {t.name: t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.INT8}
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in proto.graph.initializer):
        return b""
    read = set[str]()
    shared = False
    for node in proto.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for place, name in enumerate(node.input):
            if name in read:
                shared = True
                own = proto.graph.initializer.add()
                own.CopyFrom(tensors[name])
                own.name = node.input[place] = f"{name}_of_{node.output[0]}"
            elif name in tensors:
                read.add(name)
    if shared:
        return proto.SerializeToString()
    return b""


def rounds_float_operands(path: PathLike) -> bool:
    """Return whether `FLOAT_OPERANDS` may change the result of a MatMul in the file.

    Returns: True if a MatMul multiplies floats by a constant from a DequantizeLinear.
    """
    graph = _parse_model(path, _QUANTIZERS).graph
    constants = {tensor.name for tensor in graph.initializer}
    dequantized = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    weights = {node.output[0] for node in dequantized if node.input[0] in constants}
    others = {node.output[0] for node in dequantized}.difference(weights)
    products = (node for node in graph.node if node.op_type == "MatMul" and len(node.input) == 2)
    return any(node.input[1] in weights and node.input[0] not in others for node in products)


def ort_error_message(error: Exception) -> str:
    """Shorten onnxruntime's error message to one line, without source locations.

    Returns: for a failing node, its op, its name and the reason.
    """
    text = " ".join(str(error).split())
    # onnxruntime's own text warns of an opset "under development", and does not name the opsets that it loads.
    if (unknown := _UNKNOWN_OPSET.search(text)) and (plain := describe_unloadable_opset(int(unknown["opset"]))):
        return plain
    return shorten_ort_message(text)


def shorten_ort_message(text: str) -> str:
    """Remove source locations and status codes from one line of onnxruntime.

    Returns: for a failing node, its op, its name and the reason.
    """
    line = _NODE.sub(r"\g<op> '\g<name>': ", text)
    return _PLACE.sub("", line).rstrip(".")


@functools.cache
def saturates_int8_pairs() -> bool:
    """Return whether this processor saturates pairs of uint8 · int8 products in a session without `EXACT_INTEGERS`.

    Returns: True if the sum 2 · 255 · 127 comes out wrong, because pairs are added in 16 bits.
    """
    value = onnx.helper.make_tensor_value_info
    weight = onnx.numpy_helper.from_array(np.full((2, 1), 127, np.int8), "weight")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "weight"], ["sum"])],
        "pair",
        [value("x", onnx.TensorProto.UINT8, [1, 2])],
        [value("sum", onnx.TensorProto.INT32, [1, 1])],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    (total,) = open_session(model.SerializeToString()).run(None, {"x": np.full((1, 2), 255, np.uint8)})
    return int(total.item()) != 2 * 255 * 127


@dataclass(frozen=True)
class _CrashRisks:
    """Nodes that may end the process.

    Attributes:
        always: nodes that may end the process on any inputs.
        empty: nodes that may end the process only on inputs without an element.
        unknown: True if some node may end the process and it is unknown which node.
    """

    always: Sequence[str] = ()
    empty: Sequence[str] = ()
    unknown: bool = False


def _read_crash_risks(model: PathLike | bytes) -> _CrashRisks:
    """Find the crash risks of a file or of bytes; none if they contain no valid model."""
    if REHEARSE_ALL in os.environ:
        return _CrashRisks(unknown=True)
    proto = _parse_model(model, MENTIONS)
    if not proto.graph.node:
        return _CrashRisks()
    return _CrashRisks(find_crash_risks(proto), find_empty_input_risks(proto))


def _lacks_zero_points(model: PathLike | bytes) -> bool:
    """Return whether a DequantizeLinear has one scale per channel and no zero points.

    With `EXACT_INTEGERS`, onnxruntime 1.31 gives the int8 weight of such a node a scalar zero point. It then refuses to
    run the node, because the node requires one zero point per scale.
    """
    graph = _parse_model(model, _QUANTIZERS).graph
    scalars = {tensor.name for tensor in graph.initializer if not tensor.dims}
    return any(
        node.op_type == "DequantizeLinear" and not any(node.input[2:]) and node.input[1] not in scalars
        for node in graph.node
    )


def _parse_model(model: PathLike | bytes, mentions: re.Pattern[bytes]) -> onnx.ModelProto:
    """Parse the model if its bytes contain one of ``mentions``.

    Returns:
        The model. It is empty if the bytes contain none of ``mentions`` or can't be parsed. onnxruntime itself reports
        bytes that can't be parsed.
    """
    if isinstance(model, bytes):
        content = model
    else:
        content = Path(model).read_bytes()
    proto = onnx.ModelProto()
    if mentions.search(content):
        with contextlib.suppress(DecodeError):
            proto = onnx.ModelProto.FromString(content)
    return proto
