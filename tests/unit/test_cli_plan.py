"""What `tandem up` starts, from its options."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.cli.child import Service
from tandem.cli.plan import UpOptions, plan_ports, plan_services


def planned(options: UpOptions, environment: dict[str, str] | None = None) -> dict[str, Service]:
    stages = plan_services(options, environment or {})
    return {service.name: service for stage in stages for service in stage}


def test_three_services_and_only_the_draft_may_end() -> None:
    services = planned(UpOptions(draft_model="small"))
    assert [(name, service.essential) for name, service in services.items()] == [
        ("target", True),
        ("draft", False),
        ("gateway", True),
    ]
    assert [service.command[-2:] for service in services.values()] == [
        ("-m", "target_service"),
        ("-m", "draft_service"),
        ("-m", "gateway"),
    ]


def test_model_services_get_the_threads_that_were_asked_for() -> None:
    for threads in (1, 3):
        services = planned(UpOptions(draft_model="small", threads=threads))
        for name in ("target", "draft"):
            environment = services[name].environment
            assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == str(threads)
            assert environment[f"TANDEM_{name.upper()}_THREADS"] == str(threads)
            assert environment["TOKENIZERS_PARALLELISM"] == "false"
        assert "OMP_NUM_THREADS" not in services["gateway"].environment


@pytest.mark.parametrize(
    ("options", "cores", "target", "draft"),
    [
        ({}, 2, "2", None),  # n-grams need no core of their own
        ({}, 1, "1", None),
        ({"draft": False}, 8, "8", None),
        ({"draft_model": "small"}, 2, "1", "1"),
        ({"draft_layers": 4}, 8, "4", "4"),
        ({"draft_model": "small"}, 1, "1", "1"),
    ],
)
def test_the_cores_are_divided_between_models(
    options: dict[str, Any], cores: int, target: str, draft: str | None
) -> None:
    services = planned(UpOptions(cores=cores, **options))
    assert services["target"].environment["TANDEM_TARGET_THREADS"] == target
    if draft is not None:
        assert services["draft"].environment["TANDEM_DRAFT_THREADS"] == draft


def test_what_was_not_chosen_is_left_to_the_environment() -> None:
    environment = {"TANDEM_TARGET_DTYPE": "float32", "TANDEM_DRAFT_DEVICE": "cuda:1", "PATH": "/bin"}
    services = planned(UpOptions(draft_model="small", device=None), environment)
    assert services["target"].environment["TANDEM_TARGET_DTYPE"] == "float32"
    assert services["draft"].environment["TANDEM_DRAFT_DEVICE"] == "cuda:1"
    assert "TANDEM_TARGET_DEVICE" not in services["target"].environment
    assert services["gateway"].environment["PATH"] == "/bin"


def test_the_two_models_may_have_two_devices() -> None:
    services = planned(UpOptions(draft_model="small", device="cuda:0", draft_device="cuda:1"))
    assert services["target"].environment["TANDEM_TARGET_DEVICE"] == "cuda:0"
    assert services["draft"].environment["TANDEM_DRAFT_DEVICE"] == "cuda:1"
    assert planned(UpOptions(draft_model="small", device="cpu"))["draft"].environment["TANDEM_DRAFT_DEVICE"] == "cpu"


@pytest.mark.parametrize(
    ("chosen", "branches"),
    [
        ({"cores": 1}, "0"),
        ({"cores": 2}, "0"),  # one each, and the gateway wants some of both
        ({"cores": 3}, None),
        ({"cores": 1, "threads": 4}, None),  # the user knows better how many there are
        ({"cores": 8, "device": "cuda:0"}, "0"),
        ({"cores": 8, "device": "cuda:0", "draft_device": "cuda:0"}, "0"),
        ({"cores": 8, "device": "cuda:0", "draft_device": "cuda:1"}, None),
        ({"cores": 8, "device": "cuda:0", "draft_device": "cpu"}, None),
    ],
)
def test_drafts_are_not_prepared_on_the_targets_own_device(chosen: dict[str, Any], branches: str | None) -> None:
    options = UpOptions(draft_model="small", **chosen)
    assert planned(options)["draft"].environment.get("TANDEM_DRAFT_PREPARED_BRANCHES") == branches
    told = planned(options, {"TANDEM_DRAFT_PREPARED_BRANCHES": "3"})
    assert told["draft"].environment["TANDEM_DRAFT_PREPARED_BRANCHES"] == "3"


@pytest.mark.parametrize(
    ("options", "model", "layers"),
    [
        (UpOptions(model="big", draft_model="small"), "small", None),
        (UpOptions(model="big", draft_layers=4), "big", "4"),
        (UpOptions(model="big", draft_model="small", draft_layers=2), "small", "2"),
    ],
)
def test_the_drafts_model_is_the_named_one_or_a_part_of_the_target(
    options: UpOptions, model: str, layers: str | None
) -> None:
    environment = planned(options)["draft"].environment
    assert environment["TANDEM_DRAFT_MODEL"] == model
    assert environment.get("TANDEM_DRAFT_NUM_LAYERS") == layers


def test_the_gateway_is_told_where_the_services_are() -> None:
    environment = planned(
        UpOptions(target_port=1, draft_model="small", draft_port=2, port=3, host="0.0.0.0")  # noqa: S104
    )["gateway"].environment
    assert environment["TANDEM_GATEWAY_TARGET_ADDRESSES"] == "127.0.0.1:1"
    assert environment["TANDEM_GATEWAY_DRAFT_ADDRESSES"] == "127.0.0.1:2"
    assert environment["TANDEM_GATEWAY_PORT"] == "3"
    assert environment["TANDEM_GATEWAY_HOST"] == "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize("draft", [True, False])
def test_where_no_model_drafts_the_gateway_does_or_nobody(draft: bool) -> None:
    options = UpOptions(draft=draft, draft_table="mine", draft_head="of mine")
    services = planned(options)
    assert services["target"].environment["TANDEM_TARGET_DRAFT_HEAD"] == "of mine"
    assert list(services) == ["target", "gateway"]
    environment = services["gateway"].environment
    assert environment["TANDEM_GATEWAY_DRAFT_ADDRESSES"] == ""
    assert environment.get("TANDEM_GATEWAY_LOOKUP") == (None if draft else "false")
    assert environment["TANDEM_GATEWAY_TABLE"] == "mine"
    assert len(plan_ports(options)) == 3
    assert len(plan_ports(UpOptions(draft_model="small"))) == 5


def test_every_port_in_the_plan_is_one_that_a_service_gets() -> None:
    options = UpOptions(
        draft_model="small", port=1, target_port=2, draft_port=3, target_metrics_port=4, draft_metrics_port=5
    )
    told = {
        value
        for service in planned(options).values()
        for name, value in service.environment.items()
        if name.endswith("_PORT")
    }
    assert {str(use.port) for use in plan_ports(options)} == told == {"1", "2", "3", "4", "5"}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104
        ("::", "http://[::1]:8000"),
        ("example.org", "http://example.org:8000"),
    ],
)
def test_the_url_is_one_that_works_on_this_machine(host: str, url: str) -> None:
    assert UpOptions(host=host).url == url


def test_the_bundled_model_is_wanted_only_where_it_is_used() -> None:
    assert UpOptions().bundled_model_used
    assert UpOptions(model="big", draft_model="bundled").bundled_model_used
    assert not UpOptions(model="big", draft_model="bundled", draft=False).bundled_model_used
    assert not UpOptions(model="big").bundled_model_used
    assert UpOptions(model="big", draft_model="bundled-draft").bundled_model_used


def test_a_model_drafts_only_where_one_is_asked_for() -> None:
    assert UpOptions().drafting_model == ""
    assert UpOptions(draft_model="bundled-draft").drafting_model == "bundled-draft"
    assert UpOptions(draft_layers=2).drafting_model == "bundled"
    assert UpOptions(model="big", draft_model="small", draft_layers=2).drafting_model == "small"
