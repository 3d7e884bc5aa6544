"""``normdeploy check``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import bars, check_report
from .options import (
    Dims,
    Eval,
    Factory,
    FactoryArgs,
    Fuse,
    FuseOption,
    Imports,
    Inputs,
    Key,
    Precision,
    Quiet,
    Runtime,
    RuntimeOption,
    Trust,
    loading_of,
)

if TYPE_CHECKING:
    from ..guard.check import Check, Checked


class Format(StrEnum):
    """How the findings are written."""

    text = "text"
    json = "json"
    sarif = "sarif"


def check(
    sources: Annotated[list[Path], typer.Argument(metavar="FILE...", help="ONNX files, or what export takes.")],
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            metavar="RULES",
            help="Which findings fail the check, by comma: decomposed, unfolded, train-mode, eps-lost, fp16-overflow, wrong-form, "
            "missing-kernel, refused; or all, or none.",
        ),
    ] = "decomposed,train-mode,eps-lost",
    form: Annotated[Format, typer.Option("--format", help="Of the file, or of what is printed where none is given.")] = Format.text,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the findings to this file.")] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="OLD", help="JSON or SARIF of an earlier check; what it holds does not fail again.")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option("--precision", help="Judge epsilons as though the file computed in half precision.")
    ] = None,
    runtime: RuntimeOption = Runtime.any,
    fuse: FuseOption = Fuse.standard,
    model: Factory = None,
    model_arg: FactoryArgs = None,
    key: Key = None,
    trust: Trust = False,
    import_: Imports = None,
    input_: Inputs = None,
    dim: Dims = None,
    eval_mode: Eval = False,
    quiet: Quiet = False,
) -> None:
    """Judge the normalizations of files for CI; exit code 1 where something of --fail-on is found or a file can't be read."""
    from ..errors import printable
    from ..guard.check import check as checked
    from ..guard.sarif import sarif
    from ..sources import check_output
    from ..storage.atomic import write_bytes

    loading = loading_of(model, model_arg, key, trust, import_, input_, dim, eval_mode)
    check_report(output)
    if output is not None:
        for source in sources:
            check_output(output, source)
    with bars(quiet) as progress:
        rules = [name.strip() for name in fail_on.split(",") if name.strip() != "none"]
        result = checked(
            sources, fail_on=rules, runtime=runtime, fuse=fuse, precision=precision, baseline=baseline, progress=progress, **loading
        )
    text = {Format.text: _text, Format.json: lambda r: r.json(), Format.sarif: sarif}[form](result)
    text = text.encode(errors="replace").decode()  # a file's name may be no text
    if output is not None:
        write_bytes(output, text.encode())
    if form is not Format.text and output is None:
        typer.echo(text, nl=False)
    elif not quiet:
        typer.echo(printable(_text(result)), nl=False)
    for file in result.files:
        if file.error:
            typer.echo(f"error: {printable(file.error)}", err=True)
    if not result:
        raise typer.Exit(1)


def _text(result: Check) -> str:
    lines = [line for file in result.files for line in _lines(file)]
    problems = [p for file in result.files for p in file.findings]
    counts = [f"{sum(p.level == level for p in problems)} {level}s" for level in ("error", "warning", "note")]
    said = f"{len(result.files)} file{'s' if len(result.files) > 1 else ''}: {', '.join(counts)}"
    said += f", {n} known" if (n := sum(p.known for p in problems)) else ""
    notes = dict.fromkeys(f"note: {note}" for file in result.files for note in file.notes if "missing-kernel" in result.fail_on)
    return "\n".join([*lines, *notes, f"{said}; it fails on {', '.join(result.fail_on) or 'nothing'}"]) + "\n"


def _lines(file: Checked) -> list[str]:
    """One line for findings that say the same."""
    alike: dict[tuple[str, str, str, bool], list[str]] = {}
    for p in file.findings:
        alike.setdefault((p.level, p.rule, p.message, p.known), []).append(p.name + (f" in {p.place}" if p.place else ""))
    lines = [f"{file.file}: {'can not be checked' if file.error else 'clean' if not alike else ''}".rstrip()]
    for (level, rule, message, known), names in alike.items():
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ×{len(names)}"
        lines.append(f"  {level:7} {rule}{' (known)' if known else ''}  {shown}: {message}")
    return lines
