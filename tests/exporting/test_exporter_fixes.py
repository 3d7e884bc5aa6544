"""What torch's raw export writes that onnxruntime does not run leaves this project's exporter as a file that runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normdeploy.exporting.exporter import MODULE, export_to_proto
from normdeploy.loading import from_module
from tests.support import run_onnxruntime


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d], ids=lambda kind: kind.__name__)
def test_a_convolution_without_bias_runs(kind: type[nn.Module], groups: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(kind(4, 8, 3, padding=1, groups=groups, bias=False)).eval()
    x = torch.randn(2, 4, *[5] * (3 if "3d" in kind.__name__ else int(kind.__name__[-2])))
    proto = export_to_proto(from_module(net, (x,), inputs=[f"x{list(x.shape)}".replace(" ", "")]))
    (conv,) = (n for n in proto.graph.node if n.op_type.startswith("Conv"))
    assert list(conv.input) == ["x", "0.weight"]  # no bias of zeros either
    with torch.no_grad():
        np.testing.assert_allclose(run_onnxruntime(proto, {"x": x.numpy()})[0], net(x).numpy(), atol=1e-5)


class Attended(nn.Module):
    def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, 2 * k, attn_mask=mask)


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize(
    ("shape", "spread"),
    [((2, 1, 1, 10), True), ((1, 6, 1), True), ((1, 10), True), ((2, 1, 6, 10), False), ((6, 10), False)],
)
def test_attention_takes_a_mask_that_broadcasts(shape: tuple[int, ...], spread: bool, opset: int) -> None:
    torch.manual_seed(0)
    net, q, k, mask = Attended().eval(), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 10, 8), torch.randn(shape)
    sizes = ",".join({6: "s", 10: "t"}.get(n, str(n)) for n in shape)
    inputs = ["q[2,4,s,8]", "k[2,4,t,8]", f"mask[{sizes}]"]
    proto = export_to_proto(from_module(net, (q, k, mask), inputs=inputs, dims=["s=2:6:16", "t=2:10:16"]), opset=opset)
    ops = [n.op_type for n in proto.graph.node]
    assert "Attention" in ops
    assert ("Expand" in ops) is spread
    assert (
        len(
            {
                next((p.value for p in n.metadata_props if p.key == MODULE), "")
                for n in proto.graph.node
                if n.op_type != "Constant"
            }
        )
        == 1
    )
    found = run_onnxruntime(proto, {"q": q.numpy(), "k": k.numpy(), "mask": mask.numpy()})[0]
    np.testing.assert_allclose(found, net(q, k, mask).numpy(), atol=1e-5)


class Bounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(x, min=0.0)


def test_a_clamp_from_zero_keeps_infinities() -> None:
    """onnxruntime's Clip makes 3.4e38 of Inf where the other bound is left out."""
    x = torch.tensor([np.nan, np.inf, -np.inf, -1e30, 0.0, 1e30])
    proto = export_to_proto(from_module(Bounded().eval(), (x,)))
    np.testing.assert_array_equal(run_onnxruntime(proto, {"x": x.numpy()})[0], Bounded()(x).numpy())


def test_a_clamp_from_both_ends_keeps_both() -> None:
    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(torch.zeros(()), torch.full((), 1.5)) + x.clamp(0.0, 1.5)

    x = torch.tensor([-1.0, 0.5, 3.0])
    proto = export_to_proto(from_module(Both().eval(), (x,)))
    np.testing.assert_array_equal(run_onnxruntime(proto, {"x": x.numpy()})[0], [0, 1, 3])
