"""Prediction of the next character of a play."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ShakespeareLstm(Task):
    """Shakespeare: predict the character that follows 80 others, with an alphabet of 80 characters. The
    model has an embedding of size 8, two LSTM layers of 100 and a linear layer; 133,520 parameters. With
    `partition: {scheme: natural}`, each client has the lines of one role of a play."""

    paper: ClassVar[str] = "Fraboni, Vidal, Kameni, Lorenzi 2023: FedFix"
    dataset: ClassVar[str] = "flwrlabs/shakespeare"
    has_perplexity: ClassVar[bool] = True
    characters: ClassVar[int] = 80
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        class CharacterLstm(nn.Module):
            def __init__(self, characters: int) -> None:
                super().__init__()
                self.embedding = nn.Embedding(characters, 8)
                self.lstm = nn.LSTM(8, 100, num_layers=2, batch_first=True)
                self.output = nn.Linear(100, characters)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                """Map tokens, shape (batch, length), to a score per character, shape (batch, 80)."""
                states, _ = self.lstm(self.embedding(x.long()))
                scores: torch.Tensor = self.output(states[:, -1])
                return scores

        return CharacterLstm(self.characters)


@dataclass(frozen=True)
class ShakespeareMlp(Task):
    """Shakespeare: predict a character from the 10 before it, with an alphabet of 80 characters. The
    model, after Bengio, Ducharme, Vincent, Jauvin 2003 (JMLR 3), has an embedding of size 16, a hidden
    layer of 100 with ReLU, and a linear layer; 25,460 parameters. A step takes a small part of the time
    of a step of `shakespeare-lstm`."""

    dataset: ClassVar[str] = "flwrlabs/shakespeare"
    has_perplexity: ClassVar[bool] = True
    characters: ClassVar[int] = 80
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.ZeroPad1d((10 - 80, 0)),  # the dataset has 80 characters: cut all but the last 10
            nn.Embedding(self.characters, 16),
            nn.Flatten(),
            nn.Linear(10 * 16, 100),
            nn.ReLU(),
            nn.Linear(100, self.characters),
        )
