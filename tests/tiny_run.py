"""The shape of a tiny model, options of a training with some changed, and a run folder like that of a training, made
quickly: random weights, a real tokenizer, a small text."""

from dataclasses import replace
from pathlib import Path

from experiments.data.batches import open_sources, source_key
from experiments.data.tokenizer import load_tokenizer
from experiments.models.checkpoint import Checkpoint, write_checkpoint
from experiments.models.llama import build_model
from experiments.run.config import check_ranges, parse, save_config
from experiments.run.train_config import ModelConfig, TrainConfig

SIZES = {"layers": 2, "hidden_size": 16, "intermediate_size": 32, "attention_heads": 2, "key_value_heads": 2}
MODEL = ModelConfig("tiny", **SIZES, vocab_size=300, max_positions=32)
SENTENCES = ("the cat sat on the mat", "a dog ran after the red ball", "it rained all day", "nobody saw the old fox")


def with_values(config: TrainConfig, **sections: dict) -> TrainConfig:
    """A copy with other values: `with_values(config, sparsity={"l1": 1e-5})`."""
    changed = {name: replace(getattr(config, name), **values) for name, values in sections.items()}
    return check_ranges(replace(config, **changed))


def write_text(folder: Path) -> Path:
    """Sixty documents that differ."""
    folder.mkdir(parents=True)
    for number in range(60):
        lines = [f"{SENTENCES[(number + line) % 4]}, and then {number * line} more." for line in range(40)]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines))
    return folder


def make_run(root: Path, item: str = "relu", *arguments: str, step: int = 20) -> Path:
    """The folder of a run of the smoke model that stopped at `step` with its initial weights."""
    text = root / "text"
    if not text.is_dir():
        write_text(text)
    folder = root / "runs" / item
    places = (f"data=path:{text}", f"data.cache_dir={root / 'cache'}", "data.validation_share=0.3")
    names = ("run.study=test", f"run.item={item}", f"run.dir={folder}")
    config = parse(TrainConfig, ["model=smoke", "model.vocab_size=400", *places, *names, *arguments])
    sources = open_sources(config.data)
    tokenizer = load_tokenizer(config.data, config.model.vocab_size, sources[0])
    save_config(config, folder / "config.yaml")
    tokenizer.save_pretrained(folder / "tokenizer")
    model = build_model(config.model, seed=1)
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    state = {"text": "tokens of no file", "source": source_key(config.data, sources)}
    write_checkpoint(folder, Checkpoint(step, weights, {}, state), keep=1)
    return folder
