"""Explain why a norm was fused or not, for a tensor, a node or a module path.

An explanation shows the nodes that recognition found, and the last stage that recognition reached.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx
import onnx_graphsurgeon as gs

from ..errors import InputError
from ..findings.records import STATUS_WORDS, ExplainedNode, Explanation, Finding, FittingAttempt
from ..graphs.graph import Graph, value_inputs
from ..graphs.norm_extraction import models_by_location
from .anchors import CLAMPS, REDUCTIONS, is_anchor, is_norm_node
from .fit_measurement import CLAMPED
from .norm_candidates import candidate_at, candidate_readings
from .norm_facts import Norm

# Maximum number of nodes that are shown for a norm, and that are searched around a name
_FARTHEST = 64
# Attributes that are not shown, because they never explain a refusal
_DULL = ("noop_with_empty_axes", "keepdims", "stash_type")
_STARTS = "recognition starts from a square root over a reduction"
_CAME = {
    "ends": (
        "recognition found a square root over a reduction, but not the tensors that are the norm's input and output"
    ),
    "values": "recognition evaluated the nodes between input and output, and their values differ from those of a norm",
    "form": "recognition found a norm, but no form for the target can express it",
}


def explain(proto: onnx.ModelProto, findings: Sequence[Finding], name: str) -> tuple[Explanation, ...]:
    """Explain the findings at ``name``: a tensor, a node, a module path, or a line of the report.

    Lines of the report are for example "layers.{0..11}.norm" and "(tensor)".

    Returns:
        one explanation per finding. If no finding matches, a single explanation that lists the roots nearby.

    Raises:
        InputError: nothing has this name; the message lists similar names.
    """
    graphs = {place: Graph(model) for place, model in models_by_location(proto).items()}
    meant = re.fullmatch(r"\((.*)\)", name)
    wanted = _name_pattern(meant[1] if meant else name)
    outputs = {o.name for g in graphs.values() for n in g.nodes if wanted(n.name) for o in n.outputs}
    matching = [f for f in findings if _matches_finding(f, wanted, outputs)]
    if matching:
        return tuple(_explain_finding(graphs.get(f.place), f, name) for f in matching)
    for graph in graphs.values():
        nodes = [
            n
            for n in graph.nodes
            if wanted(n.name) or any(wanted(o.name) for o in n.outputs) or _is_module_inside(graph.module(n), wanted)
        ]
        if nodes:
            return (Explanation(name, None, "", (), tuple(_describe_nearby_roots(graph, nodes, findings))),)
        if any(wanted(t.name) for t in (*graph.gs.inputs, *(i for n in graph.nodes for i in n.inputs))):
            return (
                Explanation(
                    name, None, "", (), (f"it is an input or a constant of the graph, not a computed value: {_STARTS}",)
                ),
            )
    raise InputError(_unknown_name_message(name, graphs.values(), findings))


def _name_pattern(name: str) -> Callable[[str], bool]:
    """Build a test for ``name``; "{0..11}" matches any number, as in the report."""
    pattern = re.compile(re.sub(r"\\\{[\d.,…\\]*\\\}", r"\\d+", re.escape(name)))
    return lambda other: other == name or pattern.fullmatch(other) is not None


def _matches_finding(finding: Finding, wanted: Callable[[str], bool], outputs: Iterable[str]) -> bool:
    """Return True if the finding has the wanted name, one of the ``outputs``, or a module inside the wanted module."""
    own = {
        finding.tensor,
        *finding.tensors,
        *(a.tensor for a in finding.attempts),
        *(a.end for a in finding.attempts),
    } - {finding.input}
    return any(map(wanted, own)) or not own.isdisjoint(outputs) or _is_module_inside(finding.module, wanted)


def _is_module_inside(module: str, wanted: Callable[[str], bool]) -> bool:
    """Return True if a module path is the wanted path or below it."""
    parts = module.split(".")
    return bool(module) and any(wanted(".".join(parts[:i])) for i in range(1, len(parts) + 1))


# ------------------------------------------------------------------ explanation of a finding


def _explain_finding(graph: Graph | None, finding: Finding, name: str) -> Explanation:
    """Explain a finding: first the attempt that gave its reason, then the other attempts."""
    best = next((a for a in finding.attempts if a.reason == finding.reason), None)
    start, end = (best.start, best.end) if best is not None and best.end else (finding.input, finding.tensor)
    way = () if graph is None else _nodes_on_path(graph, start, end, finding, best.tensor if best is not None else "")
    lines = [] if best is None else [_CAME[best.stage]]
    if best is not None and best.tensor not in {"", *(s.tensor for s in way)} and graph is not None:
        culprit = next((n for n in graph.nodes if any(o.name == best.tensor for o in n.outputs)), None)
        lines.append(
            f"the culprit: {best.tensor} = {_node_as_call(graph, culprit)}"
            if culprit is not None
            else f"the culprit: {best.tensor}"
        )
    others = [a for a in finding.attempts if a is not best and a.reason != finding.reason]
    lines += _describe_attempts(others, "also tried")
    if graph is not None:
        known = any(t.name == start for n in graph.nodes for t in n.inputs)
    else:
        known = False
    return Explanation(name, finding, start if known else "", way, tuple(lines))


def _describe_attempts(attempts: Sequence[FittingAttempt], word: str) -> list[str]:
    """Describe the other attempts, one line per reason, with the latest stage first."""
    order = {"form": 0, "values": 1, "ends": 2}
    reasons: dict[str, list[FittingAttempt]] = {}
    for attempt in sorted(attempts, key=lambda a: order[a.stage]):
        reasons.setdefault(attempt.reason, []).append(attempt)
    lines = []
    for reason, alike in list(reasons.items())[:5]:
        first = alike[0]
        if first.end:
            ends = f"from {first.start} to {first.end}"
        else:
            ends = f"at {first.tensor}"
        if len(alike) > 1:
            more = f" (and {len(alike) - 1} more)"
        else:
            more = ""
        lines.append(f"{word} {ends}{more}: {reason}")
    if len(reasons) > 5:
        lines.append(f"and {sum(len(a) for a in list(reasons.values())[5:])} other readings")
    return lines


def _nodes_on_path(graph: Graph, start: str, end: str, finding: Finding, culprit: str) -> tuple[ExplainedNode, ...]:
    """List the nodes between two tensors without shape arithmetic.

    If no path between the tensors is known, list the nodes of the finding.
    """
    made = {o.name: n for n in graph.nodes for o in n.outputs}
    if start and end in made:
        nodes = _nodes_between(graph, made, start, end)
    else:
        nodes = []
    nodes = nodes or list({id(made[t]): made[t] for t in finding.tensors if t in made}.values())
    clamped = CLAMPED in finding.reason and any(n.op in CLAMPS for n in nodes)
    if clamped:
        culprit = ""
    data = sorted((n for n in nodes if not graph.is_shape_valued(n.outputs[0])), key=graph.position_of)
    return tuple(
        ExplainedNode(n.outputs[0].name, _node_as_call(graph, n), _mark_node(graph, n, culprit, clamped))
        for n in data[:_FARTHEST]
    )


def _nodes_between(graph: Graph, made: Mapping[str, gs.Node], start: str, end: str) -> list[gs.Node]:
    """List the nodes that ``end`` needs and that need ``start``."""
    above: dict[int, gs.Node] = {}
    stack = [made[end]]
    while stack and len(above) < 4 * _FARTHEST:
        node = stack.pop()
        above[id(node)] = node
        stack += [
            p for t in node.inputs if t.name != start and (p := graph.producer(t)) is not None and id(p) not in above
        ]
    needs = {start}
    nodes = []
    for node in sorted(above.values(), key=graph.position_of):
        if any(t.name in needs for t in node.inputs):
            needs.update(o.name for o in node.outputs)
            nodes.append(node)
    if end in needs:
        return nodes
    return []


def _mark_node(graph: Graph, node: gs.Node, culprit: str, clamped: bool) -> str:
    """Return the mark of the root, the clamp or the culprit of a refusal; "" for other nodes."""
    if is_anchor(graph, node) and not is_norm_node(node):
        marks = ["the root"]
    else:
        marks = []
    if clamped and node.op in CLAMPS:
        marks.append("the clamp")
    elif culprit and any(o.name == culprit for o in node.outputs):
        marks.append("the culprit")
    elif (
        culprit
        and any(t.name == culprit for t in node.inputs)
        and graph.producer(next(t for t in node.inputs if t.name == culprit)) is None
    ):
        marks.append("reads the culprit")
    return ", ".join(marks)


def _node_as_call(graph: Graph, node: gs.Node) -> str:
    """Write the node as a call, with small constants by value."""
    shown = [_argument_text(graph, t) for t in node.inputs if not t.is_empty()]
    for key, value in graph.attrs(node).items():
        if key not in _DULL and isinstance(value, (int, float, str, list, tuple)) and len(str(value)) <= 40:
            shown.append(f"{key}={_type_text(value) if node.op == 'Cast' and key == 'to' else _number_text(value)}")
    if node.domain not in (None, "", "ai.onnx"):
        domain = f"{node.domain}."
    else:
        domain = ""
    return f"{domain}{node.op}({', '.join(shown)})"


def _argument_text(graph: Graph, t: gs.Tensor) -> str:
    value = graph.known_value(t)
    if value is None:
        return str(t.name)
    if value.size <= 4:
        return str(_number_text(value.item() if value.ndim == 0 else value.tolist()))
    return f"{t.name} (constant of {list(value.shape)})"


def _number_text(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_number_text(v)) for v in value)}]"
    return value


def _type_text(value: object) -> str:
    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(int(str(value))).name)
    except (KeyError, ValueError):
        return str(value)


# ------------------------------------------------------------------ explanation without a finding


def _describe_nearby_roots(graph: Graph, nodes: Sequence[gs.Node], findings: Sequence[Finding]) -> list[str]:
    """Describe the roots near these nodes, and the parts of a norm that recognition missed."""
    near = {id(n): n for n in _nodes_nearby(graph, nodes)}
    roots = [n for n in near.values() if is_anchor(graph, n)]
    reductions = [n for n in near.values() if n.op in REDUCTIONS and not graph.is_shape_valued(n.outputs[0])]
    if len(nodes) == 1:
        lines = [f"no norm was found at {nodes[0].outputs[0].name} = {_node_as_call(graph, nodes[0])}"]
    else:
        ops = Counter(n.op for n in nodes if not graph.is_shape_valued(n.outputs[0]))
        lines = [
            f"no norm was found in these {len(nodes)} nodes: "
            f"{', '.join(f'{op} ×{c}' if c > 1 else op for op, c in ops.items())}"
        ]
    if not roots:
        if reductions:
            there = f"; the reductions here ({_list_nodes(reductions)}) have no root after them"
        else:
            there = "; neither was found nearby"
        lines.append(f"{_STARTS}{there}")
    by_tensor = {t: f for f in findings if not f.place for t in (*f.tensors, f.tensor)}
    for root in [r for r in roots if r.outputs[0].name not in by_tensor][:3]:
        lines += _describe_rejections(graph, root)
    norm = next((by_tensor[o.name] for n in near.values() for o in n.outputs if o.name in by_tensor), None)
    if norm is not None:
        lines.append(
            f"the nearest norm is {norm.kind} {norm.module or repr(norm.tensor)} ({STATUS_WORDS[norm.status]})"
        )
    return lines


def _describe_rejections(graph: Graph, root: gs.Node) -> list[str]:
    """Explain why recognition made no finding from a root."""
    line = f"{root.outputs[0].name} = {_node_as_call(graph, root)}"
    around = candidate_at(graph, root)
    if around is None:
        return [f"{_STARTS}; the root {line} has no reduction before it"]
    tried = [r for r in candidate_readings(graph, around) if not isinstance(r, Norm)]
    attempts = [FittingAttempt(r.start, r.end, "values" if r.clarity else "ends", r.reason, r.tensor) for r in tried]
    return [
        f"no norm was recognized around the root {line}:",
        *(_describe_attempts(attempts, "tried") or ["no tensors before and after it have the same shape and type"]),
    ]


def _nodes_nearby(graph: Graph, nodes: Sequence[gs.Node]) -> list[gs.Node]:
    """List the nodes themselves, then those around them, nearest first."""
    seen = {id(n): n for n in nodes}
    # Only a single node gets its neighbors; the nodes of a module do not.
    if len(nodes) == 1:
        queue = list(nodes)
    else:
        queue = []
    for node in queue:
        if len(seen) > _FARTHEST:
            break
        above = [p for t in value_inputs(node) if (p := graph.producer(t)) is not None and not graph.is_shape_valued(t)]
        if is_norm_node(node) and node is not nodes[0]:
            continue
        for other in (*above, *(c for o in node.outputs for c in graph.consumers(o))):
            if id(other) not in seen:
                seen[id(other)] = other
                queue.append(other)
    return list(seen.values())


def _list_nodes(nodes: Sequence[gs.Node]) -> str:
    shown = ", ".join(f"{n.op} {n.outputs[0].name!r}" for n in nodes[:4])
    return shown + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def _unknown_name_message(name: str, graphs: Iterable[Graph], findings: Sequence[Finding]) -> str:
    """Write the message for an unknown name, with similar names or else the norms that were found."""
    known: dict[str, None] = {m: None for f in findings for m in (f.module, f.tensor) if m}
    for graph in graphs:
        for node in graph.nodes:
            known.update(
                dict.fromkeys(n for n in (graph.module(node), node.name, *(o.name for o in node.outputs)) if n)
            )
    inside = [k for k in known if name and name.lower() in k.lower()]
    near = inside[:5] or difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    message = f"the model has no tensor, node or module named {name!r}"
    if near:
        return f"{message}; similar names: {', '.join(near)}"
    listed = list(dict.fromkeys(f.module or f.tensor for f in findings))
    if len(listed) > 5:
        more = f" and {len(listed) - 5} more"
    else:
        more = ""
    if listed:
        return f"{message}; norms were found at {', '.join(listed[:5])}{more}"
    return f"{message}; no norm was found in the model"
