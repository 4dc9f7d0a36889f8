"""The manifests under deploy/ fit their schemas and the commands they run; the image's steps can be carried out."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from canvax.cli.arguments import parse
from canvax.compile import cache

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(path for path in DEPLOY.rglob("*.yaml") if path.name not in ("kustomization.yaml", "rules.yaml"))
needs_schemas = pytest.mark.skipif(
    not (find_spec("kubernetes_validate") and find_spec("yaml")), reason="needs kubernetes-validate: pip install it"
)
pytestmark = needs_schemas


def read(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text())


def pods(manifest: Any) -> Iterator[dict[str, Any]]:
    """The pods in a manifest: whatever has containers."""
    if isinstance(manifest, dict):
        if "containers" in manifest:
            yield manifest
        for value in manifest.values():
            yield from pods(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from pods(value)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_fits_its_schema(path: Path) -> None:
    """Kubernetes' own kinds by its OpenAPI; those of KubeRay and JobSet by their CRDs, and the pods in them as pods."""
    import jsonschema
    import kubernetes_validate

    manifest, version = read(path), kubernetes_validate.latest_version()
    schema = ROOT / "tests" / "data" / "crds" / f"{manifest['kind']}.json"
    if schema.exists():
        jsonschema.validate(manifest, json.loads(schema.read_text()))
    else:
        kubernetes_validate.validate(manifest, version, strict=True)
    found = list(pods(manifest))
    assert found or manifest["kind"] in ("Service", "PersistentVolumeClaim")
    for pod in found:
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, version, strict=True
        )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_commands_are_canvax(path: Path) -> None:
    """Every flag in a manifest is one that the command has."""
    manifest = read(path)
    lines = [
        [str(word) for word in one["args"]] for pod in pods(manifest) for one in pod["containers"] if "args" in one
    ]
    if entry := manifest["spec"].get("entrypoint"):
        lines.append(shlex.split(entry)[1:])
    for line in lines:
        parse([re.sub(r"\$\(\w+\)", "0", word) for word in line])


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("name", ["rayservice-gpu", "rayservice-tpu"])
def test_serve_config(name: str) -> None:
    """The config is one that Ray Serve reads, and its arguments are those of the application."""
    import yaml

    manifest = read(DEPLOY / "ray" / f"{name}.yaml")
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    if not find_spec("ray"):
        pytest.skip("needs Ray: pip install 'canvax[ray]'")
    from ray.serve.schema import ServeDeploySchema

    from canvax.scale.serve import ServeArgs

    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "canvax.scale.serve:app"
    wanted = ServeArgs.of(application.args)  # type: ignore[arg-type]
    worker = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (str(int(wanted.gpus)), str(int(wanted.tpus))) == (
        limits.get("nvidia.com/gpu", "0"), limits.get("google.com/tpu", "0"),
    )  # fmt: skip
    assert wanted.imagine
    assert (wanted.least, wanted.most) == (worker["minReplicas"], worker["maxReplicas"])


def test_rules_are_alerts() -> None:
    (group,) = read(DEPLOY / "prometheus" / "rules.yaml")["groups"]
    assert group["rules"]
    for rule in group["rules"]:
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


def test_pods_are_not_root() -> None:
    (pod,) = pods(read(DEPLOY / "kustomize" / "base" / "statefulset.yaml"))
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert "USER 10001:10001" in (DEPLOY / "Dockerfile").read_text()


def test_keys_are_a_file_that_can_be_read_again() -> None:
    """From a variable they could change only with a restart."""
    (pod,) = pods(read(DEPLOY / "kustomize" / "base" / "statefulset.yaml"))
    (container,) = pod["containers"]
    assert not any(entry["name"] == "CANVAX_KEYS" for entry in container.get("env", ()))
    folder, _, name = container["args"][container["args"].index("--keys") + 1].rpartition("/")
    (volume,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    (secret,) = [entry["secret"] for entry in pod["volumes"] if entry["name"] == volume]
    command = f"create secret generic {secret['secretName']} --from-file={name}="
    assert command in (ROOT / "docs" / "scaling.md").read_text()


def test_replicas_have_a_volume_and_a_journal_each() -> None:
    """With one claim for all, the second server finds the journal in use, or its node without the volume."""
    base = DEPLOY / "kustomize" / "base"
    manifests = {path: read(base / path) for path in read(base / "kustomization.yaml")["resources"]}
    assert {path.name for path in base.iterdir()} == {*manifests, "kustomization.yaml"}
    by_kind = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests.values()}
    spec = by_kind["StatefulSet", "canvax"]["spec"]
    pods_alone = by_kind["Service", spec["serviceName"]]["spec"]
    assert pods_alone["publishNotReadyAddresses"], "a draining pod must answer for its jobs"
    (claim,), ((container,),) = spec["volumeClaimTemplates"], [pod["containers"] for pod in pods(spec)]
    (path,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == claim["metadata"]["name"]]
    assert container["args"][container["args"].index("--journal") + 1].startswith(f"{path}/")
    assert not any("persistentVolumeClaim" in volume for pod in pods(spec) for volume in pod["volumes"])


def test_compiled_programs_outlive_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next container has the volume /cache and an empty home."""
    monkeypatch.delenv("CANVAX_CACHE_DIR", raising=False)
    for name, path in re.findall(r"(\w+)=(/cache\S*)", (DEPLOY / "Dockerfile").read_text()):
        monkeypatch.setenv(name, f"{tmp_path}{path}")
    monkeypatch.setenv("HOME", str(tmp_path / "first"))
    folder = cache.open_cache()
    assert folder is not None
    assert cache.write(folder / "key.program", {"key": "key"}, b"executable")
    monkeypatch.setenv("HOME", str(tmp_path / "second"))
    assert folder == cache.open_cache()
    assert cache.read(folder / "key.program", "key") == b"executable"


@pytest.mark.weekly
def test_steps_of_the_image(tmp_path: Path) -> None:
    """Without a container engine: the files that are copied, and the steps of its first half, in a bare environment."""
    text = (DEPLOY / "Dockerfile").read_text()
    assert (ROOT / ".dockerignore").read_text().split() == [
        "*", *(f"!{name}" for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "src")), "**/__pycache__",
    ]  # fmt: skip
    first = text.split("\nFROM ")[1]
    for sources, target in re.findall(r"^COPY (.+) (\S+)$", first, re.MULTILINE):
        folder = tmp_path / target.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", *sources.split(), str(folder) if target.endswith("/") else str(folder.parent)],
                       cwd=ROOT, check=True)  # fmt: skip
    for step in re.findall(r"^RUN (.+)$", first, re.MULTILINE):
        step = step.replace("${EXTRAS}", "serve,batch")
        for folder in ("/opt", "/wheel", "/src"):
            step = re.sub(rf"(?<![\w/]){folder}\b", f"{tmp_path}{folder}", step)
        subprocess.run(["sh", "-c", step.replace("python -m", f"{sys.executable} -m", 1)], check=True, timeout=900,
                       env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})  # fmt: skip
    (tmp_path / "rows.txt").write_text("a red apple\n")
    words = [str(tmp_path / "opt/canvax/bin/canvax"), "batch", "rows.txt", "-o", "out", "--steps", "2", "--quiet"]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=600, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert (tmp_path / "out" / "000001.png").exists()
