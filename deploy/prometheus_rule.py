"""`make prometheus-rule` makes a resource of the Prometheus Operator of deploy/prometheus/rules."""

from __future__ import annotations

import textwrap
from pathlib import Path

_HERE = Path(__file__).parent
RULES = _HERE / "prometheus/rules/lenet-serve.yml"
FILE = _HERE / "kubernetes/components/prometheusrule/prometheusrule.yaml"

_HEAD = """\
# Made by `make prometheus-rule` from deploy/prometheus/rules.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: lenet-serve
spec:
"""


def resource() -> str:
    """The text of the resource."""
    return _HEAD + textwrap.indent(RULES.read_text(), "  ")


if __name__ == "__main__":
    FILE.write_text(resource())
