"""Launches that bypass Triton's look-up: started as Triton starts them, right for later addresses, and recorded."""

import ast
import importlib.util
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier

import pytest
import torch

from linnet.ops import (
    ModalFilter,
    additive_attention,
    diagonal_scan,
    filtered_attention,
    gated_linear_attention,
    lightning_attention,
    modal_convolution,
    selective_scan,
    short_convolution,
    use_backend,
)
from linnet.ops.activation import forget_inputs, gated_activation, log_sigmoid, softplus_decay
from linnet.ops.attention import causal_attention
from linnet.ops.norm import rms_norm

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime import _async_compile  # noqa: E402

from linnet.ops import compat_torch, compat_triton, launching  # noqa: E402  needs Triton

B, T, H, D, N = 2, 64, 2, 16, 4
HEADS, ROWS, STATES = (B, T, H, D), (B, T, D), (B, T, N)


def filtered(q, k, v, rate, theta, residue, skip):
    return filtered_attention(q, k, v, ModalFilter(-rate.exp(), theta, residue, skip))


CALLS = {
    "short_convolution": (lambda x, w, b: short_convolution(x, w, b, silu=True), (ROWS, (D, 4), (D,))),
    "selective_scan": (
        lambda x, delta, A, b, c, skip, bias: selective_scan(x, delta, -A.exp(), b, c, skip, delta_bias=bias)[0],
        (ROWS, ROWS, (D, N), STATES, STATES, (D,), (D,)),
    ),
    "causal_attention": (causal_attention, (HEADS,) * 3),
    "filtered_attention": (filtered, (HEADS, HEADS, HEADS, (H, N), (H, N), (H, N, 2), (H,))),
    "rms_norm": (lambda x, w, gate: rms_norm(x, w, gate=gate, gate_activation="silu"), (ROWS, (D,), ROWS)),
    "gated_activation": (lambda gate, x: gated_activation(gate, x, "silu"), (ROWS, ROWS)),
    "log_sigmoid": (lambda x: log_sigmoid(x, 16.0), (ROWS,)),
    "forget_inputs": (lambda c, x, beta: forget_inputs(c, x, beta.sigmoid())[0], (ROWS, ROWS, (D,))),
    "softplus_decay": (softplus_decay, (ROWS, (D,), (D,))),
    "lightning_attention": (lambda q, k, v: lightning_attention(q, k, v)[0], (HEADS,) * 3),
    "gated_attention": (lambda q, k, v, a: gated_linear_attention(q, k, v, -a.exp())[0], (HEADS,) * 4),
    "additive_attention": (lambda q, k, v: additive_attention(q, k, v)[0], (HEADS,) * 3),
    "modal_convolution": (lambda x, a, w: modal_convolution(x, -a.exp(), w)[0], (ROWS, (D, N), (D, N))),
    "diagonal_scan": (lambda x, a: diagonal_scan(x, -a.exp())[0], (ROWS, ROWS)),
}


def check(name, device, dtype):
    """The same numbers from where the first call had them, and from addresses that are whole elements alone."""
    function, shapes = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    def everything(shift):
        leaves = []
        for x in values:
            place = x.new_full((x.numel() + shift,), float("nan"))
            place[shift:] = x.flatten()
            leaves.append(place[shift:].view(x.shape).requires_grad_())
        with use_backend("triton"):
            y = function(*leaves)
            weight = torch.linspace(-1, 1, y.numel(), device=device).to(y.dtype)
            gradient = torch.cat([weight.new_zeros(shift), weight])[shift:].view(y.shape)
            return [y, *torch.autograd.grad(y, leaves, gradient)]

    expected = everything(0)
    assert all(x.isfinite().all() for x in expected)
    for shift in (0, 1, 3, 0):
        assert all(torch.equal(a, e) for a, e in zip(everything(shift), expected, strict=True)), (name, shift)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_later_calls_may_have_other_addresses(name, dtype):
    check(name, "cuda", dtype)


def test_the_installed_triton_is_known():
    """The fast path of launches is tried with the release that constraints.txt pins."""
    assert compat_triton.can_start()


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0"])
def test_an_unknown_triton_launches_its_own_way(monkeypatch, release):
    """Every time, with one warning; a known one is asked for the kernel once. Both record what they start."""

    class Compiled:
        function, packed_metadata = 1, 2

        def run(self, *arguments):
            started.append(arguments)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: looked_up.append((grid, arguments, options)) or Compiled()

    can_start, known = compat_triton.can_start.__wrapped__, release != "3.8.0"
    monkeypatch.setattr(compat_triton, "can_start", cache(lambda: can_start(release)))
    monkeypatch.setattr(compat_torch, "current_device", lambda: -1)
    monkeypatch.setattr(compat_torch, "current_stream", lambda device: 0)
    looked_up, started = [], []
    start, x = launching.Launcher(Kernel(), 3, (7,), num_warps=2), torch.ones(2)
    with warnings.catch_warnings(record=True) as said, launching.record() as names:
        warnings.simplefilter("always")
        for _ in range(3):
            start(x, 0.5)
    assert looked_up == [((3, 1, 1), (x, 0.5, 7), {"num_warps": 2})] * (1 if known else 3)
    assert [call[:4] + call[-3:] for call in started] == [(3, 1, 1, 0, x.data_ptr(), 0.5, 7)] * (2 if known else 0)
    assert ["3.8.0" in str(warning.message) for warning in said] == [True] * (not known)
    assert len(names) == 3


@pytest.mark.parametrize(
    ("capability", "hip", "overlaps"), [((9, 0), None, True), ((8, 9), None, False), ((9, 4), "6.4", False)]
)
def test_kernels_overlap_from_hopper_on(monkeypatch, capability, hip, overlaps):
    class OnGpu(torch.Tensor):
        def get_device(self):
            return 0

    def kernel(x, SIZE, OVERLAPS):
        pass

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    launcher = launching.Launcher(kernel, 3, (7,), num_warps=2)
    for _ in range(2):  # once to compile it, and once to start it
        launcher._settle((torch.ones(2).as_subclass(OnGpu),))
        assert launcher.constants == (7, overlaps)
        assert launcher.options == {"num_warps": 2} | ({"launch_pdl": True} if overlaps else {})


def test_kernels_that_overlap_wait_before_they_read_or_write():
    """A kernel that reads before `after_previous` gives wrong numbers on a GPU, and only sometimes."""
    kernels = 0
    for file in Path(launching.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            parameters = [x.arg for x in function.args.args] if isinstance(function, ast.FunctionDef) else []
            if "OVERLAPS" not in parameters or function.name == "after_previous":
                continue
            assert parameters[-1] == "OVERLAPS", (file, function.name)
            lines = [ast.unparse(line) for line in function.body]
            waits = [place for place, line in enumerate(lines) if line.endswith("after_previous(OVERLAPS)")]
            touches = [any(word in line for word in ("load", "store", "atomic")) for line in lines]
            assert not any(touches[: waits[0]]), function.name
            early = [line for line, touch in zip(lines, touches, strict=True) if touch][: sum(touches[: waits[-1]])]
            # A product of one row may read weights, at these addresses, and nothing else.
            assert not early or function.name == "matvec_kernel"
            assert all(re.search(r"load_masked\((at|up), ", line) for line in early), early
            kernels += 1
    assert kernels >= 10


def test_a_record_ends_with_its_block():
    kernel = Kernel(lambda: "kernel")
    with launching.record() as outer:
        launch_all(kernel)
        with launching.record() as inner:
            launch_all(kernel)
    launch_all(kernel)
    assert (len(outer), len(inner)) == (2, 1)


class Kernel:
    """As Triton's kernels in the mode in which they are compiled side by side."""

    def __init__(self, build):
        self.build, self.started, self.kernels = build, 0, {}
        self.device_caches = {0: (self.kernels,)}

    def warmup(self, *arguments, grid, **options):
        mode = _async_compile.active_mode.get()
        if self not in self.kernels and mode is not None:
            self.kernels[self] = mode.submit(self, self.build, lambda kernel: self.kernels.update({self: kernel}))

    def __getitem__(self, grid):
        return self.start

    def start(self, *arguments, **options):
        kernel = self.kernels.get(self)
        if isinstance(kernel, launching.triton.FutureKernel):
            kernel.result()  # raises what it failed with
        if kernel is None:
            self.kernels[self] = self.build()
        self.started += 1


def launch_all(*kernels):
    launching.launch_all([launching.Launch(x, 1, (torch.ones(2),), (), (), {}) for x in kernels])
    assert _async_compile.active_mode.get() is None


def test_new_kernels_are_compiled_side_by_side():
    both = Barrier(2, timeout=10)
    kernels = [Kernel(both.wait), Kernel(both.wait)]  # neither is done before the other has begun
    launch_all(*kernels)
    launch_all(*kernels)
    assert [x.started for x in kernels] == [2, 2] and not both.broken


def test_what_could_not_be_compiled_is_tried_again():
    disk = ["full", "full"]

    def build():
        if disk and disk.pop():
            raise OSError("no space left")
        return "kernel"

    kernels = [Kernel(lambda: "kernel"), Kernel(build)]
    with pytest.raises(OSError, match="no space"):
        launch_all(*kernels)
    launch_all(*kernels)
    assert [x.started for x in kernels] == [2, 1]


def test_an_interrupt_leaves_no_mode_behind():
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    kernels = [Kernel(lambda: "kernel"), Kernel(lambda: "kernel")]
    kernels[1].warmup = interrupt
    with pytest.raises(KeyboardInterrupt):
        launch_all(*kernels)
    assert _async_compile.active_mode.get() is None


def test_a_caller_may_be_compiling_side_by_side():
    kernels = [Kernel(lambda: "kernel"), Kernel(lambda: "kernel")]
    with ThreadPoolExecutor(1) as pool, launching.triton.AsyncCompileMode(pool) as mode:
        launching.launch_all([launching.Launch(x, 1, (torch.ones(2),), (), (), {}) for x in kernels])
        assert _async_compile.active_mode.get() is mode
    assert [x.started for x in kernels] == [1, 1]


def test_what_follows_a_new_kernel_waits_for_it():
    order, (known, new) = [], (Kernel(lambda: "kernel") for _ in range(2))
    known.start, new.start = (lambda *_, name=name, **__: order.append(name) for name in ("known", "new"))
    launch_all(known)
    launches = launching.Launches()
    for kernel in (known, new, known):
        launches.add(kernel, 1, (torch.ones(2),), (), ())
    assert order == ["known"] * 2
    launches.start()
    assert order == ["known", "known", "new", "known"]
    launches.start()  # nothing is started twice
    assert len(order) == 4


PROGRAM = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, tl.load(x + place))

kernel[(1,)](torch.zeros({read}), torch.zeros({written}), 16)
print("agrees")
"""


@pytest.mark.parametrize(("read", "written"), [(16, 16), (15, 16), (16, 15)])
def test_interpreted_kernels_stay_in_the_memory_of_their_tensors(interpreted, tmp_path, read, written):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(read=read, written=written))
    if read == written:
        assert interpreted(str(file)) == 1
    else:
        with pytest.raises(AssertionError, match="outside the memory of the tensors"):
            interpreted(str(file))


def test_rounding_on_the_host_is_tritons():
    import triton

    from linnet.ops import launching

    for x in (1, 2, 3, 63, 64, 65, 4096, 4097, 2**31 - 1):
        assert launching.next_power_of_2(x) == triton.next_power_of_2(x)
        for y in (1, 2, 7, 64):
            assert launching.cdiv(x, y) == triton.cdiv(x, y)
