"""Deadlines and intervals that must agree across modules, in seconds, and the relations between them.

``RELATIONS`` holds every pair of which one must be shorter than the other, with the reason; they are
checked when this module is imported. Durations are measured with monotonic clocks only: a jump of the
wall clock changes no deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

# HTTP requests

HTTP_CONNECT = 5.0
"""Longest wait for a connection to the server."""
HTTP_ANSWER = 30.0
"""Longest wait for the server's answer, in addition to the time that the request asks it to wait."""
DATABASE_BUSY = 20.0
"""Longest wait of the server for its own database."""
JOB_POLL = 30.0
"""Time that the server holds a requester's request open while nothing changes."""
TRACE_ANSWER = 15.0
"""Longest wait of a requester for the spans of nodes that train."""
PLANNING = 120.0
"""Longest time in which the server makes one plan."""
ESTIMATE = 300.0
"""Longest wait for the estimate of a job: plans for the idle providers and for all."""
LONGEST_HELD_REQUEST = 60.0
"""Longest time that the server holds any request open."""

# Provider and server: signs of life

POLL_WAIT = 8.0
"""Time that the server holds a provider's poll open while nothing changes."""
POLL_ANSWER = 10.0
"""Longest wait for the answer to a poll, in addition to ``POLL_WAIT``."""
POLL_GAP = 0.25
"""Shortest time between two polls."""
REPORT_INTERVAL = 1.0
"""Shortest time between two reports of records."""
ROOT_REPORT_INTERVAL = 0.4
"""The same, of a Root: its losses are on the page soon."""
RECORD_PAUSE = 0.15
"""Time between two writes of records to the pipe from a worker to its agent: a thread that wakes up for
each record takes Python's lock from those that train, at both ends."""
PAGE_PAUSE = 0.4
"""Shortest time between two readings of the state of the page."""
PAGE_DELAY = 1.0
"""Longest time from a loss at the Root until a browser has it, without the network."""
FIRST_PAUSE = 1.0
"""First pause before something is tried again; pauses double."""
LONGEST_PAUSE = 10.0
"""Longest pause before something is tried again, without the jitter."""
JITTER = 0.5
"""Pauses are multiplied by a random number between 1 - ``JITTER`` and 1 + ``JITTER``."""
LOST_AFTER = 30.0
"""A provider without a sign of life for this long is lost."""
RESTART_GRACE = 60.0
"""The same, after a start of the server: providers wait longer between two tries meanwhile."""
TIMER_LATE = 5.0
"""A timer of the server that is later than this shows that the server itself was halted."""
TRAINING_SILENCE = 90.0
"""The same, while it trains with others: links outlast an outage of its network, and so must it."""
WITNESSED_LIMIT = 600.0
"""Longest silence of a provider while its neighbours report progress with it."""
REJOIN_SILENCE = 2.5
"""The same, while its neighbours have lost their links to it and wait for it."""

# Reachability and relays

DIAL_BACK_EACH = 3.0
"""Time for one address of a provider to answer the server that dials it back."""
DIAL_BACK = 5.0
"""Longest check of all addresses of a provider, including the resolution of names."""
DIAL_BACK_GAP = 2.0
"""Shortest time between two checks of one provider."""
RELAY_MEASURE = 3.0
"""Time for relays to answer a provider that measures the round trips to them."""

# A job, from its files to its result

FETCH_GRACE = 600.0
"""Time to fetch an assignment, in addition to four times the time predicted from the bandwidth."""
WORKER_START = 120.0
"""Time in which a worker process on a slow machine imports torch, loads its stage and listens."""
MEMBER_RETURN = 900.0
"""Longest wait of a worker for a lost neighbour; then its provider is free, and keeps its folder."""
NEIGHBOUR_CONNECT = 300.0
"""Longest wait of a worker for its neighbours; it starts when all have fetched their assignments."""
TRAINING_STALL = 900.0
"""Time without progress after which the Root ends the run."""
NODE_RETURN = 600.0
"""Longest wait of a cluster for a lost node, or for the machine that takes its place."""
ROOTS_RETURN = 10.0
"""Longest wait of a cluster that continues for the connections to the other clusters."""
BLOCK_WRITTEN = 120.0
"""Longest wait for one block of a checkpoint to leave for a neighbour, or to arrive there."""
REPLICA_SENT = 300.0
"""Time in which a replica arrives at a neighbour beside training, if the link is fast enough for it."""
REPLICA_MOST = 900.0
"""Time after which a checkpoint whose replicas are not known to be stored does not delay the next."""
LAST_CHECKPOINT = 15.0
"""Longest wait of a node that leaves for a last checkpoint at its neighbour."""
CHECKPOINT_UPLOAD = 600.0
"""Time between two checkpoints that a cluster uploads to the server."""
UPLOAD_SENT = 300.0
"""Time in which a file is uploaded beside training, if the connection is fast enough for it."""
REPLAN_AFTER = 10.0
"""Time for a lost provider to return before its job is planned anew without it."""
RESCUE_GRACE = 60.0
"""Time for the nodes of a cluster that has lost a node to upload their checkpoints, in addition to four
times the time predicted from the bandwidth."""
REQUEUE_AFTER = 240.0
"""Time for which the other nodes of a cluster keep their places if no plan without the lost one exists,
or if other clusters train, which a new plan would interrupt."""
IMPROVEMENT_CHECK = 30.0
"""Time between two looks of the server at running jobs for which another plan may be faster."""
IMPROVEMENT_PAUSE = 300.0
"""Least time between two questions to the planner about one of them."""
SPOT_CHECKS = 1800.0
"""Mean time between two outputs of a stage that the server computes again."""
SPOT_CHECK_ANSWER = 3600.0
"""Least time for a provider to upload what such an output was computed from, on slow networks too."""
SPOT_CHECK_SECONDS = 300.0
"""Longest time that the server computes it."""
RESULT_WAIT = 3600.0
"""Longest wait for a provider that has trained to the end and is away before its result arrived."""

# Links between nodes

LINK_HEARTBEAT = 1.0
"""Longest time for which a side of a link sends nothing."""
LINK_HELLO = 5.0
"""Time for a Hello or its answer to arrive after the connection is established."""
LINK_GONE = 1.5
"""Time after which a peer is gone if its machine answers that nothing listens at its address."""
LINK_DIRECT_FIRST = 1.0
"""Time for a peer's own addresses to answer before a relay is used."""
LINK_NEAREST_FIRST = 0.25
"""Time for a relay to answer after a less preferred one did."""
LINK_DIRECT_RETRY = 20.0
"""First pause before a link that uses a relay tries the peer's own addresses again; pauses double."""
LINK_DIRECT_RETRY_MOST = 600.0
"""Longest of these pauses."""
LINK_OUTAGE = 60.0
"""Time for which a link waits for another connection, unless the plan or the user says otherwise."""

# Rounds: links give up a peer that is gone, so that rounds only wait for what is slow

ROUND_OUTAGES = 3
"""Outages one after the other that each step of a round outlasts: of the link between two Roots, in a
pipeline and in a ring."""
ROUND_REACH = 75.0
"""Longest wait of a node for the connection to another member of a ring."""
RING_STALL = 240.0
"""Time without a chunk after which a node gives up an all-reduce."""
ROUND_ANSWER = 200.0
"""Wait for a cluster's copy of its parameters in a round, in addition to what is measured."""
ROUND_ANSWER_MOST = 300.0
"""Longest wait for a cluster's copy of its parameters in a round while training goes on."""
ROUND_REQUEST = 200.0
"""Wait for a cluster's request in blocking rounds, in addition to what it states."""
ROUND_REQUEST_UNKNOWN = 300.0
"""The same, for a cluster that has not stated anything yet."""
ROUND_REDUCE_MOST = 3600.0
"""Longest wait for the average of a round; an all-reduce that makes no progress ends earlier."""
FINAL_ANSWER = 360.0
"""Shortest limit of the wait for a cluster's copy in the final round."""
FINAL_MOST = 7200.0
"""Longest duration of a final round, with all its attempts."""
RETURN_MARGIN = 90.0
"""Wait of the final round for a lost cluster, in addition to the time for which that cluster itself
waits for its lost node. Nodes that wait for the final round have no limit of their own."""
FINAL_CHECKPOINT = 60.0
"""Longest wait of a cluster for the checkpoint of the final average to reach all its nodes."""

# Port of a provider at its router

PORT_SEARCH = 3
"""Time in which routers answer a search; UPnP wants whole seconds."""
PORT_ANSWER = 5.0
"""Longest wait for a router's answer."""
PORT_RENEWAL = 600.0
"""Time after which the mapping of a port is renewed; a router that was restarted forgets it."""
PORT_LEASE = 3600.0
"""Time after which a router ends a mapping that is not renewed."""

# Relays

RELAY_HEAD = 10.0
"""Time for a request to arrive completely at a relay after its connection was accepted."""
RELAY_ACCEPT = 4.0
"""Time for a node to accept an incoming circuit."""
RELAY_PING = 3.0
"""Interval between two pings of a relay on a control connection."""
RELAY_SILENCE = 9.0
"""Silence after which either side of a control connection calls it dead."""
RELAY_DIAL = 4.0
"""Longest wait of a node for a TCP connection to a relay."""
RELAY_ANSWER = 5.0
"""Longest wait of a node for a relay's answer."""
RELAY_FIRST_PAUSE = 0.25
"""First pause of a node before it registers again; pauses double."""
RELAY_LONGEST_PAUSE = 5.0
"""Longest pause of a node before it registers again, without the jitter."""
RELAY_IDLE = 120.0
"""Time without a byte after which a relay closes a circuit."""
RELAY_HALF_CLOSED = 30.0
"""The same, once one side has ended its direction of the circuit."""
RELAY_START = 30.0
"""Time in which the process of a relay starts on a slow machine."""

# Tests of links, before a job starts

LINK_TEST_DIAL = 12.0
"""Longest wait of a provider for the connection to another one that it tests."""
LINK_TEST_RATE = 5.0
"""Longest measurement of the rate in one direction."""
LINK_TEST = 40.0
"""Time after which the server gives a test up."""
LINK_FAILURE_KEPT = 600.0
"""Time for which providers that could not connect are no neighbours, unless they join again."""
LINK_FIGURES_KEPT = 6 * 3600.0
"""Time for which measured figures are used."""

# Nodes that `ravnest launch --restart` starts again

NODE_FIRST_PAUSE = 0.25
"""First pause before a node that failed is started again; pauses double."""
NODE_LONGEST_PAUSE = 10.0
"""Longest of these pauses, without the jitter."""
NODE_SETTLED = 360.0
"""Time after which a node that was started again counts as running: pauses and limits start anew."""

# Ends

LINK_CLOSE = 5.0
"""Longest wait for a thread or a link of a node when the node closes."""
RECORDS_CLOSE = 5.0
"""Longest wait for the last records of a worker to be written to its pipe."""
LOG_CLOSE = 5.0
"""Longest wait for the last records of a run to be written to its log, or handled by callbacks."""
WORKER_STOP = 10.0
"""Time for a worker to close its links before it is killed."""
OUTPUT_CLOSE = 2.0
"""Longest wait for the rest of the output of an ended process."""
ENDING_GRACE = 10.0
"""Time for the nodes of a failed cluster to end and to report why."""
LEAVE_ANSWER = 5.0
"""Longest wait for the server's answer when a provider leaves."""
HANDOVER = 30.0
"""Longest wait of a provider that leaves for another one to fetch its files."""
LAST_UPLOAD = 120.0
"""Longest upload of the last checkpoint of a provider that leaves, if no other node has it."""
RELAY_STOP = 3.0
"""Time for the process of a relay to close its connections before it is killed."""
SERVER_STOP = 5.0
"""Time for the server to answer the requests in progress when it stops."""


def longest_pause(pause: float) -> float:
    """Return ``pause`` with the largest jitter."""
    return pause * (1 + JITTER)


@dataclass(frozen=True)
class Relation:
    """Two durations of which the first must be shorter, and why."""

    shorter: float
    longer: float
    why: str

    @property
    def holds(self) -> bool:
        """Return whether the first duration is shorter."""
        return self.shorter < self.longer


RELATIONS = (
    Relation(3 * (POLL_WAIT + POLL_GAP), LOST_AFTER, "two polls that get lost do not lose the provider"),
    Relation(
        POLL_WAIT + POLL_ANSWER + longest_pause(FIRST_PAUSE) + HTTP_CONNECT,
        LOST_AFTER,
        "after a poll whose answer is lost, the next one arrives before the provider is called lost",
    ),
    Relation(
        HTTP_CONNECT + POLL_ANSWER + longest_pause(LONGEST_PAUSE) + HTTP_CONNECT,
        RESTART_GRACE,
        "a provider that waited for a restarted server returns before it is called lost",
    ),
    Relation(LOST_AFTER, RESTART_GRACE, "a restart of the server only gives more time"),
    Relation(POLL_GAP, POLL_WAIT, "a provider polls most of the time"),
    Relation(
        RECORD_PAUSE + ROOT_REPORT_INTERVAL + PAGE_PAUSE,
        PAGE_DELAY,
        "a loss waits in the pipe, at the agent and at the server, and is on the page within a second",
    ),
    Relation(ROOT_REPORT_INTERVAL, REPORT_INTERVAL, "Roots report more often than other nodes"),
    Relation(3 * REPORT_INTERVAL, LOST_AFTER, "reports arrive often enough to show progress"),
    Relation(
        LINK_OUTAGE + HTTP_CONNECT + longest_pause(LONGEST_PAUSE) + HTTP_CONNECT,
        TRAINING_SILENCE,
        "a provider whose network was away for as long as links wait returns before it is called lost",
    ),
    Relation(LOST_AFTER, TRAINING_SILENCE, "a provider that trains gets more time"),
    Relation(TRAINING_SILENCE, WITNESSED_LIMIT, "progress of the neighbours gives more time"),
    Relation(
        POLL_GAP + longest_pause(FIRST_PAUSE),
        REJOIN_SILENCE,
        "a provider that is there has sent its next request before its neighbours' word counts",
    ),
    Relation(REJOIN_SILENCE, LOST_AFTER, "the word of the neighbours only shortens the wait"),
    Relation(
        LINK_GONE + REPORT_INTERVAL + REJOIN_SILENCE,
        10.0,
        "the place of a provider that was killed is vacant in time for training to go on in 10 s",
    ),
    Relation(TIMER_LATE, LOST_AFTER, "a halt of the server is noticed before it costs a provider"),
    Relation(POLL_WAIT, LONGEST_HELD_REQUEST, "the server holds a poll as long as asked"),
    Relation(JOB_POLL, LONGEST_HELD_REQUEST, "the server holds a requester's poll as long as asked"),
    Relation(TRACE_ANSWER, LONGEST_HELD_REQUEST, "the server holds the wait for a trace"),
    Relation(2 * PLANNING, ESTIMATE, "a requester waits for both plans of an estimate"),
    Relation(DATABASE_BUSY, HTTP_ANSWER, "the server answers that its database is busy in time"),
    Relation(DIAL_BACK_EACH, DIAL_BACK, "an address that does not answer does not hold up the reply"),
    Relation(DIAL_BACK, HTTP_ANSWER, "a provider waits for the result of its check"),
    Relation(DIAL_BACK_GAP, DIAL_BACK, "a provider that repeats its offer can be checked again"),
    Relation(
        HTTP_CONNECT + DIAL_BACK + RELAY_MEASURE + HTTP_CONNECT,
        LOST_AFTER,
        "a provider that is checked again sends its offer before it is called lost",
    ),
    Relation(LOST_AFTER, FETCH_GRACE, "a provider that is gone is lost, not late"),
    Relation(
        LOST_AFTER + WORKER_START,
        NEIGHBOUR_CONNECT,
        "when all have fetched, every worker listens before its neighbours give up",
    ),
    Relation(
        LINK_OUTAGE + FETCH_GRACE + WORKER_START,
        MEMBER_RETURN,
        "survivors wait until a lost node is noticed, and another machine has its files and listens",
    ),
    Relation(
        TRAINING_SILENCE + FETCH_GRACE + WORKER_START,
        MEMBER_RETURN,
        "the same if nobody but the server notices the loss",
    ),
    Relation(POLL_WAIT, CHECKPOINT_UPLOAD, "a poll brings the order to upload a checkpoint in time"),
    Relation(UPLOAD_SENT, CHECKPOINT_UPLOAD, "a checkpoint is uploaded before the next one is due"),
    Relation(
        REJOIN_SILENCE, REPLAN_AFTER, "a spare gets the place of a lost provider before a plan is made"
    ),
    Relation(
        REPLAN_AFTER + RESCUE_GRACE,
        REQUEUE_AFTER,
        "a plan with the remaining providers is tried before they are given back",
    ),
    Relation(
        TRAINING_SILENCE + REQUEUE_AFTER + RESCUE_GRACE,
        MEMBER_RETURN,
        "the nodes that remain have uploaded their checkpoints before they give up",
    ),
    Relation(IMPROVEMENT_CHECK, IMPROVEMENT_PAUSE, "looking is cheap, planning is not"),
    Relation(SPOT_CHECKS, SPOT_CHECK_ANSWER, "a provider with a slow network has time to answer"),
    Relation(SPOT_CHECK_SECONDS, SPOT_CHECKS, "the server keeps up with the checks of a stage"),
    Relation(
        IMPROVEMENT_PAUSE,
        CHECKPOINT_UPLOAD,
        "providers that come one after the other do not wait for long to be considered",
    ),
    Relation(NEIGHBOUR_CONNECT, TRAINING_STALL, "a run does not stall because it still connects"),
    Relation(NODE_RETURN, MEMBER_RETURN, "with a server, another machine may have to be found first"),
    Relation(NEIGHBOUR_CONNECT, NODE_RETURN, "a lost node has more time than one that starts"),
    Relation(ROOTS_RETURN, NEIGHBOUR_CONNECT, "a cluster that continues does not wait for ended ones"),
    Relation(LINK_OUTAGE, BLOCK_WRITTEN, "a checkpoint on its way outlasts an outage of its link"),
    Relation(BLOCK_WRITTEN, REPLICA_SENT, "a replica outlasts the wait for one of its blocks"),
    Relation(REPLICA_SENT, REPLICA_MOST, "the next checkpoint waits for replicas on busy links"),
    Relation(WITNESSED_LIMIT, RESULT_WAIT, "a finished training gets more time than a running one"),
    Relation(RESTART_GRACE, RESULT_WAIT, "a finished training outlasts a restart of the server"),
    Relation(LINK_OUTAGE + LINK_HELLO, ROUND_REACH, "a member of a ring is dialled for a whole outage"),
    Relation(ROUND_REACH, RING_STALL, "a member that cannot be dialled is named before the ring stalls"),
    Relation(
        ROUND_OUTAGES * (LINK_OUTAGE + LINK_HELLO),
        min(RING_STALL, ROUND_ANSWER, ROUND_REQUEST),
        "a round outlasts outages of links that the links themselves outlast",
    ),
    Relation(ROUND_ANSWER, ROUND_ANSWER_MOST, "a measured time lengthens the wait for a copy"),
    Relation(ROUND_REQUEST, ROUND_REQUEST_UNKNOWN, "a cluster that is new gets more time"),
    Relation(ROUND_ANSWER_MOST, FINAL_ANSWER, "the final round waits longer than a round of training"),
    Relation(
        LINK_OUTAGE + LINK_HELLO + ROOTS_RETURN,
        RETURN_MARGIN,
        "the final round waits for a cluster that returns at the last moment, if its nodes have noticed "
        "the loss as late as possible",
    ),
    Relation(LAST_CHECKPOINT, FINAL_CHECKPOINT, "nobody leaves before the last checkpoint is stored"),
    Relation(FINAL_CHECKPOINT, TRAINING_STALL, "a checkpoint that is not stored does not end a run"),
    Relation(RING_STALL, ROUND_REDUCE_MOST, "a stalled ring reports before the coordinator gives it up"),
    Relation(RING_STALL, TRAINING_STALL, "a round that stalls ends before the run does"),
    Relation(
        FINAL_ANSWER + ROUND_REDUCE_MOST,
        FINAL_MOST,
        "the longest attempt of the final round fits into it",
    ),
    Relation(3 * LINK_HEARTBEAT, LINK_HELLO, "a connection that is silent for long is dead"),
    Relation(LINK_GONE, LINK_OUTAGE, "a peer whose process has ended is lost early"),
    Relation(
        LINK_DIRECT_FIRST + LINK_NEAREST_FIRST,
        LINK_HELLO,
        "a relay has time to answer after the direct addresses",
    ),
    Relation(LINK_HELLO, LINK_DIRECT_RETRY, "one attempt to leave a relay ends before the next"),
    Relation(LINK_DIRECT_RETRY, LINK_DIRECT_RETRY_MOST, "a relay that is needed is left in peace"),
    Relation(2 * LINK_HELLO, LINK_OUTAGE, "a link can dial several times before it gives up"),
    Relation(LINK_OUTAGE, TRAINING_STALL, "a run does not stall because a link connects again"),
    Relation(3 * PORT_RENEWAL, PORT_LEASE, "two renewals that fail do not end the mapping of a port"),
    Relation(PORT_SEARCH, PORT_ANSWER, "a router has more time to answer than to be found"),
    Relation(PORT_ANSWER, WORKER_STOP, "a provider leaves its router faster than its worker stops"),
    Relation(2 * RELAY_PING, RELAY_SILENCE, "a ping that gets lost does not end a registration"),
    Relation(RELAY_ACCEPT, LINK_HELLO, "who dials through a relay learns in time that nobody accepts"),
    Relation(
        RELAY_SILENCE + RELAY_DIAL + RELAY_ANSWER + longest_pause(RELAY_LONGEST_PAUSE) + LINK_HELLO,
        LINK_OUTAGE,
        "a node whose control connection died is reached through the relay again within an outage",
    ),
    Relation(RELAY_FIRST_PAUSE, RELAY_LONGEST_PAUSE, "pauses grow"),
    Relation(RELAY_ACCEPT, RELAY_HEAD, "a relay keeps the connection of a late answer"),
    Relation(3 * LINK_HEARTBEAT, RELAY_HALF_CLOSED, "a circuit in use is not idle"),
    Relation(RELAY_HALF_CLOSED, RELAY_IDLE, "a circuit of which half has ended is closed earlier"),
    Relation(LINK_OUTAGE, RELAY_IDLE, "a circuit outlasts an outage of the network under it"),
    Relation(
        LINK_TEST_DIAL + 2 * LINK_TEST_RATE + HTTP_CONNECT + POLL_GAP,
        LINK_TEST,
        "a test of a slow link is over before the server gives it up",
    ),
    Relation(LINK_HELLO, LINK_TEST_DIAL, "a test tries a relay if no address answers"),
    Relation(LINK_TEST, LINK_FAILURE_KEPT, "a pair that fails is not tested all the time"),
    Relation(LINK_FAILURE_KEPT, LINK_FIGURES_KEPT, "failures pass sooner than figures change"),
    Relation(NODE_FIRST_PAUSE, LINK_GONE, "a node is started again before its neighbours call it gone"),
    Relation(
        longest_pause(NODE_LONGEST_PAUSE) + WORKER_START,
        NEIGHBOUR_CONNECT,
        "neighbours wait for a node that is started again",
    ),
    Relation(
        NEIGHBOUR_CONNECT, NODE_SETTLED, "a node that only waits for its neighbours does not settle"
    ),
    Relation(LINK_CLOSE, WORKER_STOP, "a worker closes its links before it is killed"),
    Relation(RECORDS_CLOSE, WORKER_STOP, "a worker writes its last records before it is killed"),
    Relation(LOG_CLOSE, WORKER_STOP, "a node ends its log before its launcher kills it"),
    Relation(OUTPUT_CLOSE, WORKER_STOP, "the reason of a failure is read before the worker is given up"),
    Relation(ENDING_GRACE, LOST_AFTER, "nodes of a failed cluster report before they can be lost"),
    Relation(LAST_CHECKPOINT, HANDOVER, "a last checkpoint takes less time than finding a spare"),
    Relation(LEAVE_ANSWER, LAST_UPLOAD, "the server can acknowledge the last checkpoint"),
    Relation(LEAVE_ANSWER, HANDOVER, "a provider without a spare leaves faster than one with a spare"),
    Relation(LEAVE_ANSWER, WORKER_STOP, "a provider leaves faster than its worker stops"),
    Relation(RELAY_STOP, SERVER_STOP, "a server does not stop later because of its relay"),
    Relation(
        longest_pause(RELAY_FIRST_PAUSE) + RELAY_START,
        LINK_OUTAGE,
        "a relay that was killed is back before its links give up",
    ),
    Relation(SERVER_STOP, LOST_AFTER, "a server that stops and starts again loses no provider"),
)
"""All relations; a value that breaks one cannot be imported."""

for _relation in RELATIONS:
    assert _relation.holds, (
        f"{_relation.shorter} s must be less than {_relation.longer} s: {_relation.why}"
    )
