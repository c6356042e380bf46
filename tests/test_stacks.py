"""The block inside other people's stacks: what runs is counted, and what would run something else is refused."""

import copy
import json

import pytest
import torch
from test_sparsify import README, REPLACED
from tiny_models import SIZES, TOKENS
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

from twell import (
    SparseFeedForward,
    autotune,
    feed_forward_blocks,
    l1_penalty,
    load_plans,
    prune_silent,
    save_plans,
    sparsify,
)
from twell.trainer import AutotuneCallback, L1Schedule, SparseTrainer
from twell.tuning.order import restore_order

PROGRAMS = {
    "autotune in eval mode": lambda model: autotune(model.eval(), TOKENS),
    "autotune in train mode": lambda model: autotune(model.train(), TOKENS),
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


@pytest.mark.parametrize("targets", ["all-linear", ["gate_proj"]])
def test_adapters_on_layers_of_blocks_are_refused_at_once(targets):
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"got peft.*Linear.* not \"all-linear\"\), or modules_to_save"):
        peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))


class Linear4bit(nn.Linear):
    """As bitsandbytes names its layer."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.round())


def test_quantized_layers_are_refused_at_once():
    block = feed_forward_blocks(tiny())[0]
    with pytest.raises(
        ValueError, match=r"up_proj must be a plain torch.nn.Linear, .* got .*Linear4bit: .* quantization"
    ):
        block.up_proj = Linear4bit(32, 48, bias=False)


def test_what_other_engines_compute_is_said(caplog, tmp_path):
    model = tiny()
    assert model.config.hidden_act == "relu"
    assert "llama.cpp" in caplog.text
    model.save_pretrained(tmp_path)
    assert "llama.cpp" in json.loads((tmp_path / "config.json").read_text())["activation_note"]
    caplog.clear()
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="relu"))
    sparsify(plain)
    assert not caplog.text, "it was so before"


# Export: a dense plan is plain PyTorch, with operators that other programs know


@pytest.fixture(params=[("relu", True), ("relu2", False)])
def dense_block(request):
    activation, gated = request.param
    torch.manual_seed(0)
    return SparseFeedForward(8, 32, gated=gated, activation=activation).eval()


@torch.no_grad()
def test_a_trace_of_a_dense_block_has_no_operator_of_ours(dense_block):
    x, other = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    traced = torch.jit.trace(dense_block, x)
    torch.testing.assert_close(traced(other), dense_block(other))
    assert all(node.kind().startswith(("aten::", "prim::")) for node in traced.inlined_graph.nodes())
    program = torch.export.export(dense_block, (x,))
    torch.testing.assert_close(program.module()(other), dense_block(other))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert {target.namespace for target in targets} == {"aten"}


@torch.no_grad()
def test_onnx(dense_block):
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    x = torch.randn(2, 5, 8)
    proto = torch.onnx.export(dense_block, (x,), dynamo=True).model_proto
    assert {node.domain for node in proto.graph.node} == {""}
    (y,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), dense_block(x))


# The activations, and the Trainer


@pytest.mark.parametrize("plan", ["dense", "reference"])
def test_a_hook_reads_the_activations(dense_block, plan):
    dense_block.plan, dense_block.keep_stats, kept = plan, True, []
    dense_block.register_forward_pre_hook(lambda block, inputs: kept.append(block.hidden(*inputs)))
    y = dense_block(torch.randn(2, 5, 8))
    assert torch.equal((kept[0] != 0).sum(-1), dense_block.stats.nonzeros)
    torch.testing.assert_close(kept[0] @ dense_block.down_proj.weight.T, y)


def test_an_l1_schedule():
    schedule = L1Schedule(0.6, off=2, ramp=3)
    assert [schedule.at(step) for step in range(6)] == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.6])
    assert L1Schedule(0.5).at(0) == 0.5
    for wrong in ({"coefficient": 0.5, "exempt": 1}, {"coefficient": "1e-2"}, {"coefficient": float("nan")}):
        with pytest.raises(ValueError, match="an L1 schedule needs numbers of at least 0, and exempt below 1, got L1S"):
            L1Schedule(**wrong)


def trained(folder, model, callbacks=(), steps=4, resume=None, accumulate=1, attributes=(), **l1):
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    schedule = L1Schedule(**{"coefficient": 0.1, **l1})
    trainer = SparseTrainer(model=model, args=arguments, train_dataset=rows, l1=schedule, callbacks=[*callbacks])
    vars(trainer).update(attributes)
    trainer.train(resume)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_adds_the_scheduled_term(tmp_path):
    without = trained(tmp_path, tiny(), coefficient=0.0)
    late = trained(tmp_path, tiny(), off=2)
    assert [entry["loss"] for entry in late[:2]] == [entry["loss"] for entry in without[:2]]
    assert late[2]["loss"] - without[2]["loss"] == pytest.approx(0.1 * without[2]["l1"], rel=1e-2)
    assert all(0 < entry["nonzeros"] < SIZES["intermediate_size"] for entry in late)


def no_loss(outputs, labels, num_items_in_batch):
    return outputs.logits.sum() * 0


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"model_accepts_loss_kwargs": False},
        {"model_accepts_loss_kwargs": False, "compute_loss_func": no_loss},
        pytest.param(
            {"loss_is_scaled_for_ga": False},
            marks=pytest.mark.skipif(not hasattr(Trainer, "loss_is_scaled_for_ga"), reason="transformers is older"),
        ),
    ],
)
def test_the_term_does_not_depend_on_accumulated_batches(tmp_path, attributes):
    settings = {"steps": 1, "accumulate": 4, "attributes": attributes}
    (without,), (row,) = (trained(tmp_path, tiny(), coefficient=l1, **settings) for l1 in (0.0, 0.1))
    assert row["loss"] - without["loss"] == pytest.approx(0.1 * row["l1"], rel=0.1)


def test_optimizer_state_gets_the_layout_of_the_weights(tmp_path):
    plain, model = tiny(), tiny()
    for parameter in plain.parameters():
        parameter.data = parameter.data.contiguous()  # as before `sparsify`
    trained(tmp_path, plain)
    trained(tmp_path, model, resume=tmp_path / "checkpoint-2")
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("resume", [None, "checkpoint-2"])
def test_the_busiest_neurons_are_exempt(tmp_path, resume):
    model = tiny()
    trained(tmp_path, tiny())
    trained(tmp_path, model, resume=resume and tmp_path / resume, exempt=0.25)
    for block in feed_forward_blocks(model):
        assert (block.l1_weight == 0).sum() == SIZES["intermediate_size"] // 4
        assert block.stats.l1 > 0


def test_a_trainer_autotunes(tmp_path):
    model = tiny()
    (first, *_), callback = feed_forward_blocks(model), AutotuneCallback(every=2, backends=["reference"])
    sparse_at = []
    first.register_forward_pre_hook(lambda *_: sparse_at.append(model.training))
    rows = trained(tmp_path, model, [callback], steps=5)
    assert len(rows) == 5
    assert len(sparse_at) == 5 + 2, "one forward more before steps 2 and 4"
    assert not model._forward_pre_hooks
    sparse_at.clear()
    trained(tmp_path, model, [callback], resume=tmp_path / "checkpoint-2")
    assert len(sparse_at) == 2 + 1, "at the second step"
    bind_silu(first)
    with pytest.raises(ValueError, match="use_liger_kernel=True"):
        trained(tmp_path, model, [AutotuneCallback()])


def test_a_plan_that_changes_between_forward_and_recomputation_is_refused():
    block = SparseFeedForward(8, 32, plan="reference")
    y = checkpoint(block, torch.randn(5, 8, requires_grad=True), use_reentrant=False)
    block.plan = "dense"
    with pytest.raises(CheckpointError):
        y.sum().backward()


# The table of kernels/README.md


def test_the_table_names_tests_that_exist_and_counts_model_types():
    table = README.read_text().partition("## Works with")[2].partition("\n\n```")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    assert len(rows) > 10
    for name, _, _, test in rows[2:]:
        file, _, function = test.strip("`").partition("::")
        assert f"\ndef {function}(" in (README.parents[1] / "tests" / file).read_text(), name
    assert f"; {len(REPLACED)} model types" in rows[2][2]
