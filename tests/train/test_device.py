"""Choice of the device, and what is known of it."""

import os
from pathlib import Path

import pytest
import torch

from linnet import provenance
from linnet.config import ConfigError
from linnet.train import device, train
from linnet.train.processes.launch import launch


def test_choice(monkeypatch):
    assert device.choose("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device: 'cuda'"):
        device.choose("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.choose("auto") == torch.device("cuda")


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA T4", None),
    ],
)
def test_peaks(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device.peak_flops(torch.device("cuda")) == peak
    assert device.peak_flops(torch.device("cpu")) is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the same number")
def test_memory_is_the_peak_of_the_process():
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    assert device.memory_bytes(torch.device("cpu")) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("width", "tokens", "variables", "expected"),
    [
        (64, 1024, {}, 1),
        (128, 4096, {}, 4),
        (1024, 8192, {}, 8),
        (64, 1024, {"OMP_NUM_THREADS": "8"}, 8),
        (64, 1024, {"OMP_NUM_THREADS": "8", provenance.SHARE: "8"}, 1),  # Linnet's own, for a process that it started
    ],
)
def test_threads_follow_the_size_of_the_model(monkeypatch, width, tokens, variables, expected):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(8)
    try:
        with device.threads(torch.device("cpu"), width, tokens):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)


def test_a_run_records_the_threads_that_it_had_and_leaves_those_of_the_process(settings, cache, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        chosen = train(settings(), tmp_path / "chosen", cache)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        given = train(settings(), tmp_path / "given", cache)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [run.result()["environment"]["threads"] for run in (chosen, given)] == [1, 2]


@pytest.mark.parametrize(
    ("variable", "environment", "expected"),
    [
        (None, {}, ("4", "4")),  # a share of the cores, of which small models take fewer
        ("3", {}, ("3", None)),
        (None, {"OMP_NUM_THREADS": "8"}, ("8", None)),
    ],
)
def test_threads_of_the_processes_of_a_machine(monkeypatch, variable, environment, expected):
    seen = []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    names = "OMP_NUM_THREADS", provenance.SHARE
    monkeypatch.setattr(
        "torch.distributed.launcher.api.launch_agent", lambda *_: seen.append(tuple(map(os.environ.get, names)))
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    launch(["train"], 2, environment=environment)
    assert seen == [expected] and os.environ.get("OMP_NUM_THREADS") == variable
