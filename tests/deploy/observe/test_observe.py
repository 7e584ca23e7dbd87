"""Rules and dashboards name metrics and labels that exist, and alerts fire when they should."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from pdserve.contracts import metrics
from pdserve.deploy.cli import run
from pdserve.deploy.observe.files import write_files
from pdserve.deploy.observe.grafana import Panel, dashboard_json, dashboards
from pdserve.deploy.observe.rules import alerts, recording_rules, rule_file, runbook
from pdserve.router.requests.journey import GAP_CAUSE, TPOT_CAUSES, TTFT_CAUSES

ROOT = Path(__file__).parents[3]
FAMILIES = {metric.name: metric for metric in metrics.FAMILIES}
SUFFIXES = {metrics.Counter: ("_total",), metrics.Gauge: ("",), metrics.Histogram: ("_bucket", "_sum", "_count")}
SAMPLES = {name + suffix: metric for name, metric in FAMILIES.items() for suffix in SUFFIXES[type(metric)]}
VALUES = {
    "phase": set(metrics.PHASES),
    "kind": set(metrics.STEP_KINDS),
    "stage": set(metrics.FAILURE_STAGES),
    "reason": {*metrics.RETRY_REASONS, *metrics.FALLBACK_REASONS, *metrics.SCALE_REASONS},
    "limit": {"sequences", "tokens"},
    "result": {"done", "failed"},
    "age": set(metrics.HANDOFF_AGES_S),
    "verdict": {"good", "bad"},
    "role": {"prefill", "decode", "mixed"},
    "state": {"free", "cached", "referenced", "parked"},
    "expected": {"on_time", "late"},
    "objective": {"ttft", "tpot"},
    "cause": {*TTFT_CAUSES, *TPOT_CAUSES, GAP_CAUSE},
    "ttft": {"met", "missed", "failed", "refused"},
    "tpot": {"met", "missed", "none", "failed", "refused"},
}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt install prometheus)")


def panels() -> Iterator[Panel]:
    for dashboard in dashboards():
        for row in dashboard.rows:
            yield from row.panels


def expressions() -> Iterator[str]:
    yield from recording_rules().values()
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "observe.md").read_text(), re.DOTALL):
        for group in yaml.safe_load(block)["groups"]:
            yield from (rule["expr"] for rule in group["rules"])
    for alert in alerts():
        yield from (alert.expr, alert.query)
    for panel in panels():
        for expr, _ in panel.queries:
            yield expr


def names_in(expr: str) -> set[str]:
    return set(re.findall(r"\bpdserve[a-z0-9_:]*", expr)) - {"pdserve"}


def test_every_name_and_label_exists() -> None:
    recorded = recording_rules()
    for expr in expressions():
        labels = {"le", "job"}
        for name in names_in(expr):
            assert name in SAMPLES or name in recorded, f"{name} in {expr}"
            sources = names_in(recorded[name]) if name in recorded else {name}
            labels |= {label for source in sources for label in SAMPLES[source].labels}
        for label, values in re.findall(r'[{ ]([a-z]+)=~?"([^"]*)"', expr):
            assert label in labels, f"{label} in {expr}"
            assert set(values.split("|")) <= VALUES.get(label, {values}), f"{values} in {expr}"
        for group in re.findall(r"by \(([^)]*)\)", expr):
            assert set(group.split(", ")) <= labels, f"{group} in {expr}"


def test_every_metric_is_shown() -> None:
    shown = {SAMPLES[name].name for expr in expressions() for name in names_in(expr) if name in SAMPLES}
    assert set(FAMILIES) == shown


def test_units_fit_what_is_measured() -> None:
    for panel in panels():
        for expr, legend in panel.queries:
            if "histogram_quantile" in expr:
                [name] = names_in(expr)
                unit = {"seconds": "s", "bytes": "bytes", "tokens": "short"}[name.split("_")[-2]]
                assert panel.unit == unit, panel.title
            if panel.unit == "s":
                assert "_seconds" in expr, panel.title
            assert legend


def lost(written: Any, read: Any) -> Iterator[str]:
    """Keys of ``written`` that ``read`` lacks, and values that differ."""
    if isinstance(written, dict):
        for key, value in written.items():
            yield from lost(value, read[key]) if key in read else [key]
    elif isinstance(written, list) and len(written) == len(read):
        for one, other in zip(written, read, strict=True):
            yield from lost(one, other)
    elif written != read:
        yield f"{written} became {read}"


def test_grafanas_schema_has_every_field() -> None:
    register_default_plugins()
    for dashboard in dashboards():
        board = json.loads(json.dumps(dashboard_json(dashboard)))
        read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
        assert set(lost(board, read)) == {"titleFormat"}, "that of annotations from Prometheus, which the schema lacks"


def test_panels_do_not_overlap() -> None:
    for dashboard in dashboards():
        cells: set[tuple[int, int]] = set()
        board = dashboard_json(dashboard)
        for panel in board["panels"]:
            place = panel["gridPos"]
            own = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not own & cells, panel["title"]
            assert max(x for x, _ in own) < 24
            cells |= own
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        kinds = [panel["type"] for panel in board["panels"]]
        assert all(kinds[index + 1] == "text" for index, kind in enumerate(kinds) if kind == "row")


def test_the_runbook_has_every_alert() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    assert text == runbook(), "write it with: python -m pdserve.deploy.observe.rules > docs/runbook.md"
    assert len({alert.name for alert in alerts()}) == len(alerts())
    for rule in rule_file()["groups"][1]["rules"]:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    titles = {dashboard.title.removeprefix("pdserve: ") for dashboard in dashboards()}
    for named in re.findall(r"\*([A-Z][^*]+)\*", "".join(alert.steps for alert in alerts())):
        assert named in titles | {alert.name for alert in alerts()}, named


def test_the_command_writes_what_both_programs_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "observe"
    assert run(["dashboards", "--out", str(out), "--admin-url", "http://10.0.0.1:9000/", "--token-file", "/t"]) == 0
    assert f"--config.file {out}/prometheus.yml" in capsys.readouterr().out
    config = yaml.safe_load((out / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    [discovery] = job["http_sd_configs"]
    assert discovery["url"] == "http://10.0.0.1:9000/targets"
    assert discovery["authorization"]["credentials_file"] == job["authorization"]["credentials_file"] == "/t"
    [provider] = yaml.safe_load((out / "grafana/provisioning/dashboards/pdserve.yml").read_text())["providers"]
    boards = [json.loads(path.read_text()) for path in Path(provider["options"]["path"]).iterdir()]
    assert {board["uid"] for board in boards} == {dashboard.uid for dashboard in dashboards()}
    [source] = yaml.safe_load((out / "grafana/provisioning/datasources/pdserve.yml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    (tmp_path / "file").touch()
    assert run(["dashboards", "--out", str(tmp_path / "file"), "--admin-url", "http://10.0.0.1:9000"]) == 1
    assert "give another folder with --out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--admin-url", "--prometheus-url"])
def test_an_address_without_its_scheme_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    out = tmp_path / "observe"
    urls = {"--admin-url": "http://10.0.0.1:9000", option: "localhost:9000"}
    assert run(["dashboards", "--out", str(out), *itertools.chain(*urls.items())]) == 2
    assert (
        capsys.readouterr().err == f"pdserve: {option} is 'localhost:9000'; write http:// or https:// before the host\n"
    )
    assert not out.exists()


@needs_promtool
def test_prometheus_takes_the_files(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch()
    for token_file in ("", str(token)):
        file, _ = write_files(tmp_path, "http://127.0.0.1:9000", token_file, "http://127.0.0.1:9090")
        subprocess.run(["promtool", "check", "config", str(file)], check=True, capture_output=True)


NUM_MINUTES = 30


def at(value: float) -> str:
    """Samples of a gauge, one a minute."""
    return f"{value}x{NUM_MINUTES}"


def growing(per_minute: float) -> str:
    """Samples of a counter."""
    return f"0+{per_minute}x{NUM_MINUTES}"


SLO = {
    "pdserve_slo_attainment": at(0.9),
}


def verdicts(num_met: int, num_missed: int) -> dict[str, str]:
    """Requests per minute."""
    return {
        'pdserve_slo_requests_total{ttft="met", tpot="met"}': growing(num_met),
        'pdserve_slo_requests_total{ttft="missed", tpot="met"}': growing(num_missed),
    }


def up(**workers: float) -> dict[str, str]:
    """Workers of each role that are up."""
    return {f'pdserve_ready_workers{{role="{role}"}}': at(value) for role, value in workers.items()}


def busy(prefill: float, decode: float) -> dict[str, str]:
    """Shares of time."""
    return {
        f'pdserve_worker_busy_seconds_total{{role="{role}", worker="{role}-0", kind="{kind}"}}': growing(30 * share)
        for role, share in (("prefill", prefill), ("decode", decode))
        for kind in ("prefill", "decode")
    }


def misses(objective: str, cause: str, per_minute: float) -> dict[str, str]:
    """Of 100 requests a minute."""
    labels = f'{{tier="default", objective="{objective}", cause="{cause}"}}'
    return {**verdicts(100, 0), f"pdserve_slo_misses_total{labels}": growing(per_minute)}


def blocks(**states: float) -> dict[str, str]:
    return {f'pdserve_kv_blocks{{role="decode", state="{state}"}}': at(count) for state, count in states.items()}


def pulls(per_minute: float, failures: float = 0) -> dict[str, str]:
    return {
        'pdserve_kv_transfer_seconds_count{transport="tcp"}': growing(per_minute),
        'pdserve_kv_transfer_failures_total{stage="copy", transport="tcp"}': growing(failures),
        **{
            f'pdserve_kv_link_pulls_total{{source="p", worker="d", result="{result}"}}': growing(count)
            for result, count in (("done", per_minute), ("failed", failures))
        },
    }


def steps(seconds: float, predicted: float) -> dict[str, str]:
    labels = '{role="decode", worker="d", kind="decode"}'
    return {
        f"pdserve_worker_busy_seconds_total{labels}": growing(seconds),
        f"pdserve_worker_predicted_busy_seconds_total{labels}": growing(predicted),
    }


def placements(late: float, on_time: float) -> dict[str, str]:
    return {
        'pdserve_placements_total{expected="late"}': growing(late),
        'pdserve_placements_total{expected="on_time"}': growing(on_time),
    }


def fallbacks(per_minute: float) -> dict[str, str]:
    return {
        'pdserve_placement_fallbacks_total{reason="no_room"}': growing(per_minute),
        'pdserve_placements_total{expected="on_time"}': growing(100),
    }


def changes(**per_minute: float) -> dict[str, str]:
    return {f'pdserve_scale_changes_total{{reason="{reason}"}}': growing(count) for reason, count in per_minute.items()}


def preemptions(per_minute: float) -> dict[str, str]:
    return {"pdserve_preemptions_total": growing(per_minute), "pdserve_requests_accepted_total": growing(100)}


def restores(given_up: float) -> dict[str, str]:
    """Of ten a minute."""
    return {
        'pdserve_kv_tier_restores_total{worker="w"}': growing(10),
        'pdserve_kv_tier_restores_given_up_total{worker="w"}': growing(given_up),
    }


TIER_OFF = 'pdserve_kv_tier_off{worker="w"}'
WORKER = 'pdserve_worker_up{role="decode", worker="w"}'
PARKED = {'pdserve_parked_sequences{role="prefill"}': at(3)}
EXPIRED = 'pdserve_redispatches_total{reason="expired"}'

CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    # alert: (series under which it fires, series under which it does not)
    "SloBudgetBurnsFast": (verdicts(60, 40), verdicts(85, 15)),
    "SloBudgetBurns": (verdicts(85, 15), verdicts(95, 5)),
    "RouterDown": ({'up{job="pdserve"}': at(0)}, {'up{job="pdserve"}': at(1)}),
    "NoPrefillWorker": (up(prefill=0, decode=1), up(prefill=0, mixed=1)),
    "NoDecodeWorker": (up(prefill=1, decode=0), up(prefill=1, decode=1)),
    "WorkerFlaps": ({WORKER: "1 0 " * 15}, {WORKER: "1x15 0 1x15"}),
    "KvDoesNotMove": ({**PARKED, **pulls(0)}, {**PARKED, **pulls(9)}),
    "KvPullsFail": (pulls(100, failures=2), pulls(300, failures=2)),
    "ParkedPromptsExpire": ({EXPIRED: growing(3)}, {EXPIRED: growing(1)}),
    "ScaleFlaps": (changes(surplus=0.3, decode_short=0.3), changes(surplus=0.1, decode_short=1)),
    "PrefillBusierThanDecode": (busy(0.9, 0.3), busy(0.9, 0.6)),
    "DecodeBusierThanPrefill": (
        {**busy(0.1, 0.97), **misses("tpot", "decode", 12)},
        {**busy(0.1, 0.97), **misses("tpot", "client", 12)},
    ),
    "DecodeKvFull": (blocks(referenced=97, free=3), blocks(referenced=90, cached=10)),
    "PromptsWait": (misses("ttft", "prefill_queue", 12), misses("ttft", "prefill", 12)),
    "AnswersArePreempted": (preemptions(6), preemptions(4)),
    "KvTierOff": ({TIER_OFF: at(1)}, {TIER_OFF: at(0)}),
    "KvTierSlow": (restores(given_up=3), restores(given_up=1)),
    "StepsSlowerThanPredicted": (steps(30, predicted=15), steps(30, predicted=25)),
    "PlacementFallsBack": (fallbacks(20), fallbacks(5)),
    "PromptsPlacedLate": (placements(late=60, on_time=20), placements(late=20, on_time=60)),
}


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule_file()))
    alerts = {rule["alert"]: rule for rule in rule_file()["groups"][1]["rules"]}
    assert set(CASES) == alerts.keys()
    tests: list[dict[str, Any]] = []
    for name, both in CASES.items():
        for series, fires in zip(both, (True, False), strict=True):
            expected = {
                "exp_labels": {**labels_of_result(name), **alerts[name]["labels"]},
                "exp_annotations": alerts[name]["annotations"],
            }
            tests.append(
                {
                    "interval": "1m",
                    "name": name,
                    "input_series": [{"series": key, "values": value} for key, value in {**SLO, **series}.items()],
                    "alert_rule_test": [
                        {"eval_time": f"{NUM_MINUTES}m", "alertname": name, "exp_alerts": [expected] if fires else []}
                    ],
                }
            )
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": tests}))
    result = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def labels_of_result(name: str) -> dict[str, str]:
    """Labels that the expression of an alert keeps, for the series above."""
    kept = {
        "RouterDown": {"job": "pdserve"},
        "KvPullsFail": {"source": "p", "worker": "d"},
        "WorkerFlaps": {"role": "decode"},
        "KvTierOff": {"worker": "w"},
        "KvTierSlow": {"worker": "w"},
        "StepsSlowerThanPredicted": {"role": "decode", "worker": "d", "kind": "decode"},
    }
    return kept.get(name, {})
