"""What other tools make of the plain export; each writes a file, or raises what it raises."""

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
    """For the models that it has a name for, told of their heads and width; the others are left as they are, which is
    no peer."""
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
    return ", ".join(f"{name} {version(name)}" for name in ("onnxslim", "onnxsim"))
