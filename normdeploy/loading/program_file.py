"""Load an ExportedProgram from a file; an untrusted file is loaded from a copy that can't run code."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from ..errors import LoadError, TrustError
from .archive_sanitizer import ArchiveFindings, sanitize_archive
from .composite_file import CompositeFile, PartCollector
from .file_kinds import open_torch_archive
from .operator_allowlist import OperatorAllowlist
from .shape_expressions import DisallowedExpression, SizeGuard
from .torch_state import PROCESS_STATE

_SCHEMA = re.compile(r"schema version (?P<theirs>.*) does not match our current schema version (?P<ours>.*)")
_KNOWN_LIBRARIES = ("transformers", "diffusers")


def load_program(
    path: Path, trust: bool, operators: OperatorAllowlist
) -> tuple[torch.export.ExportedProgram, list[SizeGuard]]:
    """Load a program on the CPU.

    A file without refused parts is loaded from a sanitized copy, even with ``trust``. A file with refused parts is
    passed to torch unchanged, and only if it is trusted.

    Returns:
        The program and the conditions on its input sizes.

    Raises:
        TrustError: parts of the file would run code. The message names each part.
        LoadError: the file is broken, or needs operators or classes whose modules are not imported.
    """
    copy = PartCollector()
    with open_torch_archive(path) as archive:
        findings = sanitize_archive(path, archive, copy, operators)
    if findings.reasons and not trust:
        raise TrustError(_describe_refusals(path, findings))
    _register_known_classes(findings.classes)
    with path.open("rb") if findings.reasons else CompositeFile(copy) as file:
        program = _load_exported_program(file, path)
    return _move_to_cpu(program), findings.guards


def _describe_refusals(path: Path, findings: ArchiveFindings) -> str:
    shown = "\n".join(f"  - {reason}" for reason in findings.reasons[:8])
    if len(findings.reasons) > 8:
        more = f"\n  - and {len(findings.reasons) - 8} more"
    else:
        more = ""
    return f"{path} is not loaded, parts of it would run code:\n{shown}{more}\nIf you trust its author, pass --trust"


def _register_known_classes(names: Iterable[str]) -> None:
    """Import the modules of known libraries that define the output classes ``names``. The import registers these
    classes; otherwise programs that return them fail to load.
    """
    for name in names:
        module = name.rpartition(".")[0]
        if (
            module.partition(".")[0] in _KNOWN_LIBRARIES
            and importlib.util.find_spec(module.partition(".")[0]) is not None
        ):
            # The module may not exist in another version of the library. Then torch's error names the missing class.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


class _CauseCollector(logging.Handler):
    """Handler that collects logged exceptions. If torch.export.load fails, it logs the cause and raises an error that
    only refers to the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the log record's exception, if it has one."""
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextlib.contextmanager
def _capture_log(name: str) -> Iterator[_CauseCollector]:
    logger = logging.getLogger(name)
    handler = _CauseCollector()
    propagate = logger.propagate
    handlers = list(logger.handlers)
    logger.handlers = [handler]
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.handlers = handlers
        logger.propagate = propagate


def _load_exported_program(file: Any, path: Path) -> torch.export.ExportedProgram:
    with (
        PROCESS_STATE,
        _capture_log("torch.export") as causes,
        _capture_log("torch._export.serde.serialize"),
        warnings.catch_warnings(),
    ):
        # torch 2.11 warns because it reads weights as views of read-only memory.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        try:
            return torch.export.load(file)
        except Exception as error:
            # torch raises RuntimeError, AssertionError, KeyError, and others for a file that it can't load.
            raise LoadError(explain_load_failure(path, [*causes.errors, error])) from error


def explain_load_failure(path: Path, errors: list[BaseException]) -> str:
    """Explain a failure of torch.export.load.

    Args:
        errors: the logged exceptions, then the raised error.

    Returns:
        Message with advice for known causes.
    """
    text = "\n".join(str(error) for error in errors)
    if match := re.search(r"failed to resolve (torch\.ops\.)?(?P<op>[\w.]+) to an operator", text):
        unknown = f"{path} uses the operator {match['op']}, which is not registered in this process"
        return f"{unknown}: pass --import with the module that defines it"
    if match := re.search(
        # torch 2.15 and later write the longer form of this message.
        r"(?<![\w.])(?P<name>[\w.]+) in pytree (?:failed because the serialized type )?is not registered"
        r"|couldn't find a serializated name|namedtuple class (?P<tuple>[\w.]+)",
        text,
    ):
        name = match["name"] or match["tuple"] or "an unknown class"
        unknown = f"{path} takes or returns {name}, a class that is not registered in this process"
        return f"{unknown}: pass --import {name.rpartition('.')[0] or 'MODULE'} (the module that registers it)"
    if match := _SCHEMA.search(text):
        theirs, ours = (".".join(re.findall(r"\d+", part)) for part in match.groups())
        other = (
            f"{path} was saved by another torch version: its format is {theirs}, but torch {torch.__version__} "
            f"reads {ours}"
        )
        return f"{other}; load and save it again with a torch that reads both"
    lines = [line.strip() for line in str(errors[0]).splitlines() if line.strip()]
    detail = f"{type(errors[0]).__name__}: {lines[-1] if lines else ''}"[:300]
    return (
        f"{path} can't be deserialized ({detail}): the file is damaged, or was saved by a torch version too far from "
        f"{torch.__version__}"
    )


def _move_to_cpu(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    values = (node.meta.get("val") for node in program.graph.nodes)
    if any(value.device.type != "cpu" for value in values if isinstance(value, torch.Tensor)):
        return move_to_device_pass(program, "cpu")
    return program


def find_live_guards(program: torch.export.ExportedProgram) -> list[SizeGuard]:
    """Read the conditions on input sizes that torch.export found while tracing in this process.

    Returns:
        The conditions that can be parsed.
    """
    guards = []
    for text in getattr(program, "_guards_code", []):
        with contextlib.suppress(DisallowedExpression):
            guards.append(SizeGuard(text))
    return guards
