"""Rules as they are written, on the command line and in a file; what can't be read is told with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normdeploy.compare.policy import ALL, Policy, Threshold, Tolerance, parse_allclose, parse_policy
from normdeploy.errors import InputError
from normdeploy.model import Dim, InputSpec, ModelSignature
from normdeploy.verbs.verify.io_matching import parse_map
from normdeploy.verbs.verify.policy_file import read_policy
from normdeploy.verbs.verify.rule_measures import resolve_policy


def rules(policy: Policy, output: str) -> list[str]:
    return [str(rule) for rule in policy.rules_for(output)]


def test_rules_of_one_output_go_before_those_of_all() -> None:
    policy = parse_policy(
        ["1e-3:1e-2", "out:0=0:0.5"], ["cosine>=0.995", "out:0=cosine:0.9", "a=b=top1>=0.5", "out:0=psnr>=-3"]
    )
    assert rules(policy, "other") == ["tolerance 0.001:0.01", "cosine>=0.995"]
    assert rules(policy, "out:0") == ["tolerance 0:0.5", "cosine>=0.9", "psnr>=-3"]
    assert rules(policy, "a=b") == ["tolerance 0.001:0.01", "cosine>=0.995", "top1>=0.5"]
    same = parse_policy(
        {"": "1e-3:1e-2", "out:0": (0, 0.5)},
        {"": "cosine>=0.995", "out:0": ["cosine>=0.9", "psnr>=-3"], "a=b": "top1>=0.5"},
    )
    assert same == policy
    with pytest.raises(
        InputError, match=r"rule is for the output 'out:0', which the model does not have; its outputs are \['x'\]"
    ):
        policy.check(["x"])
    assert not parse_policy(None, None)


@pytest.mark.parametrize(
    ("tolerance", "metric", "said"),
    [
        ("1e-3", None, "'1e-3' can't be read; write ABS:REL"),
        ("y=1e-3:1:2", None, "'y=1e-3:1:2' can't be read"),
        ("y=a:b", None, "can't be read"),
        ("y=", None, "can't be read"),
        ("-1:0", None, "negative or not finite"),
        ("y=nan:0", None, "negative or not finite"),
        ("0:inf", None, "negative or not finite"),
        ({"y": 1e-3}, None, "can't be read"),
        (["y=1:0", "y=2:0"], None, "the output 'y' has the rules tolerance 1:0 and tolerance 2:0"),
        (["1:0", "2:0"], None, "every output has the rules tolerance 1:0 and tolerance 2:0"),
        (None, "cosine", "'cosine' can't be read; .* in a shell within quotes"),
        (None, "y=", "can't be read"),
        (None, "cosin>=1", "unknown metric 'cosin' .*choose one of cosine, psnr"),
        (None, "cosine<=0.5", "the larger cosine is, the better; write cosine>=0.5"),
        (None, "y=cosine=0.5", "the larger cosine is"),
        (None, "cosine>=1.5", "cosine is between -1 and 1"),
        (None, "top1>=99", "top1 is between 0 and 1"),
        (None, "top1>=99%", "'99%' is not a number"),
        (None, "psnr>=nan", "a finite number of decibels"),
        (None, {"y": "z=psnr>=3"}, "names an output"),
        (None, ["snr>=3", "snr>=4"], "every output has the rules snr>=3 and snr>=4"),
    ],
)
def test_what_means_nothing_is_refused(tolerance: Any, metric: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_policy(tolerance, metric)


def test_what_is_said_goes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "verify.toml"
    file.write_text(
        """
tolerance = "1e-3:1e-2"
metric = ["cosine>=0.995", "psnr>=30"]
also-default = true
max-elements = 4096
map = { "input.1" = "x" }

[outputs.logits]  # a table
tolerance = { abs = 1, rel = 0.5 }
metric = "top1>=0.99"
[outputs."a.b"]
tolerance = [0, 0]
"""
    )
    read = read_policy(file)
    assert (read.most, read.names, read.policy.required) == (4096, {"input.1": "x"}, True)
    assert rules(read.policy, "logits") == ["tolerance 1:0.5", "cosine>=0.995", "psnr>=30", "top1>=0.99"]
    assert rules(read.policy, "a.b") == ["tolerance 0:0", "cosine>=0.995", "psnr>=30"]
    both = parse_policy("logits=2:0", "psnr>=9").merge_under(read.policy)
    assert rules(both, "logits") == ["tolerance 2:0", "cosine>=0.995", "psnr>=9", "top1>=0.99"]
    assert both.required
    assert both.rules["a.b"] == {"tolerance": Tolerance(0, 0)}
    assert both.rules[""]["psnr"] == Threshold("psnr", 9)


def test_a_file_may_require_the_default_rule_beside_rules_that_are_given_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "verify.toml"
    file.write_text("also-default = true")
    alone = read_policy(file).policy
    both = parse_policy("logits=2:0", None).merge_under(alone).require_default(False)
    assert (rules(both, "logits"), both.required) == (["tolerance 2:0"], True)
    with pytest.raises(InputError, match="there are none; pass a tolerance or a metric too, or omit it"):
        parse_policy(None, None).merge_under(alone).require_default(False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tolerance = \n", r"not valid TOML: .*line 1"),
        ("\n\ntolerence = '1:1'", r"line 3: tolerence is not a key of a policy; choose from tolerance, metric"),
        ("tolerance = '1'", r"line 1: the tolerance '1' can't be read"),
        ("metric = 'cosine>=2'", r"line 1: 'cosine>=2': cosine is between"),
        ("metric = ['psnr>=1', 'psnr>=2']", r"line 1: metric has two values, psnr>=1 and psnr>=2"),
        ("metric = 3", r"line 1: the metric 3 can't be read"),
        (
            "tolerance = { abs = 1, relative = 2 }",
            r"line 1: tolerance.relative is not a key of tolerance; choose from abs, rel",
        ),
        ("tolerance = { abs = 'x' }", r"line 1: the tolerance"),
        ("tolerance = true", "can't be read"),
        (
            "[outputs.y]\n# here\nmetrics = 'psnr>=1'",
            r"line 3: outputs.y.metrics is not a key of outputs.y; choose from tolerance, metric",
        ),
        ("[outputs]\ny = 3", r"line 2: outputs.y is 3, not a table: write \[outputs.y\]"),
        ("outputs = 3", r"line 1: outputs is 3, not a table"),
        ("[outputs.'']\ntolerance='1:1'", "has no name"),
        ("max-elements = 0", r"line 1: max-elements is 0; write a whole number"),
        ("max-elements = true", "max-elements is True"),
        ("also-default = 'yes'", r"line 1: also-default is 'yes'; write true or false"),
        ("map = { a = 3 }", r"line 1: map.a is 3; write the model's name"),
        ("map = ['a=b']", "map is .* not a table"),
        ("x = " + "[" * 3000, "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_a_file_that_means_nothing_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "verify.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=r"the policy '.*verify.toml'.*" + said):
        read_policy(file)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can't read the policy .*No such file"):
        read_policy(tmp_path / "none.toml")
    with pytest.raises(InputError, match="can't read the policy"):
        read_policy(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(InputError, match="not valid TOML"):
        read_policy(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InputError, match="at most 1048576 are read"):
        read_policy(tmp_path / "c.toml")


def test_a_rule_for_all_is_for_what_it_can_measure() -> None:
    outputs = {"y": np.ones((2, 7)), "ids": np.ones((2, 7), np.int64), "mask": np.ones(2, bool)}
    policy, notes = resolve_policy(parse_policy(["1:0", "ids=2:0"], ["top5>=0.5"]), outputs)
    assert {name: rules(policy, name) for name in outputs} == {
        "y": ["tolerance 1:0", "top5>=0.5"],
        "ids": ["tolerance 2:0"],
        "mask": [],
    }
    assert notes == [
        "top5>=0.5 does not apply to ids: it is int64, not floating-point",
        "tolerance 1:0 does not apply to mask: it is bool, not floating-point",
        "top5>=0.5 does not apply to mask: it is bool, not floating-point",
    ]
    for metric, said in (
        ("ids=cosine>=0.5", "on the output 'ids': it is int64"),
        ("few=top5>=0.5", "needs more than 5 entries"),
        ("flat=nearest>=0.5", "1 dims, but needs 2"),
    ):
        with pytest.raises(InputError, match=said):
            resolve_policy(parse_policy(None, metric), outputs | {"few": np.ones((2, 5)), "flat": np.ones(3)})
    with pytest.raises(InputError, match="top5 can't be measured on any output"):
        resolve_policy(parse_policy(None, "top5>=0.5"), {"ids": outputs["ids"]})


def test_a_map_may_hold_equals_signs() -> None:
    model = ModelSignature(inputs=(InputSpec("x", "float32", (Dim.from_size(2),)),), outputs=("y", "a=b"), kind="")
    assert parse_map(["input=1=x", "out=a=b"], model) == {"input=1": "x", "out": "a=b"}
    for text, said in (
        ("x", "can't read the map"),
        ("=x", "can't read the map"),
        ("a=z", r"names 'z', .* has the inputs \['x'\] and the outputs \['y', 'a=b'\]"),
    ):
        with pytest.raises(InputError, match=said):
            parse_map([text], model)
    with pytest.raises(InputError, match="'a' is mapped to both 'x' and 'y'"):
        parse_map(["a=x", "a=y"], model)


@pytest.mark.parametrize("given", [1e-3, 0, (1e-3, 1e-2), [1e-3]])
def test_tolerance_of_numbers_is_refused_with_what_to_write(given: Any) -> None:
    with pytest.raises(InputError, match=r"tolerance .* can't be read; write the text \"ABS:REL\""):
        parse_policy(given, None)


@pytest.mark.parametrize(
    ("absolute", "relative", "rules"),
    [
        (None, None, {}),
        (1e-3, 1e-2, {ALL: {"tolerance": Tolerance(1e-3, 1e-2)}}),
        (1e-3, None, {ALL: {"tolerance": Tolerance(1e-3, 0.0)}}),
        (None, 0, {ALL: {"tolerance": Tolerance(0.0, 0.0)}}),
    ],
)
def test_two_numbers_are_the_tolerance_of_every_output(
    absolute: float | None, relative: float | None, rules: dict[str, Any]
) -> None:
    assert parse_allclose(absolute, relative).rules == rules


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf"), True, "1e-3"])
def test_a_number_that_is_no_tolerance_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"--atol is .*; pass a number of 0 or more"):
        parse_allclose(value, None)
    with pytest.raises(InputError, match=r"--rtol is .*; pass a number of 0 or more"):
        parse_allclose(None, value)
