"""Read ``model_index.json``, which names the components of a diffusers pipeline, as data. No library is imported.

Components are models, which become ONNX files, and schedulers, tokenizers and image processors, which are copied. The
folders and files have the same names as in the ONNX export of the optimum library:

| component | files |
|---|---|
| unet, transformer, text_encoder, text_encoder_2, safety_checker, ... | ``<component>/model.onnx`` |
| vae | ``vae_encoder/model.onnx``, ``vae_decoder/model.onnx`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError, LoadError, TrustError
from .file_kinds import PIPELINE_INDEX
from .folder_containment import read_json, require_contained_files

CONFIG = "config.json"
MODEL_FILE = "model.onnx"
# Component that becomes two parts, and the two parts.
AUTOENCODER = "vae"
ENCODER, DECODER = "vae_encoder", "vae_decoder"
_LIBRARIES = ("diffusers", "transformers")
# Folder of diffusers/pipelines -> classes that it defines. model_index.json names the folder as their library.
_PIPELINE_MODULES = {"stable_diffusion": ("StableDiffusionSafetyChecker",)}
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Suffixes of the files of schedulers, tokenizers and image processors that are copied: data only."""
_WEIGHTS = (".safetensors", ".bin", ".msgpack", ".h5")


@dataclass(frozen=True)
class Component:
    """Component of a pipeline.

    Attributes:
        library: "diffusers", "transformers", or a folder of diffusers' pipelines.
        is_model: True for a component with weights or with a model's config.
    """

    name: str
    library: str
    class_name: str
    is_model: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts that the component becomes; () if it is copied."""
        if not self.is_model:
            return ()
        if self.name == AUTOENCODER:
            return (ENCODER, DECODER)
        return (self.name,)


@dataclass(frozen=True)
class PipelineIndex:
    """Content of a pipeline's ``model_index.json``.

    Attributes:
        class_name: class of the pipeline.
        settings: arguments of the pipeline's class other than components, by name.
    """

    path: Path
    class_name: str
    components: tuple[Component, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def part_files(self) -> dict[str, str]:
        """Return the path of each part's ONNX file in the output folder, by the name of the part."""
        return {part: f"{part}/{MODEL_FILE}" for component in self.components for part in component.parts}

    @property
    def copied_files(self) -> dict[str, Path]:
        """Return the files that the output folder has besides ONNX files, by path in the output folder.

        These files are the index, the configs of the models, and the files of the components other than models.
        """
        copied = {PIPELINE_INDEX: self.path / PIPELINE_INDEX}
        for component in self.components:
            source = self.path / component.name
            if component.is_model:
                copied |= {f"{part}/{CONFIG}": source / CONFIG for part in component.parts}
                continue
            files = [file for file in sorted(source.iterdir()) if file.suffix in COPIED_SUFFIXES and file.is_file()]
            copied |= {f"{component.name}/{file.name}": file for file in files}
        return copied

    def find_component(self, part: str) -> Component:
        """Find the component that a part belongs to.

        Returns:
            The component.

        Raises:
            InputError: the pipeline has no such part.
        """
        for component in self.components:
            if part in component.parts:
                return component
        raise InputError(
            f"the pipeline {self.path} has no part {part!r}; choose one of {', '.join(self.part_files) or 'none'}"
        )

    def read_config(self, component: str) -> dict[str, Any]:
        """Read the config of a model.

        Returns:
            The config; {} if the component does not exist.
        """
        return read_json(self.path / component / CONFIG)


def read_pipeline_index(path: Path, *, trust: bool = False) -> PipelineIndex:
    """Read the index of a pipeline, and check that the folder has each component and refers only to files inside it.

    Args:
        trust: True accepts a pipeline whose class is defined in the folder. That class is not used, so its code does
            not run. Classes of components must be in diffusers or transformers in any case.

    Returns:
        The index.

    Raises:
        LoadError: the index is malformed, a component's folder is missing, or a file is outside the folder.
        TrustError: the index names code.
    """
    index = read_json(path / PIPELINE_INDEX)
    class_name = _read_class_name(path, index, trust)
    require_contained_files(path)
    components = list[Component]()
    settings = dict[str, Any]()
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if not isinstance(entry, list):
            settings[name] = entry
        elif (component := _read_component(path, name, entry)) is not None:
            components.append(component)
    if not any(component.is_model for component in components):
        raise LoadError(
            f"{path / PIPELINE_INDEX} names no model, so there is nothing to export; use the original folder"
        )
    return PipelineIndex(path, class_name, tuple(components), settings)


def _read_class_name(path: Path, index: Mapping[str, Any], trust: bool) -> str:
    named = index.get("_class_name")
    # diffusers writes [file, class] for a pipeline whose class is in a file of the folder.
    if isinstance(named, list) and len(named) == 2 and all(isinstance(part, str) for part in named):
        if not trust:
            raise TrustError(
                f"{path} is not loaded: its {PIPELINE_INDEX} names the custom pipeline {named[1]!r}, so {named[0]!r}"
                " would run in diffusers. If you trust its author, pass --trust-remote-code: normdeploy then"
                " exports the parts that are classes of diffusers and transformers, and does not run this file"
            )
        named = named[1]
    if not isinstance(named, str) or not named.isidentifier():
        raise LoadError(
            f"{path / PIPELINE_INDEX} sets _class_name to {named!r}, which is not the name of a pipeline; use the"
            " original folder"
        )
    return named


def _read_component(path: Path, name: str, entry: list[Any]) -> Component | None:
    """Read one entry of the index. Return None for a component that the pipeline does not have."""
    # An optional component that is missing is [null, null].
    if entry == [None, None]:
        return None
    named = len(entry) == 2 and all(isinstance(part, str) for part in entry)
    if not named or not name.isidentifier() or not entry[1].isidentifier():
        raise LoadError(
            f"{path / PIPELINE_INDEX} sets {name!r} to {entry!r} instead of a library and a class, such as"
            " ['diffusers', 'UNet2DConditionModel']; use the original folder"
        )
    library, class_name = entry
    if library not in _LIBRARIES and class_name not in _PIPELINE_MODULES.get(library, ()):
        _refuse_library(path, name, library, class_name)
    folder = path / name
    if not folder.is_dir():
        raise LoadError(
            f"{path} is incomplete: its {PIPELINE_INDEX} names {name!r} ({class_name}), but there is no folder"
            f" {name!r}; copy the whole pipeline"
        )
    require_contained_files(folder, root=path)
    return Component(name, library, class_name, is_model=_has_model(folder))


def _refuse_library(path: Path, name: str, library: str, class_name: str) -> NoReturn:
    """Refuse a component whose class is in neither diffusers nor transformers.

    Raises:
        TrustError: the class is in a Python file of the pipeline's folder.
        LoadError: the class is elsewhere.
    """
    said = f"{path} is not loaded: its {PIPELINE_INDEX} takes the class {class_name!r} of {name!r} from"
    only = f"only classes of {' and '.join(_LIBRARIES)} are exported, also with --trust-remote-code"
    for folder in (path / name, path):
        # A name such as "/etc/x" would leave the folder.
        if library.isidentifier() and (folder / f"{library}.py").is_file():
            raise TrustError(f"{said} the file {library + '.py'!r}, which would run; {only}")
    raise LoadError(f"{said} the library {library!r}; {only}")


def _has_model(folder: Path) -> bool:
    """Return whether a component's folder holds a model."""
    return (folder / CONFIG).is_file() or any(file.suffix in _WEIGHTS for file in folder.iterdir())
