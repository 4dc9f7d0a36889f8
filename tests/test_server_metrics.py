"""Metrics as an interface: dashboards and alerts depend on every name and label, and on what is counted."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canvax.compile.aot import Build
from canvax.compile.kinds import PROGRAMS
from canvax.server import adapter_cache, answers, engine, job_store, models
from canvax.server.app import Settings, create_app
from canvax.server.jobs import State
from canvax.server.metrics import OUTCOMES, REASONS, Metrics
from tests.support.server_stub import StubEngine
from tests.support.serving import counted

SERIES = {
    "canvax_build_info": ("gauge", {"version"}),
    "canvax_healthy": ("gauge", set()),
    "canvax_ready": ("gauge", set()),
    "canvax_requests_total": ("counter", {"route", "status"}),
    "canvax_request_seconds": ("histogram", {"route"}),
    "canvax_jobs_accepted_total": ("counter", {"model"}),
    "canvax_jobs_refused_total": ("counter", {"reason"}),
    "canvax_jobs_total": ("counter", {"model", "outcome"}),
    "canvax_job_seconds": ("histogram", {"model", "outcome"}),
    "canvax_queue_seconds": ("histogram", set()),
    "canvax_first_preview_seconds": ("histogram", set()),
    "canvax_queue_images": ("gauge", set()),
    "canvax_queue_cost_seconds": ("gauge", set()),
    "canvax_journal_writable": ("gauge", set()),
    "canvax_steps_total": ("counter", {"size"}),
    "canvax_slot_steps_total": ("counter", {"size", "state"}),
    "canvax_step_seconds": ("histogram", {"size", "batch"}),
    "canvax_images_total": ("counter", {"size"}),
    "canvax_pixels_total": ("counter", set()),
    "canvax_encode_seconds": ("histogram", set()),
    "canvax_conditions_total": ("counter", {"cache"}),
    "canvax_decode_seconds": ("histogram", set()),
    "canvax_turn_overhead_seconds": ("histogram", set()),
    "canvax_file_seconds": ("histogram", set()),
    "canvax_files_failed_total": ("counter", set()),
    "canvax_undecoded_images": ("gauge", set()),
    "canvax_writing_images": ("gauge", set()),
    "canvax_writing_seconds": ("gauge", set()),
    "canvax_programs_compiled_total": ("counter", {"program"}),
    "canvax_compile_seconds_total": ("counter", {"program"}),
    "canvax_compilations": ("gauge", set()),
    "canvax_device_memory_bytes": ("gauge", {"device"}),
    "canvax_models_loaded": ("gauge", set()),
}


@pytest.fixture
def metrics() -> Metrics:
    """One of everything happened."""
    metrics = Metrics()
    metrics.request("/v1/", 200, 0.5)
    metrics.submitted.labels("emoji").inc()
    metrics.refused.labels("queue_full").inc()
    metrics.over("emoji", "done", 2.0)
    metrics.stepped("64x96", 4, 3, 5, 2.0)
    metrics.image("64x96", 64 * 96)
    metrics.conditions.labels("hit").inc()
    metrics.built(Build("denoiser", cached=False, seconds=3.0))
    metrics.memory.labels("0").set(1 << 30)
    return metrics


def test_names_and_labels(metrics: Metrics) -> None:
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        name = family.name + "_total" * (family.type == "counter")
        found[name] = family.type, {label for one in family.samples for label in one.labels} - {"le"}
    of_process = {name for name in found if name.startswith("process_")}
    assert {"process_resident_memory_bytes", "process_open_fds"} <= of_process or sys.platform != "linux"
    assert {name: found[name] for name in found.keys() - of_process} == SERIES


def test_what_a_step_and_an_image_count(metrics: Metrics) -> None:
    """Five rows of a batch of four, in which three slots hold an image, took two seconds."""
    families = text_string_to_metric_families(metrics.text().decode())
    found = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert found["canvax_steps_total", "64x96"] == 15
    assert found["canvax_slot_steps_total", "64x96", "used"] == 15
    assert found["canvax_slot_steps_total", "64x96", "padded"] == 5
    assert found["canvax_step_seconds_count", "4", "64x96"] == 5
    assert found["canvax_step_seconds_sum", "4", "64x96"] == pytest.approx(2.0)
    assert found["canvax_images_total", "64x96"] == 1
    assert found["canvax_pixels_total",] == 64 * 96
    assert found["canvax_compile_seconds_total", "denoiser"] == 3


def test_series_that_alerts_watch_begin_at_zero() -> None:
    """A series that begins at 1 has no increase, so an alert would miss the first failure."""
    metrics = Metrics()
    engine.ImageEngine(["emoji"], engine.EngineSettings(on_request=("more",)), metrics, pytest.fail)
    over = counted(metrics, "canvax_jobs_total")
    assert over == {(model, outcome): 0 for model in ("emoji", "more") for outcome in OUTCOMES}
    assert counted(metrics, "canvax_jobs_accepted_total") == {("emoji",): 0, ("more",): 0}
    assert counted(metrics, "canvax_jobs_refused_total") == {(reason,): 0 for reason in REASONS}
    assert counted(metrics, "canvax_programs_compiled_total") == {(program,): 0 for program in PROGRAMS}
    metrics.built(Build("denoiser", cached=True, seconds=3.0))
    assert counted(metrics, "canvax_compile_seconds_total") == {("denoiser",): 0}
    assert counted(metrics, "canvax_programs_compiled_total")["denoiser",] == 0


def test_reasons_are_those_of_the_engine() -> None:
    """Every code with which a module behind ``submit`` refuses a job begins at 0."""
    codes = {str(state) for state in State if state is not State.READY}
    for module in (adapter_cache, engine, job_store, models):
        assert module.__file__
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Rejected":
                codes |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
    parts = {f"{part}_{why}" for part in (models.VAE, models.CONTROLNET) for why in ("not_found", "unusable")}
    assert codes | parts | {"invalid_value"} == set(REASONS)


def test_codes_are_on_the_page() -> None:
    """Every code of an error is in the table of docs/serving.md."""
    codes = {*REASONS, *answers._STATUSES, "method_not_allowed", "not_found", "invalid_request"}
    for path in Path(models.__file__ or "").parent.glob("*.py"):
        codes |= set(re.findall(r'Rejected\(\s*\w+, "(\w+)"', path.read_text()))
    page = (Path(__file__).parent.parent / "docs/serving.md").read_text()
    assert not {code for code in codes if f"`{code}`" not in page.partition("## Errors")[2].partition("\n## ")[0]}


@pytest.mark.parametrize("state", State)
def test_gauges_are_what_probes_answer(state: State) -> None:
    create_app(StubEngine(), Settings(), state=lambda: state, metrics=(metrics := Metrics()))
    found = [counted(metrics, f"canvax_{name}")[()] for name in ("healthy", "ready")]
    assert found == [state is not State.FAILED, state is State.READY]


def test_alerts_watch_series_that_are_there() -> None:
    """Every metric of the alerts is served from the start, with the labels that they name."""
    metrics = Metrics()
    stub = StubEngine(metrics=metrics)
    metrics.expect(["emoji"])
    create_app(stub, Settings(), state=lambda: State.READY, metrics=metrics)
    served = [one for family in text_string_to_metric_families(metrics.text().decode()) for one in family.samples]
    rules = (Path(__file__).parent.parent / "deploy/prometheus/rules.yaml").read_text()
    watched = re.findall(r'((?:canvax|process)_\w+)(?:\{(\w+)="(\w+)"\})?', rules)
    assert len({name for name, *_ in watched}) == 10
    for name, label, value in watched:
        assert any(one.name == name and one.labels.get(label, "") == value for one in served), name
