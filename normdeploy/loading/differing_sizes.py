"""Find sizes at which a module computes something else than its trace.

torch.export traces one branch of each Python condition on sizes. It limits the dims to the sizes at which the trace
takes the same branch, with two exceptions:

- It assumes that each dynamic dim has at least 2 elements (or at least 2 steps). It treats a condition that holds for
  all of these sizes as always true. The dim still takes the size 1.
- It does not limit the dims by a condition that two sizes differ.

The module and its trace are therefore compared at the smallest sizes and at equal sizes. A condition may also hold at
all of these sizes by chance of the random sample: the outputs of both branches are then equal on this sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..errors import InputError
from ..model import Dim
from .dynamic_squeezes import describe_squeezes
from .input_request import InputRequest
from .program_file import find_live_guards
from .trace_comparison import TraceComparison

# Number of sizes of each dim among which a common size is searched.
_SIZES = 64


def exclude_differing_sizes(comparison: TraceComparison, wishes: InputRequest) -> InputRequest:
    """Compare a module with its trace at the sizes whose branches torch.export does not check.

    Returns:
        ``wishes``; or, if the module differs from its trace at sizes that the user did not demand, a request without
        these sizes.

    Raises:
        InputError: the module differs from its trace at a size that the user demanded.
    """
    dims = comparison.model.named_dims
    if not dims or not comparison.is_possible:
        return wishes
    ordinary = _choose_ordinary_sizes(dims)
    # The smallest sizes may be equal, so equal sizes come first.
    equal = _find_equal_sizes(comparison, dims)
    if equal and _differs(comparison, equal, ordinary):
        return _fix_one_of_equal_dims(equal, dims, wishes)
    for special in _iter_special_sizes(dims):
        if not _differs(comparison, ordinary | special, ordinary):
            continue
        alone = [name for name, size in special.items() if _differs(comparison, ordinary | {name: size}, ordinary)]
        lines = describe_squeezes(comparison.model.program)
        return _start_higher(alone or [*special], special, dims, wishes, lines)
    return wishes


def _iter_special_sizes(dims: Mapping[str, Dim]) -> Iterator[dict[str, int]]:
    """Yield the smallest sizes of all dims that can have a special size, and then the next sizes."""
    for place in range(2):
        sizes = {name: dim.allowed_sizes()[place] for name, dim in dims.items() if len(dim.allowed_sizes()) > place}
        special = {name: size for name, size in sizes.items() if _is_special(size, dims[name])}
        if special:
            yield special


def _is_special(size: int, dim: Dim) -> bool:
    """Return whether torch.export assumes that the dim never has this size."""
    return size < 2 * dim.step


def _ordinary_size(dim: Dim) -> int:
    """Return the smallest size for which the trace was made; opt if the dim has only special sizes."""
    return next((size for size in dim.allowed_sizes()[:3] if not _is_special(size, dim)), dim.opt)


def _choose_ordinary_sizes(dims: Mapping[str, Dim]) -> dict[str, int]:
    """Choose small sizes that differ from each other if the ranges permit, as the sizes of the trace's example do."""
    chosen: dict[str, int] = {}
    for name, dim in dims.items():
        least = _ordinary_size(dim)
        chosen[name] = next((size for size in dim.allowed_sizes(least)[:_SIZES] if size not in chosen.values()), least)
    return chosen


def _differs(comparison: TraceComparison, sizes: Mapping[str, int], ordinary: Mapping[str, int]) -> bool:
    """Return whether the module differs from its trace at ``sizes``, but not at the ordinary sizes.

    A module that differs at all sizes does not differ because of a size. An example is a module that counts its calls.
    """
    return comparison.agrees_at(sizes) is False and comparison.agrees_at(ordinary) is True


def _start_higher(
    names: list[str], special: Mapping[str, int], dims: Mapping[str, Dim], wishes: InputRequest, lines: str
) -> InputRequest:
    """Let dims begin at the smallest size for which the trace was made.

    Args:
        special: sizes at which the module differs from its trace.
        lines: lines of the code that squeeze a dynamic dim, for the message.
    """
    begun: dict[str, Dim] = {}
    notes = []
    for name in names:
        dim = dims[name]
        first = _ordinary_size(dim)
        begun[name] = Dim(name, first, max(dim.opt, first), max(dim.max, first), step=dim.step)
        branch = f"at {name}={special[name]}, the model's code takes another branch than at {name}={first}{lines}"
        # The dims of an example's dynamic_shapes are not in the request.
        if name in wishes.demanded or name not in wishes.dims or _is_special(dim.max, dim):
            raise InputError(
                f"the dim {dim} was requested, but {branch}, and a file has only one branch: start at {first}, with"
                f" --dim {begun[name]}, or export another file for the size {special[name]} alone"
            )
        notes.append(f"the sizes of {name!r} begin at {first}: {branch}")
    return replace(wishes.with_dims(wishes.dims | begun), notes=(*wishes.notes, *notes))


def _find_equal_sizes(comparison: TraceComparison, dims: Mapping[str, Dim]) -> dict[str, int]:
    """Return the smallest common size of all dims if torch met a condition that two sizes differ, else {}."""
    if len(dims) < 2 or not any("!=" in guard.text for guard in find_live_guards(comparison.model.program)):
        return {}
    least = max(map(_ordinary_size, dims.values()))
    common = set.intersection(*(set(dim.allowed_sizes(least)[:_SIZES]) for dim in dims.values()))
    return dict.fromkeys(dims, min(common)) if common else {}


def _fix_one_of_equal_dims(equal: Mapping[str, int], dims: Mapping[str, Dim], wishes: InputRequest) -> InputRequest:
    """Make one dim static if the user did not demand it.

    Args:
        equal: sizes at which the module differs from its trace.
    """
    size = next(iter(equal.values()))
    branch = f"at {' = '.join(equal)} = {size}, the model's code takes another branch than at different sizes"
    free = [name for name in equal if name in wishes.assumed]
    if free:
        fixed = dims[free[0]].opt
        note = f"the file has the fixed size {free[0]}={fixed}: {branch}. Choose another with --dim {free[0]}=N:N:N"
        return wishes.with_fixed_dims({free[0]: fixed}, note)
    usual = dims[min(equal)].opt
    raise InputError(
        f"the dims {', '.join(map(str, dims.values()))} were requested, but {branch}, and a file has only one branch:"
        " use one name for dims that are always equal, or fix one of them, for example with"
        f" --dim {min(equal)}={usual}:{usual}:{usual}"
    )
