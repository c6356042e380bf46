"""Finds the loops of a compiled kernel in the output of nvdisasm."""

import re

LABEL = re.compile(r"^\s*(\.L\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*);")
JUMP = re.compile(r"\bBRA\b.*`\((\.L\w+)\)")
FOR_GOOD = re.compile(r"(BRA|EXIT|RET)\b(?!\.)")  # no predicate, and no variant that depends on the threads


def innermost_loops(listing: str, holding: str) -> list[list[str]]:
    """The instructions of each loop that holds an instruction of this name and no smaller loop that does.

    A loop belongs to a jump whose target is on every way to it: out-of-line code that jumps back is none.
    """
    code, following = _graph(listing)
    before: dict[int, list[int]] = {}
    for at, all_next in following.items():
        for one in all_next:
            before.setdefault(one, []).append(at)
    bodies = []
    for at, all_next in following.items():
        for target in all_next:
            if target <= at and at not in _reached({0}, following, without=target):
                bodies.append({target} | _reached({at}, before, without=target))
    named = re.compile(rf"\b{holding}\b")
    bodies = [body for body in bodies if any(named.search(code[at]) for at in body)]
    return [[code[at] for at in sorted(body)] for body in bodies if not any(other < body for other in bodies)]


def _graph(listing: str) -> tuple[list[str], dict[int, list[int]]]:
    """The instructions, and for each the places of those that may be next."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append(found[1].strip())
    following = {}
    for at, instruction in enumerate(code):
        jump = JUMP.search(instruction)
        all_next = [labels[jump[1]]] if jump else []
        if not FOR_GOOD.match(instruction):
            all_next.append(at + 1)
        following[at] = [one for one in all_next if one < len(code)]
    return code, following


def _reached(start: set[int], edges: dict[int, list[int]], *, without: int) -> set[int]:
    """What can be reached from `start` on ways that do not touch `without`."""
    seen, todo = start - {without}, list(start - {without})
    while todo:
        new = [one for one in edges.get(todo.pop(), ()) if one != without and one not in seen]
        seen.update(new)
        todo += new
    return seen
