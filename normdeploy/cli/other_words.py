"""Translate other tools' words before typer parses a verb's command line (`normdeploy.other_words`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from ..errors import escape_line
from ..other_words import CommandWord, OwnOptions, translate_command_line


class TranslatingCommand(TyperCommand):
    """Verb that also understands the words of other tools and former words.

    Attributes:
        words: the verb's table.
    """

    words: Sequence[CommandWord] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate the words, then parse as typer does.

        Returns:
            arguments that are not parsed yet, as typer returns them.
        """
        # Completion of a shell must not fail.
        if not ctx.resilient_parsing:
            line = translate_command_line(args, self.words, _own_options(self.get_params(ctx)))
            args = line.args
            if not {"-q", "--quiet"} & set(args):
                for note in dict.fromkeys(line.notes):
                    print(escape_line(f"note: {note}"), file=sys.stderr)
        return super().parse_args(ctx, args)


def _own_options(params: Sequence[Any]) -> OwnOptions:
    options = [param for param in params if param.param_type_name == "option"]
    return OwnOptions(
        names={flag: param.name for param in options for flag in (*param.opts, *param.secondary_opts)},
        valued=frozenset(param.name for param in options if not param.is_flag and not param.count),
        repeatable=frozenset(param.name for param in options if param.multiple or param.count),
    )
