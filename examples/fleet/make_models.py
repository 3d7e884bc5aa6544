"""Write the two models of fleet.toml: ``python make_models.py``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import GELU, BatchNorm1d, LayerNorm, Linear, ReLU, Sequential

NETS = {
    "encoder": lambda: Sequential(Linear(16, 24), LayerNorm(24), GELU(), Linear(24, 4)),
    "ranker": lambda: Sequential(Linear(16, 24), BatchNorm1d(24), ReLU(), Linear(24, 4)),
}


def main() -> None:
    folder = Path(__file__).resolve().parent / "models"
    folder.mkdir(exist_ok=True)
    shapes = ({0: torch.export.Dim("batch", min=1, max=32)},)
    torch.manual_seed(0)
    for name, net in NETS.items():
        program = torch.export.export(net().eval(), (torch.randn(8, 16),), dynamic_shapes=shapes)
        torch.export.save(program, folder / f"{name}.pt2")


if __name__ == "__main__":
    main()
