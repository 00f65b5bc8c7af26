"""Measures self-cleaning on text into which garbage is mixed: what the scores find, and what cleaning is worth.

    python benchmarks/corpus_loop.py --folder corpus-loop --documents wiki/valid.txt wiki/test.txt --csv

1. Takes documents from the standard library of Python and from the given texts, holds some files out, and replaces a
   tenth of the others by five kinds of garbage: shuffled words, base64, mojibake, repeated boilerplate, and another
   language.
2. Runs two rounds of `linnet corpus loop` with two scorers each, and prints the area under the ROC curve of the scores
   for each kind against the clean documents of the same source.
3. Trains models on the mixed text and on what the loop kept, with equal tokens and the same seeds, and scores the clean
   held-out documents. The gain is the loss on mixed text minus that on cleaned text, in nats per byte; its 95 %
   interval resamples documents and seeds.

All models have about 1M parameters and read rows of 128 tokens. The same command continues after a stop. Prints the
CPU time of all processes; with `--workers 2` two models train at the same time.
"""

import argparse
import base64
import csv
import json
import random
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import timing
import torch

from linnet.config import parse
from linnet.corpus.documents import find_parts, read_part
from linnet.corpus.scoring import LoopConfig, run_loop
from linnet.corpus.scoring.sample import write_review
from linnet.corpus.scoring.score import NATS, Scorer, letters
from linnet.data import train_bpe
from linnet.data.sources import find_files
from linnet.runs import RunFolder
from linnet.runs.files import write_atomic
from linnet.study.executors import ExecutorConfig, Job, make_executor
from linnet.study.runner import train_run
from linnet.train import TrainConfig, run_folder

RESULTS = Path(__file__).parent / "results" / "corpus_loop.csv"
SHARE = 0.1  # of the documents that become garbage
PIECE = 2500  # characters from which a file is cut into documents, at the end of a line
PIECES = 8  # most documents of a file
TRAIN, HELD = 1_300_000, 200_000  # characters per source
VOCABULARY = 1024
RESAMPLES = 2000

LINES = (
    "Accept all cookies to continue to the site.",
    "Click here to subscribe to our newsletter.",
    "Share this page with your friends.",
    "Copyright. All rights reserved. Terms of use apply.",
    "Sign in or create an account to read more.",
    "You may also like these related articles.",
)
VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"


def shuffled_words(text: str, rng: random.Random) -> str:
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


def base64_text(text: str, rng: random.Random) -> str:
    return base64.b64encode(rng.randbytes(len(text.encode()) * 3 // 4)).decode()


def mojibake(text: str, rng: random.Random) -> str:
    """Text in EBCDIC read as Latin-1, or in UTF-8 read as UTF-16."""
    if rng.random() < 0.5:
        return text.encode("cp037", "ignore").decode("latin-1").replace("\0", "")
    data = text.encode()
    return data[: len(data) // 2 * 2].decode("utf-16-le", "ignore").replace("\0", "")


def boilerplate(text: str, rng: random.Random) -> str:
    lines: list[str] = []
    while sum(map(len, lines)) < len(text):
        lines += rng.sample(LINES, 3)
    return "\n".join(lines)


def other_language(text: str, rng: random.Random) -> str:
    """The same text with other vowels and consonants: words of another language, with the statistics of the first."""
    given = VOWELS + CONSONANTS + (VOWELS + CONSONANTS).upper()
    taken = "".join(letters[2:] + letters[:2] for letters in (VOWELS, CONSONANTS))
    return text.translate(str.maketrans(given, taken + taken.upper()))


GARBAGE: dict[str, Callable[[str, random.Random], str]] = {
    function.__name__: function for function in (shuffled_words, base64_text, mojibake, boilerplate, other_language)
}
FORMS = ("mojibake, UTF-8 read as UTF-16", "mojibake, EBCDIC read as Latin-1")
ASKED = ("shuffled_words", "base64_text", "mojibake")  # kinds with an area of at least 0.95


def write_corpus(folder: Path, texts: dict[str, list[str]], seed: int, scale: float) -> None:
    """Writes `mixed/SOURCE.jsonl`, whose rows have a text and its kind, and `held/SOURCE.jsonl`, which is clean.

    A file is cut into documents, all of which are on the same side.
    """
    rng = random.Random(seed)
    for name, files in texts.items():
        rng.shuffle(files)
        held, mixed, size = [], [], 0
        for text in files:
            pieces = list(cut(text))[:PIECES]
            if size < HELD * scale:
                held += pieces
            elif size < (HELD + TRAIN) * scale:
                mixed += pieces
            size += sum(map(len, pieces))
        rows = []
        for text in mixed:
            kind = rng.choice(list(GARBAGE)) if rng.random() < SHARE else "clean"
            rows.append({"text": GARBAGE[kind](text, rng) if kind != "clean" else text, "kind": kind})
        for split, found in (("mixed", rows), ("held", [{"text": text} for text in held])):
            (folder / split).mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in found)
            write_atomic(folder / split / f"{name}.jsonl", lines)


def cut(text: str) -> Iterator[str]:
    held = ""
    for line in text.splitlines(keepends=True):
        held += line
        if len(held) >= PIECE:
            yield held
            held = ""
    if len(held) > 200:
        yield held


def read_texts(paths: list[Path]) -> dict[str, list[str]]:
    """Returns the files of the standard library, and the given texts; one of WikiText is cut into its articles."""
    library = [file.path.read_text("utf-8", "ignore") for file in find_files("stdlib", "source", [], [])]
    documents = [part for path in paths for part in re.split(r"\n (?== [^=\n]+ = \n)", path.read_text("utf-8"))]
    return {"stdlib": library, "documents": documents}


def settings(arguments: argparse.Namespace, tokenizer: Path) -> dict:
    return {
        "data": {"tokenizer": {"kind": "file", "path": str(tokenizer)}},
        "model": {"recipe": "hgrn2-10m", "d_model": 128, "layout": "hgrn2+swiglu x4"},
        "seq_len": 128,
        "batch_size": 8,
        "steps": arguments.steps,
        "optimizer": {"name": "muon", "learning_rate": 1e-2},
        "schedule": {"name": "cosine", "warmup": 0.1, "final": 0.1},
        "evaluate_tokens": 4096,
        "run": {"device": "cpu", "checkpoint_every": 50, "log_every": 50},
    }


def areas(scored: Path, per: str) -> list[dict]:
    """Returns the area under the ROC curve of each kind for scores per byte or per letter.

    It is the mean over the sources, weighted by their garbage. The two forms of mojibake also have rows of their own.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for part in find_parts([str(scored)], "scored", [], []):
        for document in read_part(part, Counter()):
            kind, score = document.extra["kind"], document.extra.get(NATS)
            if score is None:
                continue
            if per == "letter":
                score *= len(document.text.encode()) / letters(document.text)
            found.setdefault((document.source, kind), []).append(score)
            if kind == "mojibake":
                form = FORMS[0] if max(document.text) > "\xff" else FORMS[1]
                found.setdefault((document.source, form), []).append(score)
    rows = []
    for kind in (*GARBAGE, *FORMS):
        values, weights = [], []
        for (source, name), scores in found.items():
            if name == kind:
                clean = np.asarray(found[source, "clean"])
                above = np.asarray(scores)[:, None]
                values.append(float((above > clean).mean() + 0.5 * (above == clean).mean()))
                weights.append(len(scores))
        if values:
            rows.append({"name": kind, "value": float(np.average(values, weights=weights)), "items": sum(weights)})
    return rows


def train_arms(folder: Path, arms: dict[str, list[Path]], arguments: argparse.Namespace, tokenizer: Path) -> dict:
    """Trains a model per arm and seed. Returns the nats of held-out documents, [seeds, documents], and their sizes."""
    runs: dict[str, list[RunFolder]] = {}
    jobs = []
    for seed in range(arguments.seeds):  # both arms of a seed one after the other
        for arm, paths in arms.items():
            values = settings(arguments, tokenizer) | {"seed": seed, "name": arm}
            values["data"] |= {"source": [str(path) for path in paths], "validation": [str(folder / "held")]}
            training = parse(TrainConfig, values, arm)
            run = run_folder(training, folder / "arms", folder / "cache")
            runs.setdefault(arm, []).append(run)
            payload = {"root": str(folder / "arms"), "cache": str(folder / "cache"), "trusted": []}
            if not run.done:
                jobs.append(Job(run.path.name, payload | {"config": training.model_dump(mode="json")}, f"{arm} {seed}"))
    executor = make_executor(parse(ExecutorConfig, executor_of(arguments), "executor"))
    for outcome in executor.run(jobs, train_run):
        if outcome is not None:
            print(f"{outcome.job.label}: {outcome.status} {outcome.error}", flush=True)
    texts = [json.loads(line)["text"] for path in sorted((folder / "held").iterdir()) for line in path.open()]
    sizes = np.array([len(text.encode()) for text in texts])
    nats = {arm: np.array([held_out(folder, run, texts) for run in found]) * sizes for arm, found in runs.items()}
    return {"nats": nats, "sizes": sizes}


def held_out(folder: Path, run: RunFolder, texts: list[str]) -> list[float]:
    """Returns nats per byte of the held-out documents, which are kept beside the runs."""
    kept = folder / "nats" / f"{run.path.name}.json"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        write_atomic(kept, json.dumps(Scorer(str(run.path), "cpu", "float32", False).nats_per_byte(texts)))
    return json.loads(kept.read_text())


def gain(raw: np.ndarray, cleaned: np.ndarray, sizes: np.ndarray) -> tuple[float, float, float]:
    """Returns the loss on the mixed text minus that on the cleaned one, nats per byte, and its 95 % interval.

    Args:
        raw, cleaned: nats of each document, [seeds, documents].
    """
    difference, rng = raw - cleaned, np.random.default_rng(0)
    seeds = rng.integers(len(raw), size=(RESAMPLES, len(raw)))
    documents = rng.integers(len(sizes), size=(RESAMPLES, len(sizes)))
    drawn = [difference[i][:, j].mean(0).sum() / sizes[j].sum() for i, j in zip(seeds, documents, strict=True)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(difference.mean(0).sum() / sizes.sum()), float(low), float(high)


def executor_of(arguments: argparse.Namespace) -> dict:
    return {"kind": "inline"} if arguments.workers == 1 else {"workers": arguments.workers, "threads": 1}


def cpu_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where everything is kept; the same one continues")
    parser.add_argument("--documents", type=Path, nargs="+", required=True, help="text files beside the library")
    parser.add_argument("--steps", type=int, default=400, help="of each training, 1,024 tokens per step")
    parser.add_argument("--seeds", type=int, default=3, help="trainings per arm")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the corpus; 1 is 2.6 million characters")
    parser.add_argument("--workers", type=int, default=1, help="models that train at the same time")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    folder, spent = arguments.folder, arguments.folder / "cpu.json"
    torch.set_num_threads(1)
    before = json.loads(spent.read_text()) if spent.exists() else 0.0
    if not (folder / "tokenizer.json").exists():
        write_corpus(folder, read_texts(arguments.documents), 0, arguments.scale)
        rows = (json.loads(line) for path in sorted((folder / "mixed").iterdir()) for line in path.open())
        train_bpe((row["text"] for row in rows), VOCABULARY).save(folder / "tokenizer.json")
    tokenizer, mixed = folder / "tokenizer.json", sorted((folder / "mixed").iterdir())
    values = {
        "source": [str(path) for path in mixed],
        "train": settings(arguments, tokenizer),
        "rounds": arguments.rounds,
        "agree": 1.0,
        "executor": executor_of(arguments),
    }
    result = run_loop(
        parse(LoopConfig, values, "loop"),
        folder / "loop",
        review=write_review,
        say=lambda line: print(f"{line}  [{cpu_seconds() + before:.0f} CPU s]", flush=True),
    )
    rows = []
    for number in range(1, len(result.rounds) + 1):
        scored = folder / "loop" / f"round-{number}" / "scored"
        for per, row in [(unit, row) for unit in ("byte", "letter") for row in areas(scored, unit)]:
            asked = {"asked": 0.95} if row["name"] in ASKED else {}
            rows.append({"measure": f"area under the curve, round {number}, per {per}", **row, **asked})
            print(
                f"round {number}, per {per}: {row['name']:<33} area {row['value']:.4f} ({row['items']} documents)",
                flush=True,
            )
    write_atomic(spent, json.dumps(before + cpu_seconds()))
    begun = cpu_seconds()
    found = train_arms(folder, {"mixed": mixed, "cleaned": [result.kept]}, arguments, tokenizer)
    raw, cleaned, sizes = found["nats"]["mixed"], found["nats"]["cleaned"], found["sizes"]
    for seed in range(arguments.seeds):
        for arm in ("mixed", "cleaned"):
            loss = float(found["nats"][arm][seed].sum() / sizes.sum())
            rows.append({"measure": "held-out nats per byte", "name": f"{arm}, seed {seed}", "value": loss})
            print(f"{arm}, seed {seed}: {loss:.4f} nats per byte")
    middle, low, high = gain(raw, cleaned, sizes)
    print(f"gain {middle:.4f} nats per byte, 95 % from {low:.4f} to {high:.4f}")
    rows.append({"measure": "gain in nats per byte", "name": "cleaned", "value": middle, "low": low, "high": high})
    rows[-1] |= {"items": len(sizes), "asked": "low above 0"}
    total = json.loads(spent.read_text()) + cpu_seconds() - begun
    write_atomic(spent, json.dumps(total))
    print(f"{total:.0f} CPU seconds")
    rows.append(
        {"measure": "CPU seconds", "name": "everything", "value": round(total), "asked": "3600 (2 cores, 30 min)"}
    )
    if arguments.csv:
        command = {"command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *flags(arguments)])}
        extra = {**command, "torch": torch.__version__, "commit": timing.commit()}
        columns = ["measure", "name", "value", "low", "high", "items", "asked", *extra]
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()} | extra
                )


def flags(arguments: argparse.Namespace) -> list[str]:
    """Returns the options that change the results."""
    return [f"--{name} {getattr(arguments, name):g}" for name in ("steps", "seeds", "rounds", "scale")]


if __name__ == "__main__":
    main()
