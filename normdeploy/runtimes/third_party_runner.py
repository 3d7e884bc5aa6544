"""Run files in runtimes that other installed packages provide through the entry point group ``normdeploy.runtimes``.

    [project.entry-points."normdeploy.runtimes"]
    acme = "acme.runtime:AcmeRunner"

The object is called with the path of an ONNX file (pathlib.Path), whose weights may be in other files of the folder. It
returns a `normdeploy.runtimes.Runner`. The runner's ``infer`` takes a numpy array for each input and returns a numpy
array for each output, by name. ``verify``, ``bench`` and ``run`` use the runtime only if its name is given (``--runner
acme``).

The object and its runner may raise three errors: RuntimeUnavailable if a device or library is missing, GraphError if
they refuse the file, and InputError if they can't run the inputs. Any other exception counts as an error of the
package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import extensions
from ..errors import GraphError, InputError, NormdeployError, RuntimeUnavailable
from ..extensions import Extension
from ..storage.onnx_files import load_onnx
from ..types import PathLike, Tensors
from . import Runner
from .array_runner import ArrayRunner
from .tensor_spec import as_numpy

_ITS_OWN = (GraphError, InputError, RuntimeUnavailable)


def require_runtime(name: str, others: Sequence[str] = ()) -> Extension:
    """Find the entry point of a runtime by its name.

    Args:
        others: names of runtimes that need no package, for the error.

    Returns:
        The entry point.

    Raises:
        InputError: no installed package provides the runtime.
    """
    matching = extensions.find_extension(extensions.RUNTIMES, name)
    if matching is None:
        names = [*others, *(e.name for e in extensions.installed_extensions(extensions.RUNTIMES))]
        known = ", ".join(map(repr, names))
        raise InputError(
            f"no installed package provides a runtime {name!r}; "
            + (f"choose from {known}" if known else "no runtime is provided (--no-extensions disables the search)")
        )
    return matching


def third_party_title(extension: Extension) -> str:
    """Return the runtime's name in tables.

    Returns:
        "name (package)".
    """
    return f"{extension.name} ({extension.package})"


class ThirdPartyRunner(ArrayRunner):
    """Runner of an ONNX file in the runtime of an installed package.

    Raises:
        InputError: no package provides the runtime, or the file is not ONNX.
        ExtensionError: the package is broken, or does not return a Runner.
        GraphError, RuntimeUnavailable: raised by the package.
    """

    def __init__(self, name: str, path: PathLike) -> None:
        super().__init__()
        self._extension = require_runtime(name)
        self.name = f"{third_party_title(self._extension)} ({os.path.basename(path)})"
        self._set_specs(load_onnx(path, external_data=False).graph)
        make = self._extension.load()
        if not callable(make):
            raise self._extension.make_error(
                f"is a {type(make).__name__}, not a function that opens a path as a Runner"
            )
        runner = self._call_package(f"can't open {os.path.basename(path)!r}", make, Path(path))
        lacking = [part for part in ("infer", "__enter__", "__exit__") if not callable(getattr(runner, part, None))]
        if lacking:
            raise self._extension.make_error(
                f"returns a {type(runner).__name__}, not a normdeploy.runtimes.Runner: it lacks {', '.join(lacking)}"
            )
        self._runner: Runner = self._call_package("can't be entered", runner.__enter__) or runner

    def _call_package(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)``. Errors of the package's code become errors that name the package."""
        try:
            return function(*args)
        except _ITS_OWN as error:
            raise type(error)(f"{third_party_title(self._extension)}: {error}") from error
        except NormdeployError:
            raise
        except (Exception, SystemExit) as error:
            # The package's own code failed; even its SystemExit must not end normdeploy.
            raise self._extension.make_error(f"{what}: {type(error).__name__}: {error}") from error

    def _run_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for array in arrays.values():
            # The arrays belong to the caller, so the package must not change them.
            array.flags.writeable = False
        outputs: Any = self._call_package("fails", self._runner.infer, arrays)
        names = [spec.name for spec in self.outputs]
        if not isinstance(outputs, Mapping) or not all(isinstance(outputs.get(name), np.ndarray) for name in names):
            told = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise self._extension.make_error(f"returns {told!r:.160}, but the outputs are {names}, each a numpy array")
        return {name: outputs[name] for name in names}

    def _bind_run(self, tensors: Tensors) -> Callable[[], None]:
        arrays = {name: as_numpy(tensor.cpu().contiguous()) for name, tensor in tensors.items()}

        def run_once() -> None:
            self._runner.infer(arrays)

        return run_once

    def _free_model(self) -> None:
        self._call_package("can't be closed", self._runner.__exit__, None, None, None)
