"""The way to a Ray cluster: addresses where none is, Ray Client, keys, and nodes that go while they are asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import RuntimeUnavailable
from normdeploy.evidence.keys import Signer
from normdeploy.fleet import fleet
from normdeploy.fleet.description import read
from normdeploy.fleet.on_ray import Cluster
from normdeploy.fleet.places import Folder
from normdeploy.fleet.ray_address import _require_answer
from normdeploy.fleet.sealed import store_in
from tests.keys import key_pair

from .clusters import nodes
from .test_ray import TOY, run_on
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
    with pytest.raises(RuntimeUnavailable, match=f"no Ray cluster is reached at '{address}': Connection refused"):
        _require_answer(address)
    assert time.monotonic() - start < 3


def test_an_address_of_ray_client_has_a_host_and_a_port() -> None:
    for address in ("ray://", "ray://head", "ray://:10001"):
        with pytest.raises(RuntimeUnavailable, match=f"'{address}' names no host and port"):
            _require_answer(address)
    _require_answer("auto")


@pytest.mark.clusters
@pytest.mark.parametrize("protocol", ["", "ray://"])
def test_another_server_is_not_asked_for_ever(listener: socket.socket, protocol: str) -> None:
    listener.listen()
    start = time.monotonic()
    with pytest.raises(RuntimeUnavailable, match="what takes connections there does not answer as Ray does"):
        _require_answer(f"{protocol}127.0.0.1:{listener.getsockname()[1]}")
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
    pool = Cluster.__new__(Cluster)
    pool._ray, pool._useless, pool._nodes = Gone(alive), {}, {}
    pool._learn("node", None, {"CPU": 1})
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
    assert manifest(fleet.open_store(None, tmp_path / "0")) == manifest(fleet.open_store(None, tmp_path / "1"))
    assert not list((tmp_path / "1" / "claims").iterdir())


@pytest.mark.clusters
def test_records_from_ray_are_signed(client: tuple[str, str], tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    private, public = key_pair(tmp_path)
    other, theirs = key_pair(tmp_path, "other")
    for number, address in enumerate(client):
        opened = store_in(Folder(tmp_path / str(number)), private)
        pool = Cluster(opened, address, TOY)
        try:
            assert fleet.driven(read(file), opened, pool)
        finally:
            pool.close()
        trusting = store_in(Folder(tmp_path / str(number)), trust=[public])
        assert all(trusting.record(line["key"]) is not None for line in manifest(trusting))
        assert fleet.status(file, store=tmp_path / str(number), trust=[public]).counts() == {"verified": 1}
        assert fleet.status(file, store=tmp_path / str(number), trust=[theirs]).counts() == {"stale": 1}
        opened = store_in(Folder(tmp_path / str(number)), other, [public])
        pool = Cluster(opened, address, TOY)
        try:
            assert fleet.driven(read(file), opened, pool).ran == 0
        finally:
            pool.close()


@pytest.mark.clusters
def test_a_node_without_the_key_is_an_error(
    client: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = store_in(Folder(tmp_path / "store"), key_pair(tmp_path)[0])
    monkeypatch.setattr(Signer, "__reduce__", lambda self: (Signer, ("/nowhere/key.pem",)))
    for address in client:
        with pytest.raises(
            RuntimeUnavailable, match=r"can't use the store: the private key '/nowhere/key.pem' can't be read"
        ):
            Cluster(opened, address, TOY)
    assert not list((tmp_path / "store" / "claims").iterdir())
