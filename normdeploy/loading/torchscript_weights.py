"""Read the weights of a TorchScript archive as data: none of the archive's code is compiled or run.

``data.pkl`` contains the module as a tree of objects of the archive's own classes, with every attribute. The source
text of the classes (``code/``) declares which attributes are parameters and buffers. ``torch.jit.load`` would compile
the source text and run the methods ``__setstate__``.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import nn

from ..errors import LoadError, TrustError
from .file_kinds import archive_root, open_torch_archive, read_entry

_CLASS = r"class {}\(Module\):\s+__parameters__ = \[(?P<parameters>[^\]]*)\]\s+__buffers__ = \[(?P<buffers>[^\]]*)\]"

# Maximum number of paths of modules. Forty modules, each of which contains the next module twice, would have 2**40
# paths.
_MOST = 2**18
# Maximum depth of nested modules.
_DEEPEST = 1000


@dataclass(frozen=True)
class ScriptWeights:
    """Parameters and buffers by their qualified names. TorchScript does not record which buffers are persistent."""

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def weights_for(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Select the weights for ``module``: all parameters, and the buffers that ``module`` has in its state_dict.

        Returns:
            Name -> tensor.
        """
        own = module.state_dict()
        return self.parameters | {name: value for name, value in self.buffers.items() if name in own}


def read_torchscript(path: Path) -> ScriptWeights:
    """Read the weights of an archive.

    Returns:
        Parameters and buffers.

    Raises:
        TrustError: the archive's pickle names something that neither a tensor nor a TorchScript module needs.
        LoadError: the archive is broken, or contains no weights because ``torch.jit.freeze`` wrote them into the code.
    """
    with open_torch_archive(path) as archive:
        root = archive_root(archive)
        if f"{root}/byteorder" in archive.namelist() and read_entry(archive, f"{root}/byteorder", path) != b"little":
            raise LoadError(f"{path} was saved on a big-endian machine; save it on a little-endian machine")
        try:
            tree = _ScriptUnpickler(archive, root, path).load()
        except TrustError:
            raise
        except Exception as error:
            # pickle may raise exceptions of any type.
            raise LoadError(
                f"{path} can't be read as TorchScript: {type(error).__name__}: {error}; it is truncated or broken"
            ) from error
        weights = _collect_weights(tree, archive, root, path)
    if not weights.parameters and not weights.buffers:
        raise LoadError(
            f"{path} contains no weights: torch.jit.freeze wrote them into its code; save the module before it is "
            "frozen"
        )
    return weights


class _ScriptObject:
    """Module of the archive: its attributes, and the module and name of its class in the archive."""

    origin: tuple[str, str]


class _ScriptUnpickler(pickle.Unpickler):
    """Unpickler that builds tensors, lists and plain objects. It refuses every other name before anything is
    imported.
    """

    def __init__(self, archive: ZipFile, root: str, path: Path) -> None:
        super().__init__(io.BytesIO(read_entry(archive, f"{root}/data.pkl", path)))
        self._archive = archive
        self._root = root
        self._path = path
        # Each storage is read once, so tensors that share a storage in the archive also share it here.
        self._storages: dict[str, torch.Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Map a name in the pickle to a harmless class or function.

        Returns:
            The class or function.

        Raises:
            TrustError: the name is not one that weights need.
        """
        if module == "__torch__" or module.startswith("__torch__."):
            return type(name, (_ScriptObject,), {"origin": (module, name)})
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch.jit._pickle" and (name.startswith("build_") or name == "restore_type_tag"):
            return lambda value, *_: value
        if module == "torch" and name.endswith("Storage") and isinstance(kind := getattr(torch, name, None), type):
            return kind
        raise TrustError(f"{self._path} is not loaded: its pickle names {module}.{name}, which no weights need")

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Read a storage of the archive.

        Returns:
            1-D tensor with the storage's elements.
        """
        _, kind, key, _, count = pid
        if key not in self._storages:
            data = bytearray(read_entry(self._archive, f"{self._root}/data/{key}", self._path))
            self._storages[key] = (
                torch.frombuffer(data, dtype=kind.dtype, count=count) if data else torch.empty(0, dtype=kind.dtype)
            )
        return self._storages[key]


def _rebuild_tensor(
    storage: torch.Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> torch.Tensor:
    return storage.as_strided(size, stride, offset)


def _collect_weights(tree: Any, archive: ZipFile, root: str, path: Path) -> ScriptWeights:
    """Collect all declared tensors by their paths from the root. A module with two names appears twice, as in a
    state_dict.
    """
    weights = ScriptWeights()
    visited = 0
    classes: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    ahead: list[tuple[str, Any, frozenset[int]]] = [("", tree, frozenset())]
    while ahead:
        prefix, item, around = ahead.pop()
        visited += 1
        if visited > _MOST:
            raise LoadError(
                f"{path} contains more than {_MOST} modules, counted by their paths: no model is that large, so the "
                "file is malicious"
            )
        if len(around) > _DEEPEST:
            raise LoadError(f"{path} nests modules {_DEEPEST} deep: no model does, so the file is malicious")
        # A module may contain itself, so skip a module that is already on the path from the root.
        if not isinstance(item, _ScriptObject) or id(item) in around:
            continue
        if item.origin not in classes:
            classes[item.origin] = _declared_names(item.origin, archive, root, path)
        parameters, buffers = classes[item.origin]
        for name, value in vars(item).items():
            if isinstance(value, _ScriptObject):
                ahead.append((f"{prefix}{name}.", value, around | {id(item)}))
            elif isinstance(value, torch.Tensor) and (name in parameters or name in buffers):
                (weights.parameters if name in parameters else weights.buffers)[prefix + name] = value
    return weights


def _declared_names(origin: tuple[str, str], archive: ZipFile, root: str, path: Path) -> tuple[set[str], set[str]]:
    """Return the names of the parameters and buffers of one class, from the source text of its module."""
    module, name = origin
    text = read_entry(archive, f"{root}/code/{module.replace('.', '/')}.py", path).decode(errors="replace")
    match = re.search(_CLASS.format(re.escape(name)), text)
    if match is None:
        return set(), set()
    return set(re.findall(r'"([^"]+)"', match["parameters"])), set(re.findall(r'"([^"]+)"', match["buffers"]))
