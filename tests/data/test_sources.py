"""Sources: what is read, in which order, and what is said about what cannot be read."""

import builtins
import bz2
import codecs
import gzip
import json
import lzma
import os
import re
import sys
from collections import Counter
from hashlib import sha256

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.corpus.documents import find_inputs, read_part
from linnet.data import DataConfig, prepare, records, sources
from linnet.data.records import read_documents
from linnet.data.sources import find_files, fingerprints
from linnet.install import install_command


def read(source, text_key="text"):
    """Documents, problems and skipped files of a source."""
    problems, skipped, documents = [], [], []
    for file in find_files(source, "source", problems, skipped):
        documents += read_documents(file, text_key, problems if file.named else skipped)
    return documents, problems, skipped


def test_stdlib_is_the_library_and_nothing_else():
    problems, skipped = [], []
    files = find_files("stdlib", "source", problems, skipped)
    names = [file.path.relative_to(sources.stdlib_folder()).as_posix() for file in files]
    assert not problems and names == sorted(names)
    assert {"ast.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/test" in name or not name.endswith(".py")]
    assert sum(file.path.stat().st_size for file in files) > 5_000_000


def test_files_folders_and_globs_in_order_and_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a/z.md", "a/y.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    for name in (".hidden", "__pycache__/x.txt"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text("not this")
    monkeypatch.chdir(tmp_path)
    expected = [f"text of {name}".encode() for name in ("c.txt", "a/y.txt", "a/z.md", "b.txt")]
    assert read(["c.txt", "a", "*.txt", str(tmp_path / "a" / "*")]) == (expected, [], [])
    assert read(["**/y.txt"])[0] == [b"text of a/y.txt"]
    (tmp_path / "odd[1].txt").write_text("brackets")
    assert read(["odd[1].txt"])[0] == [b"brackets"]


def test_a_folder_skips_what_is_not_text_and_says_so(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"a" * records.SNIFF + b"caf\xe9")
    documents, problems, skipped = read([str(tmp_path)])
    assert (documents, problems) == ([b"good"], [])
    assert [line.split(str(tmp_path) + os.sep)[1][:22] for line in skipped] == [
        "empty.txt: is empty",
        "picture.png: is binary",
        "latin.txt: is not UTF-",
    ]


def test_a_folder_of_images_gets_the_command_for_images(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "one.png").write_bytes(b"\x89PNG\0\0")
    assert f"linnet data images {tmp_path}" in read([str(tmp_path)])[1][0]


def test_a_folder_of_a_corpus_stage_is_its_documents(tmp_path):
    import zstandard

    lines = [
        json.dumps({"text": f"document {n}" * 9, "source": "a", "file": "b", "row": n}) + "\n" for n in range(3000)
    ]
    shards = []
    for number, text in enumerate(["".join(lines), ""]):
        path = tmp_path / f"shard-0000{number}.jsonl.zst"
        path.write_bytes(zstandard.compress(text.encode()))
        size = path.stat().st_size
        shard = {"name": path.name, "documents": len(text.splitlines()), "bytes": size}
        shards.append(shard | {"text_bytes": len(text), "sha256": sha256(path.read_bytes()).hexdigest()})
    record = {"format": 1, "stage": "clean", "settings": {}, "inputs": [], "labels": ["a"], "shards": shards}
    record |= {"documents": 3000, "text_bytes": 1, "counts": {}, "samples": {}, "history": []}
    (tmp_path / "stage.json").write_text(json.dumps(record))
    (tmp_path / "provenance.json").write_text("{}")
    documents, problems, skipped = read([str(tmp_path)])
    assert documents == [f"document {n}".encode() * 9 for n in range(3000)] and not problems + skipped
    (tmp_path / "shard-00000.jsonl.zst").write_bytes(b"cut")
    assert "instead of" in read([str(tmp_path)])[1][0]
    (tmp_path / "shard-00000.jsonl.zst").unlink()
    assert "missing" in read([str(tmp_path)])[1][0]


def test_a_stage_that_has_not_ended_is_not_text_of_the_folder_around_it(tmp_path):
    for name, plan in (("stage", {"format": 1, "stage": "clean"}), ("other", {"text": "of something else"})):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "parts" / "plan.json").write_text(json.dumps(plan))
        (tmp_path / name / "shard.jsonl").write_text(json.dumps({"text": name}))
    documents, problems, skipped = read([str(tmp_path)])
    assert documents == [b"of something else", b"other"] and not problems
    assert len(skipped) == 1 and skipped[0].startswith(f"{tmp_path}/stage: ") and "not ended" in skipped[0]


def test_the_rounds_of_a_loop_are_not_read_as_one_text(tmp_path):
    (tmp_path / "round-1" / "kept").mkdir(parents=True)
    (tmp_path / "loop.yaml").write_text("rounds: 1\n")
    (tmp_path / "round-1" / "page.txt").write_text("text")
    assert "`kept`" in read([str(tmp_path)])[1][0]


def test_all_that_is_wrong_with_named_files_is_said(tmp_path):
    contents = {
        "empty.txt": b"",
        "binary.txt": b"ab\0c",
        "latin.txt": b"caf\xe9",
        "wide.txt": "wide".encode("utf-16"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    names = [*contents, "folder", "missing.txt", "*.none"]
    documents, problems, _ = read([str(tmp_path / name) for name in names])
    text = "\n".join(problems)
    assert documents == [] and len(problems) == len(names)
    for message in (
        "empty.txt",
        "binary.txt: .*byte 2 ",
        "latin.txt: .*UTF-8.*byte 3 .*0xe9",
        "wide.txt: .*UTF-16",
        "folder",
        "missing.txt",
        r"\*\.none",
    ):
        assert re.search(message, text)
    assert read([str(tmp_path / "e*.txt")])[1][0].count("empty file") == 1
    assert "empty" in read([])[1][0]


def test_jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": "one\ntwo"}, {"text": ""}, {"text": "café", "more": 1}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    assert read([str(path)]) == ([b"one\ntwo", "café".encode()], [], [])
    assert read([str(tmp_path)])[0] == [b"one\ntwo", "café".encode()]
    _, problems, _ = read([str(path)], "txt")
    assert [problem.partition(": ")[2][:6] for problem in problems] == ["line 1", "line 2", "line 3"]
    assert all(word in problem for problem in problems for word in ("'txt'", "text_key", "'text'"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 2: .*JSON.*Unterminated string"),
        (b"[1]", "line 2: .*list"),
        (b'{"text": 3}', "line 2: .*'text' .*int"),
        (b'{"text": "a\\u0000"}', "line 2: .*'text' .*NUL.* 1"),
        (b'{"text": "\\ud800"}', "line 2: .*'text' .*surrogate"),
        (b'{"text": "\xff"}', "line 2: .*UTF-8.*byte 10 .*0xff"),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path, line, message):
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    documents, problems, _ = read([str(path)])
    assert documents == [b"good"] and len(problems) == 1
    assert re.match(f"{path}: {message}", problems[0])


def test_many_bad_lines_are_counted(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("no\n" * 1000)
    _, problems, _ = read([str(path)])
    assert len(problems) == records.REPORTED + 1 and re.search("995 .*1000", problems[-1])


def test_parquet(tmp_path):
    path = tmp_path / "texts.parquet"
    texts = [f"text {number} é" for number in range(3000)]
    table = pa.table({"body": pa.array([*texts, None, ""], pa.large_string()), "id": list(range(3002))})
    parquet.write_table(table, path, row_group_size=500)
    assert read([str(path)], "body") == ([text.encode() for text in texts], [], [])
    assert all(word in read([str(path)], "boddy")[1][0] for word in ("'boddy'", "text_key", "'body'"))
    assert all(word in read([str(path)], "id")[1][0] for word in ("row 0: ", "'id'", "int"))
    path.write_bytes(path.read_bytes()[:-20])
    assert "Parquet" in read([str(path)], "body")[1][0]
    for nested in ([["a"], ["b"]], [{"x": "a"}]):
        parquet.write_table(pa.table({"body": nested}), path)
        assert all(word in read([str(path)], "body")[1][0] for word in ("row 0: ", "'body'", type(nested[0]).__name__))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "texts.parquet").write_bytes(b"PAR1")
    original = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *rest)

    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    assert install_command("data") in read([str(tmp_path / "texts.parquet")])[1][0]


def test_fingerprints_of_large_files_are_remembered_until_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGE", 4)
    monkeypatch.setattr(sources, "SETTLED", -1.0)
    path, cache = tmp_path / "text.txt", tmp_path / "cache"
    path.write_text("first")
    files = find_files([str(path)], "source", [], [])
    first = fingerprints(files, cache)
    monkeypatch.setattr(sources, "fingerprint", lambda path: "read again")
    assert fingerprints(files, cache) == first
    path.write_text("other")
    assert fingerprints(files, cache) == ["read again"]
    (cache / "fingerprints.json").write_text("broken")
    assert fingerprints(files, cache) == ["read again"]


def test_fingerprints_need_no_cache_that_may_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGE", 1)
    monkeypatch.setattr(sources, "SETTLED", -1)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "cache").write_text("a file in the place of the folder")
    files = find_files(str(tmp_path / "a.txt"), "source", [], [])
    assert fingerprints(files, tmp_path / "cache") == [sources.fingerprint(tmp_path / "a.txt")]


def test_fingerprints_of_small_files_are_remembered_by_the_process_until_they_change(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("first")
    files = find_files([str(path)], "source", [], [])
    first = fingerprints(files, None)
    monkeypatch.setattr(sources, "fingerprint", lambda path: "read again")
    assert fingerprints(files, None) == ["read again"]  # it changed a moment ago, so nothing was remembered
    monkeypatch.undo()
    monkeypatch.setattr(sources, "SETTLED", -1.0)
    assert fingerprints(files, None) == first
    monkeypatch.setattr(sources, "fingerprint", lambda path: "read again")
    assert fingerprints(files, None) == first
    path.write_text("other")
    assert fingerprints(files, None) == ["read again"]


def test_a_file_by_several_names_is_found_once(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").symlink_to("a.txt")
    (tmp_path / "link").symlink_to("texts")
    names = [str(folder), f"{folder}/../texts/a.txt", str(tmp_path / "link"), str(tmp_path / "link" / "b.txt")]
    found = find_files(names, "source", [], [])
    assert [file.path for file in found] == [folder / "a.txt"]


def read_one(path, key="text"):
    problems: list[str] = []
    files = find_files([str(path)], "source", problems, [])
    texts = [text for file in files for text in read_documents(file, key, problems)]
    return texts, problems


def compressors():
    zstandard = pytest.importorskip("zstandard")
    return {".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_compressed_text_and_jsonl_are_read(tmp_path, end):
    compress = compressors()[end]
    lines = '{"text": "one"}\n\n{"text": "zwei ü"}\n'.encode()
    (tmp_path / f"a.txt{end}").write_bytes(compress("first é\n".encode()) + compress(b"second"))  # two members
    (tmp_path / f"b.jsonl{end}").write_bytes(compress(lines))
    assert read_one(tmp_path / f"a.txt{end}") == (["first é\nsecond".encode()], [])
    assert read_one(tmp_path / f"b.jsonl{end}") == ([b"one", "zwei ü".encode()], [])
    assert read_one(tmp_path)[0] == ["first é\nsecond".encode(), b"one", "zwei ü".encode()]


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_compressed_files_that_are_not_whole_are_named(tmp_path, end):
    whole = compressors()[end](bytes(range(33, 126)) * 50)
    for name, data in (("cut", whole[:-9]), ("other", b"plain text"), ("binary", compressors()[end](b"a\0b"))):
        path = tmp_path / f"{name}.txt{end}"
        path.write_bytes(data)
        assert read_one(path)[0] == [] and name in read_one(path)[1][0]
    (tmp_path / f"table.parquet{end}").write_bytes(whole)
    assert "decompress it first" in read_one(tmp_path / f"table.parquet{end}")[1][0]


@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.zst", "bomb.parquet"])
def test_files_that_expand_without_end_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr("linnet.data.records.EXPANDED", 1 << 18)
    path = tmp_path / name
    if name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        indices = pyarrow.array([0] * 5000, pyarrow.int32())
        texts = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 4000]))
        parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        lines = b'{"text": "xxxx"}\n' * 200_000 if "jsonl" in name else b"x" * 4_000_000
        path.write_bytes(compressors()[path.suffix](lines))
    texts, problems = read_one(path)
    assert sum(map(len, texts)) <= max(1 << 18, 200 * path.stat().st_size)
    assert "holds more than" in problems[0]


def test_devices_pipes_and_the_kernels_tables_are_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.txt").symlink_to("/dev/zero")
    (tmp_path / "mem.txt").symlink_to("/proc/self/mem")
    for path in (tmp_path / "pipe", tmp_path / "link.txt", tmp_path / "mem.txt", "/dev/zero", "/proc", "/sys/kernel"):
        (problem,) = find_problems(path)
        assert str(path) in problem
    (tmp_path / "text.txt").write_text("text")
    assert read_one(tmp_path) == ([b"text"], [])
    assert "NUL" in find_problems("a\0b")[0]


def find_problems(path) -> list[str]:
    problems: list[str] = []
    find_files([str(path)], "source", problems, [])
    return problems


ROWS = [{"text": "one\ntwo", "id": 1}, {"text": "drei ü"}]
JSON = {
    "lines": "\n".join(map(json.dumps, ROWS)) + "\n",
    "one line": json.dumps(ROWS[0]),
    "blank first": "\n \n" + "\n".join(map(json.dumps, ROWS)),
    "array": json.dumps(ROWS),
    "pretty array": json.dumps(ROWS, indent=2),
    "pretty object": json.dumps(ROWS[0], indent=2),
}


@pytest.mark.parametrize("form", JSON)
@pytest.mark.parametrize("end", [".json", ".json.gz", ".json.zst", ".JSON.GZ", ".JSONL", ".ndjson.gz"])
def test_rows_of_json_are_documents_and_never_its_markup(tmp_path, form, end):
    if "json." not in f"{end.lower()}.".replace("ndjson", "") and form not in ("lines", "one line", "blank first"):
        pytest.skip("these names promise one object per line")
    data = JSON[form].encode()
    path = tmp_path / f"x{end}"
    path.write_bytes(compressors()[path.suffix.lower()](data) if path.suffix.lower() in (".gz", ".zst") else data)
    expected = [row["text"].encode() for row in ROWS[: 1 if form in ("one line", "pretty object") else 2]]
    assert read([str(path)]) == (expected, [], [])
    assert read([str(tmp_path)])[0] == expected
    assert [one.text.encode() for one in cleaned(path)[0]] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"other": "a"}\n', "line 1: .*text_key.*known: other"),
        ('{"messages": []}\n', "line 1: .*text_key.*objective: chat"),
        (json.dumps([{"text": "a"}, {"other": 1}]), "item 2: .*text_key"),
        (json.dumps(["a"]), "item 1: .*not a JSON object but str"),
        (json.dumps({"other": "a"}, indent=1), "item 1: .*text_key"),
        ("3", "item 1: .*not a JSON object but int"),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n}', "not JSON: .*Extra data.*per line.*jq"),
        ("", "empty file"),
    ],
)
def test_json_without_rows_of_text_is_refused_with_the_way_out(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    documents, problems, _ = read([str(tmp_path / "x.json")])
    assert b"{" not in b"".join(documents) and len(problems) == 1 and re.search(message, problems[0])
    assert not any("{" in one.text for one in cleaned(tmp_path / "x.json")[0])


def test_a_folder_of_programs_skips_its_settings_in_json(tmp_path):
    (tmp_path / "main.py").write_text("print()\n" * 60)
    (tmp_path / "package.json").write_text('{"name": "x"}')
    corpus = prepare(DataConfig(source=[str(tmp_path)]), tmp_path / "cache")
    assert corpus.train.documents == 1 and corpus.metadata["skipped"] == 1
    assert "package.json" in corpus.metadata["skipped_files"][0]
    (tmp_path / "main.py").unlink()
    with pytest.raises(ConfigError, match="package.json.*text_key"):
        prepare(DataConfig(source=[str(tmp_path / "*.json")]), tmp_path / "cache")


def test_a_glob_names_each_file_that_is_not_read(tmp_path):
    for name, content in (("a.txt", b"text"), ("b.csv", b"text,label\na,1\n"), ("c.txt", gzip.compress(b"text"))):
        (tmp_path / name).write_bytes(content)
    documents, [problem], _ = read([str(tmp_path / "*")])
    assert documents == [b"text"] and "b.csv, which is a table" in problem and "c.txt, which is compressed" in problem


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"text,label\na,1\n", "table.*JSONL"),
        ("x.TSV.gz", gzip.compress(b"text\tlabel\na\t1\n", mtime=0), "table.*JSONL"),
        ("x.txt", gzip.compress(b"text", mtime=0), r"gzip.*\.gz"),
        ("x.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), r"gzip.*\.gz"),
        ("x.txt", b"PAR1\x15\x04", r"Parquet.*\.parquet"),
        ("x.jsonl", b"PAR1\x15\x04", r"Parquet.*\.parquet"),
        ("x.txt.bz2", bz2.compress(b"text"), "bzip2.*bunzip2"),
        ("x.jsonl.xz", lzma.compress(b'{"text": "a"}'), "xz.*unxz"),
        ("x.parquet", b"text", "not a readable Parquet file"),
        ("x.pdf", b"%PDF-1.7\n", "PDF.*pdftotext"),
    ],
)
def test_a_file_in_a_format_that_is_not_read_is_refused_with_the_way_out(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    documents, problems, _ = read([str(tmp_path / name)])
    assert not documents and len(problems) == 1 and re.search(message, problems[0])
    assert re.search(message, cleaned(tmp_path / name)[1][0])


def cleaned(path, key="text"):
    """Documents, problems and counts of a source of `linnet corpus clean`."""
    problems, counts = [], Counter()
    parts = find_inputs([str(path)], "SOURCE", problems, key).parts
    return [one for part in parts for one in read_part(part, counts)], problems, counts


def write_rows(path, texts, mark=b""):
    """Writes texts (None is null) in the format of the name, after a byte order mark."""
    if path.suffix == ".parquet":
        return parquet.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    rows = [{"text": text} for text in texts]
    forms = {
        ".jsonl": "\n".join(map(json.dumps, rows)),
        ".json": json.dumps(rows, indent=1),
        ".fa": "".join(f">{n}\n{text or ''}\n" for n, text in enumerate(texts)),
        ".txt": texts[0],
    }
    data = mark + forms[path.suffixes[0]].encode()
    return path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.jsonl", "x.jsonl.gz", "x.json", "x.json.gz", "x.fa"])
def test_a_byte_order_mark_at_the_start_of_a_file_is_no_text(tmp_path, name):
    write_rows(tmp_path / name, ["ACGT"], b"\xef\xbb\xbf")
    assert read([str(tmp_path / name)]) == ([b"ACGT"], [], [])
    if not name.endswith(".fa"):
        assert [one.text for one in cleaned(tmp_path / name)[0]] == ["ACGT"]
    write_rows(tmp_path / "inner.txt", ["a\ufeffb"])
    assert read([str(tmp_path / "inner.txt")])[0] == ["a\ufeffb".encode()]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json", "x.fa"])
def test_wide_encodings_are_refused_with_the_command_that_converts_them(tmp_path, name, encoding):
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    (tmp_path / name).write_bytes(mark + '{"text": "a"}'.encode(encoding))
    documents, problems, _ = read([str(tmp_path / name)])
    assert not documents and len(problems) == 1 and f"iconv -f {encoding[:6]} -t utf-8" in problems[0]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", "x.parquet"])
def test_null_and_empty_rows_are_left_out_and_counted_in_every_format(tmp_path, name):
    write_rows(tmp_path / name, ["a" * 60, None, "", None, "b" * 60])
    assert read([str(tmp_path / name)]) == ([b"a" * 60, b"b" * 60], [], [])
    found, problems, counts = cleaned(tmp_path / name)
    assert [one.row for one in found] == [0, 4] and not problems and counts["unreadable.no text"] == 3
    words = ["data", "text", str(tmp_path / name), "--validation-fraction", ".5", "--out", str(tmp_path / "cache")]
    assert "1 empty, 2 null" in CliRunner().invoke(app, words).output
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["rows_left_out"] == {"empty": 1, "null": 2}
    write_rows(tmp_path / name, [None, ""])
    with pytest.raises(ConfigError, match="no text"):
        prepare(DataConfig(source=[str(tmp_path / name)]), tmp_path / "cache")


def test_parquet_with_text_that_is_not_utf8_names_the_file(tmp_path):
    broken = pa.array([b"good", b"\xff"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": broken}), tmp_path / "x.parquet")
    assert "UTF-8" in read([str(tmp_path / "x.parquet")])[1][0]
    assert cleaned(tmp_path / "x.parquet")[2].total() > 0


def folder_of(kind, folder, text):
    """Makes a folder that a command of Linnet writes."""
    if kind == "data text":
        return prepare(DataConfig(source=[str(text)]), folder).folder
    (folder / "parts").mkdir(parents=True)
    shard = {"name": "train-00000.npz", "rows": 1, "bytes": 3, "sha256": ""}
    stage = json.dumps({"format": 1, "stage": "lra", "shards": [shard]})
    names = {"train": ["config.yaml", "metrics.jsonl"], "study": ["study.yaml", "plan.json"]}
    names |= {"mad": ["mad.csv", "plan.json"], "model": ["config.json", "model.safetensors"]}
    names |= {
        "data images": ["corpus.json", "labels.npy"],
        "data lra": ["stage.json"],
        "not ended": ["parts/plan.json"],
    }
    for name in [*names[kind], "notes.txt"]:
        (folder / name).write_text(stage)
    return folder


@pytest.mark.parametrize(
    "kind", ["data lra", "not ended", "data text", "data images", "train", "study", "mad", "model"]
)
def test_a_folder_that_linnet_wrote_and_that_is_not_text_is_named(tmp_path, kind):
    text = tmp_path / "texts" / "page.txt"
    text.parent.mkdir()
    text.write_text("a page of text\n" * 9)
    folder = folder_of(kind, tmp_path / "texts" / "other", text)
    documents, problems, _ = read([str(folder)])
    assert not documents and len(problems) == 1 and str(folder) in problems[0] and kind in problems[0]
    assert kind in cleaned(folder)[1][0]
    documents, problems, skipped = read([str(tmp_path / "texts")])
    assert documents == [text.read_bytes()] and not problems
    assert [line for line in skipped if str(folder) in line and kind in line] == skipped and len(skipped) == 1
    assert [one.file for one in cleaned(tmp_path / "texts")[0]] == ["page.txt"]
    for words in (["data", "text"], ["corpus", "clean"], ["corpus", "dedup"], ["corpus", "tokenizer"]):
        found = CliRunner().invoke(app, [*words, str(folder), "--out", str(tmp_path / "out.json")])
        assert found.exit_code == 2 and folder.name in found.output and kind in found.output
