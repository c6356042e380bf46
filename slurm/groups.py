"""Groups items into SLURM jobs: which items share an array, and what each array waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.study.graph import Item


@dataclass
class Group:
    """Items of one kind that are submitted together, as one array if there are several.

    `after` are the groups that hold what they need, `jobs` jobs submitted earlier that they need. `aligned`: the n-th
    item needs the n-th of the only group in `after`, and nothing else.
    """

    kind: str
    after: tuple[int, ...]
    items: list[Item] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)
    aligned: bool = False


def group(items: Iterable[Item], queued: Mapping[str, str], max_array: int) -> list[Group]:
    """Groups in an order in which each comes after those it needs.

    `items` are to be submitted (each after what it needs), `queued` maps the needs that are in the queue already to
    their jobs. Items with the same kind of dependents stay together, so that a group can wait task by task for another:
    a statistic starts when its own training is done, not when all are.
    """
    items = list(items)
    dependents = _dependent_kinds(items)
    groups: list[Group] = []
    place: dict[str, int] = {}  # item -> group
    open_groups: dict[tuple, int] = {}
    for item in items:
        after = tuple(sorted({place[name] for name in item.needs if name in place}))
        waits_for_queued = any(name in queued for name in item.needs)
        # Tasks of one array cannot wait for different jobs that were submitted before.
        key = (item.kind, after, dependents[item.name], item.name if waits_for_queued else "")
        number = open_groups.get(key)
        if number is None or len(groups[number].items) >= max_array:
            number = open_groups[key] = len(groups)
            groups.append(Group(item.kind, after))
        groups[number].items.append(item)
        groups[number].jobs |= {queued[name] for name in item.needs if name in queued}
        place[item.name] = number
    for one in groups:
        one.aligned = _is_aligned(one, groups, place)
    return groups


def _dependent_kinds(items: Sequence[Item]) -> dict[str, tuple[str, ...]]:
    kinds: dict[str, set[str]] = {item.name: set() for item in items}
    for item in items:
        for name in kinds.keys() & set(item.needs):
            kinds[name].add(item.kind)
    return {name: tuple(sorted(found)) for name, found in kinds.items()}


def _is_aligned(one: Group, groups: Sequence[Group], place: Mapping[str, int]) -> bool:
    if len(one.after) != 1 or one.jobs or len(one.items) < 2:
        return False
    needs = [[name for name in item.needs if name in place] for item in one.items]
    return needs == [[item.name] for item in groups[one.after[0]].items]


def dependency(one: Group, ids: Mapping[int, str]) -> str:
    """SLURM's --dependency; `ids` are the jobs of the groups before. Empty if there is nothing to wait for."""
    if one.aligned:
        return f"aftercorr:{ids[one.after[0]]}"
    jobs = [ids[number] for number in one.after] + sorted(one.jobs)
    return ":".join(["afterok", *jobs]) if jobs else ""
