"""Serve the files of a folder as objects of an S3 bucket that answers slowly, like a distant server.

    python -m benchmarks.fleet.bucket PORT FOLDER MILLISECONDS

It supports the requests of a store (`normdeploy.fleet.remote_backend`): GET, HEAD, PUT with ``If-None-Match: *``,
DELETE, and lists of a prefix. Signatures are ignored. Each answer comes ``MILLISECONDS`` after its request, many in
parallel.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from xml.sax.saxutils import escape

from aiohttp import web

BUCKET = "far"


class Far:
    """Bucket that answers with a delay."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds

    async def answer(self, asked: web.Request) -> web.StreamResponse:
        """Answer a request.

        Returns:
            the response.
        """
        data = await asked.read()
        await asyncio.sleep(self._seconds)
        bucket, _, key = asked.path.lstrip("/").partition("/")
        if bucket != BUCKET:
            return _error(404, "NoSuchBucket")
        if asked.method == "GET" and not key:
            return self._list(asked.query.get("prefix", ""))
        path = self._folder / key
        if asked.method == "PUT":
            return self._put(path, data, asked.headers.get("If-None-Match") == "*")
        if asked.method == "DELETE":
            path.unlink(missing_ok=True)
            return web.Response(status=204)
        if not path.is_file():
            return _error(404, "NoSuchKey")
        data = path.read_bytes()
        headers = {"ETag": '"0"', "Last-Modified": "Tue, 24 Nov 2026 00:00:00 GMT"}
        if asked.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(len(data))})
        return web.Response(body=data, headers=headers)

    def _put(self, path: Path, data: bytes, new: bool) -> web.Response:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb" if new else "wb") as file:
                file.write(data)
        except FileExistsError:
            return _error(412, "PreconditionFailed")
        return web.Response(headers={"ETag": '"0"'})

    def _list(self, prefix: str) -> web.Response:
        found = []
        for here, _, names in os.walk(self._folder / prefix.rpartition("/")[0]):
            for name in names:
                path = Path(here) / name
                if (key := path.relative_to(self._folder).as_posix()).startswith(prefix):
                    status = path.stat()
                    at = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                    found.append(
                        f"<Contents><Key>{escape(key)}</Key><Size>{status.st_size}</Size><ETag>0</ETag>"
                        f"<LastModified>{at}</LastModified></Contents>"
                    )
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult'
            f' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>'
            f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>"
        )
        return web.Response(text=text, content_type="application/xml")


def _error(status: int, code: str) -> web.Response:
    return web.Response(status=status, text=f"<Error><Code>{code}</Code></Error>", content_type="application/xml")


def main() -> None:
    """Serve until the process is stopped."""
    port, folder, milliseconds = sys.argv[1:]
    server = web.Application(client_max_size=2**30)
    server.router.add_route("*", "/{path:.*}", Far(Path(folder), float(milliseconds) / 1000).answer)
    web.run_app(server, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
