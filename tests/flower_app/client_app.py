"""A NumPyClient and client_fn as `flwr new` wrote them."""
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context

from flower_app.task import Net, load_data, test, train


def get_weights(net):
    return [val.cpu().numpy() for _, val in net.state_dict().items()]


def set_weights(net, parameters):
    keys = net.state_dict().keys()
    net.load_state_dict({k: torch.tensor(v) for k, v in zip(keys, parameters, strict=True)}, strict=True)


class FlowerClient(NumPyClient):
    def __init__(self, net, trainset, valset, epochs):
        self.net, self.trainset, self.valset, self.epochs = net, trainset, valset, epochs

    def get_parameters(self, config):
        return get_weights(self.net)

    def fit(self, parameters, config):
        set_weights(self.net, parameters)
        loss = train(self.net, self.trainset, self.epochs, config["lr"])
        return get_weights(self.net), len(self.trainset[0]), {"train_loss": loss}

    def evaluate(self, parameters, config):
        set_weights(self.net, parameters)
        loss, accuracy = test(self.net, self.valset)
        return loss, len(self.valset[0]), {"accuracy": accuracy}


def client_fn(context: Context):
    partition, count = context.node_config["partition-id"], context.node_config["num-partitions"]
    trainset, valset = load_data(partition, count)
    return FlowerClient(Net(), trainset, valset, context.run_config["local-epochs"]).to_client()


app = ClientApp(client_fn)
