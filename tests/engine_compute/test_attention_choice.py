"""The choice of an attention backend, and the page tables that FlashInfer receives."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from contract.errors import SettingError
from engine.attention.backend import Needs, choose_backend, why_flashinfer_fails
from engine.attention.pages import pages_of
from engine.settings import EngineSettings
from tests.attention_cases import Case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def having(*packages: str) -> Callable[[str], bool]:
    return packages.__contains__


def works(_device: torch.device, _needs: Needs, _has_decodes: bool) -> str | None:
    return None


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "packages", "name"),
    [
        (CPU, "float32", 128, ("triton", "flashinfer"), "torch"),
        (CUDA, "bfloat16", 128, ("triton", "flashinfer"), "hybrid"),
        (CUDA, "float16", 64, ("triton", "flashinfer"), "hybrid"),
        (CUDA, "float32", 128, ("triton", "flashinfer"), "triton"),
        (CUDA, "bfloat16", 80, ("triton", "flashinfer"), "triton"),
        (CUDA, "bfloat16", 128, ("triton",), "triton"),
        (CUDA, "bfloat16", 128, ("flashinfer",), "torch"),
        (CUDA, "bfloat16", 128, (), "torch"),
    ],
)
def test_auto_chooses_by_device_dtype_and_packages(
    device: torch.device, dtype: str, head_dim: int, packages: tuple[str, ...], name: str
) -> None:
    assert choose_backend("auto", device, Needs(dtype, head_dim), having(*packages), works) == name


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "packages", "reason"),
    [
        ("triton", CPU, "float32", ("triton",), "it needs a CUDA device, and this is cpu"),
        ("triton", CUDA, "float32", (), "triton is not installed"),
        ("flashinfer", CUDA, "float32", ("triton", "flashinfer"), "this is float32"),
        ("flashinfer", CUDA, "bfloat16", ("triton",), "flashinfer is not installed"),
        ("hybrid", CUDA, "bfloat16", ("triton",), "flashinfer is not installed"),
        ("hybrid", CUDA, "bfloat16", ("flashinfer",), "triton is not installed"),
        ("hybrid", CUDA, "float32", ("triton", "flashinfer"), "this is float32"),
        ("hybrid", CPU, "bfloat16", ("triton", "flashinfer"), "it needs a CUDA device, and this is cpu"),
    ],
)
def test_an_unusable_backend_is_rejected_with_a_reason(
    setting: str, device: torch.device, dtype: str, packages: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(SettingError, match=f"attention_backend is '{setting}', but .*{reason}"):
        choose_backend(setting, device, Needs(dtype, 128), having(*packages), works)


def test_an_explicit_backend_is_used() -> None:
    for name in ("hybrid", "flashinfer", "triton", "torch"):
        packages = having("triton", "flashinfer")
        assert choose_backend(name, CUDA, Needs("bfloat16", 128), packages, works) == name


def test_no_kernel_reads_latents(caplog: pytest.LogCaptureFixture) -> None:
    """D6: a kernel that looks for values behind the keys would read other tokens' rows."""
    needs = Needs("bfloat16", 128, is_latent=True)
    packages = having("triton", "flashinfer")
    for name in ("hybrid", "flashinfer", "triton"):
        with pytest.raises(SettingError, match=f"attention_backend is '{name}', but .* one latent row"):
            choose_backend(name, CUDA, needs, packages, works)
    with caplog.at_level("INFO"):
        assert choose_backend("auto", CUDA, needs, packages, works) == "torch"
    assert "this cache has one latent row" in caplog.text


def test_kernels_that_convert_nothing_read_no_other_kv(caplog: pytest.LogCaptureFixture) -> None:
    """D12: an explicit one is refused with both settings; auto takes plain torch, and the log gives the reason."""
    needs = Needs("bfloat16", 128, kv_dtype="float32")
    packages = having("triton", "flashinfer")
    reason = "it reads KV in bfloat16, and kv_cache_dtype is float32"
    for name in ("hybrid", "flashinfer", "triton"):
        with pytest.raises(SettingError, match=f"attention_backend is '{name}', but {reason}"):
            choose_backend(name, CUDA, needs, packages, works)
    with caplog.at_level("INFO"):
        assert choose_backend("auto", CUDA, needs, packages, works) == "torch"
    assert f"attention by torch (not hybrid: {reason}; not triton: {reason})" in caplog.text
    assert "attention by plain torch is slow on CUDA" in caplog.text
    assert choose_backend("torch", CUDA, needs, packages, works) == "torch"
    same = Needs("bfloat16", 128, kv_dtype="bfloat16")
    assert choose_backend("auto", CUDA, same, packages, works) == "hybrid"


def test_auto_announces_why_flashinfer_fails_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """The package is there, and its kernels can neither be loaded nor compiled."""
    needs = Needs("bfloat16", 128, 7, frozenset({None, 500}))
    tried = list[tuple[torch.device, Needs, bool]]()

    def fails(device: torch.device, given: Needs, has_decodes: bool) -> str | None:
        tried.append((device, given, has_decodes))
        return "it does not work here: RuntimeError: nvcc is missing"

    packages = having("triton", "flashinfer")
    with caplog.at_level("INFO"):
        assert choose_backend("auto", CUDA, needs, packages, fails) == "triton"
    assert "attention by triton (not hybrid: it does not work here: RuntimeError: nvcc" in caplog.text
    with pytest.raises(SettingError, match=r"'flashinfer', but it does not work here: .*nvcc is missing"):
        choose_backend("flashinfer", CUDA, needs, packages, fails)
    assert tried == [(CUDA, needs, False), (CUDA, needs, True)]
    assert choose_backend("triton", CUDA, needs, packages, fails) == "triton"
    assert choose_backend("auto", CUDA, Needs("float32", 128), packages, fails) == "triton"
    assert len(tried) == 2


def test_what_plain_torch_alone_computes_is_left_to_it() -> None:
    packages = having("triton", "flashinfer")
    needs = Needs("bfloat16", 128, special="attention sinks")
    assert choose_backend("auto", CUDA, needs, packages, lambda *_: None) == "torch"
    for name in ("triton", "flashinfer", "hybrid"):
        with pytest.raises(SettingError, match=f"'{name}', but it does not compute attention sinks"):
            choose_backend(name, CUDA, needs, packages, lambda *_: None)


def test_a_library_that_cannot_be_imported_is_a_reason() -> None:
    """Here FlashInfer, Triton or the device is missing."""
    reason = why_flashinfer_fails(CUDA, Needs("bfloat16", 128), True)
    assert reason is not None
    assert reason.startswith("it does not work here: ")


@pytest.mark.parametrize("has_decode_kernel", [True, False])
def test_auto_needs_none_of_flashinfers_decodes(has_decode_kernel: bool) -> None:
    """Its kernel for decodes may be missing in an image that has those for prompts."""

    def fails(_device: torch.device, _needs: Needs, has_decodes: bool) -> str | None:
        return "no decode kernel" if has_decodes and not has_decode_kernel else None

    packages = having("triton", "flashinfer")
    assert choose_backend("auto", CUDA, Needs("bfloat16", 128), packages, fails) == "hybrid"
    if has_decode_kernel:
        assert choose_backend("flashinfer", CUDA, Needs("bfloat16", 128), packages, fails) == "flashinfer"
    else:
        with pytest.raises(SettingError, match="no decode kernel"):
            choose_backend("flashinfer", CUDA, Needs("bfloat16", 128), packages, fails)


def test_an_unknown_backend_is_rejected() -> None:
    with pytest.raises(
        SettingError, match=r"attention_backend is 'flash'.*allowed: auto, hybrid, flashinfer"
    ):
        EngineSettings(model=Path(), attention_backend="flash")  # type: ignore[arg-type]


def test_page_lists_are_the_block_tables_without_padding() -> None:
    """Unused rows have one token in the null block."""
    inputs = Case(block_size=4, work=((3, 1), (4, 1), (0, 9))).inputs()
    pages = pages_of(inputs, 4, 5)
    tables = inputs.block_table
    assert pages.starts.tolist() == [0, 1, 3, 6, 7, 8]
    assert pages.indices.tolist() == [tables[0, 0], *tables[1, :2], *tables[2, :3], 0, 0]
    assert pages.last.tolist() == [4, 1, 1, 1, 1]
