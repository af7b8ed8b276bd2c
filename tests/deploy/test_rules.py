"""Alerts and recording rules: deploy/prometheus."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from tests.deploy.promql import WrongQuery, labels_of
from tests.service_process import PROJECT

FOLDER = PROJECT / "deploy/prometheus"
RULES = FOLDER / "rules/lenet-serve.yml"
CASES = sorted((FOLDER / "tests").glob("*.yml"))

rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
alerts = [rule for rule in rules if "alert" in rule]


recorded = {}
for rule in rules:
    if "record" in rule:
        recorded[rule["record"]] = labels_of(rule["expr"], recorded)


@pytest.fixture
def promtool():
    """`promtool("check", "rules", ...)` runs it; it has to succeed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (on Debian: apt install prometheus)")

    def run(*arguments):
        done = subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_rules_and_configuration_are_valid(promtool):
    promtool("check", "rules", RULES)
    promtool("check", "config", "--syntax-only", FOLDER / "prometheus.yml")


def test_each_alert_fires_and_stays_silent_in_the_cases_named_after_it(promtool):
    cases = {
        case["name"]: case for file in CASES for case in yaml.safe_load(file.read_text())["tests"]
    }
    expected = {name for alert in alerts for name in (alert["alert"], f"not {alert['alert']}")}
    assert cases.keys() == expected
    for name, case in cases.items():
        for query in case["promql_expr_test"]:
            assert query["expr"] == 'ALERTS{alertstate="firing"}'
            labels = "".join(one["labels"] for one in query["exp_samples"])
            fire = [] if name.startswith("not ") else [name]
            assert re.findall('alertname="(.*?)"', labels) == fire
    promtool("test", "rules", *CASES)


@pytest.mark.parametrize("rule", rules, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_what_the_service_registers(rule):
    labels = labels_of(rule["expr"], recorded)
    texts = " ".join(rule.get("annotations", {}).values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels


def test_a_query_that_can_never_answer_is_found():
    for query, problem in (
        ("rate(lenet_request_total[5m])", "no such metric"),
        ('lenet_requests_total{code="500"}', "no label"),
        ('lenet_requests_total{outcome=~"ok|error"}', "never"),
        ("sum by (le, path) (rate(lenet_request_duration_seconds_bucket[5m]))", "no label"),
        ("histogram_quantile(0.9, sum by (job) (rate(lenet_batch_rows_bucket[5m])))", "no label"),
        ("lenet_queue_rows > 1 and sum(lenet_contexts) > 0", "never match"),
    ):
        with pytest.raises(WrongQuery, match=problem):
            labels_of(query)


def test_each_alert_has_a_section_in_the_runbook():
    text = (PROJECT / "docs/reliability.md").read_text()
    headings = set(re.findall(r"^#+ (Lenet\w+)$", text, re.MULTILINE))
    assert headings == {alert["alert"] for alert in alerts}
    for alert in alerts:
        anchor = f"docs/reliability.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == anchor
        assert alert["labels"]["severity"] in ("critical", "warning")
