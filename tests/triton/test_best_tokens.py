"""The kernel that finds best tokens, under Triton's interpreter."""

import pytest
import torch

from tests.attention_cases import CPU
from tests.best_token_cases import SIZES, check_best_tokens

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning",
        "ignore:invalid value encountered:RuntimeWarning",
    ),  # raised by the interpreter
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_are_those_of_torch(size: int, dtype: torch.dtype) -> None:
    check_best_tokens(size, dtype, CPU)
