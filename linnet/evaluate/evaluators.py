"""The kinds of evaluation: texts, needles, recall, tasks, and suites of tasks; rooms have more."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from linnet.config import Config, ConfigError, checking, count_of, not_installed
from linnet.data.records import read_documents
from linnet.data.sources import find_files, fingerprint
from linnet.deprecation import renamed
from linnet.evaluate.results import Evaluation, Item, Result, digest_of
from linnet.evaluate.retrieval import NeedleConfig, RecallConfig
from linnet.evaluate.session import Evaluator, Progress, Session, no_progress
from linnet.install import install_command

__getattr__ = partial(renamed, __name__)

WINDOW, BLOCK = 1024, 512  # tokens, where the training length is not known
Names = Annotated[tuple[str, ...], Field(strict=False)]  # a list of YAML as well


class FilesEvaluator(Config, Evaluator):
    """Scores the documents of files.

    Attributes:
        paths: files, folders or globs.
        text_key: key (JSONL) or column (Parquet) of the text. Each kind declares it itself: digests of finished
            evaluations have the keys in the order of the declarations.
    """

    divides: ClassVar[bool] = True

    paths: Names
    if TYPE_CHECKING:
        text_key: str = "text"

    def check(self) -> None:
        with checking("evaluate") as problems:
            files = find_files(list(self.paths), "text", problems, [])
            documents = sum(1 for file in files for _ in read_documents(file, self.text_key, problems))
            if not problems and not documents:
                problems.append(f"text: {', '.join(map(repr, self.paths))} holds no text; name files with some")


class TextEvaluator(FilesEvaluator):
    """Scores the documents of files (`linnet.evaluate.texts`).

    Attributes:
        paths: files, folders or globs.
        method: "carried", "windowed", or "auto": carried if the state does not grow with the context and the model has
            no learned table of positions.
        window: tokens per window; None is the training length. If it is not known, 1024, or all of a table of positions
            with fewer.
        stride: tokens between windows; None is half a window.
        text_key: key (JSONL) or column (Parquet) of the text.
    """

    kind: ClassVar[str] = "text"

    method: Literal["auto", "carried", "windowed"] = "auto"
    window: int | None = Field(None, ge=2)
    stride: int | None = Field(None, ge=1)
    text_key: str = "text"

    def check_model(self, session: Session) -> None:
        from linnet.evaluate.texts import check_lengths, read_texts, stride_problems

        window = self._window(session)
        with checking("evaluate") as problems:
            problems += stride_problems(self.stride, window)
            if session.model.config.num_positions is not None:  # only then, because the texts may be large
                documents = read_texts(list(self.paths), session.tokenizer, self.text_key)
                check_lengths(session.model.config, documents, self._method(session), window)

    def measures(self) -> set[str]:
        metrics = ("bits_per_byte", "loss", "perplexity", "byte_perplexity", "word_perplexity")
        return {f"text.{metric}" for metric in metrics}

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.evaluate.texts import read_texts, score_text

        method = self._method(session)
        documents = read_texts(list(self.paths), session.tokenizer, self.text_key)
        total = sum(max(len(document.tokens) - 1, 0) for document in documents)
        window = self._window(session)
        with progress("tokens", total) as meter:
            ways = {"method": method, "window": window, "stride": self.stride}
            score = score_text(session.model, documents, **ways, progress=meter)
        asked = {"text": list(self.paths), "text_key": self.text_key, "method": method}
        asked |= {"window": score.window, "stride": score.stride, "precision": session.precision}
        scored = digest_of(document.digest for document in documents)
        return Evaluation(self.kind, session.about, asked, score.results(), score.to_dict(), scored)

    def unused(self, session: Session) -> list[str]:
        """Returns the settings of windows that are given without effect, since this model's state is carried."""
        if self._method(session) == "windowed":
            return []
        return [key for key in ("window", "stride") if getattr(self, key) is not None]

    def _method(self, session: Session) -> str:
        from linnet.evaluate.texts import natural_method

        return natural_method(session.model.config) if self.method == "auto" else self.method

    def _window(self, session: Session) -> int:
        return self.window or max(2, _usual_length(session, WINDOW))  # one token is given to each that is scored

    def assumed(self, session: Session) -> str | None:
        return None if self.window or self._method(session) == "carried" else _assumed("window", session, WINDOW)


def _usual_length(session: Session, usual: int) -> int:
    """Returns the training length; `usual` if the folder does not hold it, or as much as a table of positions has."""
    return session.training_length or min(usual, session.model.config.num_positions or usual)


def _assumed(key: str, session: Session, usual: int) -> str | None:
    """Returns a note on a length that is not the training length, because the folder does not hold it; else None."""
    if session.training_length is not None:
        return None
    reason = f"{_usual_length(session, usual)} tokens, because {session.path} does not hold the training length"
    return f"{key}: {reason}; give {key}: N to score as another model is scored"


def text_notes(evaluators: Iterable[Evaluator], config: Mapping[str, Any]) -> list[str]:
    """Returns notes on the texts of evaluators: documents left out, line ends of Windows, files of the training data.

    Args:
        evaluators: all of a call; those without texts have no notes.
        config: content of the folder's config.yaml, which names the training data.
    """
    scored = [evaluator for evaluator in evaluators if isinstance(evaluator, FilesEvaluator)]
    data = config.get("data") if scored else None
    source = data.get("source") or [] if isinstance(data, Mapping) else []
    local = [name for name in ([source] if isinstance(source, str) else source) if not name.startswith("hf:")]
    known: dict[int, list[Path]] = {}
    for file in find_files(local, "source", [], []):
        known.setdefault(os.stat(file.path).st_size, []).append(file.path)
    notes = []
    for scorer in scored:
        files = find_files(list(scorer.paths), "text", [], [])
        ends, lacking, empty = [], [], Counter[str]()
        for file in files:
            before = empty.total()
            ends.append(any([b"\r\n" in text for text in read_documents(file, scorer.text_key, [], empty)]))
            lacking += [file.path] if empty.total() > before else []
        if lacking:
            others = f" and {len(lacking) - 1} more of {len(files)} files" if len(lacking) > 1 else ""
            kinds = " or ".join(sorted(empty))
            what = count_of(empty.total(), "document")
            notes.append(f"{what} of {lacking[0]}{others} left out, because the text is {kinds}")
        if count := sum(ends):
            what = f"{count} of {len(files)} files, {files[ends.index(True)].path} first"
            fix = "texts without it score differently; convert the files (dos2unix) unless the model was trained on it"
            notes.append(f"{what}, have lines that end in CRLF (Windows), and the CR is scored too; {fix}")
        seen = [file.path for file in files if _is_known(file.path, known)]
        if seen:
            what = f"{len(seen)} of {len(files)} files, {seen[0]} first"
            notes.append(f"{what}, are training data of this model; give texts that it was not trained on")
    return list(dict.fromkeys(notes))


def _is_known(path: Path, known: Mapping[int, list[Path]]) -> bool:
    """Whether a file is one of `known` (bytes -> paths), or has the content of one."""
    same = known.get(path.stat().st_size, [])
    return any(map(path.samefile, same)) or (bool(same) and fingerprint(path) in map(fingerprint, same))


class BlocksEvaluator(FilesEvaluator):
    """Scores texts in blocks without memory, as published WikiText-103 numbers are (`linnet.evaluate.texts`).

    Attributes:
        paths: files, folders, globs, or `wikitext-103=FOLDER:test`.
        block: tokens per block; None is the training length. If it is not known, 512, or all of a table of positions
            with fewer.
        text_key: key (JSONL) or column (Parquet) of the text.
    """

    kind: ClassVar[str] = "blocks"

    block: int | None = Field(None, ge=1)
    text_key: str = "text"

    def check_model(self, session: Session) -> None:
        from linnet.layers.positions import length_problems

        with checking("evaluate") as problems:
            problems += length_problems("block", self._block(session), session.model.config.num_positions)

    def measures(self) -> set[str]:
        metrics = ("perplexity", "word_perplexity", "bits_per_byte")
        return {f"{task}.{metric}" for task in ("blocks", "carried") for metric in metrics}

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.evaluate.texts import natural_method, read_stream, score_stream
        from linnet.parallel.mesh import divided

        with checking("evaluate") as problems:
            texts = [
                (str(file.path) if file.kind in ("text", "lines") else f"{file.path}:{number}", text.decode())
                for file in find_files(list(self.paths), "text", problems, [])
                for number, text in enumerate(read_documents(file, self.text_key, problems), 1)
            ]
        stream, block = read_stream(texts, session.tokenizer), self._block(session)
        ways = {"blocks": block}
        if natural_method(session.model.config) == "carried":
            ways["carried"] = None
        with progress("tokens", len(ways) * (len(stream.tokens) - 1)) as meter:
            stream_scores = divided(list(ways.values()), lambda size: score_stream(session.model, stream, size, meter))
            scores = dict(zip(ways, stream_scores, strict=True))
        asked = {"text": list(self.paths), "text_key": self.text_key, "block": block, "precision": session.precision}
        results = tuple(result for task, score in scores.items() for result in score.results(task))
        detail = {
            "tokens": len(stream.tokens) - 1,
            "words_and_line_ends": int(stream.words.sum()),
            "bytes": int(stream.bytes.sum()),
            "line_ends": stream.line_ends,
            "nats": {task: float(score.nats.sum()) for task, score in scores.items()},
        }
        scored = digest_of(text for _, text in texts)
        return Evaluation(self.kind, session.about, asked, results, detail, scored)

    def _block(self, session: Session) -> int:
        return self.block or _usual_length(session, BLOCK)

    def assumed(self, session: Session) -> str | None:
        return None if self.block else _assumed("block", session, BLOCK)


class NeedleEvaluator(NeedleConfig, Evaluator):
    """Looks for needles in haystacks (`linnet.evaluate.retrieval.needle`)."""

    kind: ClassVar[str] = "needle"
    divides: ClassVar[bool] = True

    @property
    def task(self) -> str:
        """Task of the results."""
        return f"needle-{self.variant if self.variant != 'single' else self.mode}"

    def check_model(self, session: Session) -> None:
        from linnet.evaluate.retrieval.needle import items

        # If the needle and the question fit the shortest prompt, they fit all prompts.
        next(items(self.model_copy(update={"lengths": self.lengths[:1], "samples": 1}), session.tokenizer))

    def measures(self) -> set[str]:
        return {f"{self.task}.{metric}" for metric in ("accuracy", "weighted", "niah_score")}

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.evaluate.needle_scores import needle_scores, sensitivity
        from linnet.evaluate.retrieval.needle import hidden_digest, run_needle

        engine = session.engine(max(self.lengths) + 128)
        with progress("prompts", len(self.lengths) * len(self.depths) * self.samples) as meter:
            grid = run_needle(engine, self, meter)
        scores = needle_scores(grid)
        cells = [
            Item(f"{length} tokens, depth {depth:g}", grid[row, column].item())
            for column, length in enumerate(self.lengths)
            for row, depth in enumerate(self.depths)
        ]
        results = (
            Result.of_items(self.task, "accuracy", cells),
            Result(self.task, "weighted", scores.weighted, n=len(cells)),
            Result(self.task, "niah_score", scores.score, n=len(cells)),
        )
        detail = {"config": self.model_dump(), "accuracy": grid.tolist(), **scores.to_dict()}
        detail |= {"sensitivity": sensitivity(grid)}
        asked = self.model_dump() | {"precision": session.precision}
        return Evaluation(self.kind, session.about, asked, results, detail, hidden_digest(self))


class RecallEvaluator(RecallConfig, Evaluator):
    """Asks MQAR and the recall tasks of MAD without training on them (`linnet.evaluate.retrieval.recall`)."""

    kind: ClassVar[str] = "recall"
    divides: ClassVar[bool] = True
    needs_text: ClassVar[bool] = False

    def check(self) -> None:
        from linnet.evaluate.retrieval.recall import cells

        list(cells(self))

    def check_model(self, session: Session) -> None:
        from linnet.evaluate.retrieval.recall import check_recall

        config = session.model.config
        check_recall(self, session.tokenizer, config.vocab_size, config.num_positions)

    def measures(self) -> set[str]:
        return {f"recall-{task}.{metric}" for task in self.tasks for metric in ("choice", "accuracy")}

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.evaluate.retrieval.recall import cells, drawn_digest, left_out, run_recall, to_results

        with progress("sequences", sum(self.samples for _ in cells(self))) as meter:
            accuracies = run_recall(session.model, session.tokenizer, self, progress=meter)
        asked = self.model_dump() | {"precision": session.precision}
        missing = left_out(self, accuracies)
        detail = {"cells": [cell.to_dict() for cell in accuracies], "not_measured": missing}
        return Evaluation(self.kind, session.about, asked, to_results(accuracies), detail, drawn_digest(self))


class ChatEvaluator(Config, Evaluator):
    """Scores the assistant's turns of conversations, as `objective: chat` trains on them (`linnet.data.chat`).

    Attributes:
        paths: JSONL files, folders or globs.
        template: file of a chat template; None is the one in the model's folder.
        per_answer: each answer follows the turns before it as a server shows them, as in `ChatConfig`.
    """

    kind: ClassVar[str] = "chat"
    divides: ClassVar[bool] = True

    paths: Names
    template: str | None = None
    per_answer: bool = False
    _chats: list[list[Any]] = PrivateAttr(default_factory=list)  # of `linnet.data.chat.Chat`, by conversation

    def check(self) -> None:
        with checking("evaluate") as problems:
            find_files(list(self.paths), "paths", problems, [])

    def check_model(self, session: Session) -> None:
        from linnet.data.chat import read_chats
        from linnet.layers.positions import length_problems

        self._chats = read_chats(list(self.paths), "paths", self._template(session), self.per_answer)
        longest = max(len(chat.tokens) for chats in self._chats for chat in chats)
        with checking("evaluate") as problems:
            problems += length_problems("paths", longest, session.model.config.num_positions, "leave long ones out")

    def measures(self) -> set[str]:
        from linnet.data.chat import TURNS

        return {"chat.loss", "chat.exact", *(f"chat.{turn}_turn" for turn in TURNS)}

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.data.chat import TURNS
        from linnet.evaluate.likelihood import log_likelihoods

        answers = [
            (number, turn, context, target)
            for number, chats in enumerate(self._chats, 1)
            for chat in chats
            for turn, context, target in chat.answers()
        ]
        with progress("answers", len(answers)) as meter:
            scores = log_likelihoods(session.model, [tuple(answer[2:]) for answer in answers], progress=meter)
        losses: dict[tuple[str, int], list[tuple[float, int]]] = {}
        exact: dict[int, list[bool]] = {}
        for (number, turn, _, target), score in zip(answers, scores, strict=True):
            for metric in ("loss", f"{TURNS[turn - 1]}_turn"):
                losses.setdefault((metric, number), []).append((-score.nats, len(target)))
            exact.setdefault(number, []).append(score.greedy)
        items: dict[str, list[Item]] = {}
        for (metric, number), parts in losses.items():
            nats, tokens = map(sum, zip(*parts, strict=True))
            items.setdefault(metric, []).append(Item(str(number), nats / tokens, tokens))
        names = [name for name in ("loss", *(f"{turn}_turn" for turn in TURNS)) if name in items]
        results = [Result.of_items("chat", name, items[name], "lower") for name in names]
        right = [Item(str(number), sum(hits) / len(hits), len(hits)) for number, hits in exact.items()]
        results.append(Result.of_items("chat", "exact", right))
        asked = {"text": list(self.paths), "per_answer": self.per_answer, "template_file": self.template}
        asked |= {"template": digest_of([self._template(session).source]), "precision": session.precision}
        detail = {"answers": len(answers), "targets": sum(len(answer[3]) for answer in answers)}
        files = find_files(list(self.paths), "paths", [], [])
        scored = digest_of(fingerprint(file.path) for file in files if file.kind == "jsonl")
        return Evaluation(self.kind, session.about, asked, tuple(results), detail, scored)

    def _template(self, session: Session) -> Any:
        from linnet.data.chat.template import FILE, load_chat_template

        file = None if self.template is None else Path(self.template)
        template = load_chat_template(session.path, session.tokenizer, file)
        if template is None:
            message = f"{session.path}: has no {FILE}; put one into the folder, or give one"
            raise ConfigError([f"template: {message}"], "evaluate")
        return template


class Questions(Config):
    """Which questions of a task are asked, and how.

    Attributes:
        include: a folder of your own tasks, which replace the harness's tasks of the same names.
        shots: examples before each question; None leaves it to the suite or task.
        limit: ask only the first `limit` questions of each task; None asks all.
        context: tokens of a question and its answer that the model may see; None means all, or the training length
            if the state grows with the context.
        too_long: what happens to longer questions: "refuse" or "cut"; None leaves it to the suite.
    """

    include: Path | None = None
    shots: int | None = Field(None, ge=0)
    limit: int | None = Field(None, ge=1)
    context: int | None = Field(None, ge=2)
    too_long: Literal["refuse", "cut"] | None = None


class TaskEvaluator(Config, Evaluator):
    """Asks tasks, or the tasks of a suite, through lm-evaluation-harness (`linnet.evaluate.tasks`).

    Attributes:
        names: names of tasks; empty for a suite.
        suite: the name of a suite (`linnet.evaluate.tasks.suites`); None for tasks.
    """

    divides: ClassVar[bool] = True

    names: Names = ()
    suite: str | None = None
    questions: Questions = Questions()
    _suite: Any = PrivateAttr(None)
    _tasks: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.suite or "tasks"

    def check(self) -> None:
        if not_installed(["lm_eval"]):
            message = f"lm_eval: not installed; tasks and suites need it; install it: {install_command('eval')}"
            raise ConfigError([message], "evaluate")
        from linnet.evaluate.tasks import find_tasks
        from linnet.evaluate.tasks.suites import find_suite, load_suite

        asked = self.questions
        if self.suite is None:
            self._tasks = find_tasks(self.names, asked.include, shots=asked.shots)
        else:
            self._suite = find_suite(self.suite)
            self._tasks = load_suite(self._suite, asked.shots, asked.include)

    def check_model(self, session: Session) -> None:
        self._context(session)

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.evaluate.harness import LinnetLM
        from linnet.evaluate.tasks import run_tasks
        from linnet.evaluate.tasks.suites import chances, counting, run_suite

        longest, too_long = self._context(session)
        asked, suite, tasks = self.questions, self._suite, self._tasks
        with progress("requests", None) as meter:
            lm = LinnetLM(session.engine(longest + 1 if longest else 4096), longest, too_long, meter.reach)
            results = run_tasks(lm, tasks, asked.limit) if suite is None else run_suite(lm, suite, tasks, asked.limit)
        shown = results
        if suite is not None:
            averages = [result for result in results if result.task == suite.name]
            shown = averages if suite.by_question else [*counting(suite, results), *averages]
        guessed = chances(tasks, results, suite, asked.limit)
        about = {
            name: {"shots": task.get_config("num_fewshot"), "version": task.VERSION, "output_type": task.OUTPUT_TYPE}
            for name, task in tasks.items()
        }
        settings = {"context": longest, "too_long": too_long, "limit": asked.limit, "shots": asked.shots}
        settings |= {"suite": self.suite} if suite is not None else {"tasks": list(self.names)}
        settings |= {"include": None if asked.include is None else str(asked.include), "precision": session.precision}
        detail = {
            "tasks": about,
            "cuts": lm.cuts,
            "merged": lm.merged,
            "shown": [[result.task, result.metric] for result in shown],
        }
        detail["chance"] = [[task, metric, value] for (task, metric), value in guessed.items()]
        return Evaluation(self.kind, session.about, settings, results, detail, digest_of(sorted(lm.scored)))

    def _context(self, session: Session) -> tuple[int | None, str]:
        """Returns how many tokens the model may see (None for all), and what happens to longer questions.

        Raises:
            ConfigError: the training length is needed, but the folder does not hold it.
        """
        from linnet.evaluate.texts import natural_method

        cut, longest = self._suite is not None and self._suite.cut, self.questions.context
        if longest is None and (cut or natural_method(session.model.config) == "windowed"):
            longest = session.training_length
            if longest is None:
                message = f"context: {session.path} does not hold the training length; give --context N"
                raise ConfigError([message], "evaluate")
        return longest, self.questions.too_long or ("cut" if cut else "refuse")
