"""The learning tasks. To add one: a module beside this file, and a line in TASKS."""

from __future__ import annotations

from agents.tasks.cnn import Cifar10Cnn, MnistCnn
from agents.tasks.interface import Task
from agents.tasks.logreg import DigitsLogreg, MnistLogreg
from agents.tasks.quadratic import Quadratic

TASKS: dict[str, type[Task]] = {
    "cifar10-cnn": Cifar10Cnn,
    "digits-logreg": DigitsLogreg,
    "mnist-cnn": MnistCnn,
    "mnist-logreg": MnistLogreg,
    "quadratic": Quadratic,
}
