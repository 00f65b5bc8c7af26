"""GLUE's files: eight layouts, every kind of damage, and examples as packed rows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.data.labelled import HeldOut, LabelledBatches, longest_first
from linnet.encoders.glue import (
    SCORES,
    TASKS,
    GlueConfig,
    Sentences,
    encode,
    pack_rows,
    read_dev,
    read_examples,
    read_glue,
)

HEADERS = {
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label",
    "sst2": "sentence label",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "rte": "index sentence1 sentence2 label",
    "qnli": "index question sentence label",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "mrpc": "Quality,#1 ID,#2 ID,#1 String,#2 String",
}
LABELS = {"mnli": ["neutral", "entailment"], "stsb": ["0.5", "5.000"]} | dict.fromkeys(
    ["rte", "qnli"], ["not_entailment", "entailment"]
)


def write(folder: Path, name: str, labels=None, edit=lambda lines: lines) -> Path:
    """Writes the files of a task in GLUE's layout, with two examples each."""
    task = TASKS[name]
    folder = folder / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    header = HEADERS.get(name, "")
    columns = header.split("," if "," in header else " ") if header else list(task.columns)
    lines = ["\t".join(columns)] if header else []
    for number, label in enumerate(labels or LABELS.get(name, ["1", "0"])):
        values = {column: f"x{place}" for place, column in enumerate(columns)}
        values |= {column: f'{column}\'s "text" {number}' for column in task.sentences} | {task.label: label}
        lines.append("\t".join(values[column] for column in columns))
    for file in ("train.tsv", *(file for _, file in task.dev)):
        (folder / file).write_text("\n".join(edit(lines)) + "\n")
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_each_layout_is_read_by_its_header(tmp_path, name):
    folder = write(tmp_path, name)
    task = TASKS[name]
    for source in (tmp_path, folder):
        corpus = read_glue(GlueConfig(source=str(source), task=name))
        assert corpus.train.texts == [
            tuple(f'{column}\'s "text" {number}' for column in task.sentences) for number in (0, 1)
        ]
        assert list(corpus.dev) == list(task.scores) and len(corpus.dev) == (2 if name == "mnli" else 1)
    expected = {"stsb": [0.5, 5.0], "mnli": [1, 0]}.get(name, [1, 0])
    assert corpus.train.labels.tolist() == expected
    assert corpus.train.labels.dtype == (np.float32 if name == "stsb" else np.int64)
    assert task.outputs == {"mnli": 3, "stsb": 1}.get(name, 2)
    write(tmp_path, name, edit=lambda lines: [*lines, lines[-1]])
    assert read_glue(GlueConfig(source=str(folder), task=name)).digest != corpus.digest


def test_the_average_has_nine_numbers_in_the_papers_order():
    assert SCORES == ("mnli-m", "mnli-mm", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")


def test_files_without_a_header_and_with_other_line_ends(tmp_path):
    write(tmp_path, "sst2", edit=lambda lines: lines[1:])
    examples = read_examples(tmp_path / "SST-2/dev.tsv", TASKS["sst2"])
    assert len(examples) == 2 and examples.labels.tolist() == [1, 0]
    write(tmp_path, "cola", edit=lambda lines: ["\ufeff" + line + "\r" for line in lines[:1]] + lines[1:])
    assert read_examples(tmp_path / "CoLA/dev.tsv", TASKS["cola"]).texts[0] == ('sentence\'s "text" 0',)
    (tmp_path / "own.tsv").write_text("label\tsentence\n1\tA sentence.\n")  # a header where GLUE has none
    assert read_examples(tmp_path / "own.tsv", TASKS["cola"]).texts == [("A sentence.",)]
    (tmp_path / "bare.tsv").write_text("good\t1\nbad film\t0\n")  # one word and a label are an example
    assert len(read_examples(tmp_path / "bare.tsv", TASKS["sst2"])) == 2
    (tmp_path / "odd.tsv").write_text("sentence\tlabel\na\u2028b\x0bc\t1\n")  # other line separators are text
    assert read_examples(tmp_path / "odd.tsv", TASKS["sst2"]).texts == [("a\u2028b\x0bc",)]


@pytest.mark.parametrize(
    "name, edit, words",
    [
        ("rte", lambda lines: ["a\tb\tc", *lines[1:]], ["no column 'sentence1'", "'sentence1', 'sentence2', 'label'"]),
        ("rte", lambda lines: [*lines, "7\tonly one"], ["line 4: has 2 columns, not 4", "skip_damaged: true"]),
        ("rte", lambda lines: [*lines, "7\ta\t \tentailment"], ["line 4: column 'sentence2' is empty"]),
        ("rte", lambda lines: [*lines, "7\ta\tb\tmaybe"], ["line 4: the label 'maybe' is not one of entailment, not_"]),
        ("rte", lambda lines: [*lines, "7\ta\0\tb\tentailment"], ["line 4: holds NUL"]),
        ("sst2", lambda lines: [*lines, "fine\t2"], ["the label '2' is not one of 0, 1"]),
        ("cola", lambda lines: [*lines, "gj04\t1\tno star"], ["line 3: has 3 columns, not 4"]),
        ("stsb", lambda lines: [*lines, "\t".join("abcdefghi") + "\t5.1"], ["the score '5.1' is not a number from 0"]),
        ("stsb", lambda lines: [*lines, "\t".join("abcdefghi") + "\tnan"], ["the score 'nan' is not a number"]),
        ("qqp", lambda lines: lines[:1], ["dev.tsv: holds no example of task qqp"]),
        ("qqp", lambda lines: [], ["dev.tsv: its first line [] has no column 'question1'"]),
        (
            "sst2",
            lambda lines: ["text\tpolarity", *lines[1:]],
            ["its first line ['text', 'polarity'] has no column 'sentence'", "(or no header, and sentence, label in"],
        ),
        ("cola", lambda lines: ["id\ttarget\tnote\ttext", *lines], ["has no column 'sentence'", "'sentence', 'label'"]),
        ("sst2", lambda lines: ["a\t7"] * 9, ["line 5", "and 4 more damaged lines", "dev.tsv has 9 damaged lines"]),
    ],
)
def test_damage_is_named_by_file_line_value_and_fix(tmp_path, name, edit, words):
    write(tmp_path, name, edit=edit)
    with pytest.raises(ConfigError) as error:
        read_glue(GlueConfig(source=str(tmp_path), task=name))
    assert all(word in str(error.value) for word in words), error.value
    assert "train.tsv" in str(error.value) and "dev.tsv" in str(error.value)  # both files at once


def test_damaged_lines_are_skipped_and_counted_where_asked(tmp_path):
    write(tmp_path, "qqp", edit=lambda lines: [*lines, "1\t2\tbroken", "1\t2\t3\ta\tb\t9", lines[1]])
    corpus = read_glue(GlueConfig(source=str(tmp_path), task="qqp", skip_damaged=True))
    assert len(corpus.train) == 3 and corpus.train.skipped == 2


def test_missing_folders_and_files_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder; name the folder of RTE"):
        read_dev(tmp_path / "nowhere", TASKS["rte"])
    with pytest.raises(ConfigError, match="MNLI/dev_matched.tsv and MNLI/dev_mismatched.tsv"):
        read_dev(tmp_path, TASKS["mnli"])
    (write(tmp_path, "rte") / "train.tsv").unlink()
    with pytest.raises(ConfigError, match="train.tsv: no such file"):
        read_glue(GlueConfig(source=str(tmp_path), task="rte"))
    (tmp_path / "RTE/dev.tsv").write_bytes(b"\xff\xfe1")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_dev(tmp_path, TASKS["rte"])
    with pytest.raises(ConfigError, match="task"):
        GlueConfig(source="x", task="wnli")
    with pytest.raises(ConfigError, match="learned from a corpus"):
        GlueConfig(source="x", task="rte", tokenizer="bpe:4096")


def test_sentences_become_rows_with_ends_and_long_ones_lose_theirs():
    tokenizer = ByteTokenizer()
    assert bytes(encode(tokenizer, ["ab"], 9).tolist()) == b"\0ab\0"
    assert bytes(encode(tokenizer, ["ab", "cde"], 9).tolist()) == b"\0ab\0cde\0"
    assert bytes(encode(tokenizer, ["abcdefgh"], 8).tolist()) == b"\0abcdef\0"
    assert bytes(encode(tokenizer, ["abcdefgh", "xyz"], 10).tolist()) == b"\0abcd\0xyz\0"
    assert bytes(encode(tokenizer, ["abcdefgh", "stuvwxyz"], 9).tolist()) == b"\0abc\0stu\0"


def test_batches_are_a_pure_function_of_seed_and_step_on_any_ranks(tmp_path):
    write(tmp_path, "sst2", labels=["0", "1", "1", "0", "1"])
    examples = read_examples(tmp_path / "SST-2/train.tsv", TASKS["sst2"])
    sentences = Sentences(examples, ByteTokenizer(), 12)
    batches = LabelledBatches(sentences, 3, seed=1)
    found = [batches.batch(step) for step in range(5)]
    assert sorted(torch.cat([labels for _, _, labels in found]).tolist()) == [0] * 6 + [1] * 9
    for step, (tokens, lengths, labels) in enumerate(found):
        packed, cu_seqlens = pack_rows(tokens, lengths)
        assert packed.shape == (1, int(lengths.sum())) and cu_seqlens.tolist()[1:] == lengths.cumsum(0).tolist()
        ranks = [batches.batch(step, rank, 2) for rank in range(2)]
        parts = [pack_rows(tokens, lengths)[0] for tokens, lengths, _ in ranks]
        assert torch.equal(torch.cat(parts, 1), packed)
        assert torch.equal(torch.cat([rank[2] for rank in ranks]), labels)
    assert [len(rank[0]) for rank in (batches.batch(0, number, 5) for number in range(5))] == [0, 1, 0, 1, 1]


def test_held_out_rows_come_longest_first_and_once_each(tmp_path):
    write(tmp_path, "sst2", labels=["0", "1", "1", "0", "1"])
    sentences = Sentences(read_examples(tmp_path / "SST-2/train.tsv", TASKS["sst2"]), ByteTokenizer(), 12)
    held_out = HeldOut(sentences, 2, longest_first(sentences.lengths))
    assert len(held_out) == 3 and held_out.size == 5 and sorted(held_out.order.tolist()) == [0, 1, 2, 3, 4]
    lengths = torch.cat([lengths for _, lengths, _ in held_out]).tolist()
    assert lengths == sorted(sentences.lengths.tolist(), reverse=True)
    assert longest_first(np.array([[1, 5], [7, 1], [2, 6]])).tolist() == [1, 2, 0]
    with pytest.raises(IndexError):
        held_out[3]


def test_the_real_sst2(real_data):
    if not (real_data / "sst2").is_dir():
        pytest.skip(f"no GLUE SST-2 in {real_data}")
    corpus = read_glue(GlueConfig(source=str(real_data / "sst2"), task="sst2"))
    assert len(corpus.train) == 67_349 and len(corpus.dev["sst2"]) == 872
    assert corpus.dev["sst2"].labels.sum() == 444
