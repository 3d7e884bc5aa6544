"""Write the smallest failing model as a self-contained folder: the model, its inputs, the right result and a script."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx

from ...storage.folder_replacement import replace_folder_atomically, require_empty_dir
from ...storage.npz_files import write_npz
from ...types import Array, Arrays, PathLike

# Maximum bytes of weights (1 GiB) that are written inside the ONNX file.
_INLINE = 1 << 30

SCRIPT = '''"""{title}

Runs model.onnx on inputs.npz in onnxruntime and compares with expected.npz, the float64 values.
Needs numpy, onnx and onnxruntime. Exit code 1: the error is larger than allowed.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at the import of onnxruntime; 0 keeps its telemetry on

import numpy as np
import onnx
import onnxruntime as ort

here = pathlib.Path(__file__).parent
check = json.loads((here / "check.json").read_text(encoding="utf-8"))
with np.load(here / "inputs.npz") as held:
    arrays = dict(held)
with np.load(here / "expected.npz") as held:
    expected = held["expected"]

model = onnx.load(here / "model.onnx", load_external_data=False)
onnx_types = {{v.name: v.type.tensor_type.elem_type for v in model.graph.input}}
options = ort.SessionOptions()
level = ort.GraphOptimizationLevel
options.graph_optimization_level = level.ORT_ENABLE_ALL if check["optimizer"] else level.ORT_DISABLE_ALL
session = ort.InferenceSession(str(here / "model.onnx"), options, providers=[check["provider"]])


def value_of(name):
    array = np.ascontiguousarray(arrays[check["inputs"][name]])
    if onnx_types[name] == onnx.TensorProto.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


(result,) = session.run_with_ort_values([check["output"]], {{name: value_of(name) for name in check["inputs"]}})
if result.data_type() == "tensor(bfloat16)":
    sys.exit("the result is bfloat16, which numpy does not support: add a Cast to float32 to read it")
got = result.numpy().astype(np.float64)
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


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Model that contains only the nodes at fault, with its inputs and its right result.

    Attributes:
        inputs: name -> array, in the file's types.
        expected: float64 value of ``output``.
        allowed: allowed absolute error of ``output``.
        optimizer: True to run the model with onnxruntime's optimizer.
        provider: "cpu" or "cuda".
        title: the cause, which the script prints.
    """

    model: onnx.ModelProto
    inputs: Arrays
    output: str
    expected: Array
    allowed: float
    optimizer: bool
    provider: str
    title: str

    def write(self, folder: PathLike) -> Path:
        """Write the model, its data and the script to a new or empty folder. The folder appears only when it is
        complete.

        Returns:
            The folder.

        Raises:
            NormdeployError: the folder is not empty, or can't be written.
        """
        target = require_empty_dir(folder)
        with replace_folder_atomically(target) as made:
            self._write_files(made)
        return target

    def _write_files(self, folder: Path) -> None:
        large = sum(t.ByteSize() for t in self.model.graph.initializer) > _INLINE
        onnx.save(self.model, folder / "model.onnx", save_as_external_data=large, location="model.data")
        # Inputs are numbered, because not every name is allowed inside a zip file.
        keys = {name: f"input_{i}" for i, name in enumerate(self.inputs)}
        write_npz(folder / "inputs.npz", {keys[name]: value for name, value in self.inputs.items()})
        write_npz(folder / "expected.npz", {"expected": self.expected})
        providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
        check = {
            "output": self.output,
            "allowed": self.allowed,
            "optimizer": self.optimizer,
            "provider": providers[self.provider],
            "inputs": keys,
            "cause": self.title,
        }
        (folder / "check.json").write_text(json.dumps(check, indent=2) + "\n", encoding="utf-8")
        title = "".join(c if c.isprintable() and c not in '\\"' else "?" for c in self.title)
        (folder / "reproduce.py").write_text(SCRIPT.format(title=title), encoding="utf-8")
