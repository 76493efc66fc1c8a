"""Secure aggregation of buffers: the server gets sums of updates, and no single one.

LightSecAgg in its asynchronous form (So et al., MLSys 2022, arXiv 2109.14236, section 4.2), as
docs/concepts/privacy.md explains. `field`,
`coding`, `masks`, `quantised` and `channels` are its mathematics, `party` a client's side of it, `sums`
the server's, `wire` the messages between clients and from them to the server. No clock and no socket.
"""
