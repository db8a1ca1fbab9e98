"""The environment of the processes that ``up`` starts."""

import json
import os
import subprocess
import sys

import pytest

SHOW = """
import json, sys
from pathlib import Path
from launch.processes import local_processes
from launch.machine_settings import UpSettings
specs = local_processes(UpSettings(both=1, prefill=1, decode=1), Path("/models/one"), Path("/private/secret"))
print(json.dumps({spec.name: dict(spec.env) for spec in specs}))
"""
SECRETS = {
    "KVBATON_API_KEYS": "key-of-all",
    "KVBATON_API_KEY": "key-of-a-client",
    "KVBATON_SECRET": "the cluster's",
    "OPENAI_API_KEY": "key-of-another-service",
    "AWS_SECRET_ACCESS_KEY": "of a bucket",
    "PGPASSWORD": "of a database",
}
NEEDED = {
    "KVBATON_LOG_LEVEL": "debug",
    "KVBATON_MAX_NUM_SEQS": "3",
    "KVBATON_MAX_QUEUE": "9",
    "HOME": "/home/x",
}


@pytest.fixture(scope="module")
def environments() -> dict[str, dict[str, str]]:
    """Return the environments by process."""
    path = os.environ["PATH"]  # noqa: TID251
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={"PATH": path, **NEEDED, **SECRETS},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def test_a_worker_is_given_no_key_of_a_client_and_no_other_secret(
    environments: dict[str, dict[str, str]],
) -> None:
    """L3: KVBATON_API_KEYS was in every worker's environment."""
    workers = {name: env for name, env in environments.items() if name != "router"}
    assert len(workers) == 3
    for name, env in workers.items():
        assert not set(env) & set(SECRETS), name
        assert not set(env.values()) & set(SECRETS.values()), name


def test_the_router_is_given_the_keys_that_it_checks_and_no_others(
    environments: dict[str, dict[str, str]],
) -> None:
    """L3: a child gets only the keys that it needs."""
    held = {name for name in SECRETS if name in environments["router"]}
    assert held == {"KVBATON_API_KEYS", "KVBATON_SECRET"}


def test_each_process_is_given_its_own_settings(environments: dict[str, dict[str, str]]) -> None:
    assert environments["router"]["KVBATON_MAX_QUEUE"] == "9"
    assert "KVBATON_MAX_NUM_SEQS" not in environments["router"]
    assert environments["decode-0"]["KVBATON_MAX_NUM_SEQS"] == "3"
    assert "KVBATON_MAX_QUEUE" not in environments["decode-0"]
    assert all(env["HOME"] == "/home/x" for env in environments.values())
    assert all(env["KVBATON_LOG_LEVEL"] == "debug" for env in environments.values())
