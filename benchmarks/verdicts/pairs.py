"""Build the pairs: a reference (a module, a .pt2 or a file), and a file that another tool made from it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from .converters import CONVERTERS, torchao
from .deployed import DECODER, DOUBLES, PIXELS, SENTENCES, SETTLING
from .files import Source, sources
from .nets import PLAIN, Net
from .sequences import SEQUENCES
from .tools import EXPORTERS, TOOLS, Feeds, applied, dynamic_shapes, quieted
from .vision import VISION

NETS: tuple[Net, ...] = (*VISION, *SEQUENCES, *PLAIN)
MODULE, PROGRAM, FILE = "module", ".pt2", "file"
_EXPORTERS = {**EXPORTERS, "torchao PT2E": torchao}
_TOOLS = {**TOOLS, **CONVERTERS}
# Number of calibration samples of an int8 file
SAMPLES = 128


@dataclass(frozen=True)
class Made:
    """Pair on disk.

    Attributes:
        reference: first argument of ``verify``.
        feeds: inputs by the file's names, at the example's sizes.
        other_feeds: inputs at other sizes.
        truth: computes outputs independently of ``verify``; None if the reference file's own run does.
        call: keyword arguments of ``verify``.
    """

    reference: Any
    file: Path
    feeds: list[Feeds]
    other_feeds: list[Feeds]
    truth: Callable[[Feeds], list[np.ndarray]] | None
    reference_file: Path | None = None
    call: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """One pair. ``make`` writes it into a folder; it raises the tools' exceptions."""

    name: str
    kind: str
    made_by: str
    make: Callable[[Path], Made]

    @property
    def order(self) -> str:
        """Return a sort key that mixes all kinds."""
        return hashlib.sha256(self.name.encode()).hexdigest()


def pairs() -> list[Pair]:
    """List every pair, in an order that mixes the kinds.

    Returns:
        pairs.
    """
    every = [*_of_nets(), *_of_deployments(), *_of_files()]
    return sorted((pair for pair in every if pair.name not in LEFT_OUT), key=lambda pair: pair.order)


# Combinations that their tool can't make, and why.
LEFT_OUT = {
    "BERT with places | module | dynamo, onnxruntime transformers, fp16": "onnxruntime crashes when it opens the file",
    "If (scripted) | file | torchscript, onnxsim": "onnxsim: a failed assertion (eraseOutput)",
    "Loop (scripted) | file | torchscript, onnxsim": "onnxsim: a failed assertion (eraseOutput)",
    "Llama block | .pt2 | torchscript, fixed sizes": "torch: no rms_norm in opset 17",
    "TransformerEncoderLayer | file | torchscript, onnxruntime basic": "torch: the batch is baked in",
    "log-softmax | module | dynamo": "torch.export: a failed guard on the size",
    "package: silero_vad_16k_op15 | file | onnxsim": "onnxsim: nodes out of order",
    "package: silero_vad_half | file | onnxsim": "onnxsim: nodes out of order",
    "sentence embedding | module | dynamo, onnxruntime int8 dynamic": "onnxruntime's quantizer: shapes that disagree",
    "vision transformer | file | dynamo, onnxruntime fp16": "onnxruntime crashes when it opens the file",
}


# ------------------------------------------------------------------ nets

_TURNS = (
    "onnxsim",
    "onnxruntime fp16",
    "onnxslim",
    "onnxruntime int8 dynamic",
    "onnxruntime basic",
    "onnxruntime int8 static",
    "onnxruntime extended",
    "onnxruntime fp16, float io",
)


def _of_nets() -> Iterator[Pair]:
    for number, net in enumerate(NETS):
        if net.routes == "torchscript":
            # Only a file shows what a scripted branch or loop is, because torch.export does not trace the module.
            for tool in ("onnxsim", "onnxslim", "onnxruntime basic"):
                yield _derived(net, net.routes, tool, FILE)
            continue
        main = net.routes or "dynamo"
        other = net.routes or "torchscript"
        yield _exported(net, main, MODULE, open_dims=True)
        if number % 3 == 1:
            yield _exported(net, other, PROGRAM, open_dims=number % 2 == 0)
        else:
            tool = _TURNS[number % len(_TURNS)]
            kind = (MODULE, FILE)[number // len(_TURNS) % 2]
            yield _derived(net, main if number % 4 else other, tool, kind)


_BY_NAME = {net.name: net for net in NETS}
# Nets, exporters, tools ("" is none) and kinds of reference that the turns do not reach.
_DEPLOYED: tuple[tuple[Net, str, str, str], ...] = (
    (DECODER, "dynamo", "", MODULE),
    (DECODER, "dynamo", "onnxslim", FILE),
    (DECODER, "dynamo", "onnxruntime basic", FILE),
    (DOUBLES, "dynamo", "", MODULE),
    (DOUBLES, "torchscript", "onnxsim", FILE),
    (DOUBLES, "dynamo", "onnxruntime extended", FILE),
    (PIXELS, "dynamo", "", MODULE),
    (PIXELS, "dynamo", "onnxruntime int8 static", MODULE),
    (PIXELS, "torchscript", "onnxruntime fp16, float io", FILE),
    (SENTENCES, "dynamo", "", MODULE),
    (SENTENCES, "dynamo", "onnxruntime basic", FILE),
    (SETTLING, "torchscript", "onnxslim", FILE),
    (SETTLING, "torchscript", "onnxruntime basic", FILE),
    (_BY_NAME["BERT with places"], "dynamo", "onnxruntime transformers", MODULE),
    (_BY_NAME["BERT with places"], "dynamo", "onnxruntime transformers, fp16", MODULE),
    (_BY_NAME["attention with a mask"], "torchscript", "onnxruntime transformers", FILE),
    (_BY_NAME["vision transformer"], "dynamo", "onnxruntime transformers", FILE),
    (SENTENCES, "dynamo", "onnxruntime transformers", FILE),
    (_BY_NAME["Llama block"], "dynamo", "onnxruntime 4 bits", MODULE),
    (_BY_NAME["BERT with places"], "dynamo", "onnxruntime 4 bits, symmetric", FILE),
    (_BY_NAME["mixer"], "dynamo", "onnxruntime 4 bits, pairs", MODULE),
    (_BY_NAME["segmentation"], "dynamo", "onnxruntime int8 static, operators", MODULE),
    (_BY_NAME["UNet"], "torchscript", "onnxruntime int8 static, operators", FILE),
    (_BY_NAME["squeeze and excite"], "torchao PT2E", "", MODULE),
    (_BY_NAME["autoencoder"], "torchao PT2E", "", MODULE),
    (_BY_NAME["wave features"], "torchscript", "onnx opset 21", FILE),
    (_BY_NAME["recommender"], "torchscript", "onnxoptimizer", MODULE),
)


def _of_deployments() -> Iterator[Pair]:
    for net, exporter, tool, kind in _DEPLOYED:
        yield _derived(net, exporter, tool, kind) if tool else _exported(net, exporter, kind, open_dims=True)


def _exported(net: Net, exporter: str, kind: str, *, open_dims: bool) -> Pair:
    words = "" if open_dims else ", fixed sizes"
    # A file of the same exporter at the same sizes would repeat the pair.
    name = f"{net.name} | {kind} | {exporter}{words}"
    return Pair(name, kind, exporter, lambda folder: _write(net, exporter, "", kind, open_dims, folder))


def _derived(net: Net, exporter: str, tool: str, kind: str) -> Pair:
    name = f"{net.name} | {kind} | {exporter}, {tool}"
    return Pair(name, kind, tool, lambda folder: _write(net, exporter, tool, kind, True, folder))


def _write(net: Net, exporter: str, tool: str, kind: str, open_dims: bool, folder: Path) -> Made:
    module = net.build()
    feeds = [_named(net, net.args(seed)) for seed in range(8)]
    others = [_named(net, net.args(seed, net.other_dims())) for seed in range(8, 12)] if net.dims and open_dims else []
    with quieted():
        exported = _EXPORTERS[exporter](net, open_dims)
    path, file = folder / "reference.onnx", folder / "file.onnx"
    onnx.save(exported, path)
    # Ranges from few inputs would saturate on others.
    samples = [_named(net, net.args(seed)) for seed in range(100, 100 + SAMPLES)]
    onnx.save(applied(_TOOLS[tool], exported, samples) if tool else exported, file)
    integers = any(not i.dtype.startswith("float") for i in net.inputs)
    call: dict[str, Any] = {"inputs": net.specs} if integers else {"args": net.args()}
    reference: Any = module
    if kind == PROGRAM:
        reference, call = folder / "model.pt2", {}
        with quieted():
            shapes = dynamic_shapes(net) if open_dims else None
            torch.export.save(torch.export.export(module, net.args(), dynamic_shapes=shapes), reference)
    elif kind == FILE:
        # A file states its own sizes; only its user knows the range of integers.
        reference, call = path, {"inputs": net.specs} if integers else {}
    return Made(reference, file, feeds, others, _eager(net.build()), path, call)


def _named(net: Net, args: tuple[torch.Tensor, ...]) -> Feeds:
    return {i.name: a.numpy() for i, a in zip(net.inputs, args, strict=True)}


def _eager(module: nn.Module) -> Callable[[Feeds], list[np.ndarray]]:
    """Return a function that runs the module in float64."""
    wide = module.double()

    def answer(feeds: Feeds) -> list[np.ndarray]:
        """Run the module.

        Returns:
            outputs.
        """
        args = [torch.from_numpy(a) for a in feeds.values()]
        args = [a.double() if a.is_floating_point() else a for a in args]
        with torch.no_grad():
            made = wide(*args)
        return [t.numpy() for t in (made if isinstance(made, tuple | list) else (made,))]

    return answer


# ------------------------------------------------------------------ files

_FILE_TURNS = ("onnxslim", "onnxruntime extended", "onnxsim", "onnxruntime fp16", "onnxruntime basic", "onnxscript")


def _of_files() -> Iterator[Pair]:
    for number, source in enumerate(sources()):
        for tool in _chosen(source, number):
            yield Pair(f"{source.name} | {FILE} | {tool}", FILE, tool, _writer(source, tool))


def _chosen(source: Source, number: int) -> Iterable[str]:
    return source.tools or (_FILE_TURNS[number % len(_FILE_TURNS)],)


def _writer(source: Source, tool: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        """Write the pair.

        Returns:
            the pair on disk.
        """
        proto = source.load()
        feeds, others = source.feeds(proto)
        path, file = folder / "reference.onnx", folder / "file.onnx"
        onnx.save(proto, path)
        onnx.save(applied(_TOOLS[tool], proto, feeds), file)
        call = {"inputs": list(source.specs)} if source.specs else {}
        return Made(path, file, feeds, others, None, path, call)

    return make
