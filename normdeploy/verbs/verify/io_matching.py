"""Match the inputs and outputs of a file with those of the model: by name, by the user's map (``verify --map``), or by
order.

Equal names match. If no names are equal, and file and model have the same number of unmapped names, they are matched by
order. Each pair must then agree in kind (floating, integer, bool), rank and static sizes, and a note reports the match.
If only some names are equal, the other inputs or outputs count as missing. A wrong match can't pass, because the values
are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import onnx

from ...errors import InputError
from ...graphs.proto_queries import value_info_type
from ...model import ModelSignature
from ...runtimes import RunResult
from ...storage.proto_traversal import attribute_graphs, required_inputs
from ...types import Arrays

Shape = tuple[int | None, ...]
_LAYOUTS = {"last": (0, 2, 3, 1), "first": (0, 3, 1, 2)}


@dataclass(frozen=True)
class TensorEnd:
    """Input or output of a model.

    Attributes:
        kind: numpy's kind of dtype, "f", "i", "u" or "b" ("f" for bfloat16); None if unknown.
        shape: sizes of the dims, with None for a dynamic or unknown dim; None if the rank is unknown.
    """

    name: str
    kind: str | None = None
    shape: Shape | None = None

    def is_compatible(self, other: TensorEnd) -> bool:
        """Check whether two inputs, or two outputs, may be the same tensor.

        Returns:
            True if kind, rank and static sizes agree as far as they are known.
        """
        kinds = {"u": "i"}
        alike = None in (self.kind, other.kind) or kinds.get(self.kind or "", self.kind) == kinds.get(
            other.kind or "", other.kind
        )
        if not alike or self.shape is None or other.shape is None:
            return alike
        same = len(self.shape) == len(other.shape)
        return same and all(a is None or b is None or a == b for a, b in zip(self.shape, other.shape, strict=True))

    def __str__(self) -> str:
        if self.shape is None:
            return self.name
        return f"{self.name}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class NameMatch:
    """Match of a file's names with the model's.

    Attributes:
        inputs: the file's name -> the model's, if they differ.
        outputs: the file's name -> the model's, if they differ.
        spared: inputs that the model does not use and that the file does not have.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    notes: tuple[str, ...] = ()
    spared: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RenamedFile:
    """File whose inputs and outputs may have other names than in the model.

    Attributes:
        inputs: the file's name -> the model's, if they differ.
        outputs: the file's name -> the model's, if they differ.
        types: dtypes of an ONNX file's inputs, by the model's names.
    """

    path: Path
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, np.dtype] = field(default_factory=dict)

    def rename_types(self, types: Mapping[str, np.dtype]) -> dict[str, np.dtype]:
        """Rename the file's inputs in ``types``.

        Returns:
            the model's name -> dtype.
        """
        return {self.inputs.get(name, name): kind for name, kind in types.items()}

    def own_feeds(self, feeds: Arrays) -> RunResult:
        """Rename the model's inputs and cast them to the file's dtypes.

        Returns:
            the file's name -> array.
        """
        theirs = {ours: name for name, ours in self.inputs.items()}
        return {
            theirs.get(name, name): value.astype(self.types.get(name, value.dtype), copy=False)
            for name, value in feeds.items()
        }

    def model_results(self, result: RunResult) -> RunResult:
        """Rename the file's outputs.

        Returns:
            the model's name -> array. An output that is mapped to another name does not also keep its own name.
        """
        renamed = {ours: result[name] for name, ours in self.outputs.items() if name in result}
        # An output that is mapped to another name does not also keep its own name.
        own = {name: value for name, value in result.items() if name not in renamed and name not in self.outputs}
        return own | renamed


Map = Sequence["str | tuple[str, str]"] | Mapping[str, str]


def list_pairs(given: Map) -> list[str | tuple[str, str]]:
    """List the entries of a map.

    Returns:
        pairs or texts, in order.
    """
    if isinstance(given, Mapping):
        return [*given.items()]
    if isinstance(given, str):
        return [given]
    return [*given]


def parse_map(given: Map, model: ModelSignature) -> dict[str, str]:
    """Parse a map of names from pairs or texts such as "input.1=x".

    If a text has several "=", the names are separated by the first "=" that is followed by a name of the model.

    Returns:
        the file's name -> the model's.

    Raises:
        InputError: an entry can't be read, the model has no such input or output, or a name of the file is given twice.
    """
    known = [*(spec.name for spec in model.inputs), *model.outputs]
    names: dict[str, str] = {}
    for theirs, ours in (_parse_pair(pair, known) if isinstance(pair, str) else pair for pair in list_pairs(given)):
        if ours not in known:
            ends = f"it has the inputs {[spec.name for spec in model.inputs]} and the outputs {list(model.outputs)}"
            raise InputError(
                f"the map {theirs}={ours} names {ours!r}, which is not an input or output of the model; {ends}"
            )
        if names.setdefault(theirs, ours) != ours:
            raise InputError(f"{theirs!r} is mapped to both {names[theirs]!r} and {ours!r}; pass one")
    return names


def _parse_pair(text: str, known: Sequence[str]) -> tuple[str, str]:
    places = [i for i, letter in enumerate(text) if letter == "=" and 0 < i < len(text) - 1]
    if not places:
        raise InputError(
            f"can't read the map {text!r}; write THEIRS=OURS, first the file's name, then the model's: input.1=x"
        )
    place = next((i for i in places if text[i + 1 :] in known), places[0])
    return text[:place], text[place + 1 :]


# (names of inputs, names of outputs).
Ends = tuple[Sequence[str], Sequence[str]]


def require_used_names(names: Mapping[str, str], model: ModelSignature, held: Mapping[str, Ends]) -> None:
    """Check that each mapped name exists in a file.

    Args:
        held: file -> its names.

    Raises:
        InputError: no file has a mapped name, or an input is mapped to an output or an output to an input.
    """
    own = [spec.name for spec in model.inputs], list(model.outputs)
    for theirs, ours in names.items():
        if not held or any(
            theirs in ends and ours in mine for sides in held.values() for ends, mine in zip(sides, own, strict=True)
        ):
            continue
        file = next((file for file, sides in held.items() if any(theirs in ends for ends in sides)), None)
        if file is None:
            files = "; ".join(f"{file} has {[*sides[0], *sides[1]]}" for file, sides in held.items())
            raise InputError(
                f"the map {theirs}={ours} names {theirs!r}, which is not an input or output of any file: {files}"
            )
        side = int(theirs in held[file][1])
        a, b = ("an output", "an input") if side else ("an input", "an output")
        raise InputError(
            f"the map {theirs}={ours} mixes inputs and outputs: {theirs!r} is {a} of {file}, but {ours!r} is"
            f" {b} of the model; map inputs to inputs and outputs to outputs:"
            f" {theirs}={f' or {theirs}='.join(own[side])}"
        )


def match_names(
    label: str,
    graph: onnx.GraphProto,
    model: ModelSignature,
    outputs: Sequence[TensorEnd],
    names: Mapping[str, str],
    ordered: bool = True,
    unused: Collection[str] = (),
) -> NameMatch:
    """Match the inputs and outputs of one file with the model's.

    Args:
        label: name of the file.
        outputs: the model's outputs.
        names: the user's map.
        ordered: match different names by their order.
        unused: inputs that the model does not use. torch's TorchScript exporter leaves them out of its files.

    Returns:
        the matched names, with notes.

    Raises:
        InputError: an input of the file or the model has no match, or two names are mapped to the same name.
    """
    theirs = graph_ends(graph)
    ours = [
        TensorEnd(s.name, _dtype_family(s.dtype), tuple(None if d.is_dynamic else d.opt for d in s.shape))
        for s in model.inputs
    ]
    spared = _omitted_inputs(theirs[0], ours, names, unused)
    ours = [end for end in ours if end.name not in spared]
    inputs, left = _match_ends(label, theirs[0], ours, names, ordered=ordered, inputs=True)
    if left.theirs or left.ours:
        raise InputError(
            f"{label} has the inputs {[e.name for e in theirs[0]]}, but the model has {[e.name for e in ours]};"
            f" was the file exported from this model? {_describe_unmatched(left)} do not match by order; if it"
            f" was, name them with --map THEIRS=OURS{_describe_layout_change(left)}"
        )
    ends, rest = _match_ends(label, theirs[1], outputs, names, ordered=ordered, inputs=False)
    notes = []
    if spared:
        notes.append(f"{label} does not have the inputs {', '.join(spared)}, which the model does not use")
    if told := [f"{a} is {b}" for a, b in {**inputs, **ends}.items() if names.get(a) != b]:
        notes.append(f"{label}: names matched by order: {', '.join(told)}")
    if rest.theirs:
        if rest.ours:
            hint = f"; {[e.name for e in rest.ours]} are missing (name them with --map THEIRS=OURS)"
        else:
            hint = ""
        extra = [e.name for e in rest.theirs]
        notes.append(f"{label} has outputs that the model does not have, so they were not compared: {extra}{hint}")
    return NameMatch(inputs, ends, tuple(notes), frozenset(spared))


def _omitted_inputs(
    theirs: Sequence[TensorEnd], ours: Sequence[TensorEnd], names: Mapping[str, str], unused: Collection[str]
) -> list[str]:
    """Return the unused inputs of the model that a file leaves out."""
    taken = {names.get(end.name, end.name) for end in theirs}
    left_out = [end.name for end in ours if end.name in unused and end.name not in taken]
    if len(theirs) + len(left_out) == len(ours):
        return left_out
    return []


def graph_ends(graph: onnx.GraphProto) -> tuple[list[TensorEnd], list[TensorEnd]]:
    """List the inputs and outputs of a graph.

    Returns:
        (required inputs, outputs).
    """
    return [_make_end(v) for v in required_inputs(graph)], [_make_end(v) for v in graph.output]


def _make_end(v: onnx.ValueInfoProto) -> TensorEnd:
    kind, dims = value_info_type(v)
    if dims is None:
        shape = None
    else:
        shape = tuple(d if isinstance(d, int) and d >= 0 else None for d in dims)
    return TensorEnd(v.name, _dtype_family(onnx.helper.tensor_dtype_to_np_dtype(kind).name) if kind else None, shape)


def _dtype_family(dtype: str) -> str:
    if dtype.startswith(("float", "bfloat")):
        return "f"
    return str(np.dtype(dtype).kind)


@dataclass(frozen=True)
class _UnmatchedEnds:
    theirs: Sequence[TensorEnd]
    ours: Sequence[TensorEnd]


def _match_ends(
    label: str,
    theirs: Sequence[TensorEnd],
    ours: Sequence[TensorEnd],
    names: Mapping[str, str],
    *,
    ordered: bool,
    inputs: bool,
) -> tuple[dict[str, str], _UnmatchedEnds]:
    own = {end.name for end in ours}
    stated = {end.name: names[end.name] for end in theirs if names.get(end.name) in own}
    if twice := [b for b in stated.values() if list(stated.values()).count(b) > 1]:
        raise InputError(
            f"{label}: {[a for a, b in stated.items() if b == twice[0]]} are all mapped to {twice[0]!r}; pass one"
        )
    same = {end.name for end in theirs if end.name in own and end.name not in stated} - set(stated.values())
    left = _UnmatchedEnds(
        [end for end in theirs if end.name not in stated and end.name not in same],
        [end for end in ours if end.name not in stated.values() and end.name not in same],
    )
    changed = {a: b for a, b in stated.items() if a != b}
    pairs = list(zip(left.theirs, left.ours, strict=False))
    fit = all(a.is_compatible(b) for a, b in pairs)
    # A single output can't be confused with another output, so its shape is not checked here. The comparison reports
    # different shapes.
    alone = not inputs and len(theirs) == len(ours) == 1
    if ordered and not same and len(left.theirs) == len(left.ours) and (fit or alone):
        return changed | {a.name: b.name for a, b in pairs}, _UnmatchedEnds((), ())
    return changed, left


def _describe_unmatched(left: _UnmatchedEnds) -> str:
    return f"{', '.join(map(str, left.theirs)) or 'none'} and {', '.join(map(str, left.ours)) or 'none'}"


def _describe_layout_change(left: _UnmatchedEnds) -> str:
    """If there is a single unmatched input, and its dims are the model's dims in another layout, describe the layout.

    Returns:
        the description; otherwise "".
    """
    if len(left.theirs) != 1 or len(left.ours) != 1:
        return ""
    (theirs,), (ours,) = left.theirs, left.ours
    for words, order in _LAYOUTS.items():
        if ours.shape is not None and len(ours.shape) == len(order):
            turned = TensorEnd(theirs.name, ours.kind, tuple(ours.shape[axis] for axis in order))
            if theirs.is_compatible(turned):
                return (
                    f"; {theirs.name} looks like {ours.name}.transpose{order}, the channels {words}: check with"
                    f" `bisect --map {theirs.name}={ours.name}`"
                )
    return ""


def rename_ends(proto: onnx.ModelProto, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> onnx.ModelProto:
    """Copy a model with other names for its inputs and outputs, connected by an Identity for each changed name.

    Inner tensors that already have one of the new names get unused names. The former inputs and outputs also get unused
    names, because names may be swapped, and an output may get the former name of an input.

    Returns:
        the renamed copy.
    """
    own = onnx.ModelProto()
    own.CopyFrom(proto)
    used = set(_iter_tensor_names(own.graph))
    moved = {name: _unused_name(name, used) for name in (*inputs.values(), *outputs.values()) if name in used}
    _rename_tensors(own.graph, moved)
    named_in, named_out = ({moved.get(a, a): b for a, b in names.items()} for names in (inputs, outputs))
    front = list[onnx.NodeProto]()
    back = list[onnx.NodeProto]()
    for v in own.graph.input:
        if (name := named_in.get(v.name)) is not None:
            front.append(onnx.helper.make_node("Identity", [name], [v.name]))
            v.name = name
    for v in own.graph.output:
        if (name := named_out.get(v.name)) is not None:
            back.append(onnx.helper.make_node("Identity", [v.name], [name]))
            v.name = name
    nodes = [*front, *own.graph.node, *back]
    del own.graph.node[:]
    own.graph.node.extend(nodes)
    return own


def _iter_tensor_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the tensors of a graph and of the bodies in it."""
    yield from (item.name for item in (*graph.input, *graph.output, *graph.initializer, *graph.value_info))
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield from (*node.input, *node.output)
        for attribute in node.attribute:
            for body in attribute_graphs(attribute):
                yield from _iter_tensor_names(body)


def _unused_name(name: str, used: set[str]) -> str:
    fresh = next(f"{name}_inside{n or ''}" for n in count() if f"{name}_inside{n or ''}" not in used)
    used.add(fresh)
    return fresh


def _rename_tensors(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors of a graph, also in bodies that read them."""
    if not names:
        return
    for item in (
        *graph.input,
        *graph.output,
        *graph.initializer,
        *graph.value_info,
        *(s.values for s in graph.sparse_initializer),
    ):
        item.name = names.get(item.name, item.name)
    for note in graph.quantization_annotation:
        note.tensor_name = names.get(note.tensor_name, note.tensor_name)
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
        for attribute in node.attribute:
            for body in attribute_graphs(attribute):
                _rename_tensors(body, names)
