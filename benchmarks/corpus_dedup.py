"""`linnet corpus dedup` beside datatrove and text-dedup: speed, recall and precision, memory, workers.

    python benchmarks/corpus_dedup.py speed --datatrove PYTHON --text-dedup PYTHON --csv
    python benchmarks/corpus_dedup.py recall --csv
    python benchmarks/corpus_dedup.py memory --csv
    python benchmarks/corpus_dedup.py workers --csv       # on an idle machine

PYTHON is the interpreter of a virtual environment that has the rival:

    pip install "datatrove[io,processing]==0.10.1"
    pip install "text-dedup==0.4.0"

All three read the same JSONL with the same settings: 5-grams of words, 14 bands of 8 rows, one process. Times are CPU
seconds, user and system, of the process and its children. Each is measured for the corpus and for its first 20
documents; the difference, which leaves imports out, gives the documents per second. datatrove keeps numbers apart and
splits words at spaces here, because its own tokenizer for English needs spaCy, which its extras do not bring.

The corpus is of this machine: the Python standard library, WikiText-2 (`--data`) and documents below /usr/share/doc;
then a copy of every sixth document with 0 to 10 % of its words replaced. The similarity of a pair is the Jaccard
similarity of its 5-grams of words, computed exactly.
"""

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import timing

from linnet import provenance
from linnet.corpus.dedup import minhash
from linnet.data.sources import stdlib_folder

RESULTS = timing.RESULTS / "corpus_dedup.csv"
SHARES = (0, 0.005, 0.01, 0.02, 0.05, 0.1)  # of the words of a copy that are replaced
LARGEST = 200_000  # bytes of a document

LINNET = """
import sys, time
from pathlib import Path
from linnet.corpus.dedup import DedupConfig, dedup
if __name__ == "__main__":
    source, out, verify, workers = sys.argv[1:]
    dedup([source], Path(out), DedupConfig(verify=verify == "yes"), workers=int(workers))
    # The peak that the parent sees (ru_maxrss) is never below its own.
    peak = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    Path(out + ".peak").write_text(peak[0])
    Path(out + ".own").write_text(str(time.process_time()))
"""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WordTokenizer

class Split(WordTokenizer):
    def word_tokenize(self, text):
        return text.split()
    def sent_tokenize(self, text):
        return [text]
    def span_tokenize(self, text):
        return [(0, len(text))]

def run(pipeline, name, tasks=1):
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{out}/logs/{name}").run()

if __name__ == "__main__":
    folder, out = sys.argv[1:]
    config = MinhashConfig(norm_config=TextNormConfig(norm_numbers=False))
    reader = JsonlReader(folder, text_key="text", id_key="id")
    run([reader, MinhashDedupSignature(f"{out}/signatures", config, language=Split())], "1")
    run([MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)], "2", config.num_buckets)
    run([MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config=config)], "3")
    run([reader, MinhashDedupFilter(f"{out}/remove"), JsonlWriter(f"{out}/kept", compression=None)], "4")
"""

TEXT_DEDUP = """
import json, sys
from text_dedup.minhash import main
if __name__ == "__main__":
    source, out = sys.argv[1:]
    fixed = ["--ngram", "5", "--num_perm", "112", "--b", "14", "--r", "8", "--hash_func", "xxh3", "--hash_bits", "32"]
    place = ["--path", "json", "--data_files", source, "--split", "train", "--cache_dir", f"{out}/cache"]
    fixed += ["--column", "text", "--num_proc", "1", "--batch_size", "10000"]
    try:
        main([*place, "--output", f"{out}/kept", *fixed])
    except SystemExit as ended:
        if ended.code:
            raise
    from datasets import load_from_disk
    with open(f"{out}/kept.jsonl", "w") as file:
        for name in load_from_disk(f"{out}/kept")["id"]:
            file.write(json.dumps({"id": name}) + chr(10))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "recall", "memory", "workers"))
    parser.add_argument("--datatrove", metavar="PYTHON")
    parser.add_argument("--text-dedup", metavar="PYTHON")
    parser.add_argument("--data", type=Path, default=os.environ.get("LINNET_TEST_DATA"), help="folder with wikitext-2")
    parser.add_argument("--documents", type=int, default=3000, help="of the corpus, before copies are planted")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3, help="of workers")
    parser.add_argument("--scale", type=int, default=12, help="times the corpus that workers share")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    rows = [{"experiment": options.what, **row} for row in globals()[options.what](options)]
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.csv:
        _save(options.what, rows)


def speed(options: argparse.Namespace) -> Iterator[dict]:
    """CPU seconds of each, and what each found."""
    texts, pairs = _corpus(options.documents, options.data)
    size = sum(len(text.encode()) for text in texts)
    planted = {copy: (first, _similarity(texts[first], texts[copy])) for first, copy in pairs}
    closest = _closest(texts)
    programs = {
        "linnet": (sys.executable, LINNET, ["no", "1"]),
        "linnet --verify": (sys.executable, LINNET, ["yes", "1"]),
    }
    if options.datatrove:
        programs["datatrove 0.10.1"] = (options.datatrove, DATATROVE, [])
    if options.text_dedup:
        programs["text-dedup 0.4.0"] = (options.text_dedup, TEXT_DEDUP, [])
    for name, (python, program, arguments) in programs.items():
        seconds, kept = [], set()
        for count in (20, len(texts)):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "in").mkdir()
                _write(Path(folder) / "in" / "corpus.jsonl", texts[:count])
                source = f"{folder}/in" if program is DATATROVE else f"{folder}/in/corpus.jsonl"
                used, _ = _run(python, program, [source, f"{folder}/out", *arguments])
                seconds.append(used)
                kept = _kept(Path(folder) / "out")
        removed = set(range(len(texts))) - kept
        found = [copy in removed or first in removed for copy, (first, similar) in planted.items() if similar >= 0.9]
        yield {
            "program": name,
            "documents": len(texts),
            "megabytes": round(size / 1e6, 1),
            "cpu_seconds": round(seconds[1], 2),
            "start_seconds": round(seconds[0], 2),
            "documents_per_second": round(len(texts) / (seconds[1] - seconds[0]), 1),
            "removed": len(removed),
            "recall_at_0.9": round(float(np.mean(found)), 4),
            "precision_at_0.8": round(float(np.mean([closest[one] >= 0.8 for one in removed])), 4),
            "precision_at_0.6": round(float(np.mean([closest[one] >= 0.6 for one in removed])), 4),
        }


def recall(options: argparse.Namespace) -> Iterator[dict]:
    """Of planted pairs, the share that shares a key, and that is found by the whole stage."""
    rng = random.Random(0)
    for target in (0.95, 0.9, 0.8, 0.7, 0.5):
        first, second, similarities = [], [], []
        while len(first) < options.pairs:
            a = [f"w{rng.randrange(20_000)}" for _ in range(rng.randrange(150, 500))]
            b = _replaced(rng, a, round(len(a) * (1 - target) / (1 + target) / 5))
            similar = _similarity(" ".join(a), " ".join(b))
            if target <= similar < target + 0.03 if target >= 0.9 else abs(similar - target) < 0.02:
                first.append(" ".join(a))
                second.append(" ".join(b))
                similarities.append(similar)
        formula = float(np.mean(1 - (1 - np.array(similarities) ** minhash.ROWS) ** minhash.BANDS))
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder) / "corpus.jsonl", [*first, *second])
            _run(sys.executable, LINNET, [f"{folder}/corpus.jsonl", f"{folder}/out", "no", "1"])
            kept = _kept(Path(folder) / "out")
            removed = [number for number in range(options.pairs) if number + options.pairs not in kept]
            _run(sys.executable, LINNET, [f"{folder}/corpus.jsonl", f"{folder}/verified", "yes", "1"])
            verified = set(range(2 * options.pairs)) - _kept(Path(folder) / "verified")
        wrong = [number for number in verified if similarities[number - options.pairs] < 0.8]
        yield {
            "similarity": target,
            "pairs": options.pairs,
            "mean_similarity": round(float(np.mean(similarities)), 4),
            "recall": round(len(removed) / options.pairs, 4),
            "formula": round(formula, 4),
            "removed_with_verify": len(verified),
            "of_them_below_0.8": len(wrong),
        }


def memory(options: argparse.Namespace) -> Iterator[dict]:
    """Peak memory of the process for short documents, of which a third are copies."""
    rng = random.Random(0)
    for count in (1000, 300_000):
        with tempfile.TemporaryDirectory() as folder:
            texts = []
            for number in range(count):
                if number % 3 == 2:  # a copy of the text before, with another word in it
                    first, _, rest = texts[-1].partition(" ")
                    texts.append(f"{first} y{number} {rest}")
                else:
                    texts.append(" ".join(f"w{rng.randrange(20_000)}" for _ in range(rng.randrange(15, 45))))
            _write(Path(folder) / "corpus.jsonl", texts)
            size = sum(map(len, texts))
            del texts
            for verify in ("no", "yes"):
                place = f"{folder}/{verify}"
                used, _ = _run(sys.executable, LINNET, [f"{folder}/corpus.jsonl", place, verify, "1"])
                peak = int(Path(f"{place}.peak").read_text()) * 1024
                yield {
                    "program": "linnet" + (" --verify" if verify == "yes" else ""),
                    "documents": count,
                    "megabytes": round(size / 1e6, 1),
                    "peak_megabytes": round(peak / 1e6, 1),
                    "bar_megabytes": round(200 + count * 1024 / 1e6, 1),
                    "cpu_seconds": round(used, 2),
                    "removed": count - len(_kept(Path(place))),
                }


def workers(options: argparse.Namespace) -> Iterator[dict]:
    """Wall and CPU seconds of one and of two workers, in turn; the run with the least wall time of each counts.

    On a busy machine wall times say nothing. `times_one_by_cpu` is the most that an idle one reaches: the CPU time of
    one worker over that of the command's own process and the mean of its workers.
    """
    texts, _ = _corpus(options.documents, options.data)
    texts = [
        text.replace(" ", f"{turn} ") for turn in range(options.scale) for text in texts
    ]  # no copies of those of another turn
    best: dict[int, tuple] = {}
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder) / "corpus.jsonl", texts)
        for turn in range(options.turns):
            for count in (1, 2):
                place = f"{folder}/{turn}-{count}"
                used, wall = _run(sys.executable, LINNET, [f"{folder}/corpus.jsonl", place, "no", str(count)])
                own = float(Path(f"{place}.own").read_text())
                best[count] = min(best.get(count, (1e9,)), (wall, used, own + (used - own) / count))
    for count, (wall, used, longest) in best.items():
        yield {
            "workers": count,
            "documents": len(texts),
            "megabytes": round(sum(len(text.encode()) for text in texts) / 1e6, 1),
            "wall_seconds": round(wall, 2),
            "cpu_seconds": round(used, 2),
            "times_one": round(best[1][0] / wall, 2),
            "times_one_by_cpu": round(best[1][2] / longest, 2),
            "load_average": round(os.getloadavg()[0], 1),
        }


def _corpus(documents: int, data: Path | None) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns texts, and pairs of a text and a copy of it with words replaced."""
    texts = _files(stdlib_folder(), "*.py", documents // 3)
    if data is not None and (folder := Path(data) / "wikitext-2").is_dir():
        for path in sorted(folder.glob("*.txt")):
            texts += [one for one in re.split(r"(?m)^(?= = [^=])", path.read_text()) if one.strip()]
    texts += _files(Path("/usr/share/doc"), "*", max(0, documents - len(texts)))
    rng, pairs = random.Random(0), []
    for number in range(0, len(texts), 6):
        words = texts[number].split(" ")
        share = SHARES[number // 6 % len(SHARES)]
        pairs.append((number, len(texts)))
        texts.append(" ".join(_replaced(rng, words, round(share * len(words)))))
    return texts, pairs


def _files(folder: Path, pattern: str, most: int) -> list[str]:
    found: dict[str, None] = {}
    for path in sorted(folder.rglob(pattern)):
        if len(found) == most:
            break
        if path.is_file() and not path.is_symlink() and 200 <= path.stat().st_size <= LARGEST:
            data = path.read_bytes()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                found.setdefault(text)
    return list(found)


def _replaced(rng: random.Random, words: list[str], count: int) -> list[str]:
    words = list(words)
    for place in rng.sample(range(len(words)), min(count, len(words))):
        words[place] = f"y{rng.randrange(10**6)}"
    return words


def _similarity(a: str, b: str) -> float:
    one, two = _plain(a), _plain(b)
    return len(one & two) / max(len(one | two), 1)


def _plain(text: str) -> set[tuple]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + 5]) for start in range(max(len(words) - 4, 1))}


def _closest(texts: list[str]) -> list[float]:
    """Returns for each text its highest similarity with another one."""
    sets = [minhash.shingles(text) for text in texts]
    sizes = np.array([len(one) for one in sets])
    hashes, owners = np.concatenate(sets), np.repeat(np.arange(len(sets)), sizes)
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    found = []
    for number, one in enumerate(sets):
        first, end = np.searchsorted(hashes, one), np.searchsorted(hashes, one, side="right")
        counts = end - first
        places = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        shared = np.bincount(owners[places], minlength=len(sets))
        shared[number] = 0
        found.append(float((shared / np.maximum(sizes + len(one) - shared, 1)).max()))
    return found


def _write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts)))


def _kept(out: Path) -> set[int]:
    """Returns the numbers of the documents that a program has kept."""
    import zstandard

    found = set()
    for path in [*out.glob("shard-*"), *out.glob("kept/*.jsonl"), *out.glob("kept.jsonl")]:
        with zstandard.open(path, "rt") if path.suffix == ".zst" else open(path) as file:
            rows = [json.loads(line) for line in file]
        found |= {int(row["id"] if "id" in row else row["extra"]["id"]) for row in rows}
    return found


def _run(python: str, program: str, arguments: list[str]) -> tuple[float, float]:
    """Returns CPU and wall seconds of a program and its children."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        path = {"PYTHONPATH": str(Path(__file__).parents[1])} if python == sys.executable else {}
        environment = {**os.environ, "PYTHONPATH": "", **path, "OMP_NUM_THREADS": "1"}
        command = ["/usr/bin/env", python, file.name, *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        errors = process.stderr.read()
        if process.wait():
            sys.exit(f"{python} failed:\n{errors.decode()[-3000:]}")
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, wall


def _save(what: str, rows: list[dict]) -> None:
    """Replaces the rows of an experiment in the table."""
    old = [row for row in timing.read(RESULTS) if row["experiment"] != what]
    RESULTS.unlink(missing_ok=True)
    hidden = ["PYTHON" if "/" in word else word for word in sys.argv[1:]]
    command = " ".join(["python benchmarks/corpus_dedup.py", *hidden])
    where = {"cpu": provenance.cpu_name(), "python": sys.version.split()[0], "numpy": np.__version__}
    where |= {"command": command, "commit": timing.commit()}
    rows = [*old, *({**row, **where} for row in rows)]
    ordered = [*dict.fromkeys(name for row in rows for name in row if name not in where), *where]
    rows = [{name: row.get(name, "") for name in ordered} for row in rows]
    timing.update(RESULTS, rows, ordered)


if __name__ == "__main__":
    main()
