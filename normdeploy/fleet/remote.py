"""A store's place on what fsspec reaches: S3, GCS, Azure, ...

An object is written whole or not at all, and a second one under its name is refused by a conditional put.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ..errors import RuntimeUnavailable, StoreError
from .places import Entry, Folder, Place

LEASE = 60.0  # seconds that a claim holds without being renewed


class Remote:
    """A place that fsspec reaches, by its URL. Credentials are those that its library finds."""

    local = False

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        try:
            from fsspec.core import url_to_fs

            self.files, self.root = url_to_fs(url, **(options or {}))
        except ImportError as error:
            raise RuntimeUnavailable(
                f"the store {url!r} needs a library: {error}; pip install 'normdeploy[fleet]'"
            ) from error
        except ValueError as error:
            raise StoreError(
                f"the store {url!r} can't be used: {error}; give a folder, or a URL such as s3://bucket/folder"
            ) from error
        self.url, self.owner = url, secrets.token_hex(8)

    def read(self, name: str) -> bytes | None:
        with self._told():
            try:
                return bytes(self.files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def fetch(self, name: str, target: Path) -> bool:
        with self._told():
            try:
                self.files.get_file(self._path(name), str(target))
            except FileNotFoundError:
                target.unlink(missing_ok=True)
                return False
            return True

    def create(self, name: str, data: bytes) -> bool:
        with self._told():
            try:
                self.files.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
            return True

    def keep(self, name: str, file: Path) -> None:
        with self._told():
            if not self.files.exists(self._path(name)):
                self.files.put_file(str(file), self._path(name))

    def size(self, name: str) -> int | None:
        with self._told():
            try:
                return int(self.files.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._told():
            found = self.files.find(self._path(prefix), detail=True)
        skipped = len(self.root.rstrip("/")) + 1
        for path, told in found.items():
            written = told.get("LastModified") or told.get("mtime") or told.get("created") or 0
            at = written.timestamp() if hasattr(written, "timestamp") else float(written)
            yield Entry(path[skipped:], int(told["size"]), at)

    def delete(self, name: str) -> None:
        with self._told(), contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self._path(name))

    def claim(self, name: str) -> Callable[[], None] | None:
        """A lease, which is renewed while it is held; one that is older than ``LEASE`` is its dead owner's."""
        path = f"claims/{name}"
        if not self.create(path, self._lease()):
            held = self.read(path)
            if held is not None and time.time() < _until(held):
                return None
            self.delete(path)
            if not self.create(path, self._lease()):
                return None
        ended = Event()

        def renew() -> None:
            while not ended.wait(LEASE / 4):
                with contextlib.suppress(StoreError):
                    self.files.pipe_file(self._path(path), self._lease())

        Thread(target=renew, daemon=True).start()

        def release() -> None:
            ended.set()
            with contextlib.suppress(StoreError):
                self.delete(path)

        return release

    def _lease(self) -> bytes:
        return json.dumps({"owner": self.owner, "until": time.time() + LEASE}).encode()

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError, StoreError):
            raise
        except Exception as error:  # each library has its own
            raise StoreError(
                f"the store {self.url!r} can't be used: {type(error).__name__}: {error}; what it holds is whole, and"
                " the next run goes on from there"
            ) from error


def _until(lease: bytes) -> float:
    try:
        return float(json.loads(lease)["until"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def place(url: str) -> Place:
    """A folder's path, or a URL that fsspec reads.

    Raises:
        StoreError: it can't be used.
        RuntimeUnavailable: the URL needs a library that is not installed.
    """
    if "://" in url and not url.startswith("file://"):
        return Remote(url)
    return Folder(Path(os.path.abspath(url.removeprefix("file://"))))
