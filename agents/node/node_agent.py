"""Agent on each node of a Swarm: proxies between Unix sockets and TCP, comparison of the nodes' clocks,
and counters of the node's CPUs.

    python3 -m agents.node.node_agent CONFIG

This file is sent to the nodes together with `agents.timing.clock_sync`. It needs only Python. Keys of
the configuration:

    proxies        list of {"listen": ADDRESS, "to": ADDRESS}: connections to the first address are
                   forwarded to the second
    serve_clock    ADDRESS at which this node's monotonic clock is reported, in nanoseconds
    compare_clock  {"ask": ADDRESS, "write": FILE}: the offset of this node's clock to that of another
                   node is estimated continuously (`agents.timing.clock_sync`) and written to FILE
    cpu_counters   FILE to which the counters of this node's CPUs are written every second

An ADDRESS is {"path": PATH OF A UNIX SOCKET} or {"host": ..., "port": ...}. If the agent connects to a
host, it also has "name", the name in the host's certificate. All TCP connections use TLS. Connections to
{"descriptor": NUMBER}, a listening socket that the parent process hands over, are forwarded as they are:
TLS is then between the peer and the broker. With `identity`, a PEM file with certificate and key, two
nodes prove to each other that they belong to this run. With `trust`, a PEM file with a certificate, the
broker proves the same to a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any

from agents.timing import clock_sync

_CHUNK = 2**20
_ASK = b"?"
_STAMP_BYTES = 8
_ASK_EVERY_SECONDS = 0.25
_RETRY_SECONDS = 0.5
_COUNTERS_EVERY_SECONDS = 1.0
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def tls(address: dict[str, Any], purpose: ssl.Purpose) -> ssl.SSLContext:
    """Trusts only the certificate named in `address`, and presents that in its `identity`, if any."""
    trusted = address.get("trust") or address["identity"]
    context = ssl.create_default_context(purpose, cafile=trusted)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if "identity" in address:
        context.load_cert_chain(address["identity"])
    return context


async def connect(address: dict[str, Any]) -> _Streams:
    if "path" in address:
        return await asyncio.open_unix_connection(address["path"], limit=_CHUNK)
    return await asyncio.open_connection(
        address["host"],
        address["port"],
        limit=_CHUNK,
        ssl=tls(address, ssl.Purpose.SERVER_AUTH),
        server_hostname=address["name"],
    )


async def listen(address: dict[str, Any], serve: Any) -> None:
    """Call `serve` for each connection, until cancelled."""
    if "path" in address:
        path = Path(address["path"])
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(serve, path, limit=_CHUNK)
        path.chmod(0o600)
    elif "descriptor" in address:
        inherited = socket.socket(fileno=address["descriptor"])
        server = await asyncio.start_server(serve, sock=inherited, limit=_CHUNK)
    else:
        context = tls(address, ssl.Purpose.CLIENT_AUTH)
        where = address["host"], address["port"]
        server = await asyncio.start_server(serve, *where, limit=_CHUNK, ssl=context)
    async with server:
        await server.serve_forever()


async def proxy(to: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect the peer at `reader` and `writer` to `to`, until either side disconnects."""
    try:
        other_reader, other_writer = await connect(to)
    except OSError as error:
        sys.stderr.write(f"node: cannot connect to {to.get('path') or to['host']}: {error}\n")
        writer.close()
        return
    ways = [
        asyncio.ensure_future(copy(reader, other_writer)),
        asyncio.ensure_future(copy(other_reader, writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, other_writer):
            end.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()


async def serve_clock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each question with this node's monotonic time, in nanoseconds."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while await reader.readexactly(1) == _ASK:
            writer.write(time.monotonic_ns().to_bytes(_STAMP_BYTES, "big"))
            await writer.drain()
    writer.close()


async def compare_clock(ask: dict[str, Any], write: Path) -> None:
    """Estimate the offset of this node's clock to that at `ask`, until cancelled."""
    known = clock_sync.Exchanges()
    while True:
        try:
            reader, writer = await connect(ask)
            try:
                while True:
                    begin = time.monotonic_ns()
                    writer.write(_ASK)
                    told = int.from_bytes(await reader.readexactly(_STAMP_BYTES), "big")
                    known.add(begin, told, time.monotonic_ns())
                    if (found := known.estimate()) is not None:
                        _replace(write, json.dumps(found.as_dict()))
                    await asyncio.sleep(_ASK_EVERY_SECONDS if found else 0)
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(_RETRY_SECONDS)


async def write_cpu_counters(write: Path) -> None:
    """The kernel's counters of this node's CPUs, every second, until cancelled."""
    while True:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        _replace(write, "\n".join(line for line in lines if line.startswith("cpu")))
        await asyncio.sleep(_COUNTERS_EVERY_SECONDS)


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="ascii")
    partial.replace(path)


async def main() -> None:
    cfg = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, me.cancel)  # type: ignore[union-attr]
    tasks = [
        listen(each["listen"], lambda r, w, to=each["to"]: proxy(to, r, w))
        for each in cfg.get("proxies", ())
    ]
    if "serve_clock" in cfg:
        tasks.append(listen(cfg["serve_clock"], serve_clock))
    if "compare_clock" in cfg:
        compare = cfg["compare_clock"]
        tasks.append(compare_clock(compare["ask"], Path(compare["write"])))
    if "cpu_counters" in cfg:
        tasks.append(write_cpu_counters(Path(cfg["cpu_counters"])))
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main())
