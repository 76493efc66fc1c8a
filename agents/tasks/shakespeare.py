"""The next character of a play, by a recurrent network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ShakespeareLstm(Task):
    """Shakespeare, the character that follows 80 others, of 80 different ones: an embedding of 8, two
    LSTM layers of 100 and a linear layer; 133,520 parameters. Each role of a play is a client's data
    with `partition: {scheme: natural}`."""

    paper: ClassVar[str] = "Fraboni, Vidal, Kameni, Lorenzi 2023: FedFix"
    dataset: ClassVar[str] = "flwrlabs/shakespeare"
    has_perplexity: ClassVar[bool] = True
    characters: ClassVar[int] = 80
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        class Network(nn.Module):
            def __init__(self, characters: int) -> None:
                super().__init__()
                self.embedding = nn.Embedding(characters, 8)
                self.lstm = nn.LSTM(8, 100, num_layers=2, batch_first=True)
                self.output = nn.Linear(100, characters)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                """Tokens, shape (batch, length), to a score for each character, (batch, 80)."""
                states, _ = self.lstm(self.embedding(x.long()))
                scores: torch.Tensor = self.output(states[:, -1])
                return scores

        return Network(self.characters)
