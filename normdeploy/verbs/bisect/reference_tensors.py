"""Evaluate inner tensors of a reference ONNX file, and pair them with the tensors of the compared file.

They are evaluated in float64 and in the types of the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import onnx

from ...compare.error_bounds import has_lost_all_digits
from ...errors import NormdeployError
from ...graphs.file_graph import widen_to_float64
from ...model import LoadedModel
from ...runtimes import RunResult
from ...runtimes.float64_evaluator import inferred_dtypes
from ...runtimes.ordering_operators import ChoiceGuide
from ...runtimes.torch_runners import HALVES
from ...storage.proto_traversal import copy_model
from ...types import Array, Arrays
from ..verify.followed_choices import FollowedRuns, follow_file
from ..verify.reference_models import FileModel, Original, own_precision_runner
from ..verify.tensor_drift import InnerTensors, TensorPair, TorchInnerTensors, boundaries_of_file, pair_tensors


class FileInnerTensors:
    """Inner tensors of a reference on one input.

    Args:
        precision: "fp16" or "bf16" if the compared file computes in this type; "" if it computes in the reference's
            types.
    """

    def __init__(self, model: FileModel, feeds: Arrays, precision: str) -> None:
        self._model, self._feeds, self._half = model, feeds, HALVES.get(precision)
        self._types = inferred_dtypes(model.proto)

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        """Evaluate tensors in float64.

        Returns:
            Name -> array.
        """
        names = list(nodes)
        values = self._with_outputs(names).float64_runner.infer(self._feeds)
        return {name: values[name] for name in names}

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        """Evaluate tensors in the runtime of the reference, in the precision of the compared file.

        Returns:
            Name -> array.
        """
        names = list(nodes)
        _, make = own_precision_runner(self._with_outputs(names), self._half)
        with make() as runner:
            values = runner.infer(self._feeds)
        return {name: values[name] for name in names}

    def _with_outputs(self, names: Iterable[str]) -> FileModel:
        """Return the reference with ``names`` among its outputs."""
        proto = copy_model(self._model.proto)
        known = {v.name for v in proto.graph.output}
        for name in dict.fromkeys(names):
            if name not in known:
                proto.graph.output.append(self._output_info(name))
        # The session and the path are dropped, so that this copy runs instead of the user's session or file.
        return replace(self._model, proto=proto, session=None, path=None)

    def _output_info(self, name: str) -> onnx.ValueInfoProto:
        """Declare a tensor as an output, with its type if known. A declaration without a type would hide the inferred
        type.
        """
        kind = self._types.get(name)
        if kind is None:
            return onnx.ValueInfoProto(name=name)
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(kind), None)


class RangedInnerTensors:
    """Inner tensors of a model in float16; those that exceed its range are computed in bfloat16, as in ``verify``.

    An overflow is not a rounding, so it must widen no bound: otherwise an overflow in the file would be allowed.

    Args:
        own: tensors in float16.
        wide: the same in bfloat16, which has float32's range.
    """

    def __init__(self, own: InnerTensors, wide: InnerTensors) -> None:
        self._own = own
        self._wide = wide

    def reference_values(self, nodes: Iterable[str]) -> RunResult:
        """Evaluate tensors in float64.

        Returns:
            Name -> array.
        """
        return self._own.reference_values(nodes)

    def eager_values(self, nodes: Iterable[str]) -> RunResult:
        """Evaluate tensors in float16, or in bfloat16 if they keep no digits in float16.

        Returns:
            Name -> array.
        """
        values = self._own.eager_values(nodes)
        right = self._own.reference_values(values)
        lost = [name for name, value in values.items() if _is_lost(value, right[name])]
        if not lost:
            return values
        wide = self._wide.eager_values(lost)
        return values | {name: wide[name] for name in lost if not _is_lost(wide[name], right[name])}


def _is_lost(value: Array, reference: Array) -> bool:
    return reference.dtype.kind == "f" and has_lost_all_digits(widen_to_float64(value), reference)


def find_followed_choices(
    model: Original, proto: onnx.ModelProto, feeds: Arrays, precision: str, *, optimize: bool, provider: str
) -> ChoiceGuide | None:
    """Read the choices of a file (topk, sort, argmax) that the reference follows, as in ``verify``.

    Returns:
        The choices. None if they are unknown, or if rounding does not explain them.
    """
    if not isinstance(model, LoadedModel):
        return None
    try:
        runs = follow_file(model, proto, feeds, precision, optimize=optimize, provider=provider)
    except NormdeployError:
        # The search reports that the model does not run on this input.
        return None
    if isinstance(runs, FollowedRuns):
        return runs.follower
    return None


def open_inner_tensors(
    model: Original, feeds: Arrays, precision: str, guide: ChoiceGuide | None = None
) -> InnerTensors:
    """Open the inner tensors of a PyTorch model or an ONNX file.

    Args:
        guide: choices that a PyTorch model follows.

    Returns:
        An evaluator of inner tensors on ``feeds``.
    """

    def open_in(own: str) -> InnerTensors:
        if isinstance(model, FileModel):
            return FileInnerTensors(model, feeds, own)
        return TorchInnerTensors(model, feeds, own, guide)

    if precision == "fp16":
        return RangedInnerTensors(open_in(precision), open_in("bf16"))
    return open_in(precision)


def pair_with_model(model: Original, proto: onnx.ModelProto) -> list[TensorPair]:
    """Pair corresponding tensors of the model and a file.

    Returns:
        Pairs in the file's order.
    """
    if isinstance(model, LoadedModel):
        return pair_tensors(model, proto)
    return _pair_files(model, proto)


def _pair_files(model: FileModel, proto: onnx.ModelProto) -> list[TensorPair]:
    """Pair tensors of two files by their names and by the boundaries of modules.

    Tensors are paired if they have the same name and are results of the same op. The op is compared because exporters
    number tensors, so equal names may mean different tensors. Tensors are also paired if each is the only one that
    enters or leaves a module of the same name.
    """
    theirs, their_order = boundaries_of_file(model.proto)
    ours, order = boundaries_of_file(proto)
    their_ops = _op_types_by_tensor(model.proto)
    our_ops = _op_types_by_tensor(proto)
    matched: dict[tuple[str, str], TensorPair] = {}
    for where in sorted(theirs.keys() & ours.keys()):
        if len(theirs[where]) == len(ours[where]) == 1:
            (node,), (tensor,) = theirs[where], ours[where]
            if tensor in order and node in their_order:
                matched[tensor, node] = TensorPair(tensor, node, "", where, (order[tensor], their_order[node]))
    paired = {tensor for tensor, _ in matched} | {node for _, node in matched}
    for name in order.keys() & their_order.keys() - paired:
        if our_ops[name] == their_ops[name]:
            matched[name, name] = TensorPair(name, name, "", "of one name", (order[name], their_order[name]))
    return sorted(matched.values(), key=lambda pair: pair.place)


def _op_types_by_tensor(proto: onnx.ModelProto) -> dict[str, str]:
    """Return the op that makes each tensor."""
    return {name: node.op_type for node in proto.graph.node for name in node.output}
