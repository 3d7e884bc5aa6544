"""Every verb on broken, hostile and huge files: one message, exit code 1, nothing half-written, memory bounded.

Each run is a process of its own with a limit on its memory, forked from one that has everything imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy.errors import GraphError
from normdeploy.evaluate import evaluator
from normdeploy.graphs.own_op_functions import own_op_body
from normdeploy.storage.onnx_files import load_onnx
from tests.forked import ROOT, Done, Server, server
from tests.verbs.inspect.test_norm_census import BIASED, model

GB = 1 << 30
BY_HAND = f"{BIASED} e = Add(v, eps) r = Sqrt(e) y = Div(c, r)"
VERBS = {
    "inspect": ["inspect", "m.onnx", "-q"],
    "check": ["check", "m.onnx", "-q"],
    "optimize": ["optimize", "m.onnx", "-o", "out", "-q"],
    "optimize --precision": ["optimize", "m.onnx", "-o", "out", "-q", "--precision", "fp16"],
    "build": ["build", "m.onnx", "-o", "out", "-q"],
    "run": ["run", "m.onnx", "-o", "out", "-q"],
}


@pytest.fixture(scope="module")
def runs() -> Iterator[Server]:
    with server() as warm:
        yield warm


def by_hand(**given: object) -> onnx.ModelProto:
    return model(BY_HAND, **{"opset": 21} | given)  # type: ignore[arg-type]


def asked(runs: Server, folder: Path, verb: str, proto: onnx.ModelProto | bytes) -> Done:
    """One verb on one file, in at most 3 GB more than the imports take; what it printed and left is looked at."""
    (folder / "m.onnx").write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    done = runs.run(*VERBS[verb], cwd=folder, memory=3 * GB, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    # `check` exits with 2 if it could not judge the file.
    assert done.returncode in ((0, 1, 2) if verb == "check" else (0, 1)), done
    assert not re.search("[\x00\x07\x1b]", done.stdout + done.stderr)
    assert done.memory < GB
    left = {entry.name for entry in folder.iterdir()} - {"m.onnx"}
    if done.returncode:
        assert re.search("^error: ", done.stderr, re.MULTILINE) or verb == "check"
        assert left <= {"out.log"}  # of a build
    return done


def refused(runs: Server, folder: Path, verb: str, proto: onnx.ModelProto | bytes, said: str) -> None:
    done = asked(runs, folder, verb, proto)
    assert done.returncode == (2 if verb == "check" else 1)
    assert re.search(said, done.stderr), done.stderr


# ------------------------------------------------------------------ files that are refused


def recursive(*calls: tuple[str, str]) -> onnx.ModelProto:
    """``calls``: functions, each with the one that it calls."""
    proto = model("y = custom.f(x)", opset=21)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("custom", 1)]
    for name, called in calls:
        node = helper.make_node(called, ["a"], ["b"], domain="custom")
        proto.functions.append(helper.make_function("custom", name, ["a"], ["b"], [node], opsets))
    return proto


def function_bomb() -> onnx.ModelProto:
    """2**40 nodes in 40 functions."""
    proto = model("y = custom.f39(x)", opset=21)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("custom", 1)]
    for i in range(40):
        twice = [(f"f{i - 1}", "custom")] * 2 if i else [("Neg", "")] * 2
        nodes = [helper.make_node(op, [a], [b], domain=d) for (op, d), a, b in zip(twice, "at", "tb", strict=True)]
        proto.functions.append(helper.make_function("custom", f"f{i}", ["a"], ["b"], nodes, opsets))
    return proto


def rounds(out: str, of: str, level: int, after: str, inside: str) -> str:
    """A Loop of ``count`` rounds, or until ``after`` says otherwise; its body makes d, followed by the level, from
    g."""
    carried = f"(int64 i{level}, bool before{level}, float[n,m] g{level}) => (bool after{level}, float[n,m] d{level})"
    return f"{out} = Loop(count, yes, {of}) <body = body{level} {carried} {{ {after} {inside} }}>"


def loop(count: int, after: str = "after0 = Identity(before0)", inside: str = "d0 = Neg(g0)") -> onnx.ModelProto:
    held = f", int64 count = {{{count}}}, bool yes = {{1}}, float bound = {{9}}"
    return model(rounds("y", "x", 0, after, inside), opset=21, held=held)


UNTIL = "sum = ReduceSum<keepdims = 0>(g0) after0 = Less(sum, bound)"
INNER = rounds("d0", "g0", 1, "after1 = Identity(before1)", "d1 = Neg(g1)")


def with_weight(tensor: TensorProto) -> onnx.ModelProto:
    proto = by_hand()
    proto.graph.initializer.append(tensor)
    proto.graph.node.append(helper.make_node("Mul", ["y", tensor.name], ["z"]))
    return proto


def raw(**fields: object) -> TensorProto:
    return TensorProto(name="h", **fields)  # type: ignore[arg-type]


def typed(elem_type: int) -> onnx.ModelProto:
    return with_change(lambda proto: setattr(proto.graph.input[0].type.tensor_type, "elem_type", elem_type))


def with_change(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    proto = by_hand()
    change(proto)
    return proto


def sparse() -> onnx.ModelProto:
    proto = by_hand()
    held = proto.graph.sparse_initializer.add(dims=[2**40])
    held.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "h"))
    held.indices.CopyFrom(numpy_helper.from_array(np.array([2**39]), "i"))
    proto.graph.node.append(helper.make_node("Mul", ["y", "h"], ["z"]))
    return proto


def segment() -> TensorProto:
    tensor = numpy_helper.from_array(np.ones(8, np.float32), "h")
    tensor.segment.end = 2**60
    return tensor


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto | bytes], str]] = {
    "empty": (lambda: b"", "contains no graph"),
    "cut short": (lambda: by_hand().SerializeToString()[:200], "is truncated"),
    "of another kind": (lambda: b"PK\x03\x04" + bytes(100), "not an ONNX file"),
    "nested without end": (lambda: b"\x08\x08" + b"\x3b" * 200_000, "not an ONNX file"),
    "a function that calls itself": (lambda: recursive(("f", "f")), "'f' calls itself"),
    "functions that call each other": (lambda: recursive(("f", "g"), ("g", "f")), "calls itself through"),
    "a function bomb": (function_bomb, "functions expand to"),
    "an endless Loop": (lambda: loop(2**63 - 1), "Loop 'y' runs endlessly"),
    "a Loop of too many rounds": (lambda: loop(2**40), "Loop 'y' runs 1099511627776 iterations.*at most 4294967296"),
    "Loops inside Loops": (lambda: loop(2**20, inside=INNER), "Loop 'd0' runs 1099511627776 iterations"),
    "a circle": (lambda: with_change(lambda p: p.graph.node[0].input.__setitem__(0, "y")), "cycle"),
    "names that are no text": (lambda: by_hand().SerializeToString().replace(b"Sqrt", b"S\xff\xfet"), "not UTF-8"),
    "a declared weight that is not there": (
        lambda: with_weight(raw(data_type=1, dims=[2**40])),
        "needs 1099511627776 .* holds 0",
    ),
    "sizes whose product overflows": (
        lambda: with_weight(raw(data_type=1, dims=[2**62, 4], raw_data=b"\0" * 16)),
        "holds 16",
    ),
    "a negative size": (lambda: with_weight(raw(data_type=1, dims=[-4, -4], raw_data=b"\0" * 64)), "can't be negative"),
    "a weight of too many bytes": (
        lambda: with_weight(raw(data_type=1, dims=[8], raw_data=b"\0" * 64)),
        "needs 32 bytes but holds 64",
    ),
    "a weight of an unknown type": (lambda: with_weight(raw(data_type=99, dims=[1], raw_data=b"\0")), "type 99"),
    "a segment": (lambda: with_weight(segment()), "one segment"),
    "a sparse giant": (sparse, "sparse weight 'h'"),
    "an input of an unknown type": (lambda: typed(999), "type 999"),
    "a thousand dims": (lambda: by_hand(x=",".join(["1"] * 1000)), "1000 dims"),
    "two opsets": (lambda: with_change(lambda p: p.opset_import.add(domain="ai.onnx", version=7)), "two opsets"),
    "a node that reads nothing": (
        lambda: with_change(lambda p: p.graph.node[1].input.__setitem__(0, "nowhere")),
        "specification",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_broken_file_is_refused(runs: Server, tmp_path: Path, what: str) -> None:
    make, said = REFUSED[what]
    refused(runs, tmp_path, "optimize", make(), said)


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("optimize", "run")])
@pytest.mark.parametrize(
    "what", ["a function bomb", "names that are no text", "a declared weight that is not there", "a circle"]
)
def test_every_verb_reads_with_the_same_reader(runs: Server, tmp_path: Path, verb: str, what: str) -> None:
    make, said = REFUSED[what]
    refused(runs, tmp_path, verb, make(), said)


@pytest.mark.parametrize("verb", ["run", "bench"])
@pytest.mark.parametrize("what", ["a function bomb", "an endless Loop"])
def test_what_has_no_end_is_not_given_to_onnxruntime(runs: Server, tmp_path: Path, verb: str, what: str) -> None:
    make, said = REFUSED[what]
    (tmp_path / "m.onnx").write_bytes(make().SerializeToString())  # type: ignore[union-attr]
    done = runs.run(verb, "m.onnx", "-q", *(["-o", "out"] if verb == "run" else []), cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert re.search(f"error: .*{said}", done.stderr), done


# ------------------------------------------------------------------ files that can be read

NAMES = "/a/b\n\x1b[31m\x07\"'<ü>‮{}"
HUGE = ", int64[1] many = {1099511627776}, int64 last = {1099511627776}, int64 first = {0}, int64 step = {1}"


def odd_names() -> onnx.ModelProto:
    proto = by_hand()
    renamed = {o: NAMES.format(o) for n in proto.graph.node for o in n.output if o != "y"}
    for node in proto.graph.node:
        node.name = NAMES.format(node.op_type)
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    return proto


def filled(value: float) -> onnx.ModelProto:
    kernel = ", float[8,8,3] kernel = {" + ", ".join(["0.5"] * 192) + "}"
    proto = model("k = Conv(x, kernel) y = BatchNormalization(k, w, b, b, w)", x="4,8,6", opset=21, held=kernel)
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(np.full(list(tensor.dims), value, np.float32), tensor.name))
    return proto


def scaled(body: str) -> onnx.ModelProto:
    """A norm by hand of x · k, where k is a constant that ``body`` makes."""
    return model(f"{body} xk = Mul(x, k) {BY_HAND.replace('(x,', '(xk,')}", opset=21, held=HUGE)


def state(shape: list[int]) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, shape))

    return change


def sequence(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.CopyFrom(
        helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [None]))
    )


READ: dict[str, Callable[[], onnx.ModelProto]] = {
    "odd names": odd_names,
    "NaN weights": lambda: filled(float("nan")),
    "Inf weights": lambda: filled(float("inf")),
    "an input without end": lambda: with_change(state([2**40, 8])),
    "an input whose size overflows": lambda: with_change(state([2**62, 2**62, 8])),
    "an input of a negative size": lambda: with_change(state([-5, 8])),
    "an input of size 0": lambda: with_change(state([0, 8])),
    "a stated shape that is wrong": lambda: with_change(
        lambda p: p.graph.value_info.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, [2**40]))
    ),
    "a sequence as input": lambda: with_change(sequence),
    "an endless Range": lambda: scaled("i = Range(first, last, step) k = Cast<to = 1>(i)"),
    "an endless ConstantOfShape": lambda: scaled("k = ConstantOfShape(many)"),
    "an endless Expand": lambda: scaled("k = Expand(one, many)"),
    "an endless Tile": lambda: scaled("k = Tile(b, many)"),
    "a Loop that its data end": lambda: loop(2**63 - 1, UNTIL),
    "a Loop of few rounds": lambda: loop(5),
    "an Unsqueeze far away": lambda: scaled("k = Unsqueeze(b, many)"),
}


def branching() -> onnx.ModelProto:
    """An endless Loop in the branch of an If, which may never be taken."""
    inside = rounds("a", "x", 0, "after0 = Identity(before0)", "d0 = Neg(g0)")
    body = f"""sum = ReduceSum<keepdims = 0>(x) low = Less(sum, bound) y = If(low) <
        then_branch = t () => (float[n,m] a) {{ {inside} }}, else_branch = e () => (float[n,m] other) {{
        other = Neg(x) }}>"""
    return model(body, opset=21, held=f", int64 count = {{{2**63 - 1}}}, bool yes = {{1}}, float bound = {{9}}")


def counted() -> onnx.ModelProto:
    """A Loop of as many rounds as its caller says, with a number without end where the caller says nothing."""
    proto = loop(2**63 - 1)
    proto.graph.input.append(helper.make_tensor_value_info("count", TensorProto.INT64, []))
    return proto


@pytest.mark.parametrize("make", [branching, counted])
def test_a_loop_that_may_end_is_read(make: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    onnx.save(make(), tmp_path / "m.onnx")
    assert load_onnx(tmp_path / "m.onnx") == make()


def test_a_complex_weight_is_two_numbers_for_each_element(tmp_path: Path) -> None:
    proto = by_hand()
    proto.graph.initializer.append(helper.make_tensor("h", TensorProto.COMPLEX64, [2], [1 + 2j, 3j]))
    assert list(proto.graph.initializer[-1].float_data) == [1, 2, 0, 3]
    onnx.save(proto, tmp_path / "m.onnx")
    load_onnx(tmp_path / "m.onnx")
    del proto.graph.initializer[-1].float_data[-1]
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match=r"'h' of shape \[2\] needs 4 numbers but holds 3"):
        load_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("what", READ)
def test_what_can_be_read_takes_no_more_memory_for_it(runs: Server, tmp_path: Path, what: str) -> None:
    done = asked(runs, tmp_path, "optimize", READ[what]())
    if done.returncode == 0:
        load_onnx(tmp_path / "out")


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("inspect", "odd names"),
        ("check", "odd names"),
        ("build", "odd names"),
        ("run", "an input without end"),
        ("run", "an input of a negative size"),
        ("optimize --precision", "an input without end"),
        ("optimize --precision", "an input of a negative size"),
        ("optimize --precision", "a sequence as input"),
        ("optimize --precision", "NaN weights"),
    ],
)
def test_other_verbs_on_what_can_be_read(runs: Server, tmp_path: Path, verb: str, what: str) -> None:
    asked(runs, tmp_path, verb, READ[what]())


def long_sum(count: int) -> onnx.ModelProto:
    """A norm whose variance is a Sum with ``count`` small constants."""
    proto = by_hand()
    add = next(n for n in proto.graph.node if n.op_type == "Add")
    small = [numpy_helper.from_array(np.array(1e-9, np.float32), f"e{i}") for i in range(count)]
    proto.graph.initializer.extend(small)
    add.op_type = "Sum"
    add.input.extend(t.name for t in small)
    return proto


def roots_in_a_row(count: int) -> onnx.ModelProto:
    """A norm with ``count`` roots where one belongs."""
    proto = by_hand()
    place = next(i for i, n in enumerate(proto.graph.node) if n.op_type == "Sqrt")
    roots = [
        helper.make_node("Sqrt", [f"r{i}" if i else "e"], [f"r{i + 1}" if i + 1 < count else "r"]) for i in range(count)
    ]
    nodes = [*proto.graph.node[:place], *roots, *proto.graph.node[place + 1 :]]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


@pytest.mark.parametrize("verb", ["optimize", "inspect"])
@pytest.mark.parametrize("make", [long_sum, roots_in_a_row])
def test_twenty_thousand_of_a_kind_take_no_minutes(
    runs: Server, tmp_path: Path, verb: str, make: Callable[[int], onnx.ModelProto]
) -> None:
    """Measured: 2 to 7 s of the processor's time. They were 40 s with every input compared with every other, and 20
    minutes with 96 · 48 readings of each root."""
    done = asked(runs, tmp_path, verb, make(20_000))
    assert done.returncode == 0
    assert done.processor < 30


def windows(op: str, stride: int, dilation: int) -> onnx.ModelProto:
    """A batch norm to be folded into a convolution, at any size."""
    held = ", ".join(["0.5"] * 144)
    attributes = f"strides = [{stride}, {stride}], dilations = [{dilation}, {dilation}]"
    text = f"""<ir_version: 9, opset_import: ["": 21]> net (float[n,4,h,w] x) => (float[n,4,a,b] y)
        <float[4,4,3,3] kernel = {{{held}}}, float[4] g = {{1,2,3,4}}> {{
            c = {op}<{attributes}>(x, kernel) y = BatchNormalization(c, g, g, g, g) }}"""
    return onnx.parser.parse_model(text)


def test_a_transposed_convolution_of_long_strides_is_not_written_out(runs: Server, tmp_path: Path) -> None:
    """Two places become 9003 in each dim: 5.2 GB in float64. `asked` bounds the memory by 1 GB."""
    done = asked(runs, tmp_path, "optimize", windows("ConvTranspose", 9000, 1))
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("ConvTranspose", {"strides": [9000, 9000]}),
        ("ConvTranspose", {"dilations": [5000, 5000]}),
        ("Conv", {"pads": [5000, 5000, 5000, 5000]}),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [5000, 5000, 5000, 5000]}),
    ],
)
def test_what_an_attribute_makes_large_is_not_evaluated(op: str, attributes: dict[str, list[int]]) -> None:
    """1e8 elements of 4 or 9: in float64 0.8 GB for each channel and sample."""
    given = [np.ones((1, 1, 2, 2)), np.ones((1, 1, 3, 3))][: 1 if op == "AveragePool" else 2]
    with pytest.raises(evaluator.UnsupportedOp, match=r"creates \d+ elements; the limit is 67108864"):
        evaluator.evaluate_node(op, given, attributes, opset=17)


def test_a_convolution_of_wide_windows_is_not_written_out(runs: Server, tmp_path: Path) -> None:
    """Three taps 30,000 apart in each dim, and a second window 20,000 behind: 596 GB in float64 for one input. The rest
    of the file can be read, so this is a fold that is refused, or proved at another size, and no error."""
    done = asked(runs, tmp_path, "optimize", windows("Conv", 20_000, 30_000))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("holds", [True, False], ids=["with a function", "without"])
def test_axes_that_are_strings(runs: Server, tmp_path: Path, op: str, holds: bool) -> None:
    """No checker looks at the attributes of our domain."""
    proto = by_hand()
    given = ["x", "w", "b"][: 2 if op == "RMSNorm" else 3]
    attributes = {"axes": ["last"], "epsilon": 1e-5, "stash_type": 1} | ({} if op == "RMSNorm" else {"ddof": 0})
    del proto.graph.node[:]
    proto.graph.node.append(helper.make_node(op, given, ["y"], domain="normdeploy", **attributes))
    proto.opset_import.add(domain="normdeploy", version=1)
    if holds:
        proto.functions.append(own_op_body(op, 21))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    for verb in ("inspect", "optimize"):
        done = runs.run(*VERBS[verb], "--fuse", "portable", cwd=tmp_path, timeout=120)
        assert "Traceback" not in done.stderr
        # Without a function no runtime knows the op.
        assert done.returncode == int(holds or verb == "optimize")
        words = "node .*lacks the attribute 'axes' as INTS" if holds else f"has no kernel for normdeploy.{op}"
        assert not done.returncode or re.search(f"error: .*{words}", done.stderr), done.stderr


WIDE = {
    "input": f"net (float[4,{2**27}] x) => (float[4,{2**27}] y) {{ y = Softplus(x) }}",
    "inner tensor": (
        f"""net (float[1] x) => (float[{2**29}] y) <int64[1] many = {{{2**29}}}> {{
        wide = Expand(x, many) y = Softplus(wide) }}"""
    ),
}


@pytest.mark.parametrize("what", WIDE)
def test_no_large_samples_are_made_that_nobody_asked_for(runs: Server, tmp_path: Path, what: str) -> None:
    """2**29 elements are 2 GB, and calibration made three samples of them: 12.7 GB and 52 s."""
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 21]> {WIDE[what]}')
    done = asked(runs, tmp_path, "optimize --precision", proto)
    assert done.returncode == 0


def test_external_data_without_end(runs: Server, tmp_path: Path) -> None:
    tensor = TensorProto(name="h", data_type=TensorProto.FLOAT, dims=[2**40], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="big")
    with open(tmp_path / "big", "wb") as file:
        try:
            os.truncate(file.fileno(), 2**42)  # a hole: it takes no room
        except OSError:
            pytest.skip("the file system holds no file of 4 TB")
    (tmp_path / "m.onnx").write_bytes(with_weight(tensor).SerializeToString())
    done = runs.run(*VERBS["optimize"], cwd=tmp_path, memory=3 * GB)
    assert (done.returncode, "do not fit into memory" in done.stderr) == (1, True), done.stderr


# ------------------------------------------------------------------ full disks, and two at once


@pytest.mark.parametrize("verb", ["optimize", "run", "check"])
def test_a_full_disk_is_said_and_the_old_output_stays(runs: Server, tmp_path: Path, verb: str) -> None:
    proto = with_weight(numpy_helper.from_array(np.ones((64, 8), np.float32), "h"))
    proto.graph.output.append(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, (64, 8))
    )  # else nobody needs the weight
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=np.ones((64, 8), np.float32))
    (tmp_path / "out").write_bytes(b"old")
    arguments = {"run": ["--inputs", "in.npz"], "check": ["--format", "sarif", "-o", "out"]}.get(verb, [])
    before = {entry.name for entry in tmp_path.iterdir()}
    done = runs.run(*VERBS[verb], *arguments, cwd=tmp_path, file_size=1500)
    # `check` exits with 1 only for a finding.
    assert done.returncode == (2 if verb == "check" else 1)
    assert re.match(r"error: can't write 'out': .* An existing file is unchanged", done.stderr), done.stderr
    assert (tmp_path / "out").read_bytes() == b"old"
    assert {entry.name for entry in tmp_path.iterdir()} == before


def test_two_runs_into_one_file_do_no_harm(tmp_path: Path) -> None:
    """Several at once, each with another weight: at the end stands the whole output of one of them, and nothing beside
    it."""
    command = (
        "import sys\nfrom normdeploy.storage.onnx_files import load_onnx, save_onnx\n"
        "m = load_onnx(sys.argv[1])\nfor _ in range(20):\n    save_onnx(m, 'out', external=True)"
    )
    wanted = []
    for value in range(3):
        weight = numpy_helper.from_array(np.full(4096, value, np.float32), "h")
        onnx.save(with_weight(weight), tmp_path / f"{value}.onnx")
        wanted.append(float(value))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", command, f"{v}.onnx"], cwd=tmp_path, env=environment) for v in range(3)
    ]
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / "out").exists():
            assert whole(tmp_path / "out") in wanted
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert whole(tmp_path / "out") in wanted
    left = {entry.name for entry in tmp_path.iterdir()} - {"out", "0.onnx", "1.onnx", "2.onnx"}
    assert len(left) == 1  # its weights


def whole(path: Path) -> float:
    """The one number that the weight holds. Where the model is replaced between its reading and that of its weights,
    another try is due."""
    for attempt in range(50):
        try:
            proto = load_onnx(path)
            break
        except Exception:
            if attempt == 49:
                raise
    (value,) = set(numpy_helper.to_array(next(t for t in proto.graph.initializer if t.name == "h")).tolist())
    return float(value)
