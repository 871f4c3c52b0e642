"""Settings of a server, apart from its address."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ravnest import deadlines
from ravnest.server.rate_limits import Rate


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the connections to the server. Strangers: connections without a valid credential yet."""

    strangers: int = 1024
    """Connections of strangers; the oldest is closed for a new one."""
    strangers_per_address: int = 256
    """The same, of each address."""
    per_member: int = 64
    """Connections of each member."""
    pages: int = 256
    """Browser pages that watch the server at the same time."""
    pages_per_address: int = 32
    """The same, of each address."""
    header_seconds: float = 10.0
    """Time for the header of a request, and for a TLS handshake."""
    linger_seconds: float = 5.0
    """Time for which the rest of a request is read that was answered before its end."""
    unread_bytes: int = 1 << 20
    """Bytes of it that are read: a client sees the answer only if it can send what it has begun."""


@dataclass(frozen=True)
class PlanningLimits:
    """Limits of the process that reads models, plans jobs and writes stages."""

    memory: int = 3 << 30
    """Bytes that a model may take there; Linux only."""
    plan_seconds: float = deadlines.PLANNING
    """Time for one plan."""
    ship_seconds: float = 3600.0
    """Time to write the stages of a job."""


@dataclass(frozen=True)
class ServerSettings:
    """Limits of time (seconds) and size (bytes)."""

    lost_after: float = deadlines.LOST_AFTER
    """A provider without a heartbeat for this long is lost."""
    restart_grace: float = deadlines.RESTART_GRACE
    """The same, after a start of the server; at least ``lost_after``."""
    training_silence: float = deadlines.TRAINING_SILENCE
    """The same, while it trains with others, whose links to it wait for its return."""
    witnessed_limit: float = deadlines.WITNESSED_LIMIT
    """Longest silence of a provider while its neighbours report progress with it."""
    rejoin_silence: float = deadlines.REJOIN_SILENCE
    """Silence of a provider after which it is lost while its neighbours wait for it."""
    result_wait: float = deadlines.RESULT_WAIT
    """Longest wait for a lost provider that has trained to the end, until it sends its result."""
    fetch_grace: float = deadlines.FETCH_GRACE
    """Time to fetch an assignment, in addition to four times the time predicted from the bandwidth."""
    ending_grace: float = deadlines.ENDING_GRACE
    """Time for the nodes of a failed cluster to end and to report why."""
    checkpoint_upload: float = deadlines.CHECKPOINT_UPLOAD
    """Time between two checkpoints that a cluster uploads."""
    rescue_grace: float = deadlines.RESCUE_GRACE
    """Time for the nodes of a cluster that has lost a node to upload their checkpoints, in addition to
    four times the time predicted from the bandwidth."""
    replan_after: float = deadlines.REPLAN_AFTER
    """Time for a lost provider to return, or for a spare to come, before its job is planned anew."""
    requeue_after: float = deadlines.REQUEUE_AFTER
    """Time for which the other nodes wait in their places if no plan without the lost one exists."""
    improvement_check: float = deadlines.IMPROVEMENT_CHECK
    """Time between two looks at running jobs for which another plan may be faster."""
    improvement_pause: float = deadlines.IMPROVEMENT_PAUSE
    """Least time between two questions to the planner about one of them."""
    unfinished_jobs: int = 100
    """Jobs of one requester that may wait or run at the same time."""
    ended_jobs_resumable: int = 16
    """Number of ended jobs whose newest checkpoints are kept."""
    checkpoints_kept: float = 7 * 86400.0
    """Time for which the newest checkpoint of an ended job is kept."""
    unused_files_kept: float = 60.0
    """Least age of a file of a dropped checkpoint that is deleted before the next start."""
    spot_checks: float = deadlines.SPOT_CHECKS
    """Mean time between two outputs of a stage that are computed again; 0: none are."""
    spot_check_answer: float = deadlines.SPOT_CHECK_ANSWER
    """Least time in which a provider states what such an output was computed from."""
    spot_check_seconds: float = deadlines.SPOT_CHECK_SECONDS
    """Time that the computation may take."""
    link_test: float = deadlines.LINK_TEST
    """Time after which a test of a link between two providers is given up."""
    link_figures_kept: float = deadlines.LINK_FIGURES_KEPT
    """Time for which the measured figures of a link are used."""
    link_failure_kept: float = deadlines.LINK_FAILURE_KEPT
    """Time for which providers that could not connect do not become neighbours."""
    link_test_rounds: int = 3
    """Rounds of link tests before a job starts: a plan with other neighbours needs another one."""
    test_loopback_links: bool = False
    """Test links on which both providers are at loopback addresses, too."""
    shown_after_loss: float = 3600.0
    """Time for which lost providers are listed."""
    longest_wait: float = deadlines.LONGEST_HELD_REQUEST
    """Longest delay of a reply to a request that waits for a change."""
    largest_artifact: int = 256 << 30
    member_bytes: int = 512 << 30
    """Size of all files of one member, with the declared size of incomplete uploads."""
    member_files: int = 200_000
    """Number of these files."""
    files_kept: float = 30 * 86400.0
    """Age at which a file of a member is deleted, if no job needs it; the age of a result counts from
    its upload, that of other files from the last submission with them."""
    stored_bytes: int = 1 << 40
    """Size of all files; beyond it, files that no job needs are deleted earlier, the oldest first."""
    files_kept_at_least: float = 86400.0
    """Least age of a file that is deleted for this reason: its submission may follow."""
    clean_up_pause: float = 600.0
    """Time between two searches for files to delete."""
    kept_uploads: float = 7 * 86400.0
    """Age at which an incomplete upload is deleted."""
    disk_ballast: int = 16 << 20
    """Size of a file that is deleted when the disk is full, so that the database can be written."""
    disk_reserve: int = 256 << 20
    """Free disk space that uploads must leave."""
    largest_message: int = 4 << 20
    """Size limit of a request that is not an upload; most routes have a lower one."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    planning: PlanningLimits = field(default_factory=PlanningLimits)
    requests: Rate = Rate(burst=1000, per_second=100)  # noqa: RUF009 - immutable
    """Requests of one member; a provider sends some five per second at most."""
    strangers: Rate = Rate(burst=2000, per_second=50)  # noqa: RUF009 - immutable
    """Requests without a valid credential from one address."""
    probe_bytes: int = 16 << 20
    page_login: float = 30 * 86400.0
    """Lifetime of a browser login."""
    ended_jobs_kept: float = 90 * 86400.0
    """Time after its end for which a job is kept, with its records and events."""
    most_ended_jobs: int = 1000
    """Ended jobs of each requester that are kept, the newest ones."""
    events_kept: float = 90 * 86400.0
    """Age at which events are removed; those of jobs that have not ended stay."""
    most_events: int = 200_000
    """Newest events that are kept; those of jobs that have not ended stay, too."""
    kept_events: int = 10_000
    """Events kept of each kind that members and strangers can cause: they must not fill the disk."""

    @property
    def heartbeat_wait(self) -> float:
        """Longest delay of a heartbeat's reply: three of them fit into ``lost_after``."""
        return min(self.longest_wait, self.lost_after / 3)


@dataclass(frozen=True)
class Clock:
    """Wall clock and monotonic clock; tests pass their own."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970, for times that people read."""
    steady: Callable[[], float] = time.monotonic
    """Monotonic seconds, for deadlines."""
