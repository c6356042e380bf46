"""A GPU with one queue and a host that issues calls to it, as clocks alone: nothing is computed."""

from contextlib import nullcontext

import torch


class FakeGpu:
    """In milliseconds. Stands in for torch.cuda as far as timing goes."""

    def __init__(self, monkeypatch):
        self.now = self.free = 0.0  # the host's time; when the GPU has done all that is in its queue
        self.idle, self.issued = 0.0, []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self, enable_timing))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.wait(self.free))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def issue(self, name, host, device):
        """A call that the host takes so long to issue, and the GPU so long to run."""
        self.issued.append(name)
        self.now += host
        self.idle += max(0.0, self.now - self.free)
        self.free = max(self.free, self.now) + device

    def wait(self, until):
        self.now = max(self.now, until)


class Event:
    def __init__(self, gpu, enable_timing):
        assert enable_timing
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.free, self.gpu.now)

    def query(self):
        return self.gpu.now >= self.at

    def synchronize(self):
        self.gpu.wait(self.at)

    def elapsed_time(self, end):
        return end.at - self.at
