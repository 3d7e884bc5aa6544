"""Tests of the project: two right files, and three planted faults."""

import numpy as np
import onnx
import onnx.parser
import parity_project
import pytest
import torch

from normdeploy.testing import assert_norms_fused

pytestmark = pytest.mark.normdeploy(seeds=1, max_seconds=10)
X = torch.ones(3, 8)


@pytest.fixture(scope="module")
def net():
    return parity_project.Net().eval()


@pytest.fixture(scope="module")
def program(net):
    return parity_project.export(net, X)


def test_right_file(net, program, normdeploy_parity):
    normdeploy_parity.assert_parity(net, program, X)


def test_norms(program):
    assert_norms_fused(program, kinds="LayerNorm")


def test_wrong_epsilon(net, program, normdeploy_parity):
    proto = program.model_proto
    (epsilon,) = [a for n in proto.graph.node for a in n.attribute if a.name == "epsilon"]
    epsilon.f = 1e-2
    normdeploy_parity.assert_parity(net, proto, X)


def test_transposed_weight(net, program, normdeploy_parity):
    proto = program.model_proto
    (weight,) = [t for t in proto.graph.initializer if t.name == "linear.weight"]
    turned = np.ascontiguousarray(onnx.numpy_helper.to_array(weight).T)
    weight.CopyFrom(onnx.numpy_helper.from_array(turned, weight.name))
    normdeploy_parity.assert_parity(net, proto, X)


def test_wrong_at_other_batches(net, program, normdeploy_parity):
    proto = program.model_proto
    output = proto.graph.output[0].name
    proto.graph.node[-1].output[0] = "right"
    added = onnx.parser.parse_graph(
        f"g (float[n,8] right) => (float[n,8] {output})"
        " { whole = Shape <start = 0, end = 1> (right) three = Constant <value = int64[1] {3}> ()"
        f" off = Sub (whole, three) size = Abs (off) far = Cast <to = 1> (size) {output} = Add (right, far) }}"
    )
    proto.graph.node.extend(added.node)
    normdeploy_parity.assert_parity(net, proto, X)
