"""Machines of a network: HTTPS to the server and mutual TLS between nodes, without any setting."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from lan import Lan, possible
from test_three_commands import MODULE
from world import DEADLINE, LONG, World, eventually, small_model

from ravnest.schemas.auth import ApiRole, JoinToken
from ravnest.schemas.jobs import EventView, JobState, JobView
from ravnest.schemas.providers import ProviderView
from ravnest.transport.certificates import Authority

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not possible(), reason="network namespaces need root and iproute2"),
]


class LanWorld:
    """A server on machine 0 and providers p1 and p2 on machines 1 and 2."""

    def __init__(self, world: World, lan: Lan) -> None:
        self.world = world
        self.lan = lan
        self.server = world.serve(f"--host={lan.hosts[0]}", before=lan.inside(0))
        self.providers = [world.provide(f"p{i}", before=lan.inside(i)) for i in (1, 2)]
        token = world.token(ApiRole.REQUESTER)
        self.membership = (f"--server={world.url}", f"--token={token}")

    def run(self, *arguments: str) -> str:
        """Run a command on machine 0 and return its output."""
        command = self.world.command(*arguments, before=self.lan.inside(0))
        assert command.process.wait(DEADLINE) == 0, [*command.lines, *self.server.lines]
        eventually(lambda: command.lines, lambda lines: "" in lines)
        return "\n".join(command.lines)


@pytest.fixture(scope="module")
def lan_world(shared_world: World) -> Iterator[LanWorld]:
    with Lan(3, 1000) as lan:
        made = LanWorld(shared_world, lan)
        yield made
        for provider in made.providers:
            assert provider.end() == 0


def test_three_machines_train_over_tls(lan_world: LanWorld) -> None:
    world, lan = lan_world.world, lan_world.lan
    assert world.url.startswith(f"https://{lan.hosts[0]}:")
    (world.folder / "short.py").write_text(MODULE)
    lan_world.run("submit", "short:job", *lan_world.membership)
    (view,) = [JobView.model_validate(each) for each in json.loads(lan_world.run("status", "--json"))]
    assert view.state is JobState.DONE
    assert sorted(place.provider_name for place in view.assignments) == ["p1", "p2"]
    model = small_model()
    (trained,) = world.folder.glob("ravnest-job-*/trained_state_dict.pt")
    model.load_state_dict(torch.load(trained, weights_only=True))


def test_a_token_for_another_server_is_not_sent(lan_world: LanWorld) -> None:
    world = lan_world.world
    forged = JoinToken(JoinToken.parse(world.token(ApiRole.REQUESTER)).secret, "0" * 64)
    arguments = ("status", f"--server={world.url}", f"--token={forged}")
    untrusting = world.command(*arguments, before=lan_world.lan.inside(1), home="another")
    assert untrusting.process.wait(DEADLINE) == 4
    untrusting.said("not the one that the token names")


INTRUDER = """
import socket, ssl, sys
host, port, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
with socket.create_connection((host, port), 10) as connection:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if files:
        context.load_cert_chain(*files)
    try:
        with context.wrap_socket(connection) as link:
            sys.exit("accepted" if link.recv(1) else 0)
    except ssl.SSLError:
        sys.exit(0)
"""


def test_a_node_rejects_untrusted_connections_and_the_server_records_them(lan_world: LanWorld) -> None:
    world, lan = lan_world.world, lan_world.lan
    (world.folder / "long.py").write_text(MODULE.replace("epochs=5", f"epochs={LONG}"))
    (world.folder / "intruder.py").write_text(INTRUDER)
    foreign = Authority("plan", datetime.datetime.now(datetime.UTC)).issue("node_0", ["10.77.0.1"])
    (world.folder / "foreign.pem").write_bytes(foreign.certificate)
    (world.folder / "foreign.key").write_bytes(foreign.key)
    job = lan_world.run("submit", "long:job", *lan_world.membership, "--detach").split()[-1]

    def view() -> JobView:
        return JobView.model_validate(json.loads(lan_world.run("status", job, "--json")))

    eventually(view, lambda view: view.state is JobState.TRAINING and view.progress.updates > 0)
    views = [ProviderView.model_validate(each) for each in json.loads(lan_world.run("nodes", "--json"))]
    host, port = views[0].offer.address.split(":")
    for certificate in ((), ("foreign.pem", "foreign.key")):
        command = [sys.executable, "intruder.py", host, port, *certificate]
        subprocess.run([*lan.inside(0), *command], cwd=world.folder, check=True, timeout=60)

    def rejections() -> list[str]:
        lines = lan_world.run("logs", job, "--json").splitlines()
        events = [EventView.model_validate_json(line) for line in lines if line.startswith("{")]
        return [event.reason for event in events if event.kind == "refusal"]

    found = eventually(rejections, lambda found: len(found) == 2)
    assert any("certificate of another authority" in reason for reason in found)
    assert any("without a certificate" in reason for reason in found)
    assert view().state is JobState.TRAINING  # the job is not affected
    lan_world.run("cancel", job)
