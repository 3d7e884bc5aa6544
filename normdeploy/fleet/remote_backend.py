"""Access a store on a remote file system of fsspec: S3, GCS or Azure.

The file system writes an object whole or not at all. A conditional put refuses a second object of the same name. The
condition is If-None-Match on S3 (s3fs) and Azure (adlfs), and ifGenerationMatch=0 on GCS (gcsfs). Other file systems of
fsspec check whether a name exists before they write, so two writers may both succeed. Such file systems are refused.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import RuntimeUnavailable, StoreError
from .store_backends import FolderBackend, ObjectEntry, StoreBackend

# Seconds that a claim lasts without being renewed.
LEASE = 60.0
_CONDITIONAL = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
# Handler that discards log messages. gcsfs logs a traceback of each error that it raises. Without a handler, Python
# would print these tracebacks.
_NOWHERE = logging.NullHandler()
# Maximum number of tries of a write, if the server asks to repeat the write later.
_LATER = 5


class RemoteBackend:
    """Store at a URL that fsspec can open. The library of the file system finds the credentials.

    The clocks of drivers that share the store may differ by a few seconds, but by far less than ``LEASE``.

    Args:
        options: options of the file system's library.

    Raises:
        StoreError: the file system has no conditional put, or the URL is not valid.
        RuntimeUnavailable: a library is missing.
    """

    local = False

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        protocol = url.partition("://")[0]
        if protocol not in _CONDITIONAL:
            raise StoreError(
                f"the store {url!r} can't be used: a {protocol!r} file system can't reject a second object "
                "with the same name, which two drivers may write; use a folder, s3://, gs:// or az://"
            )
        try:
            from fsspec.core import url_to_fs

            # Listings are not cached, so that changes by other drivers are visible.
            self.files, self.root = url_to_fs(url, use_listings_cache=False, **(options or {}))
        except ImportError as error:
            library = {"s": "s3fs", "g": "gcsfs", "a": "adlfs"}[protocol[0]]
            raise RuntimeUnavailable(f"the store {url!r} needs a library: {error}; pip install {library}") from error
        except ValueError as error:
            raise StoreError(
                f"the store {url!r} can't be used: {error}; use a folder, or a URL such as s3://bucket/folder"
            ) from error
        self.url, self._options, self._held = url, options, _LeaseRenewer(self)
        logging.getLogger("gcsfs").addHandler(_NOWHERE)
        # Without this option, s3fs would first query the size, to read a large file in parts. Each record would then
        # take two requests.
        known = inspect.signature(self.files.cat_file).parameters
        if "max_concurrency" in known:
            self._whole = {"max_concurrency": 1}
        else:
            self._whole = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteBackend, (self.url, self._options)

    def check_writable(self) -> None:
        """Check before a run that the store can be written and refuses a second object of the same name.

        Also remove claims whose owner ended long ago.

        Raises:
            StoreError: a check fails.
        """
        name = f"claims/{secrets.token_hex(8)}.try"
        refused = self.create(name, b"") and not self.create(name, b"")
        self.delete(name)
        if not refused:
            raise StoreError(
                f"the store {self.url!r} can't be used: its server ignores the condition that an object must "
                "not exist yet, so two drivers would overwrite each other's records; use another store "
                "or a folder"
            )
        for entry in self.list_entries("claims/"):
            if entry.written < time.time() - 10 * LEASE:
                self.delete(entry.name)

    def read(self, name: str) -> bytes | None:
        with self._convert_fsspec_errors():
            try:
                return bytes(self.files.cat_file(self._object_path(name), **self._whole))
            except FileNotFoundError:
                return None

    def fetch(self, name: str, target: Path) -> bool:
        with self._convert_fsspec_errors():
            try:
                self.files.get_file(self._object_path(name), str(target))
            except FileNotFoundError:
                target.unlink(missing_ok=True)
                return False
            return True

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object by a conditional put, which a busy server may ask to retry.

        Returns:
            False if an object of this name exists. The existing object is left unchanged.
        """
        with self._convert_fsspec_errors():
            for tries in range(_LATER):
                try:
                    self.files.pipe_file(self._object_path(name), data, mode="create")
                    return True
                except FileExistsError:
                    return False
                except OSError as error:
                    refused = _server_error_code(error)
                    # s3fs recognizes an existing object by a field that not all servers send, so the error code is
                    # checked too.
                    if refused in ("PreconditionFailed", "412"):
                        return False
                    if refused not in ("ConditionalRequestConflict", "409") or tries == _LATER - 1:
                        raise
                    # If two writers write at the same time, S3 may ask both to retry.
                    time.sleep(0.1 * 2**tries)
        raise AssertionError("unreachable")

    def store_file(self, name: str, file: Path) -> None:
        with self._convert_fsspec_errors():
            if not self.files.exists(self._object_path(name)):
                self.files.put_file(str(file), self._object_path(name))

    def size(self, name: str) -> int | None:
        with self._convert_fsspec_errors():
            try:
                return int(self.files.info(self._object_path(name))["size"])
            except FileNotFoundError:
                return None

    def list_entries(self, prefix: str) -> Iterator[ObjectEntry]:
        """List all objects under a prefix that ends with "/".

        Returns:
            an iterator over the entries, with the times that the server reports.
        """
        with self._convert_fsspec_errors():
            found = self.files.find(self._object_path(prefix), detail=True)
        skipped = len(self.root.rstrip("/")) + 1
        for path, told in found.items():
            # S3, Azure and GCS use different keys for the time.
            written = told.get("LastModified") or told.get("last_modified") or told.get("mtime") or 0
            if hasattr(written, "timestamp"):
                at = written.timestamp()
            else:
                at = float(written)
            yield ObjectEntry(path[skipped:], int(told["size"]), at)

    def delete(self, name: str) -> None:
        with self._convert_fsspec_errors(), contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self._object_path(name))

    def claim(self, name: str) -> Callable[[], None] | None:
        """Take a lease on a name, and renew it until it is released. If a lease is older than ``LEASE``, its owner has
        ended.

        Returns:
            a function that releases the lease; None if another driver has the lease.
        """
        path, token = f"claims/{name}", secrets.token_hex(8)
        if not self.create(path, _encode_lease(token)) and not self._take_over_lease(path, token):
            return None
        self._held.add(path, token)

        def release_lease() -> None:
            self._held.remove(path)
            with contextlib.suppress(StoreError):
                self.delete(path)

        return release_lease

    def overwrite(self, name: str, data: bytes) -> None:
        """Write an object. An existing object of the same name is replaced."""
        with self._convert_fsspec_errors():
            self.files.pipe_file(self._object_path(name), data)

    def _take_over_lease(self, path: str, token: str) -> bool:
        """Take over a lease that has expired.

        Several drivers may find the same expired lease. The driver that creates a second object next to the lease takes
        over the lease, provided that the lease has not changed in the meantime.

        Returns:
            True if this driver has the lease now.
        """
        held = self.read(path)
        if held is None:
            return self.create(path, _encode_lease(token))
        # This driver wrote the object: the library wrote it a second time because the first answer was lost.
        if _lease_owner(held) == token:
            return True
        if time.time() < _lease_expiry(held):
            return False
        over = f"{path}.over"
        if not self.create(over, _encode_lease(token)):
            if time.time() > _lease_expiry(self.read(over) or b""):
                # The driver that created the second object ended before it had taken over the lease. Delete the object,
                # so that the next driver can take over the lease.
                self.delete(over)
            return False
        try:
            if self.read(path) != held:
                return False
            self.overwrite(path, _encode_lease(token))
            return True
        finally:
            self.delete(over)

    def _object_path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _convert_fsspec_errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            # Each library raises its own exceptions.
            raise StoreError(
                f"the store {self.url!r} can't be used: {type(error).__name__}: {error}; stored results are "
                "intact, and the next run resumes from them"
            ) from error


class _LeaseRenewer:
    """Renew the leases of a store. One thread does this as long as there are leases."""

    def __init__(self, place: RemoteBackend) -> None:
        self._place, self._leases = place, dict[str, str]()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, path: str, token: str) -> None:
        with self._lock:
            self._leases[path] = token
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew_leases, daemon=True)
                self._thread.start()

    def remove(self, path: str) -> None:
        with self._lock:
            self._leases.pop(path, None)

    def _renew_leases(self) -> None:
        while True:
            time.sleep(LEASE / 4)
            for path, token in list(self._leases.items()):
                # The lock is held during each write, because a lease that is released in the meantime must not be
                # written again.
                with self._lock, contextlib.suppress(StoreError):
                    if path in self._leases:
                        self._place.overwrite(path, _encode_lease(token))


def _encode_lease(token: str) -> bytes:
    return json.dumps({"owner": token, "until": time.time() + LEASE}).encode()


def _lease_owner(lease: bytes) -> str:
    try:
        return str(json.loads(lease)["owner"])
    except (ValueError, TypeError, KeyError):
        return ""


def _server_error_code(error: OSError) -> str:
    """Return the error code of an S3 server; "" for other errors."""
    told = getattr(error.__cause__, "response", None)
    if isinstance(told, dict) and "Error" in told:
        return str(told["Error"].get("Code", ""))
    return ""


def _lease_expiry(lease: bytes) -> float:
    try:
        return float(json.loads(lease)["until"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def open_backend(url: str) -> StoreBackend:
    """Open the backend of a store.

    Args:
        url: path of a folder, or URL that fsspec reads.

    Returns:
        the backend.

    Raises:
        StoreError: the folder or URL can't be used.
        RuntimeUnavailable: the URL needs a library that is not installed.
    """
    if "://" in url and not url.startswith("file://"):
        return RemoteBackend(url)
    return FolderBackend(Path(os.path.abspath(url.removeprefix("file://"))))
