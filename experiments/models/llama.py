"""Transformers' Llama with the paper's feed-forward block (ReLU), or the SiLU baseline with the same statistics.

Shapes: B sequences, S positions, K hidden, N intermediate.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN

from experiments.run.errors import ConfigError
from experiments.run.torch_internals import do_not_split_graphs_for_ddp, raise_recompile_limit
from experiments.run.train_config import ModelConfig
from twell import FFNStats, Plan, SparseFeedForward
from twell.backends import dense
from twell.interface import SILU
from twell.registry import why_not
from twell.released import materialize


class ReluFeedForward(SparseFeedForward):
    """The block with sparse activations. torch.compile traces it while it is dense, but not while it is sparse:
    compilation cannot speed up a single operator, and would be repeated for each capacity and set of hot neurons. With
    `in_graph` it is traced all the same: for inference, where a CUDA graph then holds the whole model."""

    in_graph = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.in_graph or self.plan.backend == "dense" else self._uncompiled(x)

    @torch.compiler.disable
    def _uncompiled(self, x: Tensor) -> Tensor:
        return super().forward(x)


class SiluFeedForward(nn.Module):
    """The dense baseline: y = (silu(gate_proj(x)) * up_proj(x)) down_proj, or silu(up_proj(x)) without a gate.

    Names, layout, `.stats` and `.keep_stats` are those of `twell.SparseFeedForward`; its plan is always dense.
    """

    activation = "silu"
    plan = Plan()

    def __init__(self, hidden_size: int, intermediate_size: int, gated: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.keep_stats = True
        self.stats: FFNStats | None = None

    @classmethod
    def from_linears(cls, gate_proj: nn.Linear | None, up_proj: nn.Linear, down_proj: nn.Linear) -> SiluFeedForward:
        """The block around existing linear layers: the same parameters, no copies."""
        with torch.device("meta"):
            block = cls(up_proj.in_features, up_proj.out_features, gate_proj is not None)
        block.gate_proj, block.up_proj, block.down_proj = gate_proj, up_proj, down_proj
        return block

    @property
    def gated(self) -> bool:
        return self.gate_proj is not None

    def forward(self, x_BSK: Tensor) -> Tensor:
        if self.gate_proj is not None and not self.keep_stats and x_BSK.is_cuda and not torch.is_grad_enabled():
            weights = self.gate_proj.weight, self.up_proj.weight
            if dense.makes_h_at_once(x_BSK, *weights, SILU):  # as for ReLU, which would else be the faster one
                self.stats = None
                return self.down_proj(_silu_hidden(x_BSK, *weights))
        up_BSN = self.up_proj(x_BSK)
        active_BSN = F.silu(up_BSN if self.gate_proj is None else self.gate_proj(x_BSK))
        h_BSN = active_BSN if self.gate_proj is None else active_BSN * up_BSN
        self.stats = _statistics(active_BSN, h_BSN) if self.keep_stats else None
        return self.down_proj(h_BSN)


@torch.library.custom_op("experiments::silu_hidden", mutates_args=())
def _silu_hidden(x_BSK: Tensor, w_gate_NK: Tensor, w_up_NK: Tensor) -> Tensor:
    """silu(x w_gate^T) * (x w_up^T)."""
    h_BSN = dense.h_at_once(x_BSK, w_gate_NK, w_up_NK, SILU)
    return F.silu(F.linear(x_BSK, w_gate_NK)) * F.linear(x_BSK, w_up_NK) if h_BSN is None else h_BSN


@_silu_hidden.register_fake
def _(x_BSK: Tensor, w_gate_NK: Tensor, w_up_NK: Tensor) -> Tensor:
    return x_BSK.new_empty((*x_BSK.shape[:-1], w_gate_NK.shape[0]))


def _statistics(active_BSN: Tensor, h_BSN: Tensor) -> FFNStats:
    nonzero_BSN = active_BSN.detach() != 0
    return FFNStats(
        nonzeros=nonzero_BSN.sum(-1, dtype=torch.int32),
        l1=h_BSN.abs().sum(dtype=torch.float32) / max(h_BSN.shape[:-1].numel(), 1),
        fired=nonzero_BSN.flatten(0, -2).any(0),
        overflow=torch.zeros((), dtype=torch.int64, device=h_BSN.device),
        backend="dense",
    )


FeedForward = SparseFeedForward | SiluFeedForward


def feed_forward_blocks(model: nn.Module) -> list[FeedForward]:
    """The model's feed-forward blocks, in layer order."""
    return [module for module in model.modules() if isinstance(module, FeedForward)]


def compute_as_transformers(block: FeedForward, on: bool) -> None:
    """Let the block compute (`on` false: no longer) what transformers' `LlamaMLP` does, dense and without
    statistics: linear layers, activation and product, each an operation of torch. Our dense backend has one kernel for
    activation and product on a GPU, and keeps less for the backward. As a method, which torch.compile knows again: of
    another functools.partial it would compile the model again."""
    if on:
        block.forward = types.MethodType(_forward_of_transformers, block)  # type: ignore[method-assign]
    else:
        vars(block).pop("forward", None)


def _forward_of_transformers(block: FeedForward, x_BSK: Tensor) -> Tensor:
    block.stats = None
    active_BSN = activations(block, x_BSK)
    return block.down_proj(active_BSN if block.gate_proj is None else active_BSN * block.up_proj(x_BSK))


def activations(block: FeedForward, x_BSK: Tensor) -> Tensor:
    """The activations of the gate, or without a gate of the up projection, as transformers computes them."""
    projection = block.up_proj if block.gate_proj is None else block.gate_proj
    return ACT2FN[block.activation](projection(x_BSK))


def nonzeros_of(block: FeedForward) -> Tensor:
    """Non-zeros per token in the block's latest call.

    Raises:
        ValueError: the call computed no statistics.
    """
    if block.stats is None:
        raise ValueError("the block has counted nothing: its keep_stats is False")
    return block.stats.nonzeros


def activation_weight(block: FeedForward) -> Tensor:
    """The weight that determines which neurons fire, [N, K]: of the gate, or without a gate of the up projection."""
    return (block.up_proj if block.gate_proj is None else block.gate_proj).weight


def check_backend(name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` for an unknown backend, or one that cannot train this model's blocks in this dtype on this
    device. "auto" always can."""
    if name == "auto":
        return
    try:
        reason = why_not(
            name,
            device=device,
            dtype=dtype,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            gated=config.gated,
            training=True,
        )
    except ValueError as error:
        raise ConfigError(f"execution.sparse.backend={name}: {error}") from error
    if reason is not None:
        raise ConfigError(f"execution.sparse.backend={name}: it cannot train this model here: {reason}")


def llama_config(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.attention_heads,
        num_key_value_heads=config.key_value_heads,
        hidden_act=config.activation,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        attn_implementation="sdpa",  # type: ignore[call-arg]  # taken by every configuration
        bos_token_id=None,  # set from the tokenizer, see checkpoint.load_trained
        eos_token_id=None,
    )


def skeleton(config: LlamaConfig, *, activation: str, gated: bool) -> LlamaForCausalLM:
    """The model on the meta device, without memory, with our block, dense and with statistics, in every layer; see
    `materialize`.

    Raises `ValueError` for an activation other than relu, relu2 and silu, or biases in the block.
    """
    if activation not in ("relu", "relu2", "silu"):
        raise ValueError(f"activation must be relu, relu2 or silu, got {activation!r}")
    if config.mlp_bias:
        raise ValueError("the feed-forward block has no biases, but the configuration says mlp_bias=true")
    sizes = (config.hidden_size, config.intermediate_size)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            if activation == "silu":
                layer.mlp = SiluFeedForward(*sizes, gated)
            else:
                layer.mlp = ReluFeedForward(*sizes, gated=gated, activation=activation, keep_stats=True)
    return model


def build_model(
    config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """A freshly initialised `LlamaForCausalLM` with our feed-forward block, dense and with statistics, in every layer.

    Weights are drawn from Normal(0, initializer_range^2) on the CPU, so that a seed gives the same weights on every
    device; norms are 1.
    """
    model = skeleton(llama_config(config), activation=config.activation, gated=config.gated)
    materialize(nn.Module.to(model, dtype), device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.empty(weight.shape).normal_(0.0, config.initializer_range, generator=generator))
            else:
                weight.fill_(1.0)
    return model


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile each layer, and the last norm, separately. Call this before `recompute_activations`, which then runs the
    compiled forward again.

    Equal layers share compiled code. There is separate code for dense and sparse, with and without statistics, with and
    without gradients, and for each new shape.
    """
    raise_recompile_limit()
    do_not_split_graphs_for_ddp()
    run = torch.compile(_run_layer, dynamic=False)
    for layer in model.model.layers:
        layer.forward = functools.partial(run, layer)
    model.model.norm.forward = torch.compile(model.model.norm.forward, dynamic=False)


def _run_layer(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
    # The two branches are the same, but torch keeps code for each of them. With one branch, the code of a sparse layer,
    # which stops before its block and resumes after it, would be used for dense layers too.
    if getattr(layer.mlp, "plan").backend == "dense":  # noqa: B009 (nn.Module's attributes have no types)
        return type(layer).forward(layer, *arguments, **named)
    return type(layer).forward(layer, *arguments, **named)


def recompute_activations(model: LlamaForCausalLM) -> None:
    """To save memory, save only the input of each layer for the backward pass and run its forward again there."""
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
