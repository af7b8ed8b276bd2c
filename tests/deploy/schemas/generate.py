"""Write the JSON schemas beside this file, from the models of three packages; README.md says which.

`python tests/deploy/schemas/generate.py`, in an environment that has them. Fields that none of our
manifests could have are left out: what is not in a schema is refused, as the strict schemas of
kubernetes-validate do.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import kserve.models
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from importlib_resources import files

HERE = Path(__file__).parent
CORE = "https://kubernetes.io/api/_definitions.json"
SIMPLE = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}
OTHER_PREDICTORS = {
    *("huggingface", "lightgbm", "onnx", "paddle", "pmml", "pytorch", "sklearn", "tensorflow"),
    *("triton", "xgboost", "batcher", "logger", "worker_spec", "auto_scaling", "confidential"),
}
LEFT_OUT = {
    "V1beta1InferenceServiceSpec": {"explainer", "transformer", "canary", "tracing"},
    "V1beta1PredictorSpec": OTHER_PREDICTORS,
    "V1beta1ModelSpec": {"confidential", "storage"},
    "V1alpha1ServingRuntimeSpec": {"worker_spec", "storage_helper", "built_in_adapter"},
}


def core_names() -> dict[str, str]:
    """The definitions of Kubernetes' own types, by their short name."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.37.0-local-strict"
    names = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return {name.rpartition(".")[2]: name for name in names if ".api.core.v1." in name} | {
        "ObjectMeta": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
        "K8sIoApiAppsV1DeploymentStrategy": "io.k8s.api.apps.v1.DeploymentStrategy",
        "ResourceQuantity": "io.k8s.apimachinery.pkg.api.resource.Quantity",
    }


NAMES = core_names()


def from_kserve(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type of KServe's SDK; definitions that it needs go to `found`."""
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        return {"type": "array", "items": from_kserve(match[1], found)}
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        return {"type": "object", "additionalProperties": from_kserve(match[1], found)}
    if kind in SIMPLE:
        return {"type": SIMPLE[kind]}
    short = kind.removeprefix("V1")
    if short in NAMES and not hasattr(kserve.models, kind):
        return {"$ref": f"{CORE}#/$defs/{NAMES[short]}"}
    if kind not in found:
        found[kind] = {}  # a type may contain itself
        model = getattr(kserve.models, kind)
        names = [n for n in model.openapi_types if n not in LEFT_OUT.get(kind, set()) | {"status"}]
        source = Path(importlib.import_module(model.__module__).__file__).read_text()
        required = re.findall(r"Invalid value for `(\w+)`, must not be `None`", source)
        found[kind] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                model.attribute_map[name]: from_kserve(model.openapi_types[name], found)
                for name in names
            },
            "required": [model.attribute_map[name] for name in required if name in names],
        }
    return {"$ref": f"#/$defs/{kind}"}


def kserve_schema(kind: str, version: str, spec: str) -> dict[str, Any]:
    """The schema of a resource of KServe."""
    found: dict[str, Any] = {}
    top = {
        "apiVersion": {"const": f"serving.kserve.io/{version}"},
        "kind": {"const": kind},
        "metadata": {"$ref": f"{CORE}#/$defs/{NAMES['ObjectMeta']}"},
        "spec": from_kserve(spec, found),
    }
    return resource(top, found)


def from_pydantic(node: Any) -> Any:
    """A schema of pydantic without titles, descriptions, defaults and null, and closed."""
    if isinstance(node, list):
        return [from_pydantic(one) for one in node]
    if not isinstance(node, dict):
        return node
    if options := node.get("anyOf"):
        options = [one for one in options if one != {"type": "null"}]
        options = [from_pydantic(one) for one in options]
        return options[0] if len(options) == 1 else {"anyOf": options}
    schema = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):  # names of ours, not of JSON schema
            schema[key] = {name: from_pydantic(one) for name, one in value.items()}
        elif key not in ("title", "description", "default", "examples"):
            schema[key] = from_pydantic(value)
    return {**schema, "additionalProperties": False} if "properties" in schema else schema


def cloudcoil_schema(model: Any, api_version: str) -> dict[str, Any]:
    """The schema of a resource of cloudcoil's packages."""
    schema = from_pydantic(model.model_json_schema(by_alias=True))
    definitions = schema["$defs"]
    top = {
        "apiVersion": {"const": api_version},
        "kind": {"const": model.__name__},
        "metadata": {"$ref": f"{CORE}#/$defs/{NAMES['ObjectMeta']}"},
        "spec": schema["properties"]["spec"],
    }
    needed: dict[str, Any] = {}

    def follow(node: Any) -> None:
        for name in re.findall(r'"#/\$defs/(\w+)"', json.dumps(node)):
            if name not in needed:
                needed[name] = definitions[name]
                follow(definitions[name])

    follow(top)
    return resource(top, needed)


def resource(top: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a resource with these fields, all of which it needs."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
        "required": sorted(top),
        "properties": top,
        "$defs": definitions,
    }


SCHEMAS = {
    "ClusterServingRuntime": kserve_schema(
        "ClusterServingRuntime", "v1alpha1", "V1alpha1ServingRuntimeSpec"
    ),
    "InferenceService": kserve_schema("InferenceService", "v1beta1", "V1beta1InferenceServiceSpec"),
    "PodMonitor": cloudcoil_schema(PodMonitor, "monitoring.coreos.com/v1"),
    "PrometheusRule": cloudcoil_schema(PrometheusRule, "monitoring.coreos.com/v1"),
    "ScaledObject": cloudcoil_schema(ScaledObject, "keda.sh/v1alpha1"),
}

for kind, schema in SCHEMAS.items():
    (HERE / f"{kind}.json").write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n")
