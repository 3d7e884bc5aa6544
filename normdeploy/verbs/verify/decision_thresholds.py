"""Make inputs that equal the thresholds of a model, because x > 0.5 and x >= 0.5 differ only there.

A threshold is a number with which the model compares an input, or at which it rounds an input differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ...graphs.input_comparisons import JUMPS, compares_values, comparison_thresholds
from ...inputs.input_cases import EXTREME, InputCase, is_floating_input
from ...loading.program_signature import traced_dtype
from ...model import InputSpec, LoadedModel, ModelSignature
from ...runtimes.float64_evaluator import inline_functions
from ...runtimes.rounding_noise import split_op_names
from ...runtimes.torch_runners import lifted_values
from ...types import Array
from .edge_cases import CaseMaker
from .reference_models import FileModel, Original, pair_tensor_inputs

# Maximum number of elements of a constant that is read as thresholds.
_FEW = 64
# Maximum number of groups of thresholds for one input. Each group makes two cases.
_GROUPS = 4
_MOVES = split_op_names("""
    view _unsafe_view reshape unsqueeze squeeze expand expand_as broadcast_to slice select narrow transpose permute
    movedim t mT numpy_T contiguous clone alias detach detach_ flatten unflatten repeat repeat_interleave lift_fresh
    lift_fresh_copy flip roll split split_with_sizes chunk unbind view_as cat stack concat where masked_fill gather
    index index_select take_along_dim scatter pad constant_pad_nd neg abs relu maximum minimum clamp clamp_min
    clamp_max max min amax amin unfold to _to_copy type_as getitem
    """)
_COMPARISONS = split_op_names("eq ne lt le gt ge")
# Op -> positions of its arguments: the values, and the edges of the buckets.
_BUCKETS = {"bucketize": (0, 1), "searchsorted": (1, 0)}
_REMAINDERS = split_op_names("remainder fmod frac")
# Step of the grid of inputs, and number of grid points on each side of 0.
_STEP, _REACH = 0.125, 24
# Maximum number of cases in which small inputs cover every point of the grid.
_GRIDS = 4
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def find_model_thresholds(model: Original) -> dict[str, tuple[float, ...]]:
    """Find the numbers with which a model compares unchanged elements of its floating-point inputs.

    Returns:
        input name -> thresholds.
    """
    if isinstance(model, FileModel):
        return comparison_thresholds(inline_functions(model.proto))
    return _find_program_decisions(model)


def threshold_cases(
    model: ModelSignature,
    opt: Mapping[str, int],
    seed: int,
    thresholds: Mapping[str, Sequence[float]],
    types: Sequence[str],
) -> Iterator[InputCase]:
    """Make random inputs in which half of the elements are thresholds, and the same inputs with thresholds in the other
    half.

    Args:
        opt: usual sizes by name.
        thresholds: input name -> thresholds.
        types: half types of the files. Thresholds that one of these types would round are not used.

    Yields:
        two cases for each group of thresholds.
    """
    specs = {spec.name: spec for spec in model.inputs if is_floating_input(spec)}
    for name, wanted in thresholds.items():
        values = [v for v in wanted if name in specs and _input_holds(v, specs[name], types)]
        for start in range(min(_GROUPS, len(values))):
            group = values[start::_GROUPS]
            told = ", ".join(f"{v:g}" for v in group[:_GROUPS])
            maker = CaseMaker(model, opt, seed + start)
            for half, which in enumerate(("", ", the other half")):
                change = partial(_set_to_thresholds, name=name, values=group, half=half)
                yield maker.changed_case(f"{name} at {told}{which}", EXTREME, change, promised=False)


def _set_to_thresholds(
    feeds: dict[str, Array], rng: np.random.Generator, name: str, values: Sequence[float], half: int
) -> None:
    x = feeds[name]
    flat = x.reshape(-1).copy()
    order = rng.permutation(flat.size)
    # An input with a single element has the threshold in both cases.
    if flat.size > 1:
        places = order[half::2]
    else:
        places = order
    flat[places] = np.resize(np.asarray(values), places.size).astype(flat.dtype)
    feeds[name] = flat.reshape(x.shape)


def grid_cases(model: ModelSignature, opt: Mapping[str, int], seed: int) -> Iterator[InputCase]:
    """Make inputs of random multiples of an eighth, for every floating-point input without a given range.

    Sums, and products with powers of two, are exact for such inputs. So a Round or a comparison after these ops gets
    exact ties. For example, the floor of 4x + 0.5 differs from 4x rounded to even only at ties.

    Args:
        opt: usual sizes by name.

    Yields:
        as many cases as small inputs need to cover the grid, at most `_GRIDS`.
    """
    free = [spec for spec in model.inputs if is_floating_input(spec) and spec.range is None]
    if not free:
        return
    points = np.arange(-_REACH, _REACH + 1)
    fewest = min(prod(spec.concrete_shape(opt)) for spec in free)
    for number in range(min(_GRIDS, -(-points.size // max(fewest, 1)))):
        name = f"multiples of {_STEP:g}{f', number {number}' if number else ''}"
        change = partial(_set_to_points, names=[spec.name for spec in free], points=points, number=number)
        yield CaseMaker(model, opt, seed).changed_case(name, EXTREME, change, promised=False)


def _set_to_points(
    feeds: dict[str, Array], rng: np.random.Generator, names: Sequence[str], points: Array, number: int
) -> None:
    """Fill inputs with the points in random order. Small inputs continue with the next points in the next case."""
    for name in names:
        x = feeds[name]
        order = np.concatenate([rng.permutation(points) for _ in range(-(-x.size * (number + 1) // points.size))])
        steps = order[x.size * number : x.size * (number + 1)].reshape(x.shape)
        feeds[name] = (steps * _STEP).astype(x.dtype)


def has_decisions(model: Original) -> bool:
    """Check whether a model compares floating-point numbers or rounds them to integers.

    These numbers may be inputs or inner values.

    Returns:
        True if the model has such an operator.
    """
    if isinstance(model, FileModel):
        return compares_values(inline_functions(model.proto))
    return any(_is_decision(node) for node in model.program.graph.nodes)


def _is_decision(node: torch.fx.Node) -> bool:
    if node.args:
        dtype = traced_dtype(node.args[0])
    else:
        dtype = None
    op = _op_name(node)
    if op is None or dtype is None or not dtype.is_floating_point:
        return False
    whole = op in ("to", "_to_copy", "type_as") and traced_dtype(node) in _INTEGERS
    divided = op == "floor_divide" or node.kwargs.get("rounding_mode") is not None
    return op in _COMPARISONS or op in _BUCKETS or op in JUMPS or op in _REMAINDERS or whole or divided


def _op_name(node: torch.fx.Node) -> str | None:
    """Return the name of a torch operator, such as "add" for aten::add; None for other nodes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    return str(schema.name).partition("::")[2].removesuffix("_copy")


def _input_holds(value: float, spec: InputSpec, types: Sequence[str]) -> bool:
    """Return whether the types of the input and the files represent a threshold exactly, and the input's range includes
    it.
    """
    kinds = [np.dtype(getattr(ml_dtypes, kind, kind)) for kind in (spec.dtype, *types)]
    with np.errstate(all="ignore"):
        exact = all(float(np.float64(value).astype(kind)) == value for kind in kinds)
    return exact and (spec.range is None or spec.range[0] <= value <= spec.range[1])


# ------------------------------------------------------------------ PyTorch models


def _find_program_decisions(model: LoadedModel) -> dict[str, tuple[float, ...]]:
    """Return input name -> thresholds of a program, without the graphs of its control flow."""
    origins: dict[torch.fx.Node, frozenset[str]] = {}
    constants: dict[torch.fx.Node, torch.Tensor] = {}
    lifted = lifted_values(model.program)
    for spec, node in pair_tensor_inputs(model):
        if is_floating_input(spec):
            origins[node] = frozenset({spec.name})
    found: dict[str, dict[float, None]] = {}
    for node in model.program.graph.nodes:
        if node.op == "placeholder":
            value = lifted.get(node.name)
        else:
            value = None
        if isinstance(value, torch.Tensor) and value.numel() <= _FEW:
            constants[node] = value
        if node.op != "call_function":
            continue
        op = _op_name(node) or "getitem"
        for operand, values in _iter_decisions(node, op, constants):
            for origin in origins.get(operand, ()):
                # The negated threshold is added too, because the input may be negated before the comparison.
                found.setdefault(origin, {}).update(dict.fromkeys(v for c in values for v in (c, -c)))
        if op not in _MOVES or _is_narrowing(node):
            continue
        operands = node.all_input_nodes
        if len(operands) == 1 and operands[0] in constants:
            constants[node] = constants[operands[0]]
        if moved := frozenset[str]().union(*(origins.get(operand, frozenset()) for operand in operands)):
            origins[node] = moved
    return {name: tuple(values) for name, values in found.items()}


def _iter_decisions(
    node: torch.fx.Node, op: str, constants: Mapping[torch.fx.Node, torch.Tensor]
) -> Iterator[tuple[Any, Sequence[float]]]:
    """Yield pairs: an operand of the node, and the finite numbers with which the node compares this operand."""
    args = node.args

    def operand_numbers(operand: Any) -> list[float]:
        if isinstance(operand, torch.fx.Node) and operand in constants:
            return [float(v) for v in constants[operand].double().unique() if v.isfinite()]
        # torch converts the constant to the tensor's type before the comparison.
        dtype = traced_dtype(args[0])
        if isinstance(operand, int | float) and dtype is not None and dtype.is_floating_point:
            return [float(torch.tensor(operand, dtype=dtype))]
        return []

    if op in _COMPARISONS:
        yield args[0], operand_numbers(args[1])
        yield args[1], operand_numbers(args[0])
    elif op in _BUCKETS:
        values, edges = _BUCKETS[op]
        yield args[values], operand_numbers(args[edges])
    elif op in JUMPS:
        yield args[0], JUMPS[op]
    elif op in ("to", "_to_copy") and traced_dtype(node) in _INTEGERS:
        yield args[0], JUMPS["floor"]


def _is_narrowing(node: torch.fx.Node) -> bool:
    """Return whether a node converts a floating-point tensor to a type with fewer digits, or to integers."""
    if node.all_input_nodes:
        before = traced_dtype(node.all_input_nodes[0])
    else:
        before = None
    after = traced_dtype(node)
    if before is None or after is None or not before.is_floating_point:
        return False
    return not after.is_floating_point or torch.finfo(after).eps > torch.finfo(before).eps
