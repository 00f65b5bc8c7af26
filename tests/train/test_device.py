"""Choice of the device, and what is known of it."""

from pathlib import Path

import pytest
import torch

from linnet.config import ConfigError
from linnet.train import device


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
