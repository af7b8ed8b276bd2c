"""The Grafana dashboard: deploy/grafana."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy import live
from tests.deploy.promql import labels_of
from tests.service_process import PROJECT

FOLDER = PROJECT / "deploy/grafana"

dashboard = json.loads(live.DASHBOARD.read_text())
panels = dashboard["panels"]
drawn = [panel for panel in panels if panel["type"] not in ("row", "text")]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def lost(written, read, path="$"):
    """Paths of what `written` has, and `read` has not or otherwise."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from lost(value, read.get(key, lost), f"{path}.{key}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, pair in enumerate(zip(written, read, strict=True)):
            yield from lost(*pair, f"{path}[{index}]")
    elif written != read:
        yield path


def test_every_field_is_one_of_grafanas_schema():
    plugins.register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert dashboard["id"] is None
    assert list(lost(dashboard, read)) == ["$.id"], "fields that the schema does not have"


def provisioning(path, key):
    """The one entry of a file of provisioning."""
    (one,) = yaml.safe_load((FOLDER / "provisioning" / path).read_text())[key]
    return one


def test_it_can_be_provisioned():
    assert dashboard["uid"] == "lenet-serve"
    assert dashboard["editable"] is False
    assert "__inputs" not in dashboard
    (source, *variables) = dashboard["templating"]["list"]
    assert (source["type"], source["name"]) == ("datasource", "datasource")
    for one in (*variables, *drawn, *(target for panel in drawn for target in panel["targets"])):
        assert one["datasource"] == DATASOURCE
    provider = provisioning("dashboards/lenet-serve.yml", "providers")
    assert provider["disableDeletion"] is True
    assert provider["allowUiUpdates"] is False
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    source = provisioning("datasources/prometheus.yml", "datasources")
    assert (source["type"], source["editable"]) == ("prometheus", False)


def test_panels_lie_beside_each_other_and_each_row_begins_with_help():
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        x, y, wide, high = (panel["gridPos"][name] for name in "xywh")
        covered = set(itertools.product(range(x, x + wide), range(y, y + high)))
        assert not cells & covered, panel["title"]
        assert x + wide <= 24
        cells |= covered
    rows = [index for index, panel in enumerate(panels) if panel["type"] == "row"]
    titles = ["Users", "Stages", "Batches", "GPU", "Process", "Models"]
    assert [panels[index]["title"] for index in rows] == titles
    for index in rows:
        assert len(panels[index + 1]["options"]["content"]) > 100
    assert all(panel["description"] for panel in drawn)


def queries(panel):
    return [live.query(target) for target in panel["targets"]]


@pytest.mark.parametrize("panel", drawn, ids=lambda panel: panel["title"])
def test_a_panel_names_what_the_service_registers(panel):
    for target, query in zip(panel["targets"], queries(panel), strict=True):
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert named <= labels_of(query)
        # Of the instances that are chosen at the top alone.
        selectors = len(re.findall(r"\b(?:lenet|process)_\w+", target["expr"]))
        assert target["expr"].count('{job="$job", instance=~"$instance"') == selectors


EMPTY_ON_THE_CPU = {"Device time of a batch"}
"""The CPU has no clock of its own."""


def test_no_panel_is_empty_when_every_outcome_was_provoked(start, tmp_path):
    service = start(*live.STARTS, *live.certificate(tmp_path)).ready(workers=2)
    with live.prometheus(tmp_path, service.port) as prometheus:
        if prometheus is None:
            pytest.skip("prometheus is not installed (on Debian: apt install prometheus)")
        prometheus.wait_for('up{job="lenet-serve"} == 1')
        for _ in range(2):
            live.good_requests(service, tmp_path)
            live.bad_requests(service)
        live.lose_devices(service)
        live.good_requests(service, tmp_path)
        prometheus.wait_for('sum(lenet_requests_total{outcome="ok"}) >= 15')
        empty = {
            panel["title"]
            for panel in drawn
            if not all(prometheus.query(query) for query in queries(panel))
        }
        assert empty == EMPTY_ON_THE_CPU
        seen = prometheus.query('count by (outcome) (lenet_requests_total{job="lenet-serve"})')
        assert {one["metric"]["outcome"] for one in seen} >= live.OUTCOMES
        prometheus.wait_for('ALERTS{alertname="LenetDeviceLost", alertstate="firing"}')
