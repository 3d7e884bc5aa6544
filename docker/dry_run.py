"""Run a Dockerfile without Docker: its COPY and RUN steps in a scratch folder, then its program.

    python docker/dry_run.py docker/cpu.Dockerfile

Absolute paths of the image are placed below the scratch folder. Steps of apt-get are skipped, because they change the
machine itself. Not tested are the contents of the base image, and the copy between stages, which is at the same path in
both.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_KNOWN = ("FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT")


def steps(text: str) -> list[tuple[str, str]]:
    """Parse a Dockerfile, without comments and with continued lines joined.

    Returns:
        (instruction, rest of its line) of each step.

    Raises:
        ValueError: an instruction is not supported here.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction not in _KNOWN:
            raise ValueError(f"{line!r}: what {instruction} does is not known here")
        found.append((instruction, rest.strip()))
    return found


def run(file: Path, scratch: Path, arguments: dict[str, str]) -> list[str]:
    """Run the steps.

    Args:
        arguments: values for ARGs, by name.

    Returns:
        command line of the image's program.

    Raises:
        subprocess.CalledProcessError: a step failed.
        ValueError: a step can't be done here.
    """
    variables, here, program = dict(os.environ), scratch, list[str]()
    variables.pop("PYTHONPATH", None)
    scratch.mkdir(exist_ok=True)
    for instruction, rest in steps(file.read_text()):
        print(f"{instruction} {rest}", flush=True)
        if instruction in ("ARG", "ENV"):
            for word in shlex.split(rest):
                name, _, value = word.partition("=")
                value = (
                    arguments.get(name, value) if instruction == "ARG" else re.sub(r"^/(?=opt/)", f"{scratch}/", value)
                )
                variables[name] = value.replace("$PATH", variables["PATH"])
        elif instruction == "WORKDIR":
            here = scratch / rest.removeprefix("/")
            here.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY" and not rest.startswith("--from="):
            *sources, target = rest.split()
            for source in sources:
                to = here / (f"{target}{source}" if target == "./" else target)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, to)
        elif instruction == "RUN" and "apt-get" not in rest:
            subprocess.run(["/bin/sh", "-e", "-c", rest], cwd=here, env=variables, check=True)
        elif instruction == "ENTRYPOINT":
            name, *words = json.loads(rest)
            program = [shutil.which(name, path=variables["PATH"]) or name, *words]
    return program


def main() -> int:
    """Run each Dockerfile named on the command line.

    Returns:
        exit code.
    """
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            program = run(Path(name), Path(folder), {})
            subprocess.run([*program, "--version"], check=True, cwd=folder)
            subprocess.run([*program, "check", "--help"], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
