"""Load a Hugging Face model folder with transformers, in eval mode. The config or the task determines the class."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError, LoadError, RuntimeUnavailable, TrustError
from .folder_containment import read_json, require_contained_files, require_plausible_config
from .huggingface_tasks import HuggingfaceTask, find_task, require_part_name
from .torch_pickles import first_line
from .torch_state import silence_logger
from .traceable_models import TraceableModel, prepare_model
from .transformers_switches import set_traceable_switches


@dataclass(frozen=True)
class PreparedFolder:
    """Model of a folder, or a part of the model, ready to be traced.

    Attributes:
        missing: parameters of the module for which the folder has no weights. transformers fills them with random
            numbers.
    """

    prepared: TraceableModel
    missing: frozenset[str]


@dataclass(frozen=True)
class HuggingfaceFolder:
    """Model of a folder, not yet prepared for tracing.

    Attributes:
        missing: parameters and buffers for which the folder has no weights.
    """

    path: Path
    model: nn.Module
    task: HuggingfaceTask | None
    missing: frozenset[str]

    def prepare_part(self, part: str | None) -> PreparedFolder:
        """Prepare the model or a part of it for tracing.

        Trace a part before the next part is prepared, because all parts are the same module with different ``forward``
        functions.

        Returns:
            The prepared part.

        Raises:
            InputError: the model has no such part, or no past.
        """
        for module in self.model.modules():
            # Remove the forward that an earlier part set.
            module.__dict__.pop("forward", None)
        lacking = {id(t) for name, t in _named_tensors(self.model) if name in self.missing}
        ready = prepare_model(self.model, self.path, self.task, part)
        return PreparedFolder(ready, frozenset(name for name, t in _named_tensors(ready.module) if id(t) in lacking))


def prepare_folder(path: Path, trust: bool, task: str | None = None, part: str | None = None) -> PreparedFolder:
    """Load the model of the folder, and prepare the model or a part of it for tracing.

    Args:
        task: as for ``load_folder_model``.
        part: part of an encoder-decoder: "encoder", "decoder" or "decoder-with-past". None takes the whole model.

    Returns:
        The prepared model.

    Raises:
        NormdeployError: as for ``load_folder_model``; also InputError if the part does not exist.
    """
    if part is not None:
        part = require_part_name(part)
    return load_folder_model(path, trust, task).prepare_part(part)


def load_folder_model(
    path: Path, trust: bool, task: str | None = None, *, root: Path | None = None
) -> HuggingfaceFolder:
    """Load the model of the folder. Nothing is downloaded, and the folder's code runs only with ``trust``.

    Args:
        task: name of a task, which determines the class of transformers, the inputs and the outputs
            (`huggingface_tasks`). None takes the config's class and all outputs.
        root: folder of the whole pipeline, if ``path`` is one of its parts.

    Returns:
        The model in eval mode.

    Raises:
        RuntimeUnavailable: transformers is not installed.
        TrustError: the folder contains its own classes.
        LoadError: the config or the weights are broken.
        InputError: the task does not exist or does not fit the model.
    """
    if task is not None:
        wanted = find_task(task)
    else:
        wanted = None
    checked = check_folder(path, trust=trust, root=root)
    model, missing = _load_pretrained(path, _candidate_classes(checked.config, wanted), wanted, checked.options)
    # The cache of keys and values is off. Tasks and parts with a past turn it on again.
    set_traceable_switches(model)
    return HuggingfaceFolder(path, model.eval(), wanted, missing)


@dataclass(frozen=True)
class CheckedFolder:
    """Folder that was checked before transformers reads it.

    Attributes:
        config: content of ``config.json``.
        options: arguments for ``from_pretrained`` of transformers' classes.
    """

    config: dict[str, Any]
    options: dict[str, Any]


def check_folder(path: Path, *, trust: bool, root: Path | None = None) -> CheckedFolder:
    """Check that transformers can read the folder without leaving the folder, and without code that is not trusted.

    Args:
        root: as for ``load_folder_model``.

    Returns:
        The config, and the arguments for transformers.

    Raises:
        RuntimeUnavailable: transformers is not installed.
        TrustError: the folder contains its own classes.
        LoadError: the config is broken, or a file is outside of the folder.
    """
    require_contained_files(path, root=root)
    config = _read_config(path)
    require_plausible_config(path, config)
    if (files := _config_code_files(path, config)) and not trust:
        raise TrustError(
            f"{path} is not loaded: its config.json names custom classes (auto_map), so {', '.join(files)} would "
            "run. If you trust its author, pass --trust-remote-code"
        )
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeUnavailable(
            f"{path} is a Hugging Face folder, but transformers is not installed: pip install transformers, or "
            "export the model once and pass the .pt2 file"
        )
    # If trust_remote_code is not set, transformers asks at the terminal whether to run the code that a file of the
    # folder names.
    return CheckedFolder(config, {"trust_remote_code": trust and bool(files), "local_files_only": True})


def _named_tensors(module: nn.Module) -> list[tuple[str, Any]]:
    """List parameters and buffers under all their names, because a part uses other names than the whole model."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _candidate_classes(config: dict[str, Any], task: HuggingfaceTask | None) -> list[Any]:
    """Return the classes to try, in order. They are the task's classes; without a task, the config's class or
    AutoModel.
    """
    import transformers

    if task is not None:
        return [loader for name in task.loaders if (loader := _import_class(transformers, name)) is not None]
    if not config.get("auto_map"):
        name = (config.get("architectures") or [""])[0]
        places = [transformers, _import_modeling_module(config.get("model_type"))]
    else:
        name, places = "", []
    for place in places:
        named = _import_class(place, name)
        # The config may also name the class of a tokenizer or processor, which would load other files of the folder.
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return [named]
    return [transformers.AutoModel]


def _import_modeling_module(model_type: Any) -> Any:
    """Return the module of transformers with the models of a type; None if there is none.

    transformers itself does not export parts of models, such as the text encoder of GroupViT.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config_module: str = CONFIG_MAPPING[model_type].__module__
        return importlib.import_module(config_module.replace("configuration_", "modeling_"))
    except Exception:
        # The type may be unknown, or its module may require a package that is not installed.
        return None


def _import_class(library: Any, name: str) -> Any:
    """Return a class of transformers; None if it does not exist or can't be imported."""
    try:
        return getattr(library, name)
    except Exception:
        # transformers imports a class and its requirements at the first access, and may raise errors of any type.
        return None


def _load_pretrained(
    path: Path, loaders: list[Any], task: HuggingfaceTask | None, options: dict[str, Any]
) -> tuple[nn.Module, frozenset[str]]:
    error: Exception | None = None
    for loader in loaders:
        try:
            with _silence_transformers():
                model, info = loader.from_pretrained(str(path), output_loading_info=True, **options)
            return model, frozenset(info["missing_keys"])
        except Exception as failure:
            # The errors of transformers share no base class: OSError, ValueError, SafetensorError, and others.
            error = error or failure
    names = " or ".join(loader.__name__ for loader in loaders)
    if error is None:
        if task is None:
            wanted = ""
        else:
            wanted = f" for the task {task.name}"
        raise LoadError(f"{path} can't be loaded: the installed transformers has no importable class{wanted}")
    if task is not None and isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
        raise InputError(
            f"{path} does not support the task {task.name}: {names} does not recognize its model type; omit --task "
            "or pass another"
        )
    first = first_line(error, "")
    raise LoadError(f"{path} can't be loaded by transformers' {names}: {type(error).__name__}: {first}") from error


@contextlib.contextmanager
def _silence_transformers() -> Iterator[None]:
    """Discard transformers' progress bar and table of weights, because the names in the table are untrusted."""
    bars: Any = sys.modules.get("transformers.utils.logging")
    shown = bars is not None and bars.is_progress_bar_enabled()
    if shown:
        bars.disable_progress_bar()
    try:
        with silence_logger("transformers"):
            yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path / "config.json")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LoadError(f"{path / 'config.json'} sets architectures to {names!r}, which is not a list of names")
    return config


def _config_code_files(path: Path, config: dict[str, Any]) -> list[str]:
    """Return the Python files that the config's ``auto_map`` names, in quotes, because an untrusted name may look like
    a sentence of the message.

    An entry of ``auto_map`` is ``file.Class``, ``owner/repository--file.Class``, or a list of such names and None.

    Raises:
        LoadError: an entry does not have one of these forms.
    """
    named = config.get("auto_map") or {}
    if isinstance(named, dict):
        values = list(named.values())
    else:
        values = [named]
    classes = [each for value in values for each in (value if isinstance(value, list) else [value]) if each is not None]
    if odd := [each for each in classes if not isinstance(each, str) or "." not in each]:
        raise LoadError(
            f"{path / 'config.json'} has {odd[0]!r} in its auto_map instead of a class name such as 'modeling.Net'; "
            "use the original folder"
        )
    files = set()
    for each in classes:
        repository, _, name = each.rpartition("--")
        file = repr(name.partition(".")[0] + ".py")
        files.add(f"{file} from the repository {repository!r}" if repository else file)
    return sorted(files)


def require_complete_weights(path: Path, missing: frozenset[str], used: frozenset[str]) -> None:
    """Require that the folder has weights for every parameter that the exported part uses.

    Raises:
        LoadError: a used parameter has no weights.
    """
    if random := sorted(missing & used):
        names = f"{', '.join(random[:3])}{', ...' if len(random) > 3 else ''}"
        raise LoadError(
            f"{path} has no weights for {names}, which would be random numbers: the model was not trained for this "
            "task; pass another --task, or a folder that was trained for it"
        )
