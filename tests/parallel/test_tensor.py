"""Tensor parallelism against one process, in float64: losses, gradients and steps of AdamW, by every mixer."""

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_shard import config, difference, train_rank
from test_shard import train as train_session

from linnet.layers import dropout
from linnet.layers.base import Mixer, load_plugin
from linnet.models import ModelConfig, build_model, empty_model
from linnet.ops.cross_entropy import split as cross_entropy
from linnet.parallel import tensor
from linnet.train.recompute import apply as recompute

PLUGIN = f"{Path(__file__).parents[2] / 'examples' / 'my_mixer.py'}:MyMixer"
VOCAB, ROWS, LENGTH, STEPS = 61, 2, 24, 2  # 61 rows: the ranks' parts differ
TINY = {"d_model": 32, "vocab_size": VOCAB}
MODELS = {
    "tnl": {"layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 4, "lrpe": "first_layer"}}},
    "tnl1": {
        "layout": "tnl+sglu x2",
        "options": {
            "tnl": {"num_heads": 4, "gate": "full", "gate_activation": "none", "gate_first": True, "norm": "rmsnorm"}
        },
        "embedding_scale": 5.0,
        "tie_embeddings": False,
    },
    "tnl-all": {
        "layout": "tnl+mlp x2",
        "options": {
            "tnl": {
                "num_heads": 4,
                "lrpe": "all_layers",
                "lrpe_shared_heads": True,
                "gate_input": "residual",
            }
        },
        "bias": "all",
        "dropout": 0.1,
    },
    "hgrn2": {"layout": "hgrn2+sglu x3", "options": {"hgrn2": {"num_heads": 4, "norm": "rmsnorm"}}},
    "hgrn": {"layout": "hgrn+glu x2", "options": {"hgrn": {"norm": "rmsnorm"}}},
    "lightnet": {"layout": "tpe lightnet+swiglu x2", "options": {"lightnet": {"num_heads": 4}}},
    "cosformer": {
        "layout": "cosformer+swiglu elu1+swiglu",
        "options": {"cosformer": {"num_heads": 4}, "elu1": {"num_heads": 4}},
        "bias": "all",
    },
    "cosformer2": {"layout": "tpe cosformer2+sglu x2", "options": {"cosformer2": {"num_heads": 4}}},
    "gla": {"layout": "gla+swiglu x2", "options": {"gla": {"num_heads": 4, "expand_k": 0.5}}, "bias": "qkv"},
    "gdn": {"layout": "gdn+swiglu x2", "options": {"gdn": {"num_heads": 4, "num_v_heads": 8}}, "bias": "all"},
    "delta_net": {"layout": "delta_net+swiglu x2", "options": {"delta_net": {"num_heads": 4, "use_gate": True}}},
    "kda": {"layout": "kda+swiglu x2", "options": {"kda": {"num_heads": 4, "decay": "full"}}, "bias": "all"},
    "gdn2": {"layout": "gdn2 gated_delta_product", "options": {"gdn2": {"num_v_heads": 8}}, "bias": "all"},
    "retnet": {"layout": "retnet+mlp x2", "options": {"retnet": {"num_heads": 4}}, "bias": "all"},
    "rglru": {"layout": "rglru+glu x2", "options": {"rglru": {"num_heads": 4}}, "bias": "all"},
    "rwkv7": {"layout": "rwkv7+rwkv x2", "options": {"rwkv7": {"num_heads": 4}}, "norm": "layernorm", "bias": "all"},
    "lru": {"layout": "lru+swiglu s4d", "options": {"s4d": {"state": 4}}, "bias": "all"},
    "rwkv4": {"layout": "rwkv4+rwkv x2", "options": {"rwkv": {"receptance": True}}},
    "tnn": {"layout": "tnn+swiglu x2", "options": {"tnn": {"rpe_dim": 8, "rpe_layers": 1}}, "bias": "all"},
    "mamba": {
        "layout": "mamba x2",
        "options": {"mamba": {"state": 4, "conv_bias": True, "norms": True}},
        "tie_embeddings": False,
        "bias": "all",
    },
    "mamba2": {"layout": "mamba2 x2", "options": {"mamba2": {"state": 4, "head_dim": 4}}, "bias": "all"},
    "mamba2 groups": {
        "layout": "mamba2 x2",
        "options": {"mamba2": {"state": 4, "head_dim": 4, "num_groups": 4, "norm_before_gate": True}},
    },
    "mamba3": {"layout": "mamba3 x2", "options": {"mamba3": {"state": 4, "head_dim": 4}}, "bias": "all"},
    "hyena": {
        "layout": "hyena+moe x2",
        "options": {"moe": {"num_experts": 4, "inner": 12, "balance_coefficient": 0.1}},
    },
    "mh_hyena": {
        "layout": "mh_hyena+moe I",
        "aliases": {"I": {"layer": "hyena+moe", "options": {"hyena": {"filter": "implicit", "filter_length": LENGTH}}}},
        "options": {
            "mh_hyena": {"num_heads": 4},
            "moe": {"num_experts": 6, "inner": 8, "routing": "zero_logits", "router_bias": True},
        },
    },
    "hyena_experts": {
        "layout": "hyena_experts+moe hyena_experts+swiglu",
        "options": {
            "hyena_experts": {"num_experts": 4, "balance_coefficient": 0.2, "router_bias": True},
            "moe": {"num_experts": 8, "num_active": 3, "activation": "gelu", "score": "sigmoid", "correction": True}
            | {"shared_inner": 8, "shared_gate": True, "groups": 4, "active_groups": 2},
        },
    },
    "plugin": {"layout": "my_mixer+swiglu x2"},
    "one": {"layout": "tnl+sglu", "options": {"tnl": {"num_heads": 4}}},  # for compilation, which takes seconds
    "hgrn3": {"layout": "tpe hgrn+glu", "options": {"hgrn": {"norm": "srmsnorm"}, "glu": {"inner": 9}}, "d_model": 24},
    "mlp3": {"layout": "attention+mlp", "options": {"attention": {"num_heads": 6, "num_kv_heads": 3}}, "d_model": 24},
    "transnormer": {
        "layout": "attention+swiglu tnl+swiglu",
        "options": {
            "attention": {
                "num_heads": 4,
                "bias": True,
                "block": 8,
                "scores": "relu",
                "out_norm": "srmsnorm",
                "rope": False,
                "lrpe": True,
                "lrpe_reflection": "householder",
            },
            "tnl": {
                "num_heads": 4,
                "decay": "none",
                "qk_activation": "elu1",
                "lrpe": "all_layers",
                "lrpe_form": "real",
                "lrpe_reflection": "householder",
            },
        },
        "embedding_norm": True,
    },
    "hybrid": {
        "layout": "attention+swiglu H parallel+swiglu short_conv mla Q",
        "norm_after": ["attention"],
        "residual_scale": 0.5,
        "aliases": {
            "H": {"layer": "attention+swiglu", "options": {"attention": {"gate": "head", "scale": 0.1}}},
            "Q": {"layer": "mla+swiglu", "options": {"mla": {"q_rank": 6, "gate": True, "gate_per_head": True}}},
        },
        "options": {
            "attention": {
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 12,
                "gate": "channel",
                "qk_norm": True,
                "qk_norm_over": "width",
                "qk_norm_kind": "zero_centred_rmsnorm",
                "rope_fraction": 0.5,
                "out_norm": "zero_centred_rmsnorm",
            },
            "short_conv": {"bias": True},
            "mla": {"num_heads": 4, "kv_rank": 10, "nope_dim": 4, "rope_dim": 2, "v_dim": 5, "bias": True},
            "parallel": {"mixers": {"attention": {"num_heads": 4}, "mamba": {"state": 4}}},
        },
        "norm": "zero_centred_rmsnorm",
    },
    "own": {  # gates and decays that have projections of their own
        "layout": "hgrn2+glu x2 lightnet+glu S",
        "aliases": {"S": {"layer": "lightnet+glu", "options": {"lightnet": {"decay": "scalar"}}}},
        "options": {
            "hgrn2": {"num_heads": 4, "norm": "rmsnorm", "tie": False},
            "lightnet": {"num_heads": 4, "decay": "independent"},
        },
        "bias": "all",
    },
    "llama": {
        "layout": "attention+swiglu W",
        "aliases": {"W": {"layer": "attention+swiglu", "options": {"attention": {"window": 5}}}},
        "options": {"attention": {"num_heads": 8, "num_kv_heads": 4, "qk_norm": True}},
        "parametrisation": "mup",
        "base_width": 8,
        "norm": "layernorm",
        "positions": "learned",
        "num_positions": LENGTH,
    },
}


def model_of(name):
    load_plugin(PLUGIN)
    model = build_model(ModelConfig(**{**TINY, **MODELS[name]})).double()
    with torch.no_grad():  # so that no term is silent
        for index, parameter in enumerate(model.parameters()):
            noise = torch.Generator().manual_seed(index)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64))
    return model


def batch(step):
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -100
    return tokens[:, :-1], targets


def train(model, finish=lambda: None):
    """Losses and last gradients of `STEPS` steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with dropout.position(model, step=step, seed=3):
            total, count = model.loss(*batch(step))
            (total / count).backward()
        finish()
        losses.append((total / count).item())
        optimizer.step()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-8)).item()


def errors(name, mode="none", compiled=False):
    """The largest relative errors of losses, gradients, weights and logits of this rank's part."""
    group, model = dist.group.WORLD, model_of(name)
    part = copy.deepcopy(model)
    tensor.split(part, group)
    recompute(part, mode)
    if compiled:
        torch.compiler.reset()
        for block in part.backbone.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    expected, gradients = train(model)
    losses, own = train(part, lambda: tensor.reduce_partial(part, group))

    assert set(own) == set(gradients) and tensor.whole_shapes(part) == tensor.whole_shapes(model)
    assert set(tensor.split_dims(part)) == set(dict(model.named_parameters())) | set(dict(model.named_buffers()))
    found = {"loss": max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))}
    for key, gradient in gradients.items():
        found[f"gradient of {key}"] = relative(own[key], tensor.slice_of(part, key, gradient))
    parameters = dict(part.named_parameters())
    for key, weight in model.named_parameters():
        found[key] = relative(parameters[key], tensor.slice_of(part, key, weight))
    if not compiled:
        with torch.no_grad():
            found["logits"] = relative(part.eval()(batch(9)[0])[0], model.eval()(batch(9)[0])[0])
    return found


def all_errors(cases):
    ten_tokens = 10 * -(-VOCAB // dist.get_world_size())
    with mock.patch.object(cross_entropy, "BLOCK_LOGITS", ten_tokens):
        return {str(case): errors(*case) for case in cases}


FOUR = ("tnl-all", "hgrn", "gla", "mamba", "own", "llama")  # on four ranks, a head or two of each kind to a rank


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mixer_trains_as_in_one_process(pool, ranks):
    names = [name for name in MODELS if "3" not in name and (ranks == 4) == (name in FOUR)]
    for found in pool.run(ranks, all_errors, [(name,) for name in names], timeout=240):
        for case, numbers in found.items():
            assert max(numbers.values()) < 1e-12, (case, {k: v for k, v in numbers.items() if not v < 1e-12})


def error_after_one_that_stops(name):
    """The largest relative error of gradients after a backward of the same graph for one bias."""
    found = []
    for stops in (False, True):
        part = model_of(name)
        tensor.split(part, dist.group.WORLD)
        total, count = part.loss(*batch(0))
        if stops:
            torch.autograd.grad(total, part.backbone.blocks[0].mixer.k_proj.bias, retain_graph=True)
        (total / count).backward()
        found.append({key: parameter.grad for key, parameter in part.named_parameters()})
    return max(relative(found[1][key], gradient) for key, gradient in found[0].items())


def test_a_backward_that_stops_early_leaves_nothing(pool):
    assert max(pool.run(2, error_after_one_that_stops, "cosformer")) < 1e-12


def split_table(names):
    """This rank's parts joined again, and the slices of a meta model, against the whole model."""
    for name in names:
        model = model_of(name)
        part, empty = copy.deepcopy(model), empty_model(model.config, "meta")
        for each in (part, empty):
            tensor.split(each, dist.group.WORLD)
        wholes = dict(model.named_parameters()) | dict(model.named_buffers())
        shapes = {key: x.shape for key, x in (*empty.named_parameters(), *empty.named_buffers())}
        dims = tensor.split_dims(part)
        for key, own in (*part.named_parameters(), *part.named_buffers()):
            assert own.shape == shapes[key] and torch.equal(own, tensor.slice_of(empty, key, wholes[key])), key
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, own.detach())
            dim = dims[key]
            assert torch.equal(parts[0] if dim is None else torch.cat(parts, dim), wholes[key]), key
        cut = {key for key, dim in dims.items() if dim is not None}
        assert cut == {key for key, whole in wholes.items() if shapes[key] != whole.shape}
    return len(names)


def test_slices_join_to_the_whole_model_and_a_meta_model_has_their_shapes(pool):
    assert pool.run(3, split_table, ["hgrn3", "mlp3"]) == [2] * 3


def test_compiled_blocks_and_recomputation(pool):
    cases = [("one", "block", True), ("one", "selective", True)]
    for found in pool.run(2, all_errors, cases, timeout=240):
        for case, numbers in found.items():
            assert max(numbers.values()) < 1e-12, (case, {k: v for k, v in numbers.items() if not v < 1e-12})


@pytest.mark.parametrize(
    "tp, key, changes",
    (
        (
            3,
            "model.options.tnl.num_heads: 4",
            {"layout": "tnl+sglu", "options": {"tnl": {"num_heads": 4}, "sglu": {"inner": 9}}},
        ),
        (
            2,
            "model.options.attention.num_kv_heads: 1",
            {"layout": "attention", "options": {"attention": {"num_kv_heads": 1}}},
        ),
        (3, "model.options.sglu.inner: 8", {"layout": "sglu", "options": {"sglu": {"inner": 8}}}),
        (3, "mamba: its channels: 64", {"layout": "mamba"}),
        (2, "model.options.hgrn.complex: true", {"layout": "hgrn", "options": {"hgrn": {"complex": True}}}),
        (2, "model.options.hgrn.norm: no LayerNorm", {"layout": "hgrn"}),
        (3, "hyena: its channels: 32", {"layout": "hyena"}),
        (2, "model.options.hyena.proj_groups: 4", {"layout": "hyena", "options": {"hyena": {"proj_groups": 4}}}),
        (
            4,
            "model.options.mh_hyena.num_heads: 2",
            {"layout": "mh_hyena", "options": {"mh_hyena": {"num_heads": 2}}},
        ),
        (
            2,
            "model.options.hyena_experts.num_experts: 3 is not a multiple of parallel.tp: 2",
            {"layout": "hyena_experts", "options": {"hyena_experts": {"num_experts": 3, "expert_width": 8}}},
        ),
        (
            4,
            "model.options.moe.num_experts: 6 is not a multiple of parallel.tp: 4",
            {"layout": "attention+moe", "options": {"moe": {"num_experts": 6}}},
        ),
        (
            4,
            "model.options.parallel.mixers.gdn.num_heads: 2 is not a multiple of parallel.tp: 4",
            {"layout": "parallel", "options": {"parallel": {"mixers": {"attention": {}, "gdn": {"num_heads": 2}}}}},
        ),
        (2, "model.options.moe.down: dense", {"layout": "attention+moe", "options": {"moe": {"down": "dense"}}}),
        (2, "model.options.moe.latent: every", {"layout": "attention+moe", "options": {"moe": {"latent": 8}}}),
        (4, "model.vocab_size: 5", {"layout": "hgrn2", "vocab_size": 5}),
    ),
)
def test_what_cannot_be_split_is_refused_by_its_key(tp, key, changes):
    config = ModelConfig(**{**TINY, **changes})
    (problem,) = tensor.problems(config, tp)
    assert problem.startswith(key) or key in problem
    assert tensor.problems(config, 1) == []


def test_all_problems_come_at_once_and_each_once():
    options = {"hyena": {"proj_groups": 3}, "moe": {"num_experts": 3}, "tnl": {"num_heads": 2}, "sglu": {"inner": 10}}
    layout = {"layout": "hyena+moe tnl+sglu x2", "options": options}
    assert len(tensor.problems(ModelConfig(**TINY, **layout), 4)) == 4


class Planned(Mixer):
    """A mixer with a parameter of its own and a plan that the test writes."""

    name, plan = "planned", {}

    def __init__(self):
        super().__init__()
        self.read, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.gain = torch.nn.Parameter(torch.ones(4))
        self.out.ends_residual = True

    def tp_plan(self):
        return self.plan


WHOLE = {"read": "colwise", "gain": "split", "out": "rowwise"}


@pytest.mark.parametrize(
    "change, problem",
    (
        ({"gain": "halved"}, "gain: the word 'halved' is unknown"),
        ({"gone": "split"}, "gone: the layer has no such"),
        ({"read.bias": "split"}, "read.bias: has two words"),
        ({"gain": "colwise"}, "gain: colwise is for torch.nn.Linear"),
        ({"out": "partial"}, "no rowwise layer ends it"),
        ({"gain": None}, "gain: has no word"),
        ({"gain": None, "read": None}, "read.weight, read.bias: have no word"),
    ),
)
def test_a_wrong_plan_is_named(change, problem):
    mixer = Planned()
    mixer.plan = {path: word for path, word in (WHOLE | change).items() if word}
    with pytest.raises(ValueError, match=problem):
        tensor.words(mixer)


BLOCK, SELECTIVE, MUON = {"run": {"recompute": "block"}}, {"run": {"recompute": "selective"}}, {"name": "muon"}
WITH_FSDP = {
    "tnl": BLOCK | {"model": {"dropout": 0.1}},
    "hgrn2": SELECTIVE | {"accumulation": 2, "optimizer": MUON},
    "gla": BLOCK | {"accumulation": 2},
    "mamba": {"parallel": {"dp_replicate": 2}},
}
WITH_SPANS = {
    "tnl": SELECTIVE | {"model": {"dropout": 0.1, "options": {"tnl": {"lrpe": "all_layers"}}}},
    "hgrn2": BLOCK | {"optimizer": MUON},
    "mamba": SELECTIVE | {"accumulation": 2},
    "llama": {},
}


def train_ranks(cases):
    return [train_rank(case) for case in cases]


@pytest.mark.parametrize("degrees, cases", (({}, WITH_FSDP), ({"sp": 2}, WITH_SPANS)), ids=("fsdp", "spans"))
def test_with_other_layouts_it_trains_as_one_process(pool, degrees, cases):
    """Tensors over two ranks, and rows or spans over two: losses, norms and weights after `STEPS` steps."""
    whole, split = {}, []
    for name, changes in cases.items():
        alone = {key: value for key, value in changes.items() if key not in ("parallel", "accumulation")}
        whole[name] = train_session(config(name, **alone), None)
        split.append(config(name, **changes | {"parallel": {"tp": 2} | degrees | changes.get("parallel", {})}))
    ranks = pool.run(4, train_ranks, split, timeout=240, fresh=True)  # DTensor remembers the groups of earlier meshes
    for number, (name, (losses, norms, weights)) in enumerate(whole.items()):
        found = ranks[0][number]
        assert all(rank[number][:2] == found[:2] for rank in ranks), name  # all ranks judge by the same numbers
        assert found[0] == pytest.approx(losses, rel=1e-12) and found[1] == pytest.approx(norms, rel=1e-12), name
        assert difference(found[2], weights) < 1e-12, name


def test_bfloat16_is_that_of_autocast(pool):
    """Sums over the ranks are in bfloat16 where the products are; the residual stream and the norms' sums are not."""
    settings = {"precision": "bfloat16", "optimizer": {"learning_rate": 1e-3}}
    losses, norms, _ = train_session(config("tnl", **settings), None, torch.float32)
    ranks = pool.run(2, train_rank, config("tnl", parallel={"tp": 2}, **settings), torch.float32)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-4) and ranks[0][1] == pytest.approx(norms, rel=1e-2)


def count_sums():
    """The all-reduces of a forward and of a backward pass, and of what follows it."""
    model, counts = model_of("tnl"), []
    tensor.split(model, dist.group.WORLD)
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sums:
        total, _ = model.loss(*batch(0))
        counts.append(sums.call_count)
        total.backward()
        counts.append(sums.call_count)
        tensor.reduce_partial(model, dist.group.WORLD)
        counts.append(sums.call_count)
    return counts


def test_a_layer_has_one_sum_in_each_direction(pool):
    """Two of [B, T, D] and one of [B, T] per block; one for the embedding and one for the loss, whose block has two."""
    cross_entropy_sums, blocks = 2, 2
    forward, backward = 1 + 3 * blocks + cross_entropy_sums, 3 * blocks + 1
    assert pool.run(2, count_sums) == [[forward, forward + backward, forward + backward + 1]] * 2
