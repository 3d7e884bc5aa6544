"""Buckets for the tests of stores that are far away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .buckets import BUCKET, KINDS, At, Bucket, started


@pytest.fixture(scope="session", params=KINDS)  # fsspec keeps the first server that it was told of
def server(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    bucket = started(KINDS[request.param]())
    yield bucket
    bucket.stop()


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> At:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return At(f"{server.scheme}://{BUCKET}/{tmp_path.name}")
