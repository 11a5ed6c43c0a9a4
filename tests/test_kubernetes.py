"""Validation of launch/kubernetes.yaml by the schemas of Kubernetes and JobSet, which refuse unknown properties."""

import json

import jsonschema
import kubernetes_validate
import yaml
from commands import ROOT


TEXT = (ROOT / "launch" / "kubernetes.yaml").read_text()
JOBSET = json.loads((ROOT / "tests" / "fixtures" / "jobset_v1alpha2.json").read_text())


def validate(text):
    """Validate a JobSet and the Jobs in it. Raises ValidationError of either package."""
    jobset = yaml.safe_load(text)
    jsonschema.validate(jobset, JOBSET)
    for group in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": group["name"]}, **group["template"]}
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_manifest_is_valid():
    validate(TEXT)


def test_manifest_is_valid_with_all_options():
    lines = [line.replace("# ", "", 1) if "# OPTION" in line else line for line in TEXT.splitlines()]
    text = "\n".join(lines)
    assert text.count("OPTION") == 4
    validate(text)
    jobset = yaml.safe_load(text)
    assert "kueue.x-k8s.io/queue-name" in jobset["metadata"]["labels"] and jobset["metadata"]["annotations"]
