"""Write the files of other tools for the same model: the plain export and the files of other optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import onnx
import torch

from ...errors import ExportError, InputError
from ...exporting.exporter import silence_torch
from ...model import LoadedModel
from ...storage.onnx_files import load_onnx, save_onnx
from ...types import PathLike
from ..verify.runtime_candidates import NotRun

PLAIN = "plain"


def optimize_with_onnxslim(plain: onnx.ModelProto) -> onnx.ModelProto:
    """Optimize a model with onnxslim.

    Returns:
        The optimized model.
    """
    made: onnx.ModelProto = import_module("onnxslim").slim(plain)
    return made


def optimize_with_onnxsim(plain: onnx.ModelProto) -> onnx.ModelProto:
    """Optimize a model with onnxsim.

    Returns:
        The optimized model.
    """
    made: onnx.ModelProto = import_module("onnxsim").simplify(plain)[0]
    return made


def optimize_with_ort_transformers(plain: onnx.ModelProto, kind: str = "bert") -> onnx.ModelProto:
    """Optimize a model with `onnxruntime.transformers.optimizer`, which detects the number of heads and the hidden
    size.

    onnxruntime's own graph optimizer is not applied to the file, because it runs anyway when the file is loaded.

    Returns:
        The optimized model.
    """
    fusion = import_module("onnxruntime.transformers.optimizer")
    made: onnx.ModelProto = fusion.optimize_by_fusion(onnx.ModelProto.FromString(plain.SerializeToString()), kind).model
    return made


_TOOLS: dict[str, tuple[str, Callable[[onnx.ModelProto], onnx.ModelProto]]] = {
    "onnxslim": ("onnxslim", optimize_with_onnxslim),
    "onnxsim": ("onnxsim", optimize_with_onnxsim),
    "ort-transformers": ("onnxruntime.transformers", optimize_with_ort_transformers),
}
PEERS = (PLAIN, *_TOOLS)


def check_peers(names: Sequence[str]) -> None:
    """Check that each name is one of `PEERS` and that its package is installed.

    Raises:
        InputError: a name is unknown or its package is missing.
    """
    for name in names:
        if name not in PEERS:
            raise InputError(f"unknown tool {name!r} to compare with; choose from {', '.join(PEERS)}")
        if name == PLAIN:
            package = ""
        else:
            package = _TOOLS[name][0].partition(".")[0]
        if package and find_spec(package) is None:
            raise InputError(
                f"{name} is not installed; install it (pip install {package}), or remove it from --against"
            )


def write_peer_files(
    names: Sequence[str], model: LoadedModel | None, files: Sequence[PathLike], folder: Path
) -> tuple[list[Path], list[NotRun]]:
    """Write a file into ``folder`` for each of ``names`` (`PEERS`).

    ``torch.onnx.export`` writes the plain file from ``model``. Without a model, the first of ``files`` is the plain
    file.

    Returns:
        Paths of the files, and the tools that failed, with their reasons.

    Raises:
        InputError: there is neither a model nor an ONNX file.
        ExportError: torch can't write the model.
    """
    if model is None and not files:
        raise InputError("the other tools need a model or an ONNX file to start from; pass one")
    plain = folder / f"{PLAIN}.onnx"
    if model is not None:
        try:
            with silence_torch():
                program = torch.onnx.export(model.program, dynamo=True, verbose=False)
                # Only the old exporter returns None.
                assert program is not None
                program.save(plain)
        except Exception as error:
            # torch raises exceptions of many types without a common base class.
            message = " ".join(str(error).split())[:200]
            raise ExportError(f"torch.onnx.export can't write this model; omit --against: {message}") from error
    proto = load_onnx(plain if model is not None else files[0])
    paths = [plain] if PLAIN in names and model is not None else []
    not_run = []
    if PLAIN in names and model is None:
        not_run.append(NotRun(PLAIN, "without a model, the plain file is the first ONNX file that you passed"))
    for name in names:
        if name == PLAIN:
            continue
        path = folder / f"{name}.onnx"
        try:
            with silence_torch():
                save_onnx(_TOOLS[name][1](onnx.ModelProto.FromString(proto.SerializeToString())), path)
            paths.append(path)
        except Exception as error:
            # The tools raise exceptions of many types without a common base class.
            not_run.append(NotRun(name, f"it failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"))
    return paths, not_run
