"""A BPE over whole characters with a byte fall-back, learned from the stages of a corpus."""

import functools
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from linnet.config import ConfigError, refuse
from linnet.corpus.documents import Document, Part, find_inputs, read_part
from linnet.data.order import hash64
from linnet.data.parts import batches
from linnet.data.tokenizer import END_OF_DOCUMENT, FileTokenizer, training_parts

# Han characters in the order in which a tokenizer should know them, for those that its corpus lacks.
#
# The 500 most frequent characters of modern Chinese come first, in the order of Jun Da, "Modern Chinese Character
# Frequency List", 2004 (https://lingua.mtsu.edu/chinese-computing/statistics/char/list.php?Which=MO). The other lists
# are those of the national standards, as Python's own codecs have them: level 1 of GB 2312-80 (3,755 frequent
# characters of simplified Chinese), of Big5 (5,401 of traditional Chinese) and of JIS X 0208 (2,965 of Japanese), and
# the hanja of KS X 1001 (4,620 of Korean, each once).

# The blocks of Unicode whose characters are ideographs, and the two marks that are written like them: first, last.
BLOCKS = (
    (0x3005, 0x3005),
    (0x3007, 0x3007),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)
# By how often they occur, from Jun Da's list.
FREQUENT = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里"
    "用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实"
    "日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政"
    "美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员"
    "解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件"
    "计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象"
    "完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运笑飞风步改"
    "收根干造言联持组每济车亲极林服快办议往元英士证近失转夫令准布始怎呢存未远叫台单影具罗字爱击流备兵连调"
    "深商算质团集百需价花党华城石级整府离况亚请技际约示复病息究线似官火断精满支视消越器容照须九增研写称企"
    "八功吗包片史委乎查轻易早曾除农找装广显吧阿李标谈吃图念六引历首医局突专费号尽另周较注语仅考落青随选列"
)


def is_han(codes: np.ndarray) -> np.ndarray:
    """Returns which code points are Han characters, bool of the same shape."""
    mask = np.zeros(np.shape(codes), dtype=bool)
    for first, last in BLOCKS:
        mask |= (codes >= first) & (codes <= last)
    return mask


@functools.cache
def listed() -> tuple[str, ...]:
    """Returns the Han characters of the standards, the most widely used first, each once.

    The characters of `FREQUENT` come first, in its order. Characters that are frequent in more of the four standards
    come next, then those of fewer, then the rarer characters of GB 2312 and Big5; within each group the order is that
    of Unicode.
    """
    frequent = [
        _rows("gb2312", range(0xB0, 0xD8), range(0xA1, 0xFF)),
        _rows("big5", range(0xA4, 0xC7), (*range(0x40, 0x7F), *range(0xA1, 0xFF))),
        _rows("euc_jp", range(0xB0, 0xD0), range(0xA1, 0xFF)),
        _rows("euc_kr", range(0xCA, 0xFE), range(0xA1, 0xFF)),
    ]
    rare = [
        _rows("gb2312", range(0xD8, 0xF8), range(0xA1, 0xFF)),
        _rows("big5", range(0xC9, 0xFA), (*range(0x40, 0x7F), *range(0xA1, 0xFF))),
    ]
    count = {
        character: sum(character in standard for standard in frequent) for character in set().union(*frequent, *rare)
    }
    rest = sorted(count.keys() - set(FREQUENT), key=lambda character: (-count[character], character))
    return (*FREQUENT, *rest)


def _rows(codec: str, leads: Iterable[int], trails: Iterable[int]) -> set[str]:
    """Returns the characters of the block of unified ideographs among the codes of two bytes."""
    pairs = (bytes(pair) for pair in itertools.product(leads, trails))
    characters = (pair.decode(codec, errors="ignore") for pair in pairs)
    return {character for character in characters if len(character) == 1 and 0x4E00 <= ord(character) <= 0x9FFF}


# BPE over characters that spells rare characters as bytes, with frequent Han characters as whole tokens.
#
# Paper 001, appendix D.2: many common and uncommon Chinese characters are part of the vocabulary, and what is not in it
# is broken down into UTF-8. Merges join characters, never bytes. So every token is whole characters, except the 128
# tokens <0x80> to <0xFF>, which stand for one byte each; the other 128 bytes are the ASCII characters. Byte-level BPE
# (`linnet.data.tokenizer.train_bpe`) has no such rule: its tokens may end inside a character.

# GPT-2's rule for words (Radford et al. 2019), except that marks belong to the letters before them: a vowel sign of
# Devanagari does not end a word. It sets "<", digits and letters apart, so no merge makes the name of a byte.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
CODES = 0x110000  # code points of Unicode
FIRST = 257  # tokens that every vocabulary has: the end of a document, 128 bytes and 128 ASCII characters
# The last merge of a vocabulary of V tokens saves about WORTH * characters / V^1.5 tokens of the text that it was
# learned from (measured: 3.0 to 3.3 for V = 1,024, 2.8 to 3.4 for 4,096, 1.9 to 2.6 for 16,384; Python source and
# WikiText-2). A character that saves fewer is left to bytes.
WORTH = 3.0
MOST = 0.5  # share of the tokens beyond the Han characters that other characters may take
_LEFT_OUT = "\0"  # stands for characters without a token where merges are learned


def train_fallback_bpe(texts: Iterable[str], counts: np.ndarray, vocab_size: int, cjk: int = 0) -> FileTokenizer:
    """Learns a fall-back BPE. The same texts give the same tokenizer, in any order and with any number of threads.

    Args:
        texts: what merges are learned from.
        counts: `count_characters` of the corpus, which may be more than `texts`.
        vocab_size: exact number of tokens.
        cjk: Han characters that are tokens: the most frequent ones of the corpus, then those of `listed`. With 0
            they are like all other characters, which are tokens where this saves as much as a merge.

    Raises:
        ConfigError: `vocab_size` is too small for the characters, or the texts have too few repeated pairs for it, or
            `cjk` is more than the corpus and the list have.
    """
    alphabet = choose_characters(counts, vocab_size, cjk)
    learner = tokenizers.Tokenizer(models.BPE())
    rule = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    learner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(_LEFT_OUT, "removed"), rule])
    first = [END_OF_DOCUMENT, *(f"<0x{byte:02X}>" for byte in range(128, 256))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(_known(training_parts(texts), alphabet), trainer=trainer)
    if (size := learner.get_vocab_size()) != vocab_size:
        fix = f"the text gives only {size} tokens; use at most {size}, or more text"
        raise ConfigError([f"--vocab: {vocab_size} is too large: {fix}"], "corpus tokenizer")
    model = json.loads(learner.to_str())["model"]
    # A new tokenizer, because the tokens of bytes are not special tokens.
    merges = [tuple(pair) for pair in model["merges"]]
    inner = tokenizers.Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True))
    inner.pre_tokenizer = rule
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([END_OF_DOCUMENT])
    return FileTokenizer(inner, END_OF_DOCUMENT, name=f"fallback-bpe:{vocab_size}")


def count_characters(texts: Iterable[str]) -> np.ndarray:
    """Returns how often each code point occurs, int64 [0x110000]."""
    counts = np.zeros(CODES, dtype=np.int64)
    for batch in batches(texts, 1 << 20, len):
        occurrences = np.bincount(code_points("".join(batch)))
        counts[: len(occurrences)] += occurrences
    return counts


def choose_characters(counts: np.ndarray, vocab_size: int, cjk: int) -> list[str]:
    """Returns the characters that are tokens, in the order of Unicode: ASCII, `cjk` Han characters, and others.

    Args:
        counts: occurrences of each code point, [0x110000].

    Raises:
        ConfigError: `vocab_size` has no room for them, or there are fewer Han characters than `cjk`.
    """
    problems = []
    known = np.flatnonzero(counts)
    ideographs = known[is_han(known)]
    chosen = _most_frequent(ideographs, counts)[:cjk]
    if len(chosen) < cjk:
        taken = set(chosen)
        chosen += [code for code in map(ord, listed()) if code not in taken][: cjk - len(chosen)]
    if len(chosen) < cjk:
        problems.append(f"--cjk: {cjk} is too large: the text and the list have {len(chosen)}; use at most this")
    if (room := vocab_size - FIRST - cjk) < 0:
        why = f"{FIRST} tokens for bytes and the end of a document and {cjk} Han characters need {FIRST + cjk}"
        problems.append(f"--vocab: {vocab_size} is too small: {why}; use more, or a smaller --cjk")
    refuse(problems, "corpus tokenizer")
    others = known[(known >= 128) & ~((is_han(known)) & (cjk > 0))]
    saved = counts[others] * (utf8_lengths(others) - 1)
    others = others[(saved >= WORTH * counts.sum() / vocab_size**1.5) & (counts[others] > 1)]
    chosen += _most_frequent(others, counts)[: int(room * MOST)]
    return [chr(code) for code in sorted([*range(128), *chosen])]


def code_points(text: str) -> np.ndarray:
    """Returns the code points of a text without lone surrogates, uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def utf8_lengths(codes: np.ndarray) -> np.ndarray:
    """Returns how many bytes UTF-8 needs for each code point, 1 to 4, uint8."""
    return 1 + (codes >= 0x80).astype(np.uint8) + (codes >= 0x800) + (codes >= 0x10000)


def _most_frequent(codes: np.ndarray, counts: np.ndarray) -> list[int]:
    """Returns the code points by how often they occur; those that are equally frequent in the order of Unicode."""
    return codes[np.lexsort((codes, -counts[codes]))].tolist()


def _known(texts: Iterable[str], alphabet: list[str]) -> Iterator[str]:
    """Yields texts with `_LEFT_OUT` for characters that have no token, which must not seem to be neighbours there."""
    known = np.zeros(CODES, dtype=bool)
    known[[ord(character) for character in alphabet]] = True
    for text in texts:
        codes = code_points(text)
        if (unknown := ~known[codes]).any():
            text = np.where(unknown, np.uint32(ord(_LEFT_OUT)), codes).astype("<u4").tobytes().decode("utf-32-le")
        yield text


# The script of characters and documents, from Unicode's names of letters. It tells scripts apart, not languages.
#
# English, French and Vietnamese are all Latin. A document has the script of most of its letters; kana distinguish
# Japanese from Chinese. Code is Latin too: a corpus that has code keeps it in a source of its own.

HAN, DIGITS, SPACE, PUNCTUATION, OTHER = "Han", "digits", "white space", "punctuation and symbols", "other letters"
# The first word of the name of a letter, and what its script is called.
LETTERS = {
    name.upper(): name
    for name in (
        "Latin Greek Cyrillic Armenian Hebrew Arabic Syriac Thaana Devanagari Bengali Gurmukhi Gujarati Oriya Tamil "
        "Telugu Kannada Malayalam Sinhala Thai Lao Tibetan Myanmar Georgian Hangul Ethiopic Cherokee Khmer Mongolian "
        "Hiragana Katakana Bopomofo"
    ).split()
} | {"KATAKANA-HIRAGANA": "Katakana"}
WIDE = ("FULLWIDTH", "HALFWIDTH")
KANA = 0.05  # share of kana in a document of Han characters from which it is Japanese
JAPANESE, NONE = "Han and kana", "no letters"


@functools.cache
def script_of(character: str) -> str:
    """Returns the script of a letter or mark, or "digits", "white space" or "punctuation and symbols"."""
    if is_han(np.array(ord(character))):
        return HAN
    category = unicodedata.category(character)
    if category[0] == "N":
        return DIGITS
    if category[0] == "Z" or character in "\t\n\r\v\f":
        return SPACE
    if category[0] not in "LM":
        return PUNCTUATION
    words = unicodedata.name(character, "").split()
    if words and words[0] in WIDE:
        words = words[1:]
    return LETTERS.get(words[0] if words else "", OTHER)


def count_scripts(text: str) -> Counter[str]:
    """Returns the number of characters of each script."""
    codes, numbers = np.unique(code_points(text), return_counts=True)
    counts: Counter[str] = Counter()
    for code, number in zip(codes.tolist(), numbers.tolist(), strict=True):
        counts[script_of(chr(code))] += number
    return counts


def script_of_document(text: str) -> str:
    """Returns the script of most letters; "Han and kana" for Japanese, "no letters" for a text that has none.

    Letters are weighed by their bytes in UTF-8, so that an ideograph counts about as much as the letters of a word.
    """
    counts = count_scripts(text)
    kana = counts.pop("Hiragana", 0) + counts.pop("Katakana", 0)
    if kana > KANA * (kana + counts[HAN]):
        counts[JAPANESE] = kana + counts.pop(HAN, 0)
    letters = {name: n for name, n in counts.items() if n and name not in (DIGITS, SPACE, PUNCTUATION)}
    return max(letters, key=lambda name: (letters[name] * _weight(name), name)) if letters else NONE


def _weight(name: str) -> int:
    return 3 if name in (HAN, JAPANESE) else 1


@dataclass
class Share:
    """What the tokens of one script hold.

    Attributes:
        characters, bytes, tokens: their numbers; a token has the script of its last character, so a word keeps the
            space before it.
    """

    characters: int = 0
    bytes: int = 0
    tokens: int = 0


def measure(tokenizer: FileTokenizer, texts: Iterable[str]) -> dict[str, Share]:
    """Returns what the tokens of each script hold, the script with most bytes first.

    Raises:
        ValueError: the tokens of the tokenizer have no bytes of their own (`FileTokenizer.byte_lengths` is None).
    """
    lengths = tokenizer.byte_lengths
    if lengths is None:
        raise ValueError(f"{tokenizer.name}: its tokens are not bytes of text; use a byte-level or fall-back BPE")
    shares: dict[str, Share] = {}
    for text in texts:
        add_shares(shares, lengths, text, tokenizer.encode(text))
    return in_order(shares)


def in_order(shares: dict[str, Share]) -> dict[str, Share]:
    """Returns the shares with that of most bytes first."""
    return dict(sorted(shares.items(), key=lambda item: (-item[1].bytes, item[0])))


def add_shares(shares: dict[str, Share], byte_lengths: np.ndarray, text: str, ids: np.ndarray) -> None:
    """Adds the characters, bytes and tokens of a text to the shares of its scripts.

    Args:
        byte_lengths: bytes per token, int [vocab]. ids: the tokens of the text.
    """
    if not text:
        return
    codes = code_points(text)
    ends = np.cumsum(utf8_lengths(codes), dtype=np.int64)  # the byte behind each character
    lengths = byte_lengths[ids]
    last = np.cumsum(lengths) - 1  # the last byte of each token
    place = np.searchsorted(ends, last, side="right")  # the character that has it
    # Characters of a token: those that end in it.
    ended = np.searchsorted(ends, last + 1, side="right")
    characters = np.diff(ended, prepend=0)
    unique, index = np.unique(codes[place], return_inverse=True)
    names = [script_of(chr(code)) for code in unique.tolist()]
    columns = [np.bincount(index, weights, len(names)) for weights in (characters, lengths, np.ones(len(index)))]
    for name, *values in zip(names, *columns, strict=True):
        share = shares.setdefault(name, Share())
        share.characters += int(values[0])
        share.bytes += int(values[1])
        share.tokens += int(values[2])


# Learns the tokenizer of a corpus from the folders of its stages.

MEASURED = 16 << 20  # bytes of text whose tokens are counted by script, roughly

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Learned:
    """A tokenizer and what it was learned from.

    Attributes:
        tokenizer: the fall-back BPE.
        documents, bytes: of the whole corpus, whose characters were counted.
        learned_bytes: bytes of the documents from which the merges were learned.
        tokens: how many tokens of each kind it has, by name.
        scripts: what the tokens of each script hold, over `measured_bytes` of text.
    """

    tokenizer: FileTokenizer
    documents: int
    bytes: int
    learned_bytes: int
    tokens: dict[str, int]
    scripts: dict[str, Share]

    @property
    def measured_bytes(self) -> int:
        return sum(share.bytes for share in self.scripts.values())


def learn_tokenizer(
    sources: Sequence[str],
    vocab_size: int,
    cjk: int = 0,
    *,
    train_bytes: int = 100_000_000,
    text_key: str = "text",
    progress: Progress | None = None,
) -> Learned:
    """Learns a fall-back BPE from a corpus, which is read twice: for its characters, and for the merges.

    Args:
        sources: folders of stages, or sources as `documents.find_inputs` takes them.
        vocab_size, cjk: as in `train_fallback_bpe`.
        train_bytes: bytes of text from which merges are learned; documents are chosen by a hash of their names.
        text_key: key (JSONL) or column (Parquet) of the text of sources that are not stages.
        progress: called with the current phase, the bytes done and the bytes in total.

    Raises:
        ConfigError: a source cannot be read, holds no text, or has too little of it for `vocab_size`.
    """
    problems: list[str] = []
    inputs = find_inputs(list(sources), "FOLDER", problems, text_key)
    if vocab_size < FIRST + cjk:  # also found below, but after all text was read
        why = f"{FIRST} tokens for bytes, ASCII and the end of a document, and {cjk} Han characters"
        problems.append(f"--vocab: {vocab_size} is too small for {why}; use at least {FIRST + cjk}")
    refuse(problems, "corpus tokenizer")
    parts, total = inputs.parts, sum(part.size for part in inputs.parts)
    documents = size = 0
    counts = np.zeros(CODES, dtype=np.int64)
    for done, part in _with_size(parts):
        texts = [document.text for document in read_part(part, Counter())]
        documents, size = documents + len(texts), size + sum(len(text.encode()) for text in texts)
        counts += count_characters(texts)
        if progress:
            progress("counting characters", done, total)
    if not size:
        raise ConfigError(["FOLDER: holds no text; give a folder with documents"], "corpus tokenizer")
    learned = 0

    def learn_from() -> Iterator[str]:
        nonlocal learned
        for done, part in _with_size(parts):
            for document in some([part], train_bytes / size):
                learned += len(document.text.encode())
                yield document.text
            if progress:
                progress("learning merges", done, total)

    tokenizer = train_fallback_bpe(learn_from(), counts, vocab_size, cjk)
    scripts = measure(tokenizer, (document.text for document in some(parts, MEASURED / size)))
    if changed := inputs.changed():
        message = f"{changed[0]}: changed while it was read; run again when nothing writes to it"
        raise ConfigError([message], "corpus tokenizer")
    return Learned(tokenizer, documents, size, learned, _kinds(tokenizer, counts), scripts)


def some(parts: Sequence[Part], share: float) -> Iterator[Document]:
    """Yields about this share of the documents, the same ones in any order; all of them from 1 on.

    A document is taken if a hash of its source, file and row, from 0 to 1, is below the share.
    """
    for part in parts:
        for document in read_part(part, Counter()):
            name = f"{document.source}\0{document.file}\0{document.row}"
            if share >= 1 or hash64(name.encode()) / 2**64 < share:
                yield document


def _with_size(parts: Sequence[Part]) -> Iterator[tuple[int, Part]]:
    """Yields parts with their bytes of text and those of the parts before, roughly."""
    done = 0
    for part in parts:
        done += part.size
        yield done, part


def _kinds(tokenizer: FileTokenizer, counts: np.ndarray) -> dict[str, int]:
    single = [token.decode() for token in tokenizer.token_bytes[FIRST - 128 :] if len(token.decode()) == 1]
    codes = np.array([ord(character) for character in single if not character.isascii()], dtype=np.int64)
    ideographs = codes[is_han(codes)]
    kinds = {
        "end of a document": 1,
        "bytes": 128,
        "ASCII characters": 128,
        "Han characters of the text": int((counts[ideographs] > 0).sum()),
        "Han characters of the list": int((counts[ideographs] == 0).sum()),
        "other characters": len(codes) - len(ideographs),
    }
    return kinds | {"merges": tokenizer.vocab_size - sum(kinds.values())}
