"""Machines of a network: HTTPS to the server, and mutual TLS between nodes, without a setting."""

from __future__ import annotations

import json

import pytest
import torch
from lan import Lan, possible
from test_three_commands import MODULE
from world import World, small_model

from ravnest.api.jobs import JobState, JobView
from ravnest.api.trust import ApiRole, JoinToken

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
