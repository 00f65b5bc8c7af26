"""Every registered mixer without causality: directions, packed rows, equivariances, costs, one compiled model."""

from pathlib import Path

import pytest
import torch
from test_mixers import FORMS, LAYERS
from torch.utils.flop_counter import FlopCounterMode

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext, load_plugin
from linnet.layers.non_causal import mix_all
from linnet.layers.positions import Grid
from linnet.models.backbone import Backbone
from linnet.models.config import EncoderConfig, ModelConfig
from linnet.ops import linear_attention, use_backend
from linnet.ops.scans import BOTH, ORDERS, both_ways, reorder, restore

D, T = 16, 12
GRID = Grid((3, 4), prefix=2)
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_mixer.py"
# Left out: tpe's directions, which have tests of their own, and decays of lightnet that need causality.
FORMS = {
    name: [options for options in forms if options.get("decay") not in ("independent", "scalar")]
    for name, forms in FORMS.items()
    if name != "tpe"
}
MORE = {"hgrn": [{"complex": True, "theta_per_direction": True}]}
CASES = [
    (name, options)
    for name, forms in FORMS.items()
    for options in forms + MORE.get(name, [])
    if not (options.get("window") or options.get("block"))
    and (name != "attention" or options.get("rope", True) or not options)
] + [("attention", {"rope": False})]
CASES = [case for index, case in enumerate(CASES) if case not in CASES[:index]]
TWO_SCANS = [case for case in CASES if LAYERS[case[0]].non_causal == "two_scans"]
ONE_SCAN = [case for case in CASES if LAYERS[case[0]].non_causal == "one_scan"]
GENERIC = [case for case in CASES if LAYERS[case[0]].non_causal == "generic"] + [("my_mixer", {})]


def is_even(name, options):
    """Whether distances count and directions do not."""
    signed = name == "attention" and options.get("rope", True)
    return not (signed or options.get("lrpe_form") == "real" or options.get("theta_per_direction"))


def build(name, options=None, **context):
    load_plugin(f"{EXAMPLE}:MyMixer")
    cls = MIXERS.get(name) or LAYERS[name]
    options = {"num_heads": 2, **(options or {})} if "num_heads" in cls.Config.model_fields else options
    torch.manual_seed(0)
    place = {"d_model": D, "layer_index": 1, "num_layers": 3, "mixer_index": 1, "mixer_count": 3}
    mixer = cls(parse(cls.Config, options or {}), LayerContext(**place | {"causal": False} | context)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer


def inputs(batch=2, length=T):
    return torch.randn(batch, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def offsets(bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def test_every_mixer_has_one_of_the_forms():
    kinds = {name: LAYERS[name].non_causal for name in FORMS}
    assert kinds == {
        **dict.fromkeys(("attention", "cosformer2", "lightnet"), "one_scan"),
        **dict.fromkeys(("hgrn", "hgrn2", "tnl", "gla"), "two_scans"),
        **dict.fromkeys(("mamba2", "mamba3"), "generic"),
        **dict.fromkeys(("retnet", "rglru"), "generic"),
        **dict.fromkeys(("elu1", "cosformer"), "one_scan"),
        **dict.fromkeys(
            ("mamba", "hyena", "hyena_experts", "mh_hyena", "delta_net", "gdn", "kda", "mla", "parallel", "short_conv"),
            "generic",
        ),
        **dict.fromkeys(("rwkv", "rwkv7", "gdn2", "gated_delta_product"), "generic"),
        **dict.fromkeys(("lru", "rwkv4", "s4d", "tnn"), "generic"),
    }


@pytest.mark.parametrize("name, options", GENERIC)
def test_a_generic_mixer_is_called_once_for_both_directions(name, options):
    mixer, x = build(name, options), inputs()
    calls = []
    mixer.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[0]))
    y = mix_all(mixer, x, "both")
    assert calls == [4]
    explicit = (mixer(x)[0] + mixer(x.flip(1))[0].flip(1)) / 2
    torch.testing.assert_close(y, explicit)


@pytest.mark.parametrize("name, options", TWO_SCANS)
def test_two_scans_add_the_outputs_of_the_directions_before_the_norm(name, options):
    """What the norm reads is the sum of what it reads in the causal layer, forwards and backwards."""
    if not is_even(name, options):
        return
    mixer, causal, x = build(name, options), build(name, options, causal=True), inputs()
    found = []
    for layer in (mixer, causal):
        norm = layer.output.norm if name == "tnl" else layer.norm
        norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    y, none = mixer(x)
    assert none is None and y.shape == x.shape
    causal(x)
    causal(x.flip(1))
    torch.testing.assert_close(found[0], found[1] + found[2].flip(1))


@pytest.mark.parametrize("name", ["hgrn2", "tnl"])
@pytest.mark.parametrize("scan", ["forward", "both", "cross"])
def test_two_scans_on_a_grid_are_one_scan_per_order(name, scan):
    """The causal layer on explicit permutations, after two tokens that stay in front."""
    mixer, causal = build(name, axes=2, prefix=2, scan=scan), build(name, causal=True)
    x, found = inputs(length=GRID.tokens), []
    for layer in (mixer, causal):
        norm = layer.output.norm if name == "tnl" else layer.norm
        norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    mixer(x, None, None, GRID)
    orders = GRID.orders(scan)
    for order in orders:
        causal(x[:, order])
    torch.testing.assert_close(found[0], sum(o[:, p.argsort()] for o, p in zip(found[1:], orders, strict=True)))


def test_directions_may_have_rotations_of_their_own():
    options = {"complex": True, "theta_per_direction": True}
    mixer, shared, x = build("hgrn", options), build("hgrn", {"complex": True}), inputs()
    own = {name: p for name, p in mixer.named_parameters() if name != "theta_backwards"}
    assert shared.load_state_dict(own, strict=False).unexpected_keys == []
    assert not torch.allclose(mixer(x)[0], shared(x)[0])
    turned = mixer(x.flip(1))[0].flip(1)
    with torch.no_grad():
        exchanged = mixer.theta.clone()
        mixer.theta.copy_(mixer.theta_backwards)
        mixer.theta_backwards.copy_(exchanged)
        torch.testing.assert_close(mixer(x)[0], turned)
        mixer.theta.copy_(shared.theta)
        mixer.theta_backwards.copy_(shared.theta)
    torch.testing.assert_close(mixer(x)[0], shared(x)[0])


@pytest.mark.parametrize("scan", ["forward", "both", "cross"])
def test_both_ways_is_the_generic_form_for_an_identity(scan):
    """Linear attention alone, without projections and norm, on a grid after a prefix."""
    x = inputs(length=GRID.tokens)

    def attend(x, cu_seqlens):
        return x.cumsum(1)

    orders = ORDERS[scan]
    together = both_ways(attend, x, orders=orders, sides=GRID.sides, prefix=GRID.prefix)
    apart = [restore(attend(reorder(x, order, (3, 4), 2), None), order, (3, 4), 2) for order in orders]
    torch.testing.assert_close(together, sum(apart))
    permuted = [attend(x[:, p], None)[:, p.argsort()] for p in GRID.orders(scan)]
    torch.testing.assert_close(together, sum(permuted))


@pytest.mark.parametrize("name, options", CASES + [("my_mixer", {})])
def test_packed_rows_are_separate_rows(name, options):
    mixer, x = build(name, options), inputs(batch=1)
    bounds = [0, 1, 7, 7, T]
    packed = mix_all(mixer, x, "both", offsets(bounds))
    alone = [mix_all(mixer, x[:, a:b], "both") for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("name, options", CASES)
def test_gradients_of_the_forms_agree(name, options):
    mixer, results = build(name, options), []
    for form in ("chunked", "reference"):
        x = inputs().requires_grad_()
        mixer.zero_grad()
        with use_backend(form):
            (mix_all(mixer, x, "both") * torch.linspace(-1, 1, D, dtype=torch.float64)).sum().backward()
        results.append([x.grad, *(p.grad for p in mixer.parameters())])
        assert all(grad is not None and grad.abs().max() > 0 for grad in results[-1])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name, options", [case for case in CASES if is_even(*case)])
def test_reversing_a_row_reverses_the_output(name, options):
    mixer, x = build(name, options), inputs()
    torch.testing.assert_close(mix_all(mixer, x.flip(1), "both"), mix_all(mixer, x, "both").flip(1))


@pytest.mark.parametrize("name, options", [case for case in TWO_SCANS + GENERIC if is_even(*case)])
@pytest.mark.parametrize("scan", ["cross", "series"])
def test_turning_a_grid_by_half_turns_the_output(name, options, scan):
    inside = "both" if scan == "series" else scan
    mixer, x = build(name, options, axes=2, scan=inside), inputs(length=12)
    grid = Grid((3, 4))
    torch.testing.assert_close(mix_all(mixer, x.flip(1), scan, None, grid), mix_all(mixer, x, scan, None, grid).flip(1))


@pytest.mark.parametrize("name, options", [case for case in ONE_SCAN if is_even(*case)])
def test_one_scan_commutes_with_the_mirror_of_each_axis(name, options):
    """Why a position encoding with own directions is needed to tell left from right."""
    mixer, x, grid = build(name, options, axes=2), inputs(length=12), Grid((3, 4))
    y = mix_all(mixer, x, "both", None, grid).view(2, 3, 4, D)
    for axis in (1, 2):
        mirrored = x.view(2, 3, 4, D).flip(axis).flatten(1, 2)
        torch.testing.assert_close(mix_all(mixer, mirrored, "both", None, grid), y.flip(axis).flatten(1, 2))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    changed = mix_all(mixer, x[:, order], "both", None, grid)
    blind = name in ("attention", "elu1") or options.get("lrpe") is False  # without an encoding, places do not count
    assert torch.allclose(changed, y.flatten(1, 2)[:, order]) == blind


def test_exchanging_the_axes_of_a_grid_and_of_the_channels_transposes_the_output():
    mixer, x = build("cosformer2", axes=2), inputs(length=12)
    y = mixer(x, None, None, Grid((3, 4)))[0].view(2, 3, 4, D)
    with torch.no_grad():  # the first half of a head's channels follows the rows, the other one the columns
        for weight in (mixer.q_proj.weight, mixer.k_proj.weight):
            weight.copy_(weight.view(2, 2, 4, D).flip(1).flatten(0, 2))
        mixer.lrpe.theta.copy_(mixer.lrpe.theta.view(2, 2, 4).flip(1).flatten(1))
    transposed = x.view(2, 3, 4, D).transpose(1, 2).flatten(1, 2)
    found = mixer(transposed, None, None, Grid((4, 3)))[0].view(2, 4, 3, D)
    torch.testing.assert_close(found, y.transpose(1, 2))


@pytest.mark.parametrize("name, options", ONE_SCAN)
def test_the_last_token_is_the_last_causal_token(name, options):
    x = inputs()
    last = build(name, options, causal=True)(x)[0][:, -1]
    torch.testing.assert_close(build(name, options)(x)[0][:, -1], last)


@pytest.mark.parametrize("name, options", [(name, forms[0]) for name, forms in FORMS.items()])
def test_a_grid_of_one_axis_is_a_sequence(name, options):
    x = inputs()
    alone = mix_all(build(name, options), x, "both")
    torch.testing.assert_close(mix_all(build(name, options), x, "both", None, Grid((T,))), alone)
    if LAYERS[name].non_causal != "one_scan":
        flat = mix_all(build(name, options, axes=2), x, "both", None, Grid((1, T)))
        torch.testing.assert_close(flat, alone)


REACH = {"short_conv": {"conv_width": GRID.tokens}}  # a convolution of three tokens sees no far ones


@pytest.mark.parametrize("name, options", [(name, forms[0] | REACH.get(name, {})) for name, forms in FORMS.items()])
@pytest.mark.parametrize("scan", ["both", "cross"])
def test_tokens_before_a_grid_see_the_grid_in_one_scan_only(name, options, scan):
    mixer, x = build(name, options, axes=2, prefix=2, scan=scan), inputs(length=GRID.tokens)
    changed = x.clone()
    changed[:, 9] += 1
    before, after = (mix_all(mixer, rows, scan, None, GRID)[:, :2] for rows in (x, changed))
    assert torch.allclose(before, after) == (LAYERS[name].non_causal != "one_scan")
    changed = x.clone()
    changed[:, :2] += 1  # every token of the grid sees the prefix; a token shift only sees the last token of it
    difference = (mix_all(mixer, changed, scan, None, GRID) - mix_all(mixer, x, scan, None, GRID)).abs().amax((0, 2))
    assert (difference[2:] > 1e-9).all() or (name == "rwkv" and difference[2] > 1e-9)


def test_the_encoding_of_a_grid_is_relative_on_each_axis():
    """Queries and keys at shifted coordinates, in LRPE of both forms and in RoPE."""
    for name, options, part in (
        ("cosformer2", {}, "lrpe"),
        ("tnl", {"lrpe": "all_layers"}, "lrpe"),
        ("tnl", {"lrpe": "all_layers", "lrpe_form": "real"}, "lrpe"),
        ("attention", {}, "rope"),
    ):
        encode = getattr(build(name, options, axes=2), part)
        q, k = torch.randn(2, 1, 12, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        places = Grid((3, 4)).positions()
        scores = []
        for shift in ((0, 0), (5, 0), (0, 7)):
            moved = places + torch.tensor(shift, dtype=torch.int32)
            scores.append(torch.einsum("bthd,bshd->bhts", encode(q, moved), encode(k, moved)))
        torch.testing.assert_close(scores[1], scores[0])
        torch.testing.assert_close(scores[2], scores[0])
        assert not torch.allclose(torch.einsum("bthd,bshd->bhts", q, k), scores[0])


@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 12]])
def test_linear_attention_without_causality_is_its_definition(bounds):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, T, 2, n, dtype=torch.float64, generator=generator) for n in (3, 3, 5))
    o = linear_attention(q, k, v, scale=0.5, cu_seqlens=None if bounds is None else offsets(bounds))
    seen = torch.ones(T, T, dtype=torch.float64)
    if bounds is not None:
        number = torch.tensor([0] * 5 + [1] * 7)
        seen = (number[:, None] == number).double()
    scores = torch.einsum("bthk,bshk->bhts", q, k) * seen
    torch.testing.assert_close(o, 0.5 * torch.einsum("bhts,bshv->bthv", scores, v))


@pytest.mark.parametrize("name, options", [case for case in CASES if case not in GENERIC])
def test_a_state_is_refused(name, options):
    with pytest.raises(ValueError, match="no next token"):
        build(name, options)(inputs(), {})


@pytest.mark.parametrize(
    "layout, options, key",
    [
        ("attention", {"attention": {"window": 4, "num_heads": 2}}, "options.attention.window"),
        ("hgrn", {"hgrn": {"theta_per_direction": True}}, "options.hgrn.theta_per_direction"),
        ("lightnet", {"lightnet": {"decay": "independent", "num_heads": 2}}, "options.lightnet.decay"),
    ],
)
def test_options_that_need_causality_are_refused(layout, options, key):
    with pytest.raises(ConfigError, match=key):
        parse(EncoderConfig, {"d_model": D, "layout": layout, "options": options})


def test_rotations_of_each_direction_need_two_directions():
    values = {"d_model": D, "layout": "hgrn", "options": {"hgrn": {"complex": True, "theta_per_direction": True}}}
    assert parse(EncoderConfig, values).options["hgrn"]["theta_per_direction"]
    for cls, more in ((EncoderConfig, {"scan": "forward"}), (ModelConfig, {})):
        with pytest.raises(ConfigError, match="theta_per_direction.*one direction"):
            parse(cls, values | more)


@pytest.mark.parametrize("scan, scan_sum", [("both", False), ("cross", True)])
def test_scans_of_mamba_may_have_weights_of_their_own(scan, scan_sum):
    """By hand: causal layers with the weights of each direction, on the permuted rows, between shared projections."""
    mixer = build("mamba", {"weights_per_direction": True}, axes=2, prefix=2, scan=scan, scan_sum=scan_sum)
    x, layers = inputs(length=GRID.tokens), []
    for part in (mixer, mixer.backwards):
        layer = build("mamba", causal=True)
        state = {name: p for name, p in part.named_parameters() if not name.startswith("backwards")}
        assert layer.load_state_dict(dict(mixer.named_parameters()) | state, strict=False).missing_keys == []
        layers.append(layer)
    outputs = []
    for order in ORDERS[scan]:
        y = layers[order.backwards](reorder(x, order, GRID.sides, GRID.prefix))[0]
        outputs.append(restore(y, order, GRID.sides, GRID.prefix))
    expected = sum(outputs) / (1 if scan_sum else len(outputs))
    torch.testing.assert_close(mix_all(mixer, x, scan, None, GRID, scan_sum), expected, rtol=1e-10, atol=1e-10)
    packed, bounds = inputs(1)[:, :T], [0, 5, T]
    alone = [mixer(packed[:, a:b])[0] for a, b in zip(bounds, bounds[1:], strict=False)]
    if scan == "both":
        torch.testing.assert_close(mixer(packed, None, offsets(bounds))[0], torch.cat(alone, 1))


def test_weights_of_each_direction_need_two_directions():
    values = {"d_model": D, "layout": "mamba", "options": {"mamba": {"weights_per_direction": True}}}
    assert parse(EncoderConfig, values).options["mamba"]["weights_per_direction"]
    for cls, more in ((EncoderConfig, {"scan": "forward"}), (ModelConfig, {})):
        with pytest.raises(ConfigError, match="weights_per_direction.*one direction"):
            parse(cls, values | more)


def test_flops_are_those_of_the_passes():
    """Projections once for two scans, everything twice for the generic form, all pairs for attention."""

    def count(name, causal=False, **options):
        with torch.device("meta"):
            mixer = build(name, options, causal=causal)
        with FlopCounterMode(display=False) as counter:
            x = torch.empty(1, 64, D, device="meta", dtype=torch.float64)
            mixer(x) if causal else mix_all(mixer, x, "both")
        return counter.get_total_flops()

    weights = 2 * 64 * D * D
    assert count("mamba") == 2 * count("mamba", causal=True)
    for name, matrices in (("hgrn2", 4), ("hgrn", 4)):
        scan = count(name, causal=True) - matrices * weights
        assert scan > 0 and count(name) == matrices * weights + 2 * scan
    assert count("attention", rope=False) == 4 * weights + 4 * 64 * 64 * D
    assert build("attention").flops_masked(64) == 0 < build("attention", causal=True).flops_masked(64)
    heads = D // 2
    assert count("cosformer2") == 4 * weights + 2 * 2 * 64 * D * heads + 2 * 2 * 64 * D * (2 * heads)


def test_a_backbone_on_a_grid_compiles_into_one_graph():
    layout = "attention+mlp hgrn2 mamba"
    options = {name: {"num_heads": 2} for name in ("attention", "hgrn2")}
    values = {"d_model": D, "layout": layout, "options": options, "scan": "both", "drop_path": 0.3, "dropout": 0.1}
    torch.manual_seed(0)
    model = Backbone(parse(EncoderConfig, values), causal=False, axes=2, prefix=1).double()
    model.dropout_position.given = True
    x, grid = inputs(length=13), Grid((3, 4), 1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model(x, grid=grid)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x, grid=grid)[0])


def test_orders_are_undone():
    x = torch.arange(2 * 26).view(2, 26)
    for order in ORDERS["cross"]:
        moved = reorder(x, order, (2, 3, 4), 2)
        assert torch.equal(restore(moved, order, (2, 3, 4), 2), x) and torch.equal(moved[:, :2], x[:, :2])
    with pytest.raises(ValueError, match="2 x 3"):
        reorder(x, ORDERS["cross"][2], (2, 3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        both_ways(lambda x, cu_seqlens: x, x[:1], cu_seqlens=offsets([0, 26]), orders=BOTH, sides=(2, 13))
