"""Parse the name of a model in a package of models, ``timm:resnet50`` or ``torchvision:resnet50``."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from dataclasses import dataclass

from .types import PathLike

ZOO_PACKAGES = ("timm", "torchvision")
_SOURCE = re.compile(rf"(?P<package>{'|'.join(ZOO_PACKAGES)}):(?P<name>\w[\w.\-]*)")


@dataclass(frozen=True)
class ZooModel:
    """Name of a model in a package of models.

    Attributes:
        package: "timm" or "torchvision".
        name: the package's own name of the model. In timm it may end with a tag of pretrained weights, as in
            "resnet50.a1_in1k".
    """

    package: str
    name: str

    def __str__(self) -> str:
        return f"{self.package}:{self.name}"


def parse_zoo_source(source: PathLike) -> ZooModel | None:
    """Parse ``timm:NAME`` or ``torchvision:NAME``. The package is not imported, so the name may be unknown.

    Returns:
        The package and the name; None for any other text, and for an existing path.
    """
    text = os.fspath(source)
    match = _SOURCE.fullmatch(text)
    if match is None or os.path.exists(text):
        return None
    return ZooModel(match["package"], match["name"])


def hash_zoo_model(zoo: ZooModel) -> str:
    """Hash the name of a model and the version of its package.

    Returns:
        SHA-256 as hex digits.
    """
    try:
        version = importlib.metadata.version(zoo.package)
    except importlib.metadata.PackageNotFoundError:
        # The package was not installed by an installer, or not at all.
        version = ""
    return hashlib.sha256(f"{zoo}\0{version}".encode()).hexdigest()
