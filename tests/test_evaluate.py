"""The seven tasks on tiny files, with a language model whose right scores are known, and the program on a real one."""

import gzip
import json
import lzma
import math

import pytest
import torch
from lm_eval.api.model import LM
from pairwise import slow
from tiny_run import make_run

from experiments import evaluate, export
from experiments.data import tasks as data_tasks
from experiments.data.tasks import TASKS, TaskScore, find_file, local_task, read_records, score
from experiments.evaluate import (
    EvaluateConfig,
    TasksMissing,
    cross_entropy,
    language_model,
    main,
    score_tasks,
    task_rows,
)
from experiments.models.subject import load_subject
from experiments.run.config import parse
from experiments.run.results import read_rows

OPENERS = {".jsonl": open, ".jsonl.xz": lzma.open, ".jsonl.gz": gzip.open}


class TableLM(LM):
    """Log-probabilities from a table of (context, continuation); what is not in it is impossible."""

    def __init__(self, table):
        super().__init__()
        self.table, self.asked = table, []

    def loglikelihood(self, requests, disable_tqdm=False):
        self.asked += [request.args for request in requests]
        return [(self.table.get(request.args, -1e9), False) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


def write_task(folder, task, records, suffix=".jsonl"):
    folder.mkdir(exist_ok=True)
    with OPENERS[suffix](folder / f"{task}{suffix}", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def cloze(task, answer=0):
    return {"task": task, "id": "1", "context": "Q: one?\nAnswer:", "choices": ["yes", "rather no"], "answer": answer}


WINOGRANDE = {
    "task": "winogrande",
    "id": "0",
    "context": "Sarah was better than Maria so",
    "choices": ["Sarah got the harder cases.", "Maria got the harder cases."],
    "answer": 0,
    "contexts": ["Sarah was better than Maria so Sarah", "Sarah was better than Maria so Maria"],
    "continuation": "got the harder cases.",
}


def write_all(folder, suffix=".jsonl"):
    for task in TASKS:
        write_task(folder, task, [WINOGRANDE if task == "winogrande" else cloze(task)] * 2, suffix)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", OPENERS)
def test_sum_and_normalised_accuracy_may_disagree(tmp_path, suffix):
    write_task(tmp_path, "piqa", [cloze("piqa", answer=0), cloze("piqa", answer=1)], suffix)
    # By the sum the short answer wins, per character the long one.
    lm = TableLM({("Q: one?\nAnswer:", " yes"): -3.0, ("Q: one?\nAnswer:", " rather no"): -4.0})
    result = score(lm, local_task(tmp_path, "piqa"))
    assert (result.accuracy, result.accuracy_norm, result.items) == (50.0, 50.0, 2)
    assert result.accuracy_error == pytest.approx(50.0)
    first = score(lm, local_task(tmp_path, "piqa"), limit=1)
    assert (first.accuracy, first.accuracy_norm, first.items) == (100.0, 0.0, 1)


def test_winogrande_scores_the_same_ending_after_both_options(tmp_path):
    write_task(tmp_path, "winogrande", [WINOGRANDE, WINOGRANDE | {"answer": 1}])
    sarah, maria = WINOGRANDE["contexts"]
    lm = TableLM({(sarah, " got the harder cases."): -5.0, (maria, " got the harder cases."): -7.0})
    result = score(lm, local_task(tmp_path, "winogrande"))
    assert result == TaskScore(50.0, pytest.approx(50.0), None, None, 2)
    assert set(lm.asked) == set(lm.table), "the plain form (context, choices) must not be asked"


def test_every_task_scores_its_right_answers(tmp_path):
    write_all(tmp_path)
    lm = TableLM({("Q: one?\nAnswer:", " yes"): -1.0, (WINOGRANDE["contexts"][0], " got the harder cases."): -1.0})
    scores, absent = score_tasks(lm, EvaluateConfig(tasks=str(tmp_path)))
    assert not absent
    assert {name: result.accuracy for name, result in scores.items()} == dict.fromkeys(TASKS, 100.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not JSON"),
        (json.dumps({"context": "a", "answer": 0}), r"line 2: .*choices"),
        (json.dumps(cloze("piqa", answer=2)), "line 2: answer 2 is not an index of 2 choices"),
        (json.dumps(cloze("piqa", answer="1")), "line 2: answer '1' is not an index of 2 choices"),
        (json.dumps([cloze("piqa")]), "line 2: a record of piqa is an object, got list"),
        (json.dumps({"context": "a", "choices": "ab", "answer": 0}), "line 2: context must be text, and"),
        (json.dumps({"context": "a", "choices": ["b", 1], "answer": 0}), "line 2: context must be text, and"),
        ("[" * 100_000, "line 2: not JSON"),
        (json.dumps(cloze("piqa") | {"choices": ["a", ""]}), r"line 2: choices\[1\] is ''"),
        (json.dumps(cloze("piqa") | {"choices": [" \n", "a"]}), r"line 2: choices\[0\] is ' \\n'"),
        (json.dumps(cloze("piqa") | {"context": " \n"}), r"line 2: context is ' \\n'"),
        (json.dumps(cloze("piqa") | {"choices": ["a"]}), "line 2: 1 choices, and two or more are needed"),
        (json.dumps(cloze("piqa", answer=True)), "line 2: answer True is not an index"),
        (json.dumps(cloze("piqa") | {"choices": ["a", "\ud800"]}), r"line 2: choices\[1\] is not valid Unicode"),
        (json.dumps(WINOGRANDE | {"continuation": ""}), "line 2: continuation is ''"),
        (json.dumps(WINOGRANDE | {"contexts": ["", "a"]}), r"line 2: contexts\[0\] is ''"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, line, message):
    task = "winogrande" if "continuation" in line else "piqa"
    write_task(tmp_path, task, [WINOGRANDE if task == "winogrande" else cloze(task)])
    with (tmp_path / f"{task}.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_records(find_file(tmp_path, task), task)


def test_a_record_without_context_and_a_byte_order_mark_are_read(tmp_path):
    record = {"context": "", "choices": ["a", "b"], "answer": 1}
    (tmp_path / "piqa.jsonl").write_text("\ufeff" + json.dumps(record))
    assert read_records(tmp_path / "piqa.jsonl", "piqa") == [record]


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"piqa\.jsonl"):
        find_file(tmp_path, "piqa")
    (tmp_path / "piqa.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no records"):
        read_records(tmp_path / "piqa.jsonl", "piqa")


def test_the_mean_needs_every_task_and_takes_winograndes_plain_accuracy():
    scores = dict.fromkeys(TASKS, TaskScore(60.0, 3.0, 70.0, 4.0, 100))
    scores["winogrande"] = TaskScore(53.0, 4.0, None, None, 50)
    rows = {(row["task"], row["metric"]): row for row in task_rows(scores, {}, {"op": "evaluate"})}
    assert ("winogrande", "accuracy_norm") not in rows
    assert rows["mean", "accuracy"]["value"] == pytest.approx(59.0)
    assert rows["mean", "accuracy"]["high"] == pytest.approx(59.0 + math.sqrt(6 * 3.0**2 + 4.0**2) / 7)
    assert rows["mean", "accuracy_norm"]["value"] == pytest.approx((6 * 70.0 + 53.0) / 7)
    del scores["hellaswag"]
    rows = task_rows(scores, {"hellaswag": "no file"}, {"op": "evaluate"})
    assert {row["missing"] for row in rows if row["task"] == "mean"} == {"not scored: hellaswag"}


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def config_for(run, tmp_path, *arguments):
    places = [f"run.dir={tmp_path / 'out'}", "run.study=test", "evaluation_tokens=640", "batch=4", "device=cpu"]
    return parse(EvaluateConfig, [f"checkpoint={run}", *places, *arguments])


def test_contexts_longer_than_the_model_are_counted(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(evaluate, "MAX_LENGTH", 40)
    lm = language_model(load_subject(str(run), torch.device("cpu")), 4)
    long = cloze("piqa") | {"context": "the cat " * 40}
    write_task(tmp_path / "tasks", "piqa", [cloze("piqa"), long])
    score(lm, local_task(tmp_path / "tasks", "piqa"), limit=1)
    assert not [record for record in caplog.records if record.name == "experiments.data.tasks"]
    score(lm, local_task(tmp_path / "tasks", "piqa"))
    (message,) = [record.message for record in caplog.records if record.name == "experiments.data.tasks"]
    assert message.startswith("2 of 4 choices have more than 40 tokens with their context")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (
            lambda folder: write_task(
                folder, "piqa", [cloze("piqa"), cloze("piqa") | {"choices": ["a", "the cat " * 60]}]
            ),
            "1 of 4 choices cannot be scored. The model takes 40 tokens",
        ),
        (lambda folder: (folder / "piqa.jsonl").unlink(), "piqa.jsonl"),
    ],
)
def test_a_task_that_cannot_be_scored_is_missing_and_fails_at_the_end(run, tmp_path, monkeypatch, harm, reason):
    monkeypatch.setattr(evaluate, "MAX_LENGTH", 40)
    write_all(tmp_path / "tasks")
    harm(tmp_path / "tasks")
    with pytest.raises(TasksMissing, match="1 of 7 tasks could not be scored: piqa"):
        main(config_for(run, tmp_path, f"tasks={tmp_path / 'tasks'}"))
    rows = {(row["task"], row["metric"]): row for row in read_rows(tmp_path / "out" / "rows.csv")}
    assert rows["piqa", "accuracy"]["value"] is None
    assert reason in rows["piqa", "accuracy"]["missing"]
    assert rows["hellaswag", "accuracy"]["value"] is not None
    assert rows["mean", "accuracy"]["value"] is None
    assert rows[None, "validation_cross_entropy"]["value"] is not None


@pytest.mark.parametrize("tokens_at_once", [None, 50])
def test_cross_entropy_is_that_of_the_validation_text(run, tmp_path, monkeypatch, tokens_at_once):
    config = config_for(run, tmp_path)
    subject = load_subject(config.checkpoint, torch.device("cpu"))
    if tokens_at_once:
        monkeypatch.setattr(evaluate, "FLOAT32_LOGITS", tokens_at_once * subject.model.config.vocab_size)
    value, tokens = cross_entropy(subject, config)
    losses = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for batch in subject.batches(1, max_tokens=640):
            logits = subject.model(batch[:, :-1]).logits.float()
            losses.append(torch.nn.functional.cross_entropy(logits[0], batch[0, 1:]))
    assert tokens == 640 == 32 * len(losses)
    assert value == pytest.approx(torch.stack(losses).mean().item(), rel=1e-3)


def write_data_set(folder):
    """Of the hub's form; far more than any of these tests needs. Returns the number of its documents."""
    folder.mkdir()
    records = [{"text": f"{number} is a number, and {number**3} another one. " * 40} for number in range(3000)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return len(records)


def documents_read(root):
    """The documents of each token folder, all splits together."""
    return [sum(json.loads(path.read_text())["documents"].values()) for path in root.glob("tokens/*/header.json")]


@pytest.mark.parametrize("kind", ["hub", *slow("path", "exported")])
def test_of_another_data_set_of_the_hub_only_what_is_needed_is_read(tmp_path, hub, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a model that was not trained here has its cache in the working directory
    run = make_run(tmp_path, "relu", "data.max_tokens=" + ("10000000000" if kind == "hub" else "null"))
    if kind == "exported":
        export.main(export.ExportConfig(str(run), str(tmp_path / "exported")))
        run = tmp_path / "exported"
    available = write_data_set(tmp_path / "set")
    main(config_for(run, tmp_path, f"data=hf:{tmp_path / 'set'}"))
    (loss,) = (row for row in read_rows(tmp_path / "out" / "rows.csv") if row["metric"] == "validation_cross_entropy")
    assert (loss["tokens"], loss["value"] > 0) == (640, True)
    subject = load_subject(str(run), torch.device("cpu"))
    batches = list(subject.batches(4, max_tokens=640, data=f"hf:{tmp_path / 'set'}"))
    assert sum(batch[:, 1:].numel() for batch in batches) == 640 // subject.sequence_length * subject.sequence_length
    assert subject.text(2, 32, data=f"hf:{tmp_path / 'set'}").shape == (2, 33)
    assert 0 < max(documents_read(tmp_path / "cache")) < available / 10
    assert len(hub) == 1


def test_the_harness_gets_the_models_own_probabilities(run, tmp_path):
    subject = load_subject(str(run), torch.device("cpu"))
    write_task(tmp_path / "tasks", "piqa", [cloze("piqa")])
    task = local_task(tmp_path / "tasks", "piqa")
    task.build_all_requests()
    requests = task.instances
    tokenizer = subject.loaded.tokenizer
    for request, (value, _) in zip(requests, language_model(subject, 2).loglikelihood(requests), strict=True):
        context, whole = (tokenizer.encode(text) for text in (request.args[0], "".join(request.args)))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = subject.model(torch.tensor([whole])).logits[0].float()
        wanted = logits.log_softmax(-1)[range(len(context) - 1, len(whole) - 1), whole[len(context) :]].sum()
        assert value == pytest.approx(wanted.item(), rel=2e-2)


def test_the_program_writes_all_rows(run, tmp_path):
    write_all(tmp_path / "tasks", ".jsonl.xz")
    main(config_for(run, tmp_path, f"tasks={tmp_path / 'tasks'}"))
    rows = read_rows(tmp_path / "out" / "rows.csv")
    assert {row["task"] for row in rows if row["metric"] == "accuracy"} == {*TASKS, "mean"}
    assert all(row["value"] is not None for row in rows)
    assert {row["pattern"] for row in rows} == {"relu"}


def test_without_tasks_only_cross_entropy_has_a_value(run, tmp_path):
    main(config_for(run, tmp_path))
    rows = read_rows(tmp_path / "out" / "rows.csv")
    assert [row["metric"] for row in rows if row["value"] is not None] == ["validation_cross_entropy"]
    assert all("tasks=FOLDER" in row["missing"] for row in rows if row["value"] is None)


def test_a_hub_that_cannot_be_reached_leaves_the_reason(monkeypatch):
    def unreachable(name):
        raise ConnectionError(f"couldn't reach {name} on the hub")

    monkeypatch.setattr(data_tasks, "hub_task", unreachable)
    scores, absent = score_tasks(TableLM({}), EvaluateConfig(tasks="hub"))
    assert (scores, absent["piqa"]) == ({}, "couldn't reach piqa on the hub")
