"""A live module as a Model: a copy in eval mode, traced by torch.export with the wished dynamic dims."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ExportError, InputError, LoadError, NormdeployError
from ..model import Model
from ..recurrent import kept_whole
from ..torch_state import kept_torch_state
from .asserts import drop_guesses
from .calls import Call, dim_names, example_sizes, given_call, made_call, spread, with_example_sizes
from .complaints import above_excluded, complaint, narrowed, unsolved
from .eager_failures import describe_failure
from .fake_quantizers import fix_fake_quantizers, shaped_fake_quantizers
from .inputs import Wishes, describe, names_of, parse
from .limits import limited
from .origins import Conditions, watched
from .program import live_guards
from .refusals import refused, require_float, require_tensors
from .signature import output_names
from .specs import describe_inputs
from .training import reachable, require_eval, require_eval_graph
from .transforms import differentiates, refused_derivative, without_levels
from .written import assigned, written_buffers

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)  # torch.compile's has a child called _orig_mod
_ATTEMPTS = 4  # exports, each with the ranges narrowed to what the one before asked for


def from_module(
    module: nn.Module,
    args: torch.Tensor | Sequence[Any] | Mapping[str, Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Sequence[str] = (),
    dynamic_shapes: Any = None,
    inputs: Sequence[str] = (),
    eval: bool = False,
    shared: bool = False,
) -> Model:
    """Trace a live module. A copy of it is traced: the object itself, its tensors and its flags stay as they are.

    Args:
        module: in eval mode, unless ``eval``.
        args: example positional arguments: tensors, nested containers, plain values; or one tensor alone. A mapping
            holds keyword arguments where it fits forward's parameters, else it is the one argument. Without args and
            kwargs, examples are made from ``inputs``.
        kwargs: example keyword arguments.
        dims: ranges of named dims, ``batch=1:8:64`` (min:opt:max).
        dynamic_shapes: as ``torch.export.export`` takes it, instead of names in ``inputs``.
        inputs: what the tensors look like and which dims are dynamic, ``ids:int64[batch,seq]{0:30522}``; by the names
            of the forward parameters, or all of them in their order under new names.
        eval: put the copy in eval mode where it is not.
        shared: the copy's parameters lie in the memory of the module's: for whoever is done before the module changes.

    Raises:
        InputError: the inputs do not fit the module, or a dim that was asked to be dynamic is fixed by it.
        TrainingModeError: a part of the module is in training mode.
        ExportError: torch.export can't trace the module.
    """
    if not isinstance(module, nn.Module):
        raise InputError(
            f"a module is wanted, not {type(module).__name__}: pass a torch.nn.Module, an ExportedProgram or a file's"
            " path"
        )
    own, wishes = copied(unwrapped(module), shared), parse(inputs, dims)
    args, kwargs = spread(own, args, kwargs or {})
    return trace(own, args, kwargs, wishes, dynamic_shapes=dynamic_shapes, eval_mode=eval, kind="live module")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that DataParallel, DistributedDataParallel or torch.compile wraps.

    Raises:
        LoadError: it is TorchScript.
    """
    while isinstance(module, _WRAPPERS) or "_orig_mod" in getattr(module, "_modules", {}):
        module = module.module if isinstance(module, _WRAPPERS) else module.get_submodule("_orig_mod")
    if isinstance(module, torch.jit.ScriptModule):
        raise LoadError(
            f"{type(module).__name__} is a TorchScript module, which torch.export does not take: pass the module that"
            " it was made from"
        )
    return module


def copied(module: nn.Module, shared: bool = False) -> nn.Module:
    """A copy on the CPU. ``shared``: its parameters, not its buffers, lie in the memory of ``module``'s, for whoever
    does not run it.

    Raises:
        LoadError: it holds something that can't be copied.
    """
    # copy.deepcopy refuses tensors that are results of a computation, such as the weight of an old weight_norm
    memo = {
        id(item): item.detach().clone()
        for _, item in reachable(module)
        if isinstance(item, torch.Tensor) and not item.is_leaf
    }
    if shared:
        memo |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters() if _shareable(p)}
    try:
        return copy.deepcopy(module, memo).cpu()
    except Exception as error:  # whatever an attribute of the user's module raises
        raise LoadError(
            f"{type(module).__name__} can't be copied ({type(error).__name__}: {error}), and it is never exported in "
            "place: remove what can't be copied from its attributes"
        ) from error


def _shareable(parameter: nn.Parameter) -> bool:
    plain = type(parameter) is nn.Parameter and not parameter.is_inference()
    return plain and parameter.device.type == "cpu" and parameter.layout == torch.strided


def trace(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wishes: Wishes,
    *,
    dynamic_shapes: Any = None,
    eval_mode: bool = False,
    kind: str,
) -> Model:
    """``from_module`` for a module that is ours already: it may be changed."""
    require_float(module)
    module.requires_grad_(
        False
    )  # of an attention that asks for gradients torch 2.13 traces views that it then can't decompose
    require_eval(module, eval_mode)
    fix_fake_quantizers(module)
    if dynamic_shapes is not None and any(dim.name for wish in wishes.inputs for dim in wish.shape):
        raise InputError("dynamic dims are given twice, by names in the inputs and by dynamic_shapes: give one of them")
    if dynamic_shapes is not None and not (args or kwargs):
        raise InputError(
            "dynamic_shapes were given without example arguments: give args or kwargs too, or name the dims in inputs"
        )
    used = names_of(wishes.inputs)
    # Without any input its absence is the fault to name, which the example call does.
    described = wishes.inputs or args or kwargs
    if described and (unknown := sorted(wishes.dims.keys() - set(used))):
        raise InputError(
            f"the dim {unknown[0]!r} belongs to no input: the dynamic dims are"
            f" {', '.join(dict.fromkeys(used)) or 'none'}"
        )
    with assigned(module) as replaced:
        if args or kwargs:
            call = given_call(module, args, kwargs, wishes)
            program, wishes = _export_widest(module, call, with_example_sizes(wishes, call), dynamic_shapes)
        else:
            program, call, wishes = _export_made(module, wishes)
    require_eval_graph(program, eval_mode)
    names = dim_names(module, call, dynamic_shapes) if dynamic_shapes is not None else ()
    specs, taken = describe_inputs(program, live_guards(program), call.wished(wishes), wishes, fresh=True, names=names)
    require_tensors(program)
    outputs = output_names(program, [spec.name for spec in specs])
    written = tuple(dict.fromkeys([*replaced, *written_buffers(program)]))
    model = Model(program=program, inputs=specs, outputs=outputs, kind=kind, taken=taken, written=written)
    drop_guesses(model, lambda: copied(module))
    return model


class _DoesNotRun(InputError):
    """The module itself fails on the example inputs."""


def _export_made(module: nn.Module, wishes: Wishes) -> tuple[torch.export.ExportedProgram, Call, Wishes]:
    failure: _DoesNotRun | None = None
    for sizes in example_sizes(limited(wishes, getattr(module, "config", None))):
        call = made_call(module, wishes, sizes)
        try:
            program, wishes = _export_widest(module, call, wishes, None)
            return program, call, wishes
        except _DoesNotRun as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _export_widest(
    module: nn.Module, call: Call, wishes: Wishes, dynamic_shapes: Any
) -> tuple[torch.export.ExportedProgram, Wishes]:
    """Export with the dims of which nothing was stated as wide as the module allows; where that fails, up to the usual
    maximum."""
    wider = limited(wishes, getattr(module, "config", None))
    if wider.dims == wishes.dims:
        return _export_narrowing(module, call, wishes, dynamic_shapes)
    try:
        return _export_narrowing(module, call, wider, dynamic_shapes)
    except (ExportError, InputError) as error:
        first = error
    try:
        return _export_narrowing(module, call, wishes, dynamic_shapes)
    except (ExportError, InputError) as error:
        if _renamed_ranges(str(first), wider, wishes) == str(error):
            raise
        tried = ", ".join(describe(dim) for name, dim in wider.dims.items() if dim != wishes.dims.get(name))
        raise type(error)(f"{error}. Before, with {tried}: {first}") from first


def _renamed_ranges(message: str, wider: Wishes, wishes: Wishes) -> str:
    """Return the message with the ranges of ``wishes`` where it names those of ``wider``."""
    for name, dim in wider.dims.items():
        message = message.replace(describe(dim), describe(wishes.dims.get(name, dim)))
    return message


def _export_narrowing(
    module: nn.Module, call: Call, wishes: Wishes, dynamic_shapes: Any
) -> tuple[torch.export.ExportedProgram, Wishes]:
    """Export; where torch finds that a dim can't have all of its range, narrow it if the user stated none, and try
    again."""
    in_steps = False
    for _ in range(_ATTEMPTS):
        shapes = dynamic_shapes if dynamic_shapes is not None else _dynamic_shapes(module, call, wishes)
        with watched(module) as conditions:
            try:
                return _export(module, call, shapes, in_steps), wishes
            except NormdeployError:
                raise
            except Exception as error:
                failure = error
        if "Constraints violated" not in str(failure):
            raise _translated(module, call, wishes, failure, conditions) from failure
        narrower, asked_steps = narrowed(str(failure), wishes, conditions)
        narrower = above_excluded(str(failure), narrower)
        if narrower == wishes and asked_steps <= in_steps:
            raise InputError(complaint(str(failure), wishes, conditions)) from failure
        wishes, in_steps = narrower, in_steps or asked_steps
    raise InputError(
        f"{type(module).__name__} can't be exported with {', '.join(map(describe, wishes.dims.values()))}: state"
        " narrower ranges with --dim"
    )


def _dynamic_shapes(module: nn.Module, call: Call, wishes: Wishes) -> Any:
    ranges: dict[str, Any] = {
        name: torch.export.Dim(name, min=dim.min, max=dim.max) for name, dim in wishes.dims.items()
    }
    shapes = torch.export.ShapesCollection()
    dynamic = False
    for leaf, wish in zip(call.tensors(), call.wished(wishes), strict=True):
        # torch has no sums of dims: it finds out itself that one is as long as others together
        shape = wish.shape if wish else ()
        named = {
            index: torch.export.Dim.AUTO if dim.terms else ranges[dim.name]
            for index, dim in enumerate(shape)
            if dim.name
        }
        if named:
            shapes[leaf], dynamic = named, True
    return shapes.dynamic_shapes(module, call.args, call.kwargs) if dynamic else None


def _export(module: nn.Module, call: Call, shapes: Any, steps: bool) -> torch.export.ExportedProgram:
    """torch.export, silent. ``steps``: a dim goes in steps (multiples of something), which torch can only check at run
    time."""
    # A length that may change must not be unrolled; a fixed one is exported as ever.
    recurrent = kept_whole() if shapes is not None else contextlib.nullcontext()
    with (
        warnings.catch_warnings(),
        _quiet(),
        _unchecked_distributions(),
        recurrent,
        kept_torch_state(),
        shaped_fake_quantizers(),
    ):
        warnings.simplefilter(
            "ignore"
        )  # of attributes assigned in the copy while tracing, deprecations of torch's own calls
        program = torch.export.export(
            module,
            call.args,
            call.kwargs,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=steps,
        )
        return without_levels(program, type(module).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs and prints the whole graph with some failures; what matters of it is in the exception."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Let distributions not check their values, which no trace can hold; what they compute stays the same."""
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)


def _translated(module: nn.Module, call: Call, wishes: Wishes, error: Exception, conditions: Conditions) -> Exception:
    """torch.export's failure as an error of ours: of the inputs where the call itself fails, else of the export."""
    name, text = type(module).__name__, str(error)
    if solved := unsolved(text, wishes, conditions):
        return InputError(solved)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if "tree_name" in text:
        return InputError(
            f"{name} takes inputs by **kwargs, for which torch.export has no dynamic dims: give forward named"
            " parameters, or fixed sizes"
        )
    if type(error).__name__ == "UserError" and "dynamic_shapes" in text:
        return InputError(f"the dynamic_shapes do not fit {name}: {first}")
    if isinstance(error, ExportError):
        return error
    own = copied(module)
    try:
        with torch.no_grad(), kept_torch_state():
            own(*call.args, **call.kwargs)
    except Exception as eager:
        return _DoesNotRun(describe_failure(own, call, wishes, eager))
    if differentiates(error):
        return refused_derivative(name)
    return refused(module, error)
