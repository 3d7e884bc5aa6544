"""Make a model that a package of models knows by name: ``timm:resnet50``, ``torchvision:resnet50``.

Nothing is downloaded unless the user's arguments ask for it (``pretrained=True`` in timm, ``weights="DEFAULT"`` in
torchvision).
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError, RuntimeUnavailable
from ..zoo_sources import ZooModel, parse_zoo_source
from .input_request import parse_input_request
from .model_factories import describe_user_error, import_user_module, make_model
from .module_parts import make_image_list, takes_image_list
from .torch_pickles import join_names
from .torch_state import seed_torch

# Arguments of the packages' factories that load trained weights.
_TRAINED = ("pretrained", "checkpoint_path", "weights")
# torchvision's presets of preprocessing whose models take one image as their only input.
_IMAGE_PRESETS = ("ImageClassification", "SemanticSegmentation")
# Number of similar names that an error shows.
_NEAREST = 5


@dataclass(frozen=True)
class MadeModel:
    """Model that a factory made.

    Attributes:
        inputs: texts as for ``--input`` that describe its inputs; () if only the user knows them.
        make_example: number of images -> the only argument of the model; None if no package states it.
    """

    module: nn.Module
    inputs: tuple[str, ...] = ()
    make_example: Callable[[int], Any] | None = None


def make_named_model(model: str, arguments: Mapping[str, Any]) -> MadeModel:
    """Make the model that ``--model`` names: a package's model, or the result of ``package.module:factory``.

    Args:
        arguments: keyword arguments of the factory.

    Returns:
        The model with its inputs as far as the package states them.

    Raises:
        RuntimeUnavailable: the package is not installed.
        InputError: as for `make_zoo_model` and `make_model`.
    """
    zoo = parse_zoo_source(model)
    # A function of the package, such as timm:create_model, is an ordinary factory.
    if zoo is None or (not is_zoo_model(zoo) and hasattr(_import_package(zoo.package), zoo.name.partition(".")[0])):
        return MadeModel(make_model(model, arguments))
    return make_zoo_model_with_inputs(zoo, arguments)


def is_zoo_model(zoo: ZooModel) -> bool:
    """Return whether the package knows a model of this name. The package is imported.

    Returns:
        False also for a function of the package, such as ``create_model``.

    Raises:
        RuntimeUnavailable: the package is not installed.
        InputError: the package can't be imported.
    """
    return zoo.name.partition(".")[0] in _model_names(zoo.package)


def make_zoo_model(zoo: ZooModel, arguments: Mapping[str, Any]) -> nn.Module:
    """Call the package's factory. torch's seed is set to 0, because the factory draws the weights at random.

    Args:
        arguments: keyword arguments of the factory. No weights are downloaded unless they ask for it.

    Returns:
        The module. It is switched to eval mode if all of its parts are in training mode.

    Raises:
        RuntimeUnavailable: the package is not installed.
        InputError: the package has no such model, or its factory fails.
    """
    if not is_zoo_model(zoo):
        raise InputError(_describe_unknown_name(zoo))
    try:
        with seed_torch():
            if zoo.package == "timm":
                made = _import_package("timm").create_model(zoo.name, **arguments)
            else:
                made = _make_torchvision_model(zoo.name, arguments)
    # The packages raise errors of many types, and pass on those of the user's arguments.
    except Exception as error:
        told = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        tags = _similar_tags(zoo)
        if tags:
            advice = f"; its tags are {join_names(tags, _NEAREST)}"
        else:
            advice = ""
        raise InputError(f"{zoo}({told}) failed: {describe_user_error(error)}{advice}") from error
    if all(part.training for part in made.modules()):
        # Training mode is only the default of modules: neither the package nor the user has set a mode.
        made.eval()
    return made  # type: ignore[no-any-return]


def make_zoo_model_with_inputs(zoo: ZooModel, arguments: Mapping[str, Any]) -> MadeModel:
    """Make a model as `make_zoo_model` does, and describe its inputs.

    Returns:
        The model with its inputs as far as the package states them.
    """
    module = make_zoo_model(zoo, arguments)
    inputs = tuple(describe_zoo_inputs(zoo, module, arguments))
    if takes_image_list(module):
        example = functools.partial(make_image_list, module)
    else:
        example = functools.partial(make_zoo_example, module, inputs)
    return MadeModel(module, inputs, example)


def describe_zoo_inputs(zoo: ZooModel, module: nn.Module, arguments: Mapping[str, Any]) -> list[str]:
    """Describe the inputs of a model by its preprocessing.

    Args:
        module: the model, as `make_zoo_model` made it.
        arguments: the arguments that it was made with.

    Returns:
        A text as for ``--input``, for example ["x[batch,3,224,224]"]; [] if the package states no size of images.
    """
    if zoo.package == "timm":
        size = _timm_input_size(module, arguments)
    else:
        size = _torchvision_input_size(zoo.name)
    if not size:
        return []
    name = next(iter(inspect.signature(module.forward).parameters))
    return [f"{name}[batch,{','.join(map(str, size))}]"]


def make_zoo_example(module: nn.Module, inputs: Sequence[str], batch: int) -> Any:
    """Make random images for a model of a package.

    Args:
        inputs: the description of the only input, as `describe_zoo_inputs` returns it.
        batch: number of images.

    Returns:
        The only argument of the model.

    Raises:
        InputError: no description of the input is known.
    """
    if not inputs:
        raise InputError(
            f"the package does not state the inputs of {type(module).__name__}; write --part ..LAST, and describe them"
            " with --input"
        )
    (wish,) = parse_input_request(inputs, ()).inputs
    return torch.rand(batch, *(dim.opt for dim in wish.shape[1:]))


def note_random_weights(zoo: ZooModel, arguments: Mapping[str, Any]) -> list[str]:
    """Write a note for a model whose weights are random.

    Returns:
        One note; none if the arguments load trained weights.
    """
    if any(arguments.get(name) for name in _TRAINED):
        return []
    if zoo.package == "timm":
        argument = "pretrained=True"
    else:
        argument = "weights=DEFAULT"
    return [
        f"the weights of {zoo} are random (seed 0), and its answers are meaningless: pass the file of trained weights "
        f"as MODEL with --model {zoo}, or --model-arg {argument}, with which {zoo.package} downloads its own weights"
    ]


def _import_package(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise RuntimeUnavailable(f"{name} is not installed: pip install {name}")
    try:
        return import_user_module(name, f"the package {name}")
    except InputError as error:
        # torchvision's compiled operators load only with the torch that they were built for. timm imports torchvision.
        if "torchvision::" in str(error):
            raise InputError(
                f"{error}; the installed torchvision was built for another torch: install the release of torchvision "
                "that belongs to the installed torch"
            ) from error
        raise


def _model_names(package: str) -> list[str]:
    """List the names of a package's models, without tags."""
    module = _import_package(package)
    if package == "timm":
        return list(module.list_models())
    return list(module.models.list_models())


def _describe_unknown_name(zoo: ZooModel) -> str:
    base, dot, _ = zoo.name.partition(".")
    names = _model_names(zoo.package)
    if dot and zoo.package == "timm":
        names = [*names, *_import_package("timm").list_pretrained()]
    near = difflib.get_close_matches(zoo.name, names, _NEAREST) or difflib.get_close_matches(base, names, _NEAREST)
    if near:
        advice = f"similar names are {', '.join(near)}"
    elif zoo.package == "timm":
        advice = "timm.list_models() lists the names"
    else:
        advice = "torchvision.models.list_models() lists the names"
    return f"{zoo.package} has no model {zoo.name!r}; {advice}"


def _similar_tags(zoo: ZooModel) -> Sequence[str]:
    """List the names of a timm model with its tags, if the given tag is none of them."""
    base, dot, _ = zoo.name.partition(".")
    if zoo.package != "timm" or not dot:
        return ()
    known: list[str] = _import_package("timm").list_pretrained(f"{base}.*")
    if zoo.name in known:
        return ()
    return difflib.get_close_matches(zoo.name, known, _NEAREST, cutoff=0)


def _make_torchvision_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    models = _import_package("torchvision").models
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    # The default of this argument downloads the weights of the backbone.
    if "weights_backbone" in parameters:
        arguments = {"weights_backbone": None, **arguments}
    return models.get_model(name, **{"weights": None, **arguments})  # type: ignore[no-any-return]


def _timm_input_size(module: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return channels, height and width of timm's data config, with the sizes that the user's arguments set."""
    told = {name: arguments[name] for name in ("in_chans",) if name in arguments}
    size = arguments.get("img_size")
    if isinstance(size, int):
        told["img_size"] = size
    config = _import_package("timm").data.resolve_data_config(told, model=module)
    channels, height, width = config["input_size"]
    if isinstance(size, list | tuple):
        height, width = size
    return arguments.get("in_chans", channels), height, width


def _torchvision_input_size(name: str) -> tuple[int, ...]:
    """Return channels, height and width of the preset that the model's default weights were trained with."""
    weights = _import_package("torchvision").models.get_model_weights(name).DEFAULT
    preset = weights.transforms()
    if type(preset).__name__ not in _IMAGE_PRESETS:
        return ()
    # The preset of segmentation models resizes, and does not crop.
    sides = getattr(preset, "crop_size", None) or preset.resize_size
    return 3, sides[0], sides[-1]
