"""Tables of the server's database, and the upgrades from earlier layouts."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

VERSION = 9
"""Version of this layout; the server refuses a database of a later one."""
UPGRADES: dict[int, tuple[str, ...]] = {
    1: ("ALTER TABLE assignments ADD COLUMN strangers TEXT NOT NULL DEFAULT '{}'",),
    2: (
        "ALTER TABLE assignments RENAME COLUMN strangers TO tls_rejections",
        "ALTER TABLE assignments ADD COLUMN records INTEGER NOT NULL DEFAULT 0",
        "INSERT INTO records SELECT assignments.id, 'validation', json_each.key, 0.0, json_object("
        "'number', json_each.key, 'epoch', 0, 'name', 'accuracy', 'value', json_each.value, "
        "'samples', 0, 'kind', 'validation') FROM assignments, json_each(assignments.figures)",
        "ALTER TABLE assignments DROP COLUMN figures",
        "UPDATE assignments SET body = json_set(json_remove(body, '$.node_file'), '$.node_spec', "
        "json_remove(json_extract(body, '$.node_file'), '$.format', '$.version'))",
        "ALTER TABLE losses RENAME COLUMN position TO update_number",
        "ALTER TABLE losses ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE losses ADD COLUMN microbatches INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE losses ADD COLUMN staleness INTEGER NOT NULL DEFAULT 0",
        "UPDATE jobs SET spec = json_remove(json_set(spec, '$.on_insufficient', "
        "json_extract(spec, '$.if_short')), '$.if_short')",
    ),
    3: ("ALTER TABLE providers ADD COLUMN checks TEXT NOT NULL DEFAULT '[]'",),
    4: (
        "ALTER TABLE assignments ADD COLUMN generation INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE assignments ADD COLUMN cause VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE assignments ADD COLUMN phase_before VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE assignments ADD COLUMN refills INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE assignments ADD COLUMN checkpoint INTEGER NOT NULL DEFAULT 0",
    ),
    5: (
        "ALTER TABLE jobs ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN replans INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN resumed INTEGER NOT NULL DEFAULT -1",
        "ALTER TABLE assignments ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0",
    ),
    6: ("ALTER TABLE losses ADD COLUMN learning_rate FLOAT",),
    7: (
        "ALTER TABLE assignments ADD COLUMN used_memory INTEGER",
        "ALTER TABLE assignments ADD COLUMN peak_memory INTEGER",
    ),
    8: ("ALTER TABLE losses ADD COLUMN time FLOAT",),
}
"""Statements that turn each earlier layout into the next one; tables that are missing exist by then."""

metadata = MetaData()

tokens = Table(
    "tokens",
    metadata,
    Column("hash", String, primary_key=True),
    Column("role", String, nullable=False),
    Column("uses_left", Integer),  # NULL: unlimited
    Column("created", Float, nullable=False),
    Column("expires", Float),
)

credentials = Table(
    "credentials",
    metadata,
    Column("hash", String, primary_key=True),
    Column("member", String, nullable=False, unique=True),
    Column("role", String, nullable=False),
    Column("name", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("owner", ForeignKey("credentials.member"), nullable=False, index=True),
    Column("spec", Text, nullable=False),
    Column("epochs", Integer, nullable=False),
    Column("min_providers", Integer, nullable=False),
    Column("max_providers", Integer),
    Column("state", String, nullable=False, index=True),
    Column("reason", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Column("plan", Text, nullable=False, default=""),
    Column("passed_over", Integer, nullable=False, default=0),
    Column("result", Text),
    Column("attempt", Integer, nullable=False, server_default="0"),  # plans that were given up
    Column("replans", Integer, nullable=False, server_default="0"),  # since `resumed`
    Column("resumed", Integer, nullable=False, server_default="-1"),  # updates at the last new plan
)

providers = Table(
    "providers",
    metadata,
    Column("id", ForeignKey("credentials.member"), primary_key=True),
    Column("offer", Text, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("job", ForeignKey("jobs.id")),
    Column("changed", Float, nullable=False),
    Column("left", Boolean, nullable=False, default=False),
    Column("checks", Text, nullable=False, server_default="[]"),  # of its addresses, by dialling back
)

provider_rates = Table(
    "provider_rates",
    metadata,
    Column("provider", ForeignKey("providers.id"), primary_key=True),
    Column("rate", Float, nullable=False),  # GFLOP/s, as its work in a job has shown
    Column("job", String, nullable=False),
    Column("time", Float, nullable=False),
)

assignments = Table(
    "assignments",
    metadata,
    Column("id", String, primary_key=True),
    Column("job", ForeignKey("jobs.id"), nullable=False, index=True),
    Column("provider", ForeignKey("providers.id"), nullable=False, index=True),
    Column("node", Integer, nullable=False),
    Column("cluster", Integer, nullable=False),
    Column("role", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("phase", String, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("records", Integer, nullable=False, server_default="0"),  # received, with forgotten ones
    Column("losses", Integer, nullable=False, default=0),  # rows in `losses`
    Column("result", Text),
    Column("tls_rejections", Text, nullable=False, server_default="{}"),
    Column("generation", Integer, nullable=False, server_default="0"),  # of the node
    Column("cause", String, nullable=False, server_default=""),  # of a failure or a loss
    Column("phase_before", String, nullable=False, server_default=""),  # it was lost
    Column("refills", Integer, nullable=False, server_default="0"),  # of the place since `checkpoint`
    Column("checkpoint", Integer, nullable=False, server_default="0"),  # when it got the place
    Column("attempt", Integer, nullable=False, server_default="0"),  # plans of the job before
    Column("used_memory", Integer),  # bytes that its worker takes, newest figure; NULL: not known
    Column("peak_memory", Integer),  # largest figure
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("job", ForeignKey("jobs.id"), primary_key=True),
    Column("plan", String, primary_key=True),
    Column("run", String, primary_key=True),
    Column("taken", String, primary_key=True),  # attempt of the run
    Column("update_number", Integer, primary_key=True),
    Column("phase", Integer, primary_key=True),
    Column("cluster", Integer, primary_key=True),
    Column("stage", Integer, primary_key=True),
    Column("stages", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),  # plans of the job before
    Column("time", Float, nullable=False),
    Column("tensors", String, nullable=False),  # sha256
    Column("tensors_size", Integer, nullable=False),
    Column("manifest", String, nullable=False),  # sha256
    Column("manifest_size", Integer, nullable=False),
    sqlite_with_rowid=False,
)

best_models = Table(
    "best_models",
    metadata,
    Column("job", ForeignKey("jobs.id"), primary_key=True),
    Column("cluster", Integer, primary_key=True),
    Column("body", Text, nullable=False),
    sqlite_with_rowid=False,
)

links = Table(
    "links",
    metadata,
    Column("one", ForeignKey("providers.id"), primary_key=True),  # the lower id
    Column("other", ForeignKey("providers.id"), primary_key=True),
    Column("addresses", Text, nullable=False),  # of both, when it was measured
    Column("time", Float, nullable=False),
    Column("failure", Text, nullable=False),  # empty: they could connect
    Column("route", String, nullable=False),
    Column("forward", Float, nullable=False),  # Mbit/s from one to other
    Column("back", Float, nullable=False),
    Column("round_trip", Float, nullable=False),
    sqlite_with_rowid=False,
)

losses = Table(
    "losses",
    metadata,
    Column("assignment", ForeignKey("assignments.id"), primary_key=True),
    Column("update_number", Integer, primary_key=True),
    Column("value", Float),  # NULL: infinite, or not a number
    Column("epoch", Integer, nullable=False, server_default="0"),
    Column("microbatches", Integer, nullable=False, server_default="0"),
    Column("staleness", Integer, nullable=False, server_default="0"),
    Column("learning_rate", Float),  # NULL: not known
    Column("time", Float),  # of arrival; NULL: not known
    sqlite_with_rowid=False,
)

records = Table(
    "records",
    metadata,
    Column("assignment", ForeignKey("assignments.id"), primary_key=True),
    Column("kind", String, primary_key=True),
    Column("position", Integer, primary_key=True),  # among all records of the assignment
    Column("time", Float, nullable=False),
    Column("body", Text, nullable=False),
    sqlite_with_rowid=False,
)

stage_times = Table(
    "stage_times",
    metadata,
    Column("job", ForeignKey("jobs.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True),  # plans of the job before
    Column("cluster", Integer, primary_key=True),
    Column("stage", Integer, primary_key=True),
    Column("provider", ForeignKey("providers.id"), nullable=False),
    Column("since", Float, nullable=False),
    Column("baseline", Float, nullable=False),  # 0: not known yet, as all times of this table
    Column("recent", Float, nullable=False),
    Column("recent_least", Float, nullable=False),
    Column("link_baseline", Float, nullable=False),
    Column("link_recent_least", Float, nullable=False),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("time", Float, nullable=False),
    Column("kind", String, nullable=False),
    Column("subject", String, nullable=False),
    Column("job", String),  # the job that a provider's event is about
    Column("before", String, nullable=False),
    Column("after", String, nullable=False),
    Column("reason", Text, nullable=False),
    Index("events_of_job", "job", "sequence"),
    Index("events_of_subject", "subject", "sequence"),
    Index("events_of_kind", "kind", "sequence"),
    sqlite_autoincrement=True,
)

removals = Table(
    "removals",
    metadata,
    Column("kind", String, primary_key=True),  # of the rows that were removed
    Column("subject", String, primary_key=True),
    Column("count", Integer, nullable=False),
    Column("last", Integer, nullable=False),  # highest sequence of events
    Column("time", Float, nullable=False),
    sqlite_with_rowid=False,
)

artifact_grants = Table(
    "artifacts",
    metadata,
    # A member that uploaded the artifact, or an assignment that needs it.
    Column("owner", String, primary_key=True),
    Column("sha256", String, primary_key=True),
    Column("size", Integer, nullable=False),
    sqlite_with_rowid=False,
)
