"""The key of a step: the hash of all that its outputs depend on.

    argv       the verb and its options, with paths in the step's own folder
    inputs     path in that folder -> SHA-256: the model, samples, code, and what the steps before it made
    normdeploy the hash of this package's own code
    versions   of Python and the libraries that the verb uses; of all that are installed where it runs code
    gpu, driver, cpu   of the machine, for what is run or timed on them

The outputs of earlier steps stand in it by their content: an export that gives the same file after an update leaves
what was made of it as it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ..environment import describe_environment
from ..extensions import NORMS, RULES, RUNTIMES, TRANSLATIONS, installed_extensions
from .job_steps import ENGINES, JobStep, StepNeeds
from .step_store import json_digest

_HERE = Path(__file__).resolve().parents[1]
_ENGINE_LIBRARIES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt-rtx"}
_ONLY_ENGINES = frozenset({"tensorrt", "tensorrt-rtx", "polygraphy", "triton"})
_MACHINE = frozenset({"system", "cpu", "driver"})


@dataclass(frozen=True)
class FleetMachine:
    """What a machine has, as `normdeploy.environment.describe_environment` tells it, and the hash of the package's
    code."""

    facts: Mapping[str, str]
    code: str
    # the hash of the names and versions of all installed packages
    installed: str

    @classmethod
    def this_machine(cls) -> FleetMachine:
        packages = sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()})
        return cls(describe_environment() | _extension_versions(), code_digest(), json_digest(packages))

    @property
    def gpu_capabilities(self) -> tuple[str, ...]:
        return tuple(value for name, value in self.facts.items() if name.startswith("capability "))

    def runtime_version(self, runtime: str) -> str:
        """Of a runtime; "" where the machine has none."""
        names = ("onnxruntime", "onnxruntime-gpu") if runtime == "onnxruntime" else (runtime,)
        return next((self.facts[n] for n in names if n in self.facts), "")

    def describe_missing(self, needs: StepNeeds) -> str:
        """What of the needs it has not; "" where it has all."""
        if needs.runtime and not (version := self.runtime_version(needs.runtime)):
            return f"{needs.runtime} is not installed"
        if needs.version and not fnmatchcase(version, needs.version):
            return f"{needs.runtime} is {version}, and {needs.version} is asked for"
        if needs.capability and needs.capability not in self.gpu_capabilities:
            found = ", ".join(self.gpu_capabilities)
            return f"no GPU of compute capability {needs.capability}" + (f" (there is {found})" if found else "")
        return ""

    def with_updates(self, update: Mapping[str, str]) -> FleetMachine:
        """The machine as it would be with other versions of what it has; "onnxruntime" means its GPU build too."""
        named = {"onnxruntime-gpu" if n == "onnxruntime" and n not in self.facts else n: v for n, v in update.items()}
        known = {name: version for name, version in named.items() if name in self.facts}
        if self.facts.get("normdeploy") == known.get("normdeploy", self.facts.get("normdeploy")):
            code = self.code
        else:
            code = ""
        return FleetMachine({**self.facts, **known}, code, self.installed)


def step_key(step: JobStep, inputs: Mapping[str, str], machine: FleetMachine) -> tuple[str, dict[str, Any]]:
    """The step's key on a machine, and what it is the hash of.

    Args:
        inputs: path in the step's folder -> SHA-256.
    """
    facts = machine.facts
    used = {n: v for n, v in facts.items() if n not in _MACHINE and not n.startswith(("gpu ", "capability "))}
    if step.needs.runtime not in ENGINES and step.verb != "recheck":
        used = {n: v for n, v in used.items() if n not in _ONLY_ENGINES}
    else:
        others = {library for runtime, library in _ENGINE_LIBRARIES.items() if runtime != step.needs.runtime}
        used = {n: v for n, v in used.items() if n not in others}
    depends: dict[str, Any] = {
        "argv": list(step.argv),
        "inputs": dict(inputs),
        "normdeploy": machine.code,
        "versions": used,
    }
    if step.code is not None:
        depends["installed"] = machine.installed
    if step.needs.capability:
        number = next(n.removeprefix("capability ") for n, v in facts.items() if v == step.needs.capability)
        depends |= {"gpu": facts.get(f"gpu {number}", ""), "capability": step.needs.capability}
        depends |= {"driver": facts.get("driver", "")}
    elif step.verb == "bench":
        depends["cpu"] = facts["cpu"]
    return json_digest(depends), depends


def describe_key_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Which parts of two keys' contents differ, in words: "onnxruntime 1.30 -> 1.31"."""
    told = []
    for name in sorted({*old, *new}):
        was = old.get(name)
        now = new.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            parts = sorted(p for p in {*was, *now} if was.get(p) != now.get(p))
            told += [f"{p} {_abbreviate_value(was.get(p))} → {_abbreviate_value(now.get(p))}" for p in parts]
        elif was != now:
            told.append("options" if name == "argv" else f"{name} {_abbreviate_value(was)} → {_abbreviate_value(now)}")
    return told


def _abbreviate_value(value: Any) -> str:
    if value is None:
        text = "(none)"
    else:
        text = str(value)
    if len(text) == 64:
        return text[:12]
    return text


def _extension_versions() -> dict[str, str]:
    """The packages that bring norms, runtimes, rules or translations, with their versions: any verb may ask them."""
    found = {e.package for group in (NORMS, RUNTIMES, RULES, TRANSLATIONS) for e in installed_extensions(group)}
    return {f"extension {package}": importlib.metadata.version(package) for package in sorted(found)}


@cache
def code_digest() -> str:
    """The SHA-256 of the package's own files, but for the fleet itself, which computes nothing."""
    digest = hashlib.sha256()
    for root in (_HERE, _plugin_folder()):
        for path in sorted(root.rglob("*")) if root.is_dir() else ():
            inside = path.relative_to(root)
            if path.suffix in (".py", ".json", ".html", ".css") and inside.parts[0] != "fleet" and path.is_file():
                digest.update(f"{root.name}/{inside.as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _plugin_folder() -> Path:
    installed = _HERE.parent / "normdeploy_plugins"
    if installed.is_dir():
        return installed
    return _HERE.parent / "plugins"


def find_python_files(folder: Path, skipped: Sequence[Path] = ()) -> dict[str, Path]:
    """Every Python file below a folder, path in it -> file, but for hidden folders, environments and ``skipped``."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path in skipped:
            continue
        if path.is_dir() and not path.is_symlink() and path.name != "__pycache__":
            if not (path / "pyvenv.cfg").exists():
                found |= {f"{path.name}/{name}": file for name, file in find_python_files(path, skipped).items()}
        elif path.suffix == ".py" and path.is_file():
            found[path.name] = path
    return found
