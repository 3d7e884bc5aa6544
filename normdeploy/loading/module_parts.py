"""Choose a part of a model by the names of its modules, so that the part is traced without the rest of the model.

    backbone            the module ``backbone``
    backbone..rpn.head  from the inputs of ``backbone`` to the outputs of ``rpn.head``
    ..head              from the inputs of the model to the outputs of ``head``

A detector of torchvision calls ``batched_nms``, which no trace can contain: it branches on the number of boxes, which
depends on values. The part before it is ``backbone..head``. The code between the two modules belongs to the part.

The inputs of a module are recorded while the whole model runs on an example. The model then stops at the module, so the
code after the module does not run. Two examples with different batch sizes show which axes depend on the batch. The
results of modules that ran earlier are recorded too, and the part contains these results instead of the modules.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import InputError
from .program_signature import dtype_name
from .torch_pickles import first_line
from .torch_state import preserve_torch_state
from .traceable_models import TraceableModel

SEPARATOR = ".."
# Class of torchvision that scales the images of a detector.
_DETECTION_TRANSFORM = "GeneralizedRCNNTransform"
# Modules of torchvision's detectors whose results the suppression of boxes reads first.
_DETECTION_HEADS = ("head", "rpn.head")
# Batch sizes of the two examples.
_BATCHES = (2, 3)
# Number of module names that an error lists.
_LISTED = 8


@dataclass(frozen=True)
class ModulePart:
    """Part of a model.

    Attributes:
        first: path of the module whose inputs are the part's inputs; "" for the inputs of the model.
        last: path of the module whose outputs are the part's outputs.
    """

    first: str
    last: str

    def __str__(self) -> str:
        if self.first == self.last:
            return self.last
        return f"{self.first}{SEPARATOR}{self.last}"


def parse_module_part(text: str, module: nn.Module) -> ModulePart:
    """Parse ``FIRST..LAST``, ``..LAST`` or ``MODULE``.

    Returns:
        The part.

    Raises:
        InputError: the model has no module of this name.
    """
    first, separator, last = text.partition(SEPARATOR)
    if not separator:
        last = first
    known = {name for name, _ in module.named_modules() if name}
    for name in dict.fromkeys((first, last)):
        if name not in known and (name or not separator or not last):
            own = [child for child, _ in module.named_children()]
            listed = f"{', '.join(own[:_LISTED])}{', ...' if len(own) > _LISTED else ''}"
            raise InputError(
                f"{type(module).__name__} has no module {name!r}, which --part {text!r} names; its modules are {listed}"
                " and their parts. Write MODULE, FIRST..LAST or ..LAST"
            )
    return ModulePart(first, last)


def takes_image_list(module: nn.Module) -> bool:
    """Return whether a module is a detector of torchvision, which takes a list of images."""
    return type(getattr(module, "transform", None)).__name__ == _DETECTION_TRANSFORM


def require_chosen_part(module: nn.Module) -> None:
    """Refuse a detector of torchvision as a whole.

    Raises:
        InputError: the module takes a list of images; the message names the part that can be exported.
    """
    if not takes_image_list(module):
        return
    last = next((name for name in _DETECTION_HEADS if name in dict(module.named_modules())), "backbone")
    raise InputError(
        f"{type(module).__name__} takes a list of images, and torch.export can't trace its suppression of boxes, which"
        " branches on the number of boxes (batched_nms in torchvision/ops/boxes.py): run both in your program, and"
        f" export the part between them with --part backbone{SEPARATOR}{last}"
    )


def make_image_list(module: nn.Module, batch: int) -> list[torch.Tensor]:
    """Make random images of the size to which a detector of torchvision scales its images.

    Returns:
        ``batch`` images, [channels, height, width], with values from 0 to 1.
    """
    transform: Any = module.transform
    fixed = getattr(transform, "fixed_size", None)
    width, height = fixed or (transform.min_size[-1],) * 2
    return list(torch.rand(batch, len(transform.image_mean), height, width))


class _ReachedFirst(Exception):
    """Raised when the model calls the first module of a part."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


class _ReachedLast(Exception):
    """Raised when the last module of a part returns."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def select_part(
    module: nn.Module,
    part: ModulePart,
    make_example: Callable[[int], Any] | None,
    inputs: Sequence[str],
) -> TraceableModel:
    """Give a model the forward of one of its parts. The modules keep their paths.

    Args:
        module: the whole model, which is changed.
        make_example: batch size -> the only argument of the model; None if no example is known.
        inputs: the model's own inputs, in the notation of ``--input``.

    Returns:
        The part, with its inputs.

    Raises:
        InputError: the inputs of the first module are unknown, or the model does not call the modules.
    """
    if not part.first:
        return TraceableModel(_stop_after(module, part.last), list(inputs))
    if make_example is None:
        raise InputError(
            f"the inputs of {part.first!r} are unknown, because normdeploy has no examples of this model's inputs, and"
            " example arguments are not used for a part: write"
            f" --part {SEPARATOR}{part.last}, and describe the inputs of the model with --input"
        )
    runs = [_record_run(module, part.first, make_example(batch)) for batch in _BATCHES]
    first = module.get_submodule(part.first)
    described = _describe_call(first, *(run.call for run in runs))
    if part.first == part.last:
        return TraceableModel(_take_tensors(first, runs[0].call, list(described)), list(described.values()))
    own = _start_at(module, part, runs[0], list(described))
    return TraceableModel(own, list(described.values()))


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _RecordedRun:
    """Run of a model up to the call of a module.

    Attributes:
        example: the only argument of the model.
        call: the arguments of the module.
        results: name of a child of the model that returned earlier -> its result in each call.
    """

    example: Any
    call: Call
    results: Mapping[str, Sequence[Any]]


def _record_run(module: nn.Module, name: str, example: Any) -> _RecordedRun:
    """Run a model until it calls a module.

    Returns:
        The record of the run.

    Raises:
        InputError: the model fails on the example, or does not call the module.
    """

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedFirst(args, kwargs)

    results: dict[str, list[Any]] = {}
    try:
        with torch.no_grad(), preserve_torch_state(), contextlib.ExitStack() as stack:
            for child, part in module.named_children():
                keep = functools.partial(_keep_result, results.setdefault(child, []))
                stack.callback(part.register_forward_hook(keep).remove)
            hook = module.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True)
            stack.callback(hook.remove)
            module(example)
    except _ReachedFirst as reached:
        return _RecordedRun(example, reached.call, {child: made for child, made in results.items() if made})
    except Exception as error:
        # The code of the model may raise any exception.
        raise InputError(
            f"the inputs of {name!r} can't be recorded, because {type(module).__name__} does not run on an example:"
            f" {type(error).__name__}: {first_line(error, '')}"
        ) from error
    raise InputError(f"{type(module).__name__} does not call {name!r}, so its inputs are unknown; name another module")


def _keep_result(results: list[Any], _: nn.Module, __: Any, result: Any) -> None:
    results.append(result)


def _describe_call(module: nn.Module, call: Call, other: Call) -> dict[str, str]:
    """Describe the tensors of a call. Axes whose sizes differ between two calls are dynamic.

    Returns:
        Name of a tensor -> its description in the notation of ``--input``.

    Raises:
        InputError: a call has no tensors, or the two calls have different tensors.
    """
    parameters = list(inspect.signature(module.forward).parameters)
    known = dict(_name_tensors(parameters, call))
    others = dict(_name_tensors(parameters, other))
    if not known or known.keys() != others.keys():
        raise InputError(
            f"the inputs of {type(module).__name__} are {', '.join(known) or 'no tensors'} in one run of the model and"
            f" {', '.join(others) or 'no tensors'} in another run; name another module"
        )
    described = {}
    for name, tensor in known.items():
        dims = []
        for axis, pair in enumerate(zip(tensor.shape, others[name].shape, strict=True)):
            if pair == _BATCHES:
                dims.append("batch")
            elif pair[0] != pair[1]:
                dims.append(f"{name}_{axis}")
            else:
                dims.append(str(pair[0]))
        described[name] = f"{name}:{dtype_name(tensor)}[{','.join(dims)}]"
    return described


def _name_tensors(parameters: Sequence[str], call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call with names such as ``features`` or, in a list or dict, ``features_0``."""
    args, kwargs = call
    for parameter, value in [*zip(parameters, args, strict=False), *kwargs.items()]:
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                steps = [str(getattr(step, "key", getattr(step, "idx", ""))) for step in path]
                yield "_".join([parameter, *steps]), leaf


def _put_tensors(call: Call, tensors: Sequence[torch.Tensor]) -> Call:
    """Replace the tensors of a call, in the order of `_name_tensors`."""
    leaves, tree = pytree.tree_flatten(call)
    remaining = iter(tensors)
    put = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(put, tree)  # type: ignore[no-any-return]


def _take_tensors(module: nn.Module, call: Call, names: Sequence[str]) -> nn.Module:
    """Let a module take the tensors of a call, one by one."""
    whole = type(module).forward

    def run(self: nn.Module, *tensors: torch.Tensor) -> Any:
        args, kwargs = _put_tensors(call, tensors)
        return whole(self, *args, **kwargs)

    return _replace_forward(module, run, _name_parameters(names))


def _start_at(module: nn.Module, part: ModulePart, recorded: _RecordedRun, names: Sequence[str]) -> nn.Module:
    """Let a model run on an example with the recorded results of earlier modules. The inputs of the first module are
    replaced, and the model stops after the last module.
    """
    whole = type(module).forward

    def run(self: nn.Module, *tensors: torch.Tensor) -> Any:
        call = _put_tensors(recorded.call, tensors)
        with contextlib.ExitStack() as stack:
            hook = self.get_submodule(part.first).register_forward_pre_hook(lambda *_: call, with_kwargs=True)
            stack.callback(hook.remove)
            # The first and the last module may have run earlier, too.
            ends = {name.partition(".")[0] for name in (part.first, part.last)}
            for name, results in recorded.results.items():
                if name not in ends:
                    self.__dict__[name] = _Replay(self.get_submodule(name), results)
                    stack.callback(self.__dict__.pop, name)
            return _run_until(self, part.last, lambda: whole(self, recorded.example))

    return _replace_forward(module, run, _name_parameters(names))


def _stop_after(module: nn.Module, last: str) -> nn.Module:
    """Let a model stop after its last module."""
    whole = type(module).forward

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_until(self, last, lambda: whole(self, *args, **kwargs))

    return _replace_forward(module, run, inspect.signature(whole))


def _name_parameters(names: Sequence[str]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])


def _replace_forward(module: nn.Module, forward: Callable[..., Any], signature: inspect.Signature) -> nn.Module:
    """Give a module a subclass of its class with another forward. A copy of the module then has this forward too.

    Args:
        signature: the parameters of ``forward``, with ``self``.

    Returns:
        ``module``, which was changed.
    """

    def forward_bound(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return forward(*bound.args, **bound.kwargs)

    forward_bound.__signature__ = signature  # type: ignore[attr-defined]
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward_bound})
    return module


class _Replay:
    """Stand-in for a module that returns recorded results, and then calls the module."""

    def __init__(self, module: nn.Module, results: Sequence[Any]) -> None:
        self._module = module
        self._remaining = iter(results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for result in self._remaining:
            return result
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _DirectCall:
    """Stand-in for a module on the path to the last module of a part.

    torch's trace keeps a stack of the modules that run, and an exception that leaves a module leaves the stack wrong.
    So the modules around the last module run without an entry in the stack, and the exception is raised outside of the
    last module.
    """

    def __init__(self, module: nn.Module, *, is_last: bool) -> None:
        self._module = module
        self._is_last = is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_last:
            raise _ReachedLast(self._module(*args, **kwargs))
        return self._module.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _run_until(module: nn.Module, last: str, run: Callable[[], Any]) -> Any:
    """Run a model until one of its modules returns.

    Returns:
        The result of the module.

    Raises:
        InputError: the model does not call the module.
    """
    owner = module
    with contextlib.ExitStack() as stack:
        *around, final = last.split(".")
        for name in (*around, final):
            inner = owner.get_submodule(name)
            # An attribute of the object comes before a registered module.
            owner.__dict__[name] = _DirectCall(inner, is_last=name is final)
            stack.callback(owner.__dict__.pop, name)
            owner = inner
        try:
            run()
        except _ReachedLast as reached:
            return reached.result
    raise InputError(f"{type(module).__name__} does not call {last!r} as a module; name another module as the last one")
