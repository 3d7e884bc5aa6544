"""A stand-in for the command line: each verb writes what follows from its files and options alone.

A model whose text holds "fails" fails its export, "wrong" is wrong in verify, "crashes" ends by a signal, "slow" takes
a while, "endless" a minute, "large" holds 200 MB. The export of one with "steady" is the same file with any options and
of any such model.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    text = "".join(path.read_text() for path in sorted(Path().iterdir()) if path.suffix == ".pt2")
    verb = argv[0]
    seen = sorted(str(p) for p in Path().rglob("*") if p.is_file() and not p.name.startswith("."))
    state = json.dumps([argv, [(p, hashlib.sha256(Path(p).read_bytes()).hexdigest()) for p in seen]])
    print("toy", *argv)
    if "slow" in text:
        time.sleep(0.2)
    if "large" in text:
        held = bytearray(200 * 2**20)
        held[:: 2**12] = b"x" * len(held[:: 2**12])
        time.sleep(1)
    if "endless" in text:
        time.sleep(60)
    if verb == "export" and "fails" in text:
        print("error: the toy can't export this", file=sys.stderr)
        return 1
    if verb == "export" and "crashes" in text:
        os.kill(os.getpid(), signal.SIGSEGV)
    out = Path("out")
    if "-o" in argv:
        made = Path(argv[argv.index("-o") + 1])
        made.parent.mkdir(exist_ok=True)
        if verb == "package":
            made.mkdir()
            (made / "manifest.json").write_text("{}")
            made = made / "bundle.txt"
        if verb == "export" and "steady" in text:
            state = "steady"
        made.write_text(hashlib.sha256(state.encode()).hexdigest() * 20)
    bad = verb == "verify" and "wrong" in text
    result = {"runtime": "toy", "output": "y", "max_abs_error": 2.0 if bad else 0.5, "allowed": 1.0}
    results = [result | {"verdict": "fail" if bad else "pass"}] if verb in ("verify", "recheck") else []
    (out / "report.json").write_text(json.dumps({"parity": {"results": results}}))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
