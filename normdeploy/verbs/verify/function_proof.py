"""Prove that an ONNX reference and a file are the same function, before their outputs are compared.

A comparison runs a file on some inputs. The proof (docs/reference/prove.md) is about all inputs, but in exact
arithmetic, so it says nothing about rounding. The two verdicts complete each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from ...errors import NormdeployError
from ...runtimes.trt_runner import is_engine
from ...storage.onnx_files import load_onnx
from ...types import PathLike
from ..prove.file_pair import OpenFile
from ..prove.proof_result import Counterexample, Verdict
from ..prove.prove_function import ProofLimit, prove_files

# Share of a comparison's time limit that the proofs may take in addition
_SHARE = 0.25
# Bytes of the residues of one stored number
_RESIDUES = 64


@dataclass(frozen=True)
class FunctionProof:
    """Verdict of a proof about the reference and one file.

    Attributes:
        file: name of the file.
        verdict: "equal", "equal up to rounding", "different" or "not known"; "" if no proof was tried.
        text: the verdict in one sentence, or why no proof was tried.
        counterexample: an input and the two results that show a difference; "" without one.
        seconds: duration.
    """

    file: str
    verdict: str
    text: str
    counterexample: str = ""
    seconds: float = 0.0

    @property
    def is_proved(self) -> bool:
        """Return True if the file is proved to be the same function, up to the rounding of constants and Casts."""
        return self.verdict in (Verdict.EQUAL, Verdict.ROUNDED)

    @property
    def is_different(self) -> bool:
        """Return True if an input shows that the file is another function."""
        return self.verdict == Verdict.DIFFERENT

    def describe(self) -> str:
        """Describe the proof in one line."""
        return "; ".join(filter(None, (f"proof: {self.file}: {self.text}", self.counterexample)))


def prove_against_reference(
    source: Any, files: Sequence[PathLike], names: Mapping[str, str], max_seconds: float, max_memory: int
) -> tuple[FunctionProof, ...]:
    """Prove that each ONNX file is the same function as an ONNX reference.

    Args:
        source: the reference: a path or a model.
        names: name in a file → name in the reference.
        max_seconds: time limit of the comparison; the proofs may take a quarter of it.
        max_memory: limit in bytes. Larger files are not proved.

    Returns:
        a proof for each ONNX file; () without ONNX files.
    """
    if not isinstance(source, onnx.ModelProto):
        source = os.fspath(source)
    paths = [file for file in files if not is_engine(file)]
    deadline = time.process_time() + _SHARE * max_seconds
    return tuple(_iter_proofs(source, paths, {ours: theirs for theirs, ours in names.items()}, deadline, max_memory))


def _iter_proofs(
    source: str | onnx.ModelProto, paths: Sequence[PathLike], names: Mapping[str, str], deadline: float, max_memory: int
) -> Iterator[FunctionProof]:
    for path in paths:
        name = os.path.basename(path)
        try:
            yield _prove_file(name, source, path, names, deadline, max_memory)
        # The comparison reports broken files and names that do not match.
        except NormdeployError as error:
            yield FunctionProof(name, "", f"not tried: {error}")


def _prove_file(
    name: str,
    source: str | onnx.ModelProto,
    path: PathLike,
    names: Mapping[str, str],
    deadline: float,
    max_memory: int,
) -> FunctionProof:
    limit = ProofLimit.from_seconds(max(deadline - time.process_time(), 0.0))
    if _is_too_large(source, max_memory) or _is_too_large(path, max_memory):
        return FunctionProof(name, "", "not tried: the file is too large for the memory limit")
    first, second = OpenFile(source, "the reference"), OpenFile(load_onnx(path), "the file")
    if first.is_quantized != second.is_quantized:
        return FunctionProof(name, "", "not tried: only one of the two files is quantized")
    if first.casts_to_half != second.casts_to_half:
        return FunctionProof(name, "", "not tried: only one of the two files computes in half precision")
    held = {*second.inputs, *second.outputs}
    proof = prove_files(first, second, {ours: theirs for ours, theirs in names.items() if theirs in held}, limit)
    shown = "" if proof.counterexample is None else _describe_counterexample(proof.counterexample)
    return FunctionProof(name, str(proof.verdict), proof.describe(), shown, proof.seconds)


def _is_too_large(source: PathLike | onnx.ModelProto, max_memory: int) -> bool:
    proto = source if isinstance(source, onnx.ModelProto) else load_onnx(source, external_data=False)
    numbers = 0
    for tensor in proto.graph.initializer:
        count = 1
        for size in tensor.dims:
            count *= size
        numbers += count
    return numbers * _RESIDUES > max_memory


def _describe_counterexample(shown: Counterexample) -> str:
    index = ", ".join(map(str, shown.index))
    return (
        f"in float64, {shown.output}[{index}] is {shown.first:.9g} in the reference and {shown.second:.9g} in the file "
        f"(inputs: {shown.described})"
    )
