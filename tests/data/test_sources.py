"""Sources: what is read, in which order, and what is said about what cannot be read."""

import builtins
import gzip
import json
import os
import re
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from linnet.data import sources
from linnet.data.sources import find_files, fingerprints, read_documents
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
    (tmp_path / "latin.txt").write_bytes(b"a" * sources.SNIFF + b"caf\xe9")
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
        shards.append({"name": path.name, "documents": len(text.splitlines()), "bytes": size})
    (tmp_path / "stage.json").write_text(json.dumps({"format": 1, "stage": "clean", "shards": shards}))
    (tmp_path / "provenance.json").write_text("{}")
    documents, problems, skipped = read([str(tmp_path)])
    assert documents == [f"document {n}".encode() * 9 for n in range(3000)] and not problems + skipped
    (tmp_path / "shard-00000.jsonl.zst").write_bytes(b"cut")
    assert "instead of" in read([str(tmp_path)])[1][0]
    (tmp_path / "shard-00000.jsonl.zst").unlink()
    assert "missing" in read([str(tmp_path)])[1][0]


def test_a_stage_that_has_not_ended_is_not_text_of_the_folder_around_it(tmp_path):
    for name, plan in (("stage", {"format": 1, "stage": "clean"}), ("other", {"plan": "of something else"})):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "parts" / "plan.json").write_text(json.dumps(plan))
        (tmp_path / name / "shard.jsonl").write_text(json.dumps({"text": name}))
    documents, problems, skipped = read([str(tmp_path)])
    assert documents == [b'{"plan": "of something else"}', b"other"] and not problems
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
    assert len(problems) == sources.REPORTED + 1 and re.search("995 .*1000", problems[-1])


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
    monkeypatch.setattr("linnet.data.sources.EXPANDED", 1 << 18)
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
