"""The engine against the full forward pass, for every recipe (shrunk); and that no request sees another."""

import functools
import itertools
import random
import re
import shutil

import numpy as np
import pytest
import torch
from recipe_cases import distinct, joined

from linnet.config import ConfigError, parse
from linnet.data import ByteTokenizer
from linnet.evaluate.texts import carried_losses, windowed_losses
from linnet.inference import Engine, Sampling
from linnet.inference.prefix import cuts
from linnet.layers import Mixer
from linnet.models import ModelConfig, build_model, family, get_recipe
from linnet.runs.model import Generation
from linnet.serve.scoring import score_prompt

VOCAB = 67
SMALL = {"num_heads": 4, "inner": 96}
SET = {"num_kv_heads": 2, "num_v_heads": 8, "head_dim": 16}  # for options that are set
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@functools.cache
def shrunk(name: str, most: int = 2) -> ModelConfig:
    """The recipe's own layout and options at a size for a test."""
    config = get_recipe(name)
    options = {
        layer: {key: (SMALL | (SET if value else {})).get(key, value) for key, value in values.items()}
        for layer, values in config.options.items()
    }
    layout = re.sub(r"\bx(\d+)", lambda count: f"x{min(int(count[1]), most)}", config.layout)
    changes = {"d_model": 64, "vocab_size": VOCAB, "options": options, "layout": layout, "init_std": 0.3}
    return config.model_copy(update=changes)


JOINED = joined({name: shrunk(name) for name in distinct(shrunk).values()})


def lively(config: ModelConfig):
    """A model that does not say the same token again and again: its layers outweigh the embedding."""
    model = build_model(config, seed=1)
    for module in model.modules():
        if getattr(module, "starts_zero", False):
            torch.nn.init.normal_(module.weight, 0.0, 0.1, torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.embedding.weight.mul_(0.02)
    return model


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


HALF = ModelConfig(
    d_model=64,
    layout="gdn+swiglu mamba2 attention+swiglu kda+swiglu",
    vocab_size=VOCAB,
    options={name: {"num_heads": 4} for name in ("gdn", "attention", "kda")},
    init_std=0.3,
)


@pytest.mark.parametrize("device", DEVICES)
def test_states_in_bfloat16(device):
    """Logits after some tokens are within what rounding states allows, and not those of float32."""
    prompt, sizes, logits = random_prompts(30)[0], [], []
    for dtype in (torch.float32, torch.bfloat16):
        options = {"device": device, "dtype": torch.float32, "slots": 2, "prefill_chunk": 7, "state_dtype": dtype}
        engine = Engine(lively(HALF), **options)
        engine.submit(prompt, Sampling(max_tokens=40))
        while engine._slots[0] is None or not engine._slots[0].generated:
            engine.advance()
        for token in range(20):
            engine._decoder.tokens.fill_(token)
            engine._decoder.advance()
        logits.append(engine._decoder.logits[0].double().cpu())
        sizes.append(engine.state_bytes)
    error = ((logits[1] - logits[0]).norm() / logits[0].norm()).item()
    assert 1e-5 < error < 0.02
    specs = [spec for block in build_model(HALF).backbone.blocks for spec in block.state_spec(1, 4096).values()]
    assert sizes[0] - sizes[1] == sum(spec.bytes for spec in specs if spec.half) // 2


def test_states_in_bfloat16_are_refused_by_name():
    config = HALF.model_copy(update={"layout": "gdn+swiglu gla+swiglu hgrn2+swiglu"})
    with pytest.raises(ConfigError, match=r"state_dtype: bfloat16, and the states of gla, hgrn2 are always float32"):
        Engine(build_model(config), device="cpu", state_dtype=torch.bfloat16)
    config = HALF.model_copy(update={"layout": "attention+swiglu"})
    with pytest.raises(ConfigError, match="state_dtype: bfloat16, and this model has no recurrent state"):
        Engine(build_model(config), device="cpu", state_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="state_dtype: bfloat16 and compile do not go together"):
        Engine(build_model(HALF), device="cpu", state_dtype=torch.bfloat16, compile=True)


@torch.no_grad()
def greedy(model, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding with nothing carried: the whole text through the parallel form for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(torch.tensor([tokens]))[0][0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def hybrid():
    config = ModelConfig(
        d_model=64,
        layout="(tnl+sglu attention+swiglu) x2",
        vocab_size=256,
        options={"attention": {"num_heads": 4, "num_kv_heads": 2}, "tnl": {"num_heads": 4}},
        init_std=0.3,
    )
    return lambda **settings: Engine(lively(config), ByteTokenizer(), **{"device": "cpu", **settings})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", JOINED)
def test_greedy_output_is_that_of_the_full_forward_pass(name, device):
    model = lively(JOINED[name])
    prompts = random_prompts(1, 5, 13, 20)
    engine = Engine(model, slots=3, prefill_chunk=7, context_length=40, device=device, dtype=torch.float32)
    answers = [completion.tokens for completion in engine.generate(prompts, Sampling(max_tokens=12))]
    assert len(set(itertools.chain(*answers))) > 2  # a model that says one thing would prove little
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == 12
        with torch.no_grad():  # the whole text at once: each token is the likeliest after those before it
            logits = model(torch.tensor([prompt + tokens[:-1]], device=device))[0][0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens
    assert engine._decoder.graphs == (device == "cuda")


@pytest.mark.parametrize(
    "name",
    ["mamba-10m", "mamba2-10m", "mamba3-10m", "gdn_hybrid-10m", "llama-10m", "hgrn2-70m", "mad-hyena-experts-moe"]
    + ["lightnet-150m"],
)
def test_bfloat16_stays_close_to_float32(name):
    """Relative error of the logits of decoding steps: rounding alone, some percent."""
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(shrunk(name).model_copy(update={"init_std": 0.05}), seed=1)
        engine = Engine(model, slots=1, dtype=dtype, context_length=40, device="cpu")
        engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
        tokens, states = torch.tensor([5]), engine.model.init_state(1, 40)
        with torch.no_grad():
            for token in range(20):
                out, states = engine.model.step(tokens + token, states)
        logits.append(out.double())
    assert ((logits[1] - logits[0]).norm() / logits[0].norm()).item() < 0.05


def settings_of(index: int) -> Sampling:
    kinds = [
        Sampling(max_tokens=9),
        Sampling(max_tokens=14, temperature=0.9, seed=index),
        Sampling(max_tokens=11, temperature=1.3, top_k=7, top_p=0.8, seed=index),
        Sampling(max_tokens=6, temperature=0.7, min_p=0.05, repetition_penalty=1.4, seed=index, logprobs=3),
        Sampling(max_tokens=17, repetition_penalty=2.0),
    ]
    return kinds[index % len(kinds)]


@pytest.mark.parametrize("device", DEVICES)  # on a GPU in bfloat16: the same kernels on the same shapes, row by row
def test_a_request_gets_the_same_tokens_in_any_company_and_order(hybrid, device):
    prompts = random_prompts(*(1 + 7 * i % 23 for i in range(15)))
    alone = []
    for index, prompt in enumerate(prompts):
        [completion] = hybrid(slots=4, prefill_chunk=5, device=device).generate([prompt], settings_of(index))
        alone.append((completion.tokens, completion.logprobs))
    for seed in range(3):
        engine, order = hybrid(slots=4, prefill_chunk=5, device=device), list(range(15))
        random.Random(seed).shuffle(order)
        found, requests = {}, {}
        pieces = {index: [] for index in order}
        arrivals = random.Random(seed + 100)
        while order or engine.busy:
            while order and arrivals.random() < 0.4:
                index = order.pop()
                requests[engine.submit(prompts[index], settings_of(index))] = index
            for request, piece in engine.advance():
                pieces[requests[request]].append(piece)
        for index, got in pieces.items():
            found[index] = [p.token for p in got], [p.logprob for p in got if p.logprob is not None]
        assert [found[index] for index in range(15)] == alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", ["tnl", "hgrn2", "llama"])
def test_graphs_and_merged_products_change_rounding_at_most(name, slots):
    """Log-probabilities of the same tokens, step by step, in bfloat16."""
    config = family(name)(256, 4, inner=704, vocab_size=256)
    prompts, settings = random_prompts(*range(3, 11)), Sampling(max_tokens=40, logprobs=0)
    found = [
        Engine(build_model(config), slots=slots, device="cuda", **options).generate(prompts, settings)
        for options in ({}, {"graphs": False}, {"graphs": False, "merge": False})
    ]
    for graph, eager in zip(found[0], found[1], strict=True):
        assert graph.tokens == eager.tokens and graph.logprobs == eager.logprobs
    compared = 0
    for merged, plain in zip(found[1], found[2], strict=True):
        pairs = zip(_told(merged), _told(plain), strict=True)
        same = list(itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))
        assert all(abs(ours - theirs) < 0.05 for (_, ours), (_, theirs) in same)
        compared += len(same)
    assert compared >= 100  # of 320: two tokens that are about equally likely end what can be compared


def _told(completion):
    return zip(completion.tokens, completion.logprobs, strict=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["tnl-70m", "hgrn2-70m", "mamba-10m", "llama-70m", "mad-hyena-experts-moe"])
def test_merged_steps_compile_as_one_graph(name):
    engine = Engine(lively(shrunk(name, most=1)), slots=2, context_length=8, device="cpu")
    torch._dynamo.reset()
    compiled = torch.compile(engine.model.step, backend="aot_eager", fullgraph=True, dynamic=False)
    states, expected_states = (engine.model.init_state(2, 8) for _ in range(2))
    for token in (1, 2, 3):
        logits, states = compiled(torch.tensor([token, token + 1]), states)
        expected, expected_states = engine.model.step(torch.tensor([token, token + 1]), expected_states)
        torch.testing.assert_close(logits, expected)


def test_a_step_that_is_compiled_wrong_is_not_taken(monkeypatch):
    def wrong(step):
        def call(tokens, states):
            logits, after = step(tokens, states)
            return logits * 1.01, after

        return call

    monkeypatch.setattr("linnet.inference.decoding._compile", wrong)
    config, prompts = shrunk("tnl-70m"), random_prompts(4)
    with pytest.warns(UserWarning, match="compiled.* 1.0e-02"):
        engine = Engine(lively(config), slots=1, device="cpu", compile=True)
    assert engine._decoder._model_step == engine.model.step
    assert engine.generate(prompts, Sampling(max_tokens=5))[0].tokens == greedy(lively(config), prompts[0], 5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_engines_say_the_same_and_do_not_take_each_others_steps():
    prompts, settings = random_prompts(3, 9), Sampling(max_tokens=12)
    for name, slots in (("hgrn2-70m", 1), ("tnl-70m", 2)):
        plain, compiled = (
            Engine(lively(shrunk(name, most=1)), slots=slots, device="cpu", compile=flag).generate(prompts, settings)
            for flag in (False, True)
        )
        assert [found.tokens for found in compiled] == [found.tokens for found in plain]


def test_a_short_prompt_does_not_wait_for_a_long_one(hybrid):
    engine = hybrid(slots=3, prefill_chunk=4, context_length=400)
    long = engine.submit([1] * 300, Sampling(max_tokens=2))
    short = engine.submit([1, 2], Sampling(max_tokens=2, ignore_end=True))
    ended = {}
    while engine.busy:
        for request, piece in engine.advance():
            if piece.finish:
                ended[request] = engine.counters.rounds
    assert ended[short] <= 4 and ended[long] >= 300 / 4


def test_cancelled_requests_end_and_leave_their_slot(hybrid):
    engine = hybrid(slots=2, prefill_chunk=4, context_length=64)
    long = Sampling(max_tokens=50, ignore_end=True)
    requests = [engine.submit(list(range(1, 12)), long) for _ in range(5)]
    for _ in range(6):
        engine.advance()
    assert engine.active == 2 and engine.waiting == 3
    for request in (requests[0], requests[1], requests[3]):
        engine.cancel(request)
    events = engine.advance()
    gone = {request for request, piece in events if piece.finish == "cancelled"}
    assert gone == {requests[0], requests[1], requests[3]}
    left = {request: [] for request in requests}
    while engine.busy:
        for request, piece in engine.advance():
            left[request].append(piece)
    assert [len(left[request]) for request in requests] == [0, 0, 50, 0, 50]
    assert engine.counters.finished == {"cancelled": 3, "length": 2} and engine.counters.requests == 5


def test_streams_can_be_read_beside_each_other_and_left_early(hybrid):
    engine = hybrid(slots=2)
    long = Sampling(max_tokens=12, ignore_end=True)
    both = list(zip(engine.stream([1, 2], long), engine.stream([3, 4], long), strict=True))
    first, second = ([piece.token for piece in pieces] for pieces in zip(*both, strict=True))
    assert first == engine.generate([[1, 2]], long)[0].tokens and second == engine.generate([[3, 4]], long)[0].tokens
    for _ in engine.stream([1, 2], long):
        break
    assert not engine.busy and engine.counters.finished["cancelled"] == 1


def test_chunks_do_not_change_the_states(hybrid):
    [prompt] = random_prompts(41)
    tokens = [hybrid(prefill_chunk=n).generate([prompt], Sampling(max_tokens=16))[0].tokens for n in (1, 3, 40, 64)]
    assert all(found == tokens[0] for found in tokens)


def test_limits_of_models_with_a_growing_cache(hybrid):
    engine = hybrid(slots=1, context_length=20)
    [completion] = engine.generate([[1] * 15], Sampling(max_tokens=None, ignore_end=True))
    assert len(completion.tokens) == 5 and completion.finish == "length"
    with pytest.raises(ConfigError, match="prompt: 20 .* 19"):
        engine.submit([1] * 20)
    with pytest.raises(ConfigError, match=r"max_tokens: 6 .* 15 .* 20\b.* 5"):
        engine.submit([1] * 15, Sampling(max_tokens=6))
    recurrent = Engine(build_model(family("tnl")(32, 2, vocab_size=VOCAB)))
    windowed = ModelConfig(
        d_model=32, layout="attention+swiglu", options={"attention": {"num_heads": 2, "window": 8}}, vocab_size=VOCAB
    )
    assert recurrent.limit is None and Engine(build_model(windowed)).limit is None


def test_a_window_slides_over_its_ring():
    config = ModelConfig(
        d_model=64,
        layout="attention+swiglu x2",
        options={"attention": {"num_heads": 4, "window": 8}},
        vocab_size=VOCAB,
        init_std=0.3,
    )
    model = lively(config)
    prompts = random_prompts(3, 21)
    expected = [greedy(model, prompt, 25) for prompt in prompts]
    engine = Engine(model, slots=2, prefill_chunk=6, device="cpu")
    assert [c.tokens for c in engine.generate(prompts, Sampling(max_tokens=25))] == expected


def test_what_is_wrong_with_a_request_is_said_at_once(hybrid):
    engine = hybrid(context_length=32)
    for prompt, message in [
        ([], "prompt: .*empty"),
        ([1, 256, -1], r"prompt: \[256, -1\] .* 0 .* 255"),
        ([0.5], "whole numbers"),
        ([[1]], "whole numbers"),
        ("a\0b", "character 1"),
        ("\ud800", "surrogate pair"),
    ]:
        with pytest.raises(ConfigError, match=message):
            engine.submit(prompt)
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*stop_tokens: \[999\].*max_tokens: 1000"):
        engine.submit("abc", Sampling(max_tokens=1000, stop_tokens=[999]))
    assert not engine.busy
    bare = Engine(build_model(family("tnl")(32, 1, vocab_size=VOCAB)))
    with pytest.raises(ConfigError, match="prompt: .*tokenizer"):
        bare.submit("abc")
    with pytest.raises(ConfigError, match="stop: .*tokenizer"):
        bare.submit([1], Sampling(stop=["x"]))


def test_texts_begin_as_the_tokenizer_says(hybrid):
    engine = hybrid(slots=1)
    ask = Sampling(max_tokens=6)
    [from_end, by_id] = engine.generate(["", [0]], ask)  # bytes: 0 ends a document
    assert from_end.tokens == by_id.tokens and from_end.request.prompt_tokens == 1
    prefix = engine.prefix("ab")
    with pytest.raises(ConfigError, match="prompt: .*empty"):
        engine.submit([])
    engine.tokenizer.prompt_start = (7, 8)
    try:
        for text, ids in (("ab", [7, 8, *b"ab"]), ("", [7, 8])):
            found, expected = engine.generate([text, ids], ask)
            assert found.tokens == expected.tokens and found.request.prompt_tokens == len(ids)
        [found] = engine.generate(["c"], ask, prefix)  # goes on in the middle of a text
        assert found.tokens == engine.generate([list(b"abc")], ask)[0].tokens
    finally:
        engine.tokenizer.prompt_start = ()


def test_what_is_wrong_with_an_engine_is_said_at_once(tmp_path):
    model = build_model(family("tnl")(32, 1, vocab_size=VOCAB))
    with pytest.raises(ConfigError, match="(?s)slots: 0 .*prefill_chunk: -1 .*device: 'gpu'"):
        Engine(model, slots=0, prefill_chunk=-1, device="gpu")
    with pytest.raises(ConfigError, match="tokenizer.* 256 .* 67"):
        Engine(model, ByteTokenizer())
    defaults = Generation(sampling={"top_p": 0, "top_k": 1.5, "tempo": 1})
    with pytest.raises(ConfigError) as error:
        Engine(model, generation=defaults)
    assert all(any(key in problem for problem in error.value.problems) for key in ("top_p: ", "top_k: ", "'tempo'"))
    with pytest.raises(ConfigError, match="nothing"):
        Engine.of_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="config.yaml"):
        Engine.of_run(tmp_path)


def test_a_mixer_without_a_step_is_named_before_it_is_asked_for_tokens(monkeypatch):
    model = build_model(parse(ModelConfig, {"d_model": 32, "layout": "tnl hgrn2 tnl", "vocab_size": VOCAB}))
    monkeypatch.setattr(type(model.backbone.blocks[0].mixer), "step", Mixer.step)
    with pytest.raises(ConfigError, match="layout: 'tnl' has no step.*write step") as error:
        Engine(model)
    assert len(error.value.problems) == 1


def test_an_error_ends_all_requests_and_not_the_engine(hybrid):
    engine = hybrid(slots=1)
    requests = [engine.submit("ab"), engine.submit("cd")]
    engine.advance()
    assert {request: piece.finish for request, piece in engine.fail("lost")} == dict.fromkeys(requests, "error")
    assert not engine.busy
    assert engine.generate(["ab"], Sampling(max_tokens=3))[0].tokens


def test_generation_that_is_stopped_leaves_no_request_behind(monkeypatch):
    engine = Engine(build_model(family("tnl")(32, 1, vocab_size=256)), ByteTokenizer(), slots=2, device="cpu")
    rounds = iter([None, None])

    def interrupted():
        if next(rounds, "stop") == "stop":
            raise KeyboardInterrupt
        return Engine.advance(engine)

    monkeypatch.setattr(engine, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["ab", "cd", "ef"], Sampling(max_tokens=50))
    monkeypatch.undo()
    assert [len(found.tokens) for found in engine.generate(["ab"], Sampling(max_tokens=3, ignore_end=True))] == [3]
    assert not engine.busy and not engine._mail


def test_logits_that_are_not_finite_end_their_request_alone():
    model = build_model(family("tnl")(16, 1, num_heads=2, vocab_size=VOCAB))
    with torch.no_grad():
        model.embedding.weight[5] = torch.nan
        model.head = torch.nn.Linear(16, VOCAB, bias=False)  # the embedding's own row would spoil every logit
    engine = Engine(model, slots=2)
    requests = [engine.submit([token], Sampling(max_tokens=3)) for token in (5, 6)]
    ends = {}
    while engine.busy:
        ends |= {request: piece for request, piece in engine.advance() if piece.finish}
    assert [ends[request].finish for request in requests] == ["error", "length"]
    for attempt in (lambda: engine.generate([[5]]), lambda: list(engine.stream([5]))):
        with pytest.raises(ConfigError, match="NaN or infinite"):
            attempt()


def test_a_slot_without_a_request_does_not_run_past_the_table_of_positions():
    config = ModelConfig(d_model=16, layout="gla+glu", vocab_size=VOCAB, positions="learned", num_positions=16)
    model = lively(config)
    prompts = random_prompts(3, 3, 3)
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    found = Engine(model, slots=2, device="cpu").generate(prompts, Sampling(max_tokens=12))
    assert [one.tokens for one in found] == expected


CACHED = [  # for each mixer a recipe
    "tnl-70m", "llama-70m", "rwkv7-10m", "mamba2-10m", "mamba3-10m", "mamba-10m", "mad-hyena-experts-moe", "lfm2-10m",
    "lightnet-150m", "gdn_hybrid-10m", "hgrn-10m", "hgrn2-70m", "gla-10m", "gated_delta_product-10m", "gdn2-10m",
    "kda-10m", "delta_net-10m", "cosformer2-70m", "mad-mh-hyena-swiglu", "tnl-wt103", "lru-10m", "rwkv4-10m",
    "s4d-10m", "tnn-10m",
]  # fmt: skip


def each(names) -> list:
    """Models with all layers of these recipes."""
    models = joined({name: shrunk(name) for name in sorted(names)})
    return [pytest.param(model, id=name) for name, model in models.items()]


def converse(engine: Engine, turns: int, rows: int = 2) -> list[tuple[list[int], list[float]]]:
    """Returns the answers of conversations that grow: each prompt is the one before, its answer, and a new turn."""
    engine.turn_ends, answers = {5}, []
    prompts = [list(range(7, 7 + 21 + 4 * row)) + [5] for row in range(rows)]
    for turn in range(turns):
        completions = engine.generate(prompts, Sampling(max_tokens=4, logprobs=0, ignore_end=True))
        answers += [(completion.tokens, completion.logprobs) for completion in completions]
        prompts = [
            [*prompt, *completion.tokens, 5, 11 + turn, 9, 5, 30]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    return answers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", each(CACHED))
def test_a_prefix_cache_changes_no_bit(config, device):
    settings = {"slots": 2, "prefill_chunk": 8, "context_length": 80, "device": device}
    engines = [Engine(lively(config), prefix_cache=size, **settings) for size in (0, 1)]
    plain, cached = (converse(engine, 3) for engine in engines)
    assert cached == plain
    assert engines[0].counters.prefix_hits == 0
    assert engines[1].counters.prefix_hits == 4  # the second and the third turn of each
    read, saved = engines[1].counters.prompt_tokens, engines[1].counters.prefix_tokens
    assert read + saved == engines[0].counters.prompt_tokens
    assert saved > 2 * 2 * 16


def test_a_prefix_cache_of_two_states_is_exact_and_holds_its_budget():
    settings = {"slots": 1, "prefill_chunk": 8, "context_length": 80, "device": "cpu"}
    plain = converse(Engine(lively(shrunk("gdn_hybrid-10m")), **settings), 3)
    engine = Engine(lively(shrunk("gdn_hybrid-10m")), prefix_cache=1, **settings)
    engine.prefixes.budget = 2 * engine.state_bytes
    kept = []
    keep = engine.prefixes.keep
    engine.prefixes.keep = lambda key, prefix: (keep(key, prefix), kept.append(engine.prefixes.bytes))
    assert converse(engine, 3) == plain
    assert 0 < max(kept) <= engine.prefixes.budget
    engine.prefixes.budget = 1
    assert converse(engine, 2) == plain[:4]


def test_cuts_depend_on_the_tokens_before_them_alone():
    tokens = np.random.default_rng(0).integers(0, 12, 400)
    whole = cuts(tokens, 32, {3})
    assert [cut.end for cut in whole[:-1]] == [cut.end for cut in cuts(tokens[:390], 32, {3})][: len(whole) - 1]
    assert len({cut.key for cut in whole}) == len(whole)
    for length in range(1, 400):
        part = cuts(tokens[:length], 32, {3})
        assert part[-1].end == length
        assert [cut for cut in part if cut.key is not None] == [cut for cut in whole if cut.key and cut.end <= length]
    sizes = np.diff([0, *(cut.end for cut in whole)])
    assert max(sizes) <= 32
    assert min(sizes[:-1]) >= 8
    assert all(tokens[cut.end - 1] == 3 for cut in whole if cut.turn)
    changed = tokens.copy()
    changed[0] += 1
    assert not {cut.key for cut in cuts(changed, 32, {3})} & {cut.key for cut in whole if cut.key}


@pytest.mark.parametrize("config", each(set(CACHED) - {"tnn-10m"}))  # its FFT rounds by the largest output
def test_training_scoring_and_serving_give_a_token_one_log_probability(config):
    """Float32 on a CPU, 1e-5: the trainer's loss, `evaluate text`, the engine's prefill and its steps."""
    model, served = lively(config), lively(config)
    with torch.no_grad():
        for loud in (model, served):  # logits that differ
            loud.embedding.weight.mul_(10)
    engine, (prompt,) = Engine(served, slots=2, prefill_chunk=16, context_length=80, device="cpu"), random_prompts(37)
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=3, logprobs=0)
    [completion] = engine.generate([prompt], sampling)
    row = torch.tensor([prompt + completion.tokens])
    with torch.no_grad():
        total, count = model.loss(row[:, :-1], row[:, 1:])
        expected = model(row[:, :-1])[0][0].double().log_softmax(-1).gather(1, row[0, 1:, None])[:, 0].numpy()
        carried = carried_losses(model, row[0].numpy(), 16, lambda scored: None)
        [(windowed, _)] = windowed_losses(model, [row[0].numpy()], row.shape[1], row.shape[1], lambda scored: None)
    prefill = [score[0] for chunk in score_prompt(engine, row[0].tolist(), 0) for score in chunk if score is not None]
    assert np.ptp(expected) > 0.2  # the model has preferences
    assert abs(total.item() / count.item() + expected.mean()) < 1e-5
    for logprobs in (-carried, -windowed, prefill):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=2e-6)
    np.testing.assert_allclose(completion.logprobs, expected[-12:], atol=1e-5, rtol=2e-6)


def test_rows_of_the_embedding_without_a_token_count_in_probabilities_and_are_not_drawn(tmp_path):
    model = lively(family("gla")(32, 2, num_heads=2, vocab_size=300).model_copy(update={"init_std": 0.3}))
    engine = Engine(model, ByteTokenizer(), slots=2, prefill_chunk=8, context_length=64, device="cpu")
    prompt = list(b"def main(argv):")
    engine.prefix(prompt).save(tmp_path / "prefix")
    kept = engine.load_prefix(tmp_path / "prefix")
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_tokens=12, temperature=temperature, seed=3, logprobs=2, ignore_end=True)
        completions = [*engine.generate([prompt], sampling), *engine.generate([[]], sampling, prefix=kept)]
        for completion in completions:
            row = torch.tensor([prompt + completion.tokens])
            with torch.no_grad():
                all_logprobs = model(row[:, :-1])[0][0].log_softmax(-1)
            expected = all_logprobs.gather(1, row[0, 1:, None])[:, 0].numpy()
            prefill = [one for chunk in score_prompt(engine, row[0].tolist(), 2) for one in chunk if one is not None]
            assert all_logprobs[-12:, 256:].exp().sum(1).max() > 0.1 and max(completion.tokens) < 256
            np.testing.assert_allclose(completion.logprobs, expected[-12:], atol=1e-5)
            np.testing.assert_allclose([score[0] for score in prefill], expected, atol=1e-5)
            best, places = all_logprobs[:, :256].topk(2)
            for told in ([score[1] for score in prefill][-12:], completion.top_logprobs):
                assert [[token for token, _ in pair] for pair in told] == places[-12:].tolist()
                np.testing.assert_allclose([[x for _, x in pair] for pair in told], best[-12:], atol=1e-5)
        assert completions[0].tokens == completions[1].tokens


@pytest.mark.parametrize("mixer", ["attention", "mla", "tnn"])
def test_slots_without_a_request_do_not_end_at_the_limit_of_the_context(mixer):
    """They are stepped with the others, so they count beyond the context while other requests fill theirs."""
    options = {} if mixer == "tnn" else {mixer: {"num_heads": 2}}
    model = lively(ModelConfig(d_model=32, layout=f"{mixer}+swiglu", options=options, vocab_size=VOCAB))
    texts = []
    for slots in (1, 3):
        engine = Engine(model, device="cpu", slots=slots, context_length=12)
        prompts = random_prompts(11, 1, 4, 9, 2, 1)
        texts.append([out.tokens for out in engine.generate(prompts, Sampling(max_tokens=None, ignore_end=True))])
    assert texts[0] == texts[1] and [len(tokens) for tokens in texts[0]] == [1, 11, 8, 3, 10, 11]
