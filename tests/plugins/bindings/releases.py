"""One release of the bindings in a worker of its own, and what is wrong with its answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normdeploy_plugins._launch import QUANTIZED, Unknown, in_channels_last
from normdeploy_plugins.ops import BY_NAME

from . import mock, wheels
from .cases import HWC8, LINEAR, Case

COMPILER = shutil.which("g++")


@dataclass(frozen=True)
class Release:
    """``version`` of the bindings, which lie in the folder ``bindings``."""

    version: str
    bindings: Path

    @property
    def major(self) -> int:
        return wheels.number(self.version)[0]

    def run(self, folder: Path, layout: int | None = None, **request: Any) -> Answers:
        """What the worker answers; ``folder`` keeps what is compiled."""
        told = {"libraries": str(mock.compiled(folder, self.major, layout)), "bindings": str(self.bindings)}
        told |= {"kernels": str(folder)}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.plugins.bindings.worker"],
            input=json.dumps(told | request),
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        answers = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        return Answers(ended.returncode, answers, ended.stderr)


@dataclass(frozen=True)
class Answers:
    status: int
    answers: list[dict[str, Any]]
    stderr: str

    def __bool__(self) -> bool:
        return self.status == 0

    @property
    def plugins(self) -> list[dict[str, Any]]:
        return [answer for answer in self.answers if "plugins" in answer]

    @property
    def end(self) -> str:
        """Where and how it ended, for an assertion's message."""
        return f"exit status {self.status} after {self.answers[-1:]}\n{self.stderr[-3000:]}"


class Symbol:
    """A dynamic size that can be computed with."""

    is_fake = is_constant = False

    def _made(self, other: Any) -> Symbol:
        return Symbol()

    __add__ = __sub__ = __mul__ = __floordiv__ = _made
    __eq__ = _made  # type: ignore[assignment]
    __hash__ = object.__hash__


def complaints(case: Case, plugin: dict[str, Any], real: bool) -> Iterator[str]:
    """How one plugin's answers differ from what the op says for the same sizes as plain numbers."""
    op, attributes, sizes = BY_NAME[case.op], case.attributes, case.sizes
    results = [op.output_tensors(case.tensors(s), attributes) for s in sizes]
    used, unknown, given = case.call(unknown=Unknown())
    tiles = used.tiles(unknown, given)
    data = ("fp32", "fp16", "bf16")
    mixed = [(d, "fp32") for d in data[1:]] if "P" in op.types else []
    quantized = QUANTIZED.get(attributes.get("to", ""), "")
    typed = [{"T": d, "P": p, "F": "fp32", "Q": quantized} for d, p in [*((d, d) for d in data), *mixed]]
    # groups, channels' norms and what a BatchNorm leaves, as convolutions of half precision have them
    channels_last = (
        [k for k in typed if k["T"] != "fp32"]
        if in_channels_last(op, case.tensors(unknown=Unknown()), attributes)
        else []
    )
    expected = {
        "kinds": mock.AOT,
        "name": [op.name, "1", "normdeploy"],
        "types": [t.dtype for t in results[0]],
        "shapes": [[list(t.shape) for t in result] for result in results],
        "combinations": [[[kinds[letter], LINEAR] for letter in op.types] for kinds in typed]
        + [[[kinds[letter], HWC8 if letter == "T" else LINEAR] for letter in op.types] for kinds in channels_last],
        "tactics": list(range(1, len(tiles) + 1)),
    }
    for what, wanted in expected.items():
        if plugin[what] != wanted:
            yield f"{what}: {plugin[what]}, not {wanted}"
    _, symbols, _ = case.call(unknown=Symbol())
    symbolic = used.launch(symbols, given, tiles[0]).scalars
    passed = [name for name, value in symbolic.items() if not isinstance(value, int) or name == "rows"]
    for launched in plugin["launches"]:
        tactic = launched["tactic"]
        tile = tiles[tactic - 1 if tactic in expected["tactics"] else 0]
        for at, (params, extra, kinds) in zip(sizes, launched["at"], strict=True):
            launch = used.launch(case.call(at)[1], given, tile)
            wanted = dict.fromkeys(mock.PARAMETERS, 1) | {"grid_x": launch.grid, "block_x": 32 * launch.warps}
            wanted["shared_mem"] = params["shared_mem"]  # known to the compiler alone
            if params != wanted or not 0 <= params["shared_mem"] <= 48 * 1024:
                yield f"tactic {tactic} at {at}: launched with {params}, not {wanted}"
            if extra != [launch.scalars[name] for name in passed]:
                yield f"tactic {tactic} at {at}: arguments {extra}, not {passed} of {launch.scalars}"
            if set(kinds) != {2}:
                yield f"tactic {tactic}: arguments that are no int32: {kinds}"
        name, ptx = launched["kernel"], launched["ptx"]
        if not re.fullmatch(rf"{launch.kernel.__name__}_[0-9a-f]{{16}}", name) or f".entry {name}(" not in ptx:
            yield f"tactic {tactic}: the kernel's name {name} is not in its PTX"
        parameters = re.findall(r"\.param \.(\w+)", ptx[: ptx.find("{")])
        if real and parameters != ["u64"] * len(op.inputs) + ["u32"] * len(passed) + ["u64"] * len(op.outputs):
            yield f"tactic {tactic}: the kernel's parameters are {parameters}"


def names_twice(plugins: Sequence[dict[str, Any]]) -> list[str]:
    """Kernel names that stand for more than one kernel."""
    kernels: dict[str, set[str]] = {}
    for plugin in plugins:
        for launched in plugin["launches"]:
            kernels.setdefault(launched["kernel"], set()).add(launched["ptx"])
    return [name for name, held in kernels.items() if len(held) > 1]
