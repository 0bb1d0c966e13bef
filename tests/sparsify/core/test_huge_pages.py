"""Memory that lives as long as a bucket asks for huge pages, before anything is written to it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify.core import huge_pages
from sparsify.core.gradients import FlatGradients
from sparsify.feedback import ErrorFeedback, LowPass, MomentumCorrection
from sparsify.kernels import TorchKernel, Workspace

N = 9 * 2**20  # 36 MB in float32: mostly a mapping of its own, seldom memory that was used before

asked_for = pytest.mark.skipif(
    huge_pages.system_setting() != "madvise", reason=f"this system's setting is {huge_pages.system_setting()}"
)


def is_advised(tensor: Tensor) -> bool:
    """Return True if the memory in the tensor's middle has the flag that madvise sets."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if inside and first == "VmFlags:":
            return "hg" in words
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= middle < end
    raise AssertionError("no mapping holds the tensor")


def flat(like: Tensor) -> Tensor:
    return FlatGradients([("p", Parameter(like))], "global").flat


MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "gradients": flat,
    "residual": ErrorFeedback().init,
    "momentum": lambda like: MomentumCorrection().init(like).momentum,
    "filtered": lambda like: LowPass().init(like).residual,
    "magnitudes": lambda like: TorchKernel(like).workspace.buffer("magnitudes"),
    "buffers": lambda like: Workspace(like).buffer("any"),
}


@asked_for
def test_what_lives_as_long_as_its_bucket_asks_for_huge_pages() -> None:
    for name, make in MAKE.items():
        assert is_advised(make(torch.empty(N))), name
    memory = mmap.mmap(-1, 4 * N, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert not is_advised(torch.frombuffer(memory, dtype=torch.float32))  # what nobody asked for


@asked_for
def test_what_is_small_or_elsewhere_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    small = torch.empty(huge_pages.MIN_NBYTES // 4 - 1)  # malloc may give it memory that was advised before
    monkeypatch.setattr(huge_pages, "_advise_kernel", lambda *_: pytest.fail("asked"))
    for tensor in (small, torch.empty(N, device="meta"), torch.empty(0)):
        assert huge_pages.request(tensor) is tensor


@pytest.mark.parametrize("setting", ["never", "always", "none"])
def test_other_systems_are_left_alone(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting != "none":
        (tmp_path / "enabled").write_text("always madvise never".replace(setting, f"[{setting}]"))
    monkeypatch.setattr(huge_pages, "SYSTEM_FOLDER", tmp_path)
    monkeypatch.setattr(huge_pages, "_advise_kernel", lambda *_: pytest.fail("asked"))
    huge_pages.system_setting.cache_clear()
    try:
        assert huge_pages.system_setting() == setting
        assert not huge_pages.zeros_like(torch.empty(N), torch.float32).any()
    finally:
        huge_pages.system_setting.cache_clear()


def test_a_refusal_is_told_once_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    huge_pages._log_once.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            huge_pages._advise_kernel(1, huge_pages.page_nbytes())  # no address of a page
    assert "".join(caplog.messages).count("no huge pages") == 1
