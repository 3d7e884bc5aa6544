"""Pair inner tensors of an ONNX file with those of the PyTorch model, and measure how the error grows along them
(drift).

An exported file records the module of every node. Two tensors correspond if each is the only tensor that enters or
leaves the same module, one in the PyTorch graph and one in the file. Most module boundaries have such a pair. Other
tensors are not compared.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import onnx
import torch

from ...compare.element_errors import difference_from_float64
from ...compare.ulp_spacing import allowed_beside_peer, largest_rounded
from ...findings.rendering import ShortRepr
from ...graphs.proto_queries import captured_names, forget_dim_names, module_path, strip_invented_module
from ...inputs.array_conversion import to_numpy
from ...model import LoadedModel
from ...precision.tensor_ranges import serialize_for_session
from ...precision.type_conversion import FORMATS
from ...runtimes import Runner, RunResult
from ...runtimes.named_runners import open_session_runner
from ...runtimes.ordering_operators import ChoiceGuide
from ...runtimes.ort_runner import OrtRunner
from ...runtimes.torch_runners import HALVES, EagerRunner, Float64Runner, HalfRunner
from ...storage.proto_traversal import copy_model
from ...types import Array, Arrays, Progress
from .compute_budget import BudgetClock

# Minimum number of tensors that are fetched in one run.
AT_ONCE = 16
# Approximate size in bytes (256 MiB) of the tensors that are fetched in one run, in float64.
_BYTES = 1 << 28


@dataclass(frozen=True)
class TensorPair:
    """Tensor of a file, and the node of the PyTorch graph that computes the same tensor.

    Attributes:
        module: module that contains the node.
        where: module boundary at which the two match, for example "out of encoder".
        place: positions in the file and in the PyTorch graph.
    """

    tensor: str
    node: str
    module: str
    where: str
    place: tuple[int, int]


@dataclass(frozen=True, repr=False)
class DriftPoint(ShortRepr):
    """Error of one pair in one runtime; true if the error is allowed by the rule of ``verify``.

    Attributes:
        error: largest error of the file against float64.
        eager: largest error of eager mode against float64.
        allowed: allowed error.
        scale: largest |value| in float64.
        reason: failure that the error does not show, such as a NaN.
    """

    module: str
    tensor: str
    where: str
    error: float
    eager: float
    allowed: float
    scale: float
    reason: str = ""
    runtime: str = ""
    file: str = ""

    def summarize(self) -> str:
        """Return the main facts in one line."""
        numbers = self.reason or f"error {self.error:.2e}, allowed {self.allowed:.2e}"
        return f"{'pass' if self else 'fail'}, {self.where} {self.tensor!r} in {self.runtime or 'a file'}: {numbers}"

    def __bool__(self) -> bool:
        return not self.reason and self.error <= self.allowed


def pair_tensors(model: LoadedModel, proto: onnx.ModelProto) -> list[TensorPair]:
    """Pair the corresponding tensors of a file and a model.

    Returns:
        pairs in the file's order, outputs last.
    """
    theirs, makers = _boundaries_of_program(model)
    ours, order = boundaries_of_file(proto)
    matched: dict[tuple[str, str], TensorPair] = {}
    for where in sorted(theirs.keys() & ours.keys()):
        # If a tensor has several boundaries, the last one is kept. Outputs and inner modules are last in this order.
        if len(theirs[where]) == len(ours[where]) == 1:
            (node,), (tensor,) = theirs[where], ours[where]
            if tensor in order and node in makers:
                place, module = makers[node]
                matched[tensor, node] = TensorPair(tensor, node, module, where, (order[tensor], place))
    return sorted(matched.values(), key=lambda pair: pair.place)


def _boundaries_of_program(model: LoadedModel) -> tuple[dict[str, set[str]], dict[str, tuple[int, str]]]:
    edges: list[tuple[str, str | None, str | None]] = []
    makers: dict[str, tuple[int, str]] = {}
    user_outputs = [
        spec.arg.name
        for spec in model.program.graph_signature.output_specs
        if spec.kind.name == "USER_OUTPUT" and hasattr(spec.arg, "name")
    ]
    boundaries: dict[str, set[str]] = {}
    for place, node in enumerate(model.program.graph_module.graph.nodes):
        if node.op == "output":
            edges += [
                (source.name, makers[source.name][1], None) for source in node.all_input_nodes if source.name in makers
            ]
        if node.op != "call_function":
            continue
        path = _module_path(node)
        if isinstance(node.meta.get("val"), torch.Tensor):
            makers[node.name] = (place, path)
        for source in node.all_input_nodes:
            if source.op == "call_function" or _is_user_input(model, source.name):
                edges.append((source.name, _module_path(source) if source.op == "call_function" else None, path))
    _collect_boundaries(edges, boundaries)
    for name, output in zip(user_outputs, model.outputs, strict=False):
        boundaries[f"output {output}"] = {name}
    return boundaries, makers


def boundaries_of_file(proto: onnx.ModelProto) -> tuple[dict[str, set[str]], dict[str, int]]:
    """List the tensors at each module boundary of a file.

    Returns:
        (boundary -> tensors that cross it, tensor -> position of its node), for tensors that depend on an input.
    """
    initializers = {t.name for t in proto.graph.initializer}
    inputs = {v.name for v in proto.graph.input} - initializers
    paths: dict[str, str | None] = dict.fromkeys(inputs)
    order: dict[str, int] = {}
    edges: list[tuple[str, str | None, str | None]] = []
    boundaries: dict[str, set[str]] = {}
    for place, node in enumerate(proto.graph.node):
        path = module_path(node)
        # A node with a body also reads the tensors of the outer graph that its body uses.
        data = [name for name in dict.fromkeys([*node.input, *sorted(captured_names(node))]) if name in paths]
        if not data:
            # Nodes that depend on no input compute constants, which are skipped.
            continue
        edges += [(name, paths[name], path) for name in data]
        for name in filter(None, node.output):
            paths[name], order[name] = path, place
    edges += [(v.name, paths[v.name], None) for v in proto.graph.output if v.name in paths]
    _collect_boundaries(edges, boundaries)
    for v in proto.graph.output:
        boundaries[f"output {v.name}"] = {v.name}
    return boundaries, order


def _collect_boundaries(edges: Iterable[tuple[str, str | None, str | None]], boundaries: dict[str, set[str]]) -> None:
    """Add the tensors that leave and enter each module. A producing or reading module of None is outside all
    modules.
    """
    for tensor, maker, reader in edges:
        made = _enclosing_modules(maker)
        read = _enclosing_modules(reader)
        for path in made - read:
            boundaries.setdefault(f"out of {path}", set()).add(tensor)
        for path in read - made:
            boundaries.setdefault(f"into {path}", set()).add(tensor)


def _enclosing_modules(path: str | None) -> set[str]:
    if not path:
        return set()
    parts = path.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


def _module_path(node: torch.fx.Node) -> str:
    scopes = list(node.meta.get("nn_module_stack", {}).values())
    if scopes:
        return strip_invented_module(str(scopes[-1][0]))
    return ""


def _is_user_input(model: LoadedModel, name: str) -> bool:
    return name in model.program.graph_signature.user_inputs


# ------------------------------------------------------------------ values


class WatchedRunner:
    """Runner of torch that records inner results.

    Attributes:
        values: node name -> result of the last ``infer``.
    """

    def __init__(self, runner: EagerRunner | HalfRunner | Float64Runner, nodes: Iterable[str]) -> None:
        self.values: dict[str, Array] = {}
        self._runner = runner
        self._graph = copy.copy(runner._graph)
        self._graph.graph = copy.deepcopy(runner._graph.graph)
        wanted = set(nodes)
        for node in list(self._graph.graph.nodes):
            if node.name in wanted:
                with self._graph.graph.inserting_after(node):
                    self._graph.graph.call_function(self._record_value, (node, node.name))

    def _record_value(self, value: torch.Tensor, name: str) -> None:
        self.values[name] = to_numpy(value)

    def infer(self, feeds: Arrays) -> dict[str, Array]:
        """Run the model on one input.

        Returns:
            node name -> result of each watched node.
        """
        plain = self._runner._graph
        self._runner._graph = self._graph
        try:
            self._runner.infer(feeds)
        finally:
            self._runner._graph = plain
        return self.values


class InnerTensors(Protocol):
    """Inner tensors of the reference on one input."""

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        """Compute tensors in float64.

        Returns:
            name -> value.
        """

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        """Compute tensors in the runtime of the reference, in the precision of the file.

        Returns:
            name -> value.
        """


class TorchInnerTensors:
    """Results of a PyTorch graph's nodes on one input.

    Args:
        precision: "fp16" or "bf16", or "" if the file computes in the model's own type.
        guide: choices of topk, sort and argmax that all runs follow; None for their own choices.
    """

    def __init__(self, model: LoadedModel, feeds: Arrays, precision: str, guide: ChoiceGuide | None = None) -> None:
        self._model = model
        self._feeds = feeds
        self._precision = precision
        self._guide = guide

    @cached_property
    def _float64_runner(self) -> Float64Runner:
        return Float64Runner(self._model)

    @cached_property
    def _eager_runner(self) -> EagerRunner | HalfRunner:
        if self._precision:
            return HalfRunner(self._model, HALVES[self._precision])
        return EagerRunner(self._model)

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        """Compute nodes of the PyTorch graph in float64.

        Returns:
            node name -> value.
        """
        with self._float64_runner.guided(self._guide):
            return WatchedRunner(self._float64_runner, nodes).infer(self._feeds)

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        """Compute nodes of the PyTorch graph in the precision of the file.

        Returns:
            node name -> value.
        """
        with self._eager_runner.guided(self._guide):
            return WatchedRunner(self._eager_runner, nodes).infer(self._feeds)


class TensorComparison:
    """Comparison of the inner tensors of a reference and of a file in a runtime, on one input.

    Args:
        insides: inner tensors of the reference.
        proto: the file.
        precision: "fp16" or "bf16", or "" if the file computes in the model's own type.
    """

    def __init__(
        self,
        insides: InnerTensors,
        proto: onnx.ModelProto,
        feeds: Arrays,
        precision: str,
        optimize: bool = False,
        provider: str = "cpu",
    ) -> None:
        self.insides = insides
        self.proto = proto
        self.precision = precision
        self.optimize = optimize
        self.provider = provider
        # Size in bytes of the largest tensor of the reference in the last comparison.
        self.largest = 0
        types = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in proto.graph.input}
        self._ours = {name: value.astype(types[name]) if name in types else value for name, value in feeds.items()}

    def input_values(self) -> dict[str, Array]:
        """Return the inputs in the file's dtypes, by name."""
        return dict(self._ours)

    def runtime_values(self, tensors: Sequence[str]) -> RunResult:
        """Compute ``tensors`` of the file in the runtime.

        Returns:
            tensor -> value.
        """
        probed = copy_model(self.proto)
        forget_dim_names(probed.graph)
        return self._run_probed(probed, tensors, self._ours)

    def _run_probed(self, probed: onnx.ModelProto, tensors: Sequence[str], feeds: RunResult) -> RunResult:
        """Run a copy of the file with ``tensors`` added to its outputs."""
        known = {v.name for v in (*probed.graph.output, *probed.graph.input)}
        probed.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in dict.fromkeys(tensors) if name not in known
        )
        with self.open_runner_of(probed) as runner:
            values = runner.infer(feeds)
        return {name: feeds[name] if name in feeds else values[name] for name in tensors}

    @contextmanager
    def open_runner_of(self, proto: onnx.ModelProto) -> Iterator[Runner]:
        """Open a model in the runtime.

        Yields:
            the runner.
        """
        with (
            serialize_for_session(proto) as source,
            open_session_runner(source, optimize=self.optimize, provider=self.provider) as runner,
        ):
            yield runner

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        """Return tensors of the reference in float64, by name."""
        return self.insides.reference_values(nodes)

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        """Return tensors of the reference in the precision of the file, by name."""
        return self.insides.eager_values(nodes)

    def compare_pairs(self, chosen: Sequence[TensorPair]) -> list[DriftPoint | None]:
        """Judge each pair.

        Returns:
            one `DriftPoint` for each pair; None if the tensors are not floating-point or differ in size.
        """
        nodes = [pair.node for pair in chosen]
        wide = self.reference_values(nodes)
        own = self.eager_values(nodes)
        values = self.runtime_values([pair.tensor for pair in chosen])
        self.largest = max((value.nbytes for value in wide.values()), default=0)
        return [self._compare_pair(pair, values[pair.tensor], wide[pair.node], own[pair.node]) for pair in chosen]

    def _compare_pair(self, pair: TensorPair, value: Array, reference: Array, eager: Array) -> DriftPoint | None:
        if value.dtype.kind in "iub" or value.size != reference.size:
            return None
        found = difference_from_float64(value.reshape(reference.shape), reference)
        base = difference_from_float64(eager, reference).error
        if self.precision:
            dtype = FORMATS[self.precision].dtype
        else:
            dtype = value.dtype
        allowed = allowed_beside_peer(base, largest_rounded(eager, reference), dtype)
        return DriftPoint(pair.module, pair.tensor, pair.where, found.error, base, allowed, found.scale, found.reason)


def measure_drift(
    model: LoadedModel,
    proto: onnx.ModelProto,
    feeds: Arrays,
    precision: str = "",
    progress: Progress | None = None,
    *,
    ran: onnx.ModelProto | None = None,
    clock: BudgetClock | None = None,
    label: str = "",
) -> list[DriftPoint]:
    """Measure the error of every corresponding tensor in onnxruntime, with its optimizer off.

    Args:
        precision: "fp16" or "bf16", or "" if the file computes in the model's own type.
        ran: another form of the file that runs instead, such as the optimized file. Tensors that it does not have are
            skipped.
        clock: limit on the time. When it is over, only the first `AT_ONCE` tensors are measured, and the clock records
            the number of skipped tensors under ``label``.

    Returns:
        points in the file's order.

    Raises:
        RuntimeUnavailable: onnxruntime has no kernel for a node.
    """
    every = pair_tensors(model, proto)
    if ran is not None:
        names = {name for node in ran.graph.node for name in node.output} | {v.name for v in ran.graph.input}
        every = [pair for pair in every if pair.tensor in names]
    laboratory = TensorComparison(
        TorchInnerTensors(model, feeds, precision), proto if ran is None else ran, feeds, precision
    )
    matched = list[DriftPoint]()
    start = 0
    size = AT_ONCE
    while chosen := every[start : start + size]:
        if start and clock is not None and clock.is_over():
            clock.drift[label] = len(every) - start
            break
        if progress is not None:
            progress("drift", start, len(every))
        matched += [point for point in laboratory.compare_pairs(chosen) if point is not None]
        start = start + size
        size = max(AT_ONCE, _BYTES // max(laboratory.largest, 1))
    return matched


def apply_ort_optimizer(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Optimize a model with onnxruntime for this machine's CPU.

    The optimizer does not fuse away a tensor that is requested as an output. So the file is first optimized without
    such requests, and the optimized file is later run unchanged.

    Returns:
        the optimized model, with ops that only onnxruntime knows.
    """
    with tempfile.TemporaryDirectory() as folder, serialize_for_session(proto) as source:
        target = Path(folder) / "optimized.onnx"
        with OrtRunner(source, saved=target):
            return onnx.load(target)
