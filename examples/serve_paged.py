"""A model with a memory in pages for keys and values: computes the steps of `serve_engine.py`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from serve_batch import Row
from serve_model import Model
from serve_pages import PAGE, Sequence
from torch import Tensor


class Prefilled(NamedTuple):
    """The token after a prompt, and the keys and values of the prompt (L, 2, H, T, D), if they do not go by layer."""

    token: int
    kv: Tensor | None


# Is given keys and values of a prompt: all of them (L, 2, H, T, D), or those of each layer as soon as they are there.
Export = Callable[[Sequence, Tensor], object]


class PagedModel:
    def __init__(self, model: Model, pages: int) -> None:
        self.layers, heads, size = model.shape
        self.model, self.memory_NLKHPD = model, torch.zeros(pages, self.layers, 2, heads, PAGE, size)

    @torch.no_grad()
    def step(self, rows: list[Row], export: Export) -> list[int]:
        """The most likely next token of each row."""
        for row in rows:
            if (kv_LKHTD := row.sequence.imported) is not None:
                self.write(torch.zeros(1, dtype=torch.long), [row], kv_LKHTD[:, :, None])
        # Rows of one token are computed together.
        singles, chunks = [row for row in rows if len(row.tokens) == 1], [row for row in rows if len(row.tokens) > 1]
        groups = ([singles] if singles else []) + [[row] for row in chunks]
        found = {row: token for group in groups for row, token in zip(group, self.forward(group, export), strict=True)}
        return [found[row] for row in rows]

    def forward(self, rows: list[Row], export: Export) -> list[int]:
        starts_B = torch.tensor([row.start for row in rows])
        past_LKBHPD = self.read(rows)
        exporting = {
            number: list[Tensor]()
            for number, row in enumerate(rows)
            if row.sequence.exports and row.start + len(row.tokens) == len(row.sequence.tokens)
        }
        new: list[Tensor] = []

        def on_layer(kv_KBHTD: Tensor) -> None:
            past_KBHPD = past_LKBHPD[len(new)]
            new.append(kv_KBHTD)
            for number, parts in exporting.items():
                row = rows[number]
                parts.append(torch.cat([past_KBHPD[:, number, :, : row.start], kv_KBHTD[:, number]], 2))
                if row.sequence.by_layer:
                    export(row.sequence, parts[-1])

        tokens_BT = torch.tensor([list(row.tokens) for row in rows])
        logits_BV = self.model(tokens_BT, past_LKBHPD, starts_B, on_layer)
        self.write(starts_B, rows, torch.stack(new))
        for number, parts in exporting.items():
            if not rows[number].sequence.by_layer:
                export(rows[number].sequence, torch.stack(parts))
        return logits_BV.argmax(1).tolist()

    def read(self, rows: list[Row]) -> Tensor:
        """The pages before the tokens of each row, as keys and values (L, 2, B, H, P, D)."""
        table_BN = table(rows, -(-max(row.start for row in rows) // PAGE))
        return self.memory_NLKHPD[table_BN].permute(2, 3, 0, 4, 1, 5, 6).flatten(4, 5)

    def write(self, starts_B: Tensor, rows: list[Row], kv_LKBHTD: Tensor) -> None:
        places_BT = starts_B[:, None] + torch.arange(kv_LKBHTD.shape[4])
        table_BN = table(rows, max(len(row.pages) for row in rows))
        pages = table_BN.gather(1, places_BT // PAGE).flatten()
        self.memory_NLKHPD[pages, :, :, :, places_BT.flatten() % PAGE] = kv_LKBHTD.permute(2, 4, 0, 1, 3, 5).flatten(
            0, 1
        )


def table(rows: list[Row], most: int) -> Tensor:
    """The first pages of each row (B, N). Any page will do behind its last one: its content does not count."""
    pages = [(*row.pages, *[0] * most)[:most] for row in rows]
    return torch.tensor(pages, dtype=torch.long).view(len(rows), most)
