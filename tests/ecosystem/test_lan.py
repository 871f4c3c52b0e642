"""Machines of a network: HTTPS to the server, and mutual TLS between nodes, without a setting."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys

import pytest
import torch
from lan import Lan, possible
from test_three_commands import MODULE
from world import LONG, World, eventually, small_model

from ravnest.schemas.auth import ApiRole, JoinToken
from ravnest.schemas.jobs import EventView, JobState, JobView
from ravnest.schemas.providers import ProviderView
from ravnest.transport.certificates import Authority

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not possible(), reason="network namespaces need root and iproute2"),
]


def test_three_machines_train_over_tls(world: World) -> None:
    (world.folder / "mine.py").write_text(MODULE)
    with Lan(3, 1000) as lan:
        server = world.serve(f"--host={lan.hosts[0]}", before=lan.inside(0))
        assert world.url.startswith(f"https://{lan.hosts[0]}:")
        crew = [world.provide(f"p{i}", before=lan.inside(i)) for i in (1, 2)]
        token = world.token(ApiRole.REQUESTER)
        arguments = ("submit", "mine:job", f"--server={world.url}", f"--token={token}")
        submit = world.command(*arguments, before=lan.inside(0))
        assert submit.process.wait(120) == 0, [*submit.lines, *server.lines]

        listing = world.command("status", "--json", before=lan.inside(0))
        assert listing.process.wait(60) == 0
        listing.said("learn")
        (view,) = [JobView.model_validate(each) for each in json.loads("".join(listing.lines))]
        assert view.state is JobState.DONE
        assert [place.provider_name for place in view.places] in (["p1", "p2"], ["p2", "p1"])

        # A token that names another server's certificate is not shown to this one.
        forged = JoinToken(JoinToken.parse(world.token(ApiRole.REQUESTER)).secret, "0" * 64)
        asks = ("status", f"--server={world.url}", f"--token={forged}")
        stranger = world.command(*asks, before=lan.inside(1), home="another")
        assert stranger.process.wait(60) == 4
        stranger.said("not the one that the token names")
        for provider in crew:
            assert provider.end() == 0
    model = small_model()
    (trained,) = world.folder.glob("ravnest-job-*/trained_state_dict.pt")
    model.load_state_dict(torch.load(trained, weights_only=True))


STRANGER = """
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
            sys.exit("let in" if link.recv(1) else 0)
    except ssl.SSLError:
        sys.exit(0)
"""


def test_a_node_turns_strangers_away_and_the_server_writes_it_down(world: World) -> None:
    (world.folder / "mine.py").write_text(MODULE.replace("epochs=5", f"epochs={LONG}"))
    (world.folder / "stranger.py").write_text(STRANGER)
    foreign = Authority("plan", datetime.datetime.now(datetime.UTC)).issue("node_0", ["10.77.0.1"])
    (world.folder / "foreign.pem").write_bytes(foreign.certificate)
    (world.folder / "foreign.key").write_bytes(foreign.key)
    with Lan(3, 1000) as lan:
        world.serve(f"--host={lan.hosts[0]}", before=lan.inside(0))
        for place in (1, 2):
            world.provide(f"p{place}", before=lan.inside(place))

        def ask(*arguments: str) -> str:
            command = world.command(*arguments, before=lan.inside(0))
            assert command.process.wait(60) == 0
            eventually(lambda: command.lines, lambda lines: "" in lines)
            return "\n".join(command.lines)

        token = world.token(ApiRole.REQUESTER)
        membership = (f"--server={world.url}", f"--token={token}")
        number = ask("submit", "mine:job", *membership, "--detach").split()[-1]

        def state() -> JobView:
            return JobView.model_validate(json.loads(ask("status", number, "--json")))

        eventually(state, lambda view: view.state is JobState.TRAINING and view.progress.updates > 0)
        views = [ProviderView.model_validate(each) for each in json.loads(ask("nodes", "--json"))]
        host, port = views[0].offer.address.split(":")
        for certificate in ((), ("foreign.pem", "foreign.key")):
            knock = [sys.executable, "stranger.py", host, port, *certificate]
            subprocess.run([*lan.inside(0), *knock], cwd=world.folder, check=True, timeout=60)

        def refusals() -> str:
            lines = ask("logs", number, "--json").splitlines()
            events = [EventView.model_validate_json(line) for line in lines if line.startswith("{")]
            return "\n".join(event.reason for event in events if event.kind == "refusal")

        found = eventually(refusals, lambda found: found.count("turned away") == 2)
        assert f"of {number} turned away a connection with a certificate of another authority" in found
        assert f"of {number} turned away a connection without a certificate" in found
        assert state().state is JobState.TRAINING  # it takes no harm
        ask("cancel", number)
