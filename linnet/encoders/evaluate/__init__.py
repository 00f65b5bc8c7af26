"""The kinds of evaluation of bidirectional models: masked texts, sentences, GLUE, the Long Range Arena, CoLA."""

import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from linnet.config import C, Config, ConfigError, checking, gather, parse, refuse
from linnet.data.records import read_documents
from linnet.data.sources import find_files
from linnet.evaluate.evaluators import FilesEvaluator, Names
from linnet.evaluate.results import Evaluation, Item, Result, digest_of
from linnet.evaluate.session import Evaluator, Progress, Session, no_progress
from linnet.runs import RunFolder


class MaskedEvaluator(FilesEvaluator):
    """Scores the masked tokens of the documents of files (`linnet.encoders.evaluate.masked`).

    Attributes:
        paths: files, folders or globs.
        text_key: key (JSONL) or column (Parquet) of the text.
        row: tokens per row; None is the training length, or 128 if it is not known.
    """

    kind: ClassVar[str] = "masked"
    kinds: ClassVar[tuple[str, ...]] = ("masked_lm",)

    text_key: str = "text"
    row: int | None = Field(None, ge=4)

    def check_model(self, session: Session) -> None:
        from linnet.layers.positions import length_problems

        with checking("evaluate") as problems:
            problems += length_problems("row", self._row(session), session.model.config.num_positions)
            self._masking(session)

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.encoders.evaluate.masked import score_masked
        from linnet.evaluate.texts import read_texts

        documents = read_texts(list(self.paths), session.tokenizer, self.text_key)
        row, masking = self._row(session), self._masking(session)
        with progress("tokens", sum(len(document.tokens) for document in documents)) as meter:
            scores = score_masked(session.model, documents, masking, row, meter)
        settings = {"text": list(self.paths), "text_key": self.text_key, "row": row, "masking": masking.model_dump()}
        scored = digest_of(document.digest for document in documents)
        detail = {"documents": len(scores.names), "tokens": int(scores.counts.sum()), "skipped": scores.skipped}
        results = (scores.perplexity("text", "masked_perplexity"),)
        return Evaluation(
            self.kind, session.about, settings | {"precision": session.precision}, results, detail, scored
        )

    def _row(self, session: Session) -> int:
        return self.row or session.training_length or 128

    def _masking(self, session: Session) -> Any:
        from linnet.encoders.masking import MaskingConfig

        return parse(MaskingConfig, RunFolder.open(session.path).config.get("masking") or {}, "masking")


class SentencesEvaluator(Config, Evaluator):
    """Computes pseudo-log-likelihoods of sentences, one per line (`linnet.encoders.evaluate.masked`).

    Attributes:
        paths: text files, folders or globs.
        longest: sentences with more tokens are skipped.
    """

    kind: ClassVar[str] = "sentences"
    divides: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("masked_lm",)

    paths: Names
    longest: int = Field(512, ge=1)

    def check(self) -> None:
        self._sentences()

    def check_model(self, session: Session) -> None:
        from linnet.encoders.evaluate.masked import sentence_problems

        lengths = [(name, len(session.tokenizer.encode(text))) for name, text in self._sentences()]
        with checking("evaluate") as problems:
            problems += sentence_problems(lengths, session.model.config.num_positions, self.longest)

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.encoders.evaluate.masked import score_sentences

        sentences = self._sentences()
        with progress("sentences", len(sentences)) as meter:
            scores = score_sentences(session.model, session.tokenizer, sentences, self.longest, meter)
        settings = {"sentences": list(self.paths), "longest": self.longest, "precision": session.precision}
        results = (scores.likelihood("sentences"), scores.perplexity("sentences", "pseudo_perplexity"))
        detail = {"sentences": len(scores.names), "tokens": int(scores.counts.sum()), "skipped": scores.skipped}
        scored = digest_of(text for _, text in sentences)
        return Evaluation(self.kind, session.about, settings, results, detail, scored)

    def _sentences(self) -> list[tuple[str, str]]:
        with checking("evaluate") as problems:
            sentences = [
                (f"{file.path}:{number}", line.strip())
                for file in find_files(list(self.paths), "sentences", problems, [])
                for text in read_documents(file, "text", problems)
                for number, line in enumerate(text.decode().split("\n"), 1)
                if line.strip()
            ]
            if not problems and not sentences:
                paths = ", ".join(map(repr, self.paths))
                problems.append(f"sentences: {paths} holds no line of text; name other files")
        return sentences


class TrainedTaskEvaluator(Config, Evaluator):
    """Scores a model on the task of its training, whose labels it has learned.

    Attributes:
        source: folder of the task; None is that of the training.
    """

    divides: ClassVar[bool] = True
    OBJECTIVE: ClassVar[str]
    FOLDERS: ClassVar[str] = "the folder of the task"

    source: str | None = None
    _task: Any = PrivateAttr(None)

    def check(self) -> None:
        if self.source is not None and not Path(self.source).expanduser().is_dir():
            raise ConfigError([f"data: {self.source!r} is not a folder; name {self.FOLDERS}"], "evaluate")

    def trained_on(self, folder: RunFolder, config: type[C]) -> C:
        """Returns the data of a training, from `source` if it is given. Raises ConfigError if the folder has none."""
        data = folder.config.get("data")
        if not isinstance(data, dict):
            fix = f"name a run of objective: {self.OBJECTIVE}"
            raise ConfigError([f"{folder.path}: does not say which task it was trained on; {fix}"], "evaluate")
        return parse(config, data | ({} if self.source is None else {"source": self.source}), "data")


def _accuracy(task: str, right: Any) -> Result:
    """Returns the accuracy in per cent, with its items; `right` bool [n]."""
    return Result.of_items(
        task, "accuracy", (Item(str(number), 100.0 * float(hit)) for number, hit in enumerate(right))
    )


class GlueEvaluator(TrainedTaskEvaluator):
    """Scores a model of sentences on the dev sentences of its task of GLUE, by the task's metric in per cent.

    Attributes:
        source: folder of the task's files, or of GLUE; None is that of the training.
    """

    kind: ClassVar[str] = "glue"
    kinds: ClassVar[tuple[str, ...]] = ("sentence",)
    OBJECTIVE: ClassVar[str] = "sentences"
    FOLDERS: ClassVar[str] = "the folder of GLUE or of the task"

    def check(self) -> None:
        from linnet.encoders.glue import check_installed

        with checking("evaluate") as problems:
            with gather(problems):
                super().check()
            check_installed()

    def check_config(self, folder: RunFolder, model: Any) -> None:
        from linnet.encoders.glue import TASKS, GlueConfig, read_dev

        config = self.trained_on(folder, GlueConfig)
        task = TASKS[config.task]
        self._task = (task, config, read_dev(config.source, task, config.skip_damaged))

    def measures(self) -> set[str]:
        from linnet.encoders.glue import TASKS

        return {f"{name}.{task.metric}" for task in TASKS.values() for name in task.scores}

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.encoders.glue import Sentences, sentence_outputs, task_score

        task, config, dev = self._task
        results, parts = [], []
        with progress("sentences", sum(map(len, dev.values()))) as meter:
            for name, examples in dev.items():
                sentences = Sentences(examples, session.tokenizer, config.max_length)
                outputs = sentence_outputs(session.model, sentences, progress=meter)
                value, labels = task_score(task.metric, outputs, sentences.labels), sentences.labels
                if task.metric == "accuracy":
                    results.append(_accuracy(name, outputs.argmax(1) == labels))
                else:
                    results.append(Result(name, task.metric, value, n=len(labels)))
                parts += [text for texts in examples.texts for text in texts]
        settings = {"task": task.name, "data": config.source, "max_length": config.max_length}
        settings |= {"precision": session.precision}
        detail = {"scores": {result.task: result.value for result in results}}
        return Evaluation(self.kind, session.about, settings, tuple(results), detail, digest_of(parts))


class LraEvaluator(TrainedTaskEvaluator):
    """Scores a classifier of sequences on the test split of its task of the Long Range Arena, in per cent.

    The record also has what the training noted of its best epoch.

    Attributes:
        source: folder of the task; None is that of the training.
        cache: folder of prepared tasks.
    """

    kind: ClassVar[str] = "lra"
    kinds: ClassVar[tuple[str, ...]] = ("sequence",)
    needs_text: ClassVar[bool] = False
    OBJECTIVE: ClassVar[str] = "sequences"

    cache: str | Path = "runs/cache"

    def check_config(self, folder: RunFolder, model: Any) -> None:
        from linnet.encoders.lra import LraDataConfig, prepare_lra

        self._task = prepare_lra(self.trained_on(folder, LraDataConfig), self.cache)

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.encoders.evaluate.lra import predict

        corpus, folder = self._task, RunFolder.open(session.path)
        with progress("sequences", len(corpus.test)) as meter:
            classes = predict(session.model, corpus.test, meter)
        last = _accuracy(corpus.task.name, classes == corpus.test.labels)
        noted = folder.result() if folder.done else {}
        best = {key: noted.get(key) for key in ("best_step", "best_accuracy", "best_test_accuracy")}
        data = self.source or corpus.metadata["settings_digest"]
        settings = {"task": corpus.task.name, "split": "test", "data": data, "precision": session.precision}
        detail = {"sequences": len(classes), "accuracy": last.value / 100.0, **best}
        return Evaluation(self.kind, session.about, settings, (last,), detail, corpus.digest)


class ColaEvaluator(Config, Evaluator):
    """Scores a masked language model on CoLA: how well pseudo-log-likelihoods tell acceptable sentences from others.

    Attributes:
        source: folder of CoLA's files, or of GLUE.
        longest: sentences with more tokens are skipped.
    """

    kind: ClassVar[str] = "cola"
    divides: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("masked_lm",)

    source: str
    longest: int = Field(512, ge=1)
    _dev: Any = PrivateAttr(None)

    def check(self) -> None:
        from linnet.encoders.glue import TASKS, check_installed, read_dev

        problems: list[str] = []
        with gather(problems):
            check_installed()
        try:
            self._dev = read_dev(self.source, TASKS["cola"])["cola"]
        except ConfigError as error:  # the problems of `source` are those of --cola here
            problems += [re.sub("^(source|skip_damaged):", "cola:", line) for line in error.problems]
            problems = [line.replace(", or set skip_damaged: true to leave them out", "") for line in problems]
        if not problems and len(set(self._dev.labels.tolist())) < 2:
            problems.append(f"cola: all sentences of {self.source!r} have one label; give CoLA's dev.tsv")
        refuse(problems, "evaluate")

    def check_model(self, session: Session) -> None:
        from linnet.encoders.evaluate.masked import sentence_problems
        from linnet.encoders.glue import TASKS, find_folder

        dev, task = self._dev, TASKS["cola"]
        path = find_folder(self.source, task) / task.dev[0][1]
        lengths = [len(session.tokenizer.encode(texts[0])) for texts in dev.texts]
        places = [f"{path}:{line}" for line in dev.lines]
        named = list(zip(places, lengths, strict=True))
        problems = sentence_problems(named, session.model.config.num_positions, self.longest)
        scored = {label for label, length in zip(dev.labels.tolist(), lengths, strict=True) if length <= self.longest}
        if not problems and len(scored) < 2:
            problems = [f"longest: {self.longest} leaves sentences of one label; raise it to compare both"]
        refuse(problems, "evaluate")

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        import numpy as np

        from linnet.encoders.evaluate.masked import area_under_curve, score_sentences

        examples = self._dev
        sentences = [(str(number), texts[0]) for number, texts in enumerate(examples.texts)]
        with progress("sentences", len(sentences)) as meter:
            scores = score_sentences(session.model, session.tokenizer, sentences, self.longest, meter)
        labels = examples.labels[np.array([int(name) for name in scores.names])]
        count = len(labels)
        results = (
            Result("cola", "auc", area_under_curve(labels, scores.sums), n=count),
            Result("cola", "auc_per_token", area_under_curve(labels, scores.sums / scores.counts), n=count),
            scores.likelihood("cola"),
        )
        settings = {"cola": self.source, "longest": self.longest, "precision": session.precision}
        detail = {"sentences": count, "acceptable": int(labels.sum()), "skipped": scores.skipped}
        return Evaluation(self.kind, session.about, settings, results, detail, digest_of(text for _, text in sentences))
