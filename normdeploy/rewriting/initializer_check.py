"""Check that the constants of a proof equal the bytes in the file.

The prover reads weights through graphsurgeon, which has its own readers, but a certificate is about the file. So each
initializer that a proof depends on is read again with `onnx.numpy_helper` and compared bit for bit. This includes
initializers that are read through Constant nodes, Casts and views. Tests compare `onnx.numpy_helper` with onnxruntime
for every form in which a file may store a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_graphsurgeon as gs

from ..errors import GraphError
from ..graphs.file_graph import stored_array
from ..graphs.graph import Graph, value_inputs
from ..proof.proof_errors import NotProved, ProofFailure
from ..storage.shared_weights import tensor_array


def require_same_as_file(graph: Graph, constants: Iterable[gs.Tensor]) -> None:
    """Compare the initializers behind ``constants`` with the file, each once per graph.

    Raises:
        NotProved: an initializer was read differently, or is stored in an unsupported form.
    """
    for t in _initializers_behind(graph, constants):
        key = ("as in the file", id(t))
        if key not in graph.memo:
            graph.memo[key] = _describe_difference(graph, t)
        if graph.memo[key] is not None:
            raise NotProved(ProofFailure.STORED, str(graph.memo[key]), t.name)


def _initializers_behind(graph: Graph, constants: Iterable[gs.Tensor]) -> Iterator[gs.Constant]:
    """Yield the initializers behind constants, including those of new nodes."""
    stack = list(constants)
    seen = set[int]()
    while stack:
        t = stack.pop()
        if id(t) in seen or t.is_empty():
            continue
        seen.add(id(t))
        if isinstance(t, gs.Constant):
            yield t
        elif (node := graph.producer(t)) is not None:
            stack += value_inputs(node)


def _describe_difference(graph: Graph, t: gs.Constant) -> str | None:
    """Describe the difference between the value that was read and the stored one; None if they are equal."""
    try:
        tensor = graph.file_initializer(t)
    except GraphError as e:
        return str(e)
    if tensor is None:
        return None
    read = stored_array(t)
    held = tensor_array(tensor)
    if read is held:
        return None
    if read.shape != held.shape:
        return f"{t.name!r} was read with shape {list(read.shape)}, but its shape in the file is {list(held.shape)}"
    if not _have_same_bits(read, held):
        return f"the values read from {t.name!r} differ from the values in the file"
    return None


def _have_same_bits(read: np.ndarray, held: np.ndarray) -> bool:
    if read.dtype != held.dtype:
        return np.array_equal(read.astype(np.float64), held.astype(np.float64), equal_nan=True)
    if read.dtype.hasobject:
        return bool((read == held).all())
    return np.ascontiguousarray(read).tobytes() == np.ascontiguousarray(held).tobytes()
