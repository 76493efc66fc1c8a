"""docs/grafana/: each query of the dashboard is answered by a real Prometheus that asks our endpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from testbed.rundir.directory import RunDirectory
from testbed.runtimes.process.runtime import free_ports
from testbed.watching import prometheus
from tests.analysis.conftest import EVENTS, MANIFEST
from tests.conftest import unavailable
from tests.waiting import eventually

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "testbed.json").read_text())


def asked(url: str, query: str) -> list[dict[str, Any]]:
    """Return Prometheus's answer; [] while it has no data."""
    try:
        response = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=120)
    except requests.ConnectionError:
        return []
    if response.status_code == requests.codes.unavailable:  # it starts
        return []
    answer = response.json()
    assert answer["status"] == "success", f"{query}: {answer}"
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus, with the configuration of docs/grafana/, which asks a run's endpoint."""
    program = shutil.which("prometheus")
    if program is None:
        unavailable("prometheus", "Debian's package prometheus has it")
    assert program is not None
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    battery = {"energy": {"battery": {"capacity": 9}}}
    devices = {name: {**one, **battery} for name, one in MANIFEST["devices"].items()}
    manifest = {**MANIFEST, "devices": devices}
    directory.write_manifest(run="t-1", rule="fedbuff", task="digits", runtime="docker", **manifest)
    directory.events.write_text("".join(line + "\n" for line in EVENTS))
    counters = {"device": "fast", "sent": 10, "received": 20, "memory": 300}
    samples = [{**counters, "at": at, "cpu": cpu} for at, cpu in ((100.0, 1.0), (102.0, 1.5))]
    figures = {"consumed": 7, "power": 2, "level": 0.05}
    samples.append({"device": "fast", "at": 102.0, "energy": figures})
    directory.telemetry.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    with prometheus.serve_metrics(directory, 0) as metrics:
        config = yaml.safe_load((GRAFANA / "prometheus.yaml").read_text())
        config["global"]["scrape_interval"] = "500ms"
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [metrics.split("/")[2]]}]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_ports(1)[0]}"
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={tmp_path / 'prometheus.yaml'}",
                    f"--web.listen-address={address}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def test_every_dashboard_query_has_data(server: str) -> None:
    eventually(lambda: asked(server, "rate(testbed_updates_total[5m])"))  # of two scrapes
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(queries) > 19
    for query in queries:
        asks = query.replace("$__rate_interval", "5m").replace("$run", "t-.*")
        assert {row["metric"]["run"] for row in asked(server, asks)} == {"t-1"}, query
    accuracy = asked(server, queries[0].replace("$run", ".*"))
    assert [row["value"][1] for row in accuracy] == ["0.8"]
    assert not asked(server, queries[0].replace("$run", "another"))


def test_grafana_provisioning_files_fit_together() -> None:
    """The files fit together. No Grafana reads them here."""
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/testbed.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/testbed.yaml").read_text())[
        "providers"
    ]
    folder = Path(provider["options"]["path"].replace("$TESTBED_GRAFANA", str(GRAFANA)))
    assert [*folder.glob("*.json")] == [GRAFANA / "dashboards" / "testbed.json"]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert not cells & taken
        assert x + w <= 24
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
