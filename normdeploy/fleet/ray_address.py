"""Connects to a Ray cluster by its address."""

from __future__ import annotations

import os
import socket
from typing import Any

from ..errors import RuntimeUnavailable

_CONNECT = 5.0  # seconds that a connection may take
_START = "start one with ray start --head, or give the address of its head, such as ray://head:10001"


def connected(address: str) -> Any:
    """The module of Ray, connected.

    Raises:
        RuntimeUnavailable: it is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeUnavailable(f"--on {address} needs Ray: {error}; pip install 'normdeploy[ray]'") from error
    _require_listener(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere (docs/privacy.md)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, RuntimeError of other versions, ValueError of the address
        lines = str(error).strip().splitlines()
        raise RuntimeUnavailable(
            f"no Ray cluster is reached at {address!r}: {lines[0] if lines else error}; {_START}"
        ) from error
    return ray


def _require_listener(address: str) -> None:
    """Ray itself tries for half a minute and prints what it tries.

    Raises:
        RuntimeUnavailable: the address is HOST:PORT or ray://HOST:PORT, and nothing takes a connection there.
    """
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or an address that Ray judges
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except (OSError, OverflowError) as error:
        raise RuntimeUnavailable(
            f"no Ray cluster is reached at {address!r}: {getattr(error, 'strerror', None) or error}; {_START}"
        ) from error
