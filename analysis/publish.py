"""Writes the tables, figures and pages of results into a folder, or into the repository."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from analysis import catalogue, choose, claims, dictionary, evaluation, markdown, page, render, tables
from analysis.catalogue import Table
from analysis.figures import FIGURES, Drawn
from analysis.figures.tokens import RAREST
from analysis.load import COMMITTED, ROOT, Results, committed, load

log = logging.getLogger(__name__)

# By far the largest tables: only the runs that figures and the explorer show are saved.
LARGE = ("by_token", "by_position", "histogram", "by_neuron", "masks")
TRAINING = ["model", "l1", "seed"]  # identifies the training that a run was gathered from
ENDINGS = (".md", ".csv", ".png", ".pdf")  # of tables and figures
MASK_TOKENS = 2048  # at most so many tokens of each run's masks


def build(source: Path | str | Sequence[Path | str], out: Path | str) -> list[Path]:
    """Write everything into `out`; returns the paths written.

    Raises:
        FileNotFoundError: a source does not exist or holds no results.
        analysis.read.ResultsError: a file of results is damaged.
    """
    sources = [source] if isinstance(source, (Path, str)) else list(source)
    out = Path(out)
    results = replace(compact(load(*sources)), name=out.name)
    drawn = [draw(results) for draw in FIGURES]
    with _staged(out) as (folder, written):
        made = _write_source(results, drawn, folder)
        pictures = [[figure] for figure in drawn]
        _write_text(folder / "index.html", page.html_page(results, made, pictures, claims.check_all(results)))
    for line in missing(drawn):
        log.warning(line)
    for line in left_out(results):
        log.info(line)
    log.info("%d files in %s; begin with %s", len(written), out, out / "index.html")
    return written


def build_committed(root: Path = ROOT) -> None:
    """Rebuild everything in the repository at `root` that is made from rows: each source beneath paper_figures, the
    pages above them, RESULTS.md, and the marked blocks of README.md and kernels/README.md.

    Raises:
        As `build` does.
    """
    folder = root / "paper_figures"
    results = committed(folder)
    results = replace(results, name=" and ".join(COMMITTED), sources=tuple(map(compact, results.sources)))
    drawn = {source.name: [draw(source) for draw in FIGURES] for source in results.sources}
    of_figure = [list(of_sources) for of_sources in zip(*drawn.values(), strict=True)]
    of_figure[0] = [replace(of_figure[0][0], source="")]  # the diagram of the formats needs no rows
    made, checked = catalogue.make(results), claims.check_all(results)
    with _staged(folder) as (staged, written):
        for source in results.sources:
            _write_source(source, drawn[source.name], staged / source.name)
        _write_page(staged / "README.md", markdown.claims_page(results, of_figure, checked))
        _write_page(staged / "claims.md", claims.details(checked))
        _write_page(staged / "COLUMNS.md", dictionary.markdown())
        _write_page(staged / "EVALUATION.md", evaluation.page(results))
        _write_text(staged / "index.html", page.html_page(results, made, of_figure, checked))
    overview = [table for table in made if table.name in {spec.name for spec in catalogue.OVERVIEW}]
    written.append(_write_page(root / "RESULTS.md", markdown.results_page(results, overview)))
    for path in (root / "README.md", root / "kernels" / "README.md"):
        written.append(_write_text(path, markdown.fill(path.read_text(encoding="utf-8"), results, made, checked)))
    log.info("%d files in %s; begin with %s", len(written), root, folder / "index.html")


def left_out(results: Results) -> list[str]:
    """A line for each model of which some trainings are in no figure or table that needs trainings alike: those on
    another text, or on other numbers of tokens, than most of its L1 values."""
    runs = choose.trainings(results.rows)
    alike = choose.equally_trained(runs)
    others = runs[~runs.index.isin(alike.index)]
    return [
        f"{model}: in the summary only, since trained on another text or number of tokens than most: "
        f"{', '.join(sorted(rows['study'] + '/' + rows['item']))}"
        for model, rows in others.groupby("model")
    ]


def missing(drawn: Sequence[Drawn]) -> list[str]:
    """One line for each incomplete figure: what is missing, and whether anything was drawn."""
    return [
        f"{figure.label} is not {'drawn' if figure.is_placeholder else 'whole'}: missing {figure.missing}"
        for figure in drawn
        if figure.missing
    ]


def compact(results: Results) -> Results:
    """The results as the repository stores them.

    The large tables (LARGE, and firing rates in training) are reduced to the runs that figures and the explorer show:
    without L1, with the recommended L1 and with the strongest, lowest seed, and lowest seed of which tokens are there
    (their table is the largest, and left behind first). Of several models, only the two with the most L1 values are
    kept (see `_with_most_values`); for figure H the firing rates of all sparse runs of the sweep's model. Rare tokens
    go, and numbers become float32."""
    if not any(name in results.nonzeros for name in LARGE):
        return results
    there = pd.concat([table[choose.RUN] for name, table in results.nonzeros.items() if name in LARGE])
    is_there = pd.MultiIndex.from_frame(results.rows[choose.RUN]).isin(pd.MultiIndex.from_frame(there))
    # Of other runs the large tables were left behind before.
    measured = replace(results, rows=results.rows[is_there | results.rows["op"].ne("nonzeros")])
    rows = choose.equally_trained(choose.relu_runs(choose.where(measured.rows, op="nonzeros")))
    models = _with_most_values(measured, rows)
    by_l1 = [
        choose.where(rows, model=model, l1=l1) for model in models for l1 in choose.telling_l1(measured.rows, model)
    ]
    shown = pd.concat(by_l1) if by_l1 else rows
    tokens = results.nonzeros.get("by_token", pd.DataFrame(columns=choose.RUN))[choose.RUN].drop_duplicates()
    chosen = pd.concat([choose.first_seed(shown), choose.first_seed(shown.merge(tokens, on=choose.RUN))])
    trained = choose.relu_runs(choose.where(results.rows, op="train"))[[*choose.RUN, *TRAINING]].drop_duplicates()
    trained = trained.merge(chosen[["study", *TRAINING]].drop_duplicates(), on=["study", *TRAINING])
    runs = pd.concat([chosen[choose.RUN], trained[choose.RUN]]).drop_duplicates()
    swept = measured.rows["model"].map(choose.scale).isin(set(choose.sweep(results.rows)["model"]))
    sparse = measured.rows[swept & measured.rows["l1"].gt(0)]
    kept = dict.fromkeys((*LARGE, "in_training"), runs)
    kept["by_neuron"] = pd.concat([runs, sparse[choose.RUN]]).drop_duplicates()
    nonzeros = {
        name: _narrow(table.merge(kept[name], on=choose.RUN) if name in kept else table)
        for name, table in results.nonzeros.items()
    }
    return replace(results, nonzeros=nonzeros)


def _with_most_values(results: Results, rows: pd.DataFrame) -> list[str]:
    """The model with the most L1 values, and a second one, not of those that were trained like the first to compare
    sizes: one with a training without L1, if there is one; of several that with the most L1 values that are shown,
    and then that with the fewest layers, whose tables are the smallest (studies time its masks)."""
    if rows.empty:
        return []
    main = choose.main_model(rows)["model"].iloc[0]
    trained = choose.equally_trained(choose.relu_runs(choose.where(results.rows, op="train")))
    sizes = choose.comparable_sizes(trained, main, choose.recommended_l1(results.rows, main))
    alike = set(sizes.index) if len(sizes) >= choose.FEWEST_SIZES else {main}
    others = rows[~rows["model"].isin(alike)]
    with_base = others[others["model"].isin(set(choose.where(others, l1=0.0)["model"]))]
    known = (with_base if len(with_base) else others).groupby("model").agg({"layers": "min"})
    known["shown"] = [len(choose.telling_l1(results.rows, model)) for model in known.index]
    return [main, *known.sort_values(["shown", "layers"], ascending=[False, True], kind="stable").index[:1]]


def _narrow(table: pd.DataFrame) -> pd.DataFrame:
    """The table without rare tokens, with masks of the first tokens only, and measured numbers as float32. Keys keep
    their types."""
    if "frequency" in table:
        table = table[table["frequency"] >= RAREST].reset_index(drop=True)
    if "index" in table:
        table = table[table["index"] < MASK_TOKENS].reset_index(drop=True)
    wide = [name for name in table.select_dtypes("float64").columns if name not in ("l1", "frequency")]
    return table.astype(dict.fromkeys(wide, "float32"))


def write_data(results: Results, out: Path) -> None:
    """Write rows.csv, settings.csv, curves.parquet and nonzeros_*.parquet, and delete outdated parquet files."""
    kept = results.settings[results.settings["key"].isin(tables.SETTINGS.values())]
    frames = {f"nonzeros_{name}.parquet": frame for name, frame in results.nonzeros.items()}
    if len(results.curves):
        frames["curves.parquet"] = results.curves
    for stale in {path.name for path in out.glob("*.parquet")} - frames.keys():
        (out / stale).unlink()
    _write_text(out / "rows.csv", results.rows.to_csv(index=False, lineterminator="\n"))
    _write_text(out / "settings.csv", kept.to_csv(index=False, lineterminator="\n"))
    for name, frame in frames.items():
        partial = out / f"{name}.partial"
        frame.to_parquet(partial, index=False, compression="zstd")
        partial.replace(out / name)


def _write_source(results: Results, drawn: Sequence[Drawn], out: Path) -> list[Table]:
    """Write the data, tables, figures and README.md of one source; returns its tables. The paper's tables are also
    written as Markdown, with rounded numbers and their intervals; where no GPU's speed was measured, without what this
    study did not measure."""
    out.mkdir(parents=True)
    made = catalogue.make(results, measured_only=choose.made_for_speed(results.rows).empty)
    write_data(results, out)
    papers = {spec.name for spec in tables.TABLES}
    for table in made:
        if table.name in papers:
            _write_page(out / f"{table.name}.md", render.markdown(table.frame))
        text = table.frame.to_csv(index=False, lineterminator="\n", float_format="%.7g")
        _write_text(out / f"{table.name}.csv", text)
    for figure in drawn:
        if not figure.is_placeholder:
            figure.save(out)
    _write_page(out / "README.md", markdown.source_page(results, made, drawn))
    return made


@contextlib.contextmanager
def _staged(out: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yields a temporary folder to write into, and a list that receives the final paths in `out`.

    The files move to `out` only if the block ends without an error. Files that an earlier build wrote and this one did
    not are deleted; all other files stay.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".building", dir=out.parent) as temporary:
        folder, written = Path(temporary) / "out", list[Path]()
        yield folder, written
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            target = out / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            written.append(path.replace(target))
        names = {draw.name for draw in FIGURES} | {spec.name for spec in catalogue.ALL}
        for source in [path.parent for path in written if path.name == "rows.csv"]:
            for path in set(source.iterdir()) - set(written):
                if path.suffix == ".parquet" or (path.suffix in ENDINGS and path.stem in names):
                    path.unlink()


def _write_page(path: Path, text: str) -> Path:
    return _write_text(path, markdown.without_tags(text))


def _write_text(path: Path, text: str) -> Path:
    """Write the file atomically: a reader never sees half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    return partial.replace(path)
