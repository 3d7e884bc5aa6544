"""``verify``, ``bisect``, ``bench`` and ``run`` in onnxruntime-web: right files pass, wrong files fail, and what only
WebAssembly computes otherwise is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.environment import NODE, WEB
from tests.quantized_files import conv, quantized
from tests.support import parsed

from .test_runtime_blame import IDS, Normed

pytestmark = pytest.mark.usefixtures("web")


class Truncated(nn.Module):
    """A conversion of numbers beyond int32, which ONNX does not define: WebAssembly gives the largest int32, a
    processor of x86-64 the smallest one.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids.float() * 1e10).to(torch.int32).float() + 1


@pytest.fixture
def normed(tmp_path: Path) -> Path:
    normdeploy.export(Normed().eval(), (torch.randn(8, 16),), output=tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.fixture
def truncated(tmp_path: Path) -> Path:
    normdeploy.export(Truncated().eval(), (IDS,), output=tmp_path / "net.onnx", inputs=["ids:int64[4,8]{1:50}"])
    return tmp_path / "net.onnx"


def test_verify_compares_also_on_nan_and_infinities(normed: Path) -> None:
    verdict = normdeploy.verify(Normed().eval(), normed, (torch.randn(8, 16),), runners=WEB)
    assert verdict
    own = [r for r in verdict.results if r.runtime == WEB]
    assert {r.output for r in own} == {"output_0", "output_1"}
    assert "was not compared on NaN" not in "".join(verdict.notes)


def test_verify_fails_a_wrong_file_in_web_too(normed: Path) -> None:
    proto = onnx.load(normed)
    weight = next(t for t in proto.graph.initializer if list(t.dims) == [4])
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + 0.01, weight.name))
    onnx.save(proto, normed)
    verdict = normdeploy.verify(Normed().eval(), normed, (torch.randn(8, 16),), runners=WEB, seeds=1)
    failed = {r.runtime: r for r in verdict.results if not r}
    assert {"onnxruntime (optimizer off)", WEB} <= set(failed)
    assert "is the cause" not in failed[WEB].reason


def test_verify_names_web_where_only_web_differs(truncated: Path) -> None:
    verdict = normdeploy.verify(Truncated().eval(), truncated, (IDS,), runners=WEB, seeds=1)
    (failed,) = (r for r in verdict.results if not r)
    assert failed.runtime == WEB
    assert f"{WEB} is the cause, not the file" in failed.reason


def test_verify_does_not_judge_a_difference_that_the_reference_file_shares(truncated: Path) -> None:
    verdict = normdeploy.verify(truncated, truncated, runners=WEB, seeds=1, prove=False)
    assert all(verdict.results)
    assert "not judged: the runtime is wrong, not the file" in "".join(map(str, verdict.not_run))


def test_bisect_finds_the_nodes_and_its_script_shows_the_difference(truncated: Path, tmp_path: Path) -> None:
    found = normdeploy.bisect(Truncated().eval(), truncated, (IDS,), runners=WEB, seeds=1)
    fault = found.faults[0]
    assert (fault.runtime, fault.wrong, fault.kind) == (WEB, "runtime", "overflow")
    assert fault.nodes[0].startswith("Cast")
    assert "into int32, and ONNX does not define the result" in fault.cause
    folder = found.write(tmp_path / "smallest")
    assert folder is not None
    # The script needs onnxruntime-web in the working folder, or in NODE_PATH as here.
    shown = subprocess.run([sys.executable, folder / "reproduce.py"], capture_output=True, text=True)
    assert shown.returncode == 1, shown.stderr
    assert "error" in shown.stdout
    check = json.loads((folder / "check.json").read_text())
    (folder / "check.json").write_text(json.dumps(check | {"allowed": 1e11}))
    assert subprocess.run([sys.executable, folder / "reproduce.py"]).returncode == 0


def test_bench_times_it_and_names_its_versions(normed: Path) -> None:
    race = normdeploy.bench(normed, rounds=1, runners=WEB)
    assert [e.runtime for e in race.entries] == ["onnxruntime CPU", WEB]
    assert race
    assert {NODE, WEB} <= set(race.machine.versions)


def test_run_and_open_runner_give_the_numbers_of_onnxruntime(normed: Path) -> None:
    ours = normdeploy.run(normed, runner=WEB)
    theirs = normdeploy.run(normed)
    assert ours.runner == f"{WEB} (net.onnx)"
    for name, value in theirs.arrays.items():
        np.testing.assert_allclose(ours.arrays[name], value, rtol=0, atol=1e-6)
    with normdeploy.open_runner(normed, runner=WEB) as runner:
        assert [spec.name for spec in runner.outputs] == list(theirs.arrays)
    with pytest.raises(normdeploy.errors.InputError, match=f"'{WEB}'; omit them"):
        normdeploy.open_runner(normed, runner=WEB, provider="cpu")


def test_int8_files_pass(tmp_path: Path) -> None:
    model = conv()
    path = quantized(model, tmp_path)
    assert normdeploy.verify(model, path, runners=WEB, seeds=1)


def test_a_file_that_web_does_not_take_is_not_run(tmp_path: Path) -> None:
    text = "g (int8[N] x, bool[N] c) => (int8[N] y) { y = Where(c, x, x) }"
    onnx.save(parsed(text), tmp_path / "net.onnx")
    verdict = normdeploy.verify(tmp_path / "net.onnx", tmp_path / "net.onnx", runners=WEB, seeds=1, prove=False)
    (missing,) = (miss for miss in verdict.not_run if miss.runtime == WEB)
    assert "Could not find an implementation for Where" in missing.reason
    assert "except for net.onnx in onnxruntime-web, which was not run," in verdict.summarize()
