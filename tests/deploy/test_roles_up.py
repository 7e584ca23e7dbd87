"""``pdserve scale`` gives running workers other roles, for both of two routers, while requests run on them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from pdserve.deploy.cluster.folder import admin_headers
from tests.deploy.clusters import UpProcess, pdserve, wait_for
from tests.patience import HANG_S

DEPLOYMENT = "{router: {replicas: 2}}"
ARGUMENTS = ("--emulate", "h100-sxm", "--prefill", "2", "--decode", "1", "--time-scale", "10")
BODY = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
BACK = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
SWITCHED = {**BACK, "prefill-1": "decode"}


def workers(admin_url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{admin_url}/status", headers=admin_headers(admin_url), trust_env=False, verify=False)
    found: list[dict[str, Any]] = answer.raise_for_status().json()["workers"]
    return found


def test_roles_change_while_requests_run_and_outlive_the_worker(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(DEPLOYMENT)
    up = UpProcess(tmp_path / "log", str(tmp_path / "deployment.yaml"), *ARGUMENTS)
    is_over = threading.Event()
    try:
        up.wait_ready()
        admin_urls = up.banner("admin").split(", ")

        def ask(client: httpx.Client) -> str:
            answer = client.post(f"{up.banner('API')}/completions", json=BODY)
            return str(answer.json()["choices"][0]["text"]) if answer.is_success else answer.text

        def ask_on() -> set[str]:
            answers = set()
            while not is_over.is_set():
                with httpx.Client(trust_env=False, verify=False, timeout=HANG_S) as client:  # either router's
                    answers.add(ask(client))
            return answers

        def scale(*replicas: str) -> str:
            run = pdserve("scale", *replicas, "--admin-url", admin_urls[0])
            return run.stderr if run.returncode else run.stdout

        def have_roles(roles: dict[str, str]) -> bool:
            return all({each["worker_id"]: each["role"] for each in workers(url)} == roles for url in admin_urls)

        epochs = {each["worker_id"]: each["epoch"] for each in workers(admin_urls[0])}

        def is_another() -> bool:
            """Whether both routers have the successor of the worker that is killed."""
            now = [each for url in admin_urls for each in workers(url) if each["worker_id"] == "prefill-1"]
            return len(now) == 2 and all(each["epoch"] != epochs["prefill-1"] for each in now)

        with httpx.Client(trust_env=False, verify=False) as client, ThreadPoolExecutor() as threads:
            undisturbed = ask(client)
            answers = [threads.submit(ask_on) for _ in range(4)]
            try:
                assert scale("prefill=1", "decode=2") == "prefill-1 becomes a decode worker\n"
                wait_for(lambda: have_roles(SWITCHED), "the roles at both routers")
                assert {each["worker_id"]: each["epoch"] for each in workers(admin_urls[0])} == epochs
                shown = pdserve("status", "--admin-url", admin_urls[1]).stdout
                assert ["prefill-1", "decode"] in [line.split()[:2] for line in shown.splitlines()]
                up.members("ray::prefill-1")[0].kill()
                wait_for(lambda: have_roles(SWITCHED) and is_another(), "its successor, in its present role")
                assert scale("prefill=2", "decode=1") == "prefill-1 becomes a prefill worker\n"
                wait_for(lambda: have_roles(BACK), "the first roles at both routers")
            finally:
                is_over.set()
            assert {text for answer in answers for text in answer.result()} == {undisturbed}
        now = {each["worker_id"]: each["epoch"] for each in workers(admin_urls[0])}
        assert [name for name in epochs if epochs[name] != now[name]] == ["prefill-1"]
    finally:
        is_over.set()
        assert up.stop() == 0, up.lines
        assert up.leftovers() == []
