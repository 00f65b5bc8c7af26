"""StripedHyena with experts in the sizes of Tables C.3 and C.4 of paper 004, beside the printed counts."""

import pytest
from reproduce_items import LIBRARY

from linnet.models import active_parameters, count_parameters, get_recipe
from linnet.models.recipes.sizes_004 import C2_SIZES, GPT2_VOCAB

SIZES = [name for name, size in C2_SIZES.items() if size.moe_width is not None]


@pytest.mark.parametrize("table", ["C.3", "C.4"])
def test_counts_differ_from_the_printed_ones_by_one_tensor(table):
    """Printed per layer: 9 matrices [d_model, width]; here 8 experts of 3, half as wide. C.4 counts 2 Hyenas of 8."""
    published = LIBRARY.items["004", f"table{table}"].item.published
    for name, row in zip(SIZES, published.rows, strict=True):
        config, size = get_recipe(name.replace("c2", table.lower().replace(".", ""))), C2_SIZES[name]
        total, width = count_parameters(config)[0], published.expected(row, "moe_width")
        assert config.options["moe"]["inner"] == width / 2 and config.num_layers == size.num_layers
        attention = [block.mixer for block in config.blocks].count("attention")
        assert attention == -(-(size.num_layers - 1) // 12)
        more = 3 * size.num_layers * config.d_model * width
        assert (total - more) / 1e6 == pytest.approx(published.expected(row, "parameters"), rel=0.008), row
        active = active_parameters(config) + GPT2_VOCAB * config.d_model
        if table == "C.4":
            expert = published.expected(row, "expert_width")
            assert config.options["hyena_experts"]["expert_width"] == expert
            active -= 6 * 3 * config.d_model * expert * (size.num_layers - attention)
        assert active / 1e6 == pytest.approx(published.expected(row, "parameters_active"), rel=0.035), row
