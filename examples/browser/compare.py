"""Run an ONNX file in headless Chromium, and compare its outputs with those of onnxruntime-web in Node.js.

    npm install onnxruntime-web
    normdeploy run model.onnx --runner onnxruntime-web -o expected.npz
    python compare.py model.onnx expected.inputs.npz expected.npz

Both run the same WebAssembly, so the numbers must be equal. Exit code 1: they are not, or the page failed. Needs numpy
and Chromium, and onnxruntime-web in `node_modules` of the working folder or in a folder of NODE_PATH.
"""

from __future__ import annotations

import glob
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import numpy as np

HERE = Path(__file__).parent
# Maximum seconds for the page to load and run the model.
PATIENCE = 120


class Handler(SimpleHTTPRequestHandler):
    """Server of the page, the package, the model and its inputs."""

    def __init__(self, *args, model: Path, inputs: dict[str, np.ndarray], package: Path, sent: queue.Queue, **more):
        self.model, self.inputs, self.package, self.sent = model, inputs, package, sent
        super().__init__(*args, directory=str(HERE), **more)

    def translate_path(self, path: str) -> str:
        folder, _, name = unquote(path).rpartition("/")
        if folder == "/ort":
            return str(self.package / name)
        if folder == "/model":
            return str(self.model.with_name(name))
        return super().translate_path(path)

    def do_GET(self) -> None:
        if self.path == "/job.json":
            self.answer(json.dumps(self.describe_job()).encode())
        elif self.path.startswith("/inputs/"):
            self.answer([*self.inputs.values()][int(Path(self.path).name)].tobytes())
        else:
            super().do_GET()

    def describe_job(self) -> dict:
        """Describe the model, the files of its external weights and its inputs for the page."""
        others = [file.name for file in self.model.parent.glob(f"{glob.escape(self.model.name)}*.data")]
        return {
            "model": f"/model/{self.model.name}",
            "external": [{"path": name, "data": f"/model/{name}"} for name in others],
            "inputs": [
                {"name": name, "type": array.dtype.name, "dims": array.shape, "url": f"/inputs/{place}"}
                for place, (name, array) in enumerate(self.inputs.items())
            ],
        }

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.sent.put((unquote(self.path.removeprefix("/sent/")), body))
        self.answer(b"")

    def log_message(self, *args) -> None:
        """Print nothing."""


def find_package() -> Path:
    """Find the folder of onnxruntime-web that browsers load.

    Returns:
        the folder.
    """
    folders = ["node_modules", *os.environ.get("NODE_PATH", "").split(os.pathsep)]
    found = [Path(folder, "onnxruntime-web", "dist") for folder in folders if folder]
    return next((folder for folder in found if folder.is_dir()), None) or sys.exit("npm install onnxruntime-web")


def find_browser() -> str:
    """Find Chromium.

    Returns:
        the program.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None) or sys.exit("there is no Chromium: install one")


def run_page(model: Path, inputs: dict[str, np.ndarray]) -> tuple[str, dict[str, np.ndarray]]:
    """Open the page in Chromium.

    Returns:
        the text on the page, and the outputs.
    """
    sent: queue.Queue = queue.Queue()
    handler = partial(Handler, model=model, inputs=inputs, package=find_package(), sent=sent)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    outputs: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", f"--user-data-dir={profile}", "--no-first-run", "--disable-gpu"]
        if os.geteuid() == 0:
            # Chromium refuses to start its sandbox as root.
            options.append("--no-sandbox")
        page = f"http://127.0.0.1:{server.server_address[1]}/index.html"
        quiet = subprocess.DEVNULL
        browser = subprocess.Popen([find_browser(), *options, page], stdout=quiet, stderr=quiet)
        try:
            while True:
                name, body = sent.get(timeout=PATIENCE)
                if name == "log":
                    return body.decode(), outputs
                output = json.loads(name)
                outputs[output["name"]] = np.frombuffer(body, output["type"]).reshape(output["dims"])
        except queue.Empty:
            sys.exit(f"the page sent nothing for {PATIENCE} s")
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            server.server_close()


def main(model: str, inputs: str, expected: str) -> int:
    """Compare the outputs.

    Returns:
        exit code.
    """
    text, outputs = run_page(Path(model).resolve(), dict(np.load(inputs)))
    print(text, end="")
    wanted = dict(np.load(expected))
    equal = {name for name in wanted if name in outputs and np.array_equal(outputs[name], wanted[name], equal_nan=True)}
    for name, array in wanted.items():
        print(f"{name}: {'equal to' if name in equal else 'differs from'} the {array.size} numbers of {expected}")
    return 0 if len(equal) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
