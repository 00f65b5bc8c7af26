"""Text that comes token by token: whole characters, and nothing of a stop string."""

import random
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from linnet.data import ByteTokenizer, FileTokenizer, train_bpe
from linnet.inference import Sampling
from linnet.inference.request import Detokenizer, Request, StopFilter

TEXTS = [
    "plain",
    "naïve café, 12 €",
    "日本語のテキスト",
    "👩‍🚀🎉 done",
    "tab\tand\nline",
    "\ufffd kept \ufffd",
    "\ufffd🦊🦊🦊\ufffd\ufffd",
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["the cat sat on the mat and the hat " * 20, "日本 café " * 20], 280)


def stream(tokenizer, tokens, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_hold_whole_characters(text, bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        tokens = tokenizer.encode(text).tolist()
        pieces = stream(tokenizer, tokens)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
        for cut in range(len(text)):
            before, after = tokenizer.encode(text[:cut]).tolist(), tokenizer.encode(text[cut:]).tolist()
            assert "".join(stream(tokenizer, after, before)) == text[cut:]


def test_a_character_that_the_prompt_leaves_incomplete_is_the_streams(bpe):
    whole = bpe.encode("a漢b").tolist()
    for tokenizer, tokens, cut in ((ByteTokenizer(), list("a漢b".encode()), 3), (bpe, whole, len(whole) - 2)):
        assert stream(tokenizer, tokens[cut:], tokens[:cut])[:2] == ["漢", "b"]


@pytest.mark.parametrize(
    "text, offsets",
    [("a漢b", [0, 1, 1, 1, 2]), ("a\ufffdb", [0, 1, 1, 1, 2]), ("é\ufffd\ufffd.", [0, 0, 1, 1, 1, 2, 2, 2, 3])],
)
def test_all_tokens_of_a_character_have_its_offset(text, offsets):
    detokenizer, found = Detokenizer(ByteTokenizer()), []
    for byte in text.encode():
        detokenizer.push(byte)
        found.append(detokenizer.offset)
    assert found == offsets
    detokenizer.flush()
    assert detokenizer.length == len(text)


def test_text_that_a_stop_string_holds_back_does_not_move_offsets():
    sampling = Sampling(stop=["xyz"], max_tokens=8)
    request = Request(np.zeros(0, np.int64), 0, sampling, 0, 8, ByteTokenizer(), ())
    pieces = [request.accept(byte) for byte in "axyé".encode() + b"\0"]
    assert "".join(piece.text for piece in pieces) == "axyé"
    assert [piece.offset for piece in pieces] == [0, 1, 2, 3, 3, 4]


@given(st.binary(min_size=1, max_size=80).map(lambda data: data.replace(b"\0", b"")))
def test_any_bytes_become_the_text_that_decoding_at_once_gives(data):
    tokenizer = ByteTokenizer()
    pieces = stream(tokenizer, list(data))
    assert "".join(pieces) == tokenizer.decode(list(data))


def test_text_is_not_held_for_long(bpe):
    tokens = [random.Random(0).randrange(0x80, 0xC0) for _ in range(100)]  # bytes that begin no character
    pieces = stream(ByteTokenizer(), tokens)
    assert max(len(piece) for piece in pieces) < 20 and sum(bool(piece) for piece in pieces) > 8


def filtered(stops, parts):
    stop_filter, shown = StopFilter(stops), []
    for part in parts:
        text, stopped = stop_filter.push(part)
        shown.append(text)
        if stopped:
            return "".join(shown), True
    return "".join(shown) + stop_filter.flush(), False


def test_stop_strings_across_pieces():
    assert filtered(["END"], ["abE", "N", "D and more"]) == ("ab", True)
    assert filtered(["END"], ["abE", "N", "C"]) == ("abENC", False)
    assert filtered(["aab"], ["a", "a", "a", "b", "c"]) == ("a", True)
    assert filtered(["xyz", "y"], ["ax", "y", "z"]) == filtered(["xyz", "y"], ["axyz"]) == ("ax", True)
    assert filtered(["END"], ["no", "E"]) == ("noE", False)
    held = StopFilter(["\n\n"])
    assert held.push("line\n") == ("line", False) and held.push("next") == ("\nnext", False)


def test_long_stop_strings_take_no_longer_for_each_token():
    """The engine's thread does this for every request, so one that is slow delays all others."""
    rng = random.Random(0)
    text = "".join(rng.choices("abcdefgh", k=40_000))
    stop_filter = StopFilter([text + "!", *(f"{letter}z" * 20_000 for letter in "abcdefgh")])
    start = time.process_time()
    assert all(stop_filter.push(text[place : place + 4]) == ("", False) for place in range(0, len(text), 4))
    assert stop_filter.push("?") == (text + "?", False)
    assert time.process_time() - start < 5


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_stop_strings_cut_where_the_whole_text_has_them(text, stops, rng):
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, stopped = filtered(stops, parts)
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    assert stopped == bool(found)
    assert shown == (text[: sum(min(found))] if found else text)  # in whatever parts the text comes


def test_a_tokenizer_that_treats_the_start_of_a_text_apart(tmp_path):
    """Pieces with a mark for the space before them, which is left out at the start of a text (SentencePiece)."""
    words = ["<unk>", "</s>", "▁the", "▁cat", "s", "▁sat"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer = FileTokenizer(inner)
    assert tokenizer.byte_lengths is None and tokenizer.decode([2, 3]) == "the cat"
    assert stream(tokenizer, [2, 3, 4, 5]) == ["the", " cat", "s", " sat", ""]
    assert stream(tokenizer, [3, 4, 5], prompt=[2]) == [" cat", "s", " sat", ""]


@pytest.mark.parametrize("text", [*TEXTS, "中文字 🦊🦊", "é" * 9])
def test_characters_whose_bytes_follow_each_other(text):
    """A Llama 2 spells characters outside of its vocabulary in bytes, and the library decodes a run of them as one."""
    pieces = ["</s>", "▁", *map(chr, range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    before, after = tokenizers.normalizers, tokenizers.decoders
    inner.normalizer = before.Sequence([before.Prepend("▁"), before.Replace(" ", "▁")])
    inner.decoder = after.Sequence(
        [after.Replace("▁", " "), after.ByteFallback(), after.Fuse(), after.Strip(" ", 1, 0)]
    )
    tokenizer = FileTokenizer(inner)
    tokens = tokenizer.encode(text).tolist()
    assert tokenizer.byte_lengths is None and tokenizer.decode(tokens) == inner.decode(tokens) == text
    assert "".join(stream(tokenizer, tokens)) == text
    for cut in range(len(tokens)) if "\ufffd" not in text else ():
        rest = "".join(stream(tokenizer, tokens[cut:], tokens[:cut]))
        assert "\ufffd" not in rest and text.endswith(rest) and len(rest) >= len(tokens[cut:]) // 4
    assert tokenizer.decode([*tokens, pieces.index("<0xE4>")]) == f"{text}\ufffd"
