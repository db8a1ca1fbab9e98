"""`make gpu-check`: the kernel that finds best tokens, on CUDA against torch on the CPU."""

import pytest
import torch

from tests.best_token_cases import SIZES, check_best_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("size", [*SIZES, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_are_those_of_torch(size: int, dtype: torch.dtype) -> None:
    check_best_tokens(size, dtype, torch.device("cuda", 0))
