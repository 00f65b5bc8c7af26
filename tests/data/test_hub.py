"""Data sets and tokenizers by their names on the Hub, from folders in the layout of its cache."""

import gzip
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from linnet.config import ConfigError, parse
from linnet.data import DataConfig, hub, load_tokenizer, prepare, train_bpe
from linnet.data.corpus import revisions
from linnet.data.sources import find_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WORDS = "the cat sat on the mat; the dog sat on the log. "


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub without a network; returns a function that puts a repository into it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._resolve.cache_clear()

    def put(kind: str, name: str, files: dict[str, str | bytes], commit: str = COMMIT) -> Path:
        root = tmp_path / "hub" / f"{kind}s--{name.replace('/', '--')}"
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(commit)
        for number, (file, content) in enumerate(files.items()):
            blob, link = root / "blobs" / f"{commit}-{number}", root / "snapshots" / commit / file
            blob.parent.mkdir(exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content.encode() if isinstance(content, str) else content)
            link.symlink_to(blob)
        return root / "snapshots" / commit

    yield put
    hub._resolve.cache_clear()


def found(source: str) -> list[str]:
    """Names of the files of a source; a problem raises."""
    problems: list[str] = []
    files = find_files([source], "source", problems, [])
    assert not problems, problems
    return [file.path.name for file in files]


def problem(source: str) -> str:
    problems: list[str] = []
    assert not find_files([source], "source", problems, [])
    [line] = problems
    assert line.startswith(f"source: {source!r} ")
    return line


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


CARD = """---
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: "en/tr*.jsonl"}
  - {split: validation, path: [en/dev.jsonl]}
- config_name: de
  data_files: de/**
---
# Books
"""


def test_the_card_names_configurations_and_splits(cache):
    files = {"README.md": CARD, "en/tr1.jsonl": lines("a"), "en/tr2.jsonl": lines("b"), "en/dev.jsonl": lines("c")}
    cache("dataset", "org/books", files | {"de/x/one.txt": "d", "en/other.jsonl": lines("e")})
    assert found("hf:org/books") == found("hf:org/books:en:train") == ["tr1.jsonl", "tr2.jsonl"]
    assert found("hf:org/books::validation") == ["dev.jsonl"]
    assert found(f"hf:org/books@{COMMIT}:de") == ["one.txt"]
    assert "'en'" in problem("hf:org/books:eng") and "'validation'" in problem("hf:org/books:en:validaton")
    assert "NAME:CONFIG:SPLIT" in problem("hf:org/books:en:train:more")


def test_without_a_card_folders_and_words_of_paths_count(cache):
    cache("dataset", "plain", {"data/train-00000-of-00002.jsonl": lines("a"), "data/train-00001-of-00002.jsonl": "b"})
    assert len(found("hf:plain")) == 2
    assert "known: train" in problem("hf:plain::test")
    cache("dataset", "two", {"en/train.txt": "a", "de/train.txt": "b", "de/valid.txt": "c", ".gitattributes": "d"})
    assert "de, en" in problem("hf:two") and found("hf:two:de") == ["train.txt"]
    assert found("hf:two:de:validation") == found("hf:two:de:dev") == ["valid.txt"]
    rows = gzip.compress(lines("a").encode())
    cache("dataset", "c4", {"en/c4-train.00000.json.gz": rows, "dataset_infos.json": "{}"})
    assert found("hf:c4") == ["c4-train.00000.json.gz"]
    cache("dataset", "odd", {"table.csv": "a,b"})
    assert "refs/convert/parquet" in problem("hf:odd")


def test_what_is_not_there_is_named_with_the_fix(cache, tmp_path):
    assert "hf download org/none --repo-type dataset" in problem("hf:org/none")
    assert "hf download none --revision v2" in str(_error(lambda: load_tokenizer("hf:none@v2")))
    cache("dataset", "half", {"train-00000-of-00002.jsonl": lines("a")})
    assert "1 of 2" in problem("hf:half")  # a download that was interrupted
    assert "not a folder" in problem("hf:/none/at/all")
    assert "not a name on the Hub" in problem("hf:a b")
    config = {"source": ["hf:org/none"], "tokenizer": "hf:none"}
    error = _error(lambda: prepare(parse(DataConfig, config), tmp_path / "cache"))
    assert len(error.problems) == 2 and not (tmp_path / "cache").exists()


def _error(call) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        call()
    return error.value


def test_a_corpus_and_its_record(cache, tmp_path):
    words = train_bpe([WORDS * 20], 270)
    end = {"eos_token": {"content": "<|endoftext|>"}}
    model = cache("model", "org/words", {"tokenizer.json": words.to_json(), "tokenizer_config.json": json.dumps(end)})
    data = cache("dataset", "books", {"train.jsonl": lines(*(f"{n} {WORDS * 5}" for n in range(20)))})
    config = parse(DataConfig, {"source": ["hf:books"], "tokenizer": "hf:org/words"})
    corpus = prepare(config, tmp_path / "cache")
    expected = {"hf:books": COMMIT, "hf:org/words": COMMIT}
    assert revisions(config) == corpus.metadata["revisions"] == expected
    assert corpus.tokenizer.name == "hf:org/words" and corpus.tokenizer.digest == words.digest
    assert corpus.tokenizer.decode(corpus.train[:10]).strip()
    # By path, of a folder in the Hub's layout: the same content is the same corpus, without a revision.
    local = {"source": [f"hf:{data}"], "tokenizer": f"hf:{model}"}
    again = prepare(parse(DataConfig, local), tmp_path / "cache")
    assert again.digest == corpus.digest and revisions(parse(DataConfig, local)) == {}
    assert "tokenizer.json" in str(_error(lambda: load_tokenizer(f"hf:{data}")))


class Server(http.server.BaseHTTPRequestHandler):
    """The endpoints of the Hub for one data set."""

    files = {"README.md": CARD, "en/tr1.jsonl": lines("a"), "en/tr2.jsonl": lines("b"), "other.bin": "x"}

    def do_GET(self):
        path = self.path.partition("?")[0]
        name = path.partition(f"/datasets/org/books/resolve/{COMMIT}/")[2]
        if path.startswith("/api/datasets/org/books/tree/"):
            self._answer(
                json.dumps([{"type": "file", "path": k, "size": len(v), "oid": k} for k, v in self.files.items()])
            )
        elif path.startswith("/api/datasets/org/books"):
            siblings = [{"rfilename": file} for file in self.files]
            self._answer(json.dumps({"id": "org/books", "sha": COMMIT, "siblings": siblings}))
        elif name in self.files:
            self._answer(self.files[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def _answer(self, text: str):
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(text.encode()).hexdigest()}"')
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def test_what_is_needed_is_downloaded_once(cache, monkeypatch):
    """Through huggingface_hub, from a server on this machine; then without it, from the cache that it left."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        assert found("hf:org/books") == ["tr1.jsonl", "tr2.jsonl"]
        assert "does not exist on the Hub" in problem("hf:org/none")
        folder = hub.resolve("org/books", "dataset").folder
        assert folder.name == COMMIT and not (folder / "other.bin").exists()
    finally:
        server.shutdown()
        server.server_close()
    hub._resolve.cache_clear()
    assert found("hf:org/books") == ["tr1.jsonl", "tr2.jsonl"]
    assert hub.revisions(["hf:org/books", "text.txt"], "dataset") == {"hf:org/books": COMMIT}
    assert "cannot be reached" in problem("hf:org/other")
