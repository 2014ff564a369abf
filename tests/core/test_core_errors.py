"""After an error or Ctrl-C that a loop survives, all ranks go on with the same values, or raise."""

from __future__ import annotations

from typing import Any

import plain
import pytest
from core_runs import api, on_ranks
from core_runs import tested_core as tested_core
from pairs import every_stage
from plain import batches, sharded
from zoo import make_net

NET = make_net()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("write_rank", [None, 0, 1])
def test_nothing_is_kept_of_gathered_after_an_error(write_rank: int | None, precision: str | None, stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.adamw, stage=stage, precision=precision, timeout=20)
        plain.train_step(model, optimizer, batches(1)[0])
        before = plain.masters(model) | {f"{k} whole": v for k, v in plain.full_parameters(model).items()}
        with pytest.raises(KeyboardInterrupt), api.gathered(model, write_rank=write_rank):
            for parameter in model.parameters():
                parameter.data.mul_(2 + rank)
            raise KeyboardInterrupt
        after = plain.masters(model) | {f"{k} whole": v for k, v in plain.full_parameters(model).items()}
        plain.assert_equal(after, before)

    on_ranks(2, body)
