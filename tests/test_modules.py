"""SparseFeedForward and sparsify on tiny random Hugging Face models."""

import copy
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import change, make_block
from programs import run_shards
from tiny_models import SIZES, TOKENS, llama
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from twell import Plan, SparseFeedForward, autotune, feed_forward_blocks, l1_penalty, prune_silent, sparsify
from twell.memory import in_rows, neuron_major


@pytest.fixture
def block() -> SparseFeedForward:
    torch.manual_seed(0)
    return make_block(16, 40)


# The module


@pytest.mark.parametrize("gated", [True, False])
def test_block_is_the_plain_one(gated):
    block, x = make_block(16, 40, gated=gated), torch.randn(2, 5, 16)
    assert block.stats is None
    y, up = block(x), block.up_proj(x)
    assert torch.equal(y, block.down_proj(F.relu(block.gate_proj(x)) * up if gated else F.relu(up)))
    assert block.stats.nonzeros.shape == (2, 5)
    assert (block.stats.backend, block.gated) == ("dense", gated)
    assert set(block.state_dict()) == {*["gate_proj.weight"] * gated, "up_proj.weight", "down_proj.weight"}


def test_settings_take_effect_and_are_checked(block):
    x = torch.randn(3, 16)
    block.plan = plan = Plan("reference", (1, 7), ((2, "dense"),), 16, 0.25)
    block(x)
    assert block.stats.backend == "reference"
    block(x[:2])
    assert block.stats.backend == "dense"
    assert "reference, dense up to 2 tokens, 2 hot neurons by index, capacity 16, backup 0.25" in repr(block)
    block.keep_stats = False
    block(x)
    assert block.stats is None
    for wrong, message in (
        ("fast", "backend must be one of auto, dense, .* got 'fast'"),
        ({"backup": -0.5}, r"backup must be a share of the tokens from 0 to 1, got -0\.5"),
        ({"capacity": 0}, "capacity must be None or a whole number"),
        ({"hot": [1, 1]}, "distinct neurons"),
        ({"hot": -1}, "hot must be"),
        ({"hot": 41}, "40 neurons, got 41"),
        ({"speed": 3}, "has the fields backend, hot, up_to, capacity, backup, screened, got 'speed'"),
        (7, "a Plan or a backend's name, got 7"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            block.plan = Plan.of(wrong)
    assert block.plan == plan
    assert Plan.of(json.loads(json.dumps(plan.as_dict()))) == plan


@pytest.mark.parametrize(("sizes", "name"), [((0, 3), "hidden_size"), ((64, 128.0), "intermediate_size")])
def test_sizes_that_are_no_whole_numbers_are_refused(sizes, name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got "):
        make_block(*sizes)


def test_a_block_that_is_made_in_inference_mode_can_be_trained():
    with torch.inference_mode():
        block = make_block(16, 40)
        block(torch.randn(3, 16))
    block(torch.randn(3, 16)).sum().backward()
    assert all(weight.grad.any() for weight in block.parameters())


def test_the_backup_is_that_of_the_block():
    torch.manual_seed(0)
    block, x = make_block(16, 40, backend="reference", capacity=1, backup=0.25), torch.randn(8, 16)
    assert block.plan.backup == 0.25
    y = block(x)
    assert block.stats.overflow == 6, "rows of more than one non-zero"
    change(block, backup=1.0)
    torch.testing.assert_close(block(x), y)
    assert block.stats.overflow == 0
    change(block, backup=0.0)
    block(x)
    assert block.stats.overflow == 8


def test_copies_and_pickles_keep_the_plan_and_leave_the_statistics_behind(block):
    x = torch.randn(3, 16)
    block.plan = plan = Plan("reference", (1, 7), ((2, "dense"),), 16, 0.25)
    y = block(x)
    assert block.stats.l1.requires_grad
    for other in (copy.deepcopy(block), _saved_whole(block)):
        assert (other.plan, other.stats) == (plan, None)
        assert torch.equal(other(x), y)
    assert block.stats is not None


def test_from_linears_shares_the_parameters():
    gate, up, down = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
    block = SparseFeedForward.from_linears(gate, up, down, plan="dense")
    assert block.up_proj.weight is up.weight
    assert block.gate_proj is gate
    assert all(p.device.type == "cpu" for p in block.parameters())


def test_names_are_those_of_three_layers():
    up, down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
    with pytest.raises(ValueError, match=r"names must be those of gate .*, three, got \('fc1', 'fc2'\)"):
        SparseFeedForward.from_linears(None, up, down, names=("fc1", "fc2"))


def test_sizes_may_be_numpys_and_a_plan_is_no_third_size():
    assert SparseFeedForward(np.int64(8), np.int64(12)).up_proj.weight.shape == (12, 8)
    with pytest.raises(TypeError, match="positional"):
        SparseFeedForward(64, 256, "reference")


def loss_and_gradients(block: nn.Module, run, x: torch.Tensor) -> list[torch.Tensor]:
    block.zero_grad()
    y = run(x)
    inner = getattr(block, "module", block)
    (y.square().mean() + 0.1 * inner.stats.l1).backward()
    return [p.grad.clone() for p in block.parameters()]


def test_what_checkpointing_repeats_leaves_no_statistics(block):
    """Their graph would keep all that was computed again in memory until the next forward."""
    norm = nn.LayerNorm(16)
    y = checkpoint(lambda x: norm(block(x)), torch.randn(6, 16), use_reentrant=False)
    first = block.stats
    (y.square().mean() + 0.1 * first.l1).backward()
    assert block.stats is first


@pytest.mark.parametrize(
    ("stats", "compiled"), [(True, False), (True, True), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_training_with_gradient_checkpointing(stats, compiled):
    torch.manual_seed(0)
    model = sparsify(llama(), keep_stats=stats).train()

    def gradients(run):
        model.zero_grad()
        loss = run(TOKENS, labels=TOKENS, use_cache=False).loss
        (loss + (0.1 * l1_penalty(model) if stats else 0)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    wanted = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        got = gradients(torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_term_without_gradient_beside_others_is_noticed():
    """As with reentrant checkpointing of some layers."""
    model = nn.Sequential(*(make_block(8, 24, keep_stats=True) for _ in range(2)))
    with torch.no_grad():
        x = model[0](torch.randn(4, 8))
    model[1](x)
    with pytest.raises(ValueError, match="the L1 term of 1 of 2 trained blocks has no gradient"):
        l1_penalty(model)
    model[0].requires_grad_(False)
    assert l1_penalty(model).requires_grad
    with torch.no_grad():
        assert l1_penalty(model) > 0


def test_data_parallel_is_refused_with_what_to_use(block, monkeypatch):
    module = sys.modules[nn.parallel.replicate.__module__]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, *_, **__: [tensors, tensors])
    with pytest.raises(NotImplementedError, match="torchrun"):
        module.replicate(nn.Sequential(block), [0, 1])


def test_distributed_data_parallel(block):
    x = torch.randn(6, 16)
    wanted = loss_and_gradients(block, block, x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(block)
        for _ in range(2):
            got = loss_and_gradients(parallel, parallel, x)
    finally:
        dist.destroy_process_group()
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_two_processes_shard_blocks_and_tensor_parallelism_is_refused(tmp_path):
    choices = set()
    for found in run_shards(tmp_path / "store"):
        trained, failed, *outside, tuned, before, gate, up, inference, linears = found.splitlines()
        assert [text[-18:] for text in outside] == [f"no memory behind {done}"[-18:] for done in range(3)], "in both"
        choices.add(tuned)
        assert failed.endswith("autotune needs inputs with at least one token"), "in both"
        assert float(trained.removeprefix("off by ")) < 1e-6
        assert float(before.removeprefix("off by ")) < 1e-6
        assert re.match("w_gate is a DTensor, .* tensor parallelism is not supported", gate)
        assert re.match("a layer of a sparse block has hooks .* shard whole blocks", up)
        assert inference.startswith("autotune in eval mode takes no sharded weights (DTensors): run it before that")
        assert linears.startswith("up_proj.weight is sharded (a DTensor): make the blocks first, then call fully_shard")
    (both,) = choices
    assert both.startswith("reference reference at "), "by the mean of the processes' times"


@pytest.mark.parametrize("change_block", [lambda model, x: autotune(model.eval(), x), prune_silent])
def test_replicas_are_not_changed_for_inference(change_block, block):
    """Each process would sort or remove the neurons of its own text."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.parallel.DistributedDataParallel(block))
        with pytest.raises(ValueError, match="takes no DistributedDataParallel: run it before that, in one process"):
            change_block(model, torch.randn(6, 16))
    finally:
        dist.destroy_process_group()


def test_what_goes_by_neuron_is_no_buffer(block):
    """`to_empty` would leave garbage there, torch's AveragedModel and DDP would pair it with another model's."""
    block.plan, block.l1_weight = Plan("reference", (1, 7)), torch.arange(40.0)
    x, wanted = torch.randn(6, 16), {**block.state_dict()}
    y, l1 = block(x), block.stats.l1
    assert not [*block.buffers()]
    block.bfloat16().float().to("meta")
    block(torch.empty(6, 16, device="meta"))
    with pytest.raises(ValueError, match=r"l1_weight must have the shape \[40\] .* got \[40\] on meta"):
        block.l1_weight = torch.ones(40, device="meta")
    block.l1_weight = block.l1_weight * 1
    block.to_empty(device="cpu").load_state_dict(wanted)
    for other in (block, copy.deepcopy(block), _saved_whole(block)):
        torch.testing.assert_close((other(x), other.stats.l1), (y, l1))
    exported = torch.export.export(block, (x,)).module()
    torch.testing.assert_close(exported(x), y)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_what_goes_by_neuron_follows_the_weights(compiled):
    """fully_shard moves parameters and buffers without a word to the block; inference must not make it untrainable."""
    block = make_block(16, 40, backend="reference", hot=(1, 7))
    block.l1_weight = torch.ones(40)
    for parameter in block.parameters():
        parameter.data = parameter.data.cuda()
    call = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    with torch.inference_mode():
        call(torch.randn(6, 16, device="cuda"))
    (call(torch.randn(6, 16, device="cuda")).sum() + block.stats.l1).backward()
    assert all(weight.grad.any() for weight in block.parameters())


def test_the_l1_term_is_the_mean_of_the_blocks(block):
    model = sparsify(llama(), keep_stats=True)
    loss = model(TOKENS, labels=TOKENS).loss + 0.1 * l1_penalty(model)
    assert loss.requires_grad
    terms = [b.stats.l1 for b in feed_forward_blocks(model)]
    torch.testing.assert_close(l1_penalty(model), sum(terms) / len(terms))
    l1_penalty(model).backward()
    assert all(b.gate_proj.weight.grad.any() for b in feed_forward_blocks(model))
    with pytest.raises(ValueError, match="1 of 1 blocks have no statistics: set keep_stats"):
        l1_penalty(block)
    with pytest.raises(ValueError, match=r"Linear has no SparseFeedForward; `sparsify`"):
        l1_penalty(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str: load it first"):
        l1_penalty("model")


def test_an_l1_term_without_a_gradient_is_refused(block):
    x = torch.randn(3, 16)
    with torch.no_grad():
        block(x)
        assert l1_penalty(block) > 0
    with pytest.raises(ValueError, match=r"no gradient: .* torch.no_grad, or under activation checkpointing"):
        l1_penalty(block)
    checkpoint(block, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(ValueError, match=r"use_reentrant=True"):
        l1_penalty(block)
    block.requires_grad_(False)(x.detach())
    assert not l1_penalty(block).requires_grad


# sparsify


def test_sparsify_keeps_function_and_parameters():
    model = llama()
    wanted = model(TOKENS).logits
    parameters = dict(model.named_parameters())
    assert sparsify(model, keep_stats=True) is model
    blocks = feed_forward_blocks(model)
    assert blocks == [layer.mlp for layer in model.model.layers]
    assert len(blocks) == SIZES["num_hidden_layers"]
    assert not any(block.training for block in blocks)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in parameters)
    torch.testing.assert_close(model(TOKENS).logits, wanted)
    assert all(block.stats.nonzeros.shape == TOKENS.shape for block in blocks)


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_generate(backend):
    model = llama()
    arguments = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    wanted = model.generate(TOKENS, **arguments)
    assert torch.equal(sparsify(model, plan=backend).generate(TOKENS, **arguments), wanted)


def _loaded(block, **how):
    block.load_state_dict({name: value.contiguous() for name, value in block.state_dict().items()}, **how)
    return block


def _saved_whole(block):
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _with_another_layer(block):
    block.down_proj = nn.Linear(40, 16, bias=False)
    return block


def _made_in_inference_mode(_):
    with torch.inference_mode():
        return SparseFeedForward(16, 40)


WAYS = {
    "itself": lambda block: block,
    "from_linears": lambda block: SparseFeedForward.from_linears(*(nn.Linear(k, n, bias=False) for k, n in SHAPES)),
    "sparsify": lambda _: feed_forward_blocks(sparsify(llama()))[0],
    "dtype": lambda block: block.to(torch.bfloat16),
    "to_empty": lambda block: block.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "saved whole": _saved_whole,
    "load_state_dict": _loaded,
    "assign": lambda block: _loaded(block, assign=True),
    "assign to a copy": lambda block: _loaded(copy.deepcopy(block), assign=True),
    "another layer": _with_another_layer,
    "inference_mode": _made_in_inference_mode,
}
SHAPES = ((16, 40), (16, 40), (40, 16))


@pytest.mark.parametrize("way", WAYS)
def test_down_weights_are_neuron_by_neuron_in_memory(way):
    down = WAYS[way](SparseFeedForward(16, 40)).down_proj.weight
    assert down.t().is_contiguous()
    assert not down.is_contiguous()
    assert down.requires_grad
    assert not down.is_inference()


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_were_made_contiguous_stay_so(assign):
    """DeepSpeed's ZeRO moves the model, and then broadcasts the bytes of its weights."""
    block, state = SparseFeedForward(16, 40), SparseFeedForward(16, 40).state_dict()
    block.down_proj.weight.data = block.down_proj.weight.data.contiguous()
    address = block.down_proj.weight.data_ptr()
    block.load_state_dict({name: value.contiguous() for name, value in state.items()}, assign=assign)
    assert block.down_proj.weight.is_contiguous()
    assert assign or block.down_proj.weight.data_ptr() == address
    assert block.to(torch.float64).bfloat16().down_proj.weight.is_contiguous()


def test_the_layout_is_that_of_gradients_and_of_an_optimizers_state(block):
    optimizer = torch.optim.AdamW(block.parameters(), fused=True)
    block(torch.randn(3, block.up_proj.in_features)).sum().backward()
    optimizer.step()
    down = block.down_proj.weight
    assert down.grad.stride() == optimizer.state[down]["exp_avg"].stride() == down.stride()


def test_another_activation_must_be_replaced_explicitly():
    model = llama(activation="silu")
    with pytest.raises(ValueError, match=r'layers.0.mlp has the activation SiLU.*pass activation="relu"'):
        sparsify(model)
    with pytest.raises(ValueError, match=r'activation must be None .* or "relu2", got \'gelu\''):
        sparsify(model, activation="gelu")
    with pytest.raises(ValueError, match="must be one of"):
        sparsify(model, activation="relu", plan="fast")
    assert not feed_forward_blocks(model)
    assert model.config.hidden_act == "silu"
    before = model(TOKENS).logits
    assert not torch.allclose(sparsify(model, activation="relu")(TOKENS).logits, before)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("columns", [64, 63])
def test_in_rows_is_as_tma_wants_it(rows, columns):
    own = torch.randn(rows, 64).bfloat16()
    padded, shifted = torch.zeros(rows, 67).bfloat16(), torch.zeros(rows * 64 + 1).bfloat16()
    padded[:, 1:65], shifted[1:] = own, own.flatten()
    ways = (own, padded[:, 1:65], shifted[1:].view(rows, 64), own.t().contiguous().t(), own.expand(rows, 64))
    for matrix in (way[:, :columns] for way in ways):
        found = in_rows(matrix)
        assert torch.equal(found, own[:, :columns])
        assert found.stride(1) == 1
        assert found.data_ptr() % 16 == 0
        assert found.stride(0) % 8 == 0 or columns == 63
        assert (found is matrix) == (matrix.stride() == (64, 1) and matrix.data_ptr() % 16 == 0)


@pytest.mark.parametrize("laid_out", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_neuron_major_casts_and_is_differentiable(dtype, laid_out):
    w = torch.randn(3, 5)
    w = (w.t().contiguous().t() if laid_out else w).requires_grad_()
    ours = neuron_major(w, dtype)
    assert ours.stride() == (1, 3)
    assert torch.equal(ours, w.to(dtype or w.dtype))
    assert (ours is w) == (laid_out and dtype is not torch.bfloat16)
    ours.mul(torch.arange(15.0).view(3, 5)).sum().backward()
    assert torch.equal(w.grad, torch.arange(15.0).view(3, 5))


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 4)])
def test_neuron_major_takes_matrices_only(shape):
    with pytest.raises(ValueError, match=r"w_down must have shape \[hidden, intermediate\], got \["):
        neuron_major(torch.ones(shape))


IMPORTED_AND_USED = """
import logging, sys
import torch
from torch.optim import optimizer

def state():
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    modules = torch.nn.modules.module
    return (
        *map(len, hooks), len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks),
        sys.excepthook, len(logging.getLogger().handlers), logging.getLogger().level,
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.random.get_rng_state().sum(),
    )

before = state()
import twell
for name in twell.__all__:
    getattr(twell, name)
assert state() == before
block = twell.SparseFeedForward(4, 8, device="meta")
assert state() == before
print("unchanged")
"""


def test_importing_the_package_changes_nothing_in_the_process():
    result = subprocess.run([sys.executable, "-c", IMPORTED_AND_USED], capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "unchanged", result.stderr
