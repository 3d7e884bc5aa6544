"""Load a live module: a copy in eval mode, traced by torch.export with the requested dynamic dims."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ExportError, InputError, LoadError, NormdeployError
from ..model import Dim, InputSpec, LoadedModel, named_dims_of
from .config_limits import widen_unstated_dims
from .constant_inputs import fix_inputs, make_constant_tensors, name_free_arguments, note_constants
from .decided_extremes import decide_extremes
from .default_inputs import choose_fixed_size
from .differing_sizes import exclude_differing_sizes
from .dim_constraints import (
    FixedDimError,
    describe_unsolved_dims,
    make_violation_error,
    narrow_ranges,
    raise_above_excluded,
    root_dim_name,
    suggests_steps,
    violates_division,
)
from .dynamic_squeezes import keep_dynamic_axes
from .eager_failures import describe_failure
from .example_call import (
    ExampleCall,
    copy_example_call,
    iter_example_sizes,
    make_example_call,
    name_arguments,
    prefer_example_sizes,
    spread_arguments,
    user_dim_names,
)
from .export_errors import make_export_error, refuse_integer_modules, require_tensor_outputs
from .fake_quantizers import fix_fake_quantizers, register_fake_quantizer_shapes
from .gradient_regions import inline_gradient_regions
from .in_place_writes import find_written_buffers, record_buffer_assignments
from .input_request import InputRequest, dynamic_dim_names, parse_input_request
from .input_specs import build_input_specs
from .module_parts import make_image_list, parse_module_part, select_part, takes_image_list
from .program_file import find_live_guards
from .program_signature import name_outputs
from .recurrent_ops import keep_recurrent_ops
from .size_conditions import TracedConditions, record_conditions
from .symbolic_len import trace_len_symbolically
from .torch_func import inline_vmap, is_derivative_failure, make_derivative_error
from .torch_pickles import first_line
from .torch_state import PROCESS_STATE, preserve_torch_state, silence_logger
from .trace_asserts import drop_guessed_asserts
from .trace_comparison import TraceComparison
from .traceable_models import add_default_inputs, request_inputs
from .train_mode_checks import iter_reachable, require_eval, require_eval_graph
from .transformers_exporter import TransformersExporter, find_transformers_exporter, require_same_outputs
from .transformers_switches import set_traceable_switches

# Wrapper classes of torch. The wrapper of torch.compile is not listed, because it is recognized by its child _orig_mod.
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# Maximum number of exports to try. Each uses the ranges that the previous error suggests.
_ATTEMPTS = 4
# Number of choices of sizes at which the trace of another exporter is compared with the module.
_COMPARED_SIZES = 2


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
    part: str | None = None,
) -> LoadedModel:
    """Trace a copy of a live module. The module, its tensors and its flags are not changed.

    Args:
        module: the module. It must be in eval mode, unless ``eval`` is True.
        args: example positional arguments (tensors, nested containers, plain values), or a single tensor. A mapping
            that fits forward's parameters is taken as keyword arguments, any other mapping as the only argument.
            Without args and kwargs, examples are made from ``inputs``.
        kwargs: example keyword arguments.
        dims: ranges of named dims, ``batch=1:8:64`` (min:opt:max).
        dynamic_shapes: dynamic dims as for ``torch.export.export``, instead of names in ``inputs``.
        inputs: dtypes, shapes and dynamic dims of the tensors, such as ``ids:int64[batch,seq]{0:30522}``. Use the names
            of forward's parameters, or state all inputs in order under new names. Without inputs and examples, a
            transformers model gets the inputs of its folder.
        eval: True switches the copy to eval mode.
        shared: True lets the copy's parameters share the module's memory. The module must then not change while the
            traced model is used.
        part: part of the module by the names of its modules, for example "backbone..head" (`module_parts`). The
            examples and ``inputs`` are then those of the part.

    Returns:
        The traced model.

    Raises:
        InputError: the inputs do not fit the module, or the module fixes a dim that should be dynamic.
        TrainingModeError: a part of the module is in training mode.
        ExportError: torch.export can't trace the module.
    """
    if not isinstance(module, nn.Module):
        raise InputError(
            f"expected a module, got {type(module).__name__}: pass a torch.nn.Module, an ExportedProgram or a file's "
            "path"
        )
    own = copy_module(unwrap_module(module), shared)
    wishes = parse_input_request(inputs, dims)
    kwargs = kwargs or {}
    if part is not None:
        make_example = functools.partial(make_image_list, own) if takes_image_list(own) else None
        chosen = select_part(own, parse_module_part(part, own), make_example, ())
        own = chosen.module
        if not (args or kwargs):
            wishes = request_inputs(chosen, inputs, dims)
    if wishes.constants:
        if isinstance(args, Mapping):
            positional, named = (), {**args, **kwargs}
        else:
            positional, named = (args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs)
        if positional or named:
            args, kwargs = (), name_free_arguments(own, positional, named, wishes.constants.keys())
            fix_inputs(own, make_constant_tensors(wishes.constants))
    args, kwargs = spread_arguments(own, args, kwargs)
    return trace_module(own, args, kwargs, wishes, dynamic_shapes=dynamic_shapes, eval_mode=eval, kind="live module")


def unwrap_module(module: nn.Module) -> nn.Module:
    """Remove the wrappers of DataParallel, DistributedDataParallel and torch.compile.

    Returns:
        The wrapped module, or ``module`` itself.

    Raises:
        LoadError: the module is TorchScript.
    """
    while isinstance(module, _WRAPPERS) or "_orig_mod" in getattr(module, "_modules", {}):
        if isinstance(module, _WRAPPERS):
            module = module.module
        else:
            module = module.get_submodule("_orig_mod")
    if isinstance(module, torch.jit.ScriptModule):
        raise LoadError(
            f"{type(module).__name__} is a TorchScript module, which torch.export does not accept: pass the module "
            "that it was made from"
        )
    return module


def copy_module(module: nn.Module, shared: bool = False) -> nn.Module:
    """Copy a module to the CPU.

    Args:
        shared: True lets the copy's parameters, but not its buffers, share ``module``'s memory. It is for callers that
            do not run the copy.

    Returns:
        The copy.

    Raises:
        LoadError: an attribute can't be copied.
    """
    # copy.deepcopy refuses tensors that are results of a computation, such as the weight of an old weight_norm.
    memo = {
        id(item): item.detach().clone()
        for _, item in iter_reachable(module)
        if isinstance(item, torch.Tensor) and not item.is_leaf
    }
    if shared:
        memo |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters() if _is_shareable(p)}
    try:
        return copy.deepcopy(module, memo).cpu()
    except Exception as error:
        # An attribute of the user's module may raise any exception.
        raise LoadError(
            f"{type(module).__name__} can't be copied ({type(error).__name__}: {error}), and a module is never "
            "exported in place: remove the attributes that can't be copied"
        ) from error


def _is_shareable(parameter: nn.Parameter) -> bool:
    plain = type(parameter) is nn.Parameter and not parameter.is_inference()
    return plain and parameter.device.type == "cpu" and parameter.layout == torch.strided


def trace_module(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wishes: InputRequest,
    *,
    dynamic_shapes: Any = None,
    eval_mode: bool = False,
    kind: str,
) -> LoadedModel:
    """Trace a module as ``from_module`` does, but without a copy. The module may be changed.

    Args:
        kind: kind of the model's source, for messages.

    Returns:
        The traced model.
    """
    refuse_integer_modules(module)
    set_traceable_switches(module)
    # Gradients are off: if an attention requires gradients, torch 2.13 traces views that it then can't decompose.
    module.requires_grad_(False)
    require_eval(module, eval_mode)
    fix_fake_quantizers(module)
    if not (args or kwargs or dynamic_shapes is not None):
        wishes = add_default_inputs(module, wishes)
    constants = make_constant_tensors(wishes.constants)
    if constants and not (args or kwargs):
        fix_inputs(module, constants)
    if dynamic_shapes is not None and any(dim.name for wish in wishes.inputs for dim in wish.shape):
        raise InputError("dynamic dims were passed twice, as names in inputs and as dynamic_shapes: pass one of them")
    if dynamic_shapes is not None and not (args or kwargs):
        raise InputError(
            "dynamic_shapes were passed without example arguments: also pass args or kwargs, or name the dims in inputs"
        )
    used = dynamic_dim_names(wishes.inputs)
    # Without any input, the example call below reports the missing inputs.
    described = wishes.inputs or args or kwargs
    if described and (unknown := sorted(wishes.dims.keys() - set(used))):
        raise InputError(
            f"the dim {unknown[0]!r} is not in any input: the dynamic dims are "
            f"{', '.join(dict.fromkeys(used)) or 'none'}"
        )
    while True:
        model = _trace_model(module, args, kwargs, wishes, dynamic_shapes, eval_mode, kind, constants)
        comparison = TraceComparison(model, functools.partial(copy_module, module))
        has_branches = drop_guessed_asserts(comparison)
        if has_branches and not wishes.trusts_steps:
            narrower = replace(wishes, trusts_steps=True)
        else:
            narrower = exclude_differing_sizes(comparison, wishes)
        if narrower == wishes:
            return replace(model, trace_runs=tuple(comparison.runs))
        wishes = narrower


def _trace_model(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wishes: InputRequest,
    dynamic_shapes: Any,
    eval_mode: bool,
    kind: str,
    constants: Mapping[str, torch.Tensor],
) -> LoadedModel:
    """Trace a module with torch.export, or with transformers' exporter if torch.export fails."""
    with record_buffer_assignments(module) as replaced:
        try:
            traced = _trace_fixing_dims(module, args, kwargs, wishes, dynamic_shapes, eval_mode)
        except ExportError as failure:
            exporter = find_transformers_exporter(module)
            if exporter is None or dynamic_shapes is not None:
                raise
            traced = _trace_by_transformers(module, args, kwargs, wishes, eval_mode, exporter, failure)
    constants = {**constants, **traced.constants}
    notes = traced.notes
    if constants:
        notes = (*notes, note_constants(constants))
    program = traced.program
    require_tensor_outputs(program)
    inline_gradient_regions(program)
    keep_dynamic_axes(program)
    return LoadedModel(
        program=program,
        inputs=traced.inputs,
        outputs=name_outputs(program, [spec.name for spec in traced.inputs]),
        kind=kind,
        taken=traced.taken,
        written=tuple(dict.fromkeys([*replaced, *find_written_buffers(program)])),
        notes=notes,
        constants=constants,
        traced_by=traced.traced_by,
    )


class _ExampleRunError(InputError):
    """Raised if the module itself fails on the example inputs."""


@dataclass(frozen=True)
class _Trace:
    """Trace of a module.

    Attributes:
        taken: dim name -> source of its largest size, as in `build_input_specs`.
        notes: about dims that the model fixes.
        constants: inputs of the call that became constants, by name.
        traced_by: exporter that made the trace, with its version; "" for torch.export.
    """

    program: torch.export.ExportedProgram
    inputs: tuple[InputSpec, ...]
    taken: dict[str, str]
    notes: tuple[str, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    traced_by: str = ""


# Traces a module at an example call with these dynamic dims. The last argument is True to leave the conditions on sizes
# to asserts that run with the program.
Tracer = Callable[[nn.Module, ExampleCall, Any, bool], torch.export.ExportedProgram]


def trace_with_torch(
    module: nn.Module, call: ExampleCall, shapes: Any, defer_asserts: bool
) -> torch.export.ExportedProgram:
    """Trace a module with torch.export."""
    return torch.export.export(
        module,
        call.args,
        call.kwargs,
        dynamic_shapes=shapes,
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=defer_asserts,
    )


def _trace_by_transformers(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wishes: InputRequest,
    eval_mode: bool,
    exporter: TransformersExporter,
    failure: ExportError,
) -> _Trace:
    """Trace a module with transformers' own exporter, because torch.export alone failed with ``failure``.

    Inputs from whose values the exporter computes other arguments become constants.

    Raises:
        ExportError: ``failure``, with the reason why the exporter does not help.
    """
    stated = bool(args or kwargs)
    try:
        if stated:
            call = copy_example_call(module, args, kwargs, wishes)
        else:
            call = make_example_call(module, wishes, next(iter_example_sizes(wishes)))
        arguments = name_arguments(module, call)
        # The copy has no constants that the exporter derives.
        own = copy_module(module)
        sources = exporter.fix_derived_arguments(module, arguments, make_constant_tensors(wishes.constants))
        if sources and not stated:
            # The values of a made example are random.
            known = ", ".join(sorted(sources))
            raise ExportError(
                f"the exporter computes indexes from the values of {known}: pass all values, for example"
                f" --input '{min(sources)}:int64[1,3]{{1,16,16}}'"
            )
        free = {name: value for name, value in arguments.items() if name not in sources}
        remaining = replace(wishes, inputs=tuple(wish for wish in wishes.inputs if wish.name not in sources))
        traced = _trace_fixing_dims(module, (), free if stated else {}, remaining, None, eval_mode, exporter.trace_call)
        for tried in _iter_comparable_calls(module, remaining, traced, free if stated else None):
            with torch.no_grad(), preserve_torch_state():
                expected = pytree.tree_leaves(copy_module(own)(**{**sources, **tried}))
            require_same_outputs(traced.program, tried, expected)
    except Exception as error:
        # The exporter replaces code of models, and its own code may raise any exception.
        if str(error) == str(failure):
            reason = f"{exporter.name} fails there too"
        else:
            reason = f"{exporter.name} does not help: {first_line(error)}"
        raise ExportError(f"{failure}. {reason}") from failure
    note = f"traced by {exporter.name}, because torch.export alone failed: {failure}"
    return replace(traced, notes=(*traced.notes, note), constants=sources, traced_by=exporter.name)


def _iter_comparable_calls(
    module: nn.Module, wishes: InputRequest, traced: _Trace, example: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """Yield the arguments at which a trace is compared with the module: the user's example, or made examples at two
    choices of sizes.
    """
    if example is not None:
        yield dict(example)
        return
    own = replace(wishes, inputs=traced.inputs, dims=named_dims_of(traced.inputs))
    for sizes in itertools.islice(iter_example_sizes(own), _COMPARED_SIZES):
        yield name_arguments(module, make_example_call(module, own, sizes))


def _trace_fixing_dims(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wishes: InputRequest,
    dynamic_shapes: Any,
    eval_mode: bool,
    tracer: Tracer = trace_with_torch,
) -> _Trace:
    """Trace a module. A dim that only this project named becomes static if the model fixes it.

    If torch can't trace the module with any dynamic dim, all of these become static.
    """
    first: NormdeployError | None = None
    while True:
        try:
            return _trace_once(module, args, kwargs, wishes, dynamic_shapes, eval_mode, tracer)
        except (InputError, ExportError) as error:
            fixable = wishes.assumed & wishes.dims.keys()
            fixed = error.name if isinstance(error, FixedDimError) else ""
            if isinstance(error, _ExampleRunError) or not fixable or (fixed and fixed not in fixable):
                if first is None:
                    raise
                # The error with the dims as they were says more than the one with sizes that nobody chose.
                raise first from error
            failure = error
        first = first or failure
        if isinstance(failure, FixedDimError) and fixed:
            names = frozenset({fixed})
            reason = f"the model's code fixes it{failure.place}"
        else:
            names = fixable
            reason = f"torch can't trace the model with dynamic sizes: {failure}"
        wishes = _fix_dims(module, wishes, names, reason)


def _fix_dims(module: nn.Module, wishes: InputRequest, names: Collection[str], reason: str) -> InputRequest:
    """Make dims static: at sizes that suit most callers if the module runs there, else at the usual sizes."""
    limits = widen_unstated_dims(wishes, getattr(module, "config", None)).dims
    usual = {name: limits[name].opt for name in sorted(names)}
    preferred = {name: choose_fixed_size(limits[name]) for name in sorted(names)}
    if preferred != usual and not _runs_on_example(module, wishes.with_fixed_dims(preferred, reason)):
        preferred = usual
    told = ", ".join(f"{name}={size}" for name, size in preferred.items())
    options = " ".join(f"--dim {name}=N:N:N" for name in preferred)
    note = f"the file has the fixed size {told}: {reason}. Choose another with {options}"
    return wishes.with_fixed_dims(preferred, note)


def _runs_on_example(module: nn.Module, wishes: InputRequest) -> bool:
    """Return whether the module runs at these sizes; a trace does not notice an index beyond its table."""
    return _runs_on_call(module, make_example_call(module, wishes, next(iter_example_sizes(wishes))))


def _runs_on_call(module: nn.Module, call: ExampleCall) -> bool:
    own = copy_module(module)
    try:
        with torch.no_grad(), preserve_torch_state():
            own(*call.args, **call.kwargs)
    except Exception:
        # The user's forward may raise any exception.
        return False
    return True


def _trace_once(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wishes: InputRequest,
    dynamic_shapes: Any,
    eval_mode: bool,
    tracer: Tracer,
) -> _Trace:
    given = wishes
    if args or kwargs:
        call = copy_example_call(module, args, kwargs, wishes)
        program, wishes = _export_widest(module, call, prefer_example_sizes(wishes, call), dynamic_shapes, tracer)
    else:
        program, call, wishes = _export_with_made_example(module, wishes, tracer)
    require_eval_graph(program, eval_mode)
    names = user_dim_names(module, call, dynamic_shapes) if dynamic_shapes is not None else ()
    specs, taken = build_input_specs(
        program, find_live_guards(program), call.matched_inputs(wishes), wishes, fresh=True, names=names
    )
    notes = [*given.notes, *dict.fromkeys(wishes.fixed.values()), *_note_new_steps(named_dims_of(specs), given)]
    return _Trace(program, specs, taken, tuple(notes))


def _note_new_steps(dims: Mapping[str, Dim], given: InputRequest) -> list[str]:
    """Note the dims whose sizes the model limits to multiples."""
    return [
        f"the sizes of {name!r} are multiples of {dim.step}, because the model needs it: {dim}"
        for name, dim in dims.items()
        if dim.step > (given.dims[name].step if name in given.dims else 1)
    ]


def _export_with_made_example(
    module: nn.Module, wishes: InputRequest, tracer: Tracer
) -> tuple[torch.export.ExportedProgram, ExampleCall, InputRequest]:
    failure: _ExampleRunError | None = None
    for sizes in iter_example_sizes(widen_unstated_dims(wishes, getattr(module, "config", None))):
        call = make_example_call(module, wishes, sizes)
        try:
            program, wishes = _export_widest(module, call, wishes, None, tracer)
            return program, call, wishes
        except _ExampleRunError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _export_widest(
    module: nn.Module,
    call: ExampleCall,
    wishes: InputRequest,
    dynamic_shapes: Any,
    tracer: Tracer = trace_with_torch,
) -> tuple[torch.export.ExportedProgram, InputRequest]:
    """Export the module. Dims without a stated range become as wide as the module allows; if this fails, they get their
    default maximum.
    """
    wider = widen_unstated_dims(wishes, getattr(module, "config", None))
    if wider.dims == wishes.dims:
        return export_narrowing(module, call, wishes, dynamic_shapes, tracer)
    try:
        return export_narrowing(module, call, wider, dynamic_shapes, tracer)
    except (ExportError, InputError) as error:
        first = error
    # A dim that the model fixes to one size has this size in any range. If nobody demands more, the dim becomes static
    # without a second try, because one trace of a model with long loops takes half a minute.
    if isinstance(first, FixedDimError) and first.size is not None and first.name in wishes.assumed:
        raise first
    try:
        return export_narrowing(module, call, wishes, dynamic_shapes, tracer)
    except (ExportError, InputError) as error:
        if isinstance(error, FixedDimError) or _restore_range_names(str(first), wider, wishes) == str(error):
            raise
        tried = ", ".join(str(dim) for name, dim in wider.dims.items() if dim != wishes.dims.get(name))
        raise type(error)(f"{error}. An earlier try with {tried} failed: {first}") from first


def _restore_range_names(message: str, wider: InputRequest, wishes: InputRequest) -> str:
    """Replace the ranges of ``wider`` in the message by those of ``wishes``."""
    for name, dim in wider.dims.items():
        message = message.replace(str(dim), str(wishes.dims.get(name, dim)))
    return message


def export_narrowing(
    module: nn.Module,
    call: ExampleCall,
    wishes: InputRequest,
    dynamic_shapes: Any,
    tracer: Tracer = trace_with_torch,
) -> tuple[torch.export.ExportedProgram, InputRequest]:
    """Export a module. If torch finds that dims can't take their full range, narrow the dims without a stated range and
    retry.

    Returns:
        The program and the request with narrowed ranges.

    Raises:
        InputError: the dims do not fit the module.
        ExportError: torch.export can't trace the module.
    """
    # True to leave steps to asserts that run with the program, if torch can't trace with multiples.
    in_steps = False
    for _ in range(_ATTEMPTS):
        if dynamic_shapes is not None:
            shapes = dynamic_shapes
        else:
            shapes = _build_dynamic_shapes(module, call, wishes, multiples=not in_steps)
        with PROCESS_STATE, record_conditions(module) as conditions:
            try:
                return _export_silently(module, call, shapes, in_steps, tracer), wishes
            except NormdeployError:
                raise
            except Exception as error:
                failure = error
        can_relax = not in_steps and dynamic_shapes is None and any(dim.step > 1 for dim in wishes.dims.values())
        if "Constraints violated" not in str(failure):
            if can_relax:
                in_steps = True
                continue
            raise _translate_export_failure(module, call, wishes, failure, conditions) from failure
        # Deferred asserts are tried against the module later.
        can_defer = not in_steps and dynamic_shapes is None and not wishes.trusts_steps
        try:
            narrower, asked_steps = narrow_ranges(str(failure), wishes, conditions)
        except InputError:
            if can_defer and suggests_steps(str(failure)) and _runs_at_demanded_sizes(module, wishes):
                in_steps = True
                continue
            raise
        narrower = raise_above_excluded(str(failure), narrower)
        guessed = set() if wishes.trusts_steps else _find_guessed_steps(module, wishes, narrower)
        if guessed:
            # The module runs at other sizes too.
            narrower = narrower.with_dims(
                {
                    name: replace(dim, step=wishes.dims[name].step) if name in guessed else dim
                    for name, dim in narrower.dims.items()
                }
            )
            asked_steps = True
        if narrower == wishes and asked_steps <= in_steps:
            if can_relax or (can_defer and violates_division(str(failure)) and _runs_at_demanded_sizes(module, wishes)):
                in_steps = True
                continue
            raise make_violation_error(str(failure), wishes, conditions) from failure
        wishes = narrower
        in_steps = in_steps or asked_steps
    raise InputError(
        f"{type(module).__name__} can't be exported with {', '.join(map(str, wishes.dims.values()))}: pass narrower "
        "ranges in dims"
    )


def _find_guessed_steps(module: nn.Module, wishes: InputRequest, narrower: InputRequest) -> set[str]:
    """Return the dims whose new step in ``narrower`` is torch's guess: the module runs at a size between the multiples.

    A module that pads its input to a multiple is an example.
    """
    guessed = set()
    for name, dim in narrower.dims.items():
        between = next((size for size in range(dim.min + 1, dim.max) if size % dim.step), None)
        if dim.step > wishes.dims[name].step and between is not None and wishes.inputs:
            sizes = next(iter_example_sizes(wishes)) | {name: between}
            if _runs_on_call(module, make_example_call(module, wishes, sizes)):
                guessed.add(name)
    return guessed


def _runs_at_demanded_sizes(module: nn.Module, wishes: InputRequest) -> bool:
    """Return whether the module runs at the smallest demanded size of each dim and at the next one.

    The steps that torch suggests are then a guess: the two sizes can't both be multiples.
    """
    usual = next(iter_example_sizes(wishes), None)
    if usual is None or not wishes.inputs:
        return False
    demanded = {name: dim for name, dim in wishes.dims.items() if name in wishes.demanded}
    tried = ({name: size} for name, dim in demanded.items() for size in dim.allowed_sizes()[:2])
    return all(_runs_on_call(module, make_example_call(module, wishes, usual | size)) for size in tried)


def _build_dynamic_shapes(module: nn.Module, call: ExampleCall, wishes: InputRequest, *, multiples: bool) -> Any:
    """Build torch's dynamic shapes.

    Args:
        multiples: True to state that the sizes of a dim with a step are step·n.
    """
    ranges = {name: _make_torch_dim(name, dim, multiples) for name, dim in wishes.dims.items()}
    shapes = torch.export.ShapesCollection()
    dynamic = False
    for leaf, wish in zip(call.tensors(), call.matched_inputs(wishes), strict=True):
        # torch has no sums of dims, but it derives the sum from the other dims itself.
        if wish:
            shape = wish.shape
        else:
            shape = ()
        named = {
            index: torch.export.Dim.AUTO if dim.terms else ranges[dim.name]
            for index, dim in enumerate(shape)
            if dim.name
        }
        if named:
            shapes[leaf], dynamic = named, True
    if dynamic:
        return shapes.dynamic_shapes(module, call.args, call.kwargs)
    return None


def _make_torch_dim(name: str, dim: Dim, multiples: bool) -> Any:
    if dim.step == 1 or not multiples:
        return torch.export.Dim(name, min=dim.min, max=dim.max)
    return dim.step * torch.export.Dim(root_dim_name(name), min=dim.min // dim.step, max=dim.max // dim.step)


def _export_silently(
    module: nn.Module, call: ExampleCall, shapes: Any, steps: bool, tracer: Tracer
) -> torch.export.ExportedProgram:
    """Run an exporter without output.

    Args:
        steps: True to leave the conditions on sizes to asserts that run with the program.
    """
    # A recurrent layer of dynamic length must not be unrolled. A recurrent layer of fixed length is exported by torch
    # as usual.
    recurrent = keep_recurrent_ops() if shapes is not None else contextlib.nullcontext()
    with (
        PROCESS_STATE,
        warnings.catch_warnings(),
        # After some failures, torch.export logs and prints the whole graph.
        silence_logger("torch"),
        contextlib.redirect_stderr(io.StringIO()),
        _disable_distribution_checks(),
        recurrent,
        preserve_torch_state(),
        register_fake_quantizer_shapes(),
        trace_len_symbolically(module),
        decide_extremes(),
    ):
        # The warnings are not for the user: they are about attributes that tracing assigns in the copy, and about
        # deprecated calls inside torch.
        warnings.simplefilter("ignore")
        return inline_vmap(tracer(module, call, shapes, steps), type(module).__name__)


@contextlib.contextmanager
def _disable_distribution_checks() -> Iterator[None]:
    """Disable the value checks of torch.distributions, because a trace can't contain them. The results do not
    change.
    """
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)


def _translate_export_failure(
    module: nn.Module, call: ExampleCall, wishes: InputRequest, error: Exception, conditions: TracedConditions
) -> Exception:
    """Convert torch.export's failure: an InputError if the call itself fails, else an ExportError."""
    name = type(module).__name__
    text = str(error)
    if solved := describe_unsolved_dims(text, wishes, conditions):
        return InputError(solved)
    first = first_line(error)
    if "tree_name" in text:
        return InputError(
            f"{name} takes inputs as **kwargs, for which torch.export has no dynamic dims: declare named parameters "
            "in forward, or pass fixed sizes"
        )
    if type(error).__name__ == "UserError" and "dynamic_shapes" in text:
        return InputError(f"the dynamic_shapes do not fit {name}: {first}")
    if isinstance(error, ExportError):
        return error
    own = copy_module(module)
    try:
        with torch.no_grad(), preserve_torch_state():
            own(*call.args, **call.kwargs)
    except Exception as eager:
        return _ExampleRunError(describe_failure(own, call, wishes, eager))
    if is_derivative_failure(error):
        return make_derivative_error(name)
    return make_export_error(module, error)
