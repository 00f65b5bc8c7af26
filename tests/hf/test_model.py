"""An exported model is the run's: logits, greedy tokens, beams, samples; padding changes nothing."""

import pytest
import torch
from hf_models import ARCHITECTURES, shrunk, small
from recipe_cases import distinct, joined
from torch.utils import _pytree as pytree

from linnet.data import ByteTokenizer
from linnet.models import build_model
from linnet.runs import save_model

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")
wrap = pytest.importorskip("linnet.hf.export").wrap

PROMPT, NEW = 9, 5
MODELS = joined({name: small(name) for name in ARCHITECTURES})
JOINED = joined({name: shrunk(name) for name in distinct(shrunk).values()})


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """The Linnet model, and what transformers makes of its export."""
    folder = tmp_path_factory.mktemp("hf")
    config = MODELS[request.param]
    model = build_model(config, seed=1).eval()
    save_model(folder / "model", config, model.state_dict(), ByteTokenizer())
    hf.export(folder / "model", folder / "hf")
    return model, transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")


@pytest.fixture
def prompt():
    return torch.randint(1, 256, (3, PROMPT), generator=torch.Generator().manual_seed(0))


def assert_greedy(model, written, prompt):
    """Each new token is the one that the model's own parallel form finds likeliest after those before it."""
    with torch.no_grad():
        likeliest = model(written[:, :-1])[0].argmax(-1)
    assert torch.equal(written[:, : prompt.shape[1]], prompt)
    assert torch.equal(written[:, prompt.shape[1] :], likeliest[:, prompt.shape[1] - 1 :])


def free(**options):
    """Options of generate without an end."""
    return {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW, **options}


def test_logits_are_the_models_own(pair, prompt):
    model, exported = pair
    assert isinstance(exported, hf.LinnetForCausalLM)
    with torch.no_grad():
        expected, out = model(prompt)[0], exported(prompt, labels=prompt, use_cache=False)
    assert (out.logits - expected).abs().max() <= 1e-6
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), prompt[:, 1:].flatten())
    torch.testing.assert_close(out.loss, loss)
    kept = exported(prompt, logits_to_keep=2).logits
    assert (kept - expected[:, -2:]).abs().max() <= 1e-5 * expected.abs().max()


def test_greedy_generation_is_the_models_own_token_for_token(pair, prompt):
    model, exported = pair
    columns = [[tensor.shape for tensor in pytree.tree_leaves(model.init_state(1, length))] for length in (64, 65)]
    if columns[0] != columns[1]:  # beyond the 64 columns that a cache begins with
        prompt = torch.randint(1, 256, (3, 62), generator=torch.Generator().manual_seed(0))
    written = exported.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **free())
    assert_greedy(model, written, prompt)


def test_padding_changes_nothing(pair, prompt):
    _, exported = pair
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    mask[2, :7] = 0
    padded = prompt * mask
    out = exported.generate(padded, attention_mask=mask, do_sample=False, **free())
    for row, begin in enumerate((0, 4, 7)):
        alone = prompt[row : row + 1, begin:]
        expected = exported.generate(alone, attention_mask=torch.ones_like(alone), do_sample=False, **free())
        assert torch.equal(out[row, begin:], expected[0])
    # The parallel form, with padding on the left, on the right and in between.
    mask[1] = torch.tensor([1] * 5 + [0] * 4)
    mask[2] = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0])
    with torch.no_grad():
        logits = exported(prompt, attention_mask=mask).logits
        for row in range(3):
            kept = mask[row].bool()
            alone = exported(prompt[row : row + 1, kept]).logits[0]
            torch.testing.assert_close(logits[row, kept], alone, rtol=1e-4, atol=1e-4)


def test_beams_and_samples_are_those_without_a_cache(pair, prompt):
    _, exported = pair
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    for options in ({"num_beams": 2, "do_sample": False}, {"do_sample": True, "top_k": 20, "num_return_sequences": 2}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            found.append(
                exported.generate(prompt * mask, attention_mask=mask, use_cache=use_cache, **options, **free())
            )
        assert torch.equal(*found)


def test_a_cache_goes_on_where_it_was(pair, prompt):
    _, exported = pair
    whole = exported(prompt).logits
    with torch.no_grad():
        cache = hf.LinnetCache()
        first = exported(prompt[:, :5], past_key_values=cache)
        second = exported(prompt[:, 5:], past_key_values=first.past_key_values)
    assert second.past_key_values is cache and cache.get_seq_length() == PROMPT
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=1e-4)


def test_saved_again_it_is_the_same(pair, prompt, tmp_path):
    _, exported = pair
    exported.save_pretrained(tmp_path)
    again, report = hf.LinnetForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(again(prompt).logits, exported(prompt).logits)


def test_every_parameter_gets_a_gradient(pair, prompt):
    _, exported = pair
    exported.train()
    exported(prompt, labels=prompt).loss.backward()
    without = [name for name, p in exported.named_parameters() if p.grad is None]
    exported.zero_grad()
    exported.eval()
    assert not without


def test_a_new_model_is_drawn_as_linnet_draws(prompt):
    config = hf.LinnetConfig(model=small("mamba").model_dump(mode="json"))
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = build_model(small("mamba"), seed=7)
    assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("name", JOINED)
def test_every_recipe_generates_what_the_model_does(name, tmp_path):
    config = JOINED[name]
    model = build_model(config, seed=1).eval()
    wrap(model, hf.LinnetConfig(model=config.model_dump(mode="json"))).save_pretrained(tmp_path)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.randint(1, 61, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = exported(prompt, use_cache=False).logits
        assert (logits - model(prompt)[0]).abs().max() <= 1e-6
    written = exported.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **free())
    assert_greedy(model, written, prompt)
