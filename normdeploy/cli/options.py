"""Arguments and options of the command line. Some are shared by several verbs; others are built from the fields of
frozen dataclasses (`normdeploy.verb_options`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from ..verb_options import Option, command_line_type, iter_options, option_field

ModelFile = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help=(
            "Model file (.pt, .pt2, .safetensors ...), my_model.py:Net, Hugging Face folder, diffusers pipeline, model"
            " name on the Hub, or timm:NAME."
        ),
    ),
]
Original = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Model to compare with: a model file, a Hugging Face folder or an ONNX file."),
]
OnnxFile = Annotated[Path, typer.Argument(metavar="ONNX", help="ONNX file.")]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="Output path. An existing file is replaced only when the new file is complete."
    ),
]

TrustedKeys = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust-key",
        metavar="PUBLIC.pem",
        help="Public key. Only content that is signed with one of these keys is accepted. Repeatable.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class QuietOption:
    """Option that turns tables and progress bars off."""

    quiet: bool = option_field(False, "--quiet", "Print errors only, no tables or progress bars.", short="-q")


@dataclass(frozen=True, kw_only=True)
class ReportOption:
    """Option for the report as JSON."""

    report: Path | None = option_field(None, "--report", "Also write the report as JSON.", metavar="FILE.json")


@dataclass(frozen=True, kw_only=True)
class HtmlOption:
    """Option for the report as a page."""

    html: Path | None = option_field(
        None, "--html", "Also write the report as a self-contained HTML page.", metavar="FILE.html"
    )


@dataclass(frozen=True, kw_only=True)
class ReportingOptions(QuietOption, HtmlOption, ReportOption):
    """Options for a verb's output: tables, JSON report and page."""

    def for_file(self, file: str) -> ReportingOptions:
        """Return the options for the report of one of several files.

        Returns:
            options whose paths contain the file's name; ``out.json`` becomes ``out.encoder_model.json`` for
            encoder_model.onnx, and ``out.unet.json`` for unet/model.onnx.
        """
        return replace(self, report=_path_for_file(self.report, file), html=_path_for_file(self.html, file))


def _path_for_file(report: Path | None, file: str) -> Path | None:
    if report is None:
        return None
    # Files of a pipeline have one name, so their folders tell them apart.
    name = Path(file).parent.name or Path(file).stem
    return report.with_name(f"{report.stem}.{name}{report.suffix}")


def describe_files(source: Path, output: Path, external_data_name: str | None) -> dict[str, str]:
    """List the files of ``export`` or ``optimize`` for the report.

    Returns:
        role -> path.
    """
    files = {"source": str(source), "output": str(output)}
    if external_data_name is not None:
        files["external data"] = str(output.with_name(external_data_name))
    return files


def typer_parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Yield typer's parameters for the options of a dataclass, in the order of its fields.

    Yields:
        keyword-only parameters, annotated with ``typer.Option``.
    """
    for name, spelled, default in iter_options(group):
        if spelled.negated:
            default = not default
        elif isinstance(default, tuple):
            default = None
        annotation: Any = Annotated[command_line_type(group, name), _make_typer_option(spelled)]  # type: ignore[valid-type]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _make_typer_option(spelled: Option) -> Any:
    parser = None if spelled.parse is None else _parse_or_refuse(spelled.parse)
    flags = (spelled.flag, spelled.short) if spelled.short else (spelled.flag,)
    return typer.Option(
        *flags,
        help=spelled.help,
        metavar=spelled.metavar,
        min=spelled.minimum,
        parser=parser,
        show_default=spelled.show_default,
    )


def _parse_or_refuse(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap ``parse`` so that its errors become errors of the command line."""

    def parse_text(text: str) -> Any:
        """Parse one text.

        Returns:
            the parsed value.

        Raises:
            BadParameter: ``parse`` refused the text.
        """
        try:
            return parse(text)
        except InputError as error:
            raise typer.BadParameter(str(error)) from error

    return parse_text


def options_from_arguments(group: Any, arguments: Mapping[str, Any]) -> Any:
    """Build the options of a dataclass from typer's arguments.

    Returns:
        an instance of ``group``.

    Raises:
        BadParameter: a text can't be parsed.
    """
    values: dict[str, Any] = {}
    for name, spelled, default in iter_options(group):
        try:
            values[name] = spelled.value_of(arguments[name], default)
        except InputError as error:
            raise typer.BadParameter(str(error), param_hint=spelled.flag) from error
    return group(**values)
