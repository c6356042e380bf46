"""The table of results and the list of paths that a study prints at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from experiments.study.definition import StudyConfig
from experiments.study.graph import Graph

Row = Mapping[str, Any]
CAPTION = "loss: held-out cross-entropy, nats/token. non-zeros: per token, in the last steps of training"
TIMES = "forward, training: throughput of the fastest sparse backend over dense in the same run"


def value_of(rows: Sequence[Row], **wanted: Any) -> float | None:
    """The value of the first row with these columns; None if there is no such row, or it has no value."""
    found = (row["value"] for row in rows if all(row[name] == value for name, value in wanted.items()))
    return next(found, None)


def best_ratio(rows: Sequence[Row], **wanted: Any) -> float | None:
    """The largest improvement over dense among the sparse alternatives with these columns."""
    found = [row for row in rows if row["plan"] != "dense" and row["ratio"] is not None]
    return max((row["ratio"] for row in found if all(row[n] == v for n, v in wanted.items())), default=None)


def summary_table(graph: Graph) -> Table:
    """One line for each training: validation loss (nats/token), sparsity, accuracy, and throughput of the best sparse
    backend over dense in the same run; without columns of which nothing was measured."""
    rows = {name: item.rows() for name, item in graph.items.items()}
    forward, training = rows.get("bench_forward", []), rows.get("bench_training", [])
    lines = []
    for name in (name for name, item in graph.items.items() if item.kind == "train" and rows[name]):
        own, evaluation = rows[name], rows.get(f"evaluate_{name}", [])
        nonzeros = value_of(own, op="train", metric="nonzeros", layer=None)
        neurons = own[0]["intermediate"]
        lines.append(
            {
                "model": name,
                "loss": _cell(value_of(own, metric="validation_cross_entropy"), "{:.3f}"),
                "non-zeros": _cell(nonzeros, "{:.1f}"),
                "of N": _cell(nonzeros and neurons and 100 * nonzeros / neurons, "{:.1f}%"),
                "dead": _cell(_percent(value_of(own, metric="dead_fraction", layer=None)), "{:.0f}%"),
                "accuracy": _cell(value_of(evaluation, metric="accuracy", task="mean"), "{:.1f}%"),
                "forward": _cell(best_ratio(forward, op="model_forward", metric="throughput", pattern=name), "x{:.2f}"),
                "training": _cell(
                    best_ratio(training, op="model_training", metric="throughput", pattern=name), "x{:.2f}"
                ),
            }
        )
    return _as_table(lines)


def _as_table(lines: list[dict[str, str]]) -> Table:
    """The lines, without columns that have no value."""
    table = Table(title="\nResults", title_justify="left", box=None, header_style="bold", pad_edge=False)
    columns = [name for name in (lines[0] if lines else ()) if any(line[name] for line in lines)]
    table.caption = "; ".join([CAPTION, *([TIMES] if {"forward", "training"} & {*columns} else [])])
    table.caption_justify = "left"
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[name] or "-" for name in columns))
    return table


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def where_to_look(config: StudyConfig, graph: Graph) -> str:
    """The paths of figures, notebooks and runs."""
    places = [("tables and figures", config.output / "index.html")] if "build" in graph.items else []
    if "notebooks" in graph.items:
        places.append(("executed notebooks", config.folder / "notebooks"))
    places.append(("runs and their logs", config.folder))
    return "\n".join(f"{what + ':':<24}{path}" for what, path in places)
