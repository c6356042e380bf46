"""How long each item of a study took, for people to read; nothing is decided by it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

NAME = "journal.jsonl"


def record(folder: Path, item: str, seconds: float, error: str) -> None:
    """Append one line: an item ended."""
    ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = {"item": item, "seconds": round(seconds, 2), "ended": ended, "error": error}
    with (folder / NAME).open("a", encoding="utf8") as journal:
        journal.write(json.dumps(line) + "\n")


def last_durations(folder: Path) -> dict[str, float]:
    """Seconds of the latest run of every item that ended well."""
    if not (folder / NAME).is_file():
        return {}
    lines = [json.loads(line) for line in (folder / NAME).read_text(encoding="utf8").splitlines()]
    return {line["item"]: line["seconds"] for line in lines if not line["error"]}
