"""Messages deferred to the end of an instant: the newest per client, and requests until they are
answered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.aggregator.clients import Outgoing
from agents.rules.interface import RequestUpdate, Send

_CLIENTS = st.sampled_from("abc")


@given(st.lists(_CLIENTS), st.lists(_CLIENTS), st.booleans())
def test_each_client_gets_one_model_and_one_request_per_instant(
    sends: list[str], requests: list[str], broadcast: bool
) -> None:
    outgoing = Outgoing()
    for number, client in enumerate(sends):
        outgoing.send(Send(client, lr=float(number)))
    for client in requests:
        outgoing.request(RequestUpdate(client, "interrupt"))
        outgoing.request(RequestUpdate(client, "pull"))
    if broadcast:
        outgoing.broadcast()
    assert outgoing.is_empty == (not (sends or requests or broadcast))
    newest = {client: Send(client, lr=float(number)) for number, client in enumerate(sends)}
    pulls = [RequestUpdate(client, "pull") for client in dict.fromkeys(requests)]
    assert outgoing.pop_all() == (broadcast, [newest[c] for c in dict.fromkeys(sends)], pulls)
    assert outgoing.pop_all() == (False, [], [])


def test_unanswered_request_may_be_repeated() -> None:
    outgoing, pull = Outgoing(), RequestUpdate("a", "pull")
    outgoing.request_again("a")
    assert outgoing.pop_all() == (False, [], [])
    outgoing.request(pull)
    outgoing.pop_all()
    outgoing.request_again("a")
    assert outgoing.pop_all() == (False, [], [pull])
    outgoing.close_request("a")
    outgoing.request_again("a")
    assert outgoing.pop_all() == (False, [], [])


def test_request_answered_in_the_same_instant_is_not_sent() -> None:
    outgoing = Outgoing()
    outgoing.send(Send("a"))
    outgoing.request(RequestUpdate("a", "pull"))
    outgoing.close_request("a")
    assert outgoing.pop_all() == (False, [Send("a")], [])


def test_departed_client_gets_nothing_and_the_others_their_messages() -> None:
    outgoing = Outgoing()
    for client in "ab":
        outgoing.send(Send(client))
        outgoing.request(RequestUpdate(client, "pull"))
    outgoing.broadcast()
    outgoing.forget("a")
    outgoing.request_again("a")
    assert outgoing.pop_all() == (True, [Send("b")], [RequestUpdate("b", "pull")])


def test_nothing_is_sent_at_the_end() -> None:
    outgoing = Outgoing()
    outgoing.send(Send("a"))
    outgoing.request(RequestUpdate("a", "pull"))
    outgoing.broadcast()
    outgoing.clear()
    assert outgoing.pop_all() == (False, [], [])
