"""What other tools make of the plain export; each writes a file, or raises what it raises."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import onnx

from .subjects import Subject


def onnxslim(plain: Path, out: Path, subject: Subject) -> None:
    onnx.save(import_module("onnxslim").slim(onnx.load(plain)), out)


def onnxsim(plain: Path, out: Path, subject: Subject) -> None:
    onnx.save(import_module("onnxsim").simplify(onnx.load(plain))[0], out)


def ort_transformers(plain: Path, out: Path, subject: Subject) -> None:
    """For the models that it has a name for; the others are left as they are, which is no peer."""
    from onnxruntime.transformers.optimizer import optimize_model

    if not subject.kind:
        raise LookupError("no name for such a model")
    optimize_model(str(plain), subject.kind, num_heads=subject.heads, hidden_size=subject.width, opt_level=0).save_model_to_file(str(out))


PEERS: dict[str, Callable[[Path, Path, Subject], None]] = {
    "onnxslim": onnxslim,
    "onnxsim": onnxsim,
    "onnxruntime.transformers": ort_transformers,
}


def versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("onnxslim", "onnxsim"))
