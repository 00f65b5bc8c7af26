"""WikiText as a source, lines that a token ends, and GPT-2's vocabulary in the order of fairseq's dictionary."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from linnet.config import ConfigError, parse
from linnet.data import DataConfig, prepare
from linnet.data.records import read_documents
from linnet.data.sources import find_files
from linnet.data.tokenizer import given_tokenizer, given_vocabulary, load_fairseq, load_tokenizer, train_bpe
from linnet.data.wikitext import SPECIAL, held_out, parse_name

TEXT = " \n = A title = \n \n the cat sat on the mat . \n the dog , the cat . \n"


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def vocabulary(tmp_path):
    """GPT-2's three files in small: bytes, two merges, and a dictionary in another order with symbols that fill it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = {token: number for number, token in enumerate([*alphabet, "th", "the", "<|endoftext|>"])}
    order = np.random.default_rng(0).permutation(len(encoder)).tolist()
    lines = [f"{number} {1000 - place}" for place, number in enumerate(order)] + [
        "madeupword0000 0",
        "madeupword0001 0",
    ]
    files = {
        "encoder__json": json.dumps(encoder),
        "vocab__bpe": "#version: 0.2\nt h\nth e\n",
        "dict__txt": "".join(f"{line}\n" for line in lines),
    }
    return write(tmp_path / "gpt2_bpe", **files), encoder, order


@pytest.mark.filterwarnings("ignore:.*SHA-256")
def test_ids_are_those_of_the_dictionary(vocabulary):
    folder, encoder, order = vocabulary
    tokenizer = load_fairseq(folder)
    assert tokenizer.vocab_size == len(SPECIAL) + len(encoder) + 2
    config = parse(DataConfig, {"tokenizer": f"fairseq:{folder}"}).tokenizer
    assert given_vocabulary(config) == tokenizer.vocab_size
    assert given_vocabulary(config.model_copy(update={"path": "absent"})) == 50_264  # what can be planned without files
    assert tokenizer.end_of_document == 2 and tokenizer.line_ends
    plain = tokenizers.Tokenizer(models.BPE(vocab=encoder, merges=[("t", "h"), ("th", "e")]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = []
    for line in TEXT.split("\n")[:-1]:  # as fairseq's script: GPT-2's ids of the line without white space, then </s>
        expected += [4 + order.index(number) for number in plain.encode(line.strip()).ids] + [2]
    assert tokenizer.encode(TEXT).tolist() == expected[:-1]
    assert tokenizer.encode_documents([TEXT.encode()])[0].tolist() == expected[:-1]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == "\n".join(line.strip() for line in TEXT.split("\n")[:-1])
    assert (tokenizer.encode("</s> <|endoftext|>") != 2).all()


def test_a_wrong_vocabulary_is_told_with_both_digests(vocabulary):
    folder, _, _ = vocabulary
    with pytest.warns(UserWarning, match="encoder.json.*expected 19613966.*found [0-9a-f]{64}"):
        load_fairseq(folder)
    (folder / "dict.txt").write_text("5 10\n6 9\n")
    with pytest.raises(ConfigError, match=r"tokenizer.path.*lacks the symbol"), pytest.warns(UserWarning):
        load_fairseq(folder)
    (folder / "vocab.bpe").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer.path.*vocab.bpe"):
        given_tokenizer(parse(DataConfig, {"tokenizer": f"fairseq:{folder}"}).tokenizer)


@pytest.mark.filterwarnings("ignore:.*SHA-256")
@pytest.mark.parametrize("kind", ["fairseq", "bpe"])
def test_line_ends_survive_saving(kind, vocabulary, tmp_path):
    tokenizer = load_fairseq(vocabulary[0]) if kind == "fairseq" else train_bpe([TEXT * 3], 265, line_ends=True)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = load_tokenizer(path)
    assert again.line_ends and again.digest == tokenizer.digest
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert again.byte_lengths[again.end_of_document] == 1
    plain = train_bpe([TEXT * 3], 262)
    plain.save(path)
    assert not load_tokenizer(path).line_ends
    assert load_tokenizer(path, line_ends=True).encode("a\n\nb").tolist().count(plain.end_of_document) == 2


def test_a_corpus_has_one_end_per_line_and_keeps_repeated_lines(tmp_path):
    folder = write(tmp_path / "wt", wiki__train__raw=TEXT * 40, wiki__valid__raw=TEXT, wiki__test__raw=TEXT)
    with pytest.warns(UserWarning, match="wiki.valid.raw.*expected 4cd0f687"):
        values = {
            "source": f"wikitext-103={folder}",
            "tokenizer": {"kind": "bpe", "vocab_size": 265, "line_ends": True},
        }
        corpus = prepare(parse(DataConfig, values), tmp_path / "cache")
    assert corpus.metadata["config"]["validation"] == [f"wikitext-103={folder}:valid"]
    tokens = corpus.train[:]
    ends = int((np.asarray(tokens) == corpus.tokenizer.end_of_document).sum())
    assert ends == 40 * 5 and corpus.train.bytes == 40 * len(TEXT)


@pytest.mark.parametrize("name", ["wiki.test.raw", "wiki.test.tokens", "test.txt"])
def test_files_of_a_split(name, tmp_path):
    folder = write(tmp_path / "wt", **{"README__md": "about", name.replace(".", "__"): TEXT})
    problems: list[str] = []
    with pytest.warns(UserWarning) if name.endswith("raw") else _nothing():
        [file] = find_files([f"wikitext-2={folder}:test"], "source", problems, [])
    assert file.path.name == name and list(read_documents(file, "text", problems)) == [TEXT.encode()] and not problems
    for source, reason in ((f"{folder}:valid", "no file of its part 'valid'"), (f"{folder}:dev", "use train, valid")):
        assert not find_files([f"wikitext-2={source}"], "source", problems, [])
        assert reason in problems.pop()


def test_rows_of_parquet_are_the_lines_of_one_document(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = write(tmp_path / "wt", README__md="")
    rows = ["", " = A title = \n", "", " the cat . \n"]
    parquet.write_table(arrow.table({"text": rows}), folder / "validation-00000-of-00001.parquet")
    parquet.write_table(arrow.table({"text": ["x"]}), folder / "train-00000-of-00001.parquet")
    problems: list[str] = []
    [file] = find_files([f"wikitext-103={folder}:valid"], "source", problems, [])
    assert list(read_documents(file, "text", problems)) == [b"\n = A title = \n\n the cat . \n"] and not problems


def test_names():
    assert parse_name("wikitext-103=/a/b:test") == ("103", "/a/b", "test")
    assert parse_name("wikitext-2=C") == ("2", "C", None) and parse_name("wikitext-3=C") is None
    assert held_out("wikitext-2=C") == "wikitext-2=C:valid" and held_out("wikitext-2=C:test") is None
    assert parse(DataConfig, {"source": "books"}).validation == []
    assert parse(DataConfig, {"source": "wikitext-2=C", "validation": "books"}).validation == ["books"]


def _nothing():
    import contextlib

    return contextlib.nullcontext()
