"""Compute the key of a step: the hash of everything that its outputs depend on.

    argv       the verb and its options, with paths in the step's own folder
    inputs     path in that folder → SHA-256: the model, samples, code, and the outputs of the preceding steps
    normdeploy the hash of this package's own code
    versions   of Python and the libraries that the verb uses; of all installed packages if it runs code
    gpu, driver, cpu   of the machine, for steps whose results depend on them

The key contains the hashes of the outputs of earlier steps. If an export gives the same file after an update, the steps
that read this file stay valid.
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

from ..environment import NODE, WEB, describe_environment
from ..extensions import NORMS, RULES, RUNTIMES, TRANSLATIONS, installed_extensions
from .job_steps import ENGINES, JobStep, StepNeeds
from .step_store import json_digest

_HERE = Path(__file__).resolve().parents[1]
_ENGINE_LIBRARIES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt-rtx"}
_ONLY_ENGINES = frozenset({"tensorrt", "tensorrt-rtx", "polygraphy", "triton"})
_MACHINE = frozenset({"system", "cpu", "driver"})


@dataclass(frozen=True)
class FleetMachine:
    """Description of a machine, from `normdeploy.environment.describe_environment`, with hashes of the package's code
    and of the installed packages.

    Attributes:
        code: hash of the package's code.
        installed: hash of the names and versions of all installed packages.
    """

    facts: Mapping[str, str]
    code: str
    installed: str

    @classmethod
    def this_machine(cls) -> FleetMachine:
        """Describe this machine.

        Returns:
            the description, including the versions of extension packages.
        """
        packages = sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()})
        return cls(describe_environment() | _extension_versions(), code_digest(), json_digest(packages))

    @property
    def gpu_capabilities(self) -> tuple[str, ...]:
        """Return the compute capability of each GPU.

        Returns:
            for example ("8.9", "8.9").
        """
        return tuple(value for name, value in self.facts.items() if name.startswith("capability "))

    def runtime_version(self, runtime: str) -> str:
        """Return the installed version of a runtime.

        Returns:
            the version; "" if the runtime is not installed.
        """
        names = ("onnxruntime", "onnxruntime-gpu") if runtime == "onnxruntime" else (runtime,)
        return next((self.facts[n] for n in names if n in self.facts), "")

    def describe_missing(self, needs: StepNeeds) -> str:
        """Describe the first requirement that the machine does not meet.

        Returns:
            a clause for messages; "" if the machine meets all requirements.
        """
        if needs.runtime and not (version := self.runtime_version(needs.runtime)):
            return f"{needs.runtime} is not installed"
        if needs.version and not fnmatchcase(version, needs.version):
            return f"{needs.runtime} has version {version}, but {needs.version} is required"
        if needs.capability and needs.capability not in self.gpu_capabilities:
            found = ", ".join(self.gpu_capabilities)
            return f"no GPU of compute capability {needs.capability}" + (f" (found {found})" if found else "")
        return ""

    def with_updates(self, update: Mapping[str, str]) -> FleetMachine:
        """Describe the machine after an update.

        Args:
            update: library → new version. "onnxruntime" also means the package of onnxruntime for GPUs.

        Returns:
            the changed description. Its code hash is "" if normdeploy itself changes. Libraries that the machine lacks
            are ignored.
        """
        named = {"onnxruntime-gpu" if n == "onnxruntime" and n not in self.facts else n: v for n, v in update.items()}
        known = {name: version for name, version in named.items() if name in self.facts}
        if self.facts.get("normdeploy") == known.get("normdeploy", self.facts.get("normdeploy")):
            code = self.code
        else:
            code = ""
        return FleetMachine({**self.facts, **known}, code, self.installed)


def step_key(step: JobStep, inputs: Mapping[str, str], machine: FleetMachine) -> tuple[str, dict[str, Any]]:
    """Compute a step's key on a machine.

    Args:
        inputs: path in the step's folder → SHA-256.

    Returns:
        the key, and the content whose hash is the key.
    """
    facts = machine.facts
    used = {n: v for n, v in facts.items() if n not in _MACHINE and not n.startswith(("gpu ", "capability "))}
    if step.needs.runtime not in ENGINES and step.verb != "recheck":
        used = {n: v for n, v in used.items() if n not in _ONLY_ENGINES}
    else:
        others = {library for runtime, library in _ENGINE_LIBRARIES.items() if runtime != step.needs.runtime}
        used = {n: v for n, v in used.items() if n not in others}
    if not any(WEB in argument for argument in step.argv):
        # Their versions depend on the working folder.
        used = {n: v for n, v in used.items() if n not in (NODE, WEB)}
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
    """Describe the differences between the contents of two keys.

    Returns:
        for example ["onnxruntime 1.30 → 1.31"].
    """
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
    """Return the versions of packages that add norms, runtimes, rules or translations, because any verb may use these
    packages.
    """
    found = {e.package for group in (NORMS, RUNTIMES, RULES, TRANSLATIONS) for e in installed_extensions(group)}
    return {f"extension {package}": importlib.metadata.version(package) for package in sorted(found)}


@cache
def code_digest() -> str:
    """Hash the package's own files, except those of ``fleet``, which do not affect the outputs of steps.

    Returns:
        SHA-256 in hexadecimal.
    """
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
    """List the Python files below a folder, without hidden folders, virtual environments and ``skipped``.

    Returns:
        path in the folder → file.
    """
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
