"""A folder is replaced as a whole, and the folder that another run is writing stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from normdeploy.storage import folder_replacement
from normdeploy.storage.file_replacement import lock_handle
from normdeploy.storage.folder_replacement import replace_folder_atomically


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "old").touch()
    return folder


def test_the_folder_that_another_run_is_writing_stays_and_a_dead_one_goes(target: Path) -> None:
    alive = target.with_name(f".bundle.{'a' * 16}.tmp")
    dead = target.with_name(f".bundle.{'d' * 16}.tmp")
    for folder in (alive, dead):
        folder.mkdir()
    handle = os.open(alive, os.O_RDONLY)
    try:
        assert lock_handle(handle)
        with replace_folder_atomically(target) as fresh:
            (fresh / "new").touch()
        assert alive.exists()
        assert not dead.exists()
    finally:
        os.close(handle)
    assert [path.name for path in target.iterdir()] == ["new"]


def test_the_old_folder_returns_if_the_new_one_cannot_take_its_place(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fail_once_the_old_one_is_aside(source: Any, destination: Any) -> None:
        if Path(destination) == target and (Path(source) / "new").exists():
            raise OSError("the file system refuses")
        rename(source, destination)

    # Some file systems can't exchange two names.
    monkeypatch.setattr(folder_replacement, "exchange_names", lambda one, other: False)
    monkeypatch.setattr(os, "rename", fail_once_the_old_one_is_aside)
    with pytest.raises(OSError, match="refuses"), replace_folder_atomically(target) as fresh:
        (fresh / "new").touch()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in target.parent.iterdir()] == ["bundle"]
