"""Run models in onnxruntime with its graph optimizer off or on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from ..errors import GraphError, InputError, RuntimeUnavailable
from ..graphs.classifier_maps import map_values_to_array
from ..inputs.array_conversion import check_names
from ..ort_sessions.session import PROVIDERS, open_session, ort_error_message, ort_value_to_numpy, to_ort
from ..types import Arrays, PathLike
from . import HeldRunner, RunResult
from .crash_check import require_no_crash
from .trt_runner import explain_missing_gpu

# Start of the type name that onnxruntime gives a classifier's output, which is a sequence of maps.
_MAPS = "seq(map("
# Severities of onnxruntime's log: log nothing but fatal errors, log warnings and above.
_SILENT, _WARNINGS = 4, 2
# Minimum size in bytes of a weight that onnxruntime writes to the side file. 0 writes all weights there, since an ONNX
# file can't exceed 2 GB.
_ALL_WEIGHTS = "0"
NOT_IMPLEMENTED = "NOT_IMPLEMENTED"


class OrtRunner(HeldRunner):
    """Runner of an ONNX file or model in onnxruntime. ``verify``, ``bench`` and ``run`` all use this runner.

    Args:
        source: a path, a model with its weights inside, or the bytes of such a model. A path is required if weights are
            external or above 2 GB.
        name: name in errors and tables; None derives it from provider and optimizer.
        optimize: True turns onnxruntime's own optimizer fully on, False turns it off.
        provider: "cpu" or "cuda".
        disabled: names of onnxruntime's optimizers to leave out.
        entries: further configuration entries of the session.
        settings: options of the provider. None runs CUDA without TF32, because TF32 products have float16's precision.
        threads: number of threads of one operator on the CPU; 0 for one thread per core.
        spins: True lets idle threads busy-wait for the next run. This slows other work between runs.
        saved: path to which the optimized graph is written. Its weights are written to another file in the same folder.

    Raises:
        GraphError: onnxruntime refuses the model.
        RuntimeCrash: onnxruntime crashes on the model (`crash_check`).
        RuntimeUnavailable: onnxruntime has no kernel for one of the model's operators in the operator's type, or the
            provider does not work here.
    """

    def __init__(
        self,
        source: PathLike | onnx.ModelProto | bytes,
        *,
        name: str | None = None,
        optimize: bool = True,
        provider: str = "cpu",
        disabled: Sequence[str] = (),
        entries: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        threads: int = 0,
        spins: bool = False,
        saved: Path | None = None,
    ) -> None:
        if provider == "cuda":
            require_cuda()
        self.name = name or ort_title(provider, optimize=optimize)
        entries = dict(entries or {})
        if not spins:
            entries["session.intra_op.allow_spinning"] = "0"
        if disabled:
            entries["optimization.disable_specified_optimizers"] = ";".join(disabled)
        if saved is not None:
            prefix = "session.optimized_model_external_initializers"
            entries |= {f"{prefix}_file_name": f"{saved.name}.data", f"{prefix}_min_size_in_bytes": _ALL_WEIGHTS}
        if settings is None and provider == "cuda":
            settings = {"use_tf32": "0"}
        model = _session_model(source)
        if optimize and provider == "cpu" and not disabled:
            require_no_crash(model)
        try:
            self.session = open_session(
                model,
                optimize=optimize,
                provider=provider,
                settings=settings,
                threads=threads,
                entries=entries,
                saved=saved,
            )
        except Exception as error:
            # onnxruntime's exceptions share no base class.
            kind = RuntimeUnavailable if NOT_IMPLEMENTED in str(error) else GraphError
            raise kind(f"{self.name} can't load the model: {shorten_ort_error(error)}") from error

    def infer(self, feeds: Arrays) -> RunResult:
        """Run the model once.

        Returns:
            Output name -> array.

        Raises:
            InputError: the feeds do not fit the model's inputs, or it does not run on them.
        """
        return run_session(self.session, feeds, self.name)

    @property
    def output_shapes(self) -> dict[str, tuple[int | str | None, ...]]:
        """Return the outputs' dims as onnxruntime infers them.

        Returns:
            Output name -> dims: sizes, names, or None if unknown.
        """
        return {out.name: tuple(out.shape) for out in self.session.get_outputs()}

    def _free_model(self) -> None:
        del self.session


def run_session(session: ort.InferenceSession, feeds: Arrays, name: str) -> RunResult:
    """Check the names of the feeds and run the session once.

    Args:
        name: name of the session in errors.

    Returns:
        Output name -> array.

    Raises:
        InputError: the feeds do not fit the model's inputs, or it does not run on them.
    """
    check_names(name, feeds, [i.name for i in session.get_inputs()])
    return run_named_feeds(session, feeds, name)


def run_named_feeds(session: ort.InferenceSession, feeds: Arrays, name: str) -> RunResult:
    """Run the session as `run_session` does, on feeds whose names are already checked.

    Returns:
        Output name -> array; a classifier's maps are converted to an array.
    """
    outputs = session.get_outputs()
    try:
        if any(out.type.startswith(_MAPS) for out in outputs):
            results = zip(outputs, session.run(None, dict(feeds)), strict=True)
            return {out.name: map_values_to_array(r) if out.type.startswith(_MAPS) else r for out, r in results}
        values = session.run_with_ort_values(None, {given: to_ort(array) for given, array in feeds.items()})
        return {out.name: ort_value_to_numpy(value) for out, value in zip(outputs, values, strict=True)}
    except Exception as error:
        # onnxruntime failed, or a value has a type that numpy lacks.
        raise InputError(f"{name} does not run the model on these inputs: {shorten_ort_error(error)}") from error


def ort_title(provider: str, *, optimize: bool) -> str:
    """Build the name of onnxruntime in tables.

    Returns:
        For example "onnxruntime CUDA (optimizer off)".
    """
    return f"onnxruntime{'' if provider == 'cpu' else ' CUDA'} (optimizer {'on' if optimize else 'off'})"


NAMES = frozenset(ort_title(provider, optimize=optimize) for provider in PROVIDERS for optimize in (False, True))


def require_cuda() -> None:
    """Require that onnxruntime can run on a GPU here.

    Raises:
        RuntimeUnavailable: onnxruntime can't run on a GPU here.
    """
    if reason := explain_missing_cuda():
        raise RuntimeUnavailable(f"onnxruntime's CUDA provider: {reason}")


def explain_missing_cuda() -> str | None:
    """Open a one-node model to find out why onnxruntime can't run on a GPU here.

    Returns:
        The reason, or None if onnxruntime can run on a GPU.
    """
    if PROVIDERS["cuda"] not in ort.get_available_providers():
        return "the installed onnxruntime has none; install onnxruntime-gpu"
    if reason := explain_missing_gpu():
        return reason
    # onnxruntime prints errors to the terminal and falls back to the CPU.
    ort.set_default_logger_severity(_SILENT)
    try:
        identity = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Identity(x) }'
        )
        made = open_session(identity.SerializeToString(), provider="cuda")
    except Exception as error:
        return shorten_ort_error(error)
    finally:
        ort.set_default_logger_severity(_WARNINGS)
    if PROVIDERS["cuda"] not in made.get_providers():
        return f"onnxruntime {ort.__version__} can't find the CUDA and cuDNN libraries that it was built for"
    return None


def _session_model(source: PathLike | onnx.ModelProto | bytes) -> str | bytes:
    if isinstance(source, bytes):
        return source
    if not isinstance(source, onnx.ModelProto):
        if not os.path.isfile(source):
            raise GraphError(f"file not found: {os.fspath(source)!r}")
        return os.fspath(source)
    try:
        return source.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise GraphError(
            "the model is above 2 GB, which onnxruntime accepts only as a path; save it and pass the path"
        ) from error


def shorten_ort_error(error: Exception) -> str:
    """Shorten onnxruntime's message (`session.ort_error_message`).

    Returns:
        One line of at most 400 characters.
    """
    return ort_error_message(error)[:400]
