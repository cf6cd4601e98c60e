"""Alert rules, dashboard and configuration: they load, they name what exists, and every alert can fire."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.monitoring import DASHBOARD, DATASOURCE, PROMETHEUS, RULES, RULES_TEST, exported, metrics_in, panels, rules
from tests.promtool import promtool

ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]
RECORDS = {rule["record"] for rule in rules() if "record" in rule}


def _run_rules_test(folder: Path, rules_text: str) -> int:
    """promtool's exit code for the tests, over other rules."""
    (folder / "rules.yml").write_text(rules_text)
    tests = yaml.safe_load(RULES_TEST.read_text())
    tests["rule_files"] = ["rules.yml"]
    (folder / "test.yml").write_text(yaml.safe_dump(tests, sort_keys=False))
    return promtool("test", "rules", folder / "test.yml").returncode


def test_every_alert_fires_when_it_should_and_not_when_all_is_well() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", RULES_TEST)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_test_that_fires_it(alert: str) -> None:
    cases = [
        case
        for test in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for case in test.get("alert_rule_test", ())
        if case["alertname"] == alert
    ]
    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)


def test_the_rules_tests_notice_an_alert_that_never_fires_and_one_that_always_does(tmp_path: Path) -> None:
    text = RULES.read_text()
    assert _run_rules_test(tmp_path, text) == 0
    for expression in ("vector(1) > 2", "vector(1)"):
        for alert in ("TandemDraftDown", "TandemQueueGrowing"):
            broken = yaml.safe_load(text)
            (rule,) = (r for group in broken["groups"] for r in group["rules"] if r.get("alert") == alert)
            rule["expr"] = expression
            assert _run_rules_test(tmp_path, yaml.safe_dump(broken)) != 0


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_name_what_is_exported_and_say_what_to_do(rule: dict[str, object]) -> None:
    assert metrics_in(str(rule["expr"])) <= exported() | RECORDS
    if "alert" in rule:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")  # type: ignore[index]
        assert set(rule["annotations"]) == {"summary", "description"}  # type: ignore[call-overload]


def test_prometheus_takes_its_configuration_with_the_rules(tmp_path: Path) -> None:
    shutil.copy(PROMETHEUS, tmp_path)
    shutil.copytree(RULES.parent, tmp_path / "rules")
    checked = promtool("check", "config", tmp_path / PROMETHEUS.name)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout


def test_every_panel_shows_metrics_that_exist() -> None:
    known = exported()
    for panel in panels():
        for target in panel["targets"]:
            assert metrics_in(target["expr"]) <= known, panel["title"]
            assert metrics_in(target["expr"]) or target["expr"].startswith(("up", "ALERTS")), panel["title"]


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    """A figure that nobody can see is kept up to date for nobody."""
    shown = {name for panel in panels() for target in panel["targets"] for name in metrics_in(target["expr"])}
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in exported()}
    shown_families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in shown}
    ours = {name for name in families if name.startswith("tandem_")}
    assert ours - shown_families == set()


def test_the_dashboard_is_one_that_grafana_can_load() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    (source,) = yaml.safe_load(DATASOURCE.read_text())["datasources"]
    everything = dashboard["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for panel in panels():
        assert panel["type"] in ("stat", "timeseries", "table", "state-timeline")
        assert panel["description"]
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
        references = [target["refId"] for target in panel["targets"]]
        assert references == [chr(ord("A") + number) for number in range(len(references))]
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    places = [panel["gridPos"] for panel in everything]
    for place in places:
        assert place["x"] + place["w"] <= 24
    for one, other in itertools.combinations(places, 2):
        apart_across = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_along = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_across or apart_along, (one, other)
