"""A ClientApp with the message API, as `flwr new` writes it."""
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_app.task import Net, load_data
from flower_app.task import test as test_fn
from flower_app.task import train as train_fn

app = ClientApp()


def loaded(msg, context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    return net, *data


@app.train()
def train(msg: Message, context: Context):
    net, trainset, _ = loaded(msg, context)
    loss = train_fn(net, trainset, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainset[0])})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    net, _, valset = loaded(msg, context)
    loss, accuracy = test_fn(net, valset)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(valset[0])})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
