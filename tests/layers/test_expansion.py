"""State expansion of HGRN and HGRN2 (paper 002, 3.1) and decays of LightNet: definitions, counts, starts, refusals."""

import pytest
import torch
from test_mixers import build, inputs

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext
from linnet.layers.mixers.diagonal.hgrn import build_expansion, rank
from linnet.models import ModelConfig, build_model, count_parameters
from linnet.ops.gated import narrow
from linnet.ops.gated.reference import gated_reference

FORMULAS = {
    "naive": lambda d, n: n * d * d,
    "lr": lambda d, n: d * rank(d, n) * (n + 1),
    "glt": lambda d, n: d * d,
    "glti": lambda d, n: d * d + n * n,
    "krp": lambda d, n: n * d,
    "kp": lambda d, n: d * d + n,
}
PROJECTIONS = ("in_proj", "f_proj", "gate_proj")


def dense(module: torch.nn.Module, width: int) -> torch.Tensor:
    """The matrix [n D, D] of a linear map, from its columns."""
    return module(torch.eye(width, dtype=torch.float64)).T


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("width, expand", [(24, 1), (24, 4), (32, 8)])
def test_an_expansion_has_the_parameters_of_its_formula(kind, width, expand):
    module = build_expansion(kind, width, expand, bias=False)
    assert sum(p.numel() for p in module.parameters()) == FORMULAS[kind](width, expand)
    biased = build_expansion(kind, width, expand, bias=True)
    assert sum(p.numel() for p in biased.parameters()) == FORMULAS[kind](width, expand) + expand * width


def test_expansions_are_the_products_of_table_2():
    """Paper 002, Table 2, in Einstein's notation."""
    x = torch.randn(3, 12, dtype=torch.float64)
    made = {kind: build_expansion(kind, 12, 4, bias=False).double() for kind in FORMULAS}
    with torch.no_grad():
        made["glti"].mix.normal_()
    groups, rows = x.view(3, 4, 3), made["glt"].weight.view(4, 12, 3)
    expected = {
        "lr": torch.einsum("bd,rd,mr->bm", x, made["lr"].down.weight, made["lr"].up.weight),
        "glt": torch.einsum("bne,nde->bnd", groups, rows),
        "glti": torch.einsum("bme,mde,mn->bnd", groups, made["glti"].weight.view(4, 12, 3), made["glti"].mix),
        "krp": torch.einsum("bd,nd->bnd", x, made["krp"].weight.view(4, 12)),
        "kp": torch.einsum("bd,cd,n->bnc", x, made["kp"].dense.weight, made["kp"].scales),
    }
    for kind, y in expected.items():
        torch.testing.assert_close(made[kind](x), y.reshape(3, 48))


@pytest.mark.parametrize("kind", ["lr", "glt", "glti", "krp", "kp"])
def test_every_expansion_is_the_naive_one_with_its_matrix(kind):
    """`kp` with W = a (x) W is `naive`; so are the others with the matrix that their factors make."""
    options = {"expand": 2, "lower_bound": "inclusive"}
    mixer, naive, x = build("hgrn", options | {"expansion": kind}), build("hgrn", options), inputs()
    others = {name: p for name, p in mixer.state_dict().items() if name.partition(".")[0] not in PROJECTIONS}
    matrices = {f"{name}.weight": dense(getattr(mixer, name), 24) for name in PROJECTIONS}
    naive.load_state_dict(others | matrices)
    if kind == "kp":
        product = torch.kron(mixer.in_proj.scales[:, None], mixer.in_proj.dense.weight)
        torch.testing.assert_close(matrices["in_proj.weight"], product)
    torch.testing.assert_close(mixer(x)[0], naive(x)[0])


def test_an_expansion_of_one_is_hgrn_bit_for_bit():
    shape = {"d_model": 16, "layout": "hgrn+swiglu x2", "vocab_size": 32}
    plain = parse(ModelConfig, shape)
    one = parse(ModelConfig, shape | {"options": {"hgrn": {"expand": 1, "expansion": "naive", "readout": "sum"}}})
    assert plain.model_dump() == one.model_dump()  # and so the digests of old trainings
    tokens = torch.randint(0, 32, (2, 9))
    assert torch.equal(build_model(plain, seed=1)(tokens)[0], build_model(one, seed=1)(tokens)[0])


def test_an_expanded_state_is_the_sum_of_its_rows():
    """y = Norm(sum_i h_i * o_i) W_o with rows that have recurrences of their own and share the bound of a channel."""
    mixer, x = build("hgrn", {"expand": 3, "expansion": "krp"}), inputs()
    beta = mixer.bounds[0](1, "inclusive").repeat(3)
    f = beta + (1 - beta) * torch.sigmoid(mixer.f_proj(x))
    c, h, rows = torch.nn.functional.silu(mixer.in_proj(x)), torch.zeros(2, 72, dtype=torch.float64), []
    for t in range(x.shape[1]):
        h = f[:, t] * h + (1 - f[:, t]) * c[:, t]
        rows.append(h)
    gated = torch.stack(rows, 1) * torch.nn.functional.silu(mixer.gate_proj(x))
    y = mixer.out_proj(mixer.norm(gated.view(2, -1, 3, 24).sum(2)))
    torch.testing.assert_close(mixer(x)[0], y)


@pytest.mark.parametrize("init", ["normal", "xavier"])
@pytest.mark.parametrize("kind", FORMULAS)
def test_initial_outputs_have_the_variance_of_a_dense_layer(kind, init):
    options = {"hgrn": {"expand": 4, "expansion": kind}}
    values = {"d_model": 128, "layout": "hgrn x2", "options": options, "vocab_size": 8, "init_std": 0.05, "init": init}
    expected = 128 * (0.05**2 if init == "normal" else 2 / (128 + 4 * 128))
    x, found = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)), []
    for seed in range(4):
        model = build_model(parse(ModelConfig, values), seed=seed)
        found += [block.mixer.in_proj(x).var().item() for block in model.backbone.blocks]
        found += [block.mixer.f_proj(x).var().item() for block in model.backbone.blocks]
    # of kp the rows have one common factor each, so that 64 factors decide
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.5 if kind == "kp" else 0.12)


@pytest.mark.parametrize(
    "mixer, options, key",
    [
        ("hgrn", {"expand": 5, "expansion": "glt"}, "options.hgrn.expand: 5"),
        ("hgrn", {"readout": "concat"}, "options.hgrn.readout"),
        ("hgrn", {"expand": 2, "complex": True}, "options.hgrn.expand: 2"),
        ("hgrn", {"expand": 2, "norm_first": True}, "options.hgrn.norm_first"),
        ("lightnet", {"decay": "fast"}, "options.lightnet.decay"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(mixer, options, key):
    with pytest.raises(ConfigError, match=key):
        parse(ModelConfig, {"d_model": 24, "layout": mixer, "options": {mixer: options}})


# Paper 002, Table 3, and paper 003, Table 4: name -> layout, depth, options, printed parameters. GLU widths are those
# that give the printed counts: 8/3 D for HGRN, 3,840 for KRP, whose projections are 3 D^2 smaller.
PRINTED = {
    "hgrn": ("hgrn+swiglu", 26, {"swiglu": {"inner": 2736}}, 0.379e9),
    "lr 4": ("hgrn+swiglu", 26, {"hgrn": {"expand": 4, "expansion": "lr"}}, 0.385e9),
    "lr 8": ("hgrn+swiglu", 26, {"hgrn": {"expand": 8, "expansion": "lr"}}, 0.386e9),
    "glt 4": ("hgrn+swiglu", 26, {"hgrn": {"expand": 4, "expansion": "glt"}}, 0.386e9),
    "glti 4": ("hgrn+swiglu", 26, {"hgrn": {"expand": 4, "expansion": "glti"}}, 0.386e9),
    "krp 4": ("hgrn+swiglu", 26, {"hgrn": {"expand": 4, "expansion": "krp"}, "swiglu": {"inner": 3840}}, 0.386e9),
    "kp 4": ("hgrn+swiglu", 26, {"hgrn": {"expand": 4, "expansion": "kp"}}, 0.386e9),
    "hgrn2 4": ("hgrn2+sglu", 26, {"hgrn2": {"num_heads": 256}}, 0.385e9),
    "hgrn2 8": ("hgrn2+sglu", 26, {"hgrn2": {"num_heads": 128}}, 0.385e9),
    "hgrn2 128": ("hgrn2+sglu", 26, {"hgrn2": {"num_heads": 8}}, 0.385e9),
    "lightnet": ("lightnet+swiglu", 25, {}, 379e6),
    "lightnet no share": ("lightnet+swiglu", 25, {"lightnet": {"decay": "independent"}}, 385e6),
}


@pytest.mark.parametrize("row", PRINTED)
def test_variants_have_the_printed_parameters(row):
    layout, depth, options, printed = PRINTED[row]
    channel = layout.partition("+")[2]
    layers = {channel: {"inner": 2816}} | options
    total, _ = count_parameters(_at_1024(layout, depth, layers))
    assert abs(total / printed - 1) < 0.0025, total


def _at_1024(layout: str, depth: int, options: dict) -> ModelConfig:
    head = "tpe " if layout.startswith("lightnet") else ""
    values = {"d_model": 1024, "layout": f"{head}{layout} x{depth}", "options": options, "vocab_size": 50_272}
    return parse(ModelConfig, values)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 11, 19]])
def test_heads_of_a_few_channels_can_be_scanned(width, bounds):
    """The form that a GPU uses for them, against the definition: outputs, final state and all gradients."""
    heads, batch = 8 // width, 2 if bounds is None else 1
    shape, states = (batch, 19, heads, width), batch if bounds is None else 4
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4))
    initial = torch.randn(states, heads, width, width, dtype=torch.float64, generator=generator)
    given = [q, k, v, torch.nn.functional.logsigmoid(gate), initial]
    offsets = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    results = []
    for form in (narrow.narrow_attention, gated_reference):
        tensors = [one.clone().requires_grad_() for one in given]
        o, final = form(*tensors, offsets, 0.7)
        (o.square().sum() + (final * torch.linspace(0, 1, final.numel()).view_as(final)).sum()).backward()
        results.append([o, final, *(one.grad for one in tensors)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("options", [{}, {"tie": False}])
def test_hgrn2_of_narrow_heads_agrees_in_both_forms(options, monkeypatch):
    """The layer as it runs on a GPU, with the scan in place of products of matrices, forwards, packed and carried."""
    mixer, x = build("hgrn2", {"num_heads": 12, **options}), inputs(batch=1)
    cu = torch.tensor([0, 5, 37], dtype=torch.int32)
    found = []
    for taken in (False, True):
        for module in ("linnet.ops.gated", "linnet.ops.gated.forget"):
            monkeypatch.setattr(f"{module}.takes", lambda q, taken=taken: taken)
        found.append((mixer(x)[0], mixer(x, cu_seqlens=cu)[0]))
    torch.testing.assert_close(found[1], found[0])
    plain, packed = found[0]
    calls = []
    monkeypatch.setattr(narrow, "diagonal_scan", lambda *a, f=narrow.diagonal_scan, **k: calls.append(1) or f(*a, **k))
    torch.testing.assert_close(mixer(x)[0], plain)
    torch.testing.assert_close(mixer(x, cu_seqlens=cu)[0], packed)
    first, state = mixer(x[:, :11], mixer.init_state(1, 37, dtype=torch.float64))
    torch.testing.assert_close(torch.cat([first, mixer(x[:, 11:], state)[0]], 1), plain)
    assert len(calls) == 4


def test_a_cpu_does_not_scan():
    assert not narrow.takes(torch.zeros(1, 4, 1, 4))


@pytest.mark.parametrize(("options", "key"), [({"expand": 4}, "expand: 4"), ({"expansion": "lr"}, "expansion: lr")])
def test_tensor_parallelism_refuses_an_expansion_by_its_key(options, key):
    assert build("hgrn", options).tp_problems()[0].startswith(f"{key} cannot be split")


def test_an_own_input_gate_adds_one_projection():
    counts = []
    for tie in (True, False):
        cls = MIXERS["hgrn2"]
        mixer = cls(parse(cls.Config, {"num_heads": 2, "tie": tie}), LayerContext(d_model=24))
        counts.append(sum(p.numel() for p in mixer.parameters()))
    assert counts[1] - counts[0] == 24 * 24
    assert parse(cls.Config, {"tie": True}).model_dump() == parse(cls.Config, {}).model_dump()


def test_decays_of_lightnet_are_their_definitions():
    for decay, more in (("independent", 2 * 24 * 12), ("scalar", 24 * 2), ("none", 0)):
        mixer, x = build("lightnet", {"decay": decay, "lrpe": False}), inputs()
        counts = [sum(p.numel() for p in one.parameters()) for one in (mixer, build("lightnet", {"lrpe": False}))]
        assert counts[0] - counts[1] == more
        heads = (2, 12)
        q, k = (torch.nn.functional.silu(p(x)).unflatten(-1, heads) for p in (mixer.q_proj, mixer.k_proj))
        v, a = mixer.v_proj(x).unflatten(-1, heads), torch.ones(2, 37, 2, 12, dtype=torch.float64)
        if decay == "independent":
            a = torch.sigmoid(mixer.decay_up(mixer.decay_down(x))).unflatten(-1, heads)
        elif decay == "scalar":
            a = torch.sigmoid(mixer.decay_proj(x))[..., None].expand(2, 37, 2, 12)
        if decay != "none":
            k = k * (1 - a)
        matrix, rows = torch.zeros(2, 2, 12, 12, dtype=torch.float64), []
        for t in range(37):
            matrix = a[:, t, :, :, None] * matrix + k[:, t, :, :, None] * v[:, t, :, None]
            rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], matrix).flatten(-2))
        torch.testing.assert_close(mixer(x)[0], mixer.output(torch.stack(rows, 1), x))
