"""What moved, under the names of before. They warn, and go in the version that the tables name."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_HOMES = {  # below linnet: module -> the modules whose names it has now; `.bert` was a module in this package
    "cli.fit.laws": "cli.fit.downstream",
    "cli.train.plan": "cli.train.coordinates",
    "corpus": "data.clean",
    "corpus.bpe": ".fallback .han .learn corpus.scripts",
    "corpus.cli": ".score .stages",
    "corpus.dedup": ".lines",
    "corpus.page": ".figures report.corpus",
    "corpus.rules": ".work",
    "corpus.rules.filters": "corpus.rules.kinds corpus.rules.switch",
    "corpus.scoring": ".loop study.cleaning",
    "corpus.scoring.sample": "corpus.page.review corpus.scoring.verdicts",
    "corpus.scoring.score": "corpus.scoring.filter",
    "data.chat.render": "data.render serve.render",
    "data.chat.template": "data.template serve.template",
    "data.corpus": "data.split",
    "data.images": ".config",
    "data.images.decode": "data.images.png",
    "data.synthetic.base": "data.synthetic.draws data.synthetic.text",
    "data.synthetic.mad": (
        "data.synthetic.compression data.synthetic.fuzzy_recall data.synthetic.in_context_recall "
        "data.synthetic.memorization data.synthetic.noisy_recall data.synthetic.pairs "
        "data.synthetic.selective_copying"
    ),
    "encoders.cli.verbs": "cli.data.lra encoders.cli.evaluate encoders.cli.lra encoders.cli.show",
    "encoders.evaluate": ".evaluators evaluate.bidirectional",
    "encoders.evaluate.lra": "evaluate.lra",
    "encoders.glue": "data.glue encoders.evaluate.glue",
    "encoders.lra": "data.lra",
    "encoders.lra.corpus": "encoders.lra.makers",
    "encoders.lra.pathfinder": "encoders.lra.stamps",
    "encoders.masking": "data.masking",
    "encoders.models": ".bert .masked_lm .sentence .sequence models.bidirectional models.recipes.bert",
    "encoders.train": (
        ".masked .sentences .sequences encoders.lra.augment train.objectives.masked train.objectives.sentences "
        "train.objectives.sequences"
    ),
    "evaluate.classification": "evaluate.vision.classification",
    "evaluate.compare": "evaluate.compare_words",
    "evaluate.likelihood": "evaluate.labelled evaluate.mode",
    "evaluate.retrieval.needle": "evaluate.retrieval.lessons evaluate.retrieval.ruler",
    "evaluate.tasks": ".data",
    "evaluate.tasks.suites": "evaluate.tasks.chance evaluate.tasks.metrics evaluate.tasks.scrolls",
    "evaluate.texts": ".blocks .perplexity .text",
    "hf.export": "hf.card",
    "hf.layouts": ".linnet",
    "hf.layouts.base": "hf.layouts.rope",
    "hf.layouts.uniform": "hf.layouts.llama hf.layouts.mamba hf.layouts.rwkv hf.layouts.transnormer",
    "hf.model": "hf.cache hf.config hf.tokenizer",
    "inference.benchmark": ".peers .throughput",
    "inference.decoding": ".decoder .lengths .merging .pending",
    "inference.engine": "inference.checks inference.decoding.precision",
    "inference.workers": "inference.worker",
    "inference.request": "inference.text",
    "laws.fit.envelope": "laws.fit.frontier",
    "laws.fit.law": "laws.fit.bootstrap laws.fit.heldout",
    "laws.further": "study.laws",
    "laws.further.base": "laws.further.least_squares",
    "laws.orders": "orders",
    "layers.block": "layers.modulated",
    "layers.mixers.diagonal.hgrn": "layers.expansion",
    "layers.positions": ".absolute .angles .grid .lrpe .rope",
    "layers.ring": "ops.ring",
    "mad": "study.mad",
    "mad.architectures": "mad.state",
    "mad.bundle": "mad.resume",
    "mad.page": ".experts .mqar report.mad",
    "mad.results": "mad.design",
    "mad.run": "mad.folder",
    "mad.scores": "mad.agreement",
    "models.causal_lm": "models.rows",
    "models.kinds": "models.labelled",
    "models.parametrisation": "models.widths",
    "models.patches": "models.vision.patches",
    "models.recipes.baselines": (
        "models.recipes.delta models.recipes.hybrid models.recipes.llama models.recipes.mamba models.recipes.rwkv7"
    ),
    "models.recipes.linear": (
        "models.recipes.cosformer2 models.recipes.gla models.recipes.hgrn models.recipes.lightnet models.recipes.tnl"
    ),
    "models.recipes.registry": "models.recipes.wt103",
    "models.recipes.table": "models.recipes.published",
    "models.synthetic": ".autoencoder .padding .recall",
    "ops.attention": ".blocks .reference .spans",
    "ops.documents": "ops.waves",
    "ops.gated.chunked": "ops.gated.packed",
    "ops.gated.forget": "ops.gated.summary",
    "ops.gated.reference": "ops.gated.gate",
    "ops.lightning": ".non_causal",
    "ops.longconv.chunked": "ops.longconv.filter",
    "ops.registration": "ops.vmap_rules",
    "ops.rotation": "ops.axes",
    "ops.shortconv.chunked": "ops.shortconv.packed",
    "options": "cli.options",
    "papers": "study.reproduce",
    "papers.cli": ".show",
    "papers.table": "papers.work",
    "papers.verbs.base": "papers.job papers.planned",
    "parallel.build": "parallel.shard",
    "report.compare": "report.needle",
    "report.downstream": ".figures .page",
    "report.further": ".figures",
    "report.records": "report.laws",
    "report.run": ".figures .page",
    "serve": ".server",
    "serve.app": "serve.answer serve.endpoints serve.gate",
    "serve.formats": "serve.schemas serve.tools",
    "serve.requests": "serve.body",
    "serve.scoring": "serve.tokens",
    "serve.service": "serve.config serve.metrics serve.streams",
    "study.collect": "study.describe study.table",
    "train.costs": ".footprint .plan",
    "train.loop": "train.monitor.clock",
    "train.monitor": ".guards .loggers .progress .stop",
    "train.objectives.labelled": "train.scoring",
    "train.objectives.text": "train.objectives.corpus",
    "train.optimizer": ".average .optim .schedule",
    "train.session": "train.prefetch",
    "train.suites": ".base .text",
    "train.together": ".bundle .ensemble .products",
    "vision.cli.bench": "cli.bench.vision",
    "vision.cli.demo": "cli.demo.vision",
    "vision.cli.evaluate": "vision.cli.show",
    "vision.cli.sample": "cli.sample",
    "vision.data": ".config",
    "vision.data.augment": "data.images.augment",
    "vision.data.batches": "data.images.batches data.images.deit vision.data.deit",
    "vision.data.corpus": "data.images.corpus",
    "vision.evaluate": ".data evaluate.vision",
    "vision.evaluate.features": "vision.evaluate.efficientnet vision.evaluate.frechet",
    "vision.hf": "hf.layouts.vit",
    "vision.models": ".classifier .denoiser models.vision",
    "vision.models.recipes": "models.recipes.dit models.recipes.vit vision.models.dit vision.models.vit",
    "vision.report": ".classifier .classifiers .samples report.vision",
    "vision.sampler": "inference.sampler",
    "vision.throughput": "train.costs.throughput",
    "vision.train": (
        ".diffusion .evaluations .images .samples train.objectives.diffusion train.objectives.images "
        "train.suites.images train.suites.samples"
    ),
}
_MIXERS = {  # folder of linnet.layers.mixers -> the mixers that moved into it
    "convolution": "hyena hyena_experts mh_hyena short_conv tnn",
    "delta": "delta_net gated_delta_product gdn gdn2 kda rwkv7",
    "diagonal": "hgrn lru mamba mamba2 mamba3 rglru rwkv4 s4d tpe",
    "linear": "cosformer cosformer2 elu1 gla hgrn2 lightnet retnet tnl",
    "softmax": "attention mla",
}
_MOVED = {old if old[0] != "." else f"{new}{old}": new for new, names in _HOMES.items() for old in names.split()}
_MOVED |= {
    f"layers.mixers.{mixer}": f"layers.mixers.{kind}.{mixer}"
    for kind, mixers in _MIXERS.items()
    for mixer in mixers.split()
}
_STEPS = "additive delta dplr gated lightning longconv modal scan selective_scan shortconv ssd"  # ops with a step
_MOVED |= {f"ops.{op}.step": f"ops.{op}" for op in _STEPS.split()}
MOVED: dict[str, tuple[tuple[str, ...], str, str]] = {  # old name -> where its names are now, since, until
    "linnet.study.fit": (("linnet.laws.fit", "linnet.study.collect"), "0.3.0", "0.4.0"),
    **{f"linnet.{old}": ((f"linnet.{new}",), "0.3.0", "0.4.0") for old, new in _MOVED.items()},
}
ELSEWHERE = (  # module that is still there, where names that it had are now, these names
    (
        "linnet.data.images",
        "linnet.vision.data",
        "AugmentConfig ImageBatches ImageCorpus ImageSplit augment_batch check_images crop_flip flip image_content "
        "mix_images open_images prepare_images read_sources",
    ),
    ("linnet.models", "linnet.vision.config", "VisionConfig DenoiserConfig"),
    ("linnet.models", "linnet.vision.models", "ImageClassifier Denoiser"),
    ("linnet.models", "linnet.encoders.config", "MaskedConfig SentenceConfig SequenceConfig"),
    ("linnet.models", "linnet.encoders.models", "MaskedLM SentenceModel SequenceClassifier"),
    ("linnet.models.config", "linnet.encoders.config", "MaskedConfig SentenceConfig SequenceConfig"),
    ("linnet.models.recipes.registry", "linnet.models.registry", "FAMILIES RECIPES get_recipe kind_of_recipe"),
    ("linnet.models.recipes.registry", "linnet.models.registry", "recipes_of unknown_recipe"),
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


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package some of whose names (name -> module in it) are imported on first use."""

    def look_up(name: str) -> Any:
        if name not in homes:
            return renamed(package, name)
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return look_up


def install() -> None:
    """Makes the old names importable. They are looked for only when no module has the name."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
