"""The page and the skill for coding agents name every verb, and the exit codes and JSON keys that the code has."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
import yaml

from normdeploy.cli import app as cli
from normdeploy.errors import NEITHER, NormdeployError, RuntimeUnavailable
from normdeploy.findings.records import Status, Verdict
from normdeploy.verbs.check.check_function import NOT_JUDGED
from normdeploy.verbs.prove.proof_result import EXIT_CODES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "agents.md"
SKILL = ROOT / "docs" / "skills" / "normdeploy" / "SKILL.md"
SCHEMA = json.loads((ROOT / "normdeploy" / "reports" / "schemas" / "report.json").read_text())


def _commands() -> Iterator[tuple[str, Any]]:
    """Every verb, and every verb of a group such as "fleet run"."""
    for name, command in getattr(typer.main.get_command(cli.app), "commands", {}).items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {verb}", each) for verb, each in inner.items())


COMMANDS = dict(_commands())


def _rows(file: Path) -> dict[str, list[str]]:
    """Verb -> the other cells of its row: what the verb is for, JSON, 1, 2 and 3 also mean."""
    head = "| verb | use it to | JSON | 1 also means | 2 also means | 3 also means |\n"
    text = file.read_text().split(head, 1)[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[1:]]
    return {row[0].strip("`"): row[1:] for row in cells}


def _verdict_codes(verb: str) -> set[int]:
    """The exit codes by which a verb reports a verdict, read from its code.

    ``typer.Exit(1)`` reports a wrong result, and ``require_all_run`` that something was not run. Errors are not
    counted, because any verb can end with one.
    """
    module, _, function = verb.partition(" ")
    tree = ast.parse((ROOT / "normdeploy" / "cli" / f"{module}.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    codes: set[int] = set()
    waiting, seen = [function or module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in functions:
                    waiting.append(called)
                if called == "require_all_run":
                    codes.add(3)
                if called == "typer.Exit" and isinstance(node.args[0], ast.Constant):
                    codes.add(ast.literal_eval(node.args[0]))
                elif called == "typer.Exit":
                    codes |= RESULT_CODES[module]
    return codes


# Exit codes of the verbs whose result has its own exit code.
RESULT_CODES = {"check": {1, NOT_JUDGED}, "prove": {*EXIT_CODES.values()} - {0}}


@pytest.mark.parametrize("file", [PAGE, SKILL], ids=["page", "skill"])
def test_table_names_every_verb_once(file: Path) -> None:
    assert _rows(file).keys() == COMMANDS.keys()
    text = file.read_text()
    assert all(text.count(f"\n| `{verb}` | {row[0]} |") == 1 for verb, row in _rows(file).items())


def test_page_and_skill_have_the_same_table() -> None:
    assert _rows(PAGE) == _rows(SKILL)


@pytest.mark.parametrize("verb", COMMANDS)
def test_exit_codes_are_those_of_the_code(verb: str) -> None:
    _, _, wrong, unjudged, unrun = _rows(SKILL)[verb]
    told = {code for code, meaning in ((1, wrong), (2, unjudged), (3, unrun)) if meaning}
    assert told == _verdict_codes(verb)


@pytest.mark.parametrize("verb", COMMANDS)
def test_json_option_is_one_of_the_verb(verb: str) -> None:
    options = {option for parameter in COMMANDS[verb].params for option in parameter.opts}
    named = _rows(SKILL)[verb][1]
    assert ("--report" in options) is (named == "`--report`")
    if named.startswith("`--format"):
        assert "--format" in options


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [(NormdeployError("x"), 1, "error: x"), (RuntimeUnavailable("x"), 3, f"{NEITHER}: x")],
)
def test_errors_of_every_verb_end_with_these_codes(
    error: Exception, code: int, start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, "supervise_in_child", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(start)
    assert f"| {code} |" in PAGE.read_text()
    assert f"\n- {code}: " in SKILL.read_text()


def test_wrong_usage_ends_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["normdeploy", "verify", "--no-such-option"])
    monkeypatch.setattr(cli, "supervise_in_child", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "| 2 | wrong usage" in PAGE.read_text()
    assert "\n- 2: wrong usage" in SKILL.read_text()


def test_front_matter_is_that_of_a_skill() -> None:
    """The limits are those of the format: a lower-case name, the folder's, and a description of 1024 characters."""
    _, front, body = SKILL.read_text().split("---\n", 2)
    told = yaml.safe_load(front)
    assert told.keys() == {"name", "description"}
    assert told["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", told["name"])
    assert 0 < len(told["description"]) <= 1024
    assert body.strip().startswith("# normdeploy")


def test_skill_stands_alone() -> None:
    """It is copied out of the repository, so it can't link to a page."""
    assert "](" not in SKILL.read_text()


def _schema_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Properties of an object, through references, arrays and null."""
    while True:
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        elif "anyOf" in schema:
            schema = next(each for each in schema["anyOf"] if each.get("type") != "null")
        elif schema.get("type") == "array":
            schema = schema["items"]
        else:
            return schema.get("properties", {})


def _named_keys() -> list[list[str]]:
    """Paths of keys in the skill's table; ".kind" has the same parent as the path before it."""
    section = SKILL.read_text().split("| verb | key | meaning |")[1].split("\n\n")[0]
    paths: list[list[str]] = []
    for row in section.splitlines()[2:]:
        for told in re.findall(r"`([\w.\[\]]+)`", row.split("|")[2]):
            keys = told.replace("[]", "").split(".")
            paths.append([*paths[-1][:-1], *keys[1:]] if keys[0] == "" else keys)
    return paths


def test_json_keys_are_those_of_the_schema() -> None:
    paths = _named_keys()
    assert len(paths) > 8
    for path in paths:
        schema = SCHEMA
        for key in path:
            keys = _schema_keys(schema)
            assert key in keys, f"{'.'.join(path)}: no key {key!r}"
            schema = keys[key]


def test_every_status_and_verdict_is_explained() -> None:
    text = SKILL.read_text()
    assert all(f"`{status}`" in text for status in get_args(Status))
    assert all(f"`{verdict}`" in text for verdict in get_args(Verdict))
    wrong = set(re.findall(r"fault with `wrong` = `(\w+)`", text))
    told = (ROOT / "normdeploy" / "verbs" / "bisect" / "fault_tracing.py").read_text().split("wrong: ", 1)[1]
    assert wrong == set(re.findall(r'"(\w+)" if', told.split("error: ")[0]))
