"""A model of another project, and its export by torch."""

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.linear(x))


def export(net, x):
    batch = torch.export.Dim("batch", min=1, max=16)
    return torch.onnx.export(net, (x,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
