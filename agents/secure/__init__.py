"""Secure aggregation of buffers: the server learns sums of updates, but no single update
(docs/concepts/privacy.md).

The protocol is LightSecAgg in its asynchronous form (So et al., MLSys 2022, arXiv 2109.14236, section
4.2). `arithmetic` has its mathematics, `party` is the client's side, `server` is the server's side, and
`secure_messages` has the messages between clients and from clients to the server. No clock and no
socket."""
