"""The fall-back BPE: exact round trips of all bytes, whole characters, the same tokenizer for any number of threads."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config import ConfigError
from linnet.corpus import bpe
from linnet.corpus.bpe import (
    FIRST,
    choose_characters,
    count_characters,
    measure,
    script_of,
    script_of_document,
    train_fallback_bpe,
)
from linnet.data import load_tokenizer, train_bpe
from linnet.inference.request import Detokenizer

TEXTS = [
    "the cat sat on the mat, and the cat's hat sat there\n" * 3,
    "naïve café déjà vu 😀\n\n  def f(x):\n    return x  # <0x80> <0xE4>\n" * 3,
    "我们在中国学习中文，中国人说中文。他们也在中国。" * 4,
    "हिन्दी में लिखा हुआ पाठ हिन्दी में है।" * 3,
]
TRICKY = "a <|endoftext|> <0x80><0xE4> <0x0A> b\r\n\t  \u00a0x 日本語 😀 can't 123\0 龘 \ufffd"
CJK = 300
VOCABULARY = FIRST + CJK + 110


def train(texts, vocab_size, cjk=0):
    return train_fallback_bpe(texts, count_characters(texts), vocab_size, cjk)


@pytest.fixture(scope="module")
def found():
    return train(TEXTS, VOCABULARY, CJK)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_all_text_comes_back(found, text):
    ids = found.encode(text)
    assert found.decode(ids) == text
    assert found.byte_lengths[ids].sum() == len(text.encode())
    assert (ids != found.end_of_document).all()
    assert np.array_equal(found.encode_bytes(text.encode()), ids)


@given(st.one_of(st.binary(max_size=60), st.lists(st.sampled_from([b"\xe4\xb8", b"\xad", b"cat", b"\xff", b"\xc3"]))))
def test_all_bytes_come_back(found, data):
    data = data if isinstance(data, bytes) else b"".join(data)
    assert found.decode_bytes(found.encode_bytes(data)) == data


@pytest.mark.parametrize("make", [lambda: train_bpe(TEXTS, 300), lambda: train(TEXTS, 300)])
def test_every_byte_has_one_token_and_every_pair_of_bytes_comes_back(make):
    found = make()
    for byte in range(256):
        ids = found.encode_bytes(bytes([byte]))
        assert len(ids) == 1 and found.token_bytes[ids[0]] == bytes([byte])
    pairs = b"".join(bytes([a, b]) for a in range(256) for b in range(256))
    assert found.decode_bytes(found.encode_bytes(pairs)) == pairs
    assert found.decode(found.encode_bytes(b"a\xe4\xb8b\xff")) == "a\ufffdb\ufffd"


def test_characters_of_all_of_unicode_come_back(found):
    codes = [*range(0x3100), *range(0x3100, 0xD800, 7), 0xD7FF, *range(0xE000, 0x110000, 97), 0xFFFF, 0x10FFFF]
    text = "".join(map(chr, codes))
    assert found.decode(found.encode(text)) == text


def test_tokens_are_whole_characters_except_those_of_bytes(found):
    for number, token in enumerate(found.token_bytes):
        if number in range(1, 129):
            assert token == bytes([number + 127])
        else:
            token.decode()  # raises for a part of a character
    assert sorted(len(token) for token in found.token_bytes)[0] == 0 and found.token_bytes[0] == b""
    assert len(set(found.token_bytes)) == VOCABULARY == found.vocab_size


def test_han_characters_are_those_of_the_text_then_those_of_the_list_and_one_token_each(found):
    own = {character for text in TEXTS for character in text if bpe.is_han(np.array(ord(character)))}
    tokens = {token.decode() for token in found.token_bytes[129:]}
    characters = {token for token in tokens if len(token) == 1 and bpe.is_han(np.array(ord(token)))}
    others = [character for character in bpe.listed() if character not in own]
    assert characters == own | set(others[: CJK - len(own)]) and len(characters) == CJK
    for character in characters:
        assert len(found.encode(character)) == 1
    assert len(found.encode("龘")) == 3  # neither in the text nor frequent
    assert any(len(token) > 1 and set(token) <= characters for token in tokens)  # merges of characters: 中国


def test_fewer_han_characters_than_the_text_has_are_its_most_frequent():
    counts = count_characters(["中中中国国文", "国人"])
    assert [c for c in choose_characters(counts, 1000, 2) if c > "\x7f"] == ["中", "国"]
    assert [c for c in choose_characters(counts, 1000, 0) if c > "\x7f"] == ["中", "国"]  # 文 and 人 save nothing


@pytest.mark.parametrize("cjk", [20, 100, 500, 1000])
def test_characters_that_the_text_lacks_are_the_most_frequent_ones(cjk):
    characters = {c for c in choose_characters(count_characters(["text"]), 4000, cjk) if c > "\x7f"}
    assert set("的一是不了在人有我他这个们中来上大为和国") <= characters and len(characters) == cjk
    assert set(bpe.FREQUENT[:cjk]) <= characters


def test_the_list_of_han_characters_starts_with_frequent_ones_and_those_of_all_standards():
    listed = bpe.listed()
    assert len(set(bpe.FREQUENT)) == 500 and "".join(listed[:500]) == bpe.FREQUENT
    assert len(listed) == len(set(listed)) == 15944 and bpe.is_han(np.array([ord(c) for c in listed])).all()
    level_1 = {bytes([a, b]).decode("gb2312", "ignore") for a in range(0xB0, 0xD8) for b in range(0xA1, 0xFF)} - {""}
    assert len(level_1) == 3755 and level_1 <= set(listed[:8000]) and "中" in listed[:2000]


def test_a_vocabulary_without_room_and_too_many_han_characters_are_errors_together():
    with pytest.raises(ConfigError) as caught:
        train(TEXTS, 300, 20_000)
    assert [line.partition(":")[0] for line in caught.value.problems] == ["--cjk", "--vocab"]
    with pytest.raises(ConfigError, match="--vocab: 64000 is too large"):
        train(TEXTS, 64_000)


def test_characters_without_a_token_do_not_make_neighbours():
    # 龘 is spelled as bytes, so this text has no pair "ab".
    found = train(["a龘b " * 20], FIRST + 2, 1)
    assert b"ab" not in found.token_bytes


def test_the_order_of_texts_and_the_number_of_threads_change_nothing(found):
    assert train(TEXTS[::-1], VOCABULARY, CJK).to_json() == found.to_json()
    code = (
        "import json, sys; from linnet.corpus.bpe import count_characters, train_fallback_bpe;"
        "texts = json.load(sys.stdin); counts = count_characters(texts);"
        "print(train_fallback_bpe(texts, counts, int(sys.argv[1]), int(sys.argv[2])).to_json())"
    )
    made = []
    for setting in ({"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "5", "TOKENIZERS_PARALLELISM": "true"}):
        command = [sys.executable, "-c", code, str(VOCABULARY), str(CJK)]
        text = json.dumps(TEXTS)
        made.append(subprocess.run(command, env=os.environ | setting, input=text, capture_output=True, text=True))
    assert [process.stdout.rstrip("\n") for process in made] == [found.to_json()] * 2


def test_the_file_is_read_by_linnet_and_by_transformers(found, tmp_path):
    from transformers import PreTrainedTokenizerFast

    found.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.digest == found.digest and again.token_bytes == found.token_bytes
    assert np.array_equal(again.byte_lengths, found.byte_lengths)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, TRICKY.replace("<|endoftext|>", "")]:  # to them its spelling is the special token
        assert theirs(text)["input_ids"] == found.encode(text).tolist()
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.convert_ids_to_tokens(0) == "<|endoftext|>"


def test_text_that_is_generated_token_by_token_comes_out_whole(found):
    stream = Detokenizer(found)
    parts = [stream.push(number) for number in found.encode(TRICKY + "龘龘é").tolist()]
    assert "".join([*parts, stream.flush()]) == TRICKY + "龘龘é"
    assert not any(part.endswith("\ufffd") for part in parts[:-8])


def test_scripts_of_characters_and_documents():
    known = {
        "a": "Latin",
        "ａ": "Latin",
        "中": "Han",
        "々": "Han",
        "ー": "Katakana",
        "ｱ": "Katakana",
        "ि": "Devanagari",
    }
    known |= {
        "한": "Hangul",
        "٣": "digits",
        "\n": "white space",
        "\u3000": "white space",
        "。": "punctuation and symbols",
    }
    assert {character: script_of(character) for character in known} == known
    documents = {TEXTS[0]: "Latin", TEXTS[2]: "Han", "日本語のテキスト": "Han and kana", "12 + 3": "no letters"}
    assert {text: script_of_document(text) for text in documents} == documents
    assert script_of_document("The word 中 means middle; it has four strokes.") == "Latin"


@given(st.text())
@settings(max_examples=200)
def test_every_text_has_a_script(text):
    letters = {script_of(character) for character in text} - {"digits", "white space", "punctuation and symbols"}
    script = script_of_document(text)
    assert script in letters | ({"Han and kana"} if letters & {"Hiragana", "Katakana"} else set()) or (
        script == "no letters" and not letters
    )


@pytest.mark.parametrize("text", ["ひらがな", "カタカナ", "ｶﾀｶﾅ", "ーー", "あ 1!", "latin かな"])
def test_kana_without_ideographs_are_japanese(text):
    assert script_of_document(text) == "Han and kana"


def test_the_measure_counts_each_character_byte_and_token_once(found):
    shares = measure(found, [*TEXTS, "龘龘", "", "中"])
    text = "".join([*TEXTS, "龘龘", "中"])
    assert sum(share.characters for share in shares.values()) == len(text)
    assert sum(share.bytes for share in shares.values()) == len(text.encode())
    assert sum(share.tokens for share in shares.values()) == sum(len(found.encode(t)) for t in [*TEXTS, "龘龘", "中"])
    only = measure(found, ["龘龘"])["Han"]
    assert (only.characters, only.bytes, only.tokens) == (2, 6, 6)
    assert shares["Latin"].characters / shares["Latin"].tokens > 1.5
