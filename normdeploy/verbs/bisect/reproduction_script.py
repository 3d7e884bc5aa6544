"""Write the script that runs a reproduction in onnxruntime, OpenVINO or onnxruntime-web and compares its result with
float64.
"""

from __future__ import annotations

from ...environment import WEB
from ...runtimes.openvino_runner import PRECISIONS

_SCRIPT = '''"""{title}

Runs model.onnx on inputs.npz in {runtime} and compares with expected.npz, the float64 values.
Needs numpy, onnx and {needs}. Exit code 1: the error is larger than allowed.
"""

{imports}

here = pathlib.Path(__file__).parent
check = json.loads((here / "check.json").read_text(encoding="utf-8"))
with np.load(here / "inputs.npz") as held:
    arrays = dict(held)
with np.load(here / "expected.npz") as held:
    expected = held["expected"]

model = onnx.load(here / "model.onnx", load_external_data=False)
onnx_types = {{v.name: v.type.tensor_type.elem_type for v in model.graph.input}}
{run}
if got.size != expected.size:
    print(f"{{check['output']}}: its shape is {{list(got.shape)}}, expected {{list(expected.shape)}}")
    sys.exit(1)
got = got.reshape(expected.shape)
finite = np.isfinite(got) & np.isfinite(expected)
error = float(np.abs(np.where(finite, got, 0) - np.where(finite, expected, 0)).max(initial=0))
broken = int((~finite & ~(np.isnan(got) & np.isnan(expected)) & (got != expected)).sum())
more = f", {{broken}} elements not finite" if broken else ""
print(f"{{check['output']}}: error {{error:.6g}}, allowed {{check['allowed']:.6g}}{{more}}")
sys.exit(1 if broken or error > check["allowed"] else 0)
'''
_IMPORTS = """\
import json
import os
import pathlib
import sys

{silence}

import numpy as np
import onnx
import {module} as runtime"""
# Parts of the script for each runtime.
_SILENCE_ORT = """\
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at the import of onnxruntime; 0 keeps its telemetry on"""
_RUN_ORT = """\
options = runtime.SessionOptions()
level = runtime.GraphOptimizationLevel
options.graph_optimization_level = level.ORT_ENABLE_ALL if check["optimizer"] else level.ORT_DISABLE_ALL
session = runtime.InferenceSession(str(here / "model.onnx"), options, providers=[check["provider"]])


def value_of(name):
    array = np.ascontiguousarray(arrays[check["inputs"][name]])
    if onnx_types[name] == onnx.TensorProto.BFLOAT16:
        return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return runtime.OrtValue.ortvalue_from_numpy(array)


(result,) = session.run_with_ort_values([check["output"]], {name: value_of(name) for name in check["inputs"]})
if result.data_type() == "tensor(bfloat16)":
    sys.exit("the result is bfloat16, which numpy does not support: add a Cast to float32 to read it")
got = result.numpy().astype(np.float64)"""
_SILENCE_OPENVINO = """\
sys.modules["openvino_telemetry"] = None  # the import of openvino then sends no usage event"""
_RUN_OPENVINO = """\
core = runtime.Core()
settings = {"INFERENCE_PRECISION_HINT": check["precision"], "EXECUTION_MODE_HINT": check["mode"]}
request = core.compile_model(core.read_model(here / "model.onnx"), "CPU", settings).create_infer_request()


def value_of(name):
    array = np.array(arrays[check["inputs"][name]])
    if onnx_types[name] == onnx.TensorProto.BFLOAT16:
        return runtime.Tensor(array.view(np.uint16), runtime.Shape(array.shape), runtime.Type.bf16)
    return runtime.Tensor(array)


for name in check["inputs"]:
    request.set_tensor(name, value_of(name))
request.infer()
result = request.get_tensor(check["output"])
if result.element_type == runtime.Type.bf16:
    sys.exit("the result is bfloat16, which numpy does not support: add a Cast to float32 to read it")
got = result.data.astype(np.float64)"""

_NEEDS_WEB = "Node.js, with onnxruntime-web in the working folder (`npm install onnxruntime-web`)"
_IMPORTS_WEB = """\
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnx"""
_RUN_WEB = '''\
PROGRAM = """
const fs = require("fs");
const ort = require("onnxruntime-web");
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
  int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
};
const { model, external, inputs, output, folder } = JSON.parse(process.argv[1]);
ort.env.wasm.numThreads = 1;
(async () => {
  const session = await ort.InferenceSession.create(model, { externalData: external });
  const feeds = {};
  for (const { name, type, dims, file } of inputs) {
    const bytes = new Uint8Array(fs.readFileSync(file));
    feeds[name] = new ort.Tensor(type, new ARRAYS[type](bytes.buffer), dims);
  }
  const { type, dims, data } = (await session.run(feeds, [output]))[output];
  fs.writeFileSync(`${folder}/result.bin`, new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  fs.writeFileSync(`${folder}/result.json`, JSON.stringify({ type, dims }));
})();
"""
with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    inputs = []
    for name, key in check["inputs"].items():
        array = np.ascontiguousarray(arrays[key])
        array.tofile(folder / key)
        inputs.append({"name": name, "type": array.dtype.name, "dims": array.shape, "file": str(folder / key)})
    weights = here / "model.data"
    request = {
        "model": str(here / "model.onnx"),
        "external": [{"path": weights.name, "data": str(weights)}] if weights.exists() else [],
        "inputs": inputs,
        "output": check["output"],
        "folder": made,
    }
    subprocess.run(["node", "-e", PROGRAM, json.dumps(request)], check=True)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    got = np.fromfile(folder / "result.bin", result["type"]).reshape(result["dims"]).astype(np.float64)'''


def write_script(provider: str, title: str) -> str:
    """Write the script.

    Args:
        provider: "cpu" or "cuda" for onnxruntime, or a key of ``BUILTIN_RUNNERS``.
        title: first line of the script; characters that a docstring can't hold become "?".

    Returns:
        Python code.
    """
    safe = "".join(c if c.isprintable() and c not in '\\"' else "?" for c in title)
    if provider in PRECISIONS:
        imports = _IMPORTS.format(module="openvino", silence=_SILENCE_OPENVINO)
        return _SCRIPT.format(title=safe, runtime="OpenVINO", needs="OpenVINO", imports=imports, run=_RUN_OPENVINO)
    if provider == WEB:
        return _SCRIPT.format(title=safe, runtime=WEB, needs=_NEEDS_WEB, imports=_IMPORTS_WEB, run=_RUN_WEB)
    imports = _IMPORTS.format(module="onnxruntime", silence=_SILENCE_ORT)
    return _SCRIPT.format(title=safe, runtime="onnxruntime", needs="onnxruntime", imports=imports, run=_RUN_ORT)
