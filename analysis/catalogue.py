"""All tables: the paper's six and our own, with titles and captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from analysis import choose, provenance, report, summary
from analysis.claims import l1_factor
from analysis.floors import ceilings
from analysis.load import DATA_ERRORS, Results, not_made
from analysis.tables import TABLES, Spec


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    caption: str
    frame: pd.DataFrame


OVERVIEW: tuple[Spec, ...] = (
    Spec(
        "models", "Whole models, both sides compiled", report.models,
        "Each layer dense or sparse, whichever is faster, over the compiled dense model: forward pass of 64 sequences "
        "of 2,048 tokens without the output head; training step.",
    ),
    Spec(
        "models_forward_uncompiled", "Forward pass, nothing compiled, as in the paper",
        partial(report.uncompiled, op="model_forward", second="energy"),
        "Speed over the same model with this package's dense blocks and, where it says so, over unmodified "
        "transformers, with which the paper compares. Ours: each layer dense or sparse, whichever is faster.",
    ),
    Spec(
        "models_training_uncompiled", "Training step, nothing compiled, as in the paper",
        partial(report.uncompiled, op="model_training", second="peak_memory"),
        "The same for training steps. A dash: unmodified transformers fill the memory; in the paper: unequal batches.",
    ),
    Spec(
        "trainings_compared", "Whole trainings", report.trainings_compared,
        "All layers start dense and become sparse once that is faster; each over the dense training of its seed on the "
        "same card, without the first step, which compiles. Memory: the peak, at the start, while all are dense.",
    ),
    Spec(
        "blocks_forward", "One block, forward", partial(report.blocks, op="ffn_forward"),
        "Synthetic patterns; speed over the fastest dense implementation in the same run. FP8 dense products "
        "(one scale a row) are no baseline, since they are not exact.",
    ),
    Spec(
        "blocks_training", "One block, forward and backward", partial(report.blocks, op="ffn_training"),
        "The same with gradients.",
    ),
    Spec(
        "tuned", "One block after autotune, by the tokens of a call", report.tuned,
        "Speed over the fastest dense implementation, synthetic patterns; dense: what `autotune` chose.",
    ),
    Spec(
        "layers_together", "All blocks of trained models, forward", report.layers_together,
        "Times of all layers added up, over dense. Pruned blocks compute the same on the timed tokens only.",
    ),
    Spec(
        "narrow", "Dense models with fewer neurons", report.narrow,
        "Cross-entropy on held-out text and on that of the last steps, against the dense model with all neurons, all "
        "trained on the same tokens; the weights of neurons that ever fire; and the time of the blocks, estimated from "
        "each neuron's firing rate where it was kept (figure H; pruned: silent neurons cost nothing).",
    ),
    Spec(
        "frontier", "Trained and timed", report.frontier,
        "Cross-entropy on held-out text and on that of the last steps against dense ReLU; measured time of the "
        "compiled forward: of sparse models over dense products of their own weights in the same run, of dense ones "
        "and other widths over the widest with ReLU. Then cross-entropy over the least on a straight line between two "
        "dense models, ReLU or SiLU, at the same forward time (figure J; a dash: none is as slow; seeds that were not "
        "timed: the others' mean time); a win or loss where that of held-out text is more than its interval.",
    ),
    Spec(
        "frontier_costs", "Trained and timed: what else it costs", report.frontier_costs,
        "In percent of dense as above: energy of the forward; time of the blocks alone (pruned: without silent "
        "neurons); time and peak memory of a training step, after the training; the median time of the training's own "
        "steps, which ran with dense products, and their peak memory, over those of the widest with ReLU.",
    ),
    Spec(
        "sizes", "Hot-exempt L1 and fewer dense neurons, by size of model", report.sizes,
        "The neurons that hot-exempt L1 leaves active, and those of the dense ReLU model with the same cross-entropy, "
        "interpolated between widths.",
    ),
    Spec(
        "lengths", "The same L1 after shorter and longer trainings", report.lengths,
        "Held-out cross-entropy, non-zeros and dead neurons.",
    ),
    Spec(
        "random_ids", "Forward on text, on random token ids, and in FP8", report.random_ids,
        "The paper's benchmark reads uniformly random ids, on which a trained model has other non-zeros. First line: "
        "the whole model, compiled, over the compiled dense one; then its blocks. FP8 products are not exact.",
    ),
    Spec(
        "generation", "Generation", summary.generation,
        "Greedy `model.generate`: new tokens over the time of the whole call. Compiled: with a cache of fixed size and "
        "a CUDA graph for each decoding step. For much of the time the GPU waits for the host.",
    ),
)  # fmt: skip

DETAILS: tuple[Spec, ...] = (
    Spec(
        "summary", "Our trainings", summary.summary,
        "Held-out cross-entropy and its change against the ReLU model without L1 of the same seed, active neurons, "
        "neurons dead in an optimizer step, and the speed of the fastest sparse plan where the last checkpoint was "
        "timed. After less than one token per parameter, losses say little about quality.",
    ),
    Spec(
        "l1_factor", "The paper's L1: as written, or 64 times that?", l1_factor.table,
        "By the released program's code, L1 in effect = nominal L1 × sequences of a step / sequences of a micro-batch: "
        "64 times the nominal one. Our rows under both readings beside the paper's numbers.",
    ),
    Spec(
        "dead_neurons", "Dead neurons by the number of tokens", summary.dead_by_window,
        "Share of neurons that fire for none of so many consecutive held-out tokens; mean over layers. The paper's "
        "optimizer step has 1,048,576 tokens.",
    ),
    Spec(
        "kernels", "Kernels", summary.kernels,
        "Every timed call on synthetic patterns (30% dead neurons, log-normal firing rates, heavy-tailed tokens), "
        "over the fastest and the uncompiled dense implementation of its run. Operations: analysis/schema.py. Floor: "
        "the time at the machine's best rates (ceilings) if every non-zero reads its weight rows again.",
    ),
    Spec(
        "exactness", "Exactness", summary.exactness,
        "The largest relative error of each backend against float32, checked in the runs behind the other tables, and "
        "that of dense products in the same runs.",
    ),
    Spec(
        "ceilings", "Ceilings", ceilings,
        "The machine's best measured rates: a plain copy, weight rows read at random, the gate product in torch.",
    ),
    Spec(
        "layers", "Layers", summary.layers,
        "A layer's non-zeros over held-out tokens (mean over seeds), the neurons that never fired (silent), and the "
        "share of all non-zeros in the most active tenth of the neurons.",
    ),
    Spec(
        "provenance", "Where the numbers come from", provenance.table,
        "Study, device, revision, versions and dates of the rows. “Changed”: the working tree had uncommitted changes, "
        "so the revision does not reproduce these rows exactly.",
    ),
)  # fmt: skip

ALL: tuple[Spec, ...] = (*TABLES, *OVERVIEW, *DETAILS)


def make(results: Results, specs: Sequence[Spec] | None = None, *, measured_only: bool = False) -> list[Table]:
    """The tables that have anything to say.

    specs: by default all.
    measured_only: of the paper's tables only the columns and lines of which this study measured something.
    """
    tables = []
    for spec in ALL if specs is None else specs:
        try:
            frame = spec.make(results)
        except DATA_ERRORS as error:
            frame = pd.DataFrame([{"cannot be made from these rows": not_made(f"table {spec.name}", error)}])
        if measured_only and "source" in frame:
            # The columns in which we have a value, and the lines that have one in any of them.
            numbers = frame.select_dtypes("number").columns.difference(["l1", "layers", "seeds"])
            ours = [name for name in numbers if choose.where(frame, source="ours")[name].notna().any()]
            kept = frame[ours].notna().any(axis=1)
            frame = frame.loc[kept].drop(columns=[*numbers.difference(ours), "note"])
        numbers = frame.select_dtypes("number")
        if len(frame) and (numbers.shape[1] == 0 or numbers.notna().any(axis=None)):
            tables.append(Table(spec.name, spec.title, spec.caption, frame))
    return tables
