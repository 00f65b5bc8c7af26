"""Folders of MAD runs that 0.1.0 began continue."""

import hashlib
import json

import pytest

from linnet.mad.architectures import architecture, mqar_architecture
from linnet.mad.run import designs, mad_runs


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# Of 0.1.0: the names of the run folders of `core`, those of `smoke` as mad-lab has it, and the model in plan.json.
NAMES = {
    "mad-hyena-swiglu": ("ead29f0fcd7b", "63612ce43a44", "f2acc595e460"),
    "mad-attention-moe": ("108e0e56ba44", "4d0b7e23367d", "0e490e76a90d"),
    "mad-mamba": ("91a02e8ca106", "fc5bf7aa8972", "a0f025c8468b"),
    "mad-mh-hyena-attention-moe": ("5f40bdc22013", "20ee434ab508", "3be0882fb468"),
    "mad-hyena-experts-attention-moe": ("3652ccac746e", "d04148860bad", "4f690a7b7560"),
    "mad-gla-attention-swiglu": ("c98c89e4111b", "08251d03c3b8", "c1c3c249a86a"),
    "mad-mamba-attention-swiglu": ("6822a30517fe", "55096e60589e", "1b4544212d84"),
    "hgrn2+swiglu x2": ("59f606c62962", "f13c44363538", "bf16a65c8df3"),
    "tnl+swiglu x2": ("feab37bdb459", "84b068390cbd", "9f87c762d025"),
    "lightnet+swiglu x2": ("6f43b86689b9", "75b0f5265b35", "5b123d296e96"),
    "cosformer2+sglu x2": ("50f312b2cac4", "26fad0fe786e", "7f36bda2241a"),
    "hgrn+mlp x2": ("f842fac3226e", "31bfccd23b8c", "7156e9b4de4a"),
    "tnl+glu x2": ("3f1e9a1f7eb6", "106c12193ce7", "f77da5a61cb3"),
}
MQAR = {
    "hgrn2": "ad87466a625d",
    "hgrn": "f28c23b2b583",
    "attention": "da397adfef08",
    "gla": "0bbc59d2e146",
    "mamba": "61faa9d188eb",
    "tnl": "4c99b0cc5146",
}


@pytest.mark.parametrize("name", NAMES)
def test_run_folders_and_plans_of_the_first_release_are_found(name):
    """A folder that 0.1.0 began goes on only if every run has the name, and every model the record, that it had."""
    model = architecture(name, state=0) if name in UNNORMALISED else architecture(name)
    core = "\n".join(run.run for run in mad_runs({name: model}, "core"))
    lab = "\n".join(run.run for run in mad_runs({name: model}, "smoke", spec="mad-lab"))
    record = json.dumps(designs({name: model}, []), sort_keys=True)
    assert (short(core), short(lab), short(record)) == NAMES[name]


UNNORMALISED = ("lightnet+swiglu x2", "cosformer2+sglu x2", "hgrn+mlp x2", "tnl+glu x2")


@pytest.mark.parametrize("name", MQAR)
def test_run_folders_of_mqar_are_found(name):
    assert short("\n".join(run.run for run in mad_runs({name: mqar_architecture(name)}, "mqar"))) == MQAR[name]


def test_a_name_in_full():
    run = mad_runs({"mad-mamba": architecture("mad-mamba")}, "smoke")[0]
    assert run.run == "mad-mamba-in_context_recall-baseline-lr-0.0005-wd-0-0842f5c3cf11"
