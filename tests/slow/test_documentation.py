"""Links lead somewhere, programs accept the documented commands, README keeps its budget, and every number that a page
shows is the one that the committed rows give."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from analysis.publish import build_committed
from experiments.study.graph import Item, config_of
from slurm.submit import read_request

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("runs", "cache", "build") for part in path.relative_to(ROOT).parts)
)
CODE = re.compile(r"^\s*```[^\n]*\n(.*?)^\s*```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"(?<!\w)[+−-]?\d[\d,.]*(?:e-\d+)?")
MOST_WORDS, MOST_NUMBERS, FIRST_COMMAND, MOST_COLUMNS, MOST_IN_A_CELL = 1300, 60, 250, 6, 12


def named(path):
    return str(path.relative_to(ROOT))


def anchors(page):
    """As GitHub makes them: lower case, without punctuation, spaces as dashes."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{named(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{named(page)} links to {link}: no such heading"


def commands():
    """(page, command) of every shell command in a block of code."""
    for page in PAGES:
        for block in CODE.findall(page.read_text(encoding="utf8")):
            for line in block.splitlines():
                if re.match(r"\s*(python -m|torchrun|make) ", line):
                    yield pytest.param(line.strip(), id=f"{named(page)}: {line.strip()[:60]}")


@pytest.mark.parametrize("command", list(commands()))
def test_commands_are_accepted(command):
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, command
        return
    module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists() or module == "pytest", command
    if module == "slurm.submit":
        assert read_request(arguments).items, command
    elif module.startswith("experiments."):
        assert config_of(Item(name="", kind="", module=module, arguments=tuple(arguments), folder=ROOT)) is not None


def test_the_readme_keeps_its_budget():
    text = (ROOT / "README.md").read_text(encoding="utf8")
    assert len(text.split()) <= MOST_WORDS
    assert len(text[: text.index("```")].split()) <= FIRST_COMMAND
    prose = LINK.sub("]", CODE.sub("", text))
    assert len(NUMBER.findall(prose)) <= MOST_NUMBERS
    for line in prose.splitlines():
        if line.startswith("|"):
            cells = line.strip("|").split("|")
            assert len(cells) <= MOST_COLUMNS, line
            assert max(len(cell.split()) for cell in cells) <= MOST_IN_A_CELL, line


def contents(root):
    files = [path for folder in ("paper_figures", "kernels") for path in (root / folder).rglob("*") if path.is_file()]
    files += [root / "README.md", root / "RESULTS.md"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.name != "index.html"}


def test_building_again_changes_nothing(tmp_path):
    """Numbers, tables, figures and pages are those of the committed rows."""
    shutil.copytree(ROOT / "paper_figures", tmp_path / "paper_figures")
    (tmp_path / "kernels").mkdir()
    for name in ("README.md", "RESULTS.md", "kernels/README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    before = contents(tmp_path)
    build_committed(tmp_path)
    after = contents(tmp_path)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []
    assert "were not gathered" not in after["paper_figures/README.md"].decode(), "the committed rows have all of them"
