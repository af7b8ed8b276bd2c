"""The manifests of deploy/kubernetes: rendered, and validated by the schemas of their kinds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry

from deploy import prometheus_rule
from service.observe.metrics import Metrics
from service.process.mps import STOP_TIMEOUT_S
from service.settings import Settings
from service.supervisor import STOP_LIMIT_S

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
    """The command that renders a folder."""
    if (kubectl := shutil.which("kubectl")) is not None:
        said = subprocess.run(
            [kubectl, "version", "--client"], capture_output=True, text=True, check=False
        ).stdout
        if re.search(r"Kustomize Version: v[4-9]", said):
            return (kubectl, "kustomize")
    if (program := shutil.which("kustomize")) is not None:
        return (program, "build")
    pytest.skip("neither a kubectl with kustomize 4 or newer nor kustomize is installed")


@pytest.fixture(scope="session")
def render(kustomize, tmp_path_factory):
    """`render(overlay, *components)` returns the documents, by kind; a second one by KIND/NAME."""
    folder = tmp_path_factory.mktemp("kustomize").resolve()

    @cache
    def rendered(overlay, *components):
        def place(path):
            return os.path.relpath((ROOT / path).resolve(), folder)

        file = {
            "resources": [place(overlay)],
            "components": [place(f"components/{name}") for name in components],
        }
        (folder / "kustomization.yaml").write_text(json.dumps(file))
        done = subprocess.run(
            [*kustomize, str(folder)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def render_(overlay, *components):
        documents = list(yaml.safe_load_all(rendered(overlay, *components)))
        kinds = {}
        for one in documents:
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
    if (deployment := kinds.get("Deployment")) is not None:
        spec = deployment["spec"]["template"]["spec"]
    else:
        spec = {
            **kinds["ClusterServingRuntime"]["spec"],
            **kinds["InferenceService"]["spec"]["predictor"],
        }
    return spec, spec["containers"][0]


def settings_of(kinds):
    """The settings with which a container starts, from its variables and arguments."""
    _, container = pod_spec(kinds)
    variables = dict(kinds.get("ConfigMap", {"data": {}})["data"])
    for variable in container.get("env", ()):
        variables[variable["name"]] = variable.get("value", "a key of 16 characters")
    values = {
        name.removeprefix("LENET_").lower(): text
        for name, text in variables.items()
        if name.startswith("LENET_")
    }
    for argument in container.get("args", ()):
        flag, _, text = argument.partition("=")
        values[flag.removeprefix("--").replace("-", "_")] = text.replace("{{.Name}}", "digits")
    return Settings(**values)


def test_every_component_is_rendered_by_a_test():
    named = {name for _, *components in COMBINATIONS for name in components}
    overlays = "".join(path.read_text() for path in ROOT.glob("overlays/*/kustomization.yaml"))
    named |= set(re.findall(r"^  - ../../components/([\w-]+)$", overlays, re.MULTILINE))
    assert named == {path.name for path in (ROOT / "components").iterdir()}
    overlays = {overlay for overlay, *_ in COMBINATIONS}
    assert overlays == {f"overlays/{path.name}" for path in (ROOT / "overlays").iterdir()}


@pytest.mark.parametrize("combination", COMBINATIONS, ids="+".join)
def test_every_manifest_is_valid_and_starts_the_service_with_settings_that_it_has(
    render, combination
):
    kinds = render(*combination)
    for document in kinds.values():
        validate(document)
    settings = settings_of(kinds)  # raises for unknown and wrong ones
    spec, container = pod_spec(kinds)
    ports = [port["containerPort"] for port in container["ports"]]
    expected = [settings.port] if settings.one_port else [settings.port, settings.grpc_port]
    assert ports == expected
    assert not spec["enableServiceLinks"]
    stop_s = settings.grace_s + settings.drain_timeout_s + STOP_LIMIT_S + STOP_TIMEOUT_S
    assert stop_s < spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    assert settings.grace_s >= 5  # until no proxy sends a request any more


@pytest.mark.parametrize("combination", COMBINATIONS, ids="+".join)
def test_probes_ask_for_readiness_before_traffic_and_for_life_after(render, combination):
    kinds = render(*combination)
    _, container = pod_spec(kinds)
    scheme = None if settings_of(kinds).certificate is None else "HTTPS"
    ready, live = container["readinessProbe"], container["livenessProbe"]
    start = container.get("startupProbe", ready)
    for probe, path in ((start, "/readyz"), (ready, "/readyz"), (live, "/healthz")):
        asked = probe["httpGet"]
        assert (asked["path"], asked.get("scheme")) == (path, scheme)
        names = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert names.get(asked["port"], asked["port"]) == container["ports"][0]["containerPort"]
    if "knative" not in combination:  # which has no startup probe
        assert start["periodSeconds"] * start["failureThreshold"] >= 120


@pytest.mark.parametrize("combination", COMBINATIONS, ids="+".join)
def test_pods_keep_to_the_restricted_standard(render, combination):
    spec, container = pod_spec(render(*combination))
    for one in (container, *spec.get("initContainers", ())):
        security = {**spec.get("securityContext", {}), **one["securityContext"]}
        assert security["runAsNonRoot"]
        assert security["runAsUser"] == 65532  # that of the image
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    writable = {"/tmp", "/home/lenet"}
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    assert "/tmp" in mounts
    assert all(read_only or path in writable for path, read_only in mounts.items())


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


def test_keda_asks_for_a_metric_of_the_service_and_of_this_container(render):
    kinds = render(*GPU)
    (trigger,) = kinds["ScaledObject"]["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    registry = CollectorRegistry()
    Metrics(registry)
    (name,) = re.findall(r"lenet_\w+", query)
    assert name in {family.name for family in registry.collect()}
    assert f'container="{pod_spec(kinds)[1]["name"]}"' in query


def test_prometheus_scrapes_with_a_key_and_over_tls_where_the_service_has_them(render):
    plain = render(*CPU, "podmonitor")["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
    assert not {"scheme", "tlsConfig", "authorization"} & plain.keys()
    (endpoint,) = render(*GPU)["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "lenet-tls", "key": "ca.crt"}
    assert endpoint["authorization"]["credentials"] == {"name": "lenet-keys", "key": "scrape-key"}


def test_secrets_are_named_and_never_written(render):
    _, container = pod_spec(render(*GPU))
    variables = {one["name"]: one for one in container["env"]}
    for name, optional in (("LENET_API_KEYS", None), ("LENET_ADMIN_KEYS", True)):
        reference = variables[name]["valueFrom"]["secretKeyRef"]
        assert (reference["name"], reference.get("optional")) == ("lenet-keys", optional)
        assert "value" not in variables[name]


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "restartPolice"), "Always"),
        ("ClusterServingRuntime", ("spec", "protocolVersion"), ["v2"]),
        ("ClusterServingRuntime", ("spec", "containers"), "one"),
        ("InferenceService", ("spec", "predictor", "model", "storageURI"), "pvc://a"),
        ("PodMonitor", ("spec", "podMetricsEndpoints"), [{"prot": "http"}]),
        ("ScaledObject", ("spec", "triggers"), [{"type": "prometheus"}]),
    ],
)
def test_a_manifest_with_a_mistake_is_refused(render, kind, path, value):
    document = (render(*GPU) | render(*KSERVE))[kind]
    validate(document)
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def test_the_overlay_in_the_document_is_valid(kustomize, tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    folder = os.path.relpath(ROOT, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../../deploy/kubernetes", folder))
    line = [*kustomize, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kinds = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
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
