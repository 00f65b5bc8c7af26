"""Mistakes in a user's file are reported before any work, and a right file passes."""

import contextlib
import re
import time
import warnings
from pathlib import Path

import pytest
import torch

from linnet.config import ConfigError
from linnet.layers import MIXERS, load_plugin
from linnet.layers.base import CHANNELS
from linnet.layers.check import check_mixer, check_mixers

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_mixer.py"
PACKAGE = sorted(name for name, cls in MIXERS.items() if cls.__module__.startswith("linnet.layers"))

FILE = """
import torch
from torch import nn
from linnet.config import Config
from linnet.layers import MIXERS, Mixer, TensorSpec, register_mixer

class NoOptions(Config):
    pass

@register_mixer("outside", NoOptions)
class Outside(Mixer):
    def __init__(self, config, context):
        super().__init__()
        self.out = nn.Linear(context.d_model, context.d_model)
        nn.init.zeros_(self.out.weight)  # hides nothing from the check

    def forward(self, x, state=None, cu_seqlens=None):
        s = x.cumsum(1) + (0 if state is None else state["s"][:, None])
        return self.out(s), None if state is None else {"s": s[:, -1]}

    def step(self, x, state):
        state["s"] += x
        return self.out(state["s"]), state

    def state_spec(self, batch, context_length):
        return {"s": TensorSpec((batch, self.out.in_features))}
"""
CACHED = """
import torch
from linnet.config import Config
from linnet.layers import Mixer, TensorSpec, register_mixer
from linnet.layers.positions import next_positions, token_positions

class NoOptions(Config):
    pass

@register_mixer("outside", NoOptions)
class Outside(Mixer):
    def __init__(self, config, context):
        super().__init__()
        self.width = context.d_model

    def forward(self, x, state=None, cu_seqlens=None):
        start = None if state is None else state["position"]
        places = token_positions(x, start)
        x = x * (1 + places.to(x.dtype)).sin()[..., None]
        if state is None:
            return x.cumsum(1), None
        slots = places[..., None].expand_as(x)
        cache = state["cache"].scatter(1, slots, x)
        return cache.cumsum(1).gather(1, slots), {"cache": cache, "position": next_positions(x, start)}

    def step(self, x, state):
        y, state = self.forward(x[:, None], state)
        return y[:, 0], state

    def state_spec(self, batch, context_length):
        cache = TensorSpec((batch, context_length, self.width), torch.float32, counted=0)
        return {"cache": cache, "position": TensorSpec((batch,), torch.int64)}
"""
CHANNEL = """
@register_channel("own", NoOptions)
class Own(Channel):
    def __init__(self, config, context):
        super().__init__()
        self.up = nn.Linear(context.d_model, context.d_model)

    def forward(self, x):
        y = self.up(x)
        return y.relu()
"""
ROW_0 = 'state["position"][:1].expand(len(x))'
CACHES = {
    "whole": [],
    "position_of_row_0": [('else state["position"]', f"else {ROW_0}", "forward: rows .* 37 and 22 tokens.*position")],
    "position_of_row_0_in_step": [
        ("(x[:, None], state)", f'(x[:, None], {{**state, "position": {ROW_0}}})', "step: rows .* 37 and 22 tokens")
    ],
    "from_the_end": [
        ("scatter(1, slots", 'scatter(1, state["cache"].shape[1] - 1 - slots', "first 45 slots.* token 37.* first on"),
        ("cache.cumsum", "cache.flip(1).cumsum", ""),
    ],
    "bfloat16": [("torch.float32", "torch.bfloat16", "forward .*cache in bfloat16.* raised RuntimeError in line 23")],
}
OUT, STATE = "return self.out(s), None if", 'state is None else state["s"][:, None]'
LAST, SPEC = 'None if state is None else {"s": s[:, -1]}', '{"s": TensorSpec((batch, self.out.in_features))}'
INIT = "nn.init.zeros_(self.out.weight)"
TRAINS_ALONE = [("def step", "def stepp", ""), (SPEC, "{}", ""), (STATE, "True else 0", ""), (LAST, "None", "")]


def small(size):
    return f"self.small = nn.Parameter(torch.full((1,), {size}))\n        " + INIT


MISTAKES = {
    "looks_ahead": [(OUT, "s = s + x.roll(-1, 1)\n        " + OUT, "not causal")],
    "looks_ahead_in_training": [(OUT, "s = s + self.training * x.mean(1, True)\n        " + OUT, "in training mode")],
    "looks_ahead_in_pairs": [
        (
            OUT,
            "s = s.clone()\n        s[:, 101::2] = s[:, 101::2] + x[:, 102::2].sum(1, True)\n        " + OUT,
            "not causal",
        )
    ],
    "second_chunk": [(OUT, "s = torch.cat([s[:, :128], s[:, 128:].flip(1)], 1)\n        " + OUT, "not causal")],
    "rows": [(OUT, "s = s + x.cumsum(0)\n        " + OUT, "rows of a batch.*batch_first")],
    "gradient_of_x": [(OUT, "s = s + x.square() - x.detach().square()\n        " + OUT, "gradient of x .*backward")],
    "gradient": [(OUT, "s = s.detach() * 2 - s\n        " + OUT, "gradient of x .*backward")],
    "no_gradient": [
        (
            "self.out(s)",
            "nn.functional.linear(s, self.out.weight.detach(), self.out.bias)",
            "gradient of out.weight .*detach",
        )
    ],
    "no_state_spec": [("def state_spec", "def state_spek", "state_spec.*{}")],
    "a_name_of_ours": [
        (
            "    def step",
            "    def parts(self, x):\n        return x\n\n    def step",
            "parts needs x, but Linnet .*rename",
        )
    ],
    "no_pair": [(", " + LAST, "", "forward .*Tensor.*`return y, state`")],
    "three": [(", " + LAST, ", s, s", "forward .*Tensor, Tensor, Tensor")],
    "width": [("nn.Linear(context.d_model, context.d_model)", "nn.Linear(context.d_model, 3)", r"shape \[2, 256, 3\]")],
    "raises": [("x.cumsum(1)", "x @ x", r"RuntimeError.* 18 .*`s = x @ x")],
    "arguments": [("state=None, cu_seqlens=None", "state=None", "forward.*TypeError: .* positional")],
    "no_forward": [("def forward", "def foward", "NotImplementedError: Outside has no forward; fix the class")],
    "backward": [("return self.out(s),", "return self.out(s).detach(),", "backward.*RuntimeError")],
    "not_finite": [(OUT, "s = s.log()\n        " + OUT, "y .*not finite")],
    "gradient_in_float32": [(OUT, "s = (s.detach() * 2 - s).float()\n        " + OUT, "gradient of x .*backward")],
    "gradient_of_a_small_parameter": [  # in float32 no difference of outputs shows it
        (OUT, "s = s * (1 - self.small + 2 * self.small.detach())\n        " + OUT, "gradient of small .*float64"),
        (INIT, small(1e-6), ""),
    ],
    "ignores_state_alone": [
        (STATE, "True else 0", " another y "),
        (INIT, small(1e-4), ""),  # its gradient is right, and in float32 no difference of outputs shows it
        (OUT, "s = s * (1 + self.small)\n        " + OUT, ""),
    ],
    "ignores_state": [(STATE, "True else 0", " another y ")],
    "starts_elsewhere": [(STATE, STATE + " + 1", "y .*state")],
    "no_state": [(LAST, "None", r"None.* {'s': \[2, 16\]}")],
    "other_state": [("s[:, -1]", "s", r"{'s': \[2, 37, 16\]}.* {'s': \[2, 16\]}")],
    "step": [('state["s"] += x', 'state["s"] += 2 * x', "step .* y .* 37")],
    "step_grows": [('state["s"]), state', 'state["s"]), {"s": state["s"], "n": x}', r"step .*'n': \[2, 16\]")],
    "step_raises": [('state["s"] += x', 'state["t"] += x', r"step.*KeyError.* 22.*state_spec")],
    "step_alone": [('self.out(state["s"]), state', 'self.out(state["s"])', "step .*Tensor")],
    "no_spec": [(SPEC, '{"s": (batch, 16)}', "state_spec .*TensorSpec")],
    "no_batch": [("TensorSpec((batch, ", "TensorSpec((1, ", r"state_spec.* s .*\[1, 16\].* 2")],
    "memory": [(OUT, "s = s * float(s.detach()[0, 0, 0] * 0 + 1)\n        " + OUT, "forward .*line 19")],
    "flops": [
        (
            "    def step",
            "    def flops(self, n):\n        return m\n\n    def step",
            r"flops.*NameError",
        )
    ],
    "flops_below_0": [
        ("    def step", "    def flops(self, n):\n        return -n\n\n    def step", r"flops\(seq_len\) .*-256")
    ],
    "random": [(OUT, "s = s + torch.randn_like(s)\n        " + OUT, "random numbers in eval mode.*self.training")],
    "remembers": [
        (OUT, "self.n = getattr(self, 'n', 0) + 1; s = s + self.n\n        " + OUT, "not deterministic.* eval mode")
    ],
    "remembers_in_training": [
        (
            OUT,
            "s = s + self.training * getattr(self, 'last', 0); self.last = s.detach().mean()\n        " + OUT,
            "not deterministic.* training mode",
        )
    ],
    "remembers_a_state": [
        (STATE, "state is None else self.latest(state)[:, None]", "remembers earlier calls.*state"),
        (OUT, "self.last = s[:, -1]\n        " + OUT, ""),
        (
            "    def step",
            "    def latest(self, given):\n        return self.last if given['s'].any() else given['s']\n\n"
            "    def step",
            "",
        ),
    ],
    "writes_x": [("x.cumsum(1)", "x.mul_(2).cumsum(1)", "forward writes into x")],
    "step_writes_x": [('state["s"] += x', 'state["s"] += x; x.zero_()', "step writes into x")],
    "dtype": [
        ("return self.out(s),", "return self.out(s).double(),", r"y in torch.float64 for x in torch.float32; .*x.dtype")
    ],
    "ends": [(OUT, "raise SystemExit\n        " + OUT, "forward.* raised SystemExit in line 19")],
    "no_mixer": [("class Outside(Mixer)", "class Outside(nn.Module)", r"class Outside\(Mixer\)")],
}
RIGHT = {
    "whole": [],
    "no_step": [("def step", "def stepp", "")],
    "says_it_has_no_step": [('state["s"] += x', "raise NotImplementedError", "")],
    "trains_alone": TRAINS_ALONE,
    "bias_of_keys": [  # its gradient is 0
        (INIT, "self.key = nn.Linear(context.d_model, context.d_model)\n        " + INIT, ""),
        (OUT, "s = nn.functional.scaled_dot_product_attention(x, self.key(x), x, is_causal=True)\n        " + OUT, ""),
        *TRAINS_ALONE,
    ],
    "small_in_float32": [
        (INIT, small(1e-4), ""),
        (OUT, "s = (s.float() * (1 + self.small.float())).to(x.dtype)\n        " + OUT, ""),
        *TRAINS_ALONE,
    ],
    "float32": [(OUT, "s = s.float() @ torch.eye(x.shape[-1])\n        " + OUT, "")],
    "straight_through": [
        (OUT, "s = s + s.round() - s.detach()\n        " + OUT, ""),
        ("    def step", "    surrogate_gradient = True\n\n    def step", ""),
        *TRAINS_ALONE,
    ],
    "dropout": [(OUT, "s = nn.functional.dropout(s, 0.5, self.training)\n        " + OUT, "")],
}


@pytest.fixture
def outside(tmp_path):
    """outside(changes) writes the mixer with changes and says how to name it; after the test it is not registered."""

    def write(changes, text=FILE):
        for old, new, _ in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "outside.py").write_text(text)
        return f"{tmp_path}/outside.py:Outside"

    yield write
    for name in ("outside", "second"):
        MIXERS.pop(name, None)
    CHANNELS.pop("own", None)


@pytest.mark.parametrize(
    "old, new, line", [("x.cumsum(1)", "x @ x", "18 .*`s = x @ x"), (OUT, "(None + 1)\n        " + OUT, "19 .*None")]
)
def test_a_line_is_named_whatever_the_form_of_the_path(outside, monkeypatch, tmp_path, old, new, line):
    path = Path(outside([(old, new, "")]).partition(":")[0])
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(ConfigError, match=rf"\.\./outside\.py:Outside.*line {line}"):
        check_mixer("../outside.py:Outside", {}, 16)
    path.with_name("broken.py").write_text("right = 1\nwrong = None + 1\n")
    with pytest.raises(
        ConfigError, match=r"importing \.\./broken\.py failed in line 2 \(`wrong = None \+ 1`\): TypeError"
    ):
        check_mixer("../broken.py:Outside", {}, 16)
    path.with_name("ends.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=r"importing \.\./ends\.py failed in line 1 .*: SystemExit: 3"):
        check_mixer("../ends.py:Outside", {}, 16)
    path.with_name("lonely.py").write_text("import a_neighbour_of_mine\n")
    with pytest.raises(ConfigError, match="No module named 'a_neighbour_of_mine'; install it, .* on PYTHONPATH"):
        check_mixer("../lonely.py:Outside", {}, 16)


def test_a_number_from_a_tensor_without_values_comes_with_the_reason(outside):
    changed = outside([("super().__init__()", "super().__init__()\n        self.rate = float(torch.ones(()))", "")])
    with pytest.raises(ConfigError, match=r"__init__.* raised RuntimeError in line .*without torch"):
        check_mixer(changed, {}, 16)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_a_line_with_the_file_and_the_fix(outside, mistake):
    spec = outside(MISTAKES[mistake])
    with pytest.raises(ConfigError, match=MISTAKES[mistake][0][2]) as caught:
        check_mixer(spec, {}, 16)
    line, *more = caught.value.problems
    assert bool(more) == (mistake == "starts_elsewhere")  # from where steps go on, too
    assert line.startswith(f"mixer {spec!r}: ") and "\n" not in line and "; " in line


NARROW = [(STATE, STATE + ".to(x)", ""), ('self.out(state["s"])', 'self.out(state["s"].to(x))', "")]


@pytest.mark.parametrize(
    "changes, told",
    [
        ([], r"forward.* raised RuntimeError in line \d+"),
        (NARROW[:1], r"step.* raised RuntimeError in line \d+"),
        (NARROW, ""),
        (
            [*NARROW, ("self.out(s),", "self.out(s).to(torch.promote_types(x.dtype, torch.float32)),", "")],
            "forward gave y",
        ),
    ],
)
def test_a_mixer_that_does_not_compute_in_bfloat16_is_warned_about(outside, changes, told):
    """A GPU serves with weights in bfloat16, and with states in the dtypes of `state_spec`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_mixer(outside(changes), {}, 16)
    found = [str(warning.message) for warning in caught if "bfloat16" in str(warning.message)]
    assert len(found) == bool(told)
    assert all(re.search(f"in bfloat16, .*{told}.*--dtype float32", message) for message in found)


def test_a_channel_mixer_in_place_of_a_token_mixer_is_refused(outside, tmp_path):
    both = outside([])
    channel = FILE.replace("MIXERS, Mixer", "Channel, register_channel, Mixer") + CHANNEL
    (tmp_path / "outside.py").write_text(channel)
    with pytest.raises(ConfigError, match=r"Own is a channel mixer; give .*/outside.py:Outside"):
        load_plugin(f"{tmp_path}/outside.py:Own")
    assert load_plugin(both) == "outside"
    (tmp_path / "alone.py").write_text(channel.replace("@register_mixer", "# "))
    CHANNELS.pop("own")
    with pytest.raises(ConfigError, match="Own is a channel mixer; write it into the file of a token mixer"):
        load_plugin(f"{tmp_path}/alone.py:Own")


def test_a_wrong_class_comes_with_the_mixer_of_the_file(outside):
    spec = outside([])
    path = spec.rpartition(":")[0]
    with pytest.raises(ConfigError, match=f"{re.escape(path)}:Outside$"):
        load_plugin(path)
    load_plugin(spec)
    with pytest.raises(ConfigError, match="Mixer is not a mixer; did you mean 'Outside'"):
        load_plugin(f"{path}:Mixer")


LOOKS = {  # change of `y` in a channel mixer -> what it does wrong
    "": "",
    "y = torch.nn.functional.dropout(y, 0.5, self.training)": "",
    "y = y - y.mean(1, True)": "computes a token from others",
    "y = y - self.training * y.mean(1, True)": "not causal in training mode",
    "y = y + x.roll(1, -2)": "computes a token from others.*@register_channel",
    "y = y + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]": r"x \[B, D\], raised RuntimeError in line 36",
    "y = y + torch.randn_like(y)": "random numbers in eval mode",
    "y = y.detach() * 2 - y": "gradient of x",
    "y = y @ y": r"RuntimeError in line 36 \(`y = y @ y`\)",
    "y = y[..., :3]": r"shape \[2, 256, 3\]",
}


@pytest.mark.parametrize("line", LOOKS)
def test_a_channel_mixer_computes_each_token_from_itself(outside, tmp_path, line):
    spec = outside([])
    text = FILE.replace("MIXERS, Mixer", "Channel, register_channel, Mixer") + CHANNEL
    (tmp_path / "outside.py").write_text(text.replace("return y.relu()", f"{line}\n        return y.relu()"))
    load_plugin(spec)
    check_mixers([spec], {"outside": {}}, 16)  # of a layout without it
    if not LOOKS[line]:
        check_mixers([spec], {"swiglu": {}, "own": {}}, 16)
        return
    with pytest.raises(ConfigError, match=f"channel mixer '.*outside.py:Own': .*{LOOKS[line]}") as caught:
        check_mixers([spec], {"swiglu": {}, "own": {}}, 16)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("change", CACHES)
def test_a_cache_is_read_as_servers_hold_it(outside, change):
    """Rows of other lengths share a batch, caches grow at their end, and states have the dtypes of `state_spec`."""
    spec = outside(CACHES[change], CACHED)
    if not CACHES[change]:
        check_mixer(spec, {}, 16)
        return
    with pytest.raises(ConfigError, match=CACHES[change][0][2]) as caught:
        check_mixer(spec, {}, 16)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("form", RIGHT)
def test_what_is_right_passes(outside, form):
    check_mixer(outside(RIGHT[form]), {}, 16)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_of_several_documents_needs_cu_seqlens(outside, causal):
    check_mixer(spec := outside([]), {}, 16, causal=causal)
    with pytest.raises(ConfigError, match=r"ignores cu_seqlens.*data.packing: cross"):
        check_mixer(spec, {}, 16, causal=causal, packs=True)
    check_mixer(f"{EXAMPLE}:MyMixer", {"num_heads": 2}, 16, causal=causal, packs=True)


def test_mistakes_of_one_file_and_of_several_are_told_at_once(outside, tmp_path):
    spec = outside([*MISTAKES["looks_ahead"], *MISTAKES["no_state_spec"]])
    (tmp_path / "second.py").write_text(FILE.replace('"outside"', '"second"').replace(", " + LAST, ""))
    plugins, both = [spec, f"{tmp_path}/second.py:Outside", f"{EXAMPLE}:MyMixer"], {"outside": {}, "second": {}}
    with pytest.raises(ConfigError) as caught:
        check_mixers(plugins, both, 16)
    assert ["no state_spec" in line for line in caught.value.problems] == [True, False, False]
    assert "not causal" in caught.value.problems[1] and "second.py:Outside" in caught.value.problems[2]
    check_mixers(plugins, {"swiglu": {}}, 16)  # a layout that names none of them


ROWS = [
    ("s = s + x.mean(0)", "directions of a row"),
    ("self.calls = getattr(self, 'calls', 0) + 1; s = s + self.calls", "directions of a row"),
    ("s = s.log()", "not finite"),
    ("s = s @ s", "RuntimeError"),
]


@pytest.mark.parametrize("line, told", ROWS)
@pytest.mark.parametrize("axes", [1, 2])
def test_without_causality_rows_are_computed_on_their_own(outside, line, told, axes):
    with pytest.raises(ConfigError, match=told):
        check_mixer(outside([(OUT, f"{line}\n        {OUT}", "")]), {}, 16, causal=False, axes=axes)


def test_without_causality_a_mixer_may_look_ahead_and_needs_no_state(outside):
    ahead = (OUT, "s = s + x.roll(-1, 1)\n        " + OUT, "")
    check_mixer(outside([ahead, ("def state_spec", "def state_spek", "")]), {}, 16, causal=False)
    check_mixer(f"{EXAMPLE}:MyMixer", {"num_heads": 2}, 16, causal=False, axes=2)


def test_an_unknown_form_without_causality_is_told(outside):
    with pytest.raises(ConfigError, match="non_causal.*three_scans.*two_scans"):
        check_mixer(
            outside([("    def step", "    non_causal = 'three_scans'\n\n    def step", "")]), {}, 16, causal=False
        )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PACKAGE)
def test_no_mixer_of_the_package_would_be_refused(outside, name, causal):
    """As if it came from outside: each is right, in its own way of carrying and rounding."""
    base = f'MIXERS["{name}"]'
    spec = outside([])
    Path(spec.rpartition(":")[0]).write_text(
        f"from linnet.layers import MIXERS, register_mixer\n\n@register_mixer('outside', {base}.Config)\n"
        f"class Outside({base}):\n    pass\n"
    )
    options = {"kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5} if name == "mla" else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*bfloat16")
        check_mixer(spec, options, 32, "layernorm", causal, 1 if causal else 2, packs=True)


@pytest.mark.parametrize("change", ["", "2 * "])
def test_a_channel_mixer_with_a_state_is_checked_as_a_mixer(outside, tmp_path, change):
    spec = outside([])
    own = (
        FILE.partition("@register_mixer")[2].replace('("outside"', '@register_channel("own"').replace("Outside", "Own")
    )
    text = FILE.replace("MIXERS, Mixer", "Mixer, register_channel")
    (tmp_path / "outside.py").write_text(text + own.replace('state["s"] += x', f'state["s"] += {change}x'))
    load_plugin(spec)
    wrong = pytest.raises(ConfigError, match="channel mixer '.*outside.py:Own': step gives another y")
    with wrong if change else contextlib.nullcontext():
        check_mixers([spec], {"own": {}}, 16)


@pytest.mark.parametrize("name", sorted(CHANNELS))
def test_no_channel_mixer_of_the_package_would_be_refused(outside, tmp_path, name):
    spec, base = outside([]), f'CHANNELS["{name}"]'
    own = f'@register_channel("own", {base}.Config)\nclass Own({base}):\n    pass\n'
    (tmp_path / "outside.py").write_text(FILE.replace("MIXERS, Mixer", "CHANNELS, register_channel, Mixer") + own)
    load_plugin(spec)
    check_mixers([spec], {"own": {}}, 32)


STARTS = {  # lines of a constructor -> what of it a model draws again
    "nn.init.ones_(self.out.bias)": "out.bias",
    "self.out.bias.data = torch.ones(16)": "out.bias",
    "self.out.weight = nn.Parameter(torch.eye(16))": "out.weight",
    "nn.init.zeros_(self.out.weight)": "out.weight",
    "nn.init.zeros_(self.out.weight); self.out.starts_zero = True": "",
    "nn.init.zeros_(self.out.bias)": "",
    "self.mine = nn.Parameter(torch.ones(3))": "",
}


@pytest.mark.parametrize("line", STARTS)
def test_first_values_that_a_model_draws_again_are_warned_about(outside, line):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_mixer(outside([(INIT, line, "")]), {}, 16)
    told = [str(warning.message) for warning in caught if "__init__" in str(warning.message)]
    assert len(told) == bool(STARTS[line]) and all(STARTS[line] in message for message in told)
    assert torch.nn.Linear(2, 2).weight.any() and "remember" not in repr(torch.nn.Linear.reset_parameters)


def test_the_example_passes_fast_and_leaves_the_generator_alone():
    check_mixer(f"{EXAMPLE}:MyMixer", {"num_heads": 2}, 32)  # with what has to be imported
    before, start = torch.get_rng_state(), time.process_time()
    check_mixer(f"{EXAMPLE}:MyMixer", {"num_heads": 32}, 4096)
    assert time.process_time() - start < 30  # 5 on a busy machine
    assert torch.equal(torch.get_rng_state(), before)
