"""Connect to a Ray cluster by its address."""

from __future__ import annotations

import os
import socket
from typing import Any

from ..errors import RuntimeUnavailable

# Maximum seconds until a connection is open.
_CONNECT = 5.0
# Maximum seconds until the server, which may be busy, answers by gRPC.
_ANSWER = 10.0
_START = "start a cluster with ray start --head, or pass the address of its head, such as ray://head:10001"


def connect_ray(address: str) -> Any:
    """Connect to a Ray cluster.

    Returns:
        the module of Ray, connected to the cluster.

    Raises:
        RuntimeUnavailable: Ray is not installed, or no cluster can be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeUnavailable(f"--on {address} needs Ray: {error}; pip install 'normdeploy[ray]'") from error
    require_reachable(address)
    # Without this variable, Ray warns of a future change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # This turns off Ray's usage statistics (docs/reference/privacy.md).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        # The type of the error depends on Ray's version: ConnectionError or RuntimeError. A wrong address raises
        # ValueError.
        lines = str(error).strip().splitlines()
        raise RuntimeUnavailable(
            f"can't reach a Ray cluster at {address!r}: {lines[0] if lines else error}; {_START}"
        ) from error
    return ray


def require_reachable(address: str) -> None:
    """Check that a server answers before Ray connects.

    Ray itself would try for half a minute and print its attempts. At the port of another kind of server it would try
    forever.

    Raises:
        RuntimeUnavailable: the address is HOST:PORT or ray://HOST:PORT, and no gRPC server answers there.
    """
    protocol, _, rest = address.rpartition("://")
    host, _, port = rest.partition("/")[0].rpartition(":")
    if protocol not in ("", "ray"):
        return
    if not host or not port.isdecimal():
        if protocol:
            raise RuntimeUnavailable(f"{address!r} lacks a host or port; {_START}")
        # The address is "auto", or an address that Ray refuses at once.
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise RuntimeUnavailable(f"can't reach a Ray cluster at {address!r}: {why}; {_START}") from error
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        # With TLS, this check would need a certificate, so it is skipped.
        return
    import grpc

    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(_ANSWER)
        except grpc.FutureTimeoutError as error:
            raise RuntimeUnavailable(
                f"can't reach a Ray cluster at {address!r}: the server at this address is not Ray; {_START}"
            ) from error
