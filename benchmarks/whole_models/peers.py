"""Optimize the plain export with other tools; each writes a file, or raises its own exception."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import onnx

from normdeploy.verbs.bench.peer_optimizers import optimize_with_onnxsim, optimize_with_onnxslim

from .subjects import Subject


def _by(tool: Callable[[onnx.ModelProto], onnx.ModelProto]) -> Callable[[Path, Path, Subject], None]:
    return lambda plain, out, subject: onnx.save(tool(onnx.load(plain)), out)


def ort_transformers(plain: Path, out: Path, subject: Subject) -> None:
    """Optimize models that the tool has a name for, with their heads and width; it would leave others unchanged.

    Raises:
        LookupError: the tool has no name for the model.
    """
    from onnxruntime.transformers.optimizer import optimize_model

    if not subject.kind:
        raise LookupError("no name for such a model")
    optimize_model(
        str(plain), subject.kind, num_heads=subject.heads, hidden_size=subject.width, opt_level=0
    ).save_model_to_file(str(out))


PEERS: dict[str, Callable[[Path, Path, Subject], None]] = {
    "onnxslim": _by(optimize_with_onnxslim),
    "onnxsim": _by(optimize_with_onnxsim),
    "onnxruntime.transformers": ort_transformers,
}


def versions() -> str:
    """List the versions of the peers.

    Returns:
        text.
    """
    return ", ".join(f"{name} {version(name)}" for name in ("onnxslim", "onnxsim"))
