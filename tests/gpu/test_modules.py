"""The FlashInfer modules that are built beforehand, with a fake of its compiler."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import pytest

from benchmarks.gpu_modules import build
from tests.gpu.test_cuda_attention import SHAPES, WINDOW


class FakeSpec:
    """A module that is compiled into a file with its own name in it."""

    def __init__(self, folder: Path, *name: object) -> None:
        self.name = "_".join(map(str, name))
        self.jit_library_path = folder / f"{self.name}.so"

    def build(self, *, verbose: bool) -> None:
        assert not verbose
        self.jit_library_path.write_text(self.name)


def test_every_kernel_is_built_with_and_without_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer finds each in a folder of its name."""
    page: Any = ModuleType("flashinfer.jit.page")
    page.gen_page_module = lambda: FakeSpec(tmp_path, "page")
    modules: Any = ModuleType("flashinfer.jit.attention.modules")

    def generated(kind: str, *given: object) -> FakeSpec:
        query, kv, output, *others = given
        assert query == kv == output
        return FakeSpec(tmp_path, kind, query, *others)

    modules.gen_batch_decode_module = partial(generated, "decode")
    modules.gen_batch_prefill_module = generated
    for module in (page, modules):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    archive = tmp_path / "kernels.zip"
    build(archive)
    sizes = "torch.bfloat16_torch.int32_128_128_0"
    wanted = ["page"]
    for has_window in (False, True):
        wanted.append(f"decode_{sizes}_{has_window}_False")
        wanted += [f"{kernel}_{sizes}_{has_window}_False_False" for kernel in ("fa2", "fa3")]
    with ZipFile(archive) as file:
        assert file.namelist() == [f"aot/{name}/{name}.so" for name in wanted]
        assert [file.read(name).decode() for name in file.namelist()] == wanted
    assert {case.head_dim for case in (*SHAPES.values(), WINDOW)} == {128}, (
        "modules for other sizes are others"
    )
    assert not any(case.softcap for case in (*SHAPES.values(), WINDOW))
