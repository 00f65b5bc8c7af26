"""The gated delta rule: the definition against the chunked form and the step, for every shape of gate and any decay."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import TOLERANCE, assert_near
from registered import check_op
from torch.func import vmap
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import chunks, debug, gated_delta_rule, gated_delta_step, gated_linear_attention, use_backend
from linnet.ops.delta import delta

TENSORS = ("q", "k", "v", "log_decay", "erase", "write", "initial_state")
TOKENS = TENSORS[:6]

# Shapes of decay, erase and write: per head or per channel.
GATES = {
    "delta_net": ("none", "head", "none"),
    "gdn": ("head", "head", "none"),
    "kda": ("channel", "head", "none"),
    "gdn2": ("channel", "channel", "channel"),
    "own write": ("head", "channel", "head"),
}


def make(
    kind="gdn", B=2, T=37, H=2, group=1, K=3, V=5, *, strength=1.0, resets=0, erase=1.0, state=True, offsets=None,
    dtype=torch.float64, seed=0,
):  # fmt: skip
    """Keys of unit norm; log-decays in [-strength, 0], -inf at every `resets`-th token; erase in [0, `erase`]."""
    generator, wide = torch.Generator().manual_seed(seed), torch.promote_types(dtype, torch.float32)
    shapes = {"none": None, "head": (B, T, H * group), "channel": (B, T, H * group, K)}
    decay_shape, erase_shape, write_shape = (shapes[x] for x in GATES[kind])
    if GATES[kind][2] == "channel":
        write_shape = (B, T, H * group, V)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(to)

    def uniform(shape, low, high):
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    call = dict(q=normal(B, T, H, K), k=normalize(normal(B, T, H, K, to=torch.float64), dim=-1).to(dtype))
    call |= dict(v=normal(B, T, H * group, V), log_decay=None)
    if decay_shape is not None:
        log_decay = uniform(decay_shape, -strength, 0.0)
        if resets:
            log_decay[:, ::resets] = -float("inf")
        call["log_decay"] = log_decay.to(wide)
    call["erase"] = uniform(erase_shape, 0.0, erase).to(wide)
    call["write"] = None if write_shape is None else uniform(write_shape, 0.0, 1.0).to(wide)
    N = B if offsets is None else len(offsets) - 1
    call["initial_state"] = normal(N, H * group, K, V, to=wide) if state else None
    if offsets is not None:
        call["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    learned = {name: x.requires_grad_() for name, x in call.items() if name in TENSORS and x is not None}
    return call | learned | {"scale": 0.7}


def detached(call):
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def widened(call, dtype=torch.float64):
    return {name: x.detach().to(dtype).requires_grad_() if is_learned(name, x) else x for name, x in call.items()}


def is_learned(name, x):
    return name in TENSORS and x is not None


def everything(call, form="chunked"):
    """o, the final state, and the gradients of all that has one, for a loss that reads both results."""
    with use_backend(form):
        results = gated_delta_rule(**call, output_final_state=True)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(loss, [x for name, x in call.items() if is_learned(name, x)])]


def assert_same(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * max(1.0, e.abs().max().item()))


@settings(max_examples=40)
@given(
    kind=st.sampled_from(list(GATES)),
    T=st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128]), st.integers(1, 200)),
    group=st.integers(1, 3),
    K=st.integers(1, 4),
    V=st.integers(1, 4),
    strength=st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e4]),
    resets=st.sampled_from([0, 1, 7]),
    erase=st.sampled_from([0.0, 1.0, 2.0]),
    state=st.booleans(),
    segment=st.sampled_from([1, 2**9, 2**18]),
)
def test_chunked_is_the_definition(kind, T, group, K, V, strength, resets, erase, state, segment):
    call = make(kind, 2, T, 2, group, K, V, strength=strength, resets=resets, erase=erase, state=state, seed=T)
    with pytest.MonkeyPatch.context() as patch:  # segments of one chunk, of a few, of all
        patch.setattr(chunks, "SEGMENT_ELEMENTS", segment)
        actual = everything(call)
    assert_same(actual, everything(call, "reference"), 1e-11)


@pytest.mark.parametrize("log_decay", [0.0, -1e-8, -20.0])
@pytest.mark.parametrize("kind", GATES)
def test_gates_at_their_extremes(kind, log_decay):
    # 0, 1 or 2: each kind and each decay has each in some case.
    beta = float(([0.0, -1e-8, -20.0].index(log_decay) + list(GATES).index(kind)) % 3)
    call = make(kind, 1, 150, 1, K=16, V=8)
    for name, value in (("log_decay", log_decay), ("erase", beta)):
        if call[name] is not None:
            call[name] = torch.full_like(call[name], value).requires_grad_()
    expected = everything(call, "reference")
    assert_same(everything(call), expected)
    assert_near(everything(widened(call, torch.float32)), expected, least=1e-4)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("offsets", [[0, 90], [0, 30, 30, 31, 90], [0, 1, 70, 90]])
def test_documents_are_separate_calls(kind, offsets):
    call = make(kind, 1, 90, group=2, offsets=offsets)
    actual = everything(call)
    assert_same(actual, everything(call, "reference"))
    plain = detached(call)
    plain.pop("cu_seqlens")
    for i, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if start == end:
            assert_same([actual[1][i]], [plain["initial_state"][i]])
            continue
        part = plain | {name: plain[name][:, start:end] for name in TOKENS if plain[name] is not None}
        part["initial_state"] = plain["initial_state"][i : i + 1]
        assert_same(gated_delta_rule(**part, output_final_state=True), [actual[0][:, start:end], actual[1][i : i + 1]])


@pytest.mark.parametrize("kind", GATES)
def test_a_sequence_in_two_calls_and_in_steps(kind):
    call = detached(make(kind, T=150, group=2))
    expected = gated_delta_rule(**call, output_final_state=True)
    state, parts = call["initial_state"], []
    for start, end in ((0, 70), (70, 150)):
        part = call | {name: call[name][:, start:end] for name in TOKENS if call[name] is not None}
        o, state = gated_delta_rule(**part | {"initial_state": state}, output_final_state=True)
        parts.append(o)
    assert_same([torch.cat(parts, 1), state], expected)
    state, steps = call["initial_state"].clone(), []
    for t in range(150):
        token = [None if call[name] is None else call[name][:, t] for name in TOKENS]
        steps.append(gated_delta_step(*token, state, scale=call["scale"]))
    assert_same([torch.stack(steps, 1), state], expected)


@pytest.mark.parametrize("kind", GATES)
def test_gradcheck(kind):
    call = make(kind, B=1, T=5, H=1, group=2, K=2, V=3)
    learned = {name: x for name, x in call.items() if is_learned(name, x)}

    def run(*tensors):
        return gated_delta_rule(**(call | dict(zip(learned, tensors, strict=True))), output_final_state=True)

    assert torch.autograd.gradcheck(run, list(learned.values()))


def test_nothing_erased_is_gated_linear_attention():
    call = detached(make("gdn2", T=100))
    call["erase"], call["write"] = torch.zeros_like(call["erase"]), torch.ones_like(call["write"])
    expected = {name: call[name] for name in ("q", "k", "v", "log_decay", "initial_state", "scale")}
    assert_same(
        gated_delta_rule(**call, output_final_state=True),
        gated_linear_attention(**expected, output_final_state=True),
    )


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(kind, dtype):
    call = make(kind, T=200, K=16, V=16, dtype=dtype)
    actual = everything(call)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert_near(actual, everything(widened(call)), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_strong_decay_anywhere_is_precise_in_float32(kind):
    call = make(kind, T=300, K=16, V=16, strength=0.1)
    log_decay = call["log_decay"].detach().clone()
    log_decay[:, ::5] = -1e4
    call["log_decay"] = log_decay.requires_grad_()
    assert_near(everything(widened(call, torch.float32)), everything(call))


def test_arguments_stay_as_they_were():
    call = make(B=1, T=64, H=1)
    before = {name: x.detach().clone() for name, x in call.items() if is_learned(name, x)}
    everything(call)
    for name, x in before.items():
        assert torch.equal(call[name], x), name


def in_order(call):
    """The arguments of the registered op."""
    return [call.get(name) for name in (*TENSORS, "cu_seqlens", "scale")]


VARIANTS = [("gdn", None), ("gdn2", None), ("delta_net", [0, 20, 20, 30]), ("kda", [0, 20, 20, 30])]


@pytest.mark.parametrize("kind, offsets", VARIANTS)
def test_opcheck(kind, offsets):
    call = in_order(make(kind, 1, 30, group=2, offsets=offsets))
    for return_final_state in (True, False):
        check_op(delta.forward, (*call, return_final_state), symbolic=return_final_state == (kind in ("gdn", "kda")))


def test_compiles_in_one_graph():
    call = make("kda", T=70)
    compiled = torch.compile(
        lambda **call: gated_delta_rule(**call, output_final_state=True), fullgraph=True, backend="aot_eager"
    )
    assert_same(compiled(**call), gated_delta_rule(**call, output_final_state=True))


@pytest.mark.parametrize("kind, offsets", VARIANTS)
def test_vmap_is_a_loop(kind, offsets):
    calls = [make(kind, 1, 30, group=2, offsets=offsets, seed=seed) for seed in range(3)]
    names = [name for name, x in calls[0].items() if is_learned(name, x)]

    def run(*tensors):
        return gated_delta_rule(**(calls[0] | dict(zip(names, tensors, strict=True))), output_final_state=True)

    batched = vmap(run, in_dims=-1)(*(torch.stack([call[name] for call in calls], -1) for name in names))
    each = [run(*(call[name] for name in names)) for call in calls]
    looped = [torch.stack(x) for x in zip(*each, strict=True)]
    learned = [call[name] for call in calls for name in names]
    assert_same(batched, looped)
    grads = (torch.autograd.grad(sum(x.sin().sum() for x in results), learned) for results in (batched, looped))
    assert_same(*grads)


@pytest.mark.parametrize("kind, scores", [("gdn", 64), ("kda", 32)])
def test_flops_from_shapes_alone(kind, scores):
    """Per token and head of K = V = 16: C of scores, 2/3 C, 2 K and 4 V, and 6 x 256; the tail has 36 tokens."""
    call = detached(make(kind, 1, 100, 2, 2, K=16, V=16, dtype=torch.float32))
    counter = FlopCounterMode(display=False)
    with counter:
        gated_delta_rule(**{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()})
    assert counter.get_total_flops() == 4 * ((64**2 + 36**2) * (scores + 42 + 32 + 64) + 100 * 6 * 256)


BAD = {
    r"k \[2, 37, 2, 4\]": lambda c: c | {"k": torch.zeros(2, 37, 2, 4)},
    "3 heads and q, k have 2": lambda c: c | {"v": torch.zeros(2, 37, 3, 5)},
    r"log_decay .*\[2, 37, 2, 1\]": lambda c: c | {"log_decay": c["log_decay"][..., None]},
    r"erase .*\[2, 37, 1\]": lambda c: c | {"erase": c["erase"][..., :1]},
    r"erase .*write is None": lambda c: c | {"erase": c["erase"][..., None].expand(-1, -1, -1, 3)},
    r"write .*torch.int64": lambda c: c | {"write": c["erase"].long()},
    r"initial_state.* \[2, 2, 5, 3\].* \[2, 2, 3, 5\]": lambda c: c | {"initial_state": c["initial_state"].mT},
    "batch.* 2": lambda c: c | {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32)},
    "log_decay is float16": lambda c: c | {"log_decay": c["log_decay"].half().requires_grad_()},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**BAD[message](detached(make())))


def test_step_refuses_wrong_shapes():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"state has shape \[2, 3, 4, 5\]"):
        gated_delta_step(x, x, x, None, x[..., 0], None, torch.zeros(2, 3, 4, 5))


def test_debug_looks_at_values():
    call = detached(make())
    call["log_decay"] = call["log_decay"] + 1.5
    gated_delta_rule(**call)
    with debug(), pytest.raises(ValueError, match="log_decay.* 1.4"):
        gated_delta_rule(**call)


@pytest.mark.parametrize("kind", ["gdn", "gdn2"])
def test_debug_warns_of_states_that_grow(kind):
    call = detached(make(kind, group=2, erase=2.0))
    with debug(), warnings.catch_warnings():
        warnings.simplefilter("error")
        gated_delta_rule(**call)
    for changes in ({"k": 3 * call["k"]}, {"erase": call["erase"] * torch.nan}):
        with debug(), pytest.warns(UserWarning, match=r"sum\(erase k\^2\).*unit norm"):
            gated_delta_rule(**call | changes)
