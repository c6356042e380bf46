"""Text sources, tokenizers, token files, and the order in which tokens are trained on."""

import contextlib
import gzip
import hashlib
import importlib
import io
import json
import lzma
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from experiments.data import batches, sources, token_files
from experiments.data.batches import TokenStream, open_sources, prepare_text, prepare_tokens, text_batches
from experiments.data.held_out import document_share
from experiments.data.sources import open_texts
from experiments.data.token_files import Header
from experiments.data.tokenizer import END_TOKEN, load_tokenizer, named_tokenizer, tokenizer_key, train_bpe, wrap
from experiments.run.errors import ConfigError, DataError, StorageError
from experiments.run.files import storage_errors
from experiments.run.train_config import DataConfig

READ_FILE = PreTrainedTokenizerFast.from_pretrained
TEXTS = [f"Document {n}: the quick brown fox number {n} jumps over {n * n} lazy dogs.\n" * 3 for n in range(60)]


def write_lines(path, texts, opener=open):
    with opener(path, "wt", encoding="utf8") as file:
        file.writelines(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts))
    return path


@pytest.fixture
def corpus(tmp_path):
    return write_lines(tmp_path / "docs.jsonl", TEXTS)


@pytest.fixture
def config(corpus, tmp_path):
    return DataConfig(source=f"path:{corpus}", cache_dir=str(tmp_path / "cache"), validation_share=0.2)


def open_source(specification, **options):
    with tempfile.TemporaryDirectory() as cache:
        return open_texts(specification, **{"text_field": "text", "cache_dir": cache} | options)[0]


def documents(specification, **options):
    return list(open_source(specification, **options).documents())


# --- sources ----------------------------------------------------------------------------------------------------------


def zstd_open(path, mode, encoding):
    return io.TextIOWrapper(pyarrow.output_stream(str(path), compression="zstd"), encoding)


OPENERS = {"jsonl": open, "jsonl.gz": gzip.open, "jsonl.xz": lzma.open, "jsonl.zst": zstd_open}


@pytest.mark.parametrize("suffix", [*OPENERS, *map(str.upper, OPENERS), "parquet", "PARQUET"])
def test_every_format_gives_the_same_documents(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    if suffix.lower() == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": range(60), "text": TEXTS}), path, row_group_size=7)
    else:
        write_lines(path, TEXTS, OPENERS[suffix.lower()])
    assert documents(f"path:{path}") == TEXTS
    assert documents(f"path:{tmp_path}") == TEXTS


def test_text_files_are_documents_and_long_ones_are_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "TEXT_DOCUMENT_CHARACTERS", 40)
    (tmp_path / "b.md").write_text("one line\n")
    (tmp_path / "a.txt").write_text("".join(f"line number {n}\n" for n in range(10)))
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "other.csv").write_text("not,text")
    found = documents(f"path:{tmp_path}")
    assert found[-1] == "one line\n"
    assert "".join(found[:-1]) == (tmp_path / "a.txt").read_text()
    assert len(found) > 3
    assert all(text.endswith("\n") and len(text) < 60 for text in found)


def test_standard_library():
    source = open_source("stdlib")
    names = [str(file) for file in source.files]
    assert names == sorted(names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not [name for name in names if "/test/" in name or "/encodings/" in name or "site-packages" in name]
    text = "".join(source.documents())
    assert 8e6 < len(text) < 20e6
    assert "class JSONDecodeError(ValueError):" in text
    assert open_source("stdlib").key == source.key


def cut(opener):
    def write(path):
        path.write_bytes(write_lines(path, TEXTS, opener).read_bytes()[:-40])

    return write


def table(column, name="text"):
    return lambda path: pyarrow.parquet.write_table(pyarrow.table({name: column}), path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.xz", cut(lzma.open), "a.jsonl.xz is damaged"),
        ("a.jsonl.gz", cut(gzip.open), "a.jsonl.gz is damaged"),
        ("a.jsonl.zst", b"not zstd at all, not at all", "a.jsonl.zst is damaged"),
        ("a.parquet", b"PAR1 not parquet PAR1", "a.parquet is damaged"),
        ("a.txt", b"caf\xe9", "a.txt is damaged or not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', "line 1: no text under 'text'; the record has"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: no text under 'text'"),
        ("a.jsonl", b"[1]\n", "the record has list"),
        ("a.parquet", table(["b"], "a"), "no column 'text'"),
        ("a.csv", b"a", "is none of .txt"),
        ("a.parquet", table([1, 2]), "the column 'text' holds int64, not text"),
        ("a.parquet", table([b"a"]), "the column 'text' holds binary, not text"),
        ("a.parquet", table([None, None]), "the column 'text' holds null, not text"),
        ("a.parquet", table(pyarrow.array([None], "string")), "row 1: no text under 'text', but null"),
        ("a.json", lambda path: write_lines(path, TEXTS), "with one JSON record a line, call it .jsonl"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', "line 1: the text under 'text' is not valid"),
        ("a.jsonl", lambda path: path.write_text("[" * 100_000), "line 1: not JSON"),
        ("a.jsonl", lambda path: path.write_text("9" * 5000), "line 1: not JSON"),
    ],
)
def test_damaged_files_are_named(name, content, message, tmp_path):
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        documents(f"path:{path}")
    assert message in str(caught.value)


def jsonl(*lines):
    return "a.jsonl", lambda path: path.write_text("\n".join([json.dumps({"text": text}) for text in TEXTS] + [*lines]))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        jsonl('{"text": null}'),
        jsonl('{"id": 1}'),
        jsonl('{"text": 3}', "[1]"),
        jsonl('{"text": "a\\ud800"}'),
        ("a.parquet", table([*TEXTS[:7], None, *TEXTS[7:], None])),
    ],
)
def test_a_record_without_text_is_skipped_and_counted(name, write, tmp_path, caplog):
    write(tmp_path / name)
    records = len(TEXTS) + (2 if "parquet" in name or "[1]" in (tmp_path / name).read_text() else 1)
    for _ in range(2):
        assert documents(f"path:{tmp_path / name}") == TEXTS
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{records - len(TEXTS)} of {records} records without text are skipped, the first: ")
    assert str(tmp_path / name) in warning


@pytest.mark.parametrize(("without", "accepted"), [(10, True), (11, False)])
def test_too_many_records_without_text_are_an_error(without, accepted, tmp_path):
    name, write = jsonl(*['{"body": "a"}'] * without)
    write(tmp_path / name)
    message = r"a.jsonl, line 61: no text under 'text'; .* at most 10% of a file's"
    with contextlib.nullcontext() if accepted else pytest.raises(DataError, match=message):
        assert documents(f"path:{tmp_path}") == TEXTS


@pytest.mark.parametrize(("name", "opener"), [("a.txt", open), *((f"a.{name}", own) for name, own in OPENERS.items())])
def test_byte_order_marks_are_no_text(name, opener, tmp_path):
    content, copies = (TEXTS[0], 1) if name == "a.txt" else (json.dumps({"text": TEXTS[0]}) + "\n", 2)
    for folder, mark in (("marked", "\ufeff"), ("plain", "")):
        (tmp_path / folder).mkdir()
        with opener(tmp_path / folder / name, "wt", encoding="utf8") as file:
            file.write(copies * (mark + content))  # two files, joined
        assert documents(f"path:{tmp_path}/{folder}") == [TEXTS[0]] * copies
    reading = ["text", [["a.txt", sha256((tmp_path / "marked" / name).read_bytes())]], 65536]
    assert open_source(f"path:{tmp_path}/marked").key != sha256(json.dumps(reading).encode()), "it was read as text"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("absent.txt", "is missing, or a glob without text files"),
        ("", r"has no text files .*; it has a.json \(of another kind\)"),
        ("*.jsonl", "is missing, or a glob without text files"),
        ("**.jsonl", "is no valid glob"),
    ],
)
def test_missing_text_is_an_error(place, message, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match=message):
        open_source(f"path:{tmp_path}/{place}")


def test_a_data_set_of_the_hub(tmp_path, hub):
    write_lines(tmp_path / "train.jsonl", TEXTS[:50])
    write_lines(tmp_path / "validation.jsonl", TEXTS[50:])
    source = open_source(f"hf:{tmp_path}")  # `datasets` streams from a folder as it does from the hub
    assert list(source.documents()) == TEXTS[:50]
    assert documents(f"hf:{tmp_path}@validation") == TEXTS[50:]
    assert open_source(f"hf:{tmp_path}").key != source.key, "another commit is another content"
    with pytest.raises(DataError, match="split test: cannot be read"):
        documents(f"hf:{tmp_path}@test")
    with pytest.raises(ConfigError, match=r"max_tokens: set it"):
        prepare_tokens(DataConfig(source=f"hf:{tmp_path}", cache_dir=str(tmp_path / "cache")), bpe())


def test_the_commit_of_a_data_set_is_asked_for_once(tmp_path, hub, caplog):
    def key(specification, **options):
        return open_source(specification, cache_dir=str(tmp_path), **options).key

    with pytest.raises(DataError, match="no commit of it is noted in"):
        key("hf:some/text", ask_hub=False)
    with caplog.at_level("INFO"):
        first = key("hf:some/text")
        assert key("hf:some/text") == first == key("hf:some/text", ask_hub=False), "though there is a newer one"
    assert hub == [None]
    (note,) = (tmp_path / "commits").iterdir()
    assert f"commit commit1, from now on, by {note}; another can be named: hf:some/text@REVISION:" in caplog.text
    assert f"commit commit1, noted in {note}; for the newest, delete that file" in caplog.text
    assert len({first, key("hf:some/text:part"), key("hf:some/text@test"), key("hf:some/other")}) == 4
    assert hub == [None, None], "all parts of a data set are of one commit"
    note.unlink()
    assert key("hf:some/text") != first
    note.write_text('{"commit": 3}')
    with pytest.raises(DataError, match="is damaged: its commit is 3; delete it"):
        key("hf:some/text")
    note.write_text("half")
    with pytest.raises(DataError, match=r"cannot be read .*; delete it: the hub is asked anew"):
        key("hf:some/text")


def test_a_revision_of_a_data_set_can_be_named(tmp_path, hub):
    commit = "0123456789abcdef" * 2 + "01234567"
    place = {"cache_dir": str(tmp_path)}
    open_source("hf:some/text", **place)
    (note,) = (tmp_path / "commits").iterdir()
    note.write_text(json.dumps({"commit": commit}))
    for rest in ("", ":part", "@test", ":part@test", "@train[:10%]"):
        named = open_source(f"hf:some/text@{commit}:{rest.removeprefix(':')}")
        assert named.key == open_source(f"hf:some/text{rest}", **place).key
    branch = open_source("hf:some/text@refs/pr/1:part", **place)
    assert branch.key == open_source("hf:some/text@refs/pr/1:part", **place).key
    assert hub == [None, "refs/pr/1"]
    with pytest.raises(DataError, match=r"hf:NAME@REVISION:\[CONFIG\]\[@SPLIT\], got hf:@test"):
        open_source("hf:@test")


def tokenizers_on_the_hub(monkeypatch, make):
    """`make(name)` instead of what the hub has as tokenizer.json; folders are read as they are."""
    read = READ_FILE
    monkeypatch.setattr("transformers.utils.cached_file", lambda name, file: file)
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "from_pretrained", lambda name: read(name) if Path(name).is_dir() else make(name)
    )


@pytest.mark.parametrize("tokenizer", ["bpe", "auto", "some/tokenizer"])
def test_what_was_prepared_from_the_hub_needs_no_network(tmp_path, hub, monkeypatch, tokenizer):
    tokenizers_on_the_hub(monkeypatch, lambda name: bpe())
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", TEXTS)
    config = DataConfig(source=f"hf:{tmp_path / 'data'}", cache_dir=str(tmp_path / "cache"), tokenizer=tokenizer)
    config = replace(config, max_tokens=500, validation_share=0.2)
    _, first = prepare_text(config, 300)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", None)  # it would be called
    monkeypatch.setattr("datasets.load_dataset", None)
    tokenizers_on_the_hub(monkeypatch, None)
    assert prepare_text(config, 300)[1].key == first.key


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_does_not_answer_is_reported(monkeypatch, offline):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    client = importlib.import_module(huggingface_hub.errors.HTTPError.__module__.partition(".")[0])

    if not offline:
        monkeypatch.setattr(client.Client, "send", Mock(side_effect=client.ConnectError("Name or service not known")))
    with pytest.raises(DataError, match=r"cannot get this data set from the hub .*run experiments.prepare_data where"):
        open_source("hf:nobody/nothing")


def test_a_connection_that_breaks_is_reported(hub, monkeypatch):
    breaks = huggingface_hub.errors.HTTPError("peer closed the connection")
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=breaks))
    with pytest.raises(DataError, match="hf:some/text, split train: cannot be read: peer closed"):
        documents("hf:some/text")


# --- which text is held out -------------------------------------------------------------------------------------------


SHARDS = "train-00.jsonl train-01.jsonl val.jsonl sample.jsonl README.md"


def names(source):
    return [file.name for file in source.files]


def test_a_validation_text_of_its_own_is_never_trained_on(tmp_path):
    folder = make_files(tmp_path, SHARDS)
    train, validation = open_sources(DataConfig(source=f"path:{folder}", validation=f"path:{folder}/train-00.jsonl"))
    assert names(validation) == ["train-00.jsonl"]
    assert names(train) == ["train-01.jsonl"]


# What a folder holds, what is trained on, what is held out, and what the log says of the rest.
FOLDERS = {
    "subfolders": ("b/2.txt a/1.txt c.txt", "1.txt 2.txt c.txt", "", "leaves out nothing"),
    "text beside data": ("a.jsonl README.md LICENSE.txt notes/b.md", "a.jsonl", "", "text beside data files"),
    "text alone": ("a.txt b.md", "a.txt b.md", "", "leaves out nothing"),
    "hidden": ("a.jsonl .b.jsonl .git/c.jsonl .ipynb_checkpoints/a.jsonl", "a.jsonl", "", ".git, .ipynb_checkpoints"),
    "upper case": ("a.JSONL b.Parquet.txt c.MD", "a.JSONL", "", "text beside data files"),
    "other kinds": ("a.jsonl b.json c.csv", "a.jsonl", "", "b.json, c.csv (of another kind)"),
    "a link to a file": ("b.jsonl a.jsonl->b.jsonl", "b.jsonl", "", "a.jsonl (another link to a file that is read)"),
    "a held-out link": ("train.jsonl val.jsonl->train.jsonl", "train.jsonl", "", "another link"),
    "links to names without a suffix": (
        "../blobs/1 ../blobs/2 train.jsonl->../blobs/1 val.jsonl->../blobs/2",
        "train.jsonl",
        "val.jsonl",
        "leaves out nothing",
    ),
    "a link to nothing": ("a.jsonl b.jsonl->nowhere c.jsonl->c.jsonl", "a.jsonl", "", "a link to nothing"),
    "a linked folder": ("a.jsonl ../more/b.jsonl more->../more", "b.jsonl a.jsonl", "", "leaves out nothing"),
    "a circle of links": ("a/a.jsonl a/up->.. b->a", "a.jsonl", "", "leaves out nothing"),
    "a test split": ("train.jsonl test.jsonl more.jsonl", "train.jsonl", "", "test.jsonl (test split)"),
    "all splits": ("train-0.txt train-1.txt dev.txt test.txt", "train-0.txt train-1.txt", "dev.txt", "test.txt (test"),
    "folders of splits": ("train/0.jsonl validation/1.jsonl test/2.jsonl", "0.jsonl", "1.jsonl", "test/2.jsonl (test"),
    "data without a training split": ("a.jsonl Val.jsonl test-0.jsonl", "a.jsonl", "Val.jsonl", "test-0.jsonl (test"),
    "texts without a training split": ("a.txt dev-notes.md test.txt", "a.txt dev-notes.md test.txt", "", "nothing"),
    "a test split alone": ("test.jsonl", "test.jsonl", "", "leaves out nothing"),
    "ordinary names": ("trains.txt valley.txt training.md", "training.md trains.txt valley.txt", "", "nothing"),
}


def make_files(root, files):
    for number, name in enumerate(files.split()):
        path = root / name.partition("->")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        if "->" in name:
            path.symlink_to(name.partition("->")[2])
        else:
            write_lines(path, [f"text {number}"])
    return root


@pytest.mark.parametrize(("files", "train", "validation", "logged"), FOLDERS.values(), ids=FOLDERS)
def test_which_files_of_a_folder_are_read(files, train, validation, logged, tmp_path, caplog):
    (tmp_path / "text").mkdir()
    folder = make_files(tmp_path / "text", files)
    with caplog.at_level("INFO"):
        found = open_sources(DataConfig(source=f"path:{folder}"))
    assert [names(source) for source in found if source] == [part.split() for part in (train, validation) if part]
    (line,) = caplog.messages
    assert logged in line


def test_a_glob_follows_the_rule_of_a_folder(tmp_path):
    make_files(tmp_path, "train.jsonl test.jsonl README.md .a.jsonl .git/b.jsonl b/2.jsonl a/1.jsonl")
    train, validation = open_sources(DataConfig(source=f"path:{tmp_path}/*"))
    assert (names(train), validation) == (["train.jsonl"], None)
    assert names(open_source(f"path:{tmp_path}/**/[12].jsonl")) == ["1.jsonl", "2.jsonl"]
    assert names(open_source(f"path:{tmp_path}/test*")) == ["test.jsonl"]
    assert names(open_source(f"path:{tmp_path}/.git/*")) == ["b.jsonl"]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def test_the_keys_of_what_rows_and_caches_were_made_from_stay(tmp_path):
    """Computed here as they were for the rows that are committed."""
    make_files(tmp_path, SHARDS)
    digests = {path.name: sha256(path.read_bytes()) for path in tmp_path.iterdir()}
    train, validation = open_sources(DataConfig(source=f"path:{tmp_path}"))
    for source, chosen in ((train, ["train-00.jsonl", "train-01.jsonl"]), (validation, ["val.jsonl"])):
        assert source.key == sha256(json.dumps(["text", [[name, digests[name]] for name in chosen]]).encode())
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "val.jsonl")
    assert open_source(f"path:{tmp_path}/link.jsonl").key == validation.key
    assert open_source(f"path:{tmp_path}/link.jsonl", text_field="id").key != validation.key
    text = ["text", [["README.md", digests["README.md"]]], 65536]
    assert open_source(f"path:{tmp_path}/README.md").key == sha256(json.dumps(text).encode())
    source = open_source("stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    library = [[str(file.relative_to(root)), sha256(file.read_bytes())] for file in source.files]
    assert source.key == sha256(json.dumps(["stdlib", library]).encode())


@pytest.fixture
def seen(monkeypatch):
    """The texts that tokenizers are trained on."""
    found = []
    monkeypatch.setattr(
        "experiments.data.tokenizer.train_bpe", lambda texts, size: (found.extend(texts), train_bpe(TEXTS, size))[1]
    )
    return found


def test_documents_are_held_out_by_their_content(config, seen):
    """The tokenizer does not see them."""
    texts = read_back(config)
    assert seen == [text for text in TEXTS if document_share(text) >= 0.2]
    assert sorted(texts["train"] + texts["validation"]) == sorted(TEXTS)
    assert texts["validation"] == [text for text in TEXTS if document_share(text) < 0.2]
    assert 3 <= len(texts["validation"]) <= 25
    write_lines(config.source.removeprefix("path:"), TEXTS[::-1])
    assert sorted(read_back(config)["validation"]) == sorted(texts["validation"])


LINES = "".join(f"line {number} of {number * number} words\n" for number in range(40_000))


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        *[("input.txt", [LINES[:size]]) for size in (3, 10_000, 60_000, 100_000)],
        ("input.txt", ["x" * 50_000]),
        ("input.txt", ["many words " * 5000]),
        ("a.jsonl", [LINES[:900_000]]),
        ("a.jsonl", [LINES[:5000], LINES[5000:12_000], LINES[:300]]),
        ("a.jsonl", [LINES[:9000]] * 3),
    ],
)
@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_of_the_shortest_text_a_part_is_held_out(name, texts, share, tmp_path, seen):
    """At the end of a line or a word, where there is one; the tokenizer does not see it."""
    path = tmp_path / name
    path.write_text(texts[0]) if name == "input.txt" else write_lines(path, texts)
    config = DataConfig(source=f"path:{path}", cache_dir=str(tmp_path / "cache"), validation_share=share)
    parts = read_back(config)
    assert sorted("".join(parts["train"] + parts["validation"])) == sorted("".join(texts)), "nothing is lost"
    assert parts["train"] == seen
    validation = len("".join(parts["validation"]))
    assert min(2**14, len(max(texts, key=len)) // 3) <= validation <= 2 * len("".join(texts)) / 3
    if name == "a.jsonl":
        assert all(text.endswith("\n") for text in set(parts["train"]).difference(texts))


@pytest.mark.parametrize("content", ["", "ab"])
def test_text_that_is_too_short_to_hold_any_out_is_named(content, tmp_path):
    (tmp_path / "input.txt").write_text(content)
    config = DataConfig(source=f"path:{tmp_path}", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"^path:\S+ has (no text|2 characters of text: too few to hold any out)$"):
        prepare_text(config, 300)


def splits(tokens):
    return {"train": tokens.train, "validation": tokens.validation}


def read_back(config):
    tokenizer = load_tokenizer(config, 300, open_sources(config)[0])
    tokens = prepare_tokens(config, tokenizer)
    return {split: tokenizer.decode(ids).split(END_TOKEN)[:-1] for split, ids in splits(tokens).items()}


# --- tokenizers -------------------------------------------------------------------------------------------------------


def bpe(size=300):
    return wrap(train_bpe(TEXTS, size))


def test_bpe_is_exact_and_has_an_end_token():
    tokenizer = bpe()
    assert len(tokenizer) == 300
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END_TOKEN)
    for text in ("any text \t\n at all", "Ünïcödé 漢字 🙂", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.slow
def test_bpe_is_the_same_in_every_process():
    code = "import sys; from tests.test_data import bpe, tokenizer_key; sys.stdout.write(tokenizer_key(bpe()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == tokenizer_key(bpe())


def test_bpe_is_cached_by_content(config, monkeypatch):
    source = open_source(config.source)
    first = load_tokenizer(config, 300, source)
    monkeypatch.setattr("experiments.data.tokenizer.train_bpe", None)
    assert tokenizer_key(load_tokenizer(config, 300, source)) == tokenizer_key(first)
    monkeypatch.undo()
    assert tokenizer_key(load_tokenizer(config, 290, source)) != tokenizer_key(first)


def test_a_tokenizer_of_the_hub_is_kept(tmp_path, monkeypatch, caplog):
    asked = []
    tokenizers_on_the_hub(monkeypatch, lambda name: asked.append(name) or bpe(300 - len(asked)))
    config = DataConfig(tokenizer="some/tokenizer", cache_dir=str(tmp_path))
    first = load_tokenizer(config, 300, None)
    assert tokenizer_key(first) == tokenizer_key(bpe(299))
    with caplog.at_level("INFO"):
        assert tokenizer_key(load_tokenizer(config, 300, None)) == tokenizer_key(first)
    (kept,) = (tmp_path / "tokenizers").iterdir()
    assert f"some/tokenizer is the one kept in {kept}; for the newest, delete that folder" in caplog.text
    load_tokenizer(replace(config, tokenizer="other/tokenizer"), 300, None)
    shutil.rmtree(kept)
    assert tokenizer_key(load_tokenizer(config, 300, None)) != tokenizer_key(first)
    assert asked == ["some/tokenizer", "other/tokenizer", "some/tokenizer"]


def test_a_tokenizer_is_what_its_file_says(tmp_path, monkeypatch):
    """transformers 5 would make a GPT-2 tokenizer anew from the vocabulary, without the splitting of digits."""
    digits = bpe().backend_tokenizer
    splitting = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    digits.pre_tokenizer = pre_tokenizers.Sequence(splitting)
    wrap(digits).save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    own = named_tokenizer(tmp_path)
    assert tokenizer_key(own) == tokenizer_key(wrap(digits))
    tokenizers_on_the_hub(monkeypatch, lambda name: own)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    assert named_tokenizer("some/tokenizer") is own


def test_a_tokenizer_without_its_file_is_made_from_the_vocabulary(tmp_path):
    bpe().backend_tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert named_tokenizer(tmp_path)("some text")["input_ids"] == bpe()("some text")["input_ids"]


def test_tokenizers_from_elsewhere(tmp_path):
    bpe().save_pretrained(tmp_path / "tokenizer")
    assert tokenizer_key(named_tokenizer(tmp_path / "tokenizer")) == tokenizer_key(bpe())
    with pytest.raises(DataError, match=r"has 300 entries, but the model only 256 rows: set model.vocab_size=300"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer")), 256, None)
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(DataError, match="has no end token"):
        named_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    for name in ("tokenizer", "absent"):
        with pytest.raises(DataError, match="cannot load the tokenizer"):
            named_tokenizer(tmp_path / name)
    with pytest.raises(DataError, match="more than 256 entries, got vocab_size=100"):
        train_bpe(TEXTS, 100)


def broken_link(path):
    path.symlink_to(path.parent / "nowhere" / "file")


@pytest.mark.parametrize("harm", [Path.mkdir, broken_link])
def test_a_tokenizer_file_that_is_none_is_named(harm, tmp_path):
    bpe().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.unlink()
    harm(path)
    with pytest.raises(DataError, match=rf"{path} is a (folder|link to nothing), not a file"):
        named_tokenizer(tmp_path)
    with pytest.raises(StorageError, match=f"cannot write run at {tmp_path}"), storage_errors(tmp_path, "run"):
        bpe().save_pretrained(tmp_path)


def test_a_full_disk_while_a_tokenizer_is_kept_is_told(mounted, monkeypatch):
    tokenizers_on_the_hub(monkeypatch, lambda name: bpe(900))
    folder = mounted("16k")
    with pytest.raises(StorageError, match=rf"cannot write tokenizer at {folder}.*No space left"):
        load_tokenizer(DataConfig(tokenizer="some/tokenizer", cache_dir=str(folder)), 900, None)
    assert not [path for path in folder.rglob("*") if path.is_file()]


# --- token files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(config):
    """That of the token files, which are made."""
    prepare_tokens(config, bpe())
    (path,) = (Path(config.cache_dir) / "tokens").iterdir()
    return path


def test_token_files_are_made_once(config, folder, monkeypatch):
    monkeypatch.setattr(batches, "write_token_folder", None)
    tokenizer = bpe()
    tokens = prepare_tokens(config, tokenizer)
    assert tokens.train.dtype == numpy.uint16
    assert not tokens.train.flags.writeable
    header = Header(**json.loads((folder / "header.json").read_text()))
    assert header.documents["train"] + header.documents["validation"] == len(TEXTS)
    assert sum(header.text_bytes.values()) == sum(map(len, TEXTS))
    assert (header.tokenizer, header.end_token) == (tokenizer_key(tokenizer), tokenizer.eos_token_id)
    assert header.tokens == {split: len(ids) for split, ids in splits(tokens).items()}


def test_an_end_token_spelled_out_in_a_text_is_text(config):
    corpus = config.source.removeprefix("path:")
    write_lines(corpus, [f"{text} {END_TOKEN} more" for text in TEXTS])
    tokenizer = bpe()
    tokens = prepare_tokens(config, tokenizer)
    ends = sum(int((ids == tokenizer.eos_token_id).sum()) for ids in splits(tokens).values())
    assert ends == len(TEXTS)


def test_small_batches_change_nothing(config, tmp_path, monkeypatch):
    first = prepare_tokens(config, bpe())
    monkeypatch.setattr(token_files, "_BATCH_CHARACTERS", 500)
    again = prepare_tokens(replace(config, cache_dir=str(tmp_path / "other")), bpe())
    assert all(map(numpy.array_equal, splits(first).values(), splits(again).values()))


def test_large_vocabularies_need_four_bytes(config):
    tokenizer = bpe()
    tokenizer.add_tokens([f"<extra {n}>" for n in range(66_000)])
    tokens = prepare_tokens(config, tokenizer)
    assert tokens.train.dtype == numpy.uint32
    assert tokenizer.decode(tokens.train[:10]).startswith("Document")


def test_a_token_budget(config):
    full = prepare_tokens(config, bpe())
    part = prepare_tokens(replace(config, max_tokens=1000), bpe())
    assert part.train.tolist() == full.train[:1000].tolist()
    assert len(part.validation) >= 200
    with_own = replace(config, max_tokens=1000, validation=config.source, source="stdlib")
    assert {split: len(ids) for split, ids in splits(prepare_tokens(with_own, bpe())).items()} == {
        "train": 1000,
        "validation": len(full.train) + len(full.validation),
    }


def change_header(folder, **values):
    content = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps({**content, **values}))


def flip_a_bit(path, place=100):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def to_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "damaged"),
    [
        (lambda folder: (folder / "train.bin").write_bytes(b"ab"), "/train.bin has 2 bytes, wanted"),
        (lambda folder: (folder / "validation.bin").unlink(), "/validation.bin is missing"),
        (lambda folder: (folder / "header.json").write_text("{"), "/header.json cannot be read"),
        (lambda folder: (folder / "header.json").unlink(), "/header.json cannot be read"),
        (lambda folder: (folder / "header.json").write_text('{"format": 1}'), "/header.json cannot be read"),
        (lambda folder: change_header(folder, dtype="object"), "/header.json is damaged"),
        (lambda folder: change_header(folder, tokens=[1, 2]), "/header.json is damaged"),
        (lambda folder: change_header(folder, tokens={"train": 1}), "/header.json is damaged"),
        (lambda folder: change_header(folder, tokens={"train": -1, "validation": "a"}), "/header.json is damaged"),
        (lambda folder: change_header(folder, format=99), " has token files of format 99, wanted 1"),
        # Of the same size, found by their checksums.
        (lambda folder: flip_a_bit(folder / "train.bin"), "/train.bin is damaged: its SHA-256 is not the one in SHA"),
        (lambda folder: flip_a_bit(folder / "validation.bin", -1), "/validation.bin is damaged: its SHA-256 is not"),
        (lambda folder: change_header(folder, end_token=7), "/header.json is damaged: its SHA-256 is not"),
        (lambda folder: (folder / "SHA256SUMS").write_bytes(b""), "/SHA256SUMS is damaged: it has no checksum"),
        (lambda folder: flip_a_bit(folder / "SHA256SUMS", 0), "/header.json is damaged: its SHA-256 is not the one in"),
        (lambda folder: (folder / "SHA256SUMS").write_bytes(b"\xff"), "/SHA256SUMS is damaged: it is not text"),
        (lambda folder: to_folder(folder / "SHA256SUMS"), "/SHA256SUMS cannot be read: Is a directory"),
    ],
)
def test_damaged_token_files_are_found(harm, damaged, config, folder):
    harm(folder)
    with pytest.raises(DataError) as caught:
        prepare_tokens(config, bpe())
    assert str(caught.value).startswith(f"{folder}{damaged}")
    assert str(caught.value).endswith(f"; delete the folder {folder} and start again: it is made anew")
    shutil.rmtree(folder)
    prepare_tokens(config, bpe())


def test_token_files_without_their_checksums_are_found(config, folder):
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(DataError, match=f"SHA256SUMS.*; delete the folder {folder} and start again"):
        prepare_tokens(config, bpe())


def test_a_split_that_is_not_read_is_not_checked(config, folder):
    flip_a_bit(folder / "train.bin")
    assert next(text_batches(config, bpe(), 16, 4)).shape == (4, 17)
    with pytest.raises(DataError, match=r"train.bin is damaged"):
        prepare_tokens(config, bpe())
    assert len(prepare_tokens(config, bpe(), checked=()).train)


def test_checksums_are_those_of_the_usual_tool(folder):
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["header.json: OK", "train.bin: OK", "validation.bin: OK"]


def test_ids_beyond_the_vocabulary_name_their_file(config, folder):
    with (folder / "train.bin").open("r+b") as file:
        file.seek(101)
        file.write(b"\xff")
    tokens = prepare_tokens(config, bpe(), checked=())
    stream = TokenStream(tokens.train, 16, seed=0, vocab_size=400)
    with pytest.raises(DataError, match=r"there is a token 65\d+ in .*train.bin, but the model has 400 rows"):
        stream.samples(0, stream.windows)
    with pytest.raises(DataError, match=r"but the model has 1 rows"):
        list(text_batches(config, bpe(), 16, 4, vocab_size=1))


def test_a_damaged_cached_tokenizer_is_named(config):
    load_tokenizer(config, 300, open_sources(config)[0])
    (path,) = (Path(config.cache_dir) / "tokenizers").glob("*.json")
    original = path.read_text()
    path.write_text(original.replace("Ġ", "Ħ", 1))  # another tokenizer, which could be read
    advice = f"delete {path} and start again: it is made anew"
    with pytest.raises(DataError, match=rf"^{path} is damaged: its SHA-256 is not the one in .*\.sha256; {advice}$"):
        load_tokenizer(config, 300, open_sources(config)[0])
    path.unlink()
    load_tokenizer(config, 300, open_sources(config)[0])
    assert path.read_text() == original
    path.with_name(f"{path.name}.sha256").unlink()
    with pytest.raises(DataError, match=rf"No such file.*{path}.sha256.*; {advice}$"):
        load_tokenizer(config, 300, open_sources(config)[0])


def test_a_failure_leaves_no_token_files(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("experiments.run.files.fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(StorageError, match="token files"):
            prepare_tokens(config, bpe())
    empty = write_lines(Path(config.cache_dir).with_name("empty.jsonl"), [""])
    for other in (replace(config, source=f"path:{empty}"), replace(config, validation=f"path:{empty}")):
        with pytest.raises(DataError, match=r"empty.jsonl has no text$"):
            prepare_tokens(other, bpe())
    assert not [path for path in Path(config.cache_dir).rglob("*") if path.is_file()]


# --- order ------------------------------------------------------------------------------------------------------------

TOKENS = numpy.arange(1001, dtype=numpy.uint16)


def test_an_epoch_has_every_window_once_and_epochs_differ():
    stream = TokenStream(TOKENS, 10, seed=1)
    assert stream.windows == 100
    epochs = [stream.samples(100 * epoch, 100) for epoch in range(2)]
    for samples in epochs:
        assert samples.dtype == torch.int64
        assert samples.shape == (100, 11)
        assert sorted(samples[:, 0].tolist()) == list(range(0, 1000, 10))
        assert torch.equal(samples - samples[:, :1], torch.arange(11).expand(100, 11))
    assert not torch.equal(*epochs)
    assert not torch.equal(epochs[0], TokenStream(TOKENS, 10, seed=2).samples(0, 100))


def test_the_order_does_not_depend_on_how_it_is_read():
    whole = TokenStream(TOKENS, 10, seed=1).samples(0, 250)
    stream = TokenStream(TOKENS, 10, seed=1)
    pieces = [stream.samples(first, 10) for first in reversed(range(0, 250, 10))]
    assert torch.equal(torch.cat(pieces[::-1]), whole)
    assert torch.equal(TokenStream(TOKENS, 10, seed=1).samples(95, 10), whole[95:105])


def test_too_little_text():
    with pytest.raises(DataError, match="has 10 tokens: too few for one sequence of 10"):
        TokenStream(TOKENS[:10], 10, seed=1)
    assert TokenStream(TOKENS[:11], 10, seed=1).samples(0, 3).tolist() == [list(range(11))] * 3


def test_text_batches(config):
    tokenizer = bpe()
    ids = torch.from_numpy(prepare_tokens(config, tokenizer).validation.astype(numpy.int64))
    batches = list(text_batches(config, tokenizer, 32, 4))
    assert all(batch.shape == (4, 33) for batch in batches[:-1])
    read = torch.cat(batches)
    assert len(read) == (len(ids) - 1) // 32
    assert torch.equal(read[:, 1:].flatten(), ids[1 : 1 + 32 * len(read)])
    assert sum(map(len, text_batches(config, tokenizer, 32, 4, max_tokens=100))) == 3
    with pytest.raises(DataError, match=r"too few for one sequence of 100000; name a longer text: data="):
        next(text_batches(config, tokenizer, 100_000, 4))
