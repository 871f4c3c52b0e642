"""Files of checkpoints that members read for partial results: who may, and for how long."""

from pathlib import Path
from typing import Any

from checkpoint_cases import training_pair, upload
from server_cases import Caller, Case, opened

from ravnest.server.settings import ServerSettings


def listed(caller: Caller, job: str) -> list[str]:
    (cluster,) = caller.get(f"/api/jobs/{job}/partial")["clusters"]
    return [stage["tensors"]["sha256"] for stage in cluster["stages"]]


def status(caller: Caller, digest: str, job: str | None) -> int:
    headers = {"Authorization": f"Bearer {caller.credential}"}
    params: dict[str, Any] = {} if job is None else {"job": job}
    return caller.client.get(f"/api/artifacts/{digest}", headers=headers, params=params).status_code


def used(case: Case, caller: Caller) -> tuple[int, int]:
    with case.server.db.read() as db:
        return db.artifact_grants.totals(caller.id)


def test_a_listed_checkpoint_stays_readable_until_the_next_list(tmp_path: Path) -> None:
    settings = ServerSettings(unused_files_kept=0.0, lost_after=1e9)
    with opened(tmp_path, settings=settings) as case:
        rita, job, alice, bob = training_pair(case)
        before = used(case, rita)
        for update in (1, 2):
            upload(alice, 0, update)
            upload(bob, 1, update)
        case.time.now += 30
        found = rita.get(f"/api/jobs/{job}/partial")
        assert (found["update"], found["age"], found["epochs"]) == (2, 30, 2)
        (root, _) = first = listed(rita, job)
        assert [status(rita, each, job) for each in first] == [200, 200]
        assert status(rita, root, None) == 403, "it is not a file of hers"
        assert used(case, rita) == before, "checkpoints do not count as her files"
        other = case.requester("rob")
        other.get(f"/api/jobs/{job}/partial", 403)
        assert status(other, root, job) == 403
        for update in (3, 4, 5):
            upload(alice, 0, update)
            upload(bob, 1, update)
        case.server.run_due()
        assert status(rita, root, job) == 200, "newer ones have replaced it"
        newest = listed(rita, job)
        assert root not in newest
        assert status(rita, root, job) == 403
        assert status(rita, newest[0], job) == 200
        admin = case.admin()
        assert status(admin, newest[0], job) == 403
        assert listed(admin, job) == newest
        assert status(admin, newest[0], job) == 200
