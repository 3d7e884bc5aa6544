"""Read the choices that an ONNX file makes in onnxruntime: the indices of its TopK, ArgMax and ArgMin nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

import onnx

from ...errors import GraphError, InputError, RuntimeUnavailable
from ...graphs.proto_queries import captured_names, forget_dim_names
from ...model import LoadedModel
from ...precision.tensor_ranges import serialize_for_session
from ...runtimes import HeldRunner, Runner
from ...runtimes.named_runners import open_session_runner
from ...runtimes.ordering_operators import OrderingOperator, list_ordering_operators
from ...storage.onnx_files import iter_tensors
from ...storage.proto_traversal import copy_model, iter_bodies
from ...storage.shared_weights import embed_shared_array
from ...types import Array, Arrays

# Place of the indices among the results of each op.
_INDICES = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}


@dataclass(frozen=True)
class PairedChoices:
    """Ordering operators of a model, each with the tensor of indices in a file.

    Attributes:
        tensors: the file's tensor of indices for each operator.
    """

    operators: tuple[OrderingOperator, ...]
    tensors: tuple[str, ...]

    def with_outputs(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Copy a file and add the indices to its outputs, after all others.

        Returns:
            the copy. It contains its weights, because a session knows no shared ones.
        """
        probed = copy_model(proto)
        for tensor in iter_tensors(probed):
            embed_shared_array(tensor)
        forget_dim_names(probed.graph)
        known = {v.name for v in probed.graph.output}
        probed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.tensors if name not in known)
        return probed

    def select_picks(self, values: Mapping[str, Array]) -> list[Array]:
        """Select the indices from the outputs of the copy.

        Returns:
            one array for each operator.
        """
        return [values[name] for name in self.tensors]


def pair_choices(model: LoadedModel, proto: onnx.ModelProto) -> PairedChoices | None:
    """Pair the ordering operators of a model with the nodes of a file, by their order.

    Operators and nodes whose indices are not read are left out, because the values alone do not depend on a choice.

    Returns:
        the pairs. None if there are none, if their numbers or ops differ, or if a body of control flow has one.
    """
    operators = list_ordering_operators(model.program.graph_module)
    inner = islice(iter_bodies(proto), 1, None)
    if not operators or any(node.op_type in _INDICES for body in inner for node in body.node):
        return None
    read = {name for node in proto.graph.node for name in (*node.input, *captured_names(node))}
    read |= {v.name for v in proto.graph.output}
    tensors = dict[str, str]()
    for node in proto.graph.node:
        place = _INDICES.get(node.op_type)
        if place is not None and len(node.output) > place and node.output[place] in read:
            tensors[node.output[place]] = node.op_type
    if [*tensors.values()] != [operator.onnx_op for operator in operators]:
        return None
    return PairedChoices(tuple(operators), tuple(tensors))


class ChoiceReader(HeldRunner):
    """Session of a file in a runtime that returns the file's choices. It is opened on the first input.

    Args:
        load: loads the file.
        optimize, provider: as for `open_session_runner`.
    """

    def __init__(
        self, model: LoadedModel, load: Callable[[], onnx.ModelProto], *, optimize: bool, provider: str
    ) -> None:
        self._model = model
        self._load = load
        self._optimize = optimize
        self._provider = provider
        self._is_open = False
        self._runner: Runner | None = None
        self._stack = ExitStack()
        self.paired: PairedChoices | None = None

    def read(self, feeds: Arrays) -> list[Array] | None:
        """Run the file.

        Args:
            feeds: inputs of the file by the file's names.

        Returns:
            the indices for each operator of ``paired``. None if the choices can't be paired with the model's, or if
            the file does not run with more outputs.
        """
        try:
            if not self._is_open:
                self._is_open = True
                self._open()
            if self._runner is None or self.paired is None:
                return None
            return self.paired.select_picks(self._runner.infer(feeds))
        except (GraphError, InputError, RuntimeUnavailable):
            return None

    def _open(self) -> None:
        proto = self._load()
        self.paired = pair_choices(self._model, proto)
        if self.paired is not None:
            source = self._stack.enter_context(serialize_for_session(self.paired.with_outputs(proto)))
            self._runner = self._stack.enter_context(
                open_session_runner(source, optimize=self._optimize, provider=self._provider)
            )

    def _free_model(self) -> None:
        self._runner = None
        self._stack.close()
