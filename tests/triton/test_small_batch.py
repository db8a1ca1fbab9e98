"""Products of small batches against plain torch, under Triton's interpreter (`make test-triton`)."""

import pytest
import torch

from engine.fused.small_batch_tiles import Form, Tiles
from tests.attention_cases import CPU
from tests.small_batch_cases import ROW, ROWS, SPLIT, FewCase, check_few_rows, check_rows_alone

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning"
    ),  # raised by the interpreter
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", list(Form))
def test_products(form: Form, has_bias: bool, dtype: torch.dtype) -> None:
    """Sizes are whole tiles, or end in the middle of one. A norm is computed with the product of one row only."""
    for tiles, num_tokens in ((ROW, 1), (ROWS, 16), (ROWS, 3)):
        for sizes in ((256, 48), (330, 37)):
            check_few_rows(FewCase(form, tiles, num_tokens, *sizes), dtype, CPU, has_bias=has_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [Form.ADDED, Form.PLAIN])
def test_splits(form: Form, dtype: torch.dtype) -> None:
    """The last split may have fewer inputs than the others, or none."""
    for sizes in ((512, 48), (330, 37), (130, 16)):
        for num_tokens in (2, 29):
            check_few_rows(FewCase(form, SPLIT, num_tokens, *sizes), dtype, CPU, has_bias=True)


@pytest.mark.parametrize("tiles", [ROWS, SPLIT])
def test_a_row_does_not_depend_on_others(tiles: Tiles) -> None:
    check_rows_alone(FewCase(Form.ADDED, tiles, 13, 330, 37), torch.float32, CPU)
