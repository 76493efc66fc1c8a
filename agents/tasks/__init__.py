"""The learning tasks. To add one: a module beside this file, and a line in TASKS."""

from __future__ import annotations

from agents.tasks.cnn import MnistCnn
from agents.tasks.interface import Task
from agents.tasks.logreg import DigitsLogreg, MnistLogreg

TASKS: dict[str, type[Task]] = {
    "digits-logreg": DigitsLogreg,
    "mnist-cnn": MnistCnn,
    "mnist-logreg": MnistLogreg,
}
