"""Open two ONNX files for a proof: inline functions, match inputs and outputs, and choose sizes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ...errors import InputError
from ...graphs.dims import dim_size
from ...graphs.function_ops import inline_unwanted_functions
from ...graphs.shape_inference import infer_types
from ...graphs.symbolic_sizes import Size
from ...runtimes.float64_evaluator import inline_functions
from ...storage.onnx_files import fill_shared_weights, load_onnx, normalize_model
from ...types import PathLike
from .field_run import ConcreteGraph
from .graph_nodes import needed_nodes, read_names

Shape = tuple["int | str | None", ...]


class NotComparable(Exception):
    """Raised if the interfaces of two files differ so that no proof can begin. The message is the reason."""


@dataclass(frozen=True)
class Port:
    """Input or output of a file.

    Attributes:
        name: its name in the file.
        elem_type: ONNX's number of its type.
        shape: its dims; None if the rank is unknown.
    """

    name: str
    elem_type: int
    shape: Shape | None


class OpenFile:
    """One file of the pair.

    Attributes:
        label: name in messages.
        shown: path of the file, or "model in memory".
        proto: the model without functions.
    """

    def __init__(self, source: PathLike | onnx.ModelProto, label: str) -> None:
        self.label = label
        if isinstance(source, onnx.ModelProto):
            self.shown = f"model in memory ({label})"
            proto = fill_shared_weights(normalize_model(source))
        else:
            self.shown = os.fspath(source)
            proto = load_onnx(source)
        proto = inline_functions(inline_unwanted_functions(proto, "standard"))
        self.proto = proto
        held = {t.name for t in proto.graph.initializer}
        read = set(read_names(proto.graph)) | {v.name for v in proto.graph.output}
        self.inputs = {p.name: p for p in _ports(v for v in proto.graph.input if v.name not in held)}
        self.unused = frozenset(self.inputs) - read
        self.outputs = {p.name: p for p in _ports(proto.graph.output)}
        self.overridable = sorted(held & {v.name for v in proto.graph.input})
        self.constants = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}

    @property
    def is_half(self) -> bool:
        """Return True if the file holds constants of half precision, or computes in half precision."""
        halves = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
        ports = (*self.inputs.values(), *self.outputs.values())
        return any(p.elem_type in halves for p in ports) or any(
            t.data_type in halves for t in self.proto.graph.initializer
        )

    @property
    def casts_to_half(self) -> bool:
        """Return True if the file converts to half precision, or holds numbers of half precision."""
        return self.is_half or any(
            a.name == "to" and a.i in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
            for n in self.proto.graph.node
            for a in n.attribute
        )

    @property
    def is_quantized(self) -> bool:
        """Return True if the file has nodes on quantized numbers."""
        return any(
            word in n.op_type
            for n in self.proto.graph.node
            for word in ("QuantizeLinear", "QLinear", "Integer", "NBits", "QAttention", "QGemm", "QMoE")
        )

    def with_shapes(self, shapes: Mapping[str, tuple[Size, ...]]) -> ConcreteGraph:
        """Replace the shapes of the inputs.

        Args:
            shapes: by the names of this file's inputs. Open sizes stay open.

        Returns:
            the graph, with the shapes and types that ONNX infers.
        """
        graph = self.proto.graph
        skeleton = onnx.ModelProto(ir_version=self.proto.ir_version, opset_import=self.proto.opset_import)
        skeleton.graph.name = graph.name
        skeleton.graph.node.extend(graph.node)
        skeleton.graph.initializer.extend(graph.initializer)
        for value in graph.input:
            port = self.inputs.get(value.name)
            if port is None:
                continue
            dims = [size.constant_value for size in shapes[port.name]] if port.name in shapes else None
            skeleton.graph.input.append(onnx.helper.make_tensor_value_info(port.name, port.elem_type, dims))
        for value in graph.output:
            skeleton.graph.output.append(onnx.ValueInfoProto(name=value.name))
        types = infer_types(skeleton)
        known = {
            name: tuple(int(d) for d in dims if isinstance(d, int))
            for name, (_, dims) in types.items()
            if dims is not None and all(isinstance(d, int) for d in dims)
        }
        return ConcreteGraph(
            nodes=tuple(needed_nodes(graph, list(self.outputs))),
            constants=self.constants,
            shapes=known,
            kinds={name: kind for name, (kind, _) in types.items() if kind},
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            opsets={"" if o.domain == "ai.onnx" else o.domain: o.version for o in self.proto.opset_import},
            side=self.label,
        )


def _ports(values: Iterable[onnx.ValueInfoProto]) -> Iterator[Port]:
    for value in values:
        tensor = value.type.tensor_type
        shape: Shape | None = None
        if tensor.HasField("shape"):
            shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
        yield Port(value.name, tensor.elem_type, shape)


@dataclass(frozen=True)
class FilePair:
    """Two files with matched inputs and outputs.

    Attributes:
        inputs: pairs of matched inputs.
        outputs: pairs of matched outputs.
        shapes: common shape of each pair of inputs, as polynomials of the open sizes.
        notes: assumptions about the interfaces, for the verdict.
    """

    first: OpenFile
    second: OpenFile
    inputs: tuple[tuple[Port, Port], ...]
    outputs: tuple[tuple[Port, Port], ...]
    shapes: tuple[tuple[Size, ...], ...]
    notes: tuple[str, ...]

    @property
    def symbols(self) -> list[str]:
        """Return the open sizes, in the order of the inputs."""
        found: dict[str, None] = {}
        for shape in self.shapes:
            for size in shape:
                found.update(dict.fromkeys(sorted(size.symbols())))
        return list(found)

    def shapes_at(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Compute the shapes of the inputs at given sizes."""
        return [tuple(int(size.evaluate(sizes)) for size in shape) for shape in self.shapes]


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """Parse "A=B" texts.

    Returns:
        names in the second file by names in the first file.

    Raises:
        InputError: a text has another form.
    """
    names = {}
    for text in texts:
        first, equals, second = text.partition("=")
        if not equals or not first or not second:
            raise InputError(f"{text!r} maps no name; write NAME_IN_A=NAME_IN_B")
        names[first] = second
    return names


def pair_files(first: OpenFile, second: OpenFile, names: Mapping[str, str]) -> FilePair:
    """Match inputs and outputs by name.

    Args:
        names: names in the second file that differ, by the names in the first file.

    Raises:
        InputError: an input or output has no counterpart.
        NotComparable: types or ranks of matched inputs or outputs differ.
    """
    unknown = [n for n in names if n not in first.inputs and n not in first.outputs]
    if unknown:
        raise InputError(f"{first.label} has no input or output {unknown[0]!r}; {_list_ports(first)}")
    outputs = _match(first, second, names, first.outputs, second.outputs, "output")
    inputs = _match(first, second, names, first.inputs, second.inputs, "input")
    for one, other in (*inputs, *outputs):
        if one.elem_type != other.elem_type:
            kinds = [onnx.TensorProto.DataType.Name(p.elem_type).lower() for p in (one, other)]
            raise NotComparable(f"{one.name!r} is {kinds[0]} in {first.label} and {kinds[1]} in {second.label}")
    shapes, notes = _unify_shapes(first, second, inputs)
    for file in (first, second):
        if file.overridable:
            notes.append(
                f"{file.label}: {len(file.overridable)} inputs have default values ({file.overridable[0]!r}, …); the "
                "proof is about these values"
            )
    return FilePair(first, second, tuple(inputs), tuple(outputs), shapes, tuple(dict.fromkeys(notes)))


def _match(
    first: OpenFile,
    second: OpenFile,
    names: Mapping[str, str],
    one: Mapping[str, Port],
    other: Mapping[str, Port],
    kind: str,
) -> list[tuple[Port, Port]]:
    pairs = []
    for name, port in one.items():
        counterpart = other.get(names.get(name, name))
        if counterpart is not None:
            pairs.append((port, counterpart))
        elif kind == "output" or name not in first.unused:
            raise InputError(
                f"{second.label} has no {kind} {names.get(name, name)!r}; {_list_ports(second)}; match other names by"
                f" --map {name}=NAME"
            )
    matched = {port.name for _, port in pairs}
    for name in other:
        if name not in matched and (kind == "output" or name not in second.unused):
            raise InputError(
                f"{first.label} has no {kind} {name!r}; {_list_ports(first)}; match other names by --map NAME={name}"
            )
    return pairs


def _list_ports(file: OpenFile) -> str:
    return f"its inputs are {', '.join(file.inputs) or 'none'} and its outputs {', '.join(file.outputs)}"


def _unify_shapes(
    first: OpenFile, second: OpenFile, inputs: Sequence[tuple[Port, Port]]
) -> tuple[tuple[tuple[Size, ...], ...], list[str]]:
    """Find the shapes that both files accept.

    A name in the first file stands for the name or number at the same place of the second file.
    """
    notes: list[str] = []
    known: dict[str, Size] = {}
    shapes = []
    for one, other in inputs:
        if one.shape is None or other.shape is None:
            raise NotComparable(f"the rank of the input {one.name!r} is unknown")
        if len(one.shape) != len(other.shape):
            raise NotComparable(
                f"the input {one.name!r} has {len(one.shape)} axes in {first.label} and {len(other.shape)} in "
                f"{second.label}"
            )
        merged = []
        for axis, (d, e) in enumerate(zip(one.shape, other.shape, strict=True)):
            size = dim_size(d, f"{one.name}:{axis}")
            limit = dim_size(e, f"{one.name}:{axis}")
            if limit.constant_value is not None and size.constant_value is None:
                notes.append(
                    f"the proof is for inputs that both files accept: {one.name!r} has the size {limit} at axis {axis}"
                )
                if len(size.symbols()) == 1 and size == Size.symbol(next(iter(size.symbols()))):
                    known[next(iter(size.symbols()))] = limit
                size = limit
            elif size.constant_value is not None and limit.constant_value is None:
                notes.append(
                    f"the proof is for inputs that both files accept: {one.name!r} has the size {size} at axis {axis}"
                )
            elif size.constant_value != limit.constant_value:
                raise NotComparable(
                    f"the input {one.name!r} has the size {size} at axis {axis} in {first.label} and {limit} in "
                    f"{second.label}"
                )
            merged.append(size)
        shapes.append(merged)
    return tuple(tuple(size.substitute(known) for size in shape) for shape in shapes), notes


# Sizes that are tried for open dims: small, and different from each other and from common sizes of weights
_SIZES = ((5, 7, 3, 11, 9, 13), (6, 10, 14, 15, 21, 22), (8, 12, 24, 20, 28, 36), (32, 48, 64, 40, 56, 72), (1,))


def iter_sizes(symbols: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield sizes for the open dims."""
    for row in _SIZES:
        yield {name: row[i % len(row)] for i, name in enumerate(symbols)}


def draw_feeds(
    ports: Sequence[Port], shapes: Sequence[tuple[int, ...]], rng: np.random.Generator, limit: int = 2
) -> dict[str, np.ndarray]:
    """Draw random inputs.

    Args:
        limit: integers are drawn below this number.

    Returns:
        name → array.
    """
    feeds = {}
    for port, shape in zip(ports, shapes, strict=True):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(port.elem_type)
        if port.elem_type in (1, 10, 11, 16):
            feeds[port.name] = rng.standard_normal(shape).astype(dtype)
        else:
            feeds[port.name] = rng.integers(0, limit, shape).astype(dtype)
    return feeds
