"""The Triton forms of norms, gated activations and rotations against float64: on a GPU, and in Triton's interpreter."""

import contextlib
import importlib.util
import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from precision import TOLERANCE, assert_near, launching, poison

from linnet.layers.norm import build_norm, norm_and_gate, norm_and_keep
from linnet.models.causal_lm import build_model
from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import family
from linnet.ops import use_backend
from linnet.ops.activation import forget_inputs, gated_activation, softplus_decay, softplus_steps
from linnet.ops.launching import align_slices, record
from linnet.ops.norm import layer_norm, rms_norm, split_rms_norm, unit_norm
from linnet.ops.rotation import rotate
from linnet.ops.shares import sum_shares
from linnet.ops.tensor_parallel import Split

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def run(function, form, tensors, dtype=None):
    """Results and gradients of function(*tensors) in one form; floating tensors as `dtype`, if given."""
    inputs = [x if x is None or not x.is_floating_point() else x.to(dtype or x.dtype).detach() for x in tensors]
    leaves = [x.requires_grad_() for x in inputs if x is not None and x.is_floating_point()]
    with use_backend(form):
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in results]
        return [*results, *torch.autograd.grad(results, leaves, weights)]


def assert_agrees(function, *tensors):
    expected = run(function, "chunked", tensors, torch.float64)
    poison(expected, tensors[0].dtype)
    actual = run(function, "triton", tensors)
    assert_near(actual, expected, TOLERANCE[tensors[0].dtype])
    for a, b in zip(actual, run(function, "triton", tensors), strict=True):
        assert torch.equal(a, b)


def normal(*shape, dtype=torch.float32, device="cuda"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(device, dtype)


def check_norm(rows, width, gain, activation, residual, dtype=torch.float32, device="cuda"):
    options = {"dtype": dtype, "device": device}
    x, other = normal(rows, width, **options), normal(1, rows, width, **options)[0]

    def norm(x, weight, gate, residual):
        return rms_norm(x, weight, gate=gate, gate_activation=activation or "none", residual=residual)

    weight = normal(width, device=device) if gain else None  # float32 as under autocast
    assert_agrees(norm, x, weight, other if activation else None, other.flip(0) if residual else None)


def check_split_norm(rows, width, gain, activation, dtype=torch.float32, device="cuda"):
    """The norm of a width that ranks share, with one rank, against `rms_norm`."""
    x, other = normal(rows, width, dtype=dtype, device=device), normal(1, rows, width, dtype=dtype, device=device)[0]
    weight = normal(width, device=device) if gain else None
    with one_rank() as split, record() as kernels:

        def norm(x, weight, gate):
            settings = {"gate": gate, "gate_activation": activation or "none"}
            if x.dtype == torch.float64:
                return rms_norm(x, weight, **settings)
            return split_rms_norm(x, weight, split, **settings)

        assert_agrees(norm, x, weight, other if activation else None)
    assert {"norm.scale_kernel", "norm.along_kernel", "norm.gradient_kernel"} <= set(kernels)


@contextlib.contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Split.over(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def check_kept(rows, width, gain, dtype=torch.float32, device="cuda"):
    """The input handed on, with a gradient of its own, and without one."""
    x, weight = normal(rows, width, dtype=dtype, device=device), normal(width, device=device) if gain else None
    assert_agrees(lambda x, weight: rms_norm(x, weight, keep=True), x, weight)
    assert_agrees(lambda x, weight: rms_norm(x, weight, keep=True)[0], x, weight)
    bias = None if weight is None else normal(1, width, device=device)[0]
    assert_agrees(lambda *tensors: layer_norm(*tensors, keep=True), x, weight, bias)


def check_branch(rows, width, gain, dtype=torch.bfloat16, device="cuda"):
    """A branch in half precision on a residual in float32, as under autocast: each has its gradient in its dtype."""
    x, residual = normal(rows, width, dtype=dtype, device=device), normal(1, rows, width, device=device)[0]
    weight = normal(width, device=device) if gain else None
    assert_agrees(lambda x, weight, residual: rms_norm(x, weight, residual=residual), x, weight, residual)
    bias = None if weight is None else normal(1, width, device=device)[0]
    assert_agrees(lambda *tensors: layer_norm(*tensors[:3], residual=tensors[3]), x, weight, bias, residual)


def check_gate_before_norm(rows, width, gain, activation="silu", dtype=torch.float32, device="cuda"):
    """The norms of a gated input, as in Mamba-2 and HGRN; with gates that are columns of wider rows too."""
    options = {"dtype": dtype, "device": device}
    x, wide = normal(rows, width, **options), normal(1, rows, 8 + width, **options)[0]
    weight = normal(width, device=device) if gain else None

    def centred(x, weight, **more):
        return layer_norm(x, weight, weight, eps=1e-3, **more)[0]

    for norm in (rms_norm, centred):
        gated = partial(norm, gate_activation=activation, gate_first=True)
        assert_agrees(
            lambda x, weight, gate, gated=gated: gated(x, weight, gate=gate), x, weight, wide[:, 8:].contiguous()
        )
        inputs = [x.double(), None if weight is None else weight.double(), wide[:, 8:].double()]
        apart = norm(gated_activation(inputs[2], inputs[0], activation), inputs[1])
        assert_near([gated(x, weight, gate=wide[:, 8:])], [apart])
        with launching("norm.forward_kernel"), use_backend("triton"):
            gated(x, weight, gate=wide[:, 8:])
        for more in ({"residual": x}, {"keep": True}, {"gate": None}):
            with pytest.raises(ValueError, match="gate_first needs a gate"):
                norm(x, weight, **{"gate": x, "gate_first": True} | more)


def check_layer_norm(rows, width, affine, activation, residual, dtype=torch.float32, device="cuda"):
    options = {"dtype": dtype, "device": device}
    x, other = normal(rows, width, **options) + 1, normal(1, rows, width, **options)[0]

    def norm(x, weight, bias, gate, residual):
        y, h = layer_norm(x, weight, bias, gate=gate, gate_activation=activation or "none", residual=residual, eps=1e-3)
        return y if residual is None else (y, h)

    gains = (normal(width, device=device), normal(1, width, device=device)[0]) if affine else (None, None)
    assert_agrees(norm, x, *gains, other if activation else None, other.flip(0) if residual else None)


def check_compiled_layer_norm(backend="inductor", device="cuda"):
    """Compiled, in one graph, with a residual that the result goes on in; the gradient of each is the eager one."""
    x, residual, gate = (normal(*shape, device=device) for shape in ((21, 40), (1, 21, 40), (2, 21, 40)))
    tensors = x, normal(40, device=device), normal(1, 40, device=device)[0], gate[0], residual[0]

    def both(x, weight, bias, gate, residual):
        y, h = layer_norm(x, weight, bias, residual=residual)
        z, y = layer_norm(y * 2, weight, bias, gate=gate, gate_activation="sigmoid", keep=True)
        return z + y.sin() + h

    expected = run(both, "triton", tensors)
    for a, b in zip(
        run(torch.compile(both, fullgraph=True, backend=backend), "triton", tensors), expected, strict=True
    ):
        torch.testing.assert_close(a, b)


def check_activation(shape, activation, dtype=torch.float32, device="cuda"):
    a, b = normal(*shape, dtype=dtype, device=device), normal(1, *shape, dtype=dtype, device=device)[0]
    assert_agrees(lambda a, b: gated_activation(a, b, activation), a, b)


def check_gates_in_wider_rows(rows, heads, width, dtype=torch.float32, device="cuda"):
    """A gate that is columns of a product's rows is read where it is, and gives the bits of a copy."""
    wide, x = (
        normal(rows, 24 + heads * width + 16, dtype=dtype, device=device),
        normal(rows, heads, width, device=device),
    )
    columns, x = wide[:, 24 : 24 + heads * width], x.to(dtype)
    for gate in (columns, columns.unflatten(1, (heads, width))):
        assert align_slices(gate) == (gate, heads * width, wide.shape[1])
        for function in (
            gated_activation,
            lambda gate, x, activation: rms_norm(x, gate=gate, gate_activation=activation),
        ):
            with use_backend("triton"), launching(""):
                y = function(gate, x.view(gate.shape), "silu")
                assert torch.equal(y, function(gate.contiguous(), x.view(gate.shape), "silu"))


def check_softplus_steps(rows, heads, channels, dtype=torch.float32, device="cuda"):
    """Steps of logits from tiny to large, of which limits cut some; of logits that are columns of wider rows too."""
    shape = (heads, channels) if channels else (heads,)
    wide = 6 * normal(2, rows, 8 + heads * max(channels, 1) + 8, device=device).to(dtype)
    x, rates, bias = wide[..., 8:-8].unflatten(-1, shape), normal(heads, device=device), normal(*shape, device=device)
    for inputs in ((x, rates, bias), (x.contiguous(), rates.to(dtype), bias.to(dtype))):
        assert_agrees(softplus_decay, *inputs)
        assert_agrees(lambda *tensors: softplus_steps(*tensors, (0.05, 7.0)), *inputs)
        assert_agrees(lambda x, bias, rates=rates: softplus_steps(x, rates, bias)[0], inputs[0], inputs[2])
        with use_backend("triton"), launching("activation.softplus_steps_kernel"):
            softplus_decay(*inputs)
    assert_agrees(lambda row, *others: softplus_decay(row.expand_as(x), *others), x[:1, :1], rates, bias)
    wide[0, 0] = float("nan")
    for limits in ((0.0, math.inf), (0.05, 7.0)):
        function = partial(softplus_steps, limits=limits)
        forms = [run(function, form, (x, rates, bias)) for form in ("chunked", "triton")]
        torch.testing.assert_close(*([y.isnan() for y in results] for results in forms))
    for wrong in ((x[..., :-1, :] if channels else x[..., :-1], rates, bias), (x, bias.new_zeros(heads + 1), bias)):
        with pytest.raises(ValueError, match="softplus_steps: x"):
            softplus_decay(*wrong)
    small = torch.linspace(-80, -5, 64, device=device)[:, None]
    with use_backend("triton"):
        steps, _ = softplus_steps(small, small.new_zeros(1), small.new_zeros(1))
    torch.testing.assert_close(steps.double(), torch.nn.functional.softplus(small.double()), rtol=1e-5, atol=0)


def check_forget_inputs(rows, width, parts, dtype=torch.float32, device="cuda"):
    """Gates from shut to open, bounds from none to almost 1; real and complex candidates."""
    x = 9 * normal(2, rows, width, dtype=dtype, device=device)
    c = 3 * normal(2, rows, width, parts, dtype=dtype, device=device)
    c = c if parts > 1 else c.squeeze(-1)
    for beta in (torch.linspace(1e-3, 0.999, width, device=device), torch.full((width,), 1e-30, device=device)):
        assert_agrees(forget_inputs, c, x, beta)
    unbounded = partial(forget_inputs, beta=None)
    for logits in (x, x - 200):
        assert_agrees(unbounded, c, logits)
    with use_backend("triton"), launching("activation.forget_inputs_kernel"):
        forget_inputs(c, x, beta)
    x[0, 0], c[1, 0] = float("nan"), float("nan")
    for function in (unbounded, partial(forget_inputs, beta=beta)):
        forms = [run(function, form, (c, x)) for form in ("chunked", "triton")]
        torch.testing.assert_close(*([y.isnan() for y in results] for results in forms))
    for wrong in ((c[:, 1:], x, beta), (c, x, beta[1:])):
        with pytest.raises(ValueError, match="forget_inputs: c"):
            forget_inputs(*wrong)


def check_rotation(shape, heads, doubling, activation, positions, axes=None, dtype=torch.float32, device="cuda"):
    x = normal(*shape, dtype=dtype, device=device)
    theta = normal(heads, shape[-1] if doubling else shape[-1] // 2, device=device)
    place = torch.randint(0, positions, shape[:1], generator=torch.Generator().manual_seed(0)).to(device)
    place = place if len(shape) == 3 else place[:1, None] + torch.arange(shape[1], device=device).expand(shape[:2])
    if axes:
        place = torch.stack([place[:1] * (1 + a) // 2 for a in range(axes)], -1)
    assert_agrees(
        lambda x, theta, place: rotate(x, place, theta, doubling=doubling, activation=activation), x, theta, place
    )


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [5, 64, 768, 1024, 8192, 16_384])
def test_norm_of_widths(width, dtype):
    check_norm(333, width, False, None, False, dtype)
    check_norm(333, width, True, "silu", True, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, width", [(333, 5), (77, 100), (4096, 2048), (9, 8192)])
def test_gate_before_norm(rows, width, dtype):
    check_gate_before_norm(rows, width, False, dtype=dtype)
    check_gate_before_norm(rows, width, True, "sigmoid", dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unit_norm(dtype):
    for width in (5, 64, 96, 256):
        x = torch.randn(3, 40, 2, width, device="cuda", dtype=dtype)
        x[0, 0] = 0.0
        x.requires_grad_()
        with torch.inference_mode():
            unit_norm(x)  # what this call keeps, a later one may need for a gradient
        with launching("norm."):
            y = unit_norm(x)
        dy = torch.randn_like(y)
        wide = x.detach().double().requires_grad_()
        expected = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        dx, dexpected = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, wide, dy.double())[0]
        assert_near([y, dx[1:]], [expected, dexpected[1:]])


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [5, 64, 384, 768, 1152, 8192, 16_384])
def test_layer_norm_of_widths(width, dtype):
    check_layer_norm(333, width, False, None, False, dtype)
    check_layer_norm(333, width, True, "sigmoid", False, dtype)
    check_layer_norm(333, width, True, None, True, dtype)


@gpu
def test_layer_norm_compiles():
    check_compiled_layer_norm()


@gpu
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("activation", [None, "none", "sigmoid", "silu"])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_with_what_goes_around_it(gain, activation, residual):
    check_norm(77, 100, gain, activation, residual, torch.bfloat16)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("activation", [None, "none", "sigmoid", "silu"])
@pytest.mark.parametrize("width", [100, 4096])
def test_norm_over_a_split_width(width, activation, gain, dtype):
    check_split_norm(333, width, gain, activation, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("width", [100, 8192])
def test_norm_that_hands_its_input_on(width, gain, dtype):
    check_kept(333, width, gain, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("width", [100, 2048])
def test_norm_of_a_branch_in_half_precision(width, gain, dtype):
    check_branch(333, width, gain, dtype)


@gpu
@pytest.mark.parametrize("shape", [(100_001, 64), (3, 7, 16_400)])
def test_norm_of_many_and_of_too_wide_rows(shape):
    assert_agrees(rms_norm, normal(*shape), normal(shape[-1]))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["none", "silu", "sigmoid", "relu", "relu2", "gelu"])
def test_activation(activation, dtype):
    check_activation((3, 1111, 64), activation, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, heads, width", [(64, 8, 192), (3, 1, 40), (64, 32, 64)])
def test_gates_in_wider_rows(rows, heads, width, dtype):
    check_gates_in_wider_rows(rows, heads, width, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, heads, channels", [(1000, 32, 0), (300, 5, 0), (7, 1, 0), (700, 8, 96)])
def test_softplus_steps(rows, heads, channels, dtype):
    check_softplus_steps(rows, heads, channels, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, width, parts", [(1000, 256, 1), (77, 100, 2), (3, 1, 1)])
def test_forget_inputs(rows, width, parts, dtype):
    check_forget_inputs(rows, width, parts, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("doubling", [False, True])
@pytest.mark.parametrize("shape, heads", [((2, 333, 3, 64), 3), ((2, 100, 8, 128), 1), ((5, 4, 20), 4)])
def test_rotation(shape, heads, doubling, activation, dtype):
    check_rotation(shape, heads, doubling, activation, 200_000, dtype=dtype)


@gpu
def test_far_positions_are_exact():
    x, theta = torch.ones(1, 4, 1, 64, device="cuda"), normal(1, 64).clamp(-1.5, 1.5)  # products < 2.6e7
    place = torch.tensor([[2**24 - 1, 2**24 - 3, 10**6 + 1, 131_071]], device="cuda")
    actual = rotate(x, place, theta, doubling=True)
    expected = rotate(x.double(), place, theta.double(), doubling=True)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=3e-6)


@gpu
@pytest.mark.parametrize("kind", ["srmsnorm", "rmsnorm", "zero_centred_rmsnorm"])
def test_norm_under_autocast_is_silent_and_narrow(kind):
    norm, x = build_norm(kind, 64).cuda(), normal(10, 64).requires_grad_()
    with warnings.catch_warnings(), torch.autocast("cuda", torch.bfloat16):
        warnings.simplefilter("error")
        for form in ("triton", "chunked"):
            with use_backend(form):
                y = norm(x)
            assert y.dtype == torch.bfloat16
            assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.sum(), [x, *norm.parameters()]))


def check_layer_norm_under_autocast(device="cuda"):
    """y is in bfloat16 only where products follow: not alone, where it may be a residual stream, nor before a scale,
    nor after the last block, whose features a model may average."""
    x = normal(6, 64, device=device).requires_grad_()
    for affine in (True, False):
        norm = build_norm("layernorm", 64, affine=affine).to(device)
        with torch.autocast(device, torch.bfloat16), use_backend("triton"):
            alone, (kept, h), gated = norm(x), norm_and_keep(norm, x), norm_and_gate(norm, x, x, "sigmoid")
        assert alone.dtype == h.dtype == torch.float32
        assert kept.dtype == gated.dtype == (torch.bfloat16 if affine else torch.float32)
        gradients = torch.autograd.grad(kept.float().sum() + gated.float().sum(), [x, *norm.parameters()])
        assert all(g.dtype == torch.float32 for g in gradients)
    model = build_model(ModelConfig(d_model=64, layout="glu x2", norm="layernorm", vocab_size=64), device=device)
    with torch.autocast(device, torch.bfloat16), use_backend("triton"):
        expected, _ = model.backbone(x[None])
        model.backbone.defer_sums()
        features, _ = model.backbone(x[None])
    assert features.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(features, expected, rtol=0.01, atol=0.01)


def check_frozen_layer_norm(device="cuda"):
    x, weight, bias = (normal(*shape, device=device) for shape in ((6, 64), (64,), (1, 64)))
    x.requires_grad_()
    with use_backend("triton"), record() as kernels:
        y, _ = layer_norm(x, weight, bias[0])
        (found,) = torch.autograd.grad(y.sin().sum(), x)
    assert {"norm.forward_kernel", "norm.backward_kernel"} <= set(kernels)
    with use_backend("chunked"):
        y, _ = layer_norm(x, weight, bias[0])
    torch.testing.assert_close(found, torch.autograd.grad(y.sin().sum(), x)[0])
    with use_backend("triton"), pytest.raises(ValueError, match="layer_norm: bias has shape"):
        layer_norm(x, weight, bias)


@gpu
def test_layer_norm_under_autocast_and_frozen():
    check_layer_norm_under_autocast()
    check_frozen_layer_norm()


@gpu
def test_inputs_at_odd_addresses():
    check_norm(33, 64, True, "silu", True)
    x, weight = normal(34, 64)[:, 1:][1:, :62], normal(63)[1:]
    torch.testing.assert_close(rms_norm(x, weight), rms_norm(x.clone(), weight.clone()))
    x, theta = normal(2, 9, 1, 65)[..., 1:], normal(1, 65)[:, 1:]
    for place in (torch.arange(9, device="cuda"), torch.arange(10, device="cuda")[1:]):
        place = place.expand(2, 9)
        expected = rotate(x.clone(), place.clone(), theta.clone(), doubling=True)
        torch.testing.assert_close(rotate(x, place, theta, doubling=True), expected)


@gpu
def test_strides_views_and_second_derivatives():
    both = normal(50, 128).requires_grad_()
    x, gate = both.chunk(2, -1)
    torch.testing.assert_close(rms_norm(x, gate=gate), rms_norm(x.contiguous(), gate=gate.contiguous()))
    (first,) = torch.autograd.grad(rms_norm(x, gate=gate).sum(), both, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), both)


@gpu
def test_compiles_and_vmaps():
    x, weight, gate = normal(3, 50, 64), normal(64), normal(1, 3, 50, 64)[0]

    def both(x, weight, gate):
        return gated_activation(gate, rms_norm(x, weight, gate=gate, gate_activation="silu"), "sigmoid")

    expected = both(x, weight, gate)
    torch.testing.assert_close(torch.compile(both, fullgraph=True)(x, weight, gate), expected)
    torch.testing.assert_close(torch.vmap(both, in_dims=(0, None, 0))(x, weight, gate), expected)


@gpu
@pytest.mark.parametrize("name", ["llama", "tnl", "tnl1", "cosformer2", "lightnet", "hgrn", "hgrn2", "gla"])
def test_models_train_alike_in_both_forms(name):
    model = build_model(family(name)(64, 2, vocab_size=128), device="cuda")
    tokens = torch.randint(0, 128, (2, 200), device="cuda")
    found = []
    for form in ("auto", "chunked"):
        with use_backend(form):
            total, _ = model.loss(tokens, tokens)
            found.append([total, *torch.autograd.grad(total, list(model.parameters()))])
    for a, e in zip(*found, strict=True):
        assert (a - e).norm() <= 1e-3 * e.norm() + 1e-5


def check_shares(*shape, device="cuda"):
    shares = normal(*shape, device=device).detach()
    for dtype in (torch.float32, torch.bfloat16):
        expected = shares.double().sum((0, 2)).to(dtype)
        close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}  # of up to 2,100 shares of size 1
        torch.testing.assert_close(sum_shares(shares, dtype), expected, **close)


@gpu
@pytest.mark.parametrize("shape", [(1, 1, 528, 768), (512, 3, 4, 64), (1, 2, 1, 5), (700, 2, 3, 37)])
def test_shares_of_programs_are_added(shape):
    check_shares(*shape)


@gpu
def test_dead_rows_have_finite_gradients():
    x = torch.zeros(4, 64, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(rms_norm(x, normal(64)).sum(), x)
    assert gradient.isfinite().all()


INTERPRETED = [
    *[(check_layer_norm, (37, 24, *options)) for options in [(False, None, False), (True, None, True)]],
    *[(check_layer_norm, (5, 40, affine, "sigmoid", True)) for affine in (False, True)],
    (check_layer_norm, (2, 4100, True, None, False)),
    (check_compiled_layer_norm, ("aot_eager",)),
    *[(check, ()) for check in (check_layer_norm_under_autocast, check_frozen_layer_norm)],
    *[(check_norm, (37, 24, *options)) for options in [(False, None, False), (True, "silu", True)]],
    *[(check_norm, (2, 4100, gain, None, False)) for gain in (False, True)],
    *[(check_gate_before_norm, (37, 24, gain)) for gain in (False, True)],
    *[(check_norm, (9, 64, *options)) for options in [(True, None, False), (False, "sigmoid", True)]],
    *[(check_split_norm, (37, 24, *options)) for options in [(False, "silu"), (True, "sigmoid"), (True, None)]],
    *[(check, (9, 24, gain)) for gain in (False, True) for check in (check_kept, check_branch)],
    *[(check_shares, shape) for shape in [(1, 1, 30, 40), (2, 3, 4, 16), (400, 1, 3, 5)]],
    *[(check_activation, ((7, 301), activation)) for activation in ("none", "silu", "sigmoid", "relu")],
    (check_gates_in_wider_rows, (3, 2, 24)),
    *[(check_softplus_steps, sizes) for sizes in [(150, 32, 0), (7, 3, 0), (5, 2, 80)]],
    *[(check_forget_inputs, sizes) for sizes in [(300, 12, 1), (7, 130, 2)]],
    (check_rotation, ((2, 9, 3, 8), 3, True, "silu", 1000)),
    (check_rotation, ((2, 9, 3, 6), 1, False, "none", 1000)),
    (check_rotation, ((5, 2, 8), 2, False, "silu", 1000)),
    (check_rotation, ((2, 9, 3, 7), 3, True, "silu", 1000, 2)),
    (check_rotation, ((2, 9, 3, 10), 1, False, "none", 1000, 3)),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED)


if __name__ == "__main__":
    for check, arguments in INTERPRETED:
        check(*arguments, device="cpu")
        print(check.__name__, *arguments, "agrees")
