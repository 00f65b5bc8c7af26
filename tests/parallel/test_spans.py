"""Whole models on rows that are cut into spans, one per rank, against the same model on whole rows in one process."""

from pathlib import Path

import pytest
import test_shard
import torch
import torch.distributed as dist

from linnet.layers import routing
from linnet.layers.base import load_plugin
from linnet.models import ModelConfig, build_model
from linnet.models.stack import span_problems
from linnet.ops import sequence
from linnet.train import recompute
from linnet.train.objective import training_loss

TOLERANCE = 1e-12
LENGTH = 24
VOCAB = 40

SMALL = {"d_model": 16, "vocab_size": VOCAB, "init_std": 0.3}
MODELS = {
    "tnl": {"layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 4, "lrpe": "first_layer"}}},
    "hgrn2": {"layout": "hgrn2+sglu x2", "options": {"hgrn2": {"num_heads": 4}}},
    "hgrn": {"layout": "hgrn+swiglu x2"},
    "hgrn complex": {"layout": "hgrn+swiglu x2", "options": {"hgrn": {"complex": True}}},
    "gla": {"layout": "gla+swiglu x2", "options": {"gla": {"num_heads": 2}}},
    "gdn": {"layout": "gdn+swiglu x2", "options": {"gdn": {"num_heads": 2, "num_v_heads": 4}}},
    "delta_net": {"layout": "delta_net+swiglu x2", "options": {"delta_net": {"num_heads": 2, "use_gate": True}}},
    "kda": {"layout": "kda+swiglu x2", "options": {"kda": {"num_heads": 2, "lower_bound": -5.0}}},
    "gdn2": {"layout": "gdn2+swiglu x2", "options": {"gdn2": {"num_heads": 2, "num_v_heads": 4}}},
    "gated_delta_product": {
        "layout": "gated_delta_product+swiglu x2",
        "options": {"gated_delta_product": {"num_heads": 2, "num_householder": 3}},
    },
    "retnet": {"layout": "retnet+mlp x2", "options": {"retnet": {"num_heads": 2}}},
    "rglru": {"layout": "rglru+glu x2", "options": {"rglru": {"num_heads": 2}}},
    "rwkv7": {"layout": "rwkv7+rwkv attention+rwkv rwkv7+rwkv", "options": {"rwkv7": {"num_heads": 2}}},
    "lru": {"layout": "lru+swiglu x2", "options": {"lru": {"state": 5}}},
    "rwkv4": {"layout": "rwkv4+rwkv x2", "options": {"rwkv": {"receptance": True}}},
    "s4d": {"layout": "s4d+swiglu x2", "options": {"s4d": {"state": 8}}},
    "tnn": {"layout": "tnn+swiglu x2", "options": {"tnn": {"rpe_dim": 8, "rpe_layers": 1}}},
    "lightnet": {
        "layout": "tpe lightnet+swiglu x2",
        "options": {"lightnet": {"num_heads": 4}, "tpe": {"num_modes": 4}},
    },
    "cosformer": {
        "layout": "cosformer+swiglu elu1+swiglu",
        "options": {"cosformer": {"num_heads": 4, "max_length": 16}, "elu1": {"num_heads": 2}},
        "positions": "sinusoidal",
    },
    "cosformer2": {"layout": "tpe cosformer2+sglu x2", "options": {"cosformer2": {"num_heads": 4}}},
    "mamba": {"layout": "mamba x2", "options": {"mamba": {"state": 4}}},
    "mamba2": {"layout": "mamba2 x2", "options": {"mamba2": {"state": 4, "head_dim": 8, "num_groups": 2}}},
    "mamba3": {"layout": "mamba3 x2", "options": {"mamba3": {"state": 4, "head_dim": 8}}},
    "hyena": {"layout": "hyena+swiglu x2", "options": {"hyena": {"num_modes": 4}}},
    "mh_hyena": {"layout": "mh_hyena+swiglu x2", "options": {"mh_hyena": {"num_heads": 4}}},
    "hyena_experts": {
        "layout": "hyena_experts+moe x2",
        "options": {
            "hyena_experts": {"num_experts": 4, "num_modes": 4, "balance_coefficient": 0.1},
            "moe": {"num_experts": 4, "inner": 8, "balance_coefficient": 0.1},
        },
    },
    "parallel": {
        "layout": "parallel+swiglu attention+swiglu short_conv mla",
        "options": {
            "parallel": {"mixers": {"attention": {"num_heads": 4}, "gdn": {"num_heads": 2}}},
            "attention": {"num_heads": 4},
            "mla": {"num_heads": 4, "kv_rank": 6, "nope_dim": 4, "rope_dim": 2, "v_dim": 5},
        },
        "norm_after": ["attention"],
    },
    "llama": {"layout": "attention+swiglu x2", "options": {"attention": {"num_heads": 4}}},
    "grouped": {
        "layout": "attention+swiglu tnl+sglu",
        "options": {"attention": {"num_heads": 8, "num_kv_heads": 2}, "tnl": {"num_heads": 2}},
        "positions": "learned",
        "num_positions": LENGTH,
        "dropout": 0.1,
    },
    "window": {
        "layout": "attention+swiglu x2",
        "options": {
            "attention": {"num_heads": 2, "window": 6, "qk_norm": True, "gate": "channel", "rope_fraction": 0.5}
        },
        "positions": "sinusoidal",
    },
}
PLUGIN = f"{Path(__file__).parents[2] / 'examples' / 'my_mixer.py'}:MyMixer"
MODELS_OF_PLUGINS = {"my_mixer": {"layout": "my_mixer+swiglu x2", "options": {"my_mixer": {"num_heads": 2}}}}
RINGS = ("tnl", "lightnet", "mamba", "mamba3", "rwkv7", "llama", "parallel", "hyena_experts")


def gradients(name, tokens, targets, cu_seqlens=None, *, mode="none", compiled=False, training=True):
    """The loss over all targets with what layers add to it, and the gradients of a model on one process."""
    from linnet.layers import dropout

    if name in MODELS_OF_PLUGINS:
        load_plugin(PLUGIN)
    config = ModelConfig(**SMALL | (MODELS | MODELS_OF_PLUGINS)[name])
    model = build_model(config, seed=1).double().train(training)
    for module in model.modules():
        if getattr(module, "starts_zero", False):  # so that no term is silent
            torch.nn.init.normal_(module.weight, 0.0, 0.1, torch.Generator().manual_seed(1))
    here = sequence.span()
    if here is not None:
        routing.balance_over(model, here.group)
    recompute.apply(model, mode, exchanges=here is not None, compiled=compiled)
    if compiled:
        for block in model.backbone.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    arguments = (tokens, targets) if cu_seqlens is None else (tokens, targets, cu_seqlens)
    with dropout.position(model, step=3, first_row=2, row_length=LENGTH), torch.set_grad_enabled(training):
        total, count, *extra = training_loss(model, model.loss)(*arguments)
        loss = sum(extra, total / (targets != -100).sum())
    found = {"loss": loss.detach(), "count": count}
    if training:
        loss.backward()
        found |= {key: p.grad for key, p in model.named_parameters()}
    return found


def difference(*arguments, method="auto", training=True, **options):
    """The largest relative difference between sums over the ranks and one process, for the loss and each gradient."""
    with sequence.sequence_parallel(dist.group.WORLD, method):
        found = gradients(*arguments, training=training, **options)
    for key, tensor in found.items():
        assert tensor is not None, key
        dist.reduce(tensor, 0)
    if dist.get_rank():
        return None
    whole = gradients(*arguments, training=training)
    assert found.pop("count") == whole.pop("count")
    worst = {key: ((found[key] - x).abs().max() / x.abs().max().clamp(min=1e-6)).item() for key, x in whole.items()}
    return max(worst.items(), key=lambda item: item[1])


def differences(cases):
    return {label: difference(*arguments, **options) for label, arguments, options in cases}


def batch(rows=2, length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 3:4] = -100
    return tokens[:, :-1].contiguous(), targets


def check(pool, ranks, cases):
    """Runs models (name, its batch, further options of `difference`) on spans."""
    labelled = [
        (f"{number} {name} {options}", (name, *batch), options) for number, (name, batch, options) in enumerate(cases)
    ]
    found = pool.run(ranks, differences, labelled, timeout=90)[0]
    assert {label: x for label, x in found.items() if not x[1] <= TOLERANCE} == {}


def test_models_on_spans_of_rows_equal_one_process(pool):
    """Whole rows, and documents: that end before a seam, at it and after it, and an empty one."""
    documents = torch.tensor([0, 5, 11, 12, 35, 36, 47, 48, 48], dtype=torch.int32)
    check(pool, 4, [(name, batch(), {}) for name in MODELS])
    check(pool, 4, [(name, (*batch(1, 2 * LENGTH), documents), {}) for name in MODELS])


def test_states_pass_from_rank_to_rank_for_any_mixer(pool):
    documents = torch.tensor([0, 7, 16, 17, 40, 48], dtype=torch.int32)
    plugin = [
        ("my_mixer", batch(), {}),
        ("my_mixer", batch(), {"mode": "selective"}),
        ("my_mixer", (*batch(1, 2 * LENGTH), documents), {"mode": "block"}),
    ]
    check(pool, 3, [*((name, batch(), {"method": "ring", "mode": "block"}) for name in RINGS), *plugin])


def test_recomputed_and_compiled_blocks_exchange_the_same(pool):
    cases = [("tnl", "block"), ("lightnet", "selective"), ("mh_hyena", "selective"), ("grouped", "block")]
    cases += [("window", "selective"), ("hyena_experts", "block"), ("gdn", "selective"), ("rwkv7", "block")]
    cases += [("mamba3", "block")]
    compiled = [("grouped", "block")]
    check(
        pool,
        2,
        [(name, batch(), {"mode": mode}) for name, mode in cases]
        + [(name, batch(), {"mode": mode, "compiled": True}) for name, mode in compiled],
    )


def test_rows_that_do_not_divide_are_filled_and_short_ones_too(pool):
    names = ("tnl", "hyena", "window", "grouped", "gdn", "mamba3")
    cases = [(name, batch(2, length), {"training": False}) for name in names for length in (23, 5, 1)]
    documents = torch.tensor([0, 4, 5, 6], dtype=torch.int32)
    cases += [(name, (*batch(1, 6), documents), {"training": False}) for name in ("tnl", "mamba", "window")]
    check(pool, 4, cases)


def test_what_spans_cannot_serve_is_refused_by_name():
    layout = {"layout": "hyena+swiglu mamba gdn mamba2 attention"}
    found = span_problems(ModelConfig(**SMALL | MODELS["hyena"] | layout), 1, 32)
    assert [line.split(":")[0] for line in found] == [
        "options.hyena.conv_width",
        "options.mamba.conv_width",
        "options.gdn.conv_width",
        "options.mamba2.conv_width",
        "options.attention.num_heads",
    ]
    assert [span_problems(ModelConfig(**SMALL | model), 6, 4) for model in MODELS.values()] == [[]] * len(MODELS)


@pytest.mark.parametrize("layer", ["attention", "mla"])
def test_heads_that_tensor_parallelism_leaves_too_few_of_are_named_with_both_degrees(layer):
    config = ModelConfig(**SMALL, layout=layer, options={layer: {"num_heads": 2}})
    assert span_problems(config, 12, 2) == []
    (problem,) = span_problems(config, 12, 2, tp=2)
    assert problem.startswith(f"options.{layer}.num_heads: 2 over parallel.tp: 2 cannot be shared by the 2 ranks")


SHARDED = {  # with FSDP, beside those of test_shard.py: one of each way to cut a row
    "grouped": {"run": {"recompute": "block"}, "accumulation": 2},
    "window": {"data": {"packing": "reset"}},
    "hyena": {"run": {"recompute": "selective"}},
    "hgrn complex": {"data": {"packing": "reset"}, "run": {"recompute": "block"}},
    "my_mixer": {"run": {"recompute": "block", "compile": True}},  # its blocks are not compiled
}


def settings(name):
    changes = SHARDED[name]
    model = SMALL | (MODELS | MODELS_OF_PLUGINS)[name] | {"vocab_size": 261, "init_std": 0.02}
    return test_shard.config("tnl", model=model, seq_len=LENGTH, batch_size=4 if "run" in changes else 9, **changes)


def train_spans(names):
    """Losses, gradient norms and weights of trainings on dp 2 x sp 2."""
    load_plugin(PLUGIN)
    found = {}
    for name in names:
        config = settings(name)
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"sp": 2})})
        found[name] = test_shard.train_rank(config)
    return found


def test_sharded_trainings_on_spans_equal_one_process(pool):
    load_plugin(PLUGIN)
    found = pool.run(4, train_spans, list(SHARDED), timeout=90)[0]
    worst = {}
    for name in SHARDED:
        alone = settings(name)
        alone = alone.model_copy(update={"accumulation": 1, "run": alone.run.model_copy(update={"compile": False})})
        losses, norms, weights = test_shard.train(alone, None)
        assert found[name][0] == pytest.approx(losses, rel=TOLERANCE), name
        assert found[name][1] == pytest.approx(norms, rel=TOLERANCE), name
        worst[name] = test_shard.difference(found[name][2], weights)
    assert {name: x for name, x in worst.items() if not x <= TOLERANCE} == {}
