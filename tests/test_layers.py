"""Each import inside a function keeps a heavy library away, and is listed here. `lint-imports` checks the layers
(pyproject.toml)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A module of ours that may be imported inside a function -> the library that it would bring along.
LATE = {
    # torch takes 1.4 s to import, and what reads ONNX alone needs none
    "normdeploy.verbs.package.sample_reader": "torch",
    "normdeploy.verbs.package.sample_judgement": "torch",
    "normdeploy.verbs.package.samples": "torch",
    "normdeploy.exporting.exporter": "torch",
    "normdeploy.loading": "torch",
    "normdeploy.loading.folder_containment": "torch",
    "normdeploy.loading.hub": "torch",
    "normdeploy.loading.model_factories": "torch",
    "normdeploy.loading.python_file": "torch",
    "normdeploy.loading.input_request": "torch",
    "normdeploy.loading.file_kinds": "torch",
    "normdeploy.verbs.verify.image_references": "torch",
    "normdeploy.verbs.verify.reference_models": "torch",
    "normdeploy.runtimes.cuda_stream": "torch",
    "normdeploy.runtimes.onnx_float64": "torch",
    "normdeploy.runtimes.quantized_float64": "torch",
    "normdeploy.runtimes.engine_runner": "torch",
    # the command line starts without them: onnx and numpy take 0.3 s, rich's tables 0.07 s of the 0.2 s of ``normdeploy
    # --help``
    "normdeploy.verbs.arguments.argument_validation": "onnx",
    "normdeploy.verbs.build.trtexec_command": "onnx",
    "normdeploy.verbs.check.check_function": "onnx",
    "normdeploy.verbs.check.sarif": "onnx",
    "normdeploy.fleet.garbage_collection": "onnx",
    "normdeploy.fleet.fleet_commands": "onnx",
    "normdeploy.fleet.publishing": "onnx",
    "normdeploy.fleet.fleet_recheck": "onnx",
    "normdeploy.fleet.step_details": "onnx",
    "normdeploy.fleet.stored_reports": "onnx",
    "normdeploy.fleet.cached_call": "onnx",
    "normdeploy.runtimes.trt_runner": "numpy",
    # pytest starts without them
    "normdeploy.testing.assertions": "onnx",
    "normdeploy.testing.session_report": "ctypes",
    "normdeploy.findings.console_tables": "rich",
    "normdeploy.findings.norm_tables": "rich",
    "normdeploy.findings.quantization_tables": "rich",
    "normdeploy.fleet.fleet_page": "rich",
    "normdeploy.fleet.fleet_tables": "rich",
    "normdeploy.findings.precision_tables": "rich",
    "normdeploy.reports.report_page": "rich",
    "normdeploy.verbs.bench.bench_tables": "rich",
    "normdeploy.verbs.bisect.bisect_tables": "rich",
    "normdeploy.verbs.build.build_tables": "rich",
    "normdeploy.verbs.inspect.engine_tables": "rich",
    "normdeploy.verbs.package.package_tables": "rich",
    "normdeploy.verbs.prove.prove_tables": "rich",
    "normdeploy.verbs.recheck.recheck_tables": "rich",
    "normdeploy.verbs.run.run_tables": "rich",
    "normdeploy.verbs.verify.verify_tables": "rich",
    # extras, which may not be installed
    "normdeploy.reports.plots": "matplotlib",
    "normdeploy.reports.engine_plots": "matplotlib",
    "normdeploy.reports.quantization_plots": "matplotlib",
    "normdeploy.reports.svg_drawing": "matplotlib",
    "normdeploy_plugins.ops": "triton",
    "normdeploy_plugins.qdp": "triton",
}

# A library that may be imported inside a function -> why.
LIBRARIES = {
    "torch": "takes 1.4 s",
    "torch.utils.flop_counter": "takes 0.2 s more, and is for bench alone",
    "onnxruntime.transformers.float16": "for half precision alone",
    "ml_dtypes": "brings numpy, for which the help of the command line must not wait",
    "onnx_ir": "takes 0.4 s, of which the most is sympy",
    "polygraphy": "drives TensorRT or TensorRT-RTX: which, its first import settles",
    "rich": "takes 0.07 s of each start of the command line",
    "importlib.metadata": "takes 0.02 s of each start of the command line",
    "datasets": "no dependency of ours",
    "PIL": "no dependency of ours",
    "huggingface_hub": "no dependency of ours",
    "transformers": "no dependency of ours, and takes seconds",
    "jinja2": "of the extra report",
    "markupsafe": "of the extra report",
    "triton": "of the extra plugins",
    "jsonschema": "of the extra fleet",
    "fsspec.core": "of the extra fleet",
    "ray": "of the extra ray",
    "grpc": "comes with the extra ray",
    "cryptography": "of the extra sign",
    "securesystemslib": "of the extra sign",
    "cyclonedx": "of the extra sign",
    "packageurl": "of the extra sign",
    "oras": "of the extra publish",
    "mlflow": "of the extra publish",
    "requests": "comes with the extra publish",
    "olive.package_config": "no dependency of ours",
    "tensorrt": "of the extra tensorrt",
    "cuda.bindings": "comes with a torch for CUDA",
}


@dataclass(frozen=True)
class Import:
    """``late``: inside a function."""

    importer: str
    imported: str
    late: bool


@cache
def modules() -> dict[str, Path]:
    """Module -> file, of both packages."""
    found = {}
    for package, folder in (("normdeploy", ROOT / "normdeploy"), ("normdeploy_plugins", ROOT / "plugins")):
        for file in folder.rglob("*.py"):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import, but those for types alone."""
    return tuple(i for name, file in modules().items() for i in _of(name, file))


def _of(name: str, file: Path) -> Iterator[Import]:
    def walk(node: ast.AST, late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, late
            elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
                yield from walk(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    for statement, late in walk(ast.parse(file.read_text()), False):
        if isinstance(statement, ast.Import):
            targets = [alias.name for alias in statement.names]
        else:
            above = (
                name.split(".")[: len(name.split(".")) - statement.level + (file.name == "__init__.py")]
                if statement.level
                else []
            )
            base = ".".join([*above, *([statement.module] if statement.module else [])])
            inside = [f"{base}.{alias.name}" for alias in statement.names]
            targets = [module if module in modules() else base for module in inside]
        yield from (Import(name, target, late) for target in dict.fromkeys(targets))


@cache
def brought(module: str) -> frozenset[str]:
    """The libraries that importing a module of ours imports at once."""
    seen, found, stack = set[str](), set[str](), [module]
    while stack:
        one = stack.pop()
        if one not in modules():
            found.add(one.partition(".")[0])
        elif one not in seen:
            seen.add(one)
            stack += [one.rpartition(".")[0]] if "." in one else []  # its folder's __init__.py is run first
            stack += [i.imported for i in imports() if i.importer == one and not i.late]
    return frozenset(found)


def _library(imported: str) -> str:
    return next(
        (name for name in sorted(LIBRARIES, key=len, reverse=True) if f"{imported}.".startswith(f"{name}.")), ""
    )


def test_an_import_inside_a_function_keeps_a_library_away() -> None:
    wrong = []
    for i in imports():
        if i.late and i.imported in modules():
            library = LATE.get(i.imported)
            if library is None:
                wrong.append(
                    f"{i.importer} imports {i.imported} inside a function, and it is not in LATE: import it at the top"
                )
            elif library not in brought(i.imported):
                wrong.append(f"{i.imported} does not bring {library}: {i.importer} can import it at the top")
            elif library in brought(i.importer):
                wrong.append(f"{i.importer} imports {library} at once: it can import {i.imported} at the top")
        elif i.late and not _library(i.imported):
            wrong.append(
                f"{i.importer} imports {i.imported} inside a function, and it is not in LIBRARIES: import it at the top"
            )
    assert not wrong, "\n".join(wrong)


def test_the_lists_hold_what_is_imported_late_and_no_more() -> None:
    late = {i.imported for i in imports() if i.late}
    assert set(LATE) <= late
    assert set(LIBRARIES) == {library for imported in late if (library := _library(imported))}


def test_only_the_command_line_imports_the_package_itself() -> None:
    """``normdeploy/__init__.py`` finds every verb: a module below the verbs that imported it would close a circle."""
    importers = {i.importer for i in imports() if i.imported == "normdeploy"}
    assert importers <= {"normdeploy.cli.app", *(name for name in modules() if name.startswith("normdeploy.cli."))}


def test_one_module_makes_the_sessions_of_onnxruntime() -> None:
    makers = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "InferenceSession"
    }
    # The probe of an opset runs a file of one Identity node, and the sessions need its answer for their errors.
    assert makers == {"normdeploy.ort_sessions.session", "normdeploy.ort_sessions.opset_limits"}


# Folders of tests that mirror no folder of the package: other trees, and libraries of their own.
OTHER_TESTS = {"architectures", "cpp", "guests", "plugins"}


def test_a_test_file_is_named_for_a_module_of_its_folder_or_for_the_folder() -> None:
    """Each `tests/<folder>/test_<name>.py` starts with a module, a folder in it, or the folder itself."""
    nameless = []
    for file in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        folder = file.parent.relative_to(ROOT / "tests")
        if folder.parts[0] in OTHER_TESTS:
            continue
        names = [entry.stem for entry in (ROOT / "normdeploy" / folder).iterdir()]
        name = file.stem.removeprefix("test_")
        if not any(f"{name}_".startswith(f"{known}_") for known in [*names, folder.name]):
            nameless.append(str(file.relative_to(ROOT)))
    assert not nameless
