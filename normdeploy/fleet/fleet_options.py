"""What the verbs of a fleet are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..types import PathLike
from ..verb_options import option_field, repeat_option_field


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Where the results are, which models are looked at, and whose records are believed.

    Args:
        store: a folder or a URL that fsspec reads; None: what the file says, else NORMDEPLOY_STORE, else the folder
            "store" beside the file.
        only: patterns of models or of model/variant; the others are left as they are.
        trust: PEM files of public keys: no record is believed but what one of them has signed.
    """

    store: PathLike | None = option_field(
        None,
        "--store",
        "A folder or URL (s3://bucket/folder); without it the file's, NORMDEPLOY_STORE, or the folder store.",
        metavar="PLACE",
        type=str | None,
    )
    only: Sequence[str] = option_field(
        (),
        "--only",
        "Models, or model/variant, that are looked at. Repeatable.",
        metavar="PATTERN",
        type=list[str] | None,
    )
    trust: Sequence[PathLike] = option_field(
        (),
        "--trust",
        "Believe only what this key has signed. Repeatable.",
        metavar="PUBLIC.pem",
        type=list[Path] | None,
    )


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Where steps run.

    Args:
        on: "local", or the address of a Ray cluster, such as "ray://head:10001" or "auto".
        jobs: the most steps at a time on this machine; None: one for each CPU.
    """

    store: PathLike | None = repeat_option_field(FleetOptions, "store")
    on: str = option_field("local", "--on", "local, or a Ray cluster: auto, ray://head:10001.", metavar="WHERE")
    jobs: int | None = option_field(
        None, "--jobs", "Steps at a time on this machine; without it one for each CPU.", minimum=1
    )
    only: Sequence[str] = repeat_option_field(FleetOptions, "only")


@dataclass(frozen=True, kw_only=True)
class SigningOptions:
    """Whose records are believed.

    Args:
        sign: a private key's PEM file, which signs records and bundles; no record is believed then but what this key
            or one of ``trust`` has signed (docs/evidence.md).
        trust: PEM files of public keys.
    """

    sign: PathLike | None = option_field(
        None,
        "--sign",
        "Sign with this private key, and say what it was made of.",
        metavar="KEY.pem",
        type=Path | None,
    )
    trust: Sequence[PathLike] = repeat_option_field(FleetOptions, "trust")


@dataclass(frozen=True, kw_only=True)
class WaitOption:
    """How long steps wait.

    Args:
        wait: seconds that a step waits for a node of the Ray cluster which can run it, before it is "not run"; Ray's
            autoscaler sees what is waited for.
    """

    wait: float = option_field(
        0.0,
        "--wait",
        "With --on: how long a step waits for a node that can run it.",
        metavar="SECONDS",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class RecheckOptions(SigningOptions, PlacementOptions):
    """What ``fleet recheck`` is asked."""


@dataclass(frozen=True, kw_only=True)
class FleetRunOptions(SigningOptions, WaitOption, PlacementOptions):
    """What ``fleet run`` is asked."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """What ``fleet publish`` is asked.

    Args:
        built: cells whose engine was built and not run on its GPU are published too.
    """

    store: PathLike | None = repeat_option_field(FleetOptions, "store")
    only: Sequence[str] = repeat_option_field(FleetOptions, "only")
    built: bool = option_field(False, "--built", "Publish engines too that were built and not run on their GPU.")
    trust: Sequence[PathLike] = repeat_option_field(FleetOptions, "trust")
