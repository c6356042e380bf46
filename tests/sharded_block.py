"""One process of two that train blocks under FSDP2 (`fully_shard`), for test_modules.py and, on two GPUs, for
test_training_gpu.py: prints what it found.

python tests/sharded_block.py RANK STORE [BACKEND]
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from calls import change, make_block, run_ffn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from twell import (
    SparseFeedForward,
    autotune,
    feed_forward_blocks,
    l1_penalty,
    load_plans,
    save_plans,
)
from twell.testing import relative_error
from twell.tuning import training
from twell.tuning.order import order_neurons

TOKENS, HIDDEN, NEURONS, RANKS = 12, 16, 40, 2


def make(backend: str = "reference", times: int = 1, **to: Any) -> tuple[nn.Sequential, torch.Tensor]:
    """Two blocks and the inputs of both processes, all sizes so many times as large, with this device and dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(*(make_block(times * HIDDEN, times * NEURONS, backend=backend) for _ in range(2))).to(**to)
    for parameter in model.parameters():  # as README.md says
        parameter.data = parameter.data.contiguous()
    return model, torch.randn(RANKS, times * TOKENS, times * HIDDEN).to(**to)


class Failing(nn.Module):
    """The model, which fails behind so many of its blocks."""

    def __init__(self, model: nn.Sequential, blocks: int) -> None:
        super().__init__()
        self.model, self.blocks = model, blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for done, block in enumerate((*self.model, nn.Identity())):
            if done == self.blocks:
                raise ValueError(f"no memory behind {done}")
            x = block(x)
        return x


def step(model: nn.Module, x: torch.Tensor) -> None:
    """A step of SGD; the loss and its L1 term are means over the tokens."""
    (model(x).square().mean() + 0.1 * l1_penalty(model)).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def trained(*of: Any, **to: Any) -> float:
    """Largest relative difference between gradients, and weights, after a step of the two processes, and of one with
    both batches."""
    (whole, x), (sharded, _) = make(*of, **to), make(*of, **to)
    step(whole, x)
    for block in feed_forward_blocks(sharded):
        fully_shard(block)
    fully_shard(sharded)
    step(sharded, x[dist.get_rank()])
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    pairs = [each for ours, theirs in pairs for each in ((ours.grad, theirs.grad), (ours, theirs))]
    return max(relative_error(ours.full_tensor(), theirs) for ours, theirs in pairs)


def tuned() -> str:
    """What this process chose for sharded blocks whose dense products it timed with 1 or 3 ms, sparse ones with 1.5 ms,
    and the non-zeros that it based this on."""
    model, x = make()
    for block in feed_forward_blocks(model):
        change(block, backend="dense")
        fully_shard(block)
    rank = dist.get_rank()
    training.quick_times = lambda calls, device: {
        trial: (1.0, 3.0)[rank] if trial.backend == "dense" else 1.5 for trial in calls
    }
    found = autotune(model, x[rank], backends=["reference"])
    step(model, x[rank])
    try:  # no tokens in one process: none of them goes on
        autotune(model, x[rank][: rank * TOKENS], backends=["reference"])
    except (RuntimeError, ValueError) as error:
        print(error)
    plain, _ = make()
    for failing in (0, 1, 2):  # in one process, outside a block: before the first, between two, behind the last
        try:
            autotune(Failing(plain, failing if rank else -1), x[rank], backends=["reference"])
        except (RuntimeError, ValueError) as error:
            print(error)
    nonzeros = " ".join(f"{choice.mean_nonzeros:.4f}" for choice in found)
    return f"{' '.join(choice.plan.backend for choice in found)} at {nonzeros}"


def tuned_before() -> float:
    """Largest difference of outputs and gradients between blocks that one process tuned for inference and both then
    sharded, in the way that the documentation says, and the same ones unsharded."""
    (whole, x), (sharded, _) = make(), make()
    whole.eval()
    if dist.get_rank() == 0:
        autotune(whole, x[0], backends=["reference"])
        order_neurons(whole[0], torch.arange(NEURONS).flip(0))
        change(whole[0], hot=8)
    told = [whole.state_dict(), save_plans(whole)]
    dist.broadcast_object_list(told)
    for model in (whole, sharded):
        model.load_state_dict(told[0])
    for parameter in sharded.parameters():  # as README.md says
        parameter.data = parameter.data.contiguous()
    for block in feed_forward_blocks(sharded):
        fully_shard(block)
    fully_shard(sharded)
    for model in (whole, sharded):
        load_plans(model, told[1])
    differences = []
    for model in (whole, sharded):
        model(x[0]).square().mean().backward()
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        differences.append((ours.grad.full_tensor() - theirs.grad).abs().max().item())
    with torch.no_grad():
        differences.append((sharded(x[0]) - whole(x[0])).abs().max().item())
    return max(differences)


def refused(call) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)
    rank, store, *backend = sys.argv[1:]
    if backend:
        torch.cuda.set_device(int(rank))
    dist.init_process_group(init_method=f"file://{store}", rank=int(rank), world_size=RANKS)
    if backend:
        print(f"off by {trained(*backend, 16, device='cuda', dtype=torch.bfloat16):.2g}")
        return dist.destroy_process_group()
    print(f"off by {trained():.2g}")
    print(tuned())
    print(f"off by {tuned_before():.2g}")
    mesh, (model, x) = init_device_mesh("cpu", (RANKS,)), make()
    block = feed_forward_blocks(model)[0]
    gate = parallelize_module(nn.Linear(HIDDEN, NEURONS, bias=False), mesh, ColwiseParallel()).weight
    print(refused(lambda: run_ffn(x, gate, block.up_proj.weight, block.down_proj.weight)))
    parallelize_module(block, mesh, {"up_proj": ColwiseParallel()})
    print(refused(lambda: block(x)))
    fully_shard(model[1])
    print(refused(lambda: autotune(model[1:].eval(), x)))
    print(refused(lambda: SparseFeedForward.from_linears(None, model[1].up_proj, model[1].down_proj)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
