"""The test files of what is changed, for ``make check``: ``python -m tests.changed`` prints them.

Changed is what differs from the branch main where another is checked out, and what is not committed. To a module belong
the test file of its name and those that import it, to one without a file of its name those of its folder; to a page or
a model those that name it. A changed test file is one
itself. Nothing here says that the others pass: ``make test`` runs all.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 12  # files; a module that more tests import is tested by those of its name and its folder's


def changed() -> list[Path]:
    """Paths below the root, deleted ones left out."""
    said = [_git("diff", "--name-only", "main"), _git("ls-files", "--others", "--exclude-standard")]
    names = dict.fromkeys(line for text in said for line in text.splitlines())
    return [Path(name) for name in names if (ROOT / name).is_file()]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The test files of changed files, in the order of their names."""
    every = sorted(p.relative_to(ROOT) for p in (ROOT / "tests").rglob("test_*.py"))
    imports = {test: _imports(ROOT / test) for test in every}
    found: set[Path] = set()
    for path in paths:
        if path.suffix == ".md" or path.parts[0] in ("normdeploy", "plugins"):
            found.add(Path("tests/test_words.py"))
        if path in imports:
            found.add(path)
        elif path.parts[0] == "examples":
            found.update(t for t in every if t.parent.name == path.parts[1])
        elif path.suffix == ".py":
            own = [t for t in every if t.stem == f"test_{path.stem}" or t.stem == f"test_{path.parent.name}"]
            readers = [t for t in every if _module(path) in imports[t]]
            mirror = [t for t in every if t.parent == Path("tests", *path.parent.parts[1:]) and path.parent.parts[1:]]
            found.update(
                own, readers if len(readers) <= MOST else (), mirror if len(mirror) <= MOST and not own else ()
            )
        elif path.parts[0] == "docs":
            found.add(Path("tests/test_docs.py"))
    return sorted(found)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _imports(file: Path) -> set[str]:
    """The modules that a file imports, and those of which it imports a name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found


if __name__ == "__main__":
    print(*files_of(changed()))
