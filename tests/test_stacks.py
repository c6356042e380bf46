"""The block inside other people's stacks: what runs is counted, and what would run something else is refused."""

import copy

import pytest
import torch
from tiny_models import SIZES, TOKENS
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from twell import (
    autotune,
    autotune_training,
    feed_forward_blocks,
    l1_penalty,
    load_plans,
    prune_silent,
    save_plans,
    sparsify,
)
from twell.ordering import restore_order

PROGRAMS = {
    "autotune": lambda model: autotune(model, TOKENS),
    "autotune_training": lambda model: autotune_training(model, TOKENS),
    "feed_forward_blocks": feed_forward_blocks,
    "l1_penalty": l1_penalty,
    "load_plans": lambda model: load_plans(model, [{"backend": "dense"}] * 2),
    "prune_silent": lambda model: prune_silent(model, TOKENS),
    "restore_order": restore_order,
    "save_plans": save_plans,
    "sparsify": sparsify,
}


def tiny(**changes) -> nn.Module:
    torch.manual_seed(0)
    return sparsify(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})), activation="relu", keep_stats=True)


def bind_silu(block: nn.Module) -> None:
    """As Liger binds its forward to an MLP of an existing model."""

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    block.__dict__["forward"] = forward.__get__(block, type(block))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_block_whose_forward_was_replaced_is_refused(program):
    model = tiny()
    model(TOKENS)
    bind_silu(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=r"^model.layers.1.mlp has a forward .*use_liger_kernel=True"):
        PROGRAMS[program](model)


def test_ligers_swiglu_is_refused_and_its_other_kernels_are_not(monkeypatch):
    pytest.importorskip("liger_kernel")
    from transformers.integrations.liger import apply_liger_kernel  # what the Trainer calls before the first step

    for name in ("LlamaMLP", "LlamaRMSNorm"):  # which Liger replaces for the whole process
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    others = dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy"), False)
    model = tiny()
    apply_liger_kernel(model, {**others, "swiglu": False})
    assert len(feed_forward_blocks(model)) == 2
    apply_liger_kernel(model, others)
    with pytest.raises(ValueError, match="use_liger_kernel=True"):
        feed_forward_blocks(model)


# PEFT


class ModulesToSave(nn.Module):
    """What PEFT's wrapper of that name holds and calls; with PEFT installed, the test below uses its own."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})
        self.active_adapters, self.disable_adapters = ["default"], False

    def forward(self, x):
        return (self.original_module if self.disable_adapters else self.modules_to_save["default"])(x)


def wrapped() -> nn.Module:
    model = tiny()
    for layer in model.model.layers:
        layer.mlp = ModulesToSave(layer.mlp)
    return model


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["mlp"], "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(tiny(), peft.LoraConfig(**settings))


@pytest.mark.parametrize("make", [wrapped, adapted])
def test_of_copies_the_one_that_runs_is_counted(make):
    model = make()
    blocks = feed_forward_blocks(model)
    assert len(blocks) == 2
    assert all(weight.requires_grad for block in blocks for weight in block.parameters())
    ran = []
    for block in blocks:
        block.register_forward_hook(lambda block, *_: ran.append(block))
    model(TOKENS)
    assert ran == blocks
    penalty = l1_penalty(model)
    assert penalty == torch.stack([block.stats.l1 for block in blocks]).mean()
    penalty.backward()
    assert blocks[0].up_proj.weight.grad.abs().sum() > 0
    assert len(autotune(model, TOKENS)) == 2
    assert len(save_plans(model)) == 2


def test_without_the_adapter_the_original_runs():
    model = adapted()
    copies = feed_forward_blocks(model)
    with model.disable_adapter():
        assert not set(copies) & set(feed_forward_blocks(model))
        assert len(autotune(model, TOKENS)) == 2
    assert feed_forward_blocks(model) == copies
