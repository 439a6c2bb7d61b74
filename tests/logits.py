"""Runs train.py, and at its end writes what the trained model makes of one batch, under its engine.

Usage: logits.py FILE [arguments of train.py]
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import train

SHAPE = (2, 24)


def write_logits_at_the_end(path: Path) -> None:
    """(2, 24, V), from a forward in which every process takes part; plain logits, before any loss."""
    import torch
    from safetensors.torch import save_file

    from cookbook.training.engine import Engine
    from cookbook.training.models import loss

    right_close = Engine.close

    def close(self: Engine) -> None:
        seen = []

        def nll(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(logits.detach().float().cpu())
            return right.nll(logits, *rest)

        right = loss.PLAIN
        loss.PLAIN = right._replace(nll=nll)
        ids = torch.randint(0, 300, SHAPE, generator=torch.Generator().manual_seed(3))
        self.model.eval()
        with torch.no_grad():  # every position has a target, so every position's hidden state meets the head
            batch = {"input_ids": ids, "targets": ids.flatten(), "target_positions": torch.arange(ids.numel())}
            self._forward(lambda model, batch: model(**batch), batch)
        if self.is_main:
            (logits,) = seen
            save_file({"input_ids": ids, "logits": logits.reshape(*SHAPE, -1)}, path)
        right_close(self)

    Engine.close = close


if __name__ == "__main__":
    write_logits_at_the_end(Path(sys.argv.pop(1)))
    sys.exit(train.main())
