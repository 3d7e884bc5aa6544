"""What others run of this repository, as far as it runs here: the GitHub Action, the pre-commit hook, the
Dockerfiles."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from docker.dry_run import run, steps
from normdeploy.cli.app import app
from tests.forked import ROOT
from tests.packaged import written
from tests.support import LAYER_NORM

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CLEAN = "g (float[2, 4] x) => (float[2, 4] y) { y = Relu(x) }"


def step(name: str) -> Any:
    (found,) = [s for s in ACTION["runs"]["steps"] if s.get("name") == name]
    return found


@pytest.fixture
def act(tmp_path: Path) -> Any:
    """Runs the step Check as a runner does: inputs in place of their expressions, in bash with its options."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "normdeploy").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m normdeploy "$@"\n')
    (programs / "normdeploy").chmod(0o755)

    def run(**inputs: str) -> subprocess.CompletedProcess[str]:
        given = {name: told["default"] for name, told in ACTION["inputs"].items()} | {
            k.replace("_", "-"): v for k, v in inputs.items()
        }
        own = {
            key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: given[m[1]], text)
            for key, text in step("Check")["env"].items()
        }
        variables = os.environ | own | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        variables |= {"GITHUB_OUTPUT": str(tmp_path / "outputs"), "COLUMNS": "200"}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step("Check")["run"]]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    return run


def test_action_fails_on_what_check_finds(act: Any, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    written(tmp_path / "deep" / "er", LAYER_NORM, "a norm.onnx")
    written(tmp_path, CLEAN, "clean.onnx")
    done = act(sarif="found.sarif")
    assert done.returncode == 1, done.stderr
    assert "a norm.onnx" in done.stdout
    assert "clean.onnx: clean" in done.stdout
    assert "decomposed" in (tmp_path / "found.sarif").read_text()
    assert (tmp_path / "outputs").read_text() == "sarif=found.sarif\n"


def test_action_passes_and_hands_its_inputs_on(act: Any, tmp_path: Path) -> None:
    written(tmp_path, LAYER_NORM, "hand.onnx")
    written(tmp_path, CLEAN, "-clean.onnx")
    done = act(files="hand.onnx\n-cl*.onnx", fail_on="train-mode", precision="fp16", runtime="onnxruntime")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules that fail the check: train-mode" in done.stdout
    assert "2 files" in done.stdout


@pytest.mark.parametrize("files", ["nothing/*.onnx", "$(touch run)*.onnx", "`touch run`; touch run; *.onnx"])
def test_action_refuses_patterns_without_files_and_runs_none_of_them(act: Any, tmp_path: Path, files: str) -> None:
    done = act(files=files)
    assert done.returncode == 1
    assert "no file matches" in done.stdout
    assert not (tmp_path / "run").exists()


def test_action_puts_no_input_into_a_script() -> None:
    """An expression in `run` would let an input write commands; in `env` it is a value."""
    for told in ACTION["runs"]["steps"]:
        assert "${{" not in told.get("run", "")


def test_hook_is_a_command_of_ours() -> None:
    program, verb, *options = shlex.split(HOOK["entry"])
    verbs: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    assert program == "normdeploy"
    verbs[verb].make_context(verb, [*options, "a.onnx", "b.onnx"])
    assert re.search(HOOK["files"], "models/net.onnx")
    assert not re.search(HOOK["files"], "models/net.onnx.data")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_name_what_is_there(file: Path) -> None:
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    found = steps(file.read_text())
    for instruction, rest in found:
        if instruction == "COPY" and not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in taken
        if instruction == "ARG" and rest.startswith("EXTRAS="):
            assert set(rest.partition("=")[2].split(",")) <= set(EXTRAS)
    assert found[-1] == ("ENTRYPOINT", '["normdeploy"]')


def test_dry_run_does_the_steps(tmp_path: Path) -> None:
    """What `.ci/run` does with the real ones, which install everything."""
    file = tmp_path / "Dockerfile"
    file.write_text(
        "FROM a\nARG WHO=none\nENV VENV=/opt/venv\nWORKDIR /src\nCOPY LICENSE README.md ./\n"
        "COPY docker docker\n# no step\n"
        'RUN mkdir -p "$VENV" \\\n    && echo "$WHO" > "$VENV/who"\nRUN apt-get install nothing\n'
        "RUN test -f docker/dry_run.py\n"
        'ENV PATH=/opt/venv:$PATH\nENTRYPOINT ["who", "-a"]\n'
    )
    program = run(file, tmp_path / "scratch", {"WHO": "me"})
    assert program == ["who", "-a"] or program[0].endswith("/who")
    assert (tmp_path / "scratch" / "opt" / "venv" / "who").read_text() == "me\n"
    assert (tmp_path / "scratch" / "src" / "LICENSE").is_file()
    file.write_text("FROM a\nRUN false\n")
    with pytest.raises(subprocess.CalledProcessError):
        run(file, tmp_path / "other", {})
    with pytest.raises(ValueError, match="HEALTHCHECK"):
        steps("HEALTHCHECK NONE")
