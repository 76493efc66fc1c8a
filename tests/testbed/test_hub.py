"""A dataset of a hub on this machine, fetched by the hub's own library."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE, PIECES_A_SECOND = 10_000, 20
PROGRAM = f"""
import huggingface_hub.constants as constants
constants.DOWNLOAD_CHUNK_SIZE = {PIECE}
from testbed.data import data_files, datasets
from testbed.topology.data_settings import DataSettings
data_files._ROWS = 3
columns = datasets.Columns(DataSettings(hub="a/b", input=("image",), label="label"))
found = datasets.load_from(columns, None, print)
print(found.train.x.shape, found.train.y.tolist(), found.test.y.tolist())
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Serve the hub's answers on the dataset a/b, and slowly its files."""

    contents: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path in ("/api/datasets/a/b", f"/api/datasets/a/b/revision/{COMMIT}"):
            self.answer({"id": "a/b", "sha": COMMIT, "siblings": [*map(self.facts, self.contents)]})
        elif path.startswith(f"/api/datasets/a/b/tree/{COMMIT}"):
            folder = {"type": "directory", "path": "data", "oid": COMMIT, "size": 0}
            self.answer(self.files(*self.contents) if "recursive=true" in self.path else [folder])
        elif (name := path.removeprefix(f"/datasets/a/b/resolve/{COMMIT}/")) in self.contents:
            tag = f'"{self.facts(name)["lfs"]["sha256"]}"'
            self.send(200, self.contents[name], {"ETag": tag, "X-Repo-Commit": COMMIT})
        else:
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """Return the metadata of the requested paths."""
        asked = unquote(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer(self.files(*(name for name in self.contents if name in asked)))

    def files(self, *names: str) -> list[dict[str, Any]]:
        return [{"type": "file", "path": name, **self.facts(name)} for name in names]

    def facts(self, name: str) -> dict[str, Any]:
        content = self.contents[name]
        digest = hashlib.sha256(content).hexdigest()
        large = {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 134}
        return {"rfilename": name, "size": len(content), "oid": COMMIT, "blobId": COMMIT, "lfs": large}

    def answer(self, found: Any) -> None:
        self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, 0 if self.command == "HEAD" else len(body), PIECE):
            self.wfile.write(body[start : start + PIECE])
            time.sleep(1 / PIECES_A_SECOND if len(body) > 10 * PIECE else 0)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """The address of a hub whose dataset has images of 256×256 to train on, 1.2 MB, and one to test."""
    import datasets as library
    from PIL import Image

    rng = np.random.default_rng(0)
    features = library.Features({"image": library.Image(), "label": library.Value("int8")})
    for split, labels in {"train": [0, 1, 2, 1, 0, 2], "test": [1]}.items():
        shades = [rng.integers(0, 256, (256, 256, 3), np.uint8) for _ in labels]
        images = [Image.fromarray(each) for each in shades]
        table = library.Dataset.from_dict({"image": images, "label": labels}, features=features)
        path = tmp_path / f"{split}.parquet"
        table.to_parquet(path)
        Hub.contents[f"data/{split}-00000-of-00001.parquet"] = path.read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_download_reports_its_progress(endpoint: str, tmp_path: Path) -> None:
    """The images are read like those of local files. The libraries read their settings at import, hence
    the separate process."""
    folders = {"HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **folders, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    first, *progress, last = done.stdout.splitlines()
    assert first == "a/b: 1.4 MB to download from the Hugging Face hub"
    assert re.fullmatch(r"Downloading a/b: \d\.\d of 1\.4 MB at 0\.\d MB/s, about .+ left", progress[0])
    assert last == "(6, 3, 256, 256) [0, 1, 2, 1, 0, 2] [1]"
