"""The manifests of deploy/kubernetes: rendered, and validated by the schemas of their kinds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy import prometheus_rule
from service.process.mps import STOP_TIMEOUT_S
from service.settings import Settings
from service.supervisor import STOP_LIMIT_S
from tests.deploy.promql import registered

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed"
)
jsonschema = pytest.importorskip("jsonschema")
referencing = pytest.importorskip("referencing")

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
DOCUMENT = ROOT.parents[1] / "docs" / "kubernetes.md"
VERSION = "1.37"
DEFAULT_GRACE_S = 30  # Kubernetes', where a manifest says nothing

CPU = ("overlays/cpu",)
GPU = ("overlays/gpu", "podmonitor", "keda", "weights-volume", "keys", "tls")
KSERVE = ("overlays/kserve",)
COMBINATIONS = (
    CPU,
    (*CPU, "podmonitor", "prometheusrule", "weights-image", "keys", "traces"),
    (*CPU, "podmonitor", "weights-init", "tls"),
    ("overlays/gpu",),
    GPU,
    KSERVE,
    (*KSERVE, "knative"),
)


@pytest.fixture(scope="session")
def kustomize():
    """`kustomize(folder)` renders a folder."""
    options = {"capture_output": True, "text": True, "check": False}
    if (program := shutil.which("kubectl")) is not None:
        said = subprocess.run([program, "version", "--client"], **options).stdout
        if not re.search(r"Kustomize Version: v[4-9]", said):
            program = None
    line = (program, "kustomize") if program else (shutil.which("kustomize"), "build")
    if line[0] is None:
        pytest.skip("neither a kubectl with kustomize 4 or newer nor kustomize is installed")

    def kustomize_(folder):
        done = subprocess.run([*line, str(folder)], **options)
        assert done.returncode == 0, done.stderr
        return list(yaml.safe_load_all(done.stdout))

    return kustomize_


@pytest.fixture(scope="session")
def render(kustomize, tmp_path_factory):
    """`render(overlay, *components)` returns the documents, by kind; a second one by KIND/NAME."""
    folder = tmp_path_factory.mktemp("kustomize").resolve()

    @cache
    def rendered(overlay, *components):
        def place(path):
            return os.path.relpath((ROOT / path).resolve(), folder)

        parts = [place(f"components/{name}") for name in components]
        file = {"resources": [place(overlay)], "components": parts}
        (folder / "kustomization.yaml").write_text(json.dumps(file))
        return kustomize(folder)

    def render_(overlay, *components):
        kinds = {}
        for one in (documents := deepcopy(rendered(overlay, *components))):
            kind = one["kind"]
            kinds[f"{kind}/{one['metadata']['name']}" if kind in kinds else kind] = one
        assert len(kinds) == len(documents)
        return kinds

    return render_


@cache
def core_types():
    """The strict schemas of Kubernetes' own types, to which those beside this file refer."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    found = json.loads((folder / f"v{VERSION}.0-local-strict" / "_definitions.json").read_text())
    resource = referencing.Resource.from_contents(found)
    return referencing.Registry().with_resource(found["$id"], resource)


def validate(document):
    """Check a document with the strict schema of its kind.

    Raises:
        ValidationError: a field is unknown, missing or of a wrong type.
    """
    path = SCHEMAS / f"{document['kind']}.json"
    if not path.exists():
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    schema = json.loads(path.read_text())
    jsonschema.Draft202012Validator(schema, registry=core_types()).validate(document)


def pod_spec(kinds):
    """The specification of the pods, and its first container."""
    if "Deployment" in kinds:
        spec = kinds["Deployment"]["spec"]["template"]["spec"]
    else:
        predictor = kinds["InferenceService"]["spec"]["predictor"]
        spec = {**kinds["ClusterServingRuntime"]["spec"], **predictor}
    return spec, spec["containers"][0]


def settings_of(kinds):
    """The settings with which a container starts, from its variables and arguments."""
    _, container = pod_spec(kinds)
    found = dict(kinds.get("ConfigMap", {"data": {}})["data"])
    secret = "a key of 16 characters"
    found |= {one["name"]: one.get("value", secret) for one in container.get("env", ())}
    found = {name: text for name, text in found.items() if name.startswith("LENET_")}
    found |= dict(argument.split("=", 1) for argument in container.get("args", ()))
    return Settings(
        **{
            name.removeprefix("LENET_").lower().strip("-").replace("-", "_"): (
                text.replace("{{.Name}}", "digits")
            )
            for name, text in found.items()
        }
    )


def test_every_component_is_rendered_by_a_test():
    named = {name for _, *components in COMBINATIONS for name in components}
    overlays = "".join(path.read_text() for path in ROOT.glob("overlays/*/kustomization.yaml"))
    named |= set(re.findall(r"^  - ../../components/([\w-]+)$", overlays, re.MULTILINE))
    assert named == {path.name for path in (ROOT / "components").iterdir()}
    overlays = {overlay for overlay, *_ in COMBINATIONS}
    assert overlays == {f"overlays/{path.name}" for path in (ROOT / "overlays").iterdir()}


@pytest.mark.parametrize("combination", COMBINATIONS, ids="+".join)
def test_every_manifest_is_valid_and_starts_the_service_as_it_has_to(render, combination):
    kinds = render(*combination)
    for document in kinds.values():
        validate(document)
    settings = settings_of(kinds)  # raises for unknown and wrong ones
    spec, container = pod_spec(kinds)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    expected = [settings.port] if settings.one_port else [settings.port, settings.grpc_port]
    assert [*ports.values()] == expected
    assert not spec["enableServiceLinks"]
    stop_s = settings.grace_s + settings.drain_timeout_s + STOP_LIMIT_S + STOP_TIMEOUT_S
    assert stop_s < spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    assert settings.grace_s >= 5  # until no proxy sends a request any more

    # Probes ask for readiness before traffic and for life after.
    scheme = None if settings.certificate is None else "HTTPS"
    ready, live = container["readinessProbe"], container["livenessProbe"]
    start = container.get("startupProbe", ready)
    for probe, path in ((start, "/readyz"), (ready, "/readyz"), (live, "/healthz")):
        asked = probe["httpGet"]
        assert (asked["path"], asked.get("scheme")) == (path, scheme)
        assert ports.get(asked["port"], asked["port"]) == settings.port
    if "knative" not in combination:  # which has no startup probe
        assert start["periodSeconds"] * start["failureThreshold"] >= 120

    # Pods keep to the restricted standard.
    for one in (container, *spec.get("initContainers", ())):
        security = {**spec.get("securityContext", {}), **one["securityContext"]}
        expected = {
            "runAsNonRoot": True,
            "runAsUser": 65532,  # that of the image
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert security.items() >= expected.items()
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    writable = {path for path, read_only in mounts.items() if not read_only}
    assert {"/tmp"} <= writable <= {"/tmp", "/home/lenet"}


def test_selectors_and_names_of_ports_are_those_of_the_pods(render):
    kinds = render(*GPU)
    template = kinds["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    (spread,) = template["spec"]["topologySpreadConstraints"]
    selectors = [
        kinds["Service"]["spec"]["selector"],
        kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        kinds["Deployment"]["spec"]["selector"]["matchLabels"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        kinds["PodMonitor"]["spec"]["selector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)
    names = [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    assert [port["targetPort"] for port in kinds["Service"]["spec"]["ports"]] == names
    (ingress,) = kinds["NetworkPolicy"]["spec"]["ingress"]
    assert [port["port"] for port in ingress["ports"]] == names
    (endpoint,) = kinds["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == names[0]


def test_the_autoscaler_owns_the_number_of_pods(render):
    for combination, kind in ((CPU, "HorizontalPodAutoscaler"), (GPU, "ScaledObject")):
        kinds = render(*combination)
        assert {"HorizontalPodAutoscaler", "ScaledObject"} & kinds.keys() == {kind}
        target = kinds[kind]["spec"]["scaleTargetRef"]["name"]
        assert target == kinds["Deployment"]["metadata"]["name"]
        assert "replicas" not in kinds["Deployment"]["spec"]
    (trigger,) = kinds["ScaledObject"]["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    (name,) = re.findall(r"lenet_\w+", query)
    assert name in registered()
    assert f'container="{pod_spec(kinds)[1]["name"]}"' in query


def test_keys_are_named_and_never_written_and_prometheus_has_them(render):
    plain = render(*CPU, "podmonitor")["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
    assert not {"scheme", "tlsConfig", "authorization"} & plain.keys()
    kinds = render(*GPU)
    (endpoint,) = kinds["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "lenet-tls", "key": "ca.crt"}
    assert endpoint["authorization"]["credentials"] == {"name": "lenet-keys", "key": "scrape-key"}
    variables = {one["name"]: one for one in pod_spec(kinds)[1]["env"]}
    for name, optional in (("LENET_API_KEYS", None), ("LENET_ADMIN_KEYS", True)):
        reference = variables[name]["valueFrom"]["secretKeyRef"]
        assert (reference["name"], reference.get("optional")) == ("lenet-keys", optional)
        assert "value" not in variables[name]


def test_the_overlay_in_the_document_is_valid(kustomize, tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    folder = os.path.relpath(ROOT, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../../deploy/kubernetes", folder))
    kinds = {one["kind"]: one for one in kustomize(tmp_path)}
    for document in kinds.values():
        validate(document)
    assert settings_of(kinds).models == ("lenet",)
    spec, container = pod_spec(kinds)
    images = [container["image"], *(one["image"] for one in spec["initContainers"])]
    assert all(image.startswith("registry.example.org/") for image in images)


def test_the_rules_for_the_operator_are_those_of_prometheus():
    assert prometheus_rule.FILE.read_text() == prometheus_rule.resource(), "make prometheus-rule"
    rules = yaml.safe_load(prometheus_rule.RULES.read_text())
    assert yaml.safe_load(prometheus_rule.FILE.read_text())["spec"] == rules


def test_traces_may_leave_for_the_port_of_their_endpoint(render):
    kinds = render("overlays/cpu", "traces")
    policy = kinds["NetworkPolicy/lenet-serve-traces"]["spec"]
    assert policy["podSelector"] == kinds["NetworkPolicy"]["spec"]["podSelector"]
    collector, _ = policy["egress"]
    url = urlsplit(settings_of(kinds).traces_endpoint)
    assert collector["ports"] == [{"port": url.port}]
    (there,) = collector["to"]
    namespace = there["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert url.hostname.split(".")[1] == namespace
