"""Metrics as an interface: dashboards and alerts depend on every name and label, and on what is counted."""

from __future__ import annotations

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canvax.server.metrics import Metrics

SERIES = {
    "canvax_build_info": ("gauge", {"version"}),
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
    metrics.compiled("denoiser", 3.0)
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
