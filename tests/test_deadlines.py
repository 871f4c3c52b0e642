"""Deadlines agree with each other, and the modules use them."""

import ast
import inspect

import pytest

from ravnest import deadlines
from ravnest.averaging.deadlines import Deadlines
from ravnest.deadlines import RELATIONS, Relation
from ravnest.runtime.settings import NodeSettings
from ravnest.server.settings import ServerSettings


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.why)
def test_relations_hold(relation: Relation) -> None:
    assert relation.shorter < relation.longer, relation.why


def test_every_deadline_takes_part_in_a_relation() -> None:
    """A deadline that agrees with nothing belongs to the module that uses it."""
    tree = ast.parse(inspect.getsource(deadlines))
    named = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    relations = named.pop("RELATIONS")
    used = {node.id for node in ast.walk(relations) if isinstance(node, ast.Name)}
    helper = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    used |= {node.id for node in ast.walk(helper) if isinstance(node, ast.Name)}
    assert set(named) <= used
    assert len({relation.why for relation in RELATIONS}) == len(RELATIONS)


def test_settings_use_the_deadlines() -> None:
    server = ServerSettings()
    assert server.lost_after == deadlines.LOST_AFTER
    assert server.heartbeat_wait >= deadlines.POLL_WAIT, "the server holds a poll as long as asked"
    assert server.longest_wait >= deadlines.JOB_POLL
    assert NodeSettings.connect_timeout == deadlines.NEIGHBOUR_CONNECT
    assert NodeSettings.stall_timeout == deadlines.TRAINING_STALL


def test_the_final_round_waits_longer_than_others() -> None:
    limits = Deadlines()
    assert limits.answer_most < limits.final_answer
    assert limits.final_answer + limits.reduce_most < limits.final_most


@pytest.mark.parametrize("outage", [0.0, deadlines.LINK_OUTAGE, 3600.0])
def test_rounds_outlast_the_outages_that_links_tolerate(outage: float) -> None:
    limits, longest = Deadlines.outlasting(outage), deadlines.ROUND_OUTAGES * outage
    assert outage < limits.reach < limits.ring_stall < limits.reduce_most
    assert longest < min(limits.ring_stall, limits.answer_floor, limits.request_floor)
    assert limits.answer_floor < limits.answer_most < limits.final_answer
    assert limits.final_answer + limits.reduce_most < limits.final_most
