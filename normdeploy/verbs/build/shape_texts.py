"""Convert shapes as trtexec and Polygraphy write them to the ranges of a profile."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...errors import InputError

# One input with its sizes: x:1x3x224x224 for trtexec, x:[1,3,224,224] for Polygraphy. A name may contain colons and
# may be in single quotes.
_SHAPE = re.compile(r"\s*'?(?P<name>[^',\s][^',]*?)'?:(?P<sizes>\d+(?:x\d+)*|\[\s*\d+(?:\s*,\s*\d+)*\s*\])\s*(?:,|$)")
_HOW = "write NAME:1x3x224x224, and several inputs with commas between them"


def profile_from_shapes(low: Sequence[str], best: Sequence[str], high: Sequence[str]) -> list[str]:
    """Join the shapes of --minShapes, --optShapes and --maxShapes to ranges of one profile.

    As in trtexec, --optShapes alone sets the smallest and largest shapes too.

    Args:
        low: smallest shapes, such as "x:1x3x224x224,ids:1x16".
        best: usual shapes.
        high: largest shapes.

    Returns:
        texts for ``profiles``, such as "x=1x3x224x224:8x3x224x224:32x3x224x224".

    Raises:
        InputError: a text can't be read, or one of the three misses an input or is missing.
    """
    given = {
        "--minShapes": _parse_shapes("--minShapes", low),
        "--optShapes": _parse_shapes("--optShapes", best),
        "--maxShapes": _parse_shapes("--maxShapes", high),
    }
    if not any(given.values()):
        return []
    if given["--optShapes"] and not given["--minShapes"] and not given["--maxShapes"]:
        given = dict.fromkeys(given, given["--optShapes"])
    names = dict.fromkeys(name for shapes in given.values() for name in shapes)
    for flag, shapes in given.items():
        if missing := [name for name in names if name not in shapes]:
            raise InputError(
                f"{flag} has no shape for {missing[0]!r}; pass all three of --minShapes, --optShapes and --maxShapes"
                " for each input, or --optShapes alone"
            )
    return [f"{name}={':'.join(shapes[name] for shapes in given.values())}" for name in names]


def _parse_shapes(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Read shapes.

    Returns:
        name -> sizes such as "1x3x224x224".
    """
    shapes: dict[str, str] = {}
    for text in texts:
        start = 0
        while start < len(text):
            match = _SHAPE.match(text, start)
            if match is None:
                raise InputError(f"{flag} {text!r} can't be read; {_HOW}")
            name = match["name"]
            sizes = re.sub(r"\s*,\s*", "x", match["sizes"].strip("[] "))
            if shapes.setdefault(name, sizes) != sizes:
                raise InputError(f"{flag} has two shapes for {name!r}, {shapes[name]} and {sizes}; pass one")
            start = match.end()
    return shapes
