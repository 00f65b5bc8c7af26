"""FASTA files as documents, and chains of letters whose entropy is known."""

import gzip

import numpy as np
import pytest

from linnet.config import ConfigError, parse
from linnet.data import DataConfig, prepare
from linnet.data.dna import LETTERS, Chain, as_fasta, make_chain, read_fasta, reverse_complement

FASTA = b""">one a record\nACGTacgt\nNNRY\n\n>empty\n>two\n; a remark\nac gt-*\n"""


def documents(text: bytes) -> list:
    return [found for _, found in read_fasta(text.splitlines(keepends=True))]


def test_each_record_is_a_document_of_folded_letters():
    assert documents(FASTA) == [b"ACGTACGTNNNN", b"", b"ACGTNN"]
    assert documents(b"") == [] and documents(b">only a name\n") == [b""]


def test_wrong_records_name_their_line():
    assert documents(b"ACGT\n>one\nA\n") == ["line 1 has letters before the first line that starts with '>'; add one"]
    assert documents(b">one\nAC\nA5\n>two\nAC\n") == ["line 3 has '5'; lines of a record are letters", b"AC"]


def test_training_reads_fasta_compressed_too(tmp_path):
    with gzip.open(tmp_path / "dna.fa.gz", "wb") as file:
        file.write(b"".join(b">%d\n%s\n" % (i, b"acgt" * (i + 5)) for i in range(40)))
    corpus = prepare(parse(DataConfig, {"source": [str(tmp_path / "dna.fa.gz")]}), tmp_path / "cache")
    assert set(np.unique(corpus.train[:])) == {0, *b"ACGT"}
    (tmp_path / "bad.fna").write_bytes(b">one\nAC!\n")
    with pytest.raises(ConfigError, match="bad.fna: line 2 has '!'"):
        prepare(parse(DataConfig, {"source": [str(tmp_path / "bad.fna")]}), tmp_path / "cache")


def test_the_other_strand_of_a_word():
    def number(word: str) -> int:
        return sum(LETTERS.index(one) * 4**place for place, one in enumerate(reversed(word)))

    found = reverse_complement(3)
    assert found[number("AAC")] == number("GTT") and found[number("TGC")] == number("GCA")
    assert np.array_equal(found[found], np.arange(64))


@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_chain_is_stationary_and_its_own_reverse_complement(order):
    words = make_chain(order, seed=1).words.ravel()
    assert words.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(words[reverse_complement(order + 1)], words, atol=1e-15)
    # The first `order` letters of a word are distributed as the last ones.
    np.testing.assert_allclose(words.reshape(-1, 4).sum(1), words.reshape(4, -1).sum(0), atol=1e-12)


def test_entropy_of_known_chains():
    assert make_chain(2, 0, sharpness=0).bits_per_letter == pytest.approx(2)
    assert Chain(0, np.array([[0.5, 0.0 + 1e-300, 1e-300, 0.5]])).bits_per_letter == pytest.approx(1)


def test_letters_have_the_entropy_of_their_chain():
    chain = make_chain(2, seed=3)
    text = as_fasta(chain, 400_000, seed=3)
    records = [found for _, found in read_fasta(text.encode().splitlines())]
    assert sum(map(len, records)) >= 400_000 and isinstance(records[0], bytes)
    # The code length of a model that counts contexts, on a record that it has not seen.
    counts = np.full((16, 4), 0.5)
    places = [np.array([LETTERS.index(chr(one)) for one in record]) for record in records]
    pairs = [(place[:-2] * 4 + place[1:-1], place[2:]) for place in places]
    for context, letter in pairs[1:]:
        np.add.at(counts, (context, letter), 1)
    predicted = np.log(counts / counts.sum(1, keepdims=True))
    assert -predicted[pairs[0]].mean() == pytest.approx(chain.nats_per_letter, abs=0.02)
    assert as_fasta(make_chain(2, seed=3), 400_000, seed=3) == text
