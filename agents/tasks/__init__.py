"""The learning tasks. To add a task, write a module in this folder and add a line to `TASKS`."""

from __future__ import annotations

from agents.tasks.bert import Sent140TinyBert, Sst2BertLora
from agents.tasks.cnn import Cifar10Cnn, Cifar10CnnSmall, MnistCnn
from agents.tasks.defedavg_cnn import Cifar10CnnDefedavg, FashionMnistCnn
from agents.tasks.interface import Task
from agents.tasks.logreg import DigitsLogreg, MnistLogreg
from agents.tasks.mcmahan_cnn import Cifar10CnnMcmahan
from agents.tasks.mlp import MnistMlp
from agents.tasks.quadratic import Quadratic
from agents.tasks.resnet import Cifar10ResNet18
from agents.tasks.shakespeare import ShakespeareLstm, ShakespeareMlp

TASKS: dict[str, type[Task]] = {
    "cifar10-cnn": Cifar10Cnn,
    "cifar10-cnn-defedavg": Cifar10CnnDefedavg,
    "cifar10-cnn-mcmahan": Cifar10CnnMcmahan,
    "cifar10-cnn-small": Cifar10CnnSmall,
    "cifar10-resnet18": Cifar10ResNet18,
    "digits-logreg": DigitsLogreg,
    "fashion-mnist-cnn": FashionMnistCnn,
    "mnist-cnn": MnistCnn,
    "mnist-logreg": MnistLogreg,
    "mnist-mlp": MnistMlp,
    "quadratic": Quadratic,
    "sent140-tinybert": Sent140TinyBert,
    "shakespeare-lstm": ShakespeareLstm,
    "shakespeare-mlp": ShakespeareMlp,
    "sst2-bert-lora": Sst2BertLora,
}
