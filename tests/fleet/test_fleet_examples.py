"""The files of examples/fleet: KubeRay's schemas take the manifests, bash and Python the scripts, the command line each
command; and the script for Slurm runs, with stand-ins for Slurm's own programs."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from normdeploy.cli.app import app
from normdeploy.fleet import fleet_commands
from normdeploy.fleet.job_steps import job_steps_of
from normdeploy.fleet.ray_pool import RayNode, find_nodes_for
from normdeploy.fleet.step_inputs import StepTask
from normdeploy.fleet.step_keys import FleetMachine
from tests.fleet import kuberay
from tests.forked import ROOT

EXAMPLES = ROOT / "examples" / "fleet"
JOB, CRON = (yaml.safe_load((EXAMPLES / "kuberay" / f"{n}.yaml").read_text()) for n in ("rayjob", "raycronjob"))
WORKFLOW = yaml.safe_load((EXAMPLES / "github" / "fleet.yml").read_text())
SLURM = sorted((EXAMPLES / "slurm").glob("*.sbatch"))
CRDS = "NORMDEPLOY_KUBERAY_CRDS"  # a folder with KubeRay's own ray.io_rayjobs.yaml and ray.io_raycronjobs.yaml


def faults(manifest: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(kuberay.schema(manifest["kind"]))
    return [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in validator.iter_errors(manifest)]


@pytest.mark.parametrize("manifest", [JOB, CRON], ids=["RayJob", "RayCronJob"])
def test_kuberay_takes_the_manifests(manifest: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(kuberay.schema(manifest["kind"]))
    assert faults(manifest) == []


def renamed(spec: dict[str, Any]) -> None:
    spec["shutdownAfterJobFinish"] = spec.pop("shutdownAfterJobFinishes")


def a_number(spec: dict[str, Any]) -> None:
    spec["rayClusterSpec"]["workerGroupSpecs"][1]["rayStartParams"]["num-gpus"] = 1


def deep(spec: dict[str, Any]) -> None:
    spec["rayClusterSpec"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["volumeMount"] = []


def no_groups(spec: dict[str, Any]) -> None:
    del spec["rayClusterSpec"]["headGroupSpec"]


@pytest.mark.parametrize("change", [renamed, a_number, deep, no_groups])
def test_the_schemas_refuse_what_kuberay_refuses(change: Callable[[dict[str, Any]], None]) -> None:
    for manifest in (copy.deepcopy(JOB), copy.deepcopy(CRON)):
        spec = manifest["spec"] if manifest["kind"] == "RayJob" else manifest["spec"]["jobTemplate"]
        change(spec)
        assert len(faults(manifest)) == 1


def test_the_schemas_are_those_of_kuberay() -> None:
    """What is kept here is made of KubeRay's own files, which are not: they have 2 MB."""
    if CRDS not in os.environ:
        pytest.skip(
            f"{CRDS} names no folder with KubeRay's own definitions; the manifests were held against kuberay.json"
        )
    comment = kuberay.kept()["$comment"]
    (commit,) = re.findall(r"at (\w{40})", comment)
    assert kuberay.schemas(Path(os.environ[CRDS]), commit) == kuberay.kept()


def test_every_night_the_same_job() -> None:
    assert CRON["spec"]["jobTemplate"] == JOB["spec"]


def test_groups_state_what_steps_for_their_gpus_take(tmp_path: Path) -> None:
    """A step takes one of the resource of its GPU's compute capability; the group's pods ask for nodes that have it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/a.pt2").touch()
    shutil.copy(EXAMPLES / "fleet.toml", tmp_path)
    steps = [
        s
        for job in fleet_commands.read_fleet_file(tmp_path / "fleet.toml").iter_jobs()
        for s in job_steps_of(job)
        if s.needs.capability
    ]
    groups = {g["groupName"]: g for g in JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert {s.needs.capability for s in steps} == {"8.9", "12.0"}
    for step in steps:
        name = f"cc{step.needs.capability.replace('.', '')}"
        stated = yaml.safe_load(yaml.safe_load(groups[name]["rayStartParams"]["resources"]))
        pod = groups[name]["template"]["spec"]
        gpus = float(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        selected = [pod["nodeSelector"][f"nvidia.com/gpu.compute.{n}"] for n in ("major", "minor")]
        machine = FleetMachine({"cpu": "", step.needs.runtime: "1", "capability 0": ".".join(selected)}, "", "")
        node, task = RayNode(name, machine, {"CPU": 2.0, "GPU": gpus, **stated}), StepTask(step, {})
        assert find_nodes_for([node], task, task.key_on(machine)[0]) == ([node], {"GPU": 1.0, name: 1.0})


def commands() -> dict[str, str]:
    """Where a command stands -> its words, without comments and line ends."""
    found = {"rayjob": JOB["spec"]["entrypoint"]}
    for path in SLURM:
        (found[path.name],) = re.findall(r"^normdeploy (?:.*\\\n)*.*$", path.read_text(), re.MULTILINE)
    source = (EXAMPLES / "airflow/normdeploy_fleet.py").read_text()
    (told,) = re.findall(r"COMMAND = \((.*?)\n\)", source, re.DOTALL)
    found["airflow"] = "".join(re.findall(r'"(.*)"', told))
    for step in WORKFLOW["jobs"]["fleet"]["steps"]:
        if step.get("run", "").startswith("normdeploy"):
            found[f"github: {step['name']}"] = step["run"]
    return found


@pytest.mark.parametrize("where", commands())
def test_each_starts_a_command_of_ours(where: str) -> None:
    text = commands()[where].replace("\\\n", " ").removesuffix(" || [ $? -eq 3 ]")
    text = re.sub(r"\$(?:\{[^}]*\}|\w+)", "4", text)
    program, *words = shlex.split(text)
    assert program == "normdeploy"
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert command.name in ("run", "gc")
    command.make_context(command.name, words)


@pytest.mark.parametrize("path", SLURM, ids=lambda p: p.stem)
def test_bash_reads_the_scripts(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    lines = path.read_text().splitlines()
    last = max(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])  # Slurm stops at the first command


def test_the_dag_compiles() -> None:
    for path in EXAMPLES.rglob("*.py"):
        compile(path.read_text(), path.name, "exec")


def test_the_workflow_puts_no_value_into_a_script() -> None:
    for step in WORKFLOW["jobs"]["fleet"]["steps"]:
        assert "${{" not in step.get("run", "")
    text = (EXAMPLES / "github/fleet.yml").read_text()
    wanted = set(re.findall(r"uses: (\S+)", (ROOT / "action.yml").read_text()))
    assert wanted <= set(re.findall(r"uses: (\S+)", text))


@pytest.mark.parametrize("written", [True, False])
def test_the_page_goes_into_the_summary(tmp_path: Path, written: bool) -> None:
    (step,) = [s for s in WORKFLOW["jobs"]["fleet"]["steps"] if s.get("name") == "Page"]
    if written:
        (tmp_path / "fleet.md").write_text("| model |\n")
    (tmp_path / "summary").write_text("before\n")
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env=os.environ | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")},
        check=True,
    )
    assert (tmp_path / "summary").read_text() == "before\n" + "| model |\n" * written


STANDINS = {
    "normdeploy": f'exec "{sys.executable}" -m normdeploy "$@"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',  # here, whichever node is meant
    "scontrol": "printf '%s\\n' localhost localhost",
    "nvidia-smi": "echo 8.9",
}


def submitted(
    script: str, folder: Path, programs: Mapping[str, str] = STANDINS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What Slurm would run, on the models of the example, exported and verified alone."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    shutil.copy(EXAMPLES / "make_models.py", folder)
    subprocess.run(
        [sys.executable, "make_models.py"], cwd=folder, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    (folder / "models/encoder.pt2").rename(folder / "encoder.pt2")
    shutil.rmtree(folder / "models")
    (folder / "fleet.toml").write_text('[targets.cpu]\nruntime = "onnxruntime"\n[models.net]\nsource = "encoder.pt2"\n')
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables["PYTHONPATH"] = str(ROOT)
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_CPUS_PER_TASK": "1", **variables}
    (folder / "script").write_text((EXAMPLES / "slurm" / script).read_text())
    with (folder / "log").open("w") as log:  # no pipe: who inherits it would be waited for
        done = subprocess.run(
            ["bash", "script"], cwd=folder, env=os.environ | slurm | {"PATH": path}, stdout=log, stderr=log, timeout=500
        )
    return subprocess.CompletedProcess(done.args, done.returncode, (folder / "log").read_text())


@pytest.mark.slow
def test_slurm_runs_the_fleet_on_one_node(tmp_path: Path) -> None:
    done = submitted("one_node.sbatch", tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 cell: 1 verified; 2 of 2 steps run" in done.stdout
    assert (tmp_path / "fleet.html").is_file()
    assert (tmp_path / "fleet.md").is_file()
    assert (tmp_path / "store/runs").is_dir()


@pytest.mark.clusters
def test_slurm_runs_the_fleet_on_nodes_of_ray(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    done = submitted("ray.sbatch", tmp_path, **variables)
    assert done.returncode == 0, done.stdout
    assert "1 cell: 1 verified; 2 of 2 steps run" in done.stdout
    assert (tmp_path / "fleet.md").is_file()


def test_slurm_ends_the_job_where_ray_does_not_start(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    failing = 'test "$1" = health-check && sleep 1; exit 1'
    done = submitted("ray.sbatch", tmp_path, {**STANDINS, "ray": failing}, **variables)
    assert done.returncode == 1
    assert "error: Ray did not start on localhost" in done.stdout
