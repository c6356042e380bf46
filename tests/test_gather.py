"""Counts of active neurons equal a plain count, and on a model its own statistics."""

import numpy
import pandas
import pytest
import torch
from tiny_run import make_run

from experiments.bench.patterns import Masks, problem_from_mask
from experiments.gather_nonzeros import GatherConfig, main
from experiments.models.checkpoint import load_trained
from experiments.models.llama import feed_forward_blocks
from experiments.models.subject import load_subject
from experiments.nonzeros import gatherer
from experiments.nonzeros.counters import DeadCounter, LayerActivity, MaskRecorder
from experiments.nonzeros.tables import tables
from experiments.run.config import parse
from experiments.run.errors import ConfigError, DataError, RunError
from experiments.run.results import read_rows
from experiments.study.definition import ACTIVITY_FILES
from twell.testing import plain_ffn

VOCABULARY, SEQUENCE, NEURONS, GROUPS = 11, 24, 40, [2, 4, 12, 5]


@pytest.fixture
def stream():
    """Three batches of different sizes; some neurons never fire, one nearly always does."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.rand(NEURONS, generator=generator) ** 4
    rates[:5], rates[7] = 0.0, 0.95
    batches = []
    for batch in (2, 3, 1):
        active = torch.rand(batch, SEQUENCE, NEURONS, generator=generator) < rates
        batches.append((active, torch.randint(VOCABULARY, (batch, SEQUENCE), generator=generator)))
    return batches


@pytest.fixture
def counted(stream):
    layer = LayerActivity(NEURONS, VOCABULARY, SEQUENCE, GROUPS, "cpu")
    for active, ids in stream:
        assert torch.equal(layer.add(active, ids), active.sum(-1))
    return layer


def flat(stream):
    active = torch.cat([active for active, _ in stream])
    return active, torch.cat([ids for _, ids in stream]), active.sum(-1)


def test_counts_equal_plain_counting(stream, counted):
    active, ids, counts = flat(stream)
    assert counted.tokens == counts.numel()
    assert counted.mean() == pytest.approx(counts.double().mean().item())
    assert counted.maximum() == counts.max()
    assert torch.equal(counted.histogram_N1, torch.bincount(counts.flatten(), minlength=NEURONS + 1))
    assert torch.equal(counted.fired_N, active.sum((0, 1)))
    assert torch.equal(counted.position_S, counts.sum(0))
    assert counted.position_tokens_S.tolist() == [6] * SEQUENCE
    for token in range(VOCABULARY):
        assert counted.token_V[token] == counts[ids == token].sum()


def test_quantiles_are_exact(stream, counted):
    counts = flat(stream)[2].flatten().sort().values
    shares = [0.01, 0.25, 0.5, 0.99, 1.0]
    wanted = [int(counts[max(int(numpy.ceil(share * len(counts))), 1) - 1]) for share in shares]
    assert counted.quantiles(shares) == wanted


def test_silent_and_hot_neurons(stream, counted):
    fired = flat(stream)[0].sum((0, 1))
    assert counted.silent_fraction() == (fired == 0).sum() / NEURONS >= 5 / NEURONS
    hottest = fired.sort(descending=True).values[:4].sum() / fired.sum()
    assert counted.hot_share() == pytest.approx(hottest.item())


def test_unions_of_consecutive_tokens_do_not_cross_sequences(stream, counted):
    active = flat(stream)[0]
    for group, mean in counted.unions().items():
        windows = SEQUENCE // group
        sizes = [
            int(sequence[window * group : (window + 1) * group].any(0).sum())
            for sequence in active
            for window in range(windows)
        ]
        assert mean == pytest.approx(numpy.mean(sizes)), f"groups of {group}"
    assert list(counted.unions()) == sorted(GROUPS)


def test_nothing_active_has_no_hot_share():
    layer = LayerActivity(NEURONS, VOCABULARY, 8, [4], "cpu")
    layer.add(torch.zeros(1, 8, NEURONS, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.int64))
    assert layer.hot_share() is None
    assert layer.maximum() == 0
    assert layer.silent_fraction() == 1.0


def test_masks_of_one_run_in_a_file_of_several(stream, tmp_path):
    parts = {"masks": [], "by_layer": []}
    wanted = {}
    for number, (item, layers) in enumerate({"first": 2, "second": 1}.items()):
        recorder = MaskRecorder(40)
        layer = LayerActivity(NEURONS, VOCABULARY, SEQUENCE, GROUPS, "cpu")
        active, ids = stream[number]
        recorder.add_tokens(ids)
        for index in range(layers):
            recorder.add(index, active)
        layer.add(active, ids)
        made = tables([layer] * layers, torch.ones(VOCABULARY, dtype=torch.int64), str, recorder)
        wanted[item] = active.flatten(0, 1)[:40]
        for name, found in parts.items():
            found.append(made[name].assign(study="a_study", item=item))
    for name, found in parts.items():
        pandas.concat(found).to_parquet(tmp_path / f"nonzeros_{name}.parquet")
    path = tmp_path / "nonzeros_masks.parquet"
    for item, layers in {"first": [0, 1], "second": [0]}.items():
        masks = Masks.of(path, item)
        assert (masks.item, masks.layers()) == (item, layers)
        assert torch.equal(masks.load(0), wanted[item])
    for item, shown in {"third": "'third'", None: "None"}.items():
        with pytest.raises(DataError, match=f"holds the masks of first, second: name one of them, got {shown}"):
            Masks.of(path, item)
    parts["masks"][1].to_parquet(path)
    assert Masks.of(path).item == "second", "the only one there"


@pytest.mark.parametrize("neurons", [NEURONS, 37])
def test_masks_keep_the_first_tokens_and_come_back_equal(stream, neurons, tmp_path):
    recorder = MaskRecorder(100)
    layer = LayerActivity(neurons, VOCABULARY, SEQUENCE, GROUPS, "cpu")
    for active, ids in stream:
        active = active[:, :, :neurons]
        recorder.add_tokens(ids)
        recorder.add(0, active)
        recorder.add(1, ~active)
        layer.add(active, ids)
    made = tables([layer] * 2, torch.ones(VOCABULARY, dtype=torch.int64), str, recorder)
    for name in ("masks", "by_layer"):
        made[name].assign(item="relu").to_parquet(tmp_path / f"nonzeros_{name}.parquet")
    path = tmp_path / "nonzeros_masks.parquet"
    wanted = flat(stream)[0].flatten(0, 1)[:100, :neurons]
    masks = Masks.of(path)
    assert (masks.item, masks.layers()) == ("relu", [0, 1])
    assert torch.equal(masks.load(0), wanted)
    assert torch.equal(masks.load(1), ~wanted)
    with pytest.raises(DataError, match="layer_2"):
        masks.load(2)
    ids = flat(stream)[1].flatten()[:100].tolist()
    assert list(made["masks"]["token_id"]) == ids
    assert list(made["masks"]["text"]) == [str(token) for token in ids]
    assert list(made["masks"]["position"]) == [index % SEQUENCE for index in range(100)]
    rates = made["by_neuron"].query("layer == 1").set_index("neuron")["rate"]
    assert rates.to_numpy() == pytest.approx(flat(stream)[0][:, :, :neurons].double().mean((0, 1)).numpy())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "rows"), [(16, 144), (32, 144), (100, 144), (100, 20)])
def test_a_problem_from_a_mask_has_exactly_its_pattern(stream, gated, tokens, rows):
    """It repeats after the rows of the mask, and after K tokens: no more different ones can be made."""
    mask = flat(stream)[0].flatten(0, 1)[:rows]
    problem = problem_from_mask(mask, tokens, 32, gated=gated)
    weight = problem.w_gate if gated else problem.w_up
    distinct = min(tokens, rows, 32)
    wanted = mask[:distinct].repeat(-(-tokens // distinct), 1)[:tokens]
    assert torch.equal(torch.nn.functional.linear(problem.x, weight) > 0, wanted)
    assert problem.x.dtype == torch.bfloat16
    assert plain_ffn(*problem)[0].isfinite().all()


IN_BFLOAT16 = "training.precision=bfloat16"


def configured(run, tmp_path, *options):
    """The configuration of a call on this run that writes to the folder `out`."""
    return parse(
        GatherConfig, [f"checkpoint={run}", f"run.dir={tmp_path / 'out'}", "tokens=64", "device=cpu", *options]
    )


@pytest.mark.parametrize(
    "arguments", [["sparsity.l1=1e-4"], ["model.gated=false"], ["model.activation=silu"], [IN_BFLOAT16]]
)
def test_the_program_counts_what_the_blocks_count(tmp_path, arguments):
    run = make_run(tmp_path, "relu", *arguments)
    out = tmp_path / "out"
    main(configured(run, tmp_path, "tokens=512", "batch=3", "groups=[4,16]", "mask_tokens=40"))
    rows = read_rows(out / "rows.csv")
    per_layer = {row["layer"]: row for row in rows if row["metric"] == "nonzeros"}
    assert set(per_layer) == {None, 0, 1}
    assert {row["check_error"] for row in rows} == {0.0}, "same counts as FFNStats.nonzeros"

    loaded = load_trained(run)
    blocks, total = feed_forward_blocks(loaded.model), [0, 0]
    subject = load_subject(str(run), torch.device("cpu"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=IN_BFLOAT16 in arguments):
        for batch in subject.batches(3, 0, 512):
            loaded.model(batch[:, :-1])
            total = [before + int(block.stats.nonzeros.sum()) for before, block in zip(total, blocks, strict=True)]
    for layer in (0, 1):
        assert per_layer[layer]["value"] == pytest.approx(total[layer] / 512)
    assert per_layer[None]["value"] == pytest.approx(sum(total) / 2 / 512)
    assert per_layer[0]["model"] == "smoke"
    mask = Masks.of(out / "nonzeros_masks.parquet").load(1)
    assert mask.shape == (40, 32)

    found = {name: pandas.read_parquet(out / f"nonzeros_{name}.parquet") for name in (*ACTIVITY_FILES, "by_neuron")}
    assert all({"study", "item", "model", "l1"} <= set(table) for table in found.values())
    histogram = found["histogram"].query("layer == 0")
    assert (histogram.nonzeros * histogram.tokens).sum() == total[0]
    assert set(found["unions"].group) == {4, 16}
    tokens = found["by_token"]
    assert tokens["count"].sum() == 512
    assert tokens.frequency.sum() == pytest.approx(1)
    assert ((tokens["count"] * tokens.layer_1).sum()) == pytest.approx(total[1])
    position = found["by_position"].query("layer == 1")
    assert list(position.position) == list(range(32))
    assert (position["mean"] * position.tokens).sum() == pytest.approx(total[1])
    assert found["by_neuron"].query("layer == 1").rate.sum() * 512 == pytest.approx(total[1])


def test_counts_that_differ_from_the_blocks_own_are_an_error(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    monkeypatch.setattr(gatherer, "block_activity", lambda block, x: block.up_proj(x) < 0)
    with pytest.raises(RunError, match="differ from the blocks' own"):
        main(configured(run, tmp_path))
    assert not (tmp_path / "out" / "rows.csv").exists()


@pytest.mark.parametrize("batch", [1, 7, 10, 64])
def test_dead_neurons_are_counted_over_whole_windows_however_the_text_is_cut(batch):
    generator = torch.Generator().manual_seed(0)
    active_TN = torch.rand((64, 40), generator=generator) < 0.1
    counter = DeadCounter(10, 40, "cpu")
    for first in range(0, 64, batch):
        counter.add(active_TN[first : first + batch])
    windows_WTN = active_TN[:60].unflatten(0, (6, 10))
    assert counter.windows == 6
    assert counter.fraction() == pytest.approx((~windows_WTN.any(1)).double().mean().item())


def test_gathering_longer_sequences_than_the_model_takes_is_refused(tmp_path):
    run = make_run(tmp_path, "run")  # 32 positions
    with pytest.raises(ConfigError, match="run takes at most 32 tokens; sequence=64"):
        main(configured(run, tmp_path, "sequence=64"))
    assert not (tmp_path / "out" / "rows.csv").exists()


def test_a_text_that_has_changed_since_the_training_is_refused(tmp_path):
    """Another part of it may be held out now: what was trained on would count as held out."""
    run = make_run(tmp_path)
    (tmp_path / "text" / "60.txt").write_text("one more")
    changed = rf"relu was trained on other text: that of path:{tmp_path / 'text'} has changed since.*data=stdlib"
    with pytest.raises(DataError, match=changed):
        main(configured(run, tmp_path))
    main(configured(run, tmp_path, f"data=path:{tmp_path / 'text'}"))
    assert (tmp_path / "out" / "rows.csv").exists()


def test_a_call_without_masks_leaves_none_of_an_earlier_one(tmp_path, caplog):
    """Nor groups that are longer than a sequence."""
    run, out = make_run(tmp_path), tmp_path / "out"
    main(configured(run, tmp_path))
    assert (out / "nonzeros_masks.parquet").exists()
    main(configured(run, tmp_path, "mask_tokens=0", "groups=[16,64,128]"))
    assert not (out / "nonzeros_masks.parquet").exists()
    assert "groups of 64, 128 tokens are longer than a sequence, and left out" in caplog.text
    assert set(pandas.read_parquet(out / "nonzeros_unions.parquet").group) == {16}


@pytest.mark.parametrize("names", ["0 1 2", "train-0 val-1 test-2"])
def test_of_another_folder_all_is_read_or_the_validation_split_that_its_names_say(tmp_path, names):
    subject = load_subject(str(make_run(tmp_path)), torch.device("cpu"))
    folder = tmp_path / "mine"
    folder.mkdir()
    texts = {name: f"{name} " + f"the dog of {name} sat on the mat. " * 30 for name in names.split()}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    ids = torch.cat([batch[:, :-1] for batch in subject.batches(4, data=f"path:{folder}")])
    text = subject.loaded.tokenizer.decode(ids.flatten())
    read = ["val-1"] if "train-0" in names else list(texts)
    assert [name for name in texts if f"dog of {name} " in text] == read
    assert len(text) > sum(len(texts[name]) for name in read) - 200, "but for an incomplete sequence at its end"


def test_the_folder_of_the_training_is_held_out_as_it_was(tmp_path):
    subject = load_subject(str(make_run(tmp_path)), torch.device("cpu"))
    for data in (f"path:{tmp_path}/text", f"path:{tmp_path}/runs/../text"):
        for one, other in zip(subject.batches(8), subject.batches(8, data=data), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("content", "message"), [("", "has no text"), ("few words", "name a longer text: data=")])
def test_a_folder_with_too_little_text_gets_advice_that_helps_here(content, message, tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        main(configured(run, tmp_path, f"data=path:{tmp_path / 'mine'}"))
    assert "data.validation" not in str(caught.value)
