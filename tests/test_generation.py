"""bench_generate on tiny models: exactly so many tokens, wrong results refused, alternatives that do not interfere."""

import pytest
import torch
from calls import change
from test_bench import rows_of
from tiny_run import MODEL, make_run
from transformers import CompileConfig

from experiments import bench_generate
from experiments.bench import generation as generation_module
from experiments.bench.generation import Generation, Generator
from experiments.models.llama import ReluFeedForward, build_model
from experiments.run.errors import ConfigError
from experiments.timing.compare import CheckFailed
from twell import Plan, feed_forward_blocks
from twell.tuning import Choice, Form, Tuning
from twell.tuning.order import order_neurons

PROMPTS = torch.arange(24).view(3, 8)


@pytest.fixture
def model():
    return build_model(MODEL, seed=1, dtype=torch.bfloat16).eval()


@pytest.fixture
def compiled_anywhere(monkeypatch):
    """Decoding steps are compiled on a CPU too, up to what inductor would do."""
    step = CompileConfig(backend="aot_eager", mode="default")
    step._compile_all_devices = True
    monkeypatch.setattr(generation_module, "DECODING_STEP", step)
    monkeypatch.setattr(generation_module, "why_not_compiled", lambda device: "")


def greedy(model, ids, count):
    """The most likely tokens, without a cache."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[:, -count:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root, "relu_l1_1e-3", "sparsity.l1=1e-3"), make_run(root, "silu", "model.activation=silu")]


def test_rows_of_models_and_batches(runs, tmp_path):
    options = [f"checkpoints=[{','.join(map(str, runs))}]", "batch=[1,3]", "prompt=8", "new_tokens=4"]
    rows = rows_of(bench_generate, tmp_path, *options, "backends=[reference,hopper]")
    assert {(row["op"], row["prompt_tokens"]) for row in rows} == {("generate", 8)}
    assert all(row["value"] is not None or row["missing"] for row in rows)
    assert {(row["batch"], row["tokens"]) for row in rows} == {(1, 4), (3, 12)}
    timed = {(r["pattern"], r["batch"], r["backend"]): r for r in rows if r["metric"] == "throughput"}
    dense, others = ["dense_eager", "dense_compiled"], ["reference", "reference_compiled", "hopper", "hopper_compiled"]
    assert set(timed) == {("relu_l1_1e-3", batch, name) for batch in (1, 3) for name in dense + others} | {
        ("silu", batch, name) for batch in (1, 3) for name in dense
    }
    sparse = timed["relu_l1_1e-3", 3, "reference"]
    assert (sparse["plan"], sparse["l1"], sparse["baseline"]) == ("twell", 1e-3, "dense_eager")
    assert sparse["ratio"] == pytest.approx(sparse["value"] / timed["relu_l1_1e-3", 3, "dense_eager"]["value"])
    assert 0 < sparse["check_error"] < 0.05
    assert "GPUs only" in timed["silu", 1, "dense_compiled"]["missing"]
    assert "CUDA device" in timed["relu_l1_1e-3", 1, "hopper_compiled"]["missing"]
    same = {r["backend"]: r["value"] for r in rows if r["metric"] == "same_tokens"}
    assert set(same) == {"dense_eager", "reference"}
    assert same["dense_eager"] == 1.0


def test_the_most_likely_tokens_are_generated_and_no_end_stops_them(model):
    wanted = greedy(model, PROMPTS, 6)
    assert torch.equal(Generator(model, PROMPTS, 6, None)(), wanted)
    model.generation_config.eos_token_id = wanted[0, 1].item()
    for _ in range(2):
        assert Generator(model, PROMPTS, 6, None)().shape == (3, 6)
    assert Generation(model, PROMPTS, 6).tokens.shape == (3, 14)


def test_a_cache_of_fixed_size_may_be_used_again(model):
    generation = Generation(model, PROMPTS, 6)
    generator = generation._generator(model, compiled=True)
    wanted = generation.tokens[:, 8:]
    for _ in range(2):
        assert torch.equal(generator(), wanted)
    kept = {tensor.shape for tensor in generator.tensors()}
    assert (3, 2, 14, 8) in kept, "keys and values for prompt and new tokens"


@pytest.mark.slow
def test_a_decoding_step_is_one_graph_whatever_the_backend(model, compiled_anywhere):
    counters = torch._dynamo.utils.counters
    counters.clear()
    generation = Generation(model, PROMPTS, 6)
    found = generation.alternatives(["dense_eager", "dense_compiled"], ["reference"])
    assert [one.backend for one in found] == ["dense_eager", "dense_compiled", "reference", "reference_compiled"]
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for one in found * 2:
        assert torch.equal(one.call(), generation.tokens[:, 8:])
    assert counters["stats"]["unique_graphs"] == 2, "alternatives leave each other's code alone"


@pytest.mark.slow
def test_backends_have_the_forms_of_dense_products(model, compiled_anywhere):
    compiled = Generation(model, PROMPTS, 4).alternatives(["dense_compiled"], ["reference"])
    assert [one.backend for one in compiled] == ["dense_compiled", "reference_compiled"]


def test_alternatives_share_weights_and_leave_the_model_as_it_was(model):
    before = {name: (weight.clone(), weight.stride()) for name, weight in model.named_parameters()}
    dense, sparse = Generation(model, PROMPTS, 4).alternatives(["dense_eager"], ["reference"])
    assert [one.backend for one in (dense, sparse)] == ["dense_eager", "reference"]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name][0])
        assert weight.stride() == before[name][1]
    own = {id(weight) for weight in model.parameters()}
    for alternative in (dense, sparse):
        assert all(id(weight) in own for weight in alternative.call.model.parameters())


@pytest.mark.parametrize(("positions", "what"), [(1, "logits of the new tokens"), (8, "hidden states of the prompt")])
def test_an_error_of_decoding_steps_alone_or_of_the_prompts_forward_is_found(model, monkeypatch, positions, what):
    right = ReluFeedForward.forward

    def wrong(block, x):
        return right(block, x) * (2.0 if block.plan.backend == "reference" and x.shape[1] == positions else 1.0)

    monkeypatch.setattr(ReluFeedForward, "forward", wrong)
    with pytest.raises(CheckFailed, match=f"reference, {what}"):
        Generation(model, PROMPTS, 6).alternatives(["dense_eager"], ["reference"])


@pytest.mark.slow
def test_each_block_as_is_fastest_for_the_prompts_and_for_a_decoding_step(model, monkeypatch, compiled_anywhere):
    seen = []

    def choose(tuned, ids, *, use_cache):
        seen.append(ids.tolist())
        first, block = feed_forward_blocks(tuned)
        order_neurons(block, torch.arange(31, -1, -1))  # in place: other alternatives must not notice
        block.plan = Plan("reference", hot=8)
        first.keep_stats = True
        change(first, up_to=[(3, "reference"), (4, "dense")])
        dense, hot = Form("dense"), Form("reference", in_front=True)
        few = ((3, "reference"), (4, "dense"))
        choices = (
            Choice(Plan("dense", up_to=few), 9.0, {dense: 1.0}),
            Choice(Plan("reference", hot=8), 3.0, {dense: 2.0, hot: 1.0}),
        )
        return Tuning(choices)

    monkeypatch.setattr(generation_module, "autotune", choose)
    generation = Generation(model, PROMPTS, 6)
    *_, auto, compiled = generation.alternatives(["dense_eager", "dense_compiled"], ["auto"])
    assert seen == [PROMPTS.tolist()], "once"
    assert [(one.backend, one.plan) for one in (auto, compiled)] == [
        *(("reference", "by_layer"), ("reference_compiled", "by_layer")),
    ]
    for one in (auto, compiled):
        blocks = feed_forward_blocks(one.call.model)
        assert [(block.plan.backend, block.plan.hot) for block in blocks] == [("dense", 0), ("reference", 8)]
        assert blocks[0].stats.backend == "reference", "in a decoding step of three sequences"
    assert torch.equal(generation.as_it_comes(), greedy(model, PROMPTS, 6))


def test_auto_says_why_there_is_nothing_to_choose(model):
    (absent,) = Generation(model, PROMPTS, 4).alternatives([], ["auto"])
    assert (absent.backend, absent.plan) == ("auto", "by_layer")
    assert "no sparse backend" in absent.reason


def test_more_tokens_than_the_model_takes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="smoke takes at most 32 tokens; prompt\\+new_tokens=33"):
        rows_of(bench_generate, tmp_path, "model=smoke", "prompt=30", "new_tokens=3")
