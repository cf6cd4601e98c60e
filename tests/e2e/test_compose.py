"""docker-compose.yml: what it promises, checked on the file; and, marked `containers`, the whole of it run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from draft_service.settings import DraftSettings
from gateway.settings import Settings as GatewaySettings
from tandem.settings import LogSettings, TracingSettings
from target_service.settings import TargetSettings

ROOT = Path(__file__).parents[2]
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.secure.yml")
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")
MODEL_SERVICES = ("target", "draft")
OURS = ("models", *MODEL_SERVICES, "gateway")


def load(name: str) -> dict[str, Any]:
    """A compose file with every variable at its default."""
    text = VARIABLE.sub(lambda match: match[2] or "", (ROOT / name).read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


COMPOSE = load("docker-compose.yml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert int(service["user"].split(":")[0]) >= 400
    assert service["pids_limit"] > 0
    assert service["mem_limit"]
    assert service["stop_grace_period"] == "45s"  # above the services' own 30 s
    assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc"} & service.keys()


@pytest.mark.parametrize("name", OURS)
def test_our_containers_run_as_the_user_who_owns_the_volume(name: str) -> None:
    assert SERVICES[name]["user"] == "10001:10001"
    assert "useradd --uid 10001" in (ROOT / "deploy/docker/Dockerfile").read_text()


def test_only_the_gateway_is_published_and_only_to_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.pop("gateway") == ["127.0.0.1:8000:8000"]
    assert published == {"grafana": ["127.0.0.1:3000:3000"]}
    assert SERVICES["grafana"]["profiles"] == ["monitoring"]


@pytest.mark.parametrize("name", MODEL_SERVICES)
def test_model_services_are_reached_from_inside_only(name: str) -> None:
    assert SERVICES[name]["networks"] == ["inside"]
    assert COMPOSE["networks"]["inside"]["internal"] is True
    assert SERVICES[name]["volumes"] == ["models:/models"]
    # One number of threads, however it is asked for: a second pool of them would fight for the same cores.
    text = (ROOT / "docker-compose.yml").read_text()
    for variable in (f"TANDEM_{name.upper()}_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        assert SERVICES[name]["environment"][variable] == 1
        assert f"{variable}: ${{TANDEM_{name.upper()}_THREADS:-1}}\n" in text


def test_the_gateway_waits_for_the_target_and_not_for_the_draft() -> None:
    conditions = {name: needs["condition"] for name, needs in SERVICES["gateway"]["depends_on"].items()}
    assert conditions == {"target": "service_healthy", "draft": "service_started"}


@pytest.mark.parametrize("name", [*MODEL_SERVICES, "gateway"])
def test_commands_and_health_checks_name_modules_that_exist(name: str) -> None:
    service = SERVICES[name]
    python, dash_m, package = service["command"]
    assert (python, dash_m) == ("python", "-m")
    assert importlib.util.find_spec(f"{package}.__main__") is not None
    kind, program, option, what, *arguments = service["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    port = service["environment"][f"TANDEM_{name.upper()}_PORT"]
    if option == "-m":
        assert importlib.util.find_spec(what) is not None
        assert arguments == [f"127.0.0.1:{port}"]
    else:
        compile(what, "healthcheck", "exec")
        assert f"127.0.0.1:{port}/health/ready" in what


@pytest.mark.parametrize("file", COMPOSE_FILES)
@pytest.mark.parametrize(
    ("name", "settings"), [("target", TargetSettings), ("draft", DraftSettings), ("gateway", GatewaySettings)]
)
def test_every_variable_a_service_is_given_is_a_setting_of_it(
    name: str, settings: type[BaseSettings], file: str
) -> None:
    known = {
        f"{model.model_config.get('env_prefix', '')}{field}".upper()
        for model in (settings, LogSettings, TracingSettings)
        for field in model.model_fields
    }
    environment = load(file)["services"].get(name, {}).get("environment", {})
    assert {variable for variable in environment if variable.startswith("TANDEM_")} <= known


def test_the_secure_override_has_every_file_that_it_names_and_its_health_checks_use_them() -> None:
    secure = load("docker-compose.secure.yml")
    for name, service in secure["services"].items():
        given = {f"/run/secrets/{secret}" for secret in service["secrets"]}
        named = {value for variable, value in service["environment"].items() if variable.endswith("_FILE")}
        assert named - {"/run/keys/api-keys"} == given
        assert set(service["secrets"]) <= secure["secrets"].keys()
        check = service["healthcheck"]["test"]
        if name in MODEL_SERVICES:
            assert check[-1] == SERVICES[name]["healthcheck"]["test"][-1]
            assert {argument.partition("=")[2] for argument in check if argument.startswith("--")} == given
        else:
            compile(check[-1], "healthcheck", "exec")
            assert service["volumes"] == ["./secrets/keys:/run/keys:ro"]
    written = {"ca.pem", *(f"{name}.{end}" for name in ("target", "draft", "gateway") for end in ("pem", "key"))}
    assert {Path(secret["file"]).name for secret in secure["secrets"].values()} == written


def test_the_gateway_finds_both_services_where_they_listen() -> None:
    gateway = SERVICES["gateway"]["environment"]
    for name, variable in (("target", "TANDEM_GATEWAY_TARGET_ADDRESSES"), ("draft", "TANDEM_GATEWAY_DRAFT_ADDRESSES")):
        environment = SERVICES[name]["environment"]
        assert environment[f"TANDEM_{name.upper()}_HOST"] == "0.0.0.0"  # noqa: S104 - inside its container
        assert gateway[variable] == f"{name}:{environment[f'TANDEM_{name.upper()}_PORT']}"


def test_prometheus_scrapes_every_service_where_it_serves_metrics() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    scraped = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    ports = {name: SERVICES[name]["environment"][f"TANDEM_{name.upper()}_METRICS_PORT"] for name in MODEL_SERVICES}
    ports["gateway"] = SERVICES["gateway"]["environment"]["TANDEM_GATEWAY_METRICS_PORT"]
    assert scraped == {name: [f"{name}:{port}"] for name, port in ports.items()}


def test_prometheus_and_grafana_find_their_files_where_compose_mounts_them() -> None:
    for name in ("prometheus", "grafana"):
        for mount in SERVICES[name]["volumes"]:
            source, _, _ = mount.partition(":")
            assert not source.startswith(".") or (ROOT / source).exists(), mount
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == (
        "/etc/grafana/dashboards/tandem.json"
    )
    rules = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["rule_files"]
    assert "./deploy/prometheus/rules:/etc/prometheus/rules:ro" in SERVICES["prometheus"]["volumes"]
    assert rules == ["rules/*.yml"]


def test_each_model_service_gets_a_gpu_of_its_own() -> None:
    gpus = []
    for name in MODEL_SERVICES:
        service = load("docker-compose.gpu.yml")["services"][name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert service["environment"][f"TANDEM_{name.upper()}_DEVICE"] == "cuda"
        gpus += device["device_ids"]
    assert gpus == ["0", "1"]


def test_the_example_environment_has_every_variable_with_its_default() -> None:
    example = dict(re.findall(r"^#?(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    read: dict[str, set[str]] = {}
    for name in COMPOSE_FILES:
        for variable, default in VARIABLE.findall((ROOT / name).read_text()):
            read.setdefault(variable, set()).add(default)
    assert example.keys() == read.keys()
    for variable, defaults in read.items():
        assert example[variable] in defaults, variable


def test_the_build_context_holds_what_the_dockerfile_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied: set[str] = set()
    for line in (ROOT / "deploy/docker/Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            copied.update(line.split()[1:-1])
    assert copied == allowed


@pytest.mark.containers
def test_a_clean_build_comes_up_healthy_and_streams_an_answer() -> None:
    """Needs a container engine. TANDEM_COMPOSE names the command (default: docker compose)."""
    compose = [*shlex.split(os.environ.get("TANDEM_COMPOSE", "docker compose")), "--project-name", "tandem-test"]
    port = os.environ.get("TANDEM_PUBLISH_PORT", "18000")

    def run(*arguments: str) -> str:
        environment = {**os.environ, "TANDEM_PUBLISH_PORT": port}
        command = [*compose, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    try:
        run("up", "--build", "--detach", "--wait", "--wait-timeout", "1200")
        body = {"model": "tandem", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            data=json.dumps({**body, "max_tokens": 32}).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
            events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas).strip()
    finally:
        print(run("logs", "--tail", "30"))
        run("down", "--volumes")
