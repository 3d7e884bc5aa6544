"""Write the names of the automatic architectures to ``catalogue/automatic_names.json``.

    python -m benchmarks.architectures.enumeration

It needs the four libraries. A name stands for a model type of transformers, a module of ``timm.models``, a model class
of diffusers or a model of torchvision. Names that a hand-made entry of the catalogue covers are left out. The order
takes one name of each group in turn, so that the first rows are a sample of all groups. Groups are the tasks of
transformers, the kinds of torchvision and diffusers, and timm.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module

import torch
from torch import nn

from .catalogue import ARCHITECTURES, automatic, declare_torchvision
from .catalogue.automatic_transformers import task_of

# Models of torchvision with more parameters are left out, because they take too much memory and time.
_MOST = 50_000_000


def main() -> None:
    """Write the file."""
    declare_torchvision()
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    left_out: dict[str, str] = {}
    _add_transformers(groups, left_out)
    _add_diffusers(groups, left_out)
    _add_timm(groups, left_out)
    _add_torchvision(groups, left_out)
    rounds = itertools.zip_longest(*([(library, name) for name in names] for (library, _), names in groups.items()))
    order = [entry for turn in rounds for entry in turn if entry is not None]
    content = {"order": order, "left out": left_out}
    automatic.NAMES.write_text(json.dumps(content, indent=0) + "\n")
    print(len(order), "names,", len(left_out), "left out")


def _hand_made(library: str) -> Iterator[tuple[str, str]]:
    """Yield the entries that a person wrote: name, and the model that the entry makes."""
    for a in ARCHITECTURES:
        if a.library == library:
            yield a.name, a.model


def _add_transformers(groups: dict[tuple[str, str], list[str]], left_out: dict[str, str]) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    covered = {}
    for name, model in _hand_made("transformers"):
        covered[getattr(transformers, model).config_class.model_type] = name
    for model_type in CONFIG_MAPPING_NAMES:
        if model_type in covered:
            left_out[f"transformers: {model_type}"] = f"the entry {covered[model_type]} covers it"
        else:
            groups["transformers", task_of(model_type)].append(model_type)


def _add_diffusers(groups: dict[tuple[str, str], list[str]], left_out: dict[str, str]) -> None:
    models = import_module("diffusers.models")
    covered = {model: name for name, model in _hand_made("diffusers")}
    for place, names in models._import_structure.items():
        kind = place.partition(".")[0]
        for name in names:
            found = getattr(models, name)
            if not (isinstance(found, type) and issubclass(found, nn.Module)) or name in ("ModelMixin", "AutoModel"):
                continue
            if "Multi" in name:
                left_out[f"diffusers: {name}"] = "a list of models of another class"
            elif name in covered:
                left_out[f"diffusers: {name}"] = f"the entry {covered[name]} covers it"
            else:
                groups["diffusers", kind].append(name)


def _add_timm(groups: dict[tuple[str, str], list[str]], left_out: dict[str, str]) -> None:
    import timm

    places = import_module("timm.models._registry")._model_to_module
    covered = {}
    for name, model in _hand_made("timm"):
        covered[model.partition(".")[0] if "." in model else places.get(model, "")] = name
    for module in timm.list_modules():
        if module in covered:
            left_out[f"timm: {module}"] = f"the entry {covered[module]} covers it"
        else:
            groups["timm", ""].append(module)


def _add_torchvision(groups: dict[tuple[str, str], list[str]], left_out: dict[str, str]) -> None:
    import torchvision

    covered = {model.rpartition(".")[2]: name for name, model in _hand_made("torchvision")}
    for name in torchvision.models.list_models():
        if name.startswith("quantized_"):
            left_out[f"torchvision: {name}"] = "quantized ops of eager mode, which torch.export does not trace"
        elif name in covered:
            left_out[f"torchvision: {name}"] = f"the entry {covered[name]} covers it"
        elif (size := _parameters(name)) > _MOST:
            left_out[f"torchvision: {name}"] = (
                f"{size / 1e6:.0f} million parameters, more than the 50 million of this list"
            )
        else:
            place = torchvision.models.get_model_builder(name).__module__
            groups["torchvision", place.partition("models.")[2].partition(".")[0]].append(name)


def _parameters(name: str) -> int:
    import torchvision

    builder = torchvision.models.get_model_builder(name)
    settings = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    with torch.device("meta"):
        try:
            return sum(p.numel() for p in torchvision.models.get_model(name, **settings).parameters())
        except Exception:
            return 0


if __name__ == "__main__":
    main()
