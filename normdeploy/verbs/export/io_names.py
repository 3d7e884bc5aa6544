"""Name the inputs and outputs of an exported file (``input_names`` and ``output_names`` of ``export``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import InputError
from ...model import InputSpec


def rename_inputs(inputs: Sequence[InputSpec], names: Sequence[str] | None) -> tuple[InputSpec, ...]:
    """Give the inputs new names.

    Returns:
        the inputs in their order.

    Raises:
        InputError: there is not one name for each input, a name is used twice, or new names are mixed with names that
            the model has already.
    """
    renamed = _rename("input", [spec.name for spec in inputs], names)
    return tuple(replace(spec, name=name) for spec, name in zip(inputs, renamed, strict=True))


def rename_outputs(outputs: Sequence[str], names: Sequence[str] | None) -> tuple[str, ...]:
    """Give the outputs new names.

    Returns:
        the names in their order.

    Raises:
        InputError: as for inputs.
    """
    return tuple(_rename("output", outputs, names))


def _rename(kind: str, present: Sequence[str], names: Sequence[str] | None) -> list[str]:
    if names is None:
        return list(present)
    argument = f"{kind}_names"
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"{argument} is {names!r}; pass a list of names, such as {argument}={list(present)!r}")
    if len(names) != len(present):
        raise InputError(
            f"{argument} has {len(names)} names, but the model has {len(present)} {kind}s ({', '.join(present)}); pass"
            f" {len(present)} names in this order"
        )
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise InputError(f"{argument} gives two {kind}s the name {twice[0]!r}; use another name")
    kept = [name for name in names if name in present]
    if kept and list(names) != list(present):
        # verify matches names either all by name or all by order.
        raise InputError(
            f"{argument} mixes new names with {kept[0]!r}, a name that the model has already, so verify could confuse"
            f" them; use new names for all {kind}s ({', '.join(present)})"
        )
    return list(names)
