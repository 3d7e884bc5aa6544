"""Write the smallest failing model as a self-contained folder: the model, its inputs, the right result and a script."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx

from ...runtimes.openvino_runner import PRECISIONS, openvino_settings
from ...storage.folder_replacement import replace_folder_atomically, require_empty_dir
from ...storage.npz_files import write_npz
from ...types import Array, Arrays, PathLike
from .reproduction_script import write_script

# Maximum bytes of weights (1 GiB) that are written inside the ONNX file.
_INLINE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Model that contains only the nodes at fault, with its inputs and its right result.

    Attributes:
        inputs: name -> array, in the file's types.
        expected: float64 value of ``output``.
        allowed: allowed absolute error of ``output``.
        optimizer: True to run the model with onnxruntime's optimizer.
        provider: "cpu" or "cuda" for onnxruntime, or a key of ``BUILTIN_RUNNERS``.
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
            "inputs": keys,
            "cause": self.title,
        }
        if self.provider in PRECISIONS:
            settings = openvino_settings(self.provider)
            check |= {"precision": settings["INFERENCE_PRECISION_HINT"], "mode": settings["EXECUTION_MODE_HINT"]}
        elif self.provider in providers:
            check |= {"optimizer": self.optimizer, "provider": providers[self.provider]}
        (folder / "check.json").write_text(json.dumps(check, indent=2) + "\n", encoding="utf-8")
        (folder / "reproduce.py").write_text(write_script(self.provider, self.title), encoding="utf-8")
