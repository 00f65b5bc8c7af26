"""What people do with a transformers model: pipelines, Trainer, LoRA, other precisions, tokenizers, new embeddings."""

import subprocess
import sys

import pytest
import torch
from hf_models import small

from linnet.config import ConfigError
from linnet.data import ByteTokenizer, train_bpe
from linnet.data.tokenizer import FileTokenizer
from linnet.models import build_model
from linnet.runs import load_model, save_model
from linnet.runs.model import full_precision

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")

TEXTS = [
    "plain words",
    "  two  spaces\n\n\ttabs and\r\nlines ",
    "naïve café — 你好 🙂",
    "<|endoftext|> is text here <s> </s>",
    "",
    "".join(map(chr, range(1, 0x250))),
]


def exported(folder, name, tokenizer):
    config = small(name, vocab_size=tokenizer.vocab_size)
    model = build_model(config, seed=2)
    save_model(folder / "model", config, model.state_dict(), tokenizer)
    return hf.export(folder / "model", folder / "hf")


def word_level():
    """A tokenizer.json of another kind, with an end of another name, and tokens that it adds to every text."""
    import tokenizers

    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "plain": 1, "words": 2, "[END]": 3, "[BEGIN]": 4}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BEGIN] $A", special_tokens=[("[BEGIN]", 4)]
    )
    return FileTokenizer(inner, "[END]")


def unigram(special=True):
    """A tokenizer whose model finds </s> by its spelling, and which may add it without calling it special."""
    import tokenizers

    letters = sorted({*"".join(TEXTS), *"plain words", "▁"} - set(" "))
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), *((letter, -3.0) for letter in letters)]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer, inner.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    inner.add_special_tokens(["<unk>", *["</s>"] * special, "<s>"])
    inner.add_tokens([] if special else ["</s>"])
    return FileTokenizer(inner)


TOKENIZERS = {
    "byte": ByteTokenizer,
    "bpe": lambda: train_bpe(["the plain words and the other words " * 30], 270),
    "file": word_level,
    "unigram": unigram,
    "not special": lambda: unigram(special=False),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokenizer_gives_the_same_ids(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]()
    hf.to_transformers(tokenizer).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.end_of_document
    assert theirs.padding_side == "left" and len(theirs) == tokenizer.vocab_size
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text).input_ids == ids, text
        assert tokenizer.end_of_document not in ids
        if kind in ("byte", "bpe"):
            assert theirs.decode(ids) == text
    together = theirs(["plain words", "words"], padding=True, return_tensors="pt")
    assert together.attention_mask[1].tolist()[-1] == 1 and together.input_ids[1, 0] == tokenizer.end_of_document


CHAT = "{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_that_a_user_adds_are_tokens(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]()
    folder = exported(tmp_path, "tnl", tokenizer)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    end, size = words.eos_token, len(words)
    plain = [tokenizer.encode(text).tolist() for text in ("plain", f"{end} words{end}")]
    assert words.add_tokens(["<tool>"]) == 1
    assert words.add_special_tokens({"additional_special_tokens": ["<|user|>"], "pad_token": "<pad>"}) == 2
    assert words.add_special_tokens({"bos_token": end}) == 0
    words.chat_template = CHAT
    words.save_pretrained(tmp_path / "again")
    for one in (words, transformers.AutoTokenizer.from_pretrained(tmp_path / "again")):
        user, pad = one.convert_tokens_to_ids(["<|user|>", "<pad>"])
        assert min(user, pad) >= size and one.pad_token_id == pad and len(one) == size + 3
        assert one("<|user|>plain<pad>").input_ids == [user, *plain[0], pad]
        chat = one.apply_chat_template([{"role": "user", "content": "plain"}], return_dict=False)
        assert chat == [user, *plain[0], tokenizer.end_of_document]
        assert one(f"{end} words{end}").input_ids == plain[1]
        assert one.decode(chat, skip_special_tokens=True) == "plain" and "<|user|>" in one.decode(chat)
        assert one.decode(torch.tensor([user]), skip_special_tokens=True) == ""
        assert one.batch_decode([[user, *plain[0]]] * 2, skip_special_tokens=True) == ["plain"] * 2
        assert len(one("<tool>").input_ids) == 1


def test_tokenizers_load_without_linnet(tmp_path):
    folder, text = exported(tmp_path, "tnl", TOKENIZERS["bpe"]()), "<|endoftext|> <|user|>plain words"
    words = transformers.AutoTokenizer.from_pretrained(folder)
    words.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    words.save_pretrained(folder)
    code = (
        "import sys, transformers; words = transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(words(sys.argv[2]).input_ids, words.eos_token, 'linnet' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code, folder, text]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1].endswith(f"{words(text).input_ids} <|endoftext|> False"), found.stdout


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_pipeline_writes_on(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]()
    folder = exported(tmp_path, "tnl-attention", tokenizer)
    write = transformers.pipeline("text-generation", model=str(folder))
    alone = [write(text, max_new_tokens=6, do_sample=False)[0]["generated_text"] for text in TEXTS[:2]]
    assert all(found.startswith(text) and len(found) > len(text) for found, text in zip(alone, TEXTS, strict=False))
    together = write(TEXTS[:2], max_new_tokens=6, do_sample=False, batch_size=2)
    assert [found[0]["generated_text"] for found in together] == alone


def test_the_trainer_trains(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    folder = exported(tmp_path, "hgrn2", ByteTokenizer())
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    examples = [words(text * 3) for text in ("plain words. ", "the other words! ", "one more. ") * 4]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trained"),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_steps=6,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        eval_dataset=examples,
        data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 0.2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained" / "checkpoint-6")
    tokens = torch.tensor([examples[0].input_ids])
    torch.testing.assert_close(again(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("name", ["tnl1", "mamba-attention", "lightnet"])
def test_lora_trains_adapters_alone(name, tmp_path):
    peft = pytest.importorskip("peft")
    folder = exported(tmp_path, name, ByteTokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(1, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    plain = model(tokens).logits.detach()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert torch.equal(adapted(tokens).logits, plain)  # an adapter begins as nothing
    frozen = {n: p.clone() for n, p in adapted.named_parameters() if "lora" not in n}
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(p, frozen[n]) for n, p in adapted.named_parameters() if n in frozen)
    adapted.eval().save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(tokens).logits, adapted(tokens).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(tokens)
    written = again.generate(input_ids=tokens, **options)
    assert torch.equal(written, again.generate(input_ids=tokens, use_cache=False, **options))
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tnl-attention", "mamba", "cosformer2"])
def test_bfloat16_casts_weights_but_not_what_needs_float32(name, tmp_path):
    folder = exported(tmp_path, name, ByteTokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected, _ = load_model(tmp_path / "model", dtype=torch.bfloat16)
    for (name, mine), its in zip(model.model.named_parameters(), expected.parameters(), strict=True):
        assert mine.dtype == its.dtype and torch.equal(mine, its), name
        assert mine.dtype == (torch.float32 if name in full_precision(expected) else torch.bfloat16)
    for (name, mine), (_, its) in zip(model.model.named_buffers(), exact.model.named_buffers(), strict=True):
        assert torch.equal(mine, its), name
    tokens = torch.randint(1, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    error = (model(tokens).logits.float() - exact(tokens).logits).square().mean().sqrt()
    assert error < 0.05 * exact(tokens).logits.square().mean().sqrt()


@pytest.mark.parametrize(
    "way",
    [
        lambda config: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        lambda config: hf.LinnetForCausalLM(config).to(torch.bfloat16),
        lambda config: hf.LinnetForCausalLM(config).bfloat16(),
        lambda config: hf.LinnetForCausalLM(config).half(),
        lambda config: torch.nn.Sequential(hf.LinnetForCausalLM(config)).half()[0],
        lambda config: _of_default_dtype(config, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("layout", ["hgrn+sglu", "tpe tnl+sglu"])
def test_every_cast_keeps_what_needs_float32(layout, way):
    config = hf.LinnetConfig(model={"d_model": 32, "layout": layout, "vocab_size": 64})
    torch.manual_seed(0)
    exact = hf.LinnetForCausalLM(config)
    torch.manual_seed(0)
    model = way(config)
    kept = full_precision(exact.model)
    assert kept and model.dtype in (torch.bfloat16, torch.float16)
    for (name, mine), its in zip(model.model.named_parameters(), exact.model.parameters(), strict=True):
        expected = its if name in kept else its.to(model.dtype)
        assert mine.dtype == expected.dtype and torch.equal(mine, expected), name
    for (name, mine), its in zip(model.model.named_buffers(), exact.model.buffers(), strict=True):
        assert mine.dtype == its.dtype and torch.equal(mine, its), name
    tokens = torch.arange(1, 9)[None]
    model(tokens, labels=tokens).loss.backward()
    model.to(torch.bfloat16)
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    assert {p.dtype for p in model.double().parameters()} == {torch.float64}


def _of_default_dtype(config, dtype):
    torch.set_default_dtype(dtype)
    try:
        return hf.LinnetForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def test_new_embeddings_are_saved_with_their_number(tmp_path):
    for name in ("tnl", "mamba"):
        model = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path / name, name, ByteTokenizer()))
        tokens = torch.arange(1, 9)[None]
        before = model(tokens).logits
        model.resize_token_embeddings(300)
        torch.testing.assert_close(model(tokens).logits[..., :256], before)
        model.save_pretrained(tmp_path / name / "larger")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "larger")
        assert again.config.vocab_size == 300 and torch.equal(again(tokens).logits, model(tokens).logits)


def test_embeddings_go_in_instead_of_tokens(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path, "tnl1", ByteTokenizer()))
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(tokens)).logits, model(tokens).logits)


def test_what_is_not_there_is_refused(tmp_path):
    folder = exported(tmp_path, "tnl", ByteTokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(1, 9).repeat(2, 1)
    with pytest.raises(ValueError, match="attention"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="input_ids.*inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="LinnetCache"):
        model(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match=r"\[2, 8\]"):
        model(tokens, attention_mask=torch.ones(2, 1, 8, 8))
    with pytest.raises(ValueError, match=r"\[2, 8\]"):
        model(tokens, attention_mask=torch.ones(2, 5))
    cache = hf.LinnetCache()
    model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="2 sequences"):
        model(tokens[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="tokens"):
        cache.crop(1)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(tokens[:1], assistant_model=model, max_new_tokens=2)
    with pytest.raises(ConfigError, match="'mine'"):
        hf.LinnetConfig(model={"d_model": 8, "layout": "mine x2"})
    with pytest.raises(ConfigError, match=f"{folder}: .*--out"):
        hf.export(tmp_path / "model", folder)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["tnl-attention", "hgrn2", "lightnet", "mamba", "cosformer2"])
def test_generation_on_a_gpu_is_that_without_a_cache(name, tmp_path):
    folder = exported(tmp_path, name, ByteTokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cuda")
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(1, 256, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :13] = 0
    expected = exact(tokens, attention_mask=mask).logits
    found = model(tokens.cuda(), attention_mask=mask.cuda()).logits.cpu()
    assert (found - expected)[mask.bool()].square().mean().sqrt() < 5e-3 * expected.square().mean().sqrt()
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", dtype=dtype)
        written = model.generate(tokens.cuda(), attention_mask=mask.cuda(), **options)
        assert written.shape == (3, 60)
        if dtype == torch.float32:
            again = model.generate(tokens.cuda(), attention_mask=mask.cuda(), use_cache=False, **options)
            assert (written == again).float().mean() > 0.9  # tensor cores round, and a near tie may go either way
