"""The classifier of sequences: padding, directions, grids of pixels, the retrieval head and what is refused."""

import math

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.encoders.config import SequenceConfig
from linnet.models import build, flops_exact

MIXERS = {
    "attention": {"num_heads": 2},
    "hgrn": {},
    "hgrn2": {"num_heads": 4},  # an expansion of 2
    "lightnet": {"num_heads": 2},
    "mamba": {},
    "tnl": {"num_heads": 2},
}


def config(mixer="hgrn2", **values):
    options = {mixer: MIXERS[mixer]} if MIXERS[mixer] else {}
    base = {"d_model": 8, "layout": f"{mixer}+glu x2", "options": options, "vocab_size": 11, "classes": 3}
    return parse(SequenceConfig, base | values)


def model_of(values, seed=0):
    """A model in float64 and evaluation mode, whose parameters and running statistics are all random."""
    torch.manual_seed(seed)
    model = build("sequence", values, seed).double().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.add_(
                0.2 * torch.rand_like(tensor) if name.endswith("running_var") else 0.2 * torch.randn_like(tensor)
            )
    return model


LENGTHS = torch.tensor([5, 9, 1, 7])


def tokens(*shape):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_padded_batch_is_its_rows_alone(mixer, norm):
    rows = tokens(4, 9)
    for pool in ("mean", "last", "first"):
        model = model_of(config(mixer, norm=norm, positions="sinusoidal", pool=pool))
        found = model(rows, LENGTHS)
        alone = torch.cat([model(row[None, :length]) for row, length in zip(rows, LENGTHS, strict=True)])
        torch.testing.assert_close(found, alone)
        other = rows.where(torch.arange(9) < LENGTHS[:, None], 0)  # what stands in the padding is not read
        assert model(other, LENGTHS).equal(found)


@pytest.mark.parametrize("mixer", MIXERS)
def test_reversing_the_sequence_reverses_the_output(mixer):
    one_way = {"options": {"attention": {"num_heads": 2, "rope": False}}} if mixer == "attention" else {}
    first, last = (model_of(config(mixer, scan="both", pool=pool, **one_way)) for pool in ("first", "last"))
    rows = tokens(3, 7)
    torch.testing.assert_close(first.features(rows.flip(1)), last.features(rows))
    x = first.embedding(rows)
    torch.testing.assert_close(first.backbone(x.flip(1))[0], first.backbone(x)[0].flip(1))


def test_training_a_padded_batch_takes_no_padding_into_the_statistics():
    model = model_of(config(norm="batchnorm")).train()
    other = model_of(config(norm="batchnorm")).train()
    rows = tokens(4, 9)
    model(rows, LENGTHS)
    other(torch.cat([rows, rows.flip(1)], 1), LENGTHS)  # more padding
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], msg=name)


def test_the_retrieval_head_is_its_definition():
    model = model_of(config(head="retrieval", classes=2))
    pairs, lengths = tokens(3, 2, 6), torch.tensor([[6, 2], [3, 4], [1, 6]])
    weights = model.head.state_dict()
    for pair, own, logits in zip(pairs, lengths, model(pairs, lengths), strict=True):
        one, two = (model.features(text[None, :length])[0] for text, length in zip(pair, own, strict=True))
        x = weights["hidden.weight"] @ torch.cat([one, two, one * two, one - two]) + weights["hidden.bias"]
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        torch.testing.assert_close(logits, weights["out.weight"] @ x + weights["out.bias"])
    assert model.head.hidden.weight.shape == (8, 32) and logits.shape == (2,)
    total, count = model.loss(pairs, lengths, torch.tensor([0, 1, 1]))
    expected = -model(pairs, lengths).log_softmax(-1)[torch.arange(3), torch.tensor([0, 1, 1])].sum()
    torch.testing.assert_close(total, expected)
    assert count == 3


@pytest.mark.parametrize("scan", ["both", "cross", "series"])
def test_pixels_are_a_sequence_row_by_row_or_a_grid(scan):
    values = config(side=4, channels=1, scan=scan, mean=[0.4], std=[0.3], norm="batchnorm")
    model = model_of(values)
    images = torch.randint(0, 256, (3, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    logits = model(images)
    assert values.axes == (1 if scan == "both" else 2) and logits.shape == (3, 3)
    torch.testing.assert_close(model(images.double() / 255), logits)
    x = ((images.double() / 255 - 0.4) / 0.3).flatten(2).transpose(1, 2) @ model.pixels.proj.weight.T
    x, _ = model.backbone(x + model.pixels.proj.bias, grid=model.grid)
    torch.testing.assert_close(model.head(x.mean(1)), logits, rtol=1e-6, atol=1e-6)  # mean and std are float32
    transposed = model(images.transpose(2, 3))
    assert torch.allclose(transposed, logits) == (scan == "cross")  # which alone treats rows and columns alike


def test_flops_do_not_depend_on_the_vocabulary_and_count_the_pixels():
    assert flops_exact(config(), 32) == flops_exact(config(vocab_size=100), 32)
    one, two = (flops_exact(config(side=8, channels=channels)) for channels in (1, 2))
    assert two - one == 3 * 2 * 64 * 8 - 2 * 64 * 8  # weights need a backward pass, and pixels do not


def test_a_row_past_the_learned_table_is_refused_with_the_fix():
    model = model_of(config(positions="learned", num_positions=8))
    assert model(tokens(2, 8), torch.tensor([8, 3])).shape == (2, 3)
    with pytest.raises(ValueError, match="rows of 9 tokens .*num_positions: 8.*sinusoidal"):
        model(tokens(2, 9), torch.tensor([9, 3]))


def test_what_does_not_fit_is_refused_by_name():
    for values, told in (
        ({"scan": "series"}, "scan: series"),
        ({"mean": [0.5]}, "mean: is of pixels"),
        ({"side": 4, "std": [0.5, 0.5]}, "std: has 2 numbers"),
        ({"side": 4, "head": "retrieval"}, "head: retrieval"),
        ({"head": "retrieval", "dropout": 0.1}, "dropout: 0.1"),
        ({"side": 4, "positions": "learned", "num_positions": 9}, "num_positions: 9 is below the 16"),
    ):
        with pytest.raises(ConfigError, match=told):
            config(**values)
    for values, inputs in (
        ({}, tokens(2, 2, 5)),
        ({"head": "retrieval"}, tokens(2, 5)),
        ({"side": 4}, tokens(1, 1, 5, 5)),
    ):
        with pytest.raises(ValueError, match="inputs: have shape"):
            model_of(config(**values))(inputs)
