"""Choose the nodes to draw for a norm before and after its rewrite: the nodes that handle data, and their neighbors.

Constants, and nodes computed from constants and shapes alone, are omitted, because they are parameters of the norm, not
steps. Only the first and last boxes have tensor names, so the norms of all layers share one diagram.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import onnx

from ..findings.records import DiagramBox, Finding, NormDiagram
from ..storage.onnx_domains import qualified_op
from . import norm_extraction

# Maximum number of boxes of one diagram.
_MOST = 60
# Maximum number of neighbors drawn before the norm, and after it.
_BESIDE = 3
_PICTURES = 40


def draw_norm_diagrams(
    findings: Sequence[Finding], before: onnx.ModelProto, after: onnx.ModelProto
) -> tuple[NormDiagram, ...]:
    """Draw the distinct diagrams of ``findings``.

    Args:
        before: the model in which they were found, its nodes in topological order.
        after: the rewritten model.

    Returns: at most 40 diagrams in the order of the findings; each lists all tensors that it applies to.
    """
    nested = any(f.place for f in findings)
    cutters: list[Mapping[str, _DiagramNeighbors]] = [
        {
            place: _DiagramNeighbors(graph)
            for place, graph in (norm_extraction.models_by_location(model) if nested else {"": model}).items()
        }
        for model in (before, after)
    ]
    by_key: dict[object, NormDiagram] = {}
    for finding in findings:
        drawn = [
            graphs[finding.place].diagram_boxes(tensors) if finding.place in graphs else ()
            for graphs, tensors in zip(cutters, (finding.tensors, finding.written), strict=True)
        ]
        if not drawn[0]:
            continue
        key = finding.kind, finding.status, *(tuple(replace(box, name="") for box in boxes) for boxes in drawn)
        known = by_key.get(key)
        if known is not None:
            by_key[key] = replace(known, tensors=(*known.tensors, finding.tensor))
        elif len(by_key) < _PICTURES:
            by_key[key] = NormDiagram(finding.kind, finding.module, finding.status, (finding.tensor,), *drawn)
    return tuple(by_key.values())


class _DiagramNeighbors:
    """Graph with the producer and the readers of each tensor."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.cutter = norm_extraction.NormExtractor(model)
        self.nodes = model.graph.node
        self.ends = {value.name for value in model.graph.output}
        self.readers: dict[str, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(place)

    def diagram_boxes(self, tensors: Iterable[str]) -> tuple[DiagramBox, ...]:
        """Draw the data nodes that make ``tensors``, and their neighbors.

        Returns: boxes in topological order; () if there are more than 60.
        """
        made = self.cutter.made
        inside = self._data_nodes(sorted({made[t] for t in tensors if t in made}))
        # A dict keeps the order, which determines which neighbors are drawn.
        outputs = dict.fromkeys(o for place in inside for o in self.nodes[place].output if o)
        read = dict.fromkeys(
            i
            for place in inside
            for i in self.nodes[place].input
            if i and i not in outputs and i not in self.cutter.constant_names
        )
        left = dict.fromkeys(
            o for o in outputs if o in self.ends or any(r not in inside for r in self.readers.get(o, ()))
        )
        sources = [name for name in read if name not in self._shaped][:_BESIDE]
        before = {made[name]: name for name in sources if name in made}
        behind = [r for name in left for r in self.readers.get(name, ()) if r not in inside][:_BESIDE]
        places = [*sorted(before), *inside, *dict.fromkeys(r for r in behind if r not in before)]
        if not inside or len(places) > _MOST:
            return ()
        drawn: list[DiagramBox] = []
        # Tensor → index of the box that produces it.
        index: dict[str, int] = {}
        for name in sources:
            if name not in made:
                index[name] = len(drawn)
                drawn.append(DiagramBox("", name))
        for place in places:
            node = self.nodes[place]
            op = qualified_op(node)
            known = () if place in before else tuple(dict.fromkeys(index[i] for i in node.input if i in index))
            index |= {o: len(drawn) for o in node.output if o}
            drawn.append(DiagramBox(op, inputs=known, own=place in inside))
        drawn += [DiagramBox("", name, (index[name],)) for name in left if name in self.ends]
        return tuple(drawn)

    def _data_nodes(self, places: Sequence[int]) -> dict[int, None]:
        """Return the nodes that depend on data. All other nodes compute shapes and constants."""
        own = {o for place in places for o in self.nodes[place].output}
        self._shaped = set[str]()
        kept: dict[int, None] = {}
        for place in places:
            node = self.nodes[place]
            data = [i for i in node.input if i and i not in self.cutter.constant_names and i not in self._shaped]
            if (
                node.op_type in ("Shape", "Size")
                or not data
                or all(o in self.cutter.constant_names for o in node.output)
            ):
                self._shaped.update(o for o in node.output if o in own)
            else:
                kept[place] = None
        return kept
