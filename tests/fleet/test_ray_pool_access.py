"""The way to a Ray cluster: addresses where none is, Ray Client, keys, and nodes that go while they are asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import RuntimeUnavailable
from normdeploy.evidence.signing_keys import Signer
from normdeploy.fleet import fleet_commands
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.ray_connection import require_reachable
from normdeploy.fleet.ray_pool import RayPool
from normdeploy.fleet.signed_store import open_signed_store
from normdeploy.fleet.store_backends import FolderBackend
from tests.keys import key_pair

from .clusters import nodes
from .test_ray_pool import TOY, run_on
from .toys import CPU, manifest, toy_fleet


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


@pytest.mark.parametrize("protocol", ["", "ray://"])
def test_where_nobody_listens_there_is_no_waiting(listener: socket.socket, protocol: str) -> None:
    address = f"{protocol}127.0.0.1:{listener.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(RuntimeUnavailable, match=f"can't reach a Ray cluster at '{address}': Connection refused"):
        require_reachable(address)
    assert time.monotonic() - start < 3


def test_an_address_of_ray_client_has_a_host_and_a_port() -> None:
    for address in ("ray://", "ray://head", "ray://:10001"):
        with pytest.raises(RuntimeUnavailable, match=f"'{address}' lacks a host or port"):
            require_reachable(address)
    require_reachable("auto")


@pytest.mark.clusters
@pytest.mark.parametrize("protocol", ["", "ray://"])
def test_another_server_is_not_asked_for_ever(listener: socket.socket, protocol: str) -> None:
    listener.listen()
    start = time.monotonic()
    with pytest.raises(RuntimeUnavailable, match="the server at this address is not Ray"):
        require_reachable(f"{protocol}127.0.0.1:{listener.getsockname()[1]}")
    assert time.monotonic() - start < 30


class Gone:
    """Ray, one of whose nodes does not answer."""

    def __init__(self, alive: bool) -> None:
        self._alive = alive

    def get(self, reference: Any) -> Any:
        raise RuntimeError("The task is not schedulable")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "node", "Alive": self._alive}, {"NodeID": "other", "Alive": True}]


@pytest.mark.parametrize("alive", [True, False])
def test_a_node_that_goes_while_it_is_asked_is_no_error(alive: bool) -> None:
    pool = RayPool.__new__(RayPool)
    pool._ray, pool._useless, pool._nodes = Gone(alive), {}, {}
    pool._register_node("node", None, {"CPU": 1})
    assert list(pool._useless) == (["node"] if alive else [])


@pytest.fixture(scope="module")
def client() -> Iterator[tuple[str, str]]:
    """The addresses of a cluster: of its head, and of its server for Ray Client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with nodes({"ray_client_server_port": port, "num_cpus": 2}) as made:
        yield made.address, f"ray://127.0.0.1:{port}"


@pytest.mark.clusters
def test_ray_client_gives_what_a_driver_in_the_cluster_gives(client: tuple[str, str], tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a", b="wrong")
    for number, address in enumerate(client):
        assert not run_on(address, file, tmp_path / str(number))
    assert manifest(fleet_commands.open_fleet_store(None, tmp_path / "0")) == manifest(
        fleet_commands.open_fleet_store(None, tmp_path / "1")
    )
    assert not list((tmp_path / "1" / "claims").iterdir())


@pytest.mark.clusters
def test_records_from_ray_are_signed(client: tuple[str, str], tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    private, public = key_pair(tmp_path)
    other, theirs = key_pair(tmp_path, "other")
    for number, address in enumerate(client):
        opened = open_signed_store(FolderBackend(tmp_path / str(number)), private)
        pool = RayPool(opened, address, TOY)
        try:
            assert fleet_commands.schedule_fleet(read_fleet(file), opened, pool)
        finally:
            pool.close()
        trusting = open_signed_store(FolderBackend(tmp_path / str(number)), trust=[public])
        assert all(trusting.read_record(line["key"]) is not None for line in manifest(trusting))
        assert fleet_commands.fleet_status(file, store=tmp_path / str(number), trust=[public]).count_by_status() == {
            "verified": 1
        }
        assert fleet_commands.fleet_status(file, store=tmp_path / str(number), trust=[theirs]).count_by_status() == {
            "stale": 1
        }
        opened = open_signed_store(FolderBackend(tmp_path / str(number)), other, [public])
        pool = RayPool(opened, address, TOY)
        try:
            assert fleet_commands.schedule_fleet(read_fleet(file), opened, pool).ran == 0
        finally:
            pool.close()


@pytest.mark.clusters
def test_a_node_without_the_key_is_an_error(
    client: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_signed_store(FolderBackend(tmp_path / "store"), key_pair(tmp_path)[0])
    monkeypatch.setattr(Signer, "__reduce__", lambda self: (Signer, ("/nowhere/key.pem",)))
    for address in client:
        with pytest.raises(
            RuntimeUnavailable, match=r"can't use the store: the private key '/nowhere/key.pem' can't be read"
        ):
            RayPool(opened, address, TOY)
    assert not list((tmp_path / "store" / "claims").iterdir())
