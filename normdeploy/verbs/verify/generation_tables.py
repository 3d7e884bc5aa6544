"""Print the tokens that files generate, with the verdict on each prompt."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...findings.console_tables import Column, make_table
from .generation_result import GeneratedRow, Generation


def show_generation(console: Console, generation: Generation) -> None:
    """Print a row for each file, runtime and prompt. Then print faults, ties and a verdict."""
    several = len({made.file for made in generation.files}) > 1
    columns = ["prompt", "runtime", "equal tokens", "abs error", "allowed", "smallest margin", "verdict"]
    heads = [Column(name, whole=name in columns[2:]) for name in columns]
    table = make_table(*([Column("file")] if several else []), *heads)
    for made in generation.files:
        for row in made.rows:
            cells = [row.name, made.runtime, *_describe_row(row)]
            table.add_row(*map(Text, [made.file, *cells] if several else cells), style="" if row else "red")
    console.print(table)
    for line in generation.describe_failures():
        console.print(Text(line, style="red"))
    for line in generation.describe_ties():
        console.print(Text(line, style="yellow"))
    for line in generation.describe_unrun():
        console.print(Text(line, style="yellow"))
    if generation.is_wrong:
        color = "red"
    else:
        color = "green" if generation else "yellow"
    console.print(Text(describe_generation(generation), style=color))


def _describe_row(row: GeneratedRow) -> list[str]:
    worst = row.worst
    if not row:
        verdict = "FAIL"
    elif row.first_difference is not None:
        verdict = "tie"
    else:
        verdict = "pass"
    margin = min(step.margin for step in row.steps)
    equal = f"{row.equal} of {len(row.steps)}"
    return [equal, f"{worst.error:.2e}", f"{worst.allowed:.2e}", f"{margin:.2e}", verdict]


def describe_generation(generation: Generation) -> str:
    """Describe the verdict on the generated tokens.

    Returns:
        one line, such as "generates the tokens of eager mode: 32 after each of 7 prompts".
    """
    prompts = max((len(made.rows) for made in generation.files), default=0)
    limits = f" {'; '.join(generation.limits)};" if generation.limits else ""
    if not generation and not generation.is_wrong:
        return "the generated tokens were not compared, because a file did not run"
    if not generation:
        return (
            f"does NOT generate as eager mode does;{limits} {generation.count} tokens after each of {prompts} prompts"
        )
    ties = sum(row.first_difference is not None for made in generation.files for row in made.rows)
    apart = f", except for ties after {ties}" if ties else ""
    return (
        f"generates the tokens of eager mode{apart};{limits} {generation.count} tokens after each of {prompts} prompts"
    )
