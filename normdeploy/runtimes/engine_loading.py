"""Load an engine from its bytes. Every runner of engines does this before it binds memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ..errors import InputError, NormdeployError

# Name of an EngineInvalidityDiagnostics value -> advice to the user.
_ADVICE = {
    "VERSION_MISMATCH": "it was built by another version; build it with the installed version",
    "UNSUPPORTED_CC": "it was not built for this GPU; build it with this GPU's --compute-capability",
    "OLD_CUDA_DRIVER": "the NVIDIA driver is too old; install a newer one",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old; install a newer one",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory; free some, or use another GPU",
    "MALFORMED_ENGINE": "the file is damaged or truncated; build it again",
    "CUDA_ERROR": "CUDA does not work here; check the driver installation",
}


def make_engine_loader(library: Any, log: Any) -> Any:
    """Make a Runtime of TensorRT or TensorRT-RTX. It loads the same engines that ``verify`` loads through Polygraphy.

    NVIDIA's own plugins are registered, and a version-compatible engine may use the lean runtime that it contains.

    Returns:
        The library's Runtime.
    """
    library.init_libnvinfer_plugins(log, "")
    loader = library.Runtime(log)
    with contextlib.suppress(AttributeError):
        loader.engine_host_code_allowed = True
    return loader


def check_engine_validity(library: Any, loader: Any, engine: bytes) -> tuple[bool, str]:
    """Ask the library whether the engine can run on this machine. The library reads only the engine's first bytes.

    Only TensorRT-RTX has this check; the result for another library is (True, ""). The library may warn that a valid
    engine is slow on this machine.

    Returns:
        Whether the engine can run, and the library's objection or warning ("" if none).
    """
    if not hasattr(loader, "get_engine_validity"):
        return True, ""
    status, diagnostics = loader.get_engine_validity(engine)
    known = library.EngineInvalidityDiagnostics.__members__
    named = [name for name, bit in known.items() if int(diagnostics) & int(bit)]
    advice = "; ".join(_ADVICE.get(name, name) for name in named)
    if status == library.EngineValidity.INVALID:
        return False, advice
    if status == library.EngineValidity.SUBOPTIMAL:
        return True, f"the engine may be slow on this GPU{': ' if advice else ''}{advice}"
    return True, ""


def load_engine(library: Any, loader: Any, log: Any, path: Path, title: str) -> tuple[Any, tuple[str, ...]]:
    """Load an engine file.

    Args:
        title: the runtime's display name.

    Returns:
        The ICudaEngine, and the library's warnings about it on this machine.

    Raises:
        NormdeployError: the engine can't be loaded on this machine. The message contains the library's reason and
            advice.
    """
    data = path.read_bytes()
    valid, advice = check_engine_validity(library, loader, data)
    if valid:
        engine = loader.deserialize_cuda_engine(data)
    else:
        engine = None
    if engine is None:
        why = advice or (
            f"{log.take_errors()}; build it with this version of {title} for this GPU's compute capability"
        )
        raise NormdeployError(f"{path.name} can't be loaded on this GPU: {why}")
    return engine, (advice,) if advice else ()


def set_weight_budget(engine: Any, budget: int, name: str) -> None:
    """Let an engine keep ``budget`` bytes of its weights on the GPU and stream its other weights.

    Raises:
        InputError: the engine was built without weight streaming, or does not accept the size.
    """
    size = getattr(engine, "streamable_weights_size", 0)
    if not size:
        raise InputError(
            f"{name} has no weights that can be streamed, so it can't use a budget of {budget} bytes; build it with "
            "--weight-streaming, or omit weight_budget"
        )
    if not 0 <= budget <= size:
        raise InputError(f"the weight budget is {budget} bytes; {name} accepts 0 to {size}")
    engine.weight_streaming_budget_v2 = budget
    if (kept := engine.weight_streaming_budget_v2) != budget:
        raise InputError(f"{name} does not accept a weight budget of {budget} bytes; it keeps {kept}")


def make_error_log(library: Any) -> Any:
    """Make a logger that collects TensorRT's errors, which would otherwise go to the terminal.

    Returns:
        An ILogger; its ``take_errors()`` returns the messages since the last call, joined.
    """

    class EngineErrorLog(library.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self._messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self._messages.append(" ".join(message.split()))

        def take_errors(self) -> str:
            messages = "; ".join(dict.fromkeys(self._messages))
            self._messages = []
            return messages or "no reason given"

    return EngineErrorLog()
