"""Keys of steps depend on the versions that a step can use."""

from __future__ import annotations

from normdeploy.environment import NODE, WEB
from normdeploy.fleet.job_steps import JobStep
from normdeploy.fleet.step_keys import FleetMachine, step_key


def test_versions_of_node_count_only_for_a_step_that_runs_onnxruntime_web() -> None:
    versions = ({}, {NODE: "20", WEB: "1.29"}, {NODE: "20", WEB: "1.30"})
    machines = [FleetMachine({"cpu": "", "onnx": "1", **own}, "code", "installed") for own in versions]
    plain = JobStep("plain", ("verify", "a.pt2", "a.onnx"))
    web = JobStep("web", (*plain.argv, "--runner", WEB))
    assert len({step_key(plain, {}, machine)[0] for machine in machines}) == 1
    assert len({step_key(web, {}, machine)[0] for machine in machines}) == 3
