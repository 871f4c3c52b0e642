"""Allowed transitions of providers and jobs."""

import pytest

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import ProviderState
from ravnest.server.lifecycle import NEW, TRANSITIONS, TransitionError, check_transition

KINDS = {"provider": ProviderState, "job": JobState}


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_is_known_and_can_be_reached(kind: str) -> None:
    table = TRANSITIONS[kind]
    states = {str(state) for state in KINDS[kind]}
    assert {str(state) for state in table} == states | {NEW}
    assert {str(after) for afters in table.values() for after in afters} == states


@pytest.mark.parametrize("kind", KINDS)
def test_other_transitions_are_refused(kind: str) -> None:
    for before, afters in TRANSITIONS[kind].items():
        for after in KINDS[kind]:
            if after in afters:
                check_transition(kind, before, after)
            else:
                with pytest.raises(TransitionError, match=f"cannot become {after}"):
                    check_transition(kind, before, after)


def test_final_states_have_no_transitions() -> None:
    for state in JobState:
        assert state.is_final == (not TRANSITIONS["job"][state])


def test_a_provider_can_be_lost_in_every_state() -> None:
    for state in ProviderState:
        if state is not ProviderState.LOST:
            check_transition("provider", state, ProviderState.LOST)
