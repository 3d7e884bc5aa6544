"""The ONNX reader, and what is behind it, on files that were damaged at random: a user's error or a valid result,
nothing else.

NORMDEPLOY_FUZZ is how many files are made (a longer run: ``NORMDEPLOY_FUZZ=20000 pytest tests/test_fuzz.py``). A
failure prints the name and the seed of its file; ``damaged(name, seed)`` makes it again.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import helper, parser

from normdeploy.errors import NormdeployError
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.runtimes import kernel_support
from normdeploy.storage.onnx_files import load_onnx, save_onnx
from normdeploy.verbs.inspect import norm_census as census
from tests.verbs.inspect.test_norm_census import AFTER, BIASED, model

EXAMPLES = int(os.environ.get("NORMDEPLOY_FUZZ", "250"))
SECONDS = 60  # for one file; a norm takes a tenth of one
BY_HAND = f"{BIASED} {AFTER}"
KERNEL = ", float[8,8,1] kernel = {" + ", ".join(["0.5", "-1"] * 32) + "}"


def with_branches() -> onnx.ModelProto:
    proto = model("all = ReduceSum<keepdims = 0>(x) t = Cast<to = 9>(all) y = Identity(x)", opset=18)
    text = "g () => (float[b,8] o) {{ {} o = Identity({}) }}"
    branches = {"then_branch": text.format(BY_HAND.replace("y =", "z ="), "z"), "else_branch": text.format("", "x")}
    parsed = {name: parser.parse_graph(branch) for name, branch in branches.items()}
    proto.graph.node[2].CopyFrom(helper.make_node("If", ["t"], ["y"], "gate", **parsed))
    return proto


def with_function() -> onnx.ModelProto:
    proto = model("y = custom.norm(x, w)", opset=18)
    nodes = parser.parse_graph("g (x, w) => (y) { y = LayerNormalization<axis = -1>(x, w) }").node
    proto.functions.append(
        helper.make_function("custom", "norm", ["x", "w"], ["y"], nodes, [helper.make_opsetid("", 18)])
    )
    return proto


FILES: dict[str, Callable[[], onnx.ModelProto]] = {
    "layer norm by hand": lambda: model(BY_HAND, opset=21),
    "layer norm": lambda: model("y = LayerNormalization<axis = -1>(x, w, b)", opset=17),
    "group norm": lambda: model("y = GroupNormalization<num_groups = 2>(x, w, b)", opset=21, x="2,8,6"),
    "batch norm": lambda: model(
        "k = Conv(x, kernel) y = BatchNormalization(k, w, b, b, w)", opset=21, x="2,8,6", held=KERNEL
    ),
    "contrib": lambda: model("y = com.microsoft.SkipLayerNormalization(x, x, w, b)", opset=21, x="2,3,8"),
    "half": lambda: model(BY_HAND, opset=21, kind="float16"),
    "branches": with_branches,
    "function": with_function,
}

NUMBERS = (0, 1, -1, 2, 3, 7, 21, 127, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "y",
    "c",
    "v",
    "w",
    "b",
    "Sqrt",
    "If",
    "custom",
    "com.microsoft",
    "a/b\n\x1b[31m",
    "\0",
    "ü" * 50,
    "n" * 5000,
    "../../x",
)


def damaged(name: str, seed: int) -> bytes:
    """One of FILES with one to three fields of its messages changed, or, each third time, some of its bytes."""
    rng = random.Random(seed)
    proto = FILES[name]()
    if rng.randrange(3) == 0:
        data = bytearray(proto.SerializeToString())
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            change = rng.randrange(4)
            if change == 0:
                data[place] ^= 1 << rng.randrange(8)
            elif change == 1:
                data[place] = rng.randrange(256)
            elif change == 2:
                del data[place : place + rng.randint(1, 20)]
            else:
                data[place:place] = data[rng.randrange(len(data)) :][: rng.randint(1, 40)]
        return bytes(data)
    for _ in range(rng.randint(1, 3)):
        damage(rng, list(messages(proto)))
    return proto.SerializeToString()


def messages(proto: Message) -> Iterator[Any]:
    yield proto
    for field, value in proto.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                yield from messages(inner)


def damage(rng: random.Random, found: list[Any]) -> None:
    """Change a field of one of the messages: one that it has or, sometimes, any."""
    message = rng.choice(found)
    held = [field for field, _ in message.ListFields()]
    field = rng.choice(held if held and rng.randrange(4) else list(message.DESCRIPTOR.fields))
    value = getattr(message, field.name)
    if field.is_repeated:
        change = rng.randrange(4)
        if len(value) and change == 0:
            del value[rng.randrange(len(value))]
        elif len(value) and change == 1:
            value.append(value[rng.randrange(len(value))])
        elif len(value) and change == 2:
            place = rng.randrange(len(value))
            if field.type == field.TYPE_MESSAGE:
                value[place].CopyFrom(rng.choice([m for m in found if m.DESCRIPTOR is value[place].DESCRIPTOR]))
            else:
                value[place] = scalar(rng, field, value[place])
        elif field.type == field.TYPE_MESSAGE:
            value.add()
        else:
            value.append(scalar(rng, field, None))
    elif field.type == field.TYPE_MESSAGE:
        others = [m for m in found if m.DESCRIPTOR is field.message_type]
        if others and rng.randrange(2):
            value.CopyFrom(onnx_copy(rng.choice(others)))
        else:
            message.ClearField(field.name)
    elif rng.randrange(5) == 0:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, scalar(rng, field, value))


def onnx_copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def scalar(rng: random.Random, field: Any, old: Any) -> Any:
    """A value of the field's type that nobody expects there."""
    if field.type == field.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == field.TYPE_BYTES:
        return (old or b"")[: rng.randrange(40)] + rng.randbytes(rng.randrange(9))
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == field.TYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    bits = 31 if field.type == field.TYPE_INT32 else 63
    low = 0 if field.type == field.TYPE_UINT64 else -(2**bits)
    return rng.choice([n for n in NUMBERS if low <= n < 2**bits])


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The census without asking the runtimes, which takes most of its time."""
    monkeypatch.setattr(kernel_support, "query_runtimes", lambda models: ([], []))


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FILES)), seed=st.integers(0, 2**64))
@example(name="contrib", seed=13145)  # a node without an output
def test_damaged_files_are_read_or_refused(unasked: None, tmp_path: Path, name: str, seed: int) -> None:
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    path.write_bytes(damaged(name, seed))
    with limited(SECONDS):
        try:
            proto = load_onnx(path)
            census.take_census(proto)
            result, _ = optimize_norms(proto)
        except NormdeployError:
            return
        save_onnx(result, out)
        load_onnx(out)  # by onnx's checker, too


def test_the_files_are_whole_before_they_are_damaged(tmp_path: Path) -> None:
    for make in FILES.values():
        save_onnx(make(), tmp_path / "m.onnx")
        _, summary = optimize_norms(load_onnx(tmp_path / "m.onnx"))
        assert summary.findings


def test_damage_is_repeatable_and_differs() -> None:
    made = [damaged("layer norm", seed) for seed in range(100)]
    assert made == [damaged("layer norm", seed) for seed in range(100)]
    assert len(set(made)) > 80
