"""Rows of random tokens, for trials and measurements. Loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.batches import Demonstrations
    from flowrl.ragged import Ragged


def random_prompts(num_rows: int, length: int, vocab: int, seed: int = 0) -> Ragged:
    """int64 ragged ``[num_rows × length]``."""
    import torch

    from flowrl.ragged import Ragged

    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_rows(
        [torch.randint(0, vocab, (length,), generator=generator) for _ in range(num_rows)], torch.int64
    )


def demonstrations(prompts: Ragged, responses: Ragged) -> Demonstrations:
    """Rows of prompts and what follows each."""
    import torch

    from flowrl.batches import Demonstrations, Spans
    from flowrl.ragged import Ragged

    rows = torch.arange(prompts.num_rows)
    return Demonstrations(
        prompt_id=rows,
        sample_id=torch.zeros_like(rows),
        tokens=Ragged.join(prompts, responses),
        spans=Spans.prompt_then_response(prompts.lengths, responses.lengths, -1),
    )


def sft_rows(engine: Any, rows: Demonstrations) -> Any:
    """The rows as a term that an engine's ``train_step`` takes."""
    from flowrl.nodes.sft import SFTLoss
    from flowrl.nodes.updater import term_rows

    return term_rows(SFTLoss()(rows), engine)
