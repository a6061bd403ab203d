"""The Helm chart, by Helm's own code and the Kubernetes API's schemas."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.operate.tools import ROOT, importable

pytestmark = pytest.mark.long
CHART = ROOT / "docker" / "k8s" / "agentkv"
EVERYTHING = {"serviceMonitor": {"enabled": True}, "engine": {"replicas": 3, "flags": ["--page-size", "16"]}}


@pytest.fixture(scope="module")
def helm() -> Any:
    importable("helm-python-sdk==0.2.2")
    import helm_python

    return helm_python


def render(helm: Any, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values or {}, name="demo", namespace="agents")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(name)]
    return found


def test_helm_lints_it_without_an_error(helm: Any) -> None:
    said = helm.lint(str(CHART))
    assert said["errors"] == [] and all(m["severity"] < 2 for m in said["messages"]), said


@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, {"model": {"hostPath": "/srv/models"}}], ids=["plain", "all", "host"]
)
def test_every_object_is_what_the_kubernetes_api_takes(helm: Any, values: dict[str, Any]) -> None:
    importable("kubernetes-validate==1.37.0")
    import kubernetes_validate

    for document in render(helm, values):
        if document["kind"] == "ServiceMonitor":
            continue  # its schema comes with the Prometheus operator
        kubernetes_validate.validate(document, "1.34", strict=True)


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": {"image": "agentkv/gateway:latest"}},
        {"engine": {"image": "agentkv/engine"}},
        {"engine": {"gpus": 0}},
        {"budget": 64},
        {"budgets": 512},
        {"model": {"path": "models/x"}},
        {"existingSecret": ""},
    ],
)
def test_wrong_values_are_refused(helm: Any, values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render(helm, values)


def test_all_pods_are_unprivileged_and_engines_get_few_secrets(helm: Any) -> None:
    objects = render(helm)
    for kind, name in (("Deployment", "-gateway"), ("StatefulSet", "-engine")):
        pod = one(objects, kind, name)["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    secrets = {volume["name"]: volume for volume in pod["volumes"]}["secrets"]["secret"]
    assert [item["key"] for item in secrets["items"]] == ["worker_key", "join_token"]


def test_engines_take_gpus_register_under_stable_names_and_drain(helm: Any) -> None:
    objects = render(helm, {"engine": {"gpus": 2, "drainSeconds": 90}})
    engine = one(objects, "StatefulSet", "-engine")["spec"]
    (container,) = engine["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["args"][1:3] == ["--agentkv-url", "http://$(POD_NAME).demo-agentkv-engine.agents.svc:30000"]
    environment = {e["name"]: e.get("value") for e in container["env"]}
    gateway = one(objects, "Service", "-gateway")
    assert environment["AGENTKV_REGISTER"] == f"http://{gateway['metadata']['name']}:8000"
    assert environment["AGENTKV_GPUS_EACH"] == "2"
    assert container["lifecycle"]["preStop"]["exec"]["command"][-2:] == ["--limit", "90"]
    assert engine["template"]["spec"]["terminationGracePeriodSeconds"] > 90
    (shm,) = [v for v in engine["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert one(objects, "Service", "-engine")["spec"]["clusterIP"] == "None"


def test_selectors_meet_their_pods_and_monitors_their_services(helm: Any) -> None:
    objects = render(helm, EVERYTHING)
    for component, kind in (("gateway", "Deployment"), ("engine", "StatefulSet")):
        labels = one(objects, kind, f"-{component}")["spec"]["template"]["metadata"]["labels"]
        service = one(objects, "Service", f"-{component}")
        assert service["spec"]["selector"].items() <= labels.items()
        budget = one(objects, "PodDisruptionBudget", f"-{component}")["spec"]
        assert budget["selector"]["matchLabels"].items() <= labels.items() and budget["maxUnavailable"] == 1
        monitor = one(objects, "ServiceMonitor", f"-{component}")["spec"]
        measured = one(objects, "Service", "-gateway-metrics" if component == "gateway" else "-engine")
        assert monitor["selector"]["matchLabels"].items() <= measured["metadata"]["labels"].items()
        assert monitor["endpoints"][0]["port"] in [port["name"] for port in measured["spec"]["ports"]]
        assert measured["spec"]["selector"].items() <= labels.items()
        assert monitor["endpoints"][0]["relabelings"] == [{"targetLabel": "job", "replacement": component}]
    policy = one(objects, "NetworkPolicy", "-engine")["spec"]
    gateway = one(objects, "Deployment", "-gateway")["spec"]["template"]["metadata"]["labels"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= gateway.items()
