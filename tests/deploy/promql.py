"""What the queries of rules and panels name, compared with what the service registers."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import get_args

import promql_parser as promql
from prometheus_client import CollectorRegistry

from lenet.backend import BatchResult
from service.errors import STATUS
from service.observe import metrics as names
from service.observe.metrics import NO_MODEL, Metrics

TARGET = frozenset({"job", "instance"})
"""Labels that Prometheus adds to whatever it scrapes."""

_CLOSED = {"protocol", "outcome", "stage", "reason", "result"}
_MODEL = ("lenet", "1")


class WrongQuery(Exception):
    """A query names a metric, a label or a value that there is not."""


@cache
def registered() -> dict[str, dict[str, set[str]]]:
    """Labels by series of the service, each with the values that it may have."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    load = {"contexts": 1, "golden_error": 0.0, "device_bytes": 0, "workspace_bytes": 0}
    load |= {"queue_limit_rows": 1, "golden_tolerance": 1e-4, "load": lambda: (0, 0)}
    metrics.model_loaded(_MODEL, "ab", **load)
    codes = set(STATUS)
    for protocol in get_args(names.Transport):
        metrics.predicted(protocol, _MODEL, (0.1,) * 5)
        for code in codes:
            metrics.request_done(NO_MODEL, protocol, code)
    for reason in get_args(names.CutReason):
        metrics.batch_ended(_MODEL, 1, reason, 0.1, BatchResult(None, 1, True, 0.1))
    for reason in get_args(names.DropReason):
        metrics.rows_dropped(1, reason)
    metrics.started("weights", 1.0)
    metrics.explained(0.1)
    metrics.certificate_read(0.0)
    metrics.flush()
    found: dict[str, dict[str, set[str]]] = {"up": {label: set() for label in TARGET}}
    for family in registry.collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, defaultdict(set))
            for label, value in sample.labels.items():
                labels[label].add(value)
    return found


def labels_of(expr: str, recorded: dict[str, frozenset[str]] | None = None) -> frozenset[str]:
    """The labels of the result of `expr`. `recorded`: those of each recording rule.

    Raises:
        WrongQuery: it names what there is not, or its two sides can never match.
        ValueError: it is not PromQL.
    """
    return _Reader(recorded or {}).read(promql.parse(expr)) or frozenset()


class _Reader:
    def __init__(self, recorded: dict[str, frozenset[str]]) -> None:
        self._recorded = recorded

    def read(self, node: object) -> frozenset[str] | None:
        """Labels of a vector; None of a number."""
        match node:
            case promql.VectorSelector():
                return self._selected(node)
            case promql.MatrixSelector():
                return self._selected(node.vector_selector)
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self.read(node.expr)
            case promql.Call():
                found = [one for one in map(self.read, node.args) if one is not None]
                if node.func.name == "absent":
                    return frozenset()
                if node.func.name == "histogram_quantile":
                    self._have(found[0], {"le"})
                    return found[0] - {"le"}
                return found[0] if found else None
            case promql.AggregateExpr():
                inner = self.read(node.expr)
                assert inner is not None
                by = set(node.modifier.labels) if node.modifier else set()
                self._have(inner, by)
                if node.modifier and node.modifier.type == promql.AggModifierType.Without:
                    return inner - by
                return frozenset(by)
            case promql.BinaryExpr():
                return self._joined(node, self.read(node.lhs), self.read(node.rhs))
        return None

    def _joined(
        self, node: promql.BinaryExpr, left: frozenset[str] | None, right: frozenset[str] | None
    ) -> frozenset[str] | None:
        if left is None or right is None:
            return right if left is None else left
        if node.modifier is not None and node.modifier.matching is not None:
            raise WrongQuery(f"{node.prettify()}: `on` and the like are not read here")
        if left != right:
            raise WrongQuery(
                f"{node.prettify()}: the labels {sorted(left)} never match {sorted(right)}"
            )
        return left

    def _selected(self, selector: promql.VectorSelector) -> frozenset[str]:
        name = selector.name
        if name in self._recorded:
            labels = dict.fromkeys(self._recorded[name], frozenset[str]())
        elif name in registered():
            labels = registered()[name]
        else:
            raise WrongQuery(f"{name}: the service has no such metric")
        have = frozenset(labels) | (TARGET if name not in self._recorded else frozenset())
        for matcher in selector.matchers.matchers:
            self._have(have, {matcher.name})
            if matcher.name in _CLOSED:
                wrong = set(matcher.value.split("|")) - labels[matcher.name]
                if wrong:
                    raise WrongQuery(f"{name}: {matcher.name} is never {sorted(wrong)}")
        return have

    def _have(self, have: frozenset[str], wanted: set[str]) -> None:
        if missing := wanted - have:
            raise WrongQuery(f"there is no label {sorted(missing)} beside {sorted(have)}")
