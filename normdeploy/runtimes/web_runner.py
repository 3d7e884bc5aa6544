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
from ..ort_sessions.session import ort_error_message
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
_NODE = re.compile(r"^Non-zero status code returned while running (?P<op>\w+) node")
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
                    f"{WEB} has no tensors of the type of {spec.name!r}, {spec.dtype or 'which is not a tensor'}; it"
                    f" has {', '.join(TYPES)}; cast {spec.name!r} inside the model"
                )

    def _open(self, source: PathLike | bytes, proto: onnx.ModelProto) -> None:
        try:
            if isinstance(source, bytes):
                self._process.request({"do": "open", "external": []}, [source])
            else:
                path = Path(source).resolve()
                self._process.request({"do": "open", "path": str(path), "external": list_external_data(path, proto)})
        except WebProcessError as error:
            text = str(error)
            if error.ended:
                raise RuntimeCrash(f"{self.name} can't load the model: {text}") from error
            found = _CODE.match(text)
            kind = RuntimeUnavailable if found and found["code"] == _NOT_IMPLEMENTED else GraphError
            raise kind(f"{self.name} can't load the model: {describe_error(text)}") from error

    def _run_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        answer = self._request_run("run", arrays)
        results = {
            output["name"]: _as_array(output, value)
            for output, value in zip(answer["outputs"], answer["values"], strict=True)
        }
        return {spec.name: results[spec.name] for spec in self.outputs}

    def _bind_run(self, tensors: Tensors) -> Callable[[], None]:
        self._request_run("bind", {name: as_numpy(tensor.cpu().contiguous()) for name, tensor in tensors.items()})

        def run_once() -> None:
            self._request_run("repeat", {})

        return run_once

    def _request_run(self, action: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        inputs = [{"name": n, "type": a.dtype.name, "dims": list(a.shape)} for n, a in arrays.items()]
        try:
            return self._process.request({"do": action, "inputs": inputs}, [*arrays.values()])
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
    text = " ".join(text.split())
    found = _CODE.match(text)
    if found:
        text = text[found.end() :]
    if found and _NODE.match(text):
        text = ort_error_message(f"[ONNXRuntimeError] : {found['code']} : FAIL : {text}")
    return text[:_MOST_CHARACTERS]


def _as_array(output: dict[str, Any], value: bytearray) -> np.ndarray:
    return np.frombuffer(value, dtype=output["type"]).reshape(output["dims"])
