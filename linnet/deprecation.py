"""What moved, under the names of before. They warn, and go in the version that the tables name."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MOVED = {  # old name -> where its names are now, since, until
    "linnet.study.fit": (("linnet.laws.fit", "linnet.study.collect"), "0.3.0", "0.4.0"),
    "linnet.orders": (("linnet.laws.orders",), "0.3.0", "0.4.0"),
    "linnet.study.laws": (("linnet.laws.further",), "0.3.0", "0.4.0"),
    "linnet.study.mad": (("linnet.mad",), "0.3.0", "0.4.0"),
    "linnet.report.mad": (("linnet.mad.page",), "0.3.0", "0.4.0"),
    "linnet.study.reproduce": (("linnet.papers",), "0.3.0", "0.4.0"),
    "linnet.data.clean": (("linnet.corpus",), "0.3.0", "0.4.0"),
    "linnet.study.cleaning": (("linnet.corpus.scoring",), "0.3.0", "0.4.0"),
    "linnet.report.corpus": (("linnet.corpus.page",), "0.3.0", "0.4.0"),
    "linnet.cli.options": (("linnet.options",), "0.3.0", "0.4.0"),
    "linnet.data.images.augment": (("linnet.vision.data.augment",), "0.3.0", "0.4.0"),
    "linnet.data.images.batches": (("linnet.vision.data.batches",), "0.3.0", "0.4.0"),
    "linnet.data.images.corpus": (("linnet.vision.data.corpus",), "0.3.0", "0.4.0"),
    "linnet.data.images.deit": (("linnet.vision.data.batches",), "0.3.0", "0.4.0"),
    "linnet.models.vision": (("linnet.vision.models",), "0.3.0", "0.4.0"),
    "linnet.models.vision.patches": (("linnet.models.patches",), "0.3.0", "0.4.0"),
    "linnet.models.recipes.vit": (("linnet.vision.models.recipes",), "0.3.0", "0.4.0"),
    "linnet.models.recipes.dit": (("linnet.vision.models.recipes",), "0.3.0", "0.4.0"),
    "linnet.inference.sampler": (("linnet.vision.sampler",), "0.3.0", "0.4.0"),
    "linnet.evaluate.vision": (("linnet.vision.evaluate",), "0.3.0", "0.4.0"),
    "linnet.evaluate.vision.classification": (("linnet.evaluate.classification",), "0.3.0", "0.4.0"),
    "linnet.train.objectives.images": (("linnet.vision.train",), "0.3.0", "0.4.0"),
    "linnet.train.objectives.diffusion": (("linnet.vision.train",), "0.3.0", "0.4.0"),
    "linnet.train.suites.images": (("linnet.vision.train",), "0.3.0", "0.4.0"),
    "linnet.train.suites.samples": (("linnet.vision.train",), "0.3.0", "0.4.0"),
    "linnet.train.costs.throughput": (("linnet.vision.throughput",), "0.3.0", "0.4.0"),
    "linnet.report.vision": (("linnet.vision.report",), "0.3.0", "0.4.0"),
    "linnet.hf.layouts.vit": (("linnet.vision.hf",), "0.3.0", "0.4.0"),
    "linnet.cli.sample": (("linnet.vision.cli.sample",), "0.3.0", "0.4.0"),
    "linnet.cli.bench.vision": (("linnet.vision.cli.bench",), "0.3.0", "0.4.0"),
    "linnet.cli.demo.vision": (("linnet.vision.cli.demo",), "0.3.0", "0.4.0"),
    "linnet.data.lra": (("linnet.encoders.lra",), "0.3.0", "0.4.0"),
    "linnet.data.glue": (("linnet.encoders.glue",), "0.3.0", "0.4.0"),
    "linnet.data.masking": (("linnet.encoders.masking",), "0.3.0", "0.4.0"),
    "linnet.models.bidirectional": (("linnet.encoders.models",), "0.3.0", "0.4.0"),
    "linnet.models.recipes.bert": (("linnet.encoders.models",), "0.3.0", "0.4.0"),
    "linnet.evaluate.bidirectional": (("linnet.encoders.evaluate",), "0.3.0", "0.4.0"),
    "linnet.evaluate.lra": (("linnet.encoders.evaluate.lra",), "0.3.0", "0.4.0"),
    "linnet.train.objectives.masked": (("linnet.encoders.train",), "0.3.0", "0.4.0"),
    "linnet.train.objectives.sentences": (("linnet.encoders.train",), "0.3.0", "0.4.0"),
    "linnet.train.objectives.sequences": (("linnet.encoders.train",), "0.3.0", "0.4.0"),
    "linnet.cli.data.lra": (("linnet.encoders.cli.verbs",), "0.3.0", "0.4.0"),
}
_MERGED = {  # below linnet: small modules -> those of their subject
    "ops.axes": "ops.rotation", "ops.gated.gate": "ops.gated.reference",
    "ops.attention.blocks": "ops.attention", "ops.attention.spans": "ops.attention",
    "ops.lightning.non_causal": "ops.lightning", "ops.ring": "layers.ring", "ops.vmap_rules": "ops.registration",
    "ops.waves": "ops.documents",
    "ops.shortconv.packed": "ops.shortconv.chunked", "hf.layouts.linnet": "hf.layouts",
    "corpus.page.review": "corpus.scoring.sample",
 "corpus.rules.switch": "corpus.rules.filters",
    "inference.checks": "inference.engine", "inference.decoding.lengths": "inference.decoding",
    "inference.decoding.pending": "inference.decoding", "inference.benchmark.peers": "inference.benchmark",
    "inference.benchmark.throughput": "inference.benchmark", "serve.body": "serve.requests",
    "serve.config": "serve.service", "serve.endpoints": "serve.app", "serve.schemas": "serve.formats",
    "serve.server": "serve", "serve.tools": "serve.formats", "hf.cache": "hf.model", "hf.config": "hf.model",
    "hf.tokenizer": "hf.model", "hf.card": "hf.export", "hf.layouts.rope": "hf.layouts.base",
    "layers.positions.absolute": "layers.positions", "layers.positions.angles": "layers.positions",
    "models.widths": "models.parametrisation", "models.synthetic.autoencoder": "models.synthetic",
    "parallel.shard": "parallel.build", "train.monitor.guards": "train.monitor",
    "train.monitor.loggers": "train.monitor", "train.monitor.stop": "train.monitor",
    "train.optimizer.average": "train.optimizer", "train.optimizer.optim": "train.optimizer",
    "train.optimizer.schedule": "train.optimizer", "train.suites.base": "train.suites",
    "train.suites.text": "train.suites",
    "data.split": "data.corpus", "data.synthetic.text": "data.synthetic.base", "laws.fit.heldout": "laws.fit.law",
    "inference.decoding.precision": "inference.engine", "papers.job": "papers.verbs.base",
    "report.downstream.page": "report.downstream", "serve.gate": "serve.app", "serve.metrics": "serve.service",
    "serve.render": "data.chat.render", "serve.template": "data.chat.template",
    "data.render": "data.chat.render", "data.template": "data.chat.template",
    "serve.tokens": "serve.scoring", "study.describe": "study.collect", "train.monitor.clock": "train.loop",
    "evaluate.mode": "evaluate.likelihood", "mad.design": "mad.results", "models.rows": "models.causal_lm",
    "models.recipes.cosformer2": "models.recipes.linear", "models.recipes.gla": "models.recipes.linear",
    "models.recipes.lightnet": "models.recipes.linear", "models.recipes.published": "models.recipes.table",
    "models.recipes.rwkv7": "models.recipes.baselines",
    "models.synthetic.padding": "models.synthetic", "models.synthetic.recall": "models.synthetic",
    "report.run.page": "report.run",
    "train.prefetch": "train.session", "train.together.products": "train.together",
    "cli.fit.downstream": "cli.fit.laws", "cli.train.coordinates": "cli.train.plan",
    "corpus.bpe.fallback": "corpus.bpe", "corpus.bpe.han": "corpus.bpe", "corpus.bpe.learn": "corpus.bpe",
    "corpus.dedup.lines": "corpus.dedup", "corpus.page.figures": "corpus.page",
    "corpus.rules.kinds": "corpus.rules.filters", "corpus.scoring.filter": "corpus.scoring.score",
    "corpus.scoring.verdicts": "corpus.scoring.sample", "corpus.scripts": "corpus.bpe",
    "data.images.png": "data.images.decode", "data.synthetic.compression": "data.synthetic.mad",
    "data.synthetic.fuzzy_recall": "data.synthetic.mad", "data.synthetic.in_context_recall": "data.synthetic.mad",
    "data.synthetic.memorization": "data.synthetic.mad", "data.synthetic.noisy_recall": "data.synthetic.mad",
    "data.synthetic.pairs": "data.synthetic.mad", "data.synthetic.selective_copying": "data.synthetic.mad",
    "encoders.lra.makers": "encoders.lra.corpus", "encoders.lra.stamps": "encoders.lra.pathfinder",
    "evaluate.compare_words": "evaluate.compare", "evaluate.labelled": "evaluate.likelihood",
    "evaluate.retrieval.lessons": "evaluate.retrieval.needle",
    "evaluate.retrieval.ruler": "evaluate.retrieval.needle", "evaluate.tasks.chance": "evaluate.tasks.suites",
    "evaluate.tasks.data": "evaluate.tasks", "evaluate.tasks.metrics": "evaluate.tasks.suites",
    "evaluate.texts.blocks": "evaluate.texts", "evaluate.texts.perplexity": "evaluate.texts",
    "laws.fit.bootstrap": "laws.fit.law", "laws.fit.frontier": "laws.fit.envelope",
    "laws.further.least_squares": "laws.further.base", "mad.agreement": "mad.scores", "mad.folder": "mad.run",
    "mad.page.experts": "mad.page", "mad.page.mqar": "mad.page", "mad.resume": "mad.bundle",
    "models.labelled": "models.kinds",
    "mad.state": "mad.architectures", "papers.planned": "papers.verbs.base", "papers.work": "papers.table",
    "report.downstream.figures": "report.downstream", "report.further.figures": "report.further",
    "report.laws": "report.records", "report.needle": "report.compare", "report.run.figures": "report.run",
    "study.table": "study.collect", "vision.data.deit": "vision.data.batches",
    "vision.evaluate.efficientnet": "vision.evaluate.features", "vision.evaluate.frechet": "vision.evaluate.features",
    "vision.models.dit": "vision.models.recipes", "vision.models.vit": "vision.models.recipes",
    "vision.train.samples": "vision.train",
    "encoders.models.bert": "encoders.models",
    "encoders.models.masked_lm": "encoders.models",
    "encoders.models.sentence": "encoders.models",
    "encoders.models.sequence": "encoders.models",
    "encoders.evaluate.glue": "encoders.glue",
    "encoders.evaluate.evaluators": "encoders.evaluate",
    "encoders.lra.augment": "encoders.train",
    "encoders.train.masked": "encoders.train",
    "encoders.train.sentences": "encoders.train",
    "encoders.train.sequences": "encoders.train",
    "encoders.cli.evaluate": "encoders.cli.verbs",
    "encoders.cli.lra": "encoders.cli.verbs",
    "encoders.cli.show": "encoders.cli.verbs",
    "vision.report.classifier": "vision.report",
    "vision.report.classifiers": "vision.report",
    "vision.report.samples": "vision.report",
    "vision.train.diffusion": "vision.train",
    "vision.train.evaluations": "vision.train",
    "vision.train.images": "vision.train",
    "vision.models.classifier": "vision.models",
    "vision.models.denoiser": "vision.models",
    "vision.cli.show": "vision.cli.evaluate",
    "vision.evaluate.data": "vision.evaluate",
    "vision.data.config": "vision.data",
    "layers.positions.grid": "layers.positions",
    "layers.positions.lrpe": "layers.positions",
    "layers.positions.rope": "layers.positions",
    "layers.expansion": "layers.mixers.diagonal.hgrn",
    "layers.modulated": "layers.block",
    "models.recipes.wt103": "models.recipes.registry",
    "models.recipes.hgrn": "models.recipes.linear",
    "models.recipes.tnl": "models.recipes.linear",
    "models.recipes.delta": "models.recipes.baselines",
    "models.recipes.hybrid": "models.recipes.baselines",
    "models.recipes.llama": "models.recipes.baselines",
    "models.recipes.mamba": "models.recipes.baselines",
    "train.costs.footprint": "train.costs",
    "train.costs.plan": "train.costs",
    "train.together.bundle": "train.together",
    "train.together.ensemble": "train.together",
    "train.monitor.progress": "train.monitor",
    "train.objectives.corpus": "train.objectives.text",
    "train.scoring": "train.objectives.labelled",
    "hf.layouts.llama": "hf.layouts.uniform",
    "hf.layouts.mamba": "hf.layouts.uniform",
    "hf.layouts.rwkv": "hf.layouts.uniform",
    "hf.layouts.transnormer": "hf.layouts.uniform",
    "serve.answer": "serve.app",
    "serve.streams": "serve.service",
    "inference.decoding.decoder": "inference.decoding",
    "inference.decoding.merging": "inference.decoding",
    "inference.text": "inference.request",
    "inference.worker": "inference.engine",
    "evaluate.tasks.scrolls": "evaluate.tasks.suites",
    "data.synthetic.draws": "data.synthetic.base",
    "ops.gated.packed": "ops.gated.chunked",
    "ops.longconv.filter": "ops.longconv.chunked",
    "corpus.rules.work": "corpus.rules",
    "evaluate.texts.text": "evaluate.texts",
    "corpus.cli.score": "corpus.cli",
    "corpus.cli.stages": "corpus.cli",
    "corpus.scoring.loop": "corpus.scoring",
    "data.images.config": "data.images",
    "papers.cli.show": "papers.cli",
}  # fmt: skip
_MIXERS = {  # folder of linnet.layers.mixers -> the mixers that moved into it
    "convolution": "hyena hyena_experts mh_hyena short_conv tnn",
    "delta": "delta_net gated_delta_product gdn gdn2 kda rwkv7",
    "diagonal": "hgrn lru mamba mamba2 mamba3 rglru rwkv4 s4d tpe",
    "linear": "cosformer cosformer2 elu1 gla hgrn2 lightnet retnet tnl",
    "softmax": "attention mla",
}
_MERGED |= {
    f"layers.mixers.{mixer}": f"layers.mixers.{kind}.{mixer}"
    for kind, mixers in _MIXERS.items()
    for mixer in mixers.split()
}
_STEPS = "additive delta dplr gated lightning longconv modal scan selective_scan shortconv ssd"  # ops with a step
_MERGED |= {f"ops.{op}.step": f"ops.{op}" for op in _STEPS.split()}
MOVED |= {f"linnet.{old}": ((f"linnet.{new}",), "0.3.0", "0.4.0") for old, new in _MERGED.items()}
ELSEWHERE = (  # module that is still there, where names that it had are now, these names
    (
        "linnet.data.images",
        "linnet.vision.data",
        "AugmentConfig ImageBatches ImageCorpus ImageSplit augment_batch check_images crop_flip flip image_content "
        "mix_images open_images prepare_images read_sources",
    ),
    ("linnet.models", "linnet.vision.config", "VisionConfig DenoiserConfig"),
    ("linnet.models", "linnet.vision.models", "ImageClassifier"),
    ("linnet.models", "linnet.vision.models", "Denoiser"),
    ("linnet.models", "linnet.encoders.config", "MaskedConfig SentenceConfig SequenceConfig"),
    ("linnet.models", "linnet.encoders.models", "MaskedLM"),
    ("linnet.models", "linnet.encoders.models", "SentenceModel"),
    ("linnet.models", "linnet.encoders.models", "SequenceClassifier"),
    ("linnet.models.config", "linnet.encoders.config", "MaskedConfig SentenceConfig SequenceConfig"),
    ("linnet.models.config", "linnet.vision.config", "VisionConfig DenoiserConfig image_problems"),
    ("linnet.evaluate.evaluators", "linnet.vision.evaluate", "ImageEvaluator"),
    (
        "linnet.evaluate.evaluators",
        "linnet.encoders.evaluate.evaluators",
        "MaskedEvaluator SentencesEvaluator GlueEvaluator LraEvaluator ColaEvaluator",
    ),
    ("linnet.encoders.lra", "linnet.encoders.train", "augment_lra"),
    ("linnet.study", "linnet.vision.study", "ImageStudyConfig"),
    ("linnet.study.config", "linnet.vision.study", "ImageStudyConfig"),
    ("linnet.hf", "linnet.vision.hf", "export_vit"),
    ("linnet.hf.export", "linnet.vision.hf", "export_vit"),
)
RENAMED = {  # old name of a class or function -> the new one, since, until
    "linnet.hf.layouts.linnet.read": ("linnet.hf.layouts.read_linnet", "0.3.0", "0.4.0"),
    "linnet.data.lra.LraBatches": ("linnet.data.labelled.LabelledBatches", "0.3.0", "0.4.0"),
    "linnet.data.glue.SentenceBatches": ("linnet.data.labelled.LabelledBatches", "0.3.0", "0.4.0"),
} | {f"{old}.{name}": (f"{new}.{name}", "0.3.0", "0.4.0") for old, new, names in ELSEWHERE for name in names.split()}


class Moved(MetaPathFinder, Loader):
    """Makes a module of `MOVED`, or one inside of it, from the attributes of the modules that have its names now."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        return spec_from_loader(name, self, is_package=True) if _homes(name) else None

    def create_module(self, spec: ModuleSpec) -> None:
        homes, since, until = _homes(spec.name)
        text = f"{spec.name} is {' and '.join(homes)} since {since}; the old name goes in {until}"
        warnings.warn(text, FutureWarning, stacklevel=2)

    def exec_module(self, module: ModuleType) -> None:
        modules = [importlib.import_module(name) for name in _homes(module.__name__)[0]]

        def look_up(name: str):
            for home in modules:
                if hasattr(home, name):
                    return getattr(home, name)
            return renamed(module.__name__, name)

        module.__getattr__ = look_up


def _homes(name: str) -> tuple[tuple[str, ...], str, str] | None:
    old = max((old for old in MOVED if f"{name}.".startswith(f"{old}.")), key=len, default=None)
    if old is None or name == old:
        return MOVED.get(name)
    homes, since, until = MOVED[old]
    return (homes[0] + name.removeprefix(old),), since, until


def renamed(module: str, name: str) -> Any:
    """Returns what an old name of `RENAMED` in a module means, with a warning: the `__getattr__` of such a module.

    Raises:
        AttributeError: the module never had this name.
    """
    if (old := f"{module}.{name}") not in RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new, since, until = RENAMED[old]
    warnings.warn(f"{old} is {new} since {since}; the old name goes in {until}", FutureWarning, stacklevel=2)
    home, _, attribute = new.rpartition(".")
    return getattr(importlib.import_module(home), attribute)


def install() -> None:
    """Makes the old names importable. They are looked for only when no module has the name."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
