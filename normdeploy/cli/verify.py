"""``normdeploy verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import normdeploy

from ..errors import InputError, escape_line
from ..reports.report import Report
from ..verb_options import LoadingOptions, as_keywords
from ..verbs.verify.verify_options import ComparisonOptions, DriftOption, StrictOption, VerifyOptions
from .console import print_line, print_report, require_all_run, require_reports, show_progress
from .options import Original, ReportingOptions

if TYPE_CHECKING:
    from ..verbs.verify.comparison_result import Comparison

# Name of the report of a pipeline's denoising step, in place of a part's name.
_STEP = "denoising_step"


def verify(
    source: Original,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="ONNX files and engines, or one folder with all parts of a model."),
    ],
    options: VerifyOptions,
    verdict: StrictOption,
    load: LoadingOptions,
    reporting: ReportingOptions,
) -> None:
    """Compare the outputs of ONNX files in onnxruntime, and of engines on a GPU, with the PyTorch model.

    Exit code 1: an output, a weight or a generated token is off by more than rounding explains, or no runtime can run
    an ONNX file.
    Exit code 3: nothing is wrong, but an engine or a runtime that you named was not run.

    Your tolerances and metrics replace the default rule. The verdict of the default rule is still shown.

    An ONNX file that export wrote records the options given to export, so you need not repeat them.
    Recorded options that run code are used only if you or your team signed them (docs/reference/teams.md).
    """
    if any(file.is_dir() for file in files):
        verify_parts(source, _require_only_folder(files, options), options, load, reporting, verdict)
        return
    used = [path for path in (options.policy, options.dataset) if path is not None]
    given = cast("list[Path]", options.feeds or [])
    require_reports(reporting, (source, *files, *given, *used))
    with show_progress(reporting.quiet) as progress:
        parity = normdeploy.verify(source, files, progress=progress, **as_keywords(options), **load.load_keywords)
    print_report(parity, _build_report(source, files, parity), reporting)
    if parity.outcome == "failed":
        if reporting.quiet:
            _print_failures(parity)
        raise typer.Exit(1)
    if verdict.strict and _is_limited(parity):
        if reporting.quiet:
            _print_verdict(parity)
        raise typer.Exit(1)
    require_all_run(parity.unrun)


def _is_limited(parity: Comparison) -> bool:
    limited_tokens = parity.generation is not None and bool(parity.generation.limits)
    return bool(parity.limits or parity.word or parity.up_to is not None or limited_tokens)


def _print_verdict(parity: Comparison) -> None:
    from ..verbs.verify.verify_tables import describe_verdict

    print(escape_line(describe_verdict(parity)), file=sys.stderr)


def _print_failures(parity: Comparison) -> None:
    from ..verbs.verify.verify_tables import failure_lines

    for line in failure_lines(parity):
        print(escape_line(line), file=sys.stderr)


def _require_only_folder(files: list[Path], options: VerifyOptions) -> Path:
    """Return the one folder among ``files``.

    Raises:
        InputError: the user passes other files in addition to the folder, or options that apply to a single file.
    """
    values: dict[str, object] = {"--inputs": options.feeds, "--dataset": options.dataset, "--labels": options.labels}
    values |= {"--map": options.map, "--runner": options.runners, "--generate": options.generate}
    of_one = [flag for flag, value in values.items() if value]
    folder = next(file for file in files if file.is_dir())
    if len(files) > 1:
        raise InputError(
            f"the folder of parts {str(folder)!r} was passed with {len(files) - 1} more; verify the folder by"
            " itself, or pass only files"
        )
    if of_one:
        raise InputError(
            f"{of_one[0]} is for one file, and {str(folder)!r} is a folder of parts; omit it, or pass a file in"
            " that folder"
        )
    return folder


def verify_parts(
    source: Path,
    folder: Path,
    options: VerifyOptions,
    load: LoadingOptions,
    reporting: ReportingOptions,
    allowed: StrictOption,
) -> None:
    """Verify each part of a model against its file in ``folder``, then print one verdict."""
    from ..loading import find_part_files
    from ..verbs.verify.verify_tables import STEP_TITLE, describe_faults, parts_verdict, summarize_parts

    used = [path for path in (options.policy,) if path is not None]
    for file in find_part_files(source, trust=load.trust).values():
        require_reports(reporting.for_file(file), (source, folder / file, *used))
    rules = as_keywords(options, ComparisonOptions, DriftOption)
    with show_progress(reporting.quiet) as progress:
        verdict = normdeploy.verify_parts(source, folder, progress=progress, **rules, **load.load_keywords)
    for file, parity in verdict.comparisons.items():
        _print_part(file, parity, _build_report(source, [folder / file], parity), reporting.for_file(file))
    if verdict.step is not None:
        files = [folder / file for file in verdict.comparisons]
        _print_part(STEP_TITLE, verdict.step, _build_report(source, files, verdict.step), reporting.for_file(_STEP))
    if not reporting.quiet:
        print_line(parts_verdict(verdict))
    parts = [*verdict.comparisons.values(), *([verdict.step] if verdict.step is not None else ())]
    if verdict.faults and reporting.quiet:
        print("\n".join(describe_faults(verdict)), file=sys.stderr)
    if not parts or verdict.faults or any(parity.outcome == "failed" for parity in parts):
        raise typer.Exit(1)
    if allowed.strict and (verdict.limits or any(map(_is_limited, parts))):
        if reporting.quiet:
            print(escape_line(summarize_parts(verdict)), file=sys.stderr)
        raise typer.Exit(1)
    require_all_run([missed for parity in parts for missed in parity.unrun])


def _print_part(title: str, parity: Comparison, report: Report, reporting: ReportingOptions) -> None:
    """Print the table of one part, and write its report."""
    from ..findings.console_tables import file_title

    if not reporting.quiet:
        print_line(file_title(title))
    print_report(parity, report, reporting)
    if not reporting.quiet:
        print_line()
    elif not parity:
        _print_failures(parity)


def _build_report(source: Path, files: list[Path], parity: Comparison) -> Report:
    roles = _number_files_by_role(source, files)
    return Report("verify", roles, sections={"parity": parity.to_json()}, seconds={"verify": parity.seconds})


def _number_files_by_role(source: Path, files: list[Path]) -> dict[str, str]:
    """Map roles to files. From the second file of a kind on, the role has a number, such as "onnx 2"."""
    from ..runtimes.trt_runner import is_engine

    roles = {"model": str(source)}
    kinds = ["engine" if is_engine(file) else "onnx" for file in files]
    for place, (kind, file) in enumerate(zip(kinds, files, strict=True)):
        number = kinds[:place].count(kind) + 1
        roles[kind if number == 1 else f"{kind} {number}"] = str(file)
    return roles
