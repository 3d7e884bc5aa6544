"""Run ONNX files in OpenVINO on the CPU.

OpenVINO's CPU plugin rounds to bfloat16 by default on processors that have it. Here it computes in float32, unless the
name of the runner asks for bfloat16 or float16. The plugin has two limits that no setting lifts. It computes int64 in
int32, so larger numbers become others without an error. It computes float64 in float32.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from ..errors import GraphError, InputError, RuntimeUnavailable
from ..storage.onnx_files import iter_bodies, load_onnx
from ..types import PathLike, Tensors
from .array_runner import ArrayRunner
from .tensor_spec import DTYPES, as_numpy

TITLE = "OpenVINO"
MISSING = "OpenVINO is not installed; pip install openvino"
# Name of a runner -> inference precision of OpenVINO.
PRECISIONS = {"openvino": "f32", "openvino-bf16": "bf16", "openvino-fp16": "f16"}
# Integer types that the CPU plugin computes in a narrower type, and this type.
_INTEGERS = {"int64": "int32", "uint64": "uint32"}

# Sends a usage event to Intel through Google Analytics when `openvino` is imported.
_TELEMETRY = "openvino_telemetry"
# A failed conversion names each node by its op and its name; ops without conversion are listed without nodes.
_FAILED_NODE = re.compile(r"ONNX node '<Node\((?P<op>\w+)\): (?P<name>.*?)>'")
_NOT_CONVERTED = re.compile(r"No conversion rule found for operations: (.+)")
_FRIENDLY_NAME = re.compile(r"with friendly_name '([^']*)'")
# Lines of an error that name OpenVINO's own source.
_SOURCE_LINE = re.compile(
    r"^(Exception from |Check '|While validating |While compiling |FrontEnd API failed|Model wasn't|-- |Summary:)"
)
_MOST_CHARACTERS = 400
# Maximum number of ops or nodes that an error names.
_NAMED = 3


class OpenVinoRunner(ArrayRunner):
    """Runner of an ONNX file or model in OpenVINO on the CPU.

    Args:
        source: a path, or the bytes of a model with its weights inside. A path is required if weights are external.
        runner: a key of ``PRECISIONS``; "openvino" computes in float32.
        threads: number of threads; 0 for OpenVINO's default, one per core.

    Raises:
        RuntimeUnavailable: OpenVINO is not installed, or it has no conversion for an op of the model.
        GraphError: OpenVINO refuses the model.
        InputError: an input or output of the model is not a tensor of numbers.
    """

    def __init__(self, source: PathLike | bytes, runner: str = "openvino", threads: int = 0) -> None:
        super().__init__()
        self.name = title_of_runner(runner)
        if isinstance(source, bytes):
            proto = onnx.ModelProto.FromString(source)
        else:
            self.name += f" ({os.path.basename(source)})"
            proto = load_onnx(source, external_data=False)
        if reason := explain_missing_openvino():
            raise RuntimeUnavailable(reason)
        self._set_specs(proto.graph)
        for spec in (*self.inputs, *self.outputs):
            if spec.dtype and spec.dtype not in DTYPES:
                raise InputError(
                    f"{self.name}: {spec.name!r} is {spec.dtype}, but only tensors of numbers are supported"
                )
        self._library = import_openvino()
        compiled = self._compile(source, proto, openvino_settings(runner) | _thread_setting(threads))
        self._places = self._match_inputs(compiled)
        if len(compiled.outputs) != len(self.outputs):
            raise GraphError(
                f"{self.name} has {len(compiled.outputs)} outputs after the conversion, but the file has"
                f" {len(self.outputs)}"
            )
        self._compiled = compiled
        self._request = compiled.create_infer_request()

    def _match_inputs(self, compiled: Any) -> dict[int, str]:
        """Find the name of each input. OpenVINO drops inputs that no node reads, and a tensor may have several names.

        Returns:
            Place of an input in OpenVINO -> name in the file.
        """
        places = dict[int, str]()
        for place, port in enumerate(compiled.inputs):
            names = port.get_names()
            known = [spec.name for spec in self.inputs if spec.name in names]
            if not known:
                raise GraphError(f"{self.name} has an input {sorted(names)} after the conversion that the file lacks")
            places[place] = known[0]
        return places

    def _compile(self, source: PathLike | bytes, proto: onnx.ModelProto, settings: dict[str, Any]) -> Any:
        core = _open_core()
        try:
            model = core.read_model(source if isinstance(source, bytes) else os.fspath(source))
            return core.compile_model(model, "CPU", settings)
        except Exception as error:
            # OpenVINO's errors have no class of their own.
            text = str(error)
            kind = RuntimeUnavailable if _NOT_CONVERTED.search(text) else GraphError
            raise kind(f"{self.name} can't load the model: {describe_error(text, proto)}") from error

    def _run_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        held = self._bind_arrays(self._request, arrays)
        self._infer(self._request)
        results = (self._request.get_output_tensor(place).data for place in range(len(self.outputs)))
        outputs = {
            spec.name: _from_openvino(value, spec.dtype) for spec, value in zip(self.outputs, results, strict=True)
        }
        # OpenVINO reads the memory of the arrays until the run is over.
        del held
        return outputs

    def _bind_arrays(self, request: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
        """Bind the arrays as inputs of a request.

        Returns:
            Objects that must stay alive until the run is over.
        """
        held = []
        for place, name in self._places.items():
            if wide := describe_wide_integers(arrays[name]):
                raise InputError(f"{self.name} does not take input {name!r}: {wide}")
            # OpenVINO refuses to share memory that it may not write.
            array = np.asarray(arrays[name], order="C")
            tensor = _as_openvino(self._library, array if array.flags.writeable else array.copy())
            request.set_input_tensor(place, tensor)
            held.append(tensor)
        return held

    def _infer(self, request: Any) -> None:
        try:
            request.infer()
        except Exception as error:
            raise InputError(
                f"{self.name} does not run the model on these inputs: {describe_error(str(error))}"
            ) from error

    def _bind_run(self, tensors: Tensors) -> Callable[[], None]:
        arrays = {name: as_numpy(tensor.cpu().contiguous()) for name, tensor in tensors.items()}
        # Later calls of ``infer`` bind other inputs, so the bound run has a request of its own.
        request = self._compiled.create_infer_request()
        held = self._bind_arrays(request, arrays)

        def run_once() -> None:
            self._infer(request)

        # The request holds only addresses, so the returned function keeps the tensors alive.
        run_once.held = held  # type: ignore[attr-defined]
        return run_once

    def _free_model(self) -> None:
        del self._request, self._compiled


def title_of_runner(runner: str) -> str:
    """Build the name of a runner in tables.

    Args:
        runner: a key of ``PRECISIONS``.

    Returns:
        "OpenVINO", or for example "OpenVINO bf16".
    """
    return runner.replace("openvino", TITLE).replace("-", " ")


def explain_missing_openvino() -> str | None:
    """Explain why OpenVINO can't be used here, without importing it.

    Returns:
        One line that says what to install; None if OpenVINO is installed.
    """
    if importlib.util.find_spec("openvino") is None:
        return MISSING
    return None


def openvino_settings(runner: str) -> dict[str, Any]:
    """Return the settings of a runner for one request at a time.

    Accuracy mode keeps OpenVINO from quantizing activations, and the latency hint makes one stream of all threads.

    Args:
        runner: a key of ``PRECISIONS``.

    Returns:
        Property -> value.
    """
    precision = PRECISIONS[runner]
    mode = "ACCURACY" if precision == "f32" else "PERFORMANCE"
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "EXECUTION_MODE_HINT": mode,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # Threads that are pinned to cores would compete with other processes for these cores.
        "ENABLE_CPU_PINNING": False,
    }


@functools.cache
def import_openvino() -> Any:
    """Import OpenVINO without its telemetry.

    The import of the package sends a usage event, unless its telemetry package is missing.

    Returns:
        The module ``openvino``.

    Raises:
        RuntimeUnavailable: the package is broken.
    """
    known = _TELEMETRY in sys.modules
    if not known:
        # An entry of None makes an import fail, and OpenVINO then uses its own stand-in that sends nothing.
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    except ImportError as error:
        raise RuntimeUnavailable(f"OpenVINO can't be imported: {error}") from error
    finally:
        if not known:
            del sys.modules[_TELEMETRY]


def describe_error(text: str, proto: onnx.ModelProto | None = None) -> str:
    """Shorten an error of OpenVINO, which names its own source files, to the nodes and the reason.

    Args:
        proto: the model, in which nodes are looked up by their op.

    Returns:
        One line of at most 400 characters.
    """
    if (unknown := _NOT_CONVERTED.search(text)) is not None:
        ops = [op.strip() for op in unknown[1].split(",")]
        listed = [_describe_op(op, proto) for op in ops[:_NAMED]]
        return f"it has no conversion for {', '.join(listed)}{', …' if len(ops) > _NAMED else ''}"[:_MOST_CHARACTERS]
    reasons = [line.strip() for line in text.splitlines()]
    reasons = [line for line in reasons if line and not _SOURCE_LINE.match(line)]
    reason = " ".join(dict.fromkeys(reasons)) or " ".join(text.split())
    if (failed := _FAILED_NODE.search(text)) is not None:
        place = f"{failed['op']} {failed['name']}".strip()
    else:
        friendly = _FRIENDLY_NAME.findall(text)
        place = friendly[-1] if friendly else ""
    return f"{place}: {reason}"[:_MOST_CHARACTERS] if place else reason[:_MOST_CHARACTERS]


def describe_limits(proto: onnx.ModelProto) -> str:
    """Describe the limit of OpenVINO's CPU plugin that makes a correct file differ.

    Returns:
        One phrase; "" if the model has no float64 tensors.
    """
    if onnx.TensorProto.DOUBLE in _elem_types(proto):
        return "OpenVINO's CPU plugin computes float64 in float32"
    return ""


def describe_wide_integers(array: np.ndarray) -> str:
    """Describe integers that OpenVINO's CPU plugin would silently turn into others.

    Returns:
        One phrase; "" if there are none.
    """
    narrow = _INTEGERS.get(array.dtype.name)
    if narrow is None or not array.size:
        return ""
    limits = np.iinfo(narrow)
    if limits.min <= array.min() and array.max() <= limits.max:
        return ""
    return f"it has values from {array.min()} to {array.max()}, but OpenVINO computes {array.dtype} in {narrow}"


def _elem_types(proto: onnx.ModelProto) -> Iterator[int]:
    """List the types of inputs, outputs and weights, and of the results of casts."""
    yield from (value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output))
    for body in iter_bodies(proto):
        yield from (tensor.data_type for tensor in getattr(body, "initializer", ()))
        for node in body.node:
            yield from (attribute.i for attribute in node.attribute if attribute.name == "to")


def _describe_op(op: str, proto: onnx.ModelProto | None) -> str:
    """Describe an op that OpenVINO calls ``DOMAIN.Op`` or ``Op-OPSET``, with the name of its first node."""
    title = op.split("-")[0]
    short = title.rpartition(".")[2]
    nodes = [] if proto is None else [n for body in iter_bodies(proto) for n in body.node if n.op_type == short]
    if not nodes:
        return title
    first = nodes[0].name or f"the node that computes {nodes[0].output[0]!r}"
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"{title} ({first}{more})"


@functools.cache
def _open_core() -> Any:
    return import_openvino().Core()


def _thread_setting(threads: int) -> dict[str, int]:
    if threads:
        return {"INFERENCE_NUM_THREADS": threads}
    return {}


def _as_openvino(library: Any, array: np.ndarray) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return library.Tensor(array.view(np.uint16), library.Shape(array.shape), library.Type.bf16)
    return library.Tensor(array, shared_memory=True)


def _from_openvino(value: np.ndarray, dtype: str) -> np.ndarray:
    """Copy a result out of OpenVINO's memory, which the next run overwrites."""
    copied = np.array(value)
    if dtype == "bfloat16" and copied.dtype.itemsize == 2:
        return copied.view(ml_dtypes.bfloat16)
    return copied
