"""An ordinary saved program, and what makes a crafted file of it."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x + y) * self.scale


def save_ordinary(path: Path) -> Path:
    """An ordinary ExportedProgram: sample inputs in a pickle, two guards, symbolic shapes."""
    batch = torch.export.Dim("batch", min=1, max=16)
    example = (torch.randn(3, 4), torch.randn(3, 4))
    program = torch.export.export(Net().eval(), example, dynamic_shapes=({0: batch}, {0: batch}), strict=False)
    torch.export.save(program, path)
    return path


class Bomb:
    """Its pickle runs a shell command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class Samples:
    """Its pickle runs a shell command and leaves proper example inputs."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"[__import__('os').system({self.command!r}), ((__import__('torch').ones(3, 4),) * 2, {{}})][1]",)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def edited(source: Path, target: Path, changes: dict[str, Callable[[bytes], bytes] | bytes]) -> Path:
    """A copy of an archive with some entries changed or added (names without the root folder)."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as out:
        root = archive.namelist()[0].split("/")[0]
        for name in archive.namelist():
            change = changes.get(name.removeprefix(f"{root}/"))
            data = archive.read(name)
            out.writestr(name, change(data) if callable(change) else change if change is not None else data)
        for name in changes.keys() - {n.removeprefix(f"{root}/") for n in archive.namelist()}:
            change = changes[name]
            assert isinstance(change, bytes)
            out.writestr(f"{root}/{name}", change)
    return target


def json_edit(edit: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        value = json.loads(data)
        edit(value)
        return json.dumps(value).encode()

    return change


PROGRAM, WEIGHTS, CONSTANTS = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
