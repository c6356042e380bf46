"""`sparsify` gives a model a configuration of its own, for itself and the models inside of it."""

import copy

import pytest
import torch
from tiny_models import SIZES, TOKENS, logits
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from twell import autotune, feed_forward_blocks, sparsify

VISION = {"model_type": "pixtral", "image_size": 32, "patch_size": 8, "head_dim": 16}
SHARED_SIZES = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}


def two(**changes) -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights, built from one configuration object."""
    config = LlamaConfig(**SIZES, **changes)
    torch.manual_seed(0)
    models = [LlamaForCausalLM(config).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    assert models[0].config is models[1].config
    return models[0], models[1]


def multimodal() -> nn.Module:
    torch.manual_seed(0)
    text, vision = {"model_type": "mistral", **SIZES}, {**VISION, **SHARED_SIZES, "num_attention_heads": 2}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, image_token_index=1)
    ).eval()


def configurations(model: nn.Module) -> list[tuple[nn.Module, str, object]]:
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if hasattr(value, "model_type")
    ]


def test_another_model_of_the_same_configuration_is_saved_as_it_is(tmp_path):
    teacher, student = two()
    wanted = logits(teacher)
    sparsify(student, activation="relu")
    assert (teacher.config.hidden_act, student.config.hidden_act) == ("silu", "relu")
    for name, model in {"teacher": teacher, "student": student}.items():
        model.save_pretrained(tmp_path / name)
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()), logits(model))
    assert torch.equal(logits(teacher), wanted)


def test_a_tuning_is_stored_with_the_tuned_model_alone():
    plain, tuned = two(hidden_act="relu")
    autotune(sparsify(tuned), TOKENS)
    assert hasattr(tuned.config, "twell_plans")
    assert not hasattr(plain.config, "twell_plans")


def test_all_modules_of_a_model_share_its_own_configuration():
    model = multimodal()
    shared = [(module, name, id(value)) for module, name, value in configurations(model)]
    before = copy.copy(model.config)
    assert len(feed_forward_blocks(sparsify(model, activation="relu"))) == 4
    now = {id(value): value for _, _, value in configurations(model)}
    assert set(now) == {id(model.config), id(model.config.text_config), id(model.config.vision_config)}
    assert len({(old, id(vars(module)[name])) for module, name, old in shared}) == 3, "one in place of each"
    assert not set(now) & {id(before.text_config), id(before.vision_config)}
    assert (before.text_config.hidden_act, before.vision_config.hidden_act) != ("relu", "relu")
    assert {model.config.text_config.hidden_act, model.config.vision_config.hidden_act} == {"relu"}


def test_the_language_model_alone_and_its_configuration(tmp_path):
    model = multimodal()
    part = model.model.language_model
    assert len(feed_forward_blocks(sparsify(part, activation="relu"))) == 2
    assert feed_forward_blocks(model) == feed_forward_blocks(part)
    model.config.text_config = part.config
    model.save_pretrained(tmp_path)
    loaded = Mistral3ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert loaded.config.vision_config.hidden_act != "relu"
    torch.testing.assert_close(logits(loaded), logits(model))


def test_a_wrapper_that_has_the_configuration_gets_the_copy_too():
    inner, _ = two()
    wrapper = nn.Module()
    wrapper.base, wrapper.config = inner, inner.config
    sparsify(wrapper, activation="relu")
    assert wrapper.config is inner.config
    assert wrapper.config.hidden_act == "relu"


@pytest.mark.parametrize("taken", [0, 1])
def test_after_a_refusal_every_configuration_is_the_same_object_as_before(taken):
    """Of a model that is refused, and of another one before it that is taken."""
    with torch.device("meta"):
        refused = AutoModelForCausalLM.from_config(FalconH1Config(**SIZES))
    model = nn.ModuleList([*two()[:taken], refused])
    before = [(module, name, value, value.to_dict()) for module, name, value in configurations(model)]
    with pytest.raises(ValueError, match="the activation of the MLPs is also that of"):
        sparsify(model, activation="relu")
    assert not feed_forward_blocks(model)
    assert all(vars(module)[name] is value and value.to_dict() == saved for module, name, value, saved in before)


def test_only_settings_are_taken_where_nothing_is_replaced():
    model = sparsify(two(hidden_act="relu")[0])
    config = model.config
    assert sparsify(model, plan="reference").config is config
