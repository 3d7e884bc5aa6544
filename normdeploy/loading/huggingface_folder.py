"""A Hugging Face model folder, where transformers is installed: the class that its config or the task names, in eval
mode."""

from __future__ import annotations

import contextlib
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


@dataclass(frozen=True)
class PreparedFolder:
    """``missing``: parameters of the prepared module for which the folder has no weights; transformers fills them with
    random numbers."""

    prepared: TraceableModel
    missing: frozenset[str]


@dataclass(frozen=True)
class HuggingfaceFolder:
    """The model of a folder as its class made it; ``missing``: its parameters for which the folder has no weights."""

    path: Path
    model: nn.Module
    task: HuggingfaceTask | None
    missing: frozenset[str]

    def prepare_part(self, part: str | None) -> PreparedFolder:
        """The model or a part of it, to be traced before another part is prepared: they are one module with another
        ``forward``.

        Raises:
            InputError: the model has no such part, or no past.
        """
        for module in self.model.modules():
            # the one of the part before
            module.__dict__.pop("forward", None)
        lacking = {id(t) for name, t in _named_tensors(self.model) if name in self.missing}
        ready = prepare_model(self.model, self.path, self.task, part)
        return PreparedFolder(ready, frozenset(name for name, t in _named_tensors(ready.module) if id(t) in lacking))


def prepare_folder(path: Path, trust: bool, task: str | None = None, part: str | None = None) -> PreparedFolder:
    """The model of the folder, or a part of it.

    Args:
        task: as for ``load_folder_model``.
        part: of an encoder-decoder "encoder", "decoder" or "decoder-with-past"; None: the whole.

    Raises:
        NormdeployError: as ``load_folder_model``; InputError too where there is no such part.
    """
    if part is not None:
        part = require_part_name(part)
    else:
        part = None
    return load_folder_model(path, trust, task).prepare_part(part)


def load_folder_model(path: Path, trust: bool, task: str | None = None) -> HuggingfaceFolder:
    """The model of the folder; nothing is fetched, and no code of the folder runs without ``trust``.

    Args:
        task: which class of transformers, and which inputs and outputs (`huggingface_tasks`); None: the class that the
        config names, all outputs.

    Raises:
        RuntimeUnavailable: transformers is not installed.
        TrustError: the folder brings its own classes.
        LoadError: the config or the weights are broken.
        InputError: there is no such task, or the model is none for it.
    """
    if task is not None:
        wanted = find_task(task)
    else:
        wanted = None
    require_contained_files(path)
    config = _read_config(path)
    require_plausible_config(path, config)
    if (files := _config_code_files(path, config)) and not trust:
        raise TrustError(
            f"{path} is not loaded: its config.json names classes of its own (auto_map), so {', '.join(files)} would "
            "run. If you trust who made it, pass --trust"
        )
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeUnavailable(
            f"{path} is a Hugging Face folder, and transformers is not installed: pip install transformers, or export "
            "the model once and give the .pt2 file"
        )
    # said aloud: where it is left out transformers asks at the terminal, of every file of the folder that names code
    options: dict[str, Any] = {"trust_remote_code": trust and bool(files)}
    model, missing = _load_pretrained(path, _candidate_classes(config, wanted), wanted, options)
    # a decoder inside may have a config of its own
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # type: ignore[union-attr]  # a cache is there only where a task or part asks for it
    if _has_attention_bias(config) and callable(choose := getattr(model, "set_attn_implementation", None)):
        choose("eager")
    return HuggingfaceFolder(path, model.eval(), wanted, missing)


def _named_tensors(module: nn.Module) -> list[tuple[str, Any]]:
    """Parameters and buffers under every name that they have; a part has others than the whole."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _has_attention_bias(config: dict[str, Any]) -> bool:
    """Whether its attention adds a bias to the scores (T5, Swin): torch's fused attention with a mask of numbers is
    what its exporter can't decompose for a dynamic batch ("Cannot view a tensor with shape ...")."""
    return "relative_attention_num_buckets" in config or str(config.get("model_type", "")).startswith("swin")


def _candidate_classes(config: dict[str, Any], task: HuggingfaceTask | None) -> list[Any]:
    """Classes to try: the one that the config names comes first where the task's are for its kind too."""
    import transformers

    if task is not None:
        return [loader for name in task.loaders if (loader := _import_class(transformers, name)) is not None]
    if not config.get("auto_map"):
        named = _import_class(transformers, (config.get("architectures") or [""])[0])
    else:
        named = None
    # a tokenizer or processor of this name would load other files of the folder
    known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return [named if known else transformers.AutoModel]


def _import_class(library: Any, name: str) -> Any:
    """Return a class of transformers, None where there is none or it can't be imported."""
    try:
        return getattr(library, name)
    except Exception:
        # It imports a class when it is asked for, with whatever that class needs, and says so in errors of any type.
        return None


def _load_pretrained(
    path: Path, loaders: list[Any], task: HuggingfaceTask | None, options: dict[str, Any]
) -> tuple[nn.Module, frozenset[str]]:
    error: Exception | None = None
    for loader in loaders:
        try:
            with _silence_transformers():
                model, info = loader.from_pretrained(
                    str(path), local_files_only=True, output_loading_info=True, **options
                )
            return model, frozenset(info["missing_keys"])
        except Exception as failure:
            # OSError, ValueError, SafetensorError, ...: transformers names no common class
            error = error or failure
    names = " or ".join(loader.__name__ for loader in loaders)
    if error is None:
        if task is None:
            wanted = ""
        else:
            wanted = f" for the task {task.name}"
        raise LoadError(f"{path} can't be loaded: this transformers has no class{wanted} that can be imported")
    if task is not None and isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
        raise InputError(
            f"{path} is no model for the task {task.name}: {names} does not know its kind; leave --task out or give"
            " another"
        )
    first = first_line(error, "")
    raise LoadError(f"{path} can't be loaded by transformers' {names}: {type(error).__name__}: {first}") from error


@contextlib.contextmanager
def _silence_transformers() -> Iterator[None]:
    """Keep transformers' bar and its table of weights off the terminal: a stranger gave the names in it."""
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
        raise LoadError(f"{path / 'config.json'} gives {names!r} as its architectures, which is no list of names")
    return config


def _config_code_files(path: Path, config: dict[str, Any]) -> list[str]:
    """Return the files of Python that the config's ``auto_map`` names, in quotes: a name may read like a sentence.

    A class is named as ``file.Class``, or ``owner/repository--file.Class``, or is one of a list, with None where there
    is none.

    Raises:
        LoadError: it names something else.
    """
    named = config.get("auto_map") or {}
    if isinstance(named, dict):
        values = list(named.values())
    else:
        values = [named]
    classes = [each for value in values for each in (value if isinstance(value, list) else [value]) if each is not None]
    if odd := [each for each in classes if not isinstance(each, str) or "." not in each]:
        raise LoadError(
            f"{path / 'config.json'} gives {odd[0]!r} in its auto_map, where the name of a class is wanted, such as"
            " 'modeling.Net'; give the folder as it was made"
        )
    files = set()
    for each in classes:
        repository, _, name = each.rpartition("--")
        file = repr(name.partition(".")[0] + ".py")
        files.add(f"{file} of the repository {repository!r}" if repository else file)
    return sorted(files)


def require_complete_weights(path: Path, missing: frozenset[str], used: frozenset[str]) -> None:
    """
    Raises:
        LoadError: the exported part of the model uses parameters for which the folder has no weights.
    """
    if random := sorted(missing & used):
        names = f"{', '.join(random[:3])}{', ...' if len(random) > 3 else ''}"
        raise LoadError(
            f"{path} has no weights for {names}, which would be random numbers: it was not trained for this task; give"
            " another --task, or a folder that was"
        )
