"""Define the options of the fleet verbs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..types import PathLike
from ..verb_options import option_field, repeat_option_field


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Options for the store, the models, and the trusted keys.

    Args:
        store: folder, or URL that fsspec reads. None takes the store of the fleet file, else NORMDEPLOY_STORE, else the
            folder "store" next to the fleet file.
        only: patterns of models or of model/variant; other models are skipped.
        trust: PEM files of public keys. A record is trusted only if one of these keys has signed it.
    """

    store: PathLike | None = option_field(
        None,
        "--store",
        "Folder or URL of the store (s3://bucket/folder). Default: the store that FLEET.toml names, else"
        " NORMDEPLOY_STORE, else a folder named store next to FLEET.toml.",
        metavar="PLACE",
        type=str | None,
    )
    only: Sequence[str] = option_field(
        (),
        "--only",
        "Include only models whose MODEL or MODEL/VARIANT name matches this pattern. Repeatable.",
        metavar="PATTERN",
        type=list[str] | None,
    )
    trust: Sequence[PathLike] = option_field(
        (),
        "--trust-key",
        "Public key. Only records that are signed with one of these keys are trusted. Repeatable.",
        metavar="PUBLIC.pem",
        type=list[Path] | None,
    )


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Options for the machines that run steps.

    Args:
        on: "local", or the address of a Ray cluster, such as "ray://head:10001" or "auto".
        jobs: maximum number of parallel steps on this machine; None for one step per CPU.
    """

    store: PathLike | None = repeat_option_field(FleetOptions, "store")
    on: str = option_field(
        "local",
        "--on",
        "Machines that run the steps: local for this machine, or the address of a Ray cluster, such as auto or"
        " ray://head:10001.",
        metavar="WHERE",
    )
    jobs: int | None = option_field(
        None, "--jobs", "Number of steps to run in parallel on this machine. Default: one per CPU.", minimum=1
    )
    only: Sequence[str] = repeat_option_field(FleetOptions, "only")


@dataclass(frozen=True, kw_only=True)
class SigningOptions:
    """Options for signing and trust.

    Args:
        sign: PEM file of a private key that signs records and bundles. With such a key, a record is trusted only if
            this key or a key in ``trust`` has signed it (docs/reference/evidence.md).
        trust: PEM files of public keys.
    """

    sign: PathLike | None = option_field(
        None,
        "--sign",
        "Sign records and bundles with this private key.",
        metavar="KEY.pem",
        type=Path | None,
    )
    trust: Sequence[PathLike] = repeat_option_field(FleetOptions, "trust")


@dataclass(frozen=True, kw_only=True)
class WaitOption:
    """Option for steps that no node can run yet.

    Args:
        wait: seconds that a step waits for a node of the Ray cluster that can run it. After that, the step is "not
            run". Ray's autoscaler learns which resources are missing.
    """

    wait: float = option_field(
        0.0,
        "--wait",
        "With a Ray cluster in --on: how many seconds a step waits for a node that can run it.",
        metavar="SECONDS",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class RecheckOptions(SigningOptions, PlacementOptions):
    """Options of ``fleet recheck``."""


@dataclass(frozen=True, kw_only=True)
class FleetRunOptions(SigningOptions, WaitOption, PlacementOptions):
    """Options of ``fleet run``."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Options of ``fleet publish``.

    Args:
        built: True to also publish cells whose engine was built but not run on its GPU.
    """

    store: PathLike | None = repeat_option_field(FleetOptions, "store")
    only: Sequence[str] = repeat_option_field(FleetOptions, "only")
    built: bool = option_field(False, "--built", "Also publish engines that were built but not run on their GPU.")
    trust: Sequence[PathLike] = repeat_option_field(FleetOptions, "trust")
