"""Configurations of the verbs that have no file of their own. `study` and `train` steps hold those of their verbs.

Importing this module does not import torch.
"""

from typing import Any, Literal

from pydantic import Field

from linnet.config import Config
from linnet.encoders.evaluate import GlueEvaluator
from linnet.evaluate.evaluators import (
    BlocksEvaluator,
    NeedleEvaluator,
    RecallEvaluator,
    TextEvaluator,
)
from linnet.vision.evaluate import ImageEvaluator


class ModelsSettings(Config):
    """Counts of models; nothing is trained. Labels: the recipe, the name under `configs`, or `label` of a study.

    Columns: params_total, params_non_embedding, num_layers, d_model, glu_width, state_bytes, pflops_per_step and
    pflops_per_step_exact of recipes of text; params_total, flops_forward and others of recipes of images;
    params_total, params_non_embedding and flops of a study's runs.

    Attributes:
        recipes: names or beginnings of names of recipes, as in `linnet models`.
        configs: label -> a model of text: a recipe, or the keys of `model:` of a training.
        study: a study (or a file of one) whose planned models are counted; labels as `label` of the step says.
        context: tokens, for the bytes of state.
    """

    recipes: list[str] = Field(default_factory=list)
    configs: dict[str, Any] = Field(default_factory=dict)
    study: dict[str, Any] | str | None = None
    context: int = Field(8192, ge=1)


class MadSettings(Config):
    """Skill scores (`linnet mad run`). Labels: the architecture. Columns: the tasks, `score`, params_total, state_size;
    with settings, each setting by its name; `score_macro_batch` and `score_macro_batch_test`, the score by the other
    number, and by it with runs selected on the test split, as published.

    Attributes:
        architectures: recipes or layouts.
        budget, tasks, settings, spec, layers, training, state: as in `linnet mad run`.
        set: changes of every model.
        metric: accuracy, or another one that runs record; null is that of the budget.
        legacy: choose on the test split, as the published scores do; null is that of the budget.
        bundle: most runs trained together.
    """

    architectures: list[str] = Field(min_length=1)
    budget: str = "smoke"
    tasks: list[str] = Field(default_factory=list)
    settings: list[str] = Field(default_factory=list)
    spec: str | None = None
    layers: str | None = None
    training: str | None = None
    state: int | None = Field(None, ge=0)
    set: dict[str, Any] = Field(default_factory=dict)
    metric: str | None = None
    legacy: bool | None = None
    bundle: int | None = Field(None, ge=1)


class EvaluateSettings(Config):
    """Scores of the runs of an earlier step. Labels: those of that step.

    Columns: `TASK.METRIC` of every result of a record, such as `text.perplexity` or `needle-easy.niah_score`; of
    needles also the accuracy at each length (`needle-easy.at_4096`) and up to it (`needle-easy.to_4096`).

    Attributes:
        text: `paths` and, if wanted, method, window, stride and text_key of `linnet evaluate text`.
        blocks: `paths` and, if wanted, block and text_key of `linnet evaluate blocks`.
        needle: values of NeedleConfig, as in `evaluations` of a training.
        recall: values of RecallConfig.
        suites: names of suites: csr, perplexity, scrolls, mmlu, ceval.
        tasks: names of tasks, also of `include`.
        include: a folder of tasks of one's own, beside the item, in the package or anywhere.
        shots, limit, context: as in `linnet evaluate suite` and `task`.
        images: `data`, `split` and `batch` of `linnet evaluate images`; {} takes the held-out images of the run.
        samples: of denoisers: extractor, count, settings, classifier, batch and autoencoder of SampleEvaluator.
        glue: `source` of `linnet evaluate glue`; {} takes the sentences of the run.
        checkpoint: `best` scores the checkpoint of the lowest validation loss; the training needs `run.keep_best`.
    """

    text: TextEvaluator | None = None
    blocks: BlocksEvaluator | None = None
    needle: NeedleEvaluator | None = None
    recall: RecallEvaluator | None = None
    suites: list[str] = Field(default_factory=list)
    tasks: list[str] = Field(default_factory=list)
    include: str | None = None
    shots: int | None = Field(None, ge=0)
    limit: int | None = Field(None, ge=1)
    context: int | None = Field(None, ge=2)
    images: ImageEvaluator | None = None
    samples: dict[str, Any] | None = None
    glue: GlueEvaluator | None = None
    checkpoint: Literal["last", "best"] = "last"


class FitSettings(Config):
    """Laws of a study of an earlier step, or of a table. Labels: the architecture (laws: what the estimate is of).

    Columns, each with its 95 % interval: a law's parameters by the names that `linnet fit --json` prints, and the
    coefficients for compute in PF-days: beta_pf_days, k_N_pf_days, k_D_pf_days.

    Attributes:
        table: a CSV in the package or `${NAME}/...`; without it, `of` names a study step.
        columns: as `--columns` of `linnet fit`.
        method: as `--method`.
        laws: further laws (`--law`); `method` is not used then.
        of_loss: what laws fit: loss or perplexity (`--of`).
        bootstrap: resamples for intervals.
    """

    table: str | None = None
    columns: list[str] = Field(default_factory=list)
    method: str = "parametric"
    laws: list[str] = Field(default_factory=list)
    of_loss: Literal["loss", "perplexity"] = "loss"
    bootstrap: int = Field(200, ge=0)


class BenchSettings(Config):
    """Times on this machine. Labels: the model, or the text that `label` says ("{model} {batch}"). Each seed is one
    measurement.

    Columns: those of `linnet bench generate`: first_token_s, token_ms, tokens_per_second, carried_bytes, ...

    Attributes:
        models: recipes.
        batch: sequences at once; `max` as many as fit.
        prompt, new, repeats: as in `linnet bench generate`.
        context: also time after prompts of these lengths.
        context_new: tokens to generate after each.
        dtype: float32 or bfloat16; None is bfloat16 on a GPU.
    """

    models: list[str] = Field(min_length=1)
    batch: list[int | Literal["max"]] = [1]
    prompt: int = Field(512, ge=1)
    new: int = Field(1024, ge=2)
    repeats: int = Field(3, ge=1)
    context: list[int] = Field(default_factory=list)
    context_new: int = Field(64, ge=2)
    dtype: Literal["float32", "bfloat16"] | None = None


class MeanSettings(Config):
    """The mean of a number over earlier trainings. Labels: the rows of these steps. Column: the number.

    A row and seed has a mean once each of the steps has measured it.

    Attributes:
        steps: names of earlier train steps.
        column: what they measure, such as test_accuracy.
    """

    steps: list[str] = Field(min_length=1)
    column: str
