"""Run ONNX files in onnxruntime-web, the onnxruntime of browsers, in Node.js.

Node.js runs the same WebAssembly as a browser that imports ``onnxruntime-web/wasm``, with the graph optimizations that
are the default there. One thread computes by default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ..environment import WEB
from ..errors import GraphError, InputError, RuntimeCrash, RuntimeUnavailable
from ..ort_sessions.session import shorten_ort_message
from ..storage.onnx_files import iter_tensors, load_onnx
from ..types import PathLike, Tensors
from .array_runner import ArrayRunner
from .tensor_spec import DTYPES, as_numpy
from .web_process import WebProcess, WebProcessError

# JavaScript has no array of bfloat16, and onnxruntime-web no tensor of it.
TYPES = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")
# Maximum seconds of a load or a run.
SECONDS = 600.0
# Start of an error of onnxruntime-web. The code is that of onnxruntime.
_CODE = re.compile(r"^.*?ERROR_CODE: (?P<code>\d+), ERROR_MESSAGE: ")
_NOT_IMPLEMENTED = "9"
# Start of an error if files of the package are missing or do not run in this version of Node.js.
_NO_BACKEND = "no available backend found"
# Parts of errors of JavaScript and WebAssembly that mean that the memory does not suffice.
_MEMORY = ("std::bad_alloc", "Array buffer allocation failed", 'The value of "size" is out of range')
_MOST_CHARACTERS = 400


class WebRunner(ArrayRunner):
    """Runner of an ONNX file or model in onnxruntime-web.

    Args:
        source: a path, or the bytes of a model with its weights inside. A path is required if weights are external.
        threads: number of threads; 0 for one.
        seconds: time limit of the load and of each run.

    Raises:
        RuntimeUnavailable: Node.js or onnxruntime-web is missing, or onnxruntime-web has no kernel for an op of the
            model or no tensors of the type of an input or output.
        GraphError: onnxruntime-web refuses the model.
        RuntimeCrash: Node.js ends while it loads the model, or takes too long.
    """

    def __init__(self, source: PathLike | bytes, threads: int = 0, seconds: float = SECONDS) -> None:
        super().__init__()
        self.name = WEB
        if isinstance(source, bytes):
            proto = onnx.ModelProto.FromString(source)
        else:
            self.name += f" ({os.path.basename(source)})"
            proto = load_onnx(source, external_data=False)
        self._set_specs(proto.graph)
        self._require_types(proto.graph)
        self._bound = 0
        self._process = WebProcess(threads or 1, seconds)
        try:
            self._open(source, proto)
        except BaseException:
            self._process.close()
            raise

    def _require_types(self, graph: onnx.GraphProto) -> None:
        values = {value.name: value for value in (*graph.input, *graph.output)}
        for spec in (*self.inputs, *self.outputs):
            # An output without a declared type is "" too.
            is_tensor = values[spec.name].type.WhichOneof("value") in (None, "tensor_type")
            if (spec.dtype or not is_tensor) and spec.dtype not in TYPES:
                raise RuntimeUnavailable(
                    f"{self.name}: {spec.name!r} is {spec.dtype or 'not a tensor'}, but only tensors of"
                    f" {', '.join(TYPES)} can be passed or returned; cast {spec.name!r} inside the model"
                )

    def _open(self, source: PathLike | bytes, proto: onnx.ModelProto) -> None:
        try:
            if isinstance(source, bytes):
                self._process.request({"do": "open", "external": []}, [source])
            else:
                # A link to a file has its weights in the folder of the link, as `load_onnx` reads them.
                path = Path(os.path.abspath(source))
                self._process.request({"do": "open", "path": str(path), "external": list_external_data(path, proto)})
        except WebProcessError as error:
            text = str(error)
            if error.ended:
                raise RuntimeCrash(f"{self.name} can't load the model: {text}") from error
            found = _CODE.match(text)
            lacking = text.startswith(_NO_BACKEND) or (found is not None and found["code"] == _NOT_IMPLEMENTED)
            kind = RuntimeUnavailable if lacking else GraphError
            raise kind(f"{self.name} can't load the model: {describe_error(text)}") from error

    def _run_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        answer = self._request_run("run", arrays)
        results = {
            output["name"]: _as_array(output, value)
            for output, value in zip(answer["outputs"], answer["values"], strict=True)
        }
        return {spec.name: results[spec.name] for spec in self.outputs}

    def _bind_run(self, tensors: Tensors) -> Callable[[], None]:
        self._bound += 1
        key = self._bound
        self._request_run("bind", {name: as_numpy(t.cpu().contiguous()) for name, t in tensors.items()}, key)

        def run_once() -> None:
            self._request_run("repeat", {}, key)

        return run_once

    def _request_run(self, action: str, arrays: dict[str, np.ndarray], key: int = 0) -> dict[str, Any]:
        """Send a request. ``key`` identifies inputs that Node.js keeps."""
        inputs = [{"name": n, "type": a.dtype.name, "dims": list(a.shape)} for n, a in arrays.items()]
        try:
            return self._process.request({"do": action, "key": key, "inputs": inputs}, [*arrays.values()])
        except WebProcessError as error:
            raise InputError(
                f"{self.name} does not run the model on these inputs: {describe_error(str(error))}"
            ) from error

    def _free_model(self) -> None:
        self._process.close()


def list_external_data(path: Path, proto: onnx.ModelProto) -> list[dict[str, str]]:
    """List the files of external weights, as the option ``externalData`` of onnxruntime-web takes them.

    Args:
        proto: the model, whose references were checked by `load_onnx`.

    Returns:
        {"path": location in the model, "data": file} for each file.
    """
    tensors = [t for t in iter_tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL]
    entries = (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    return [{"path": name, "data": str(path.parent / name)} for name in dict.fromkeys(e.value for e in entries)]


def describe_error(text: str) -> str:
    """Shorten an error of onnxruntime-web, which is one of onnxruntime behind the name of a function of JavaScript.

    Returns:
        One line of at most 400 characters.
    """
    line = shorten_ort_message(_CODE.sub("", " ".join(text.split())))
    if any(part in line for part in _MEMORY):
        line = f"out of memory, WebAssembly has 4 GiB at most: {line}"
    return line[:_MOST_CHARACTERS]


def _as_array(output: dict[str, Any], value: bytearray) -> np.ndarray:
    return np.frombuffer(value, dtype=output["type"]).reshape(output["dims"])
