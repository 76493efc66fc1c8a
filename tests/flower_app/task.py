import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)


def load_digits():
    """Read the file of scikit-learn, whose import would take each process seconds."""
    folder = Path(find_spec("sklearn").origin).parent
    with gzip.open(folder / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",")


def load_data(partition_id, num_partitions):
    digits = load_digits()[partition_id::num_partitions]
    x = torch.tensor(digits[:, :-1] / 16, dtype=torch.float32)
    y = torch.tensor(digits[:, -1].astype(np.int64))
    cut = len(x) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def train(net, data, epochs, lr):
    x, y = data
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total = loss.item()
    return total


def test(net, data):
    x, y = data
    net.eval()
    with torch.no_grad():
        out = net(x)
        return nn.functional.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()
