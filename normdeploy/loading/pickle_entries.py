"""Find the entries of a checkpoint that hold other objects than tensors; nothing is unpickled.

The instructions are followed on a stack of nodes. A node knows only the name of a global, a text, or the nodes that it
was made from. Python's own unpickler would reserve as much memory as a broken file asks for.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Instructions that change the object below their operands instead of making a new one.
_CHANGING = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
_STORING = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_LOADING = frozenset({"GET", "BINGET", "LONG_BINGET"})


@dataclass(eq=False)
class _Node:
    """Object of a pickle.

    Attributes:
        name: dotted name of a global; "" for other objects.
        value: text or number that the instruction itself holds.
        parts: nodes that it was made from; of a dict, keys and values in turn.
    """

    name: str = ""
    value: Any = None
    parts: list[_Node] = field(default_factory=list)


def find_foreign_entries(data: bytes, is_foreign: Callable[[str], bool]) -> list[str]:
    """Find the entries of a pickled dict that hold objects of foreign classes.

    Args:
        data: the pickle.
        is_foreign: returns True for the dotted name of a global that tensors don't need.

    Returns:
        names of entries; empty if the pickle is not a dict, or is broken.
    """
    try:
        root = _read_root(data)
    except Exception:
        # pickletools raises ValueError, UnicodeDecodeError, and others on junk; a short stack is an IndexError.
        return []
    pairs = zip(root.parts[::2], root.parts[1::2], strict=False)
    return [str(key.value) for key, value in pairs if isinstance(key.value, str) and _holds_foreign(value, is_foreign)]


def _read_root(data: bytes) -> _Node:
    """Follow the instructions, and return the dict that the pickle holds; an empty node for another object."""
    stack: list[_Node] = []
    marks: list[int] = []
    memo: dict[int, _Node] = {}
    dicts: set[int] = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            root = stack.pop()
            return root if id(root) in dicts else _Node()
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif opcode.name in _STORING:
            memo[int(str(argument))] = stack[-1]
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif opcode.name in _LOADING:
            stack.append(memo[int(str(argument))])
        else:
            below, operands = _pop_operands(opcode, stack, marks)
            if opcode.name in _CHANGING:
                below[0].parts += operands
                stack.append(below[0])
                continue
            for _ in opcode.stack_after:
                stack.append(_make_node(opcode.name, argument, [*below, *operands]))
            if opcode.name in ("DICT", "EMPTY_DICT"):
                dicts.add(id(stack[-1]))
    return _Node()


def _pop_operands(
    opcode: pickletools.OpcodeInfo, stack: list[_Node], marks: list[int]
) -> tuple[list[_Node], list[_Node]]:
    """Pop the operands of an instruction.

    Returns:
        the object below the operands, if the instruction has one, and the operands.
    """
    names = [kind.name for kind in opcode.stack_before]
    if "mark" in names:
        operands = _pop_from(stack, marks.pop())
        return _pop_from(stack, len(stack) - names.index("mark")), operands
    every = _pop_from(stack, len(stack) - len(names))
    return every[:1], every[1:]


def _pop_from(stack: list[_Node], start: int) -> list[_Node]:
    if not 0 <= start <= len(stack):
        raise IndexError(start)
    popped = stack[start:]
    del stack[start:]
    return popped


def _make_node(name: str, argument: Any, parts: list[_Node]) -> _Node:
    if name in ("GLOBAL", "INST"):
        return _Node(name=str(argument).replace(" ", ".", 1), parts=parts)
    if name == "STACK_GLOBAL":
        return _Node(name=".".join(str(part.value) for part in parts))
    return _Node(value=argument, parts=parts)


def _holds_foreign(entry: _Node, is_foreign: Callable[[str], bool]) -> bool:
    return any(node.name and is_foreign(node.name) for node in _iter_nodes(entry))


def _iter_nodes(entry: _Node) -> Iterator[_Node]:
    """Yield a node and all nodes that it was made from, each once."""
    pending = [entry]
    seen = {id(entry)}
    while pending:
        node = pending.pop()
        yield node
        for part in node.parts:
            if id(part) not in seen:
                seen.add(id(part))
                pending.append(part)
