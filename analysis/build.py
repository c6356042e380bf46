"""Every table and figure of the paper from run folders, or again from a folder built before.

    python -m analysis.build source=runs/demo out=paper_figures/demo
    python -m analysis.build source=paper_figures/demo out=/tmp/again

`source` may name several folders, separated by commas. `out` gets each table (.md, .csv) and figure (.png, .pdf and the
data drawn as .csv), index.html, README.md, and the tidy frames that all of it was made from. The same rows give the
same bytes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import page, render, tables
from analysis.figures import FIGURES, Drawn
from analysis.floors import ceilings
from analysis.load import Results, load
from analysis.summary import kernels, layers, summary
from analysis.tables import TABLES, Spec

log = logging.getLogger(__name__)

USAGE = "usage: python -m analysis.build source=FOLDER[,FOLDER...] out=FOLDER"


def build(source: Path | str | Sequence[Path | str], out: Path | str) -> list[Path]:
    """Write everything into `out` and return the paths written, data first.

    Raises:
        FileNotFoundError: a source does not exist or holds no results.
        analysis.read.ResultsError: a file of results is damaged.
    """
    sources = [source] if isinstance(source, (Path, str)) else list(source)
    results = load(*sources)  # all of it in memory before anything is written: source and out may be the same
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    made = [(spec, spec.make(results)) for spec in TABLES]
    drawn = [draw(results) for draw in FIGURES]
    written = write_data(results, out)
    written += _write_tables(results, made, out)
    for figure in drawn:
        written += figure.save(out)
    written.append(_write_text(out / "index.html", page.html_page(results, made, drawn)))
    written.append(_write_text(out / "README.md", page.markdown_page(results, made, drawn)))
    for line in missing(drawn):
        log.warning(line)
    log.info("%d files in %s; begin with %s", len(written), out, out / "index.html")
    return written


def missing(drawn: Sequence[Drawn]) -> list[str]:
    """One line for each figure that lacks something: what, and whether all of it."""
    return [
        f"{figure.label} {'is a placeholder' if figure.is_placeholder else 'is not whole'}: missing {figure.missing}"
        for figure in drawn
        if figure.missing
    ]


def write_data(results: Results, out: Path) -> list[Path]:
    """rows.csv, settings.csv, curves.parquet, nonzeros_*.parquet; files of an earlier build that no longer apply go."""
    kept = results.settings[results.settings["key"].isin(tables.SETTINGS.values())]
    frames = {f"nonzeros_{name}.parquet": frame for name, frame in results.nonzeros.items()}
    if len(results.curves):
        frames["curves.parquet"] = results.curves
    for stale in {path.name for path in out.glob("*.parquet")} - frames.keys():
        (out / stale).unlink()
    written = [
        _write_text(out / "rows.csv", results.rows.to_csv(index=False, lineterminator="\n")),
        _write_text(out / "settings.csv", kept.to_csv(index=False, lineterminator="\n")),
    ]
    for name, frame in frames.items():
        partial = out / f"{name}.partial"
        frame.to_parquet(partial, index=False, compression="zstd")
        written.append(partial.replace(out / name))
    return written


def _write_tables(results: Results, made: Sequence[tuple[Spec, pd.DataFrame]], out: Path) -> list[Path]:
    written = []
    own = {"summary": summary, "kernels": kernels, "ceilings": ceilings, "layers": layers}
    frames = [(name, make(results)) for name, make in own.items()]
    for name, frame in frames + [(spec.name, frame) for spec, frame in made]:
        written.append(_write_text(out / f"{name}.md", render.markdown(frame)))
        text = frame.to_csv(index=False, lineterminator="\n", float_format="%.7g")
        written.append(_write_text(out / f"{name}.csv", text))
    return written


def _write_text(path: Path, text: str) -> Path:
    """Write whole or not at all: a reader never sees half a file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    return partial.replace(path)


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """source=... out=... as a dictionary.

    Raises:
        ValueError: another option, one given twice, or one missing; the message says what is wanted.
    """
    options: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in ("source", "out") or not equals or not value:
            raise ValueError(f"got {argument!r}, wanted source=... or out=...\n{USAGE}")
        if name in options:
            raise ValueError(f"{name} is given twice\n{USAGE}")
        options[name] = value
    if absent := [name for name in ("source", "out") if name not in options]:
        raise ValueError(f"{' and '.join(absent)} missing\n{USAGE}")
    return options


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = parse(arguments)
        written = build(options["source"].split(","), options["out"])
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
