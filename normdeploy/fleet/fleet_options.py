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
            folder "store" beside the fleet file.
        only: patterns of models or of model/variant; all other models are skipped.
        trust: PEM files of public keys; only records that one of them has signed are trusted.
    """

    store: PathLike | None = option_field(
        None,
        "--store",
        "Folder or URL of the store (s3://bucket/folder). Default: the fleet file's, NORMDEPLOY_STORE, or ./store.",
        metavar="PLACE",
        type=str | None,
    )
    only: Sequence[str] = option_field(
        (),
        "--only",
        "Include only models, or model/variant, that match this pattern. Repeatable.",
        metavar="PATTERN",
        type=list[str] | None,
    )
    trust: Sequence[PathLike] = option_field(
        (),
        "--trust",
        "Public key; only records signed with the given keys are trusted. In the fleet verbs, --trust does not allow a"
        " model file to run code. Repeatable.",
        metavar="PUBLIC.pem",
        type=list[Path] | None,
    )


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Options for the machines that run steps.

    Args:
        on: "local", or the address of a Ray cluster, such as "ray://head:10001" or "auto".
        jobs: largest number of parallel steps on this machine; None for one per CPU.
    """

    store: PathLike | None = repeat_option_field(FleetOptions, "store")
    on: str = option_field(
        "local",
        "--on",
        "local: run steps on this machine; otherwise the address of a Ray cluster: auto, ray://head:10001.",
        metavar="WHERE",
    )
    jobs: int | None = option_field(None, "--jobs", "Parallel steps on this machine. Default: one per CPU.", minimum=1)
    only: Sequence[str] = repeat_option_field(FleetOptions, "only")


@dataclass(frozen=True, kw_only=True)
class SigningOptions:
    """Options for signing and trust.

    Args:
        sign: PEM file of a private key that signs records and bundles. Then a record is trusted only if this key or one
            of ``trust`` has signed it (docs/reference/evidence.md).
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
        wait: seconds that a step waits for a node of the Ray cluster that can run it, before it is "not run". Ray's
            autoscaler learns which resources are missing.
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
    """Options of ``fleet recheck``."""


@dataclass(frozen=True, kw_only=True)
class FleetRunOptions(SigningOptions, WaitOption, PlacementOptions):
    """Options of ``fleet run``."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Options of ``fleet publish``.

    Args:
        built: also publish cells whose engine was built but not run on its GPU.
    """

    store: PathLike | None = repeat_option_field(FleetOptions, "store")
    only: Sequence[str] = repeat_option_field(FleetOptions, "only")
    built: bool = option_field(False, "--built", "Also publish engines that were built but not run on their GPU.")
    trust: Sequence[PathLike] = repeat_option_field(FleetOptions, "trust")
