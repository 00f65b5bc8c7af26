"""FSDP2 training against training in one process: same weights at the start, same losses and weights after steps."""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from linnet.data.loader import mark_documents
from linnet.layers.base import load_plugin
from linnet.layers.block import as_terms
from linnet.models import build_model
from linnet.parallel.build import build
from linnet.parallel.mesh import Mesh
from linnet.runs.model import full_precision
from linnet.train import float8
from linnet.train.config import TrainConfig
from linnet.train.objectives.text import TextObjective
from linnet.train.session import Session

STEPS = 2
PLUGIN = f"{Path(__file__).parents[2] / 'examples' / 'my_mixer.py'}:MyMixer"
LAYOUTS = {
    "tnl": "tpe tnl+sglu x2",
    "hgrn2": "hgrn2+glu x2",
    "lightnet": "lightnet+sglu x2",
    "mamba": "mamba x2",
    "llama": "attention+glu x2",
    "gla": "gla+glu x2",
    "cosformer2": "cosformer2+glu x2",
    "hyena": "hyena+glu x2",
    "rwkv7": "rwkv7+rwkv attention+rwkv rwkv7+glu",
    "moe": "hgrn2+moe x2",
    "plugin": "my_mixer+glu x2",  # its state goes from rank to rank
    "frozen": "hgrn2+glu",  # one layer with a lower bound does not use it, so `gamma` has no gradient
}


class Tokens:
    """Random tokens by position, as `linnet.data.loader.Batches` serves them."""

    def __init__(self, config: TrainConfig):
        self.config = config

    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, ...]:
        size = self.config.batch_size
        numbers = torch.randint(256, (size, self.config.seq_len + 1), generator=torch.Generator().manual_seed(step))
        rows = numbers[size * rank // world : size * (rank + 1) // world]
        if self.config.data.packing == "cross":
            return rows[:, :-1], rows[:, 1:]
        rows = torch.where(rows < 40, 0, rows)  # ends of documents
        return mark_documents(rows[:, :-1], rows[:, 1:], 0)


class Random(TextObjective):
    """A text objective of random tokens, with a model in `dtype`."""

    def __init__(self, config: TrainConfig, dtype: torch.dtype):
        self.config, self.dtype = config, dtype
        self.row_length = config.seq_len
        self.targets_per_row = config.seq_len if config.data.packing == "cross" else None

    def build(self, seed, device=None):
        return build_model(self.config.model, seed, device).to(self.dtype)

    def build_sharded(self, seed, mesh, wrap):
        options = {"precision": self.config.autocast_precision, "reshard": self.config.parallel.reshard, "wrap": wrap}
        return build(self.config.model, seed, mesh, **options, dtype=self.dtype)

    def batches(self):
        return Tokens(self.config)

    def meta(self):
        return {"data": "random"}

    def start_problems(self, meta, path):
        return []

    def resume_problems(self, meta):
        return [] if meta["data"] == "random" else ["data: other"]


def config(name: str, **changes) -> TrainConfig:
    model = {"vocab_size": 261, "d_model": 32, "layout": LAYOUTS[name], "tie_embeddings": name == "llama"}
    model |= changes.pop("model", {})
    values = {"model": model, "seq_len": 12, "batch_size": 6, "steps": STEPS, "seed": 3, **changes}
    values["optimizer"] = {"learning_rate": 0.01, "clip": 0.5} | values.get("optimizer", {})
    return TrainConfig(**values)


def train(
    settings: TrainConfig,
    mesh: Mesh | None,
    dtype: torch.dtype = torch.float64,
    device: torch.device = torch.device("cpu"),  # noqa: B008
):
    """Losses, gradient norms and whole weights after `STEPS` steps, judged once at the end."""
    session = Session(settings, Random(settings, dtype), device, mesh)
    norms = []
    for _ in range(STEPS):
        session.gradients()
        assert session.judge() is None
        norms.append(session.grad_norm)
        session.apply()
    return session.recent, norms, dict(session.weights())


def train_rank(settings: TrainConfig, dtype: torch.dtype = torch.float64):
    """Runs in a worker."""
    for plugin in settings.plugins:
        load_plugin(plugin)
    mesh = Mesh(settings.parallel, torch.device("cpu"))
    with mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")):
        return train(settings, mesh, dtype)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(found) == list(expected)
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


ADAMW, MUON = {"name": "adamw"}, {"name": "muon"}
INDEPENDENT = {"decay": "independent", "weight_decay": 0.01}
MUP = {"parametrisation": "mup", "base_width": 8}  # shards have another shape, and the same factors
SELECTIVE, BLOCK = {"recompute": "selective"}, {"recompute": "block"}
BALANCED = {"options": {"moe": {"balance_coefficient": 0.01}}}
NARROW = {"d_model": 16, "options": {"mamba": {"state": 4}}}  # a matrix of 9 rows, none of them on the fourth rank
CASES = [
    ("tnl", 2, {"model": {"dropout": 0.1}}),
    ("hgrn2", 3, {"run": BLOCK, "accumulation": 2}),
    ("hgrn2", 2, {"data": {"packing": "reset"}, "accumulation": 3}),
    ("lightnet", 4, {"parallel": {"dp_replicate": 2}, "batch_size": 9, "accumulation": 2, "run": SELECTIVE}),
    ("mamba", 4, {"run": BLOCK, "optimizer": MUON, "model": NARROW}),
    ("llama", 3, {"run": SELECTIVE, "parallel": {"reshard": False}}),
    ("llama", 2, {"parallel": {"dp_replicate": 2}, "accumulation": 2, "model": MUP, "optimizer": INDEPENDENT}),
    ("gla", 4, {"optimizer": MUON, "parallel": {"dp_replicate": 2}, "model": MUP}),
    ("cosformer2", 2, {"run": SELECTIVE, "accumulation": 2, "parallel": {"sync_parts": False}}),
    ("hyena", 3, {"optimizer": MUON, "run": BLOCK}),
    ("moe", 3, {"model": BALANCED, "optimizer": MUON}),
    ("rwkv7", 3, {"run": BLOCK, "accumulation": 2}),
    ("rwkv7", 4, {"data": {"packing": "reset"}, "parallel": {"sp": 2}, "run": SELECTIVE}),
    ("frozen", 3, {}),
    ("tnl", 4, {"model": {"dropout": 0.1}, "parallel": {"sp": 2}, "run": BLOCK, "accumulation": 2}),
    ("hgrn2", 4, {"data": {"packing": "reset"}, "parallel": {"sp": 2}, "run": SELECTIVE}),
    ("lightnet", 4, {"parallel": {"sp": 2, "tp": 2}, "optimizer": MUON, "model": {"dropout": 0.1}}),
    ("moe", 4, {"model": BALANCED, "parallel": {"sp": 4}, "run": BLOCK}),
    ("plugin", 4, {"plugins": [PLUGIN], "parallel": {"sp": 2}, "run": BLOCK}),
]


@pytest.mark.parametrize(
    "name, world, changes", CASES, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(CASES)]
)
def test_training_equals_one_process(pool, name, world, changes):
    alone = {key: value for key, value in changes.items() if key not in ("parallel", "accumulation")}
    losses, norms, weights = train(config(name, **alone), None)
    ranks = pool.run(world, train_rank, config(name, **changes))
    assert all(rank[:2] == ranks[0][:2] for rank in ranks)  # every rank judges by the same numbers
    assert ranks[0][0] == pytest.approx(losses, rel=1e-12)
    assert ranks[0][1] == pytest.approx(norms, rel=1e-12)
    assert difference(ranks[0][2], weights) < 1e-12
    assert ranks[1][2] == {}


@pytest.mark.parametrize("name, recompute", [("llama", "selective"), ("frozen", "block"), ("llama", "none")])
def test_compiled_training_equals_one_process(pool, name, recompute):
    losses, norms, weights = train(config(name), None)
    settings = config(name, run={"compile": True, "recompute": recompute})
    (found, found_norms, found_weights), _ = pool.run(2, train_rank, settings, timeout=120)
    assert found == pytest.approx(losses, rel=1e-12) and found_norms == pytest.approx(norms, rel=1e-12)
    assert difference(found_weights, weights) < 1e-12


def compilations(settings: TrainConfig) -> int:
    """Runs in a worker. How often the blocks of a training are compiled in its first step."""
    torch.compiler.reset()
    counter = CompileCounter()
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=counter)):
        session = Session(
            settings, Random(settings, torch.float64), torch.device("cpu"), Mesh(settings.parallel, torch.device("cpu"))
        )
        session.gradients()
    return counter.frame_count


def test_equal_blocks_are_compiled_once(pool):
    assert pool.run(1, compilations, config("llama", run={"compile": True}), timeout=120) == [1]


LOW = {
    "tnl": {"model": {"dropout": 0.1}},
    "hgrn2": {"accumulation": 2, "run": BLOCK},
    "lightnet": {"optimizer": MUON},
    "mamba": {"run": SELECTIVE},
    "moe": {"model": {"options": {"moe": {"balance_coefficient": 0.01}}}},
    "llama": {"accumulation": 2, "parallel": {"sync_parts": False}},
}


def low_cases():
    """The same trainings in bfloat16 without and with FSDP, on one rank."""
    return {
        name: [train_rank(settings, torch.float32), train(settings, None, torch.float32)]
        for name, settings in low().items()
    }


def low() -> dict[str, TrainConfig]:
    return {name: config(name, precision="bfloat16", **changes) for name, changes in LOW.items()}


def test_bfloat16_on_one_rank_has_the_bits_of_autocast(pool):
    (cases,) = pool.run(1, low_cases)
    for name, (sharded, alone) in cases.items():
        assert sharded[1] == alone[1], name
        assert difference(sharded[2], alone[2]) == 0.0, name
        if low()[name].accumulation == 1:  # one process adds the parts of the recorded loss in another order
            assert sharded[0] == alone[0], name


def gathered_dtypes(name: str):
    """Runs in a worker. The dtypes that a forward pass sees: parameters by name, and the residual stream."""
    settings = config(name, precision="bfloat16")
    mesh = Mesh(settings.parallel, torch.device("cpu"))
    session = Session(settings, Random(settings, torch.float32), torch.device("cpu"), mesh)
    seen, stream = {}, set()

    def look(block, inputs, outputs):
        stream.update(as_terms(x)[0].dtype for x in (inputs[0], outputs[0]))
        seen.update((key, parameter.dtype) for key, parameter in session.model.named_parameters())

    # Before the hook with which FSDP frees the weights again.
    session.model.backbone.blocks[-1].register_forward_hook(look, prepend=True)
    session.gradients()
    linear = {
        f"{key}.weight"
        for key, module in session.model.backbone.named_modules(prefix="backbone")
        if type(module) is nn.Linear
    }
    last = [key for key in seen if key.startswith("backbone.blocks.1.")]
    return full_precision(session.model), {key: seen[key] for key in last}, linear, stream, seen


def float8_case(settings: TrainConfig):
    """Runs in a worker. Losses, norms and weights in float8, which a CPU emulates, and the dtypes of its weights."""
    from torchao.float8.float8_linear import Float8Linear

    seen = set()

    def look(layer, *inputs):
        seen.add(layer.weight.dtype)
        return forward(layer, *inputs)

    forward = Float8Linear.forward
    with mock.patch.object(float8, "LEAST", 16), mock.patch.object(Float8Linear, "forward", look):
        return *train_rank(settings, torch.float32), seen


def test_float8_gathers_bfloat16_and_trains_as_one_process(pool):
    pytest.importorskip("torchao", reason="needs the extra float8")
    common = {"precision": "float8", "seq_len": 16, "accumulation": 2}
    with mock.patch.object(float8, "LEAST", 16):
        losses, norms, weights = train(config("llama", **common), None, torch.float32)
    ranks = pool.run(2, float8_case, config("llama", **common, run={"compile": True}), timeout=120)
    assert all(rank[3] == {torch.bfloat16} for rank in ranks)
    # Each rank scales its own rows by their largest element.
    assert ranks[0][0] == ranks[1][0] == pytest.approx(losses, abs=1e-3)
    assert ranks[0][1] == pytest.approx(norms, rel=0.02)
    assert list(ranks[0][2]) == list(weights)


@pytest.mark.parametrize("name", ["lightnet", "hgrn2", "mamba"])
def test_bfloat16_gathers_linear_weights_alone_in_bfloat16(pool, name):
    kept, block, linear, stream, seen = pool.run(2, gathered_dtypes, name)[1]
    assert stream == {torch.float32}
    assert {key for key, dtype in block.items() if dtype == torch.bfloat16} == linear & set(block)
    assert kept and all(seen[key] == torch.float32 for key in kept)
