"""BERT classifiers of sentences (Devlin et al. 2019, arXiv 1810.04805).

The classifiers use the optional packages transformers and peft. Install them with pip install
'edge-fl-testbed[bert]'; in containers, set `requirements: [transformers, peft]`. Nothing is downloaded,
because the bundled dataset is synthetic, and weights are random unless `task.initial` is set.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agents import extras
from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch

_SIZES: dict[str, dict[str, int]] = {
    "small": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "tiny": {"vocab_size": 30522, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "base": {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}


@dataclass(frozen=True)
class Sent140TinyBert(Task):
    """Sentiment of sentences. All parameters of a BERT are trained: `tiny` is BERT-Tiny (2 layers of
    128; 4,386,178 parameters), and `small` is a smaller model for the bundled synthetic sentences
    (45,090 parameters). A sentence is a row of tokens, padded with 0. Set other data with `task.data`.
    The task needs transformers (`requirements: [transformers]` in containers)."""

    paper: ClassVar[str] = "Xu, Zhang, Di, Liu, Alharthi, Cao 2024: FedFa"
    dataset: ClassVar[str] = "synthetic-sentences"
    size: Literal["small", "tiny", "base"] = "small"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        return _on_tokens(_classifier(self.size))


@dataclass(frozen=True)
class Sst2BertLora(Task):
    """Sentiment of sentences. Only the head of a BERT and low-rank adapters of its queries and values
    are trained and sent (LoRA, Hu et al. 2021, arXiv 2106.09685). The other parameters are frozen and
    the same on all devices. `base` is BERT-base: 38,402 of its 109 million parameters are sent at rank
    1. `small` is for the bundled synthetic sentences. Set other data with `task.data`. The task needs
    transformers and peft (`requirements: [transformers, peft]` in containers)."""

    paper: ClassVar[str] = "Xu, Zhang, Di, Liu, Alharthi, Cao 2024: FedFa"
    dataset: ClassVar[str] = "synthetic-sentences"
    size: Literal["small", "tiny", "base"] = "small"
    rank: int = 1
    """r, rank of the adapters."""
    l2: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, expected at least 1")

    def model(self) -> torch.nn.Module:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # frozen parameters are not sent, so they must be equal on all devices
            classifier = _classifier(self.size)
        peft = _imported("peft")
        settings = peft.LoraConfig(
            task_type="SEQ_CLS", r=self.rank, lora_alpha=8, target_modules=["query", "value"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's own, about transformers
            return _on_tokens(peft.get_peft_model(classifier, settings))


def _imported(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"it needs {package}, which cannot be imported ({error}): run "
            f"{extras.install_command(package)}; in containers, set requirements: [transformers, peft]"
        ) from error


def _classifier(size: str) -> torch.nn.Module:
    """BERT with a head for two classes, without dropout, so that runs are reproducible."""
    transformers = _imported("transformers")
    dimensions = _SIZES[size]
    config = transformers.BertConfig(
        **dimensions,
        intermediate_size=4 * dimensions["hidden_size"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    classifier: torch.nn.Module = transformers.BertForSequenceClassification(config)
    return classifier


def _on_tokens(classifier: torch.nn.Module) -> torch.nn.Module:
    """Return a module that maps rows of tokens to the classifier's scores."""
    import torch

    class Sentences(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Tokens, shape (batch, length), to scores, shape (batch, 2)."""
            tokens = x.long()
            outputs = self.classifier(input_ids=tokens, attention_mask=(tokens != 0).long())
            scores: torch.Tensor = outputs.logits
            return scores

    return Sentences()
