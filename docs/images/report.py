"""Take ``report.png``: the page of an export in light, and of ``verify --drift`` on a phone in dark.

    PYTHONPATH=. python docs/images/report.py

It needs the extra ``report``, playwright and a Chromium. The model is a small encoder with norms by hand. The PNG holds
the words of both pages in a text chunk; `tests/test_docs.py` makes the pages again and compares the words.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from html.parser import HTMLParser
from pathlib import Path

import torch
from torch import nn

from docs.refresh import ROOT

PICTURE = Path(__file__).with_name("report.png")
COMMANDS = (
    "normdeploy export model.pt2 -o model.onnx --html export.html -q",
    "normdeploy verify model.pt2 model.onnx --drift --html verify.html -q",
)
PAGES = ("export.html", "verify.html")
# Width of the page of the export, of the phone's page, and height of both, in CSS pixels.
WIDE, PHONE, HEIGHT = 1060, 360, 1215
# Headings of sections that name the machine, or repeat the command.
_OF_THIS_MACHINE = ("To do it again",)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEYWORD = b"Words"
# Shows a section at the bottom: the next one names the machine.
_SCROLL = "e => window.scrollTo(0, scrollY + e.closest('section').getBoundingClientRect().bottom - innerHeight + 8)"
# Both pictures side by side.
_BOTH = """<body style="margin:0;display:flex;gap:20px;background:#8a9194">
<img src="data:image/png;base64,{}" width="{}"><img src="data:image/png;base64,{}" width="{}"></body>"""


class Norm(nn.Module):
    """A LayerNorm by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(size) + 0.5)
        self.shift = nn.Parameter(torch.randn(size) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = x - x.mean(-1, keepdim=True)
        return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-12) * self.gain + self.shift


class Layer(nn.Module):
    """A feed-forward layer between two norms."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention_norm, self.output_norm = Norm(size), Norm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x)
        return self.output_norm(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """Six layers, and an output whose norm is clamped, which stays as it is."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, size)
        self.norm = Norm(size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(x))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.normalize(x, dim=-1)


class _VisibleText(HTMLParser):
    """Collect the text of each section of a page, without styles and drawings."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[list[str]] = [[]]
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("style", "svg")
        if tag == "section":
            self.sections.append([])

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.sections[-1].append(data)


def run_command(command: str) -> None:
    """Run a command of normdeploy in the working folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(command.split(), env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, check=True)


def make_pages(run: Callable[[str], object] = run_command) -> list[Path]:
    """Export and verify the model in the working folder.

    Args:
        run: runs a command.

    Returns:
        the pages, of the export and of `verify`.
    """
    torch.manual_seed(0)
    shapes = ({0: torch.export.Dim("batch", min=1, max=32)},)
    program = torch.export.export(Encoder().eval(), (torch.randn(4, 8, 16),), dynamic_shapes=shapes)
    torch.export.save(program, "model.pt2")
    for command in COMMANDS:
        run(command)
    return [Path(page).resolve() for page in PAGES]


def page_words(pages: list[Path]) -> Counter[str]:
    """Collect the words of pages, without numbers and without the sections about this machine.

    Returns:
        word -> how often it occurs.
    """
    words = Counter[str]()
    for page in pages:
        parser = _VisibleText()
        parser.feed(page.read_text(encoding="utf-8"))
        kept = [" ".join(section) for section in parser.sections if not set(_OF_THIS_MACHINE) & set(section)]
        words += Counter(re.findall(r"[^\W\d_]{2,}", " ".join(kept)))
    return words


def take(pages: list[Path], chromium: str) -> bytes:
    """Take a picture of both pages side by side.

    Returns:
        a PNG with the words of the pages.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        shots = []
        for page, width, scheme in ((pages[0], WIDE, "light"), (pages[1], PHONE, "dark")):
            shown = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": HEIGHT})
            shown.goto(page.as_uri(), wait_until="networkidle")
            if scheme == "dark":
                shown.get_by_role("heading", name="Error by layer").evaluate(_SCROLL)
            shots.append(base64.b64encode(shown.screenshot()).decode())
        both = browser.new_page(viewport={"width": WIDE + 20 + PHONE, "height": HEIGHT})
        both.set_content(_BOTH.format(shots[0], WIDE, shots[1], PHONE))
        picture = both.screenshot()
        browser.close()
    return with_words(picture, page_words(pages))


def find_chromium() -> str | None:
    """Find a Chromium, which playwright drives but does not bring.

    Returns:
        its path; None if there is none.
    """
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def with_words(png: bytes, words: Counter[str]) -> bytes:
    """Put words into a compressed text chunk before the end of a PNG.

    Source: W3C, Portable Network Graphics, third edition, 11.3.3.3 (zTXt) and 5.3 (layout of chunks).
    """
    text = " ".join(f"{word}:{count}" for word, count in sorted(words.items()))
    data = _KEYWORD + b"\0\0" + zlib.compress(text.encode(), 9)
    chunk = b"zTXt" + data
    made = struct.pack(">I", len(data)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    end = png.rindex(b"IEND") - 4
    return png[:end] + made + png[end:]


def read_words(png: bytes) -> Counter[str]:
    """Read the words of `with_words`.

    Returns:
        word -> how often it occurs; empty if the PNG has none.
    """
    at = len(_SIGNATURE)
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + length]
        if kind == b"zTXt" and data.startswith(_KEYWORD + b"\0"):
            pairs = zlib.decompress(data[len(_KEYWORD) + 2 :]).decode().split()
            return Counter({word: int(count) for word, _, count in (pair.partition(":") for pair in pairs)})
        at += 12 + length
    return Counter()


if __name__ == "__main__":
    found = find_chromium()
    if found is None:
        raise SystemExit("there is no Chromium here; install one (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        PICTURE.write_bytes(take(make_pages(), found))
