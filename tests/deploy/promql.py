"""What the queries of rules and panels name, compared with what the service registers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
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


def labels_of(
    query: object, recorded: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> frozenset[str] | None:
    """Labels of the result of `query`, PromQL or its syntax tree; None of a number.

    `recorded`: those of each recording rule.

    Raises:
        WrongQuery: it names what there is not, or its two sides can never match.
        ValueError: it is not PromQL.
    """
    read = partial(labels_of, recorded=recorded)
    match promql.parse(query) if isinstance(query, str) else query:
        case promql.VectorSelector() as selector:
            return _selected(selector, recorded)
        case promql.MatrixSelector() as node:
            return _selected(node.vector_selector, recorded)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr() as node:
            return read(node.expr)
        case promql.Call() as node:
            found = next((one for one in map(read, node.args) if one is not None), None)
            if node.func.name == "absent":
                return frozenset()
            if node.func.name == "histogram_quantile":
                assert found is not None
                return _with(found, {"le"}) - {"le"}
            return found
        case promql.AggregateExpr() as node:
            inner, by = read(node.expr), set(node.modifier.labels if node.modifier else ())
            assert inner is not None
            without = node.modifier and node.modifier.type == promql.AggModifierType.Without
            return _with(inner, by) - by if without else _with(inner, by) & by
        case promql.BinaryExpr() as node:
            left, right = read(node.lhs), read(node.rhs)
            if left is None or right is None:
                return right if left is None else left
            if node.modifier is not None and node.modifier.matching is not None:
                raise WrongQuery(f"{node.prettify()}: `on` and the like are not read here")
            if left != right:
                raise WrongQuery(f"{node.prettify()}: {sorted(left)} never match {sorted(right)}")
            return left
    return None


def _selected(
    selector: promql.VectorSelector, recorded: Mapping[str, frozenset[str]]
) -> frozenset[str]:
    name = selector.name
    values = registered().get(name, {})
    if name not in registered() and name not in recorded:
        raise WrongQuery(f"{name}: the service has no such metric")
    have = recorded[name] if name in recorded else TARGET.union(values)
    for matcher in selector.matchers.matchers:
        _with(have, {matcher.name})
        known = values.get(matcher.name, set()) if matcher.name in _CLOSED else None
        if known and (wrong := set(matcher.value.split("|")) - known):
            raise WrongQuery(f"{name}: {matcher.name} is never {sorted(wrong)}")
    return have


def _with(have: frozenset[str], wanted: set[str]) -> frozenset[str]:
    if missing := wanted - have:
        raise WrongQuery(f"there is no label {sorted(missing)} beside {sorted(have)}")
    return have
