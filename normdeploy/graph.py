"""The ONNX graph that the passes work on, over onnx-graphsurgeon's IR.

This is the one file that knows graphsurgeon's quirks: it loses metadata, node and model doc strings, model_version and quantization
annotations (kept here by tensor name and put back), treats initializers that are graph inputs as constants (here they stay inputs),
compares tensors by name and nodes by value (here identity counts), skips attributes of types it doesn't know (nodes that are not
rewritten are written back as they stood in the file).

Edits only re-point tensors. A node whose outputs nobody uses any more is dropped from the list that is exported; its own links are
left alone, because residual branches share them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.logger import G_LOGGER

from . import evaluate
from .dims import Dims, invented
from .functions import OPS
from .protos import IR_OF_CONSTANTS, captured, copy_field, inferred, inputs_without_defaults, lonely, names, require_order, scope

G_LOGGER.severity = G_LOGGER.CRITICAL

# Ops whose result has the shape of its largest input (or broadcasts to it), and the type of its first.
_SAME_SHAPE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Neg", "Sqrt", "Reciprocal", "Identity", "Cast", "CastLike", "Clip"),
        *("Relu", "Gelu", "Erf", "Tanh", "Sigmoid"),
        *("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization"),
        *OPS,
    }
)
_SAME_TYPE = _SAME_SHAPE - {"Cast", "CastLike"}
_COPIES = ("Identity", "Dropout")
NEWEST = 23  # the highest opset whose ops the passes write (RMSNormalization)


class Graph:
    """An ONNX model opened for rewriting. ``nodes`` is in topological order and holds live nodes only."""

    def __init__(self, proto: onnx.ModelProto, taken: Collection[str] = ()) -> None:
        """Open ``proto``; it is never changed. ``taken``: names that no new tensor may bear.

        Raises:
            GraphError: the graph has a circle, or a name that is written twice.
        """
        require_order(proto.graph)
        self.proto = proto
        self.opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
        opened, self._defaults = inputs_without_defaults(proto)
        self.gs = gs.import_onnx(opened)
        self._order: dict[int, float] = {id(n): float(i) for i, n in enumerate(self.gs.nodes)}
        self._new: set[int] = set()  # written by us: they mean what the newest opset says
        self._keep: list[gs.Node | gs.Tensor] = []  # id() is only a name while the object lives
        self._after: dict[int, list[gs.Node]] = {}
        self._dead: set[int] = set()
        self._consumers: dict[int, dict[int, gs.Node]] = {}
        self._captured = self._reads_of_bodies(opened.graph)
        for node in self.gs.nodes:
            self._link(node)
        self._outputs = {id(t) for t in self.gs.outputs}
        self._attrs: dict[int, dict[str, Any]] = {}
        self._evaluators: dict[int, Callable[[Sequence[np.ndarray | None]], tuple[Any, ...]]] = {}
        self._constant: dict[int, bool] = {}
        self._shape_valued: dict[int, bool] = {}
        self.exact: dict[int, np.ndarray] = {}  # id(constant) -> its float64 value before it was stored in the model's type
        self._names = {*taken, *names(proto.graph)}
        self._metadata = {o: n for n in proto.graph.node if n.metadata_props or n.doc_string for o in n.output[:1]}
        self._original = {id(n): p for n, p in zip(self.gs.nodes, opened.graph.node, strict=True)}
        self._initializers = {t.name: t for t in opened.graph.initializer}
        self._shapes: dict[int, Dims | None] = {}  # of tensors that neither the file nor inference knows
        self._lonely = lonely(proto.graph)
        self._stated: dict[int, Dims] = {}  # of tensors whose shape is known for good
        self._dtypes: dict[int, int] = {}
        self.memo: dict[object, object] = {}  # what recognition found out about one norm and may try on its likes
        self.completer: Callable[[Graph], None] | None = None  # called where a shape is wanted that neither knows, once; it may `learn` it

    # ------------------------------------------------------------------ reading

    @property
    def nodes(self) -> list[gs.Node]:
        """Live nodes in topological order, new ones included."""
        ordered: list[gs.Node] = []
        for first in self.gs.nodes:
            stack = [first]
            while stack:
                node = stack.pop()
                if id(node) not in self._dead:
                    ordered.append(node)
                stack.extend(reversed(self._after.get(id(node), ())))
        return ordered

    def alive(self, node: gs.Node) -> bool:
        return id(node) not in self._dead

    def order(self, node: gs.Node) -> float:
        """A number that grows along the topological order."""
        return self._order[id(node)]

    def producer(self, t: gs.Tensor) -> gs.Node | None:
        return t.inputs[0] if t.inputs else None

    def consumers(self, t: gs.Tensor) -> list[gs.Node]:
        """The live nodes that read the value of ``t`` (each once); a CastLike that takes only its type is none."""
        return [n for n in self._consumers.get(id(t), {}).values() if n.op != "CastLike" or n.inputs[0] is t]

    def is_output(self, t: gs.Tensor) -> bool:
        return id(t) in self._outputs

    def is_default(self, name: str) -> bool:
        """Whether a caller may give this initializer another value (it is a graph input as well)."""
        return any(t.name == name for t in self._defaults)

    def attrs(self, node: gs.Node) -> dict[str, Any]:
        """Attributes as plain values: numbers, strings, lists, numpy arrays."""
        found = self._attrs.get(id(node))
        if found is None:
            found = {k: (v.values if isinstance(v, gs.Constant) else v) for k, v in node.attrs.items()}
            self._attrs[id(node)] = found
        return found

    def is_constant(self, t: gs.Tensor) -> bool:
        """True where the value is fixed by the file: initializers, Constant nodes, and what is computed from these alone."""
        known = self._constant.get(id(t))
        return self._derived(t, self._constant, seed=lambda _node: False) if known is None else known

    def is_shape_valued(self, t: gs.Tensor) -> bool:
        """True for constants and for what is computed from shapes and constants alone, never from a tensor's values."""
        known = self._shape_valued.get(id(t))
        return self._derived(t, self._shape_valued, seed=lambda node: node.op in ("Shape", "Size")) if known is None else known

    def _derived(self, t: gs.Tensor, memo: dict[int, bool], seed: Callable[[gs.Node], bool]) -> bool:
        stack = [t]
        while stack:
            top = stack[-1]
            if id(top) in memo:
                stack.pop()
                continue
            node = self.producer(top)
            if isinstance(top, gs.Constant) or top.is_empty():
                memo[id(top)] = True
            elif node is None or not evaluate.supported(node.domain or "", node.op):
                memo[id(top)] = False
            elif seed(node):
                memo[id(top)] = True
            else:
                inputs = value_inputs(node)
                open_inputs = [i for i in inputs if id(i) not in memo]
                if open_inputs:
                    stack.extend(open_inputs)
                    continue
                memo[id(top)] = all(memo[id(i)] for i in inputs)
            stack.pop()
        return memo[id(t)]

    def value(self, t: gs.Tensor) -> np.ndarray:
        """The value of a constant: floating types as float64, exact where a rewrite computed it. ``is_constant(t)`` must hold.

        Raises:
            evaluate.Unsupported: it is computed by something that the evaluator does not know, or does not fit into memory.
        """
        known: dict[int, Any] = {}
        stack = [t]
        while id(t) not in known:
            top = stack.pop()
            if id(top) in self.exact:
                known[id(top)] = self.exact[id(top)]
            elif isinstance(top, gs.Constant):
                known[id(top)] = widen(top.values)
            elif id(top) not in known:
                node = self.producer(top)
                assert node is not None, f"{top.name!r} is no constant"
                missing = [i for i in value_inputs(node) if id(i) not in known]
                if missing:
                    stack.extend((top, *missing))
                    continue
                inputs = [known.get(id(i)) for i in node.inputs[: _value_count(node)]]
                known.update((id(o), v) for o, v in zip(node.outputs, self._evaluated(node, inputs), strict=False))
                if known.get(id(top)) is None:
                    raise evaluate.Unsupported(f"{node.op} gives no {top.name!r}")
        return known[id(t)]

    def known(self, t: gs.Tensor) -> np.ndarray | None:
        """The value of ``t``; None where it is no constant or left out, or none that can be evaluated."""
        if t.is_empty():
            return None
        try:
            with evaluate.quiet():
                return self.value(t) if self.is_constant(t) else None
        except evaluate.Unsupported:
            return None

    def _evaluated(self, node: gs.Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return self.apply(node, inputs)
        except (ValueError, TypeError, IndexError, ZeroDivisionError, KeyError, AssertionError, MemoryError) as e:
            raise evaluate.Unsupported(f"{node.op} {node.name!r}: {type(e).__name__}: {e}") from e

    def apply(self, node: gs.Node, inputs: Sequence[np.ndarray | None]) -> tuple[Any, ...]:
        """Evaluate one node in float64.

        Raises:
            evaluate.Unsupported: the evaluator does not know this op or this form of it.
        """
        return self.evaluator(node)(inputs)

    def evaluator(self, node: gs.Node) -> Callable[[Sequence[np.ndarray | None]], tuple[Any, ...]]:
        """The node as a function in float64. CastLike is a Cast to the type of its second input, whose value is not asked for."""
        found = self._evaluators.get(id(node))
        if found is None:
            if node.op == "CastLike":
                target = self.dtype(node.inputs[1])
                kind = target if target is not None and target.kind in "iub" else np.dtype(np.float64)
                found = partial(_cast, kind)
            else:
                opset = max(self.opset, NEWEST) if id(node) in self._new else self.opset
                found = partial(
                    evaluate.apply, node.op, attrs=self.attrs(node), opset=opset, domain=node.domain or "", outputs=len(node.outputs)
                )
            self._evaluators[id(node)] = found
        return found

    def shape(self, t: gs.Tensor) -> Dims | None:
        """The shape as far as it is known: ints, symbols or expressions of symbols, None for an unknown dim; None without a rank."""
        if isinstance(t, gs.Constant):
            return tuple(t.shape)
        if id(t) in self._stated:
            return self._stated[id(t)]
        known = t.shape if t.shape is not None else None
        if known is None or any(_unsaid(d) or d in self._lonely for d in known):
            inferred = self._inferred.get(t.name)
            known = inferred[1] if inferred is not None and inferred[1] is not None else known
        dims = None if known is None else tuple(None if _unsaid(d) else d for d in known)
        if dims is not None and not any(d is None or invented(d) for d in dims):
            self._stated[id(t)] = dims
            return dims
        if self.completer is not None:
            completer, self.completer = self.completer, None
            completer(self)
        return self._carried(t) if dims is None else self._shapes.get(id(t)) or dims

    def learn(self, t: gs.Tensor, dtype: int | None, dims: Dims) -> None:
        """Take down what the completer found of ``t``. ``dtype``: an element type of ONNX, None where it was not looked for."""
        self._shapes[id(t)] = dims
        if dtype is not None:
            self._dtypes[id(t)] = dtype

    def _carried(self, t: gs.Tensor) -> Dims | None:
        """The shape that elementwise nodes carry on from where it was last known: inference stops at the first op it can't follow."""
        way: list[gs.Tensor] = []
        while id(t) not in self._shapes:
            node = self.producer(t)
            if node is None or node.op not in _SAME_SHAPE or len(way) > 64:
                self._shapes[id(t)] = None
                break
            way.append(t)
            sources = [i for i in node.inputs if not i.is_empty() and not self.is_constant(i)]
            source = max(sources, key=self._rank, default=None)
            if source is None or self._rank(source) >= 0:
                self._shapes[id(t)] = self._broadcast([i for i in sources if self._rank(i) == self._rank(source)])
                break
            t = source
        for step in way:
            self._shapes[id(step)] = self._shapes[id(t)]
        return self._shapes[id(t)]

    def _broadcast(self, tensors: Sequence[gs.Tensor]) -> Dims | None:
        """The shape to which tensors of one rank broadcast, each dim from the first that is not 1."""
        shapes = [s for s in map(self.shape, tensors) if s is not None]
        return tuple(next((d for d in dims if d != 1), 1) for dims in zip(*shapes, strict=True)) if shapes else None

    def _rank(self, t: gs.Tensor) -> int:
        inferred = self._inferred.get(t.name)
        known = t.shape if t.shape is not None else (inferred[1] if inferred is not None else None) or self._shapes.get(id(t))
        return -1 if known is None else len(known)

    def dtype(self, t: gs.Tensor) -> Any:
        """numpy dtype (ml_dtypes for bfloat16), or None where unknown."""
        known = t.dtype
        if known is None:
            inferred = self._inferred.get(t.name)
            known = inferred[0] if inferred is not None else self._dtypes.get(id(t))
        if known is None:
            node = self.producer(t)
            return self.dtype(node.inputs[0]) if node is not None and node.op in _SAME_TYPE and len(node.inputs) else None
        return onnx.helper.tensor_dtype_to_np_dtype(known) if isinstance(known, int) else np.dtype(known)

    @cached_property
    def _inferred(self) -> dict[str, tuple[int | None, Dims | None]]:
        """onnx's own shape inference over a copy without the weights."""
        return inferred(self.proto)

    def module(self, node: gs.Node) -> str:
        """Qualified module path of a node, "" where the file does not tell."""
        for t in self._copied(node).outputs:
            source = self._metadata.get(t.name)
            if source is not None:
                found = next((p.value for p in source.metadata_props if p.key == "normdeploy.module"), "")
                if found:
                    return found
                return scope(next((p.value for p in source.metadata_props if p.key == "pkg.torch.onnx.name_scopes"), ""))
        return ""

    def _copied(self, node: gs.Node) -> gs.Node:
        """The node whose result ``node`` copies (a Dropout of another module behind a norm), itself where it is no copy."""
        while node.op in _COPIES and (above := self.producer(node.inputs[0])) is not None:
            node = above
        return node

    # ------------------------------------------------------------------ editing

    def constant(self, name: str, exact: np.ndarray, dtype: Any) -> gs.Constant:
        """A new initializer of the given type that remembers its float64 value."""
        stored = gs.Constant(self._fresh(name), np.ascontiguousarray(np.asarray(exact).astype(dtype)))
        self._keep.append(stored)
        if np.issubdtype(np.asarray(exact).dtype, np.floating):
            self.exact[id(stored)] = np.asarray(exact, dtype=np.float64)
        return stored

    def node(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        like: gs.Tensor,
        attrs: Mapping[str, Any] | None = None,
        domain: str = "",
        outputs: int = 1,
    ) -> gs.Node:
        """A new node with fresh outputs, not in the graph yet. ``like`` gives names and the type.

        Attributes are rounded as the file will hold them, in float32: certificates judge the node that is written.
        """
        held = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in (attrs or {}).items()}
        dtype = like.dtype if like.dtype is not None else self.dtype(like)
        outs = [gs.Variable(self._fresh(f"{like.name}_{op}"), dtype=dtype) for _ in range(outputs)]
        made = gs.Node(op, name=outs[0].name, attrs=held, inputs=list(inputs), outputs=outs, domain=domain or None)
        self._new.add(id(made))
        self._keep.append(made)
        return made

    def replace(
        self, old: gs.Tensor, new_nodes: Sequence[gs.Node], shape: Dims | None = None, place: int = 0, origin: gs.Node | None = None
    ) -> None:
        """Let output number ``place`` of the last of ``new_nodes`` be ``old`` (which keeps its name and readers), and drop what nobody uses
        any more.

        ``shape``: of ``old``, where it is known now. ``origin``: the node whose metadata the new ones get, the producer of ``old`` if None.
        """
        before = self.producer(old)
        assert before is not None, f"{old.name!r} has no producer"
        told = next((self._metadata[t.name] for t in self._copied(origin or before).outputs if t.name in self._metadata), None)
        if told is not None:
            self._metadata.update((t.name, told) for t in (old, *(t for n in new_nodes for t in n.outputs)))
        if shape is not None:
            self._shapes[id(old)] = shape
        self._after.setdefault(id(before), []).extend(new_nodes)
        order = self._order[id(before)]
        step = 1e-4 if order == int(order) else 1e-8  # a node that was itself inserted leaves less room behind it
        for i, node in enumerate(new_nodes):
            self._order[id(node)] = order + step * (i + 1)
            self._link(node)
        self.take_over(old, new_nodes[-1], place)

    def take_over(self, old: gs.Tensor, node: gs.Node, place: int) -> None:
        """Let output number ``place`` of ``node``, which is in the graph, be ``old``, and drop what nobody uses any more."""
        before = self.producer(old)
        assert before is not None, f"{old.name!r} has no producer"
        before.outputs[_index(before.outputs, old)] = gs.Variable(self._fresh(f"{old.name}_replaced"), dtype=old.dtype, shape=old.shape)
        node.outputs[place] = old
        self.drop_if_unused(before)

    def drop_if_unused(self, node: gs.Node) -> None:
        """Remove ``node`` if none of its outputs is read, and then, upwards, what only it used."""
        stack = [node]
        while stack:
            top = stack.pop()
            if id(top) in self._dead or any(self.is_output(o) or self._consumers.get(id(o)) for o in top.outputs):
                continue
            self._dead.add(id(top))
            for t in self._reads(top):
                self._consumers.get(id(t), {}).pop(id(top), None)
                above = self.producer(t)
                if above is not None:
                    stack.append(above)

    def _reads_of_bodies(self, graph: onnx.GraphProto) -> dict[int, list[gs.Tensor]]:
        """For each node that has bodies (If, Loop, Scan) the tensors outside that these read by name."""
        bodies = {id(n): read for n, p in zip(self.gs.nodes, graph.node, strict=True) if (read := captured(p))}
        if not bodies:
            return {}
        tensors = self.gs.tensors()
        return {place: [tensors[name] for name in read if name in tensors] for place, read in bodies.items()}

    def _reads(self, node: gs.Node) -> list[gs.Tensor]:
        return [*node.inputs, *self._captured.get(id(node), ())]

    def _link(self, node: gs.Node) -> None:
        for t in self._reads(node):
            self._consumers.setdefault(id(t), {})[id(node)] = node

    def _fresh(self, name: str) -> str:
        candidate, n = name, 1
        while candidate in self._names:
            n += 1
            candidate = f"{name}_{n}"
        self._names.add(candidate)
        return candidate

    # ------------------------------------------------------------------ writing

    def to_proto(self) -> onnx.ModelProto:
        """The model as it is now: live nodes, the initializers that they use, and everything that graphsurgeon would lose."""
        out = onnx.ModelProto()
        for field, value in self.proto.ListFields():
            if field.name != "graph":
                copy_field(out, field, value)
        source, graph = self.proto.graph, out.graph
        nodes = self.nodes
        graph.name, graph.doc_string = source.name, source.doc_string
        graph.metadata_props.extend(source.metadata_props)
        graph.quantization_annotation.extend(source.quantization_annotation)
        if out.ir_version < IR_OF_CONSTANTS:
            out.ir_version = IR_OF_CONSTANTS
            graph.input.extend(t for t in source.input if t.name in {i.name for i in self.gs.inputs})
        else:
            graph.input.extend(source.input)
        graph.output.extend(source.output)
        graph.node.extend(self.node_proto(n) for n in nodes)
        made = {t.name for n in nodes for t in n.outputs}
        used = {id(t): t for n in nodes for t in n.inputs if isinstance(t, gs.Constant)}
        inner = (t for n in self._with_subgraphs(nodes) for t in n.inputs if isinstance(t, gs.Constant))
        used |= {id(t): t for t in inner if t.name in self._initializers}  # the others are the bodies' own
        used |= {id(t): t for t in self.gs.outputs if isinstance(t, gs.Constant)}
        named: set[str] = set()
        place = {name: i for i, name in enumerate(self._initializers)}  # the file's own order, then ours: a second run changes nothing
        for t in sorted(used.values(), key=lambda t: place.get(t.name, len(place))):
            if t.name in named:
                continue
            named.add(t.name)
            if isinstance(t._values, gs.ir.tensor.SparseValues):
                graph.sparse_initializer.append(OnnxExporter.export_sparse_tensor_proto(t))
            else:
                graph.initializer.append(self.tensor_proto(t))
        graph.initializer.extend(self._defaults)
        graph.value_info.extend(v for v in source.value_info if v.name in made)
        return out

    def node_proto(self, node: gs.Node) -> onnx.NodeProto:
        """One node; a node of the file is taken as it stood there, a new one bears the metadata of what it replaces."""
        proto = onnx.NodeProto()
        original = self._original.get(id(node))
        if original is not None:
            proto.CopyFrom(original)
            for i, t in enumerate(node.outputs):
                proto.output[i] = t.name
            return proto
        proto.CopyFrom(OnnxExporter.export_node(node))
        origin = next((self._metadata[t.name] for t in node.outputs if t.name in self._metadata), None)
        if origin is not None:
            proto.metadata_props.extend(origin.metadata_props)
            proto.doc_string = origin.doc_string
        return proto

    def tensor_proto(self, t: gs.Constant) -> onnx.TensorProto:
        """An initializer of the file as it stood there (graphsurgeon can't pack 4 bits again that it has unpacked), or a new one."""
        held = self._initializers.get(t.name)
        return held if held is not None else OnnxExporter.export_tensor_proto(t)

    @staticmethod
    def _with_subgraphs(nodes: Iterable[gs.Node]) -> Iterable[gs.Node]:
        stack = list(nodes)
        while stack:
            node = stack.pop()
            yield node
            for value in node.attrs.values():
                if isinstance(value, gs.Graph):
                    stack.extend(value.nodes)


def widen(values: np.ndarray) -> np.ndarray:
    """Floating types (bfloat16 included) as float64, others as they are."""
    if values.dtype.kind in "biu?":
        return values
    return values.astype(np.float64)


def _unsaid(dim: int | str | None) -> bool:
    """Whether a file leaves a dim open; PaddlePaddle's older writers put -1 there."""
    return dim is None or dim == "" or (isinstance(dim, int) and dim < 0)


def _cast(kind: np.dtype, inputs: Sequence[Any]) -> tuple[np.ndarray]:
    return (inputs[0].astype(kind),)


def value_inputs(node: gs.Node) -> list[gs.Tensor]:
    """The inputs whose values matter: CastLike's second gives only a type."""
    inputs = node.inputs[:1] if node.op == "CastLike" else node.inputs
    return [t for t in inputs if not t.is_empty()]


def _value_count(node: gs.Node) -> int:
    return 1 if node.op == "CastLike" else len(node.inputs)


def _index(tensors: Sequence[gs.Tensor], t: gs.Tensor) -> int:
    return next(i for i, other in enumerate(tensors) if other is t)
