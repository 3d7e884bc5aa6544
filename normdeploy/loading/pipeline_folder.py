"""Load the models of a diffusers pipeline, one at a time, and prepare them for tracing. The pipeline's class is not
used, and no code of the folder runs.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from ..errors import InputError, LoadError, RuntimeUnavailable, TrustError
from .file_kinds import PIPELINE_INDEX
from .folder_containment import require_plausible_config
from .huggingface_folder import PreparedFolder, load_folder_model
from .pipeline_index import CONFIG, Component, PipelineIndex, read_pipeline_index
from .pipeline_parts import PART_CLASSES, PartContext, prepare_part
from .torch_pickles import first_line
from .torch_state import silence_logger


def open_pipeline(path: Path, trust: bool) -> PipelineIndex:
    """Read a pipeline's index, and check that every model of the pipeline can be exported.

    Returns:
        The index.

    Raises:
        LoadError: the folder is broken.
        TrustError: the index names code.
        InputError: a component is a model of an unknown class.
    """
    index = read_pipeline_index(path, trust=trust)
    for component in index.components:
        if component.is_model and component.class_name not in PART_CLASSES:
            raise InputError(
                f"the pipeline {path} can't be exported as a whole: its part {component.name!r} is a"
                f" {component.class_name}, and only {', '.join(PART_CLASSES)} are exported as parts. Nothing was"
                f" written. {describe_other_parts(index, component)}"
            )
    return index


def describe_other_parts(index: PipelineIndex, failing: Component) -> str:
    """Describe how to export the parts of a pipeline one by one, and the failing part from Python."""
    others = [part for component in index.components for part in component.parts if component.name != failing.name]
    known = [part for part in others if index.find_component(part).class_name in PART_CLASSES]
    said = ""
    if known:
        said = f"Export the other parts one by one with --part: {', '.join(known)}. "
    loading = f"{failing.library}.{failing.class_name}.from_pretrained({str(index.path)!r}, subfolder={failing.name!r})"
    return f"{said}In Python: net = {loading}; normdeploy.export(net.eval(), example_inputs, output='net.onnx')"


def prepare_pipeline_part(index: PipelineIndex, part: str, trust: bool) -> PreparedFolder:
    """Load the model of a part, and prepare it for tracing.

    Returns:
        The prepared model.

    Raises:
        InputError: the pipeline has no such part, or the part can't be exported.
        LoadError: the part's config or weights are broken.
        RuntimeUnavailable: diffusers or transformers is not installed.
        TrustError: the part's config names code.
    """
    component = index.find_component(part)
    if component.class_name not in PART_CLASSES:
        raise InputError(
            f"the part {part!r} of {index.path} is a {component.class_name}, and only {', '.join(PART_CLASSES)} are"
            f" exported as parts. {describe_other_parts(index, component)}"
        )
    model, missing = _load_component(index, component, trust)
    context = PartContext(index, part, index.read_config(component.name))
    try:
        prepared = prepare_part(model, context)
    except KeyError as error:
        raise LoadError(
            f"{index.path / component.name / CONFIG} has no {error}, which a {component.class_name} needs; use the"
            " original folder"
        ) from error
    return PreparedFolder(prepared, missing)


def _load_component(index: PipelineIndex, component: Component, trust: bool) -> tuple[nn.Module, frozenset[str]]:
    """Load a component's model. Return the model in eval mode, and the names of its tensors without weights."""
    folder = index.path / component.name
    if component.library == "transformers":
        loaded = load_folder_model(folder, trust, root=index.path)
        _require_class(index, component, loaded.model)
        return loaded.model, loaded.missing
    config = index.read_config(component.name)
    if config.get("auto_map"):
        raise TrustError(
            f"{folder} is not loaded: its {CONFIG} names custom classes (auto_map), so code of the folder would run;"
            " only classes of diffusers are exported"
        )
    named = config.get("_class_name", component.class_name)
    if named != component.class_name:
        _refuse_class(index, component, named)
    require_plausible_config(folder, config)
    cls = _find_class(index, component)
    try:
        with silence_logger("diffusers"), silence_logger("transformers"):
            model, info = cls.from_pretrained(str(folder), local_files_only=True, output_loading_info=True)
    except Exception as error:
        # The errors of diffusers share no base class: OSError, ValueError, SafetensorError, and others.
        raise LoadError(
            f"{folder} can't be loaded as a {component.class_name} of {component.library}: {type(error).__name__}:"
            f" {first_line(error, '')}"
        ) from error
    return model.eval(), frozenset(info["missing_keys"])


def _require_class(index: PipelineIndex, component: Component, model: nn.Module) -> None:
    if type(model).__name__ != component.class_name:
        _refuse_class(index, component, type(model).__name__)


def _refuse_class(index: PipelineIndex, component: Component, named: Any) -> NoReturn:
    raise LoadError(
        f"{index.path / PIPELINE_INDEX} states the class {component.class_name} for {component.name!r}, but the"
        f" {CONFIG} in its folder states {named!r}; use the original folder"
    )


def _find_class(index: PipelineIndex, component: Component) -> Any:
    """Return the class of a component of diffusers."""
    if importlib.util.find_spec("diffusers") is None:
        raise RuntimeUnavailable(
            f"{index.path} is a diffusers pipeline, but diffusers is not installed: pip install diffusers"
        )
    if component.library == "diffusers":
        place = "diffusers"
    else:
        place = f"diffusers.pipelines.{component.library}"
    try:
        return getattr(importlib.import_module(place), component.class_name)
    except Exception as error:
        # diffusers imports a class and its requirements at the first access, and may raise errors of any type.
        raise RuntimeUnavailable(
            f"the installed diffusers has no {component.class_name} for {component.name!r} of {index.path}"
            f" ({type(error).__name__}: {first_line(error, '')}); install a version that has this class"
        ) from error


def load_scheduler(index: PipelineIndex) -> Any:
    """Load the scheduler of a pipeline.

    Returns:
        The scheduler; None if the pipeline has no scheduler.

    Raises:
        LoadError: the scheduler's config is broken, or its class is not a scheduler.
        RuntimeUnavailable: diffusers is not installed.
    """
    component = next((each for each in index.components if each.name == "scheduler"), None)
    if component is None:
        return None
    if component.library != "diffusers":
        raise LoadError(
            f"{index.path / PIPELINE_INDEX} takes the scheduler from {component.library!r}; only schedulers of"
            " diffusers are supported"
        )
    cls = _find_class(index, component)
    if not (hasattr(cls, "set_timesteps") and hasattr(cls, "step")):
        raise LoadError(
            f"{index.path / PIPELINE_INDEX} states the class {component.class_name} for the scheduler, which has no"
            " steps; use the original folder"
        )
    try:
        with silence_logger("diffusers"):
            return cls.from_pretrained(str(index.path / component.name), local_files_only=True)
    except Exception as error:
        # The errors of diffusers share no base class.
        raise LoadError(
            f"{index.path / component.name} can't be loaded as a {component.class_name} of diffusers:"
            f" {type(error).__name__}: {first_line(error, '')}"
        ) from error
