"""BERT classifiers of sentences (Devlin et al. 2019, arXiv 1810.04805), with transformers and peft.

Both are an optional extra: pip install 'edge-fl-testbed[bert]', and in containers
`requirements: [transformers, peft]`. No network is used: the bundled set is synthetic, and weights are
drawn at random unless `task.initial` gives others.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
    """Sentiment of a sentence, all of a BERT trained: `tiny` is BERT-Tiny (2 layers of 128; 4,386,178
    parameters), `small` a smaller one for the bundled synthetic sentences (45,090 parameters). Sentences
    are rows of tokens, 0 where a shorter one is filled up; other data by `task.data`. Needs transformers
    (`requirements: [transformers]` in containers)."""

    paper: ClassVar[str] = "Xu, Zhang, Di, Liu, Alharthi, Cao 2024: FedFa"
    dataset: ClassVar[str] = "synthetic-sentences"
    size: Literal["small", "tiny", "base"] = "small"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        return _of_tokens(_classifier(self.size))


@dataclass(frozen=True)
class Sst2BertLora(Task):
    """Sentiment of a sentence, low-rank adapters of BERT (LoRA, Hu et al. 2021, arXiv 2106.09685) for
    queries and values: adapters and head are trained and travel, the rest is frozen and the same
    everywhere. `base` is BERT-base: of 109 million parameters 38,402 travel at rank 1. `small` is for
    the bundled synthetic sentences; other data by `task.data`. Needs transformers and peft
    (`requirements: [transformers, peft]` in containers)."""

    paper: ClassVar[str] = "Xu, Zhang, Di, Liu, Alharthi, Cao 2024: FedFa"
    dataset: ClassVar[str] = "synthetic-sentences"
    size: Literal["small", "tiny", "base"] = "small"
    rank: int = 1
    """r of the adapters."""
    l2: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, expected at least 1")

    def model(self) -> torch.nn.Module:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # what does not travel is the same wherever it is built
            whole = _classifier(self.size)
        peft = _imported("peft")
        settings = peft.LoraConfig(
            task_type="SEQ_CLS", r=self.rank, lora_alpha=8, target_modules=["query", "value"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's own, about transformers
            return _of_tokens(peft.get_peft_model(whole, settings))


def _imported(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"it needs {package}, which cannot be imported ({error}): pip install "
            "'edge-fl-testbed[bert]', and in containers requirements: [transformers, peft]"
        ) from error


def _classifier(size: str) -> torch.nn.Module:
    """BERT with a head for two classes; without dropout, so that a seed gives the same run again."""
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


def _of_tokens(classifier: torch.nn.Module) -> torch.nn.Module:
    """Rows of tokens to scores of the classes."""
    import torch

    class Sentences(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Shape (batch, length) to (batch, 2)."""
            tokens = x.long()
            outputs = self.classifier(input_ids=tokens, attention_mask=(tokens != 0).long())
            scores: torch.Tensor = outputs.logits
            return scores

    return Sentences()
