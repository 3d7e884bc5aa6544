"""Connects to a Ray cluster by its address."""

from __future__ import annotations

import os
import socket
from typing import Any

from ..errors import RuntimeUnavailable

# seconds that a connection may take
_CONNECT = 5.0
# seconds in which the server there, which may be busy, says that it knows gRPC
_ANSWER = 10.0
_START = "start one with ray start --head, or give the address of its head, such as ray://head:10001"


def connect_ray(address: str) -> Any:
    """The module of Ray, connected.

    Raises:
        RuntimeUnavailable: it is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeUnavailable(f"--on {address} needs Ray: {error}; pip install 'normdeploy[ray]'") from error
    require_reachable(address)
    # else Ray warns of a change to come
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # nothing is sent anywhere (docs/privacy.md)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        # ConnectionError, RuntimeError of other versions, ValueError of the address
        lines = str(error).strip().splitlines()
        raise RuntimeUnavailable(
            f"no Ray cluster is reached at {address!r}: {lines[0] if lines else error}; {_START}"
        ) from error
    return ray


def require_reachable(address: str) -> None:
    """Ray itself tries for half a minute or, at another server's port, without end, and prints what it tries.

    Raises:
        RuntimeUnavailable: the address is HOST:PORT or ray://HOST:PORT, and no server of gRPC answers there.
    """
    protocol, _, rest = address.rpartition("://")
    host, _, port = rest.partition("/")[0].rpartition(":")
    if protocol not in ("", "ray"):
        return
    if not host or not port.isdecimal():
        if protocol:
            raise RuntimeUnavailable(f"{address!r} names no host and port; {_START}")
        # "auto", or what Ray refuses at once
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise RuntimeUnavailable(f"no Ray cluster is reached at {address!r}: {why}; {_START}") from error
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        # a certificate would be needed here
        return
    import grpc

    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(_ANSWER)
        except grpc.FutureTimeoutError as error:
            raise RuntimeUnavailable(
                f"no Ray cluster is reached at {address!r}: what takes connections there does not answer as Ray does;"
                f" {_START}"
            ) from error
