"""Every registered mixer, asked only through its contract: forms agree, state carries, documents reset, causality."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.func import functional_call, grad, vmap

from linnet.config import parse
from linnet.layers import CHANNELS, MIXERS, LayerContext, Mixer
from linnet.ops import use_backend
from linnet.parallel import tensor

D, B, T = 24, 2, 37

# Every layer with the contract of a mixer, in the place of a channel mixer too.
LAYERS = MIXERS | {name: cls for name, cls in CHANNELS.items() if issubclass(cls, Mixer)}

# Each kind of mixer in its default form and in each form that changes the mathematics.
FORMS = {
    "attention": [
        {},
        {"window": 5},
        {"rope": False},
        {"num_kv_heads": 1},
        {"head_dim": 6, "qk_norm": True, "num_kv_heads": 1, "window": 5},
        {"block": 5, "num_kv_heads": 1},
        {"block": 8, "scores": "relu", "out_norm": "srmsnorm", "rope": False, "lrpe": True},
        {"block": 64, "scores": "relu", "num_kv_heads": 1, "out_norm": "layernorm"},
        {"rope": False, "lrpe": True, "lrpe_reflection": "householder", "out_norm": "rmsnorm"},
        {
            "gate": "channel",
            "qk_norm": True,
            "qk_norm_kind": "zero_centred_rmsnorm",
            "head_dim": 8,
            "rope_fraction": 0.5,
        },
        {"gate": "head", "qk_norm": True, "qk_norm_over": "width", "num_kv_heads": 1, "scale": 0.1, "window": 5},
        {"rope_scaling": {"kind": "yarn", "factor": 4.0, "length": 16}, "out_norm": "zero_centred_rmsnorm"},
    ],
    "cosformer": [{}, {"max_length": 20, "eps": 1e-3}],
    "cosformer2": [{}, {"gate_input": "residual"}, {"lrpe_shared_heads": True}],
    "delta_net": [{}, {"use_gate": True, "num_v_heads": 4, "allow_neg_eigval": True}],
    "elu1": [{}, {"num_heads": 4}],
    "gated_delta_product": [{}, {"num_householder": 3, "num_v_heads": 4, "allow_neg_eigval": False}],
    "gdn": [
        {},
        {"num_v_heads": 4, "allow_neg_eigval": True},
        {"use_gate": False, "head_dim": 5, "expand_v": 1.0, "conv_width": 2},
    ],
    "gdn2": [{}, {"num_v_heads": 4, "allow_neg_eigval": True, "gate": "full"}],
    "gla": [{}, {"expand_k": 0.5}],
    "hgrn": [
        {},
        {"complex": True},
        {"norm_first": True, "norm_eps": 1e-2, "lower_bound": "none"},
        {"expand": 2},
        {"expand": 2, "readout": "concat"},
        {"expand": 3, "expansion": "lr"},
        {"expand": 2, "expansion": "glt"},
        {"expand": 2, "expansion": "glti"},
        {"expand": 3, "expansion": "krp"},
        {"expand": 2, "expansion": "kp"},
    ],
    "hgrn2": [
        {},
        {"lower_bound": "exclusive"},
        {"lower_bound": "none", "output_activation": "none"},
        {"tie": False},
        {"num_heads": 8},
    ],
    "hyena": [{}, {"num_modes": 3, "conv_width": 4}, {"proj_groups": 4, "expand": 2, "num_modes": 2}],
    "hyena_experts": [{}, {"num_experts": 3, "num_active": 3, "expert_width": 5}, {"routing": "zero_logits"}],
    "kda": [
        {},
        {"num_v_heads": 4, "allow_neg_eigval": True, "lower_bound": -5.0, "gate_bias": False},
        {"gate": "full", "decay": "full", "head_dim": 5, "expand_v": 2.0},
    ],
    "lightnet": [{}, {"lrpe": False}, {"decay": "independent"}, {"decay": "scalar", "lrpe": False}, {"decay": "none"}],
    "lru": [{}, {"state": 7, "r_min": 0.8, "r_max": 0.99, "max_phase": 0.3}],
    "mamba": [{}, {"expand": 1, "state": 3, "dt_rank": 5, "conv_width": 2, "norms": True}],
    "mamba2": [
        {},
        {"head_dim": 4, "num_groups": 4, "state": 3, "norm_before_gate": True, "dt_limit": [0.05, 0.5]},
        {"expand": 1, "head_dim": 4, "num_groups": 2, "state": 4, "conv_width": 2, "conv_bias": False},
        {"state": 5, "norm_before_gate": True},
        {"state": 5, "norm": False},
    ],
    "mamba3": [{}, {"state": 6, "head_dim": 4, "num_groups": 2, "rope_fraction": 1.0}, {"expand": 1, "state": 5}],
    "mh_hyena": [{}, {"num_modes": 5}],
    "mla": [
        {"kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5, "rope_interleaved": True},
        {"kv_rank": 5, "q_rank": 7, "nope_dim": 4, "rope_dim": 2, "v_dim": 8, "gate": True, "scale": 0.2, "bias": True},
        {"kv_rank": 8, "nope_dim": 4, "rope_dim": 3, "v_dim": 7, "rope": False, "gate": True, "gate_per_head": True},
    ],
    "parallel": [
        {"mixers": {"attention": {"num_heads": 2}, "mamba": {}}},
        {
            "mixers": {"gdn": {"num_heads": 2}, "attention": {"num_heads": 2, "window": 5}, "hgrn2": {"num_heads": 2}},
            "input_scales": {"attention": 0.5},
            "output_scales": {"gdn": 2.0, "hgrn2": 0.25},
        },
    ],
    "retnet": [{}, {"num_heads": 4, "expand_v": 1.0, "norm": "srmsnorm"}],
    "rglru": [{}, {"channels": 20, "num_heads": 4, "conv_width": 2}],
    "rwkv": [{}, {"inner": 20}, {"receptance": True}],
    "rwkv4": [{}],
    "rwkv7": [{}, {"decay_rank": 3, "rate_rank": 4, "value_rank": 5, "gate_rank": 6}],
    "s4d": [
        {},
        {"state": 6, "init": "inv", "discretisation": "bilinear"},
        {"state": 4, "discretisation": "none", "output": "linear"},
    ],
    "short_conv": [{}, {"conv_width": 4, "bias": True}],
    "tnl": [
        {},
        {"lrpe": "all_layers", "gate": "full", "gate_activation": "none"},
        {"lrpe": "all_layers", "lrpe_form": "real", "gate": "none"},
        {"slopes": "paper_eq10", "gate_first": True, "v_activation": "silu", "qk_activation": "elu1"},
        {"slopes": "log_spaced", "layer_factor": False, "gate_input": "residual"},
        {"slopes": "geometric", "head_dim": 5, "gate": "full", "norm": "rmsnorm"},
        {"decay": "none", "gate": "none", "qk_activation": "elu", "norm": "layernorm"},
        {"decay": "none", "lrpe": "all_layers", "lrpe_form": "real", "lrpe_reflection": "householder"},
    ],
    "tnn": [{}, {"expand": 1, "decay": 1.0, "rpe_dim": 5, "rpe_layers": 0}],
    "tpe": [{}, {"decay": "fixed", "residual": True}],
}
CASES = [(name, options) for name in FORMS for options in FORMS[name]]


def build(name, options=None, layer=1, layers=3, d_model=D):
    """A mixer in float64, in the middle of a stack, with every weight random so that no term is silent."""
    mixer_class = LAYERS[name]
    if "num_heads" in mixer_class.Config.model_fields:
        options = {"num_heads": 2, **(options or {})}
    torch.manual_seed(0)
    context = LayerContext(d_model=d_model, layer_index=layer, num_layers=layers, mixer_index=layer, mixer_count=layers)
    mixer = mixer_class(parse(mixer_class.Config, options or {}), context)
    mixer = mixer.double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer


def inputs(batch=B, length=T, d_model=D):
    return torch.randn(batch, length, d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def state_of(mixer, batch, length):
    return mixer.init_state(batch, length, dtype=torch.float64)


def test_every_registered_mixer_is_tested_here():
    assert set(FORMS) == {name for name, cls in LAYERS.items() if cls.__module__.startswith("linnet.layers")}


@pytest.mark.parametrize("name, options", CASES)
def test_parallel_form_reference_form_and_recurrence_agree(name, options):
    mixer, x = build(name, options), inputs()
    y, none = mixer(x)
    assert none is None
    with use_backend("reference"):
        torch.testing.assert_close(mixer(x)[0], y)
    with_state, final = mixer(x, state_of(mixer, B, T))
    torch.testing.assert_close(with_state, y)
    state, steps = state_of(mixer, B, T), []
    with torch.no_grad():
        for t in range(T):
            out, state = mixer.step(x[:, t], state)
            steps.append(out)
    torch.testing.assert_close(torch.stack(steps, 1), y)
    for key, value in final.items():
        torch.testing.assert_close(state[key], value)


@pytest.mark.parametrize("name, options", CASES)
def test_gradients_of_parallel_and_reference_form_agree(name, options):
    mixer = build(name, options)
    results = []
    for form in ("chunked", "reference"):
        x = inputs().requires_grad_()
        mixer.zero_grad()
        with use_backend(form):
            (mixer(x)[0] * torch.linspace(-1, 1, D, dtype=torch.float64)).sum().backward()
        shared = [table.gamma.grad for table in getattr(mixer, "bounds", ())]
        results.append([x.grad, *(p.grad for p in mixer.parameters()), *shared])
        assert all(grad is not None and grad.abs().max() > 0 for grad in results[-1])
    for chunked, reference in zip(*results, strict=True):
        torch.testing.assert_close(chunked, reference)


@pytest.mark.parametrize("name, options", CASES)
def test_gradients_of_each_sequence_by_transforms(name, options):
    """`vmap(grad(f))`, the gradients of every sequence in one call, and `grad` alone."""
    mixer, x = build(name, options), inputs()
    weights = {key: value.detach() for key, value in mixer.named_parameters()}

    def loss(weights, x):
        return functional_call(mixer, weights, (x[None],))[0].square().sum()

    gradients = vmap(grad(loss), (None, 0))(weights, x)
    for i in range(B):
        mixer.zero_grad()
        mixer(x[i : i + 1])[0].square().sum().backward()
        single = grad(loss)(weights, x[i])
        for key, parameter in mixer.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[key][i], parameter.grad)
                torch.testing.assert_close(single[key], parameter.grad)


@pytest.mark.parametrize("name, options", CASES)
@settings(max_examples=4)
@given(cut=st.integers(1, T - 1), length=st.integers(2, T))
def test_a_carried_state_continues_the_sequence(name, options, cut, length):
    cut = min(cut, length - 1)
    mixer, x = build(name, options), inputs(length=length)
    first, state = mixer(x[:, :cut], state_of(mixer, B, T))
    second, _ = mixer(x[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), mixer(x)[0])


@pytest.mark.parametrize("name, options", CASES)
def test_documents_do_not_see_each_other(name, options):
    mixer, x = build(name, options), inputs(batch=1)
    bounds = [0, 1, 20, 20, T]
    packed, _ = mixer(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = [mixer(x[:, a:b])[0] for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("name, options", CASES)
def test_no_token_sees_the_future(name, options):
    mixer, x = build(name, options), inputs()
    changed = x.clone()
    changed[:, 20:] = torch.randn_like(changed[:, 20:])
    torch.testing.assert_close(mixer(changed)[0][:, :20], mixer(x)[0][:, :20])
    assert not torch.allclose(mixer(changed)[0][:, 20:], mixer(x)[0][:, 20:])


@pytest.mark.parametrize("name, options", CASES)
def test_state_spec_tells_shapes_and_dtypes(name, options):
    mixer = build(name, options)
    _, state = mixer(inputs(), state_of(mixer, B, T))
    spec = mixer.state_spec(B, T)
    assert {key: tuple(value.shape) for key, value in state.items()} == {k: s.shape for k, s in spec.items()}
    if name not in ("attention", "mla", "parallel", "tnn"):
        assert spec == mixer.state_spec(B, 100 * T)
    for key, value in mixer.init_state(B, T).items():
        assert value.dtype == spec[key].dtype


@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_runs_and_keeps_its_dtype(name):
    mixer = build(name, d_model=32).bfloat16()
    x = inputs(d_model=32).bfloat16()
    y, _ = mixer(x)
    assert y.dtype == torch.bfloat16 and y.isfinite().all()


NOT_SPLIT = {"parallel"}  # each of its mixers is split by its own plan


@pytest.mark.parametrize("name, options", CASES)
def test_the_tensor_parallel_plan_names_every_tensor_once(name, options):
    mixer = build(name, options)
    expanded = name != "hyena" and options.get("expand", 1) > 1
    if name in NOT_SPLIT or options.get("complex") or expanded or options.get("proj_groups", 1) > 1:
        assert tensor.words(mixer) == {}
        return
    tensors = {path for path, _ in (*mixer.named_parameters(), *mixer.named_buffers())}
    assert set(tensor.words(mixer)) == {path for path in tensors if not path.startswith("own_")}


def test_a_window_keeps_the_cache_small():
    mixer = build("attention", {"window": 5})
    assert mixer.state_spec(1, 1000)["k"].shape == (1, 5, 2, 12)
    assert build("attention").state_spec(1, 1000)["k"].shape == (1, 1000, 2, 12)


@pytest.mark.parametrize("cuts", [[0, 3, 150, 200], [0, 199, 200], [0, 64, 65, 200], [0, 200]])
def test_a_window_continues_over_long_pieces(cuts):
    """Tokens behind the first `window` of a piece see this piece alone; those before them see the ring."""
    mixer, x = build("attention", {"window": 30, "num_kv_heads": 1}), inputs(length=200)
    state, outputs = state_of(mixer, B, 200), []
    for start, end in zip(cuts, cuts[1:], strict=False):
        y, state = mixer(x[:, start:end], state)
        outputs.append(y)
    with use_backend("reference"):
        torch.testing.assert_close(torch.cat(outputs, 1), mixer(x)[0])


@pytest.mark.parametrize(
    "name, options", [("attention", {}), ("attention", {"window": 5}), ("attention", {"window": 30}), ("mla", {})]
)
def test_the_corner_of_a_cache_gives_the_same_tokens(name, options):
    """A step on the slots that hold all tokens so far writes there and gives what it gives on the whole cache."""
    mixer, x = build(name, options), inputs()
    whole, parted = state_of(mixer, B, 100), state_of(mixer, B, 100)
    with torch.no_grad():
        for t in range(T):
            y, whole = mixer.step(x[:, t], whole)
            shapes = {key: spec.shape for key, spec in mixer.state_spec(B, -(-(t + 1) // 8) * 8).items()}
            short = {key: parted[key][tuple(map(slice, shape))] for key, shape in shapes.items()}
            torch.testing.assert_close(mixer.step(x[:, t], short)[0], y)
    torch.testing.assert_close(parted, whole)


@pytest.mark.parametrize(
    "name", [name for name in FORMS if "num_heads" in LAYERS[name].Config.model_fields and name != "mla"]
)
def test_heads_that_do_not_divide_the_width_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}.num_heads: 5 .*d_model.* 24"):
        MIXERS[name](parse(MIXERS[name].Config, {"num_heads": 5}), LayerContext(d_model=24))


def test_a_last_layer_of_hgrn2_still_writes():
    """Paper 000's plain cumulative sum gives the last layer a lower bound of 1, a dead layer; ours stays below."""
    mixer = build("hgrn2", layer=2)
    beta = mixer.bounds[0](2, "inclusive")
    assert (beta < 1).all() and (beta > 0).all()
    assert (build("hgrn2", layer=0).bounds[0](0, "inclusive") == 0).all()
