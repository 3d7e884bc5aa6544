"""The same model gives the same bytes, whoever exports it, wherever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

EXPORTS = """
import sys, torch, normdeploy
from torch import nn

torch.manual_seed(0)
folder = sys.argv[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(20, 16), nn.Embedding(32, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2,
        enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, ids, mask):
        x = self.table(ids) + self.positions(torch.arange(ids.shape[1]))
        x = self.layers(x, src_key_padding_mask=mask == 0)
        v = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
        x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(v + 1e-12)
        return {"tokens": x, "pooled": self.head(x.mean(1))}


picture = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(4, 8), nn.SiLU(), nn.InstanceNorm2d(8),
    nn.Conv2d(8, 4, 1)
)
text = ["ids:int64[batch,seq]{0:20}", "mask:int64[batch,seq]{0:2}"]
normdeploy.export(Net().eval(), inputs=text, output=f"{folder}/text.onnx")
normdeploy.export(picture.eval(), inputs=["x[2,3,8,8]"], fuse="portable", precision="fp16",
output=f"{folder}/half.onnx")
normdeploy.export("weights.pt", model="factory:Net", model_args={"size": 8}, inputs=["x[batch,8]"],
output=f"{folder}/own.onnx")
normdeploy.optimize(f"{folder}/own.onnx", f"{folder}/again.onnx", dims=["batch=1:2:3"])
"""


def test_two_users_write_the_same_bytes(project: Path, tmp_path: Path) -> None:
    """Two homes, state folders, working directories, users (by name), seeds of hashing, time zones, with a team's key
    and without."""
    (tmp_path / "key").write_text("7" * 64)
    (tmp_path / "key").chmod(0o600)
    runs = []
    for name, seed, zone, key in (("anna", "1", "UTC", ""), ("ben", "4242", "Asia/Tokyo", str(tmp_path / "key"))):
        home, work, out = tmp_path / name, tmp_path / f"work of {name}" / "deep", tmp_path / f"out of {name}"
        for folder in (home, work.parent, out):
            folder.mkdir()
        work.symlink_to(project) if name == "anna" else work.mkdir()
        for file in ("factory.py", "weights.pt"):
            if not (work / file).exists():
                (work / file).write_bytes((project / file).read_bytes())
        own = {
            "HOME": str(home),
            "USER": name,
            "LOGNAME": name,
            "PYTHONHASHSEED": seed,
            "TZ": zone,
            "NORMDEPLOY_KEY": key,
        }
        env = (
            {k: v for k, v in os.environ.items() if k != "XDG_STATE_HOME"}
            | own
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        )
        runs.append(
            (
                out,
                subprocess.Popen([sys.executable, "-c", EXPORTS, str(out)], cwd=work, env=env, stderr=subprocess.PIPE),
            )
        )
    for _, process in runs:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()
    (anna, _), (ben, _) = runs
    files = sorted(f.name for f in anna.glob("*.onnx"))
    assert files == ["again.onnx", "half.onnx", "own.onnx", "text.onnx"]
    assert [f for f in files if (anna / f).read_bytes() != (ben / f).read_bytes()] == []
    assert sorted(f.name for f in ben.glob("*.sig")) == ["again.onnx.sig", "own.onnx.sig"]
    assert not list(anna.glob("*.sig"))
