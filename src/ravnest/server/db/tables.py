"""The tables of the server's database."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

VERSION = 2
"""Of this layout; a later one is refused."""
UPGRADES = {1: "ALTER TABLE assignments ADD COLUMN strangers TEXT NOT NULL DEFAULT '{}'"}
"""What makes the next layout of an earlier one."""

metadata = MetaData()

tokens = Table(
    "tokens",
    metadata,
    Column("hash", String, primary_key=True),
    Column("role", String, nullable=False),
    Column("uses_left", Integer),  # NULL: as often as wanted
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
    Column("figures", Text, nullable=False, default="[]"),
    Column("losses", Integer, nullable=False, default=0),
    Column("result", Text),
    Column("strangers", Text, nullable=False, server_default="{}"),
)

losses = Table(
    "losses",
    metadata,
    Column("assignment", ForeignKey("assignments.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("value", Float),  # NULL: infinite, or no number
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("time", Float, nullable=False),
    Column("kind", String, nullable=False),
    Column("subject", String, nullable=False),
    Column("job", String),  # of a provider's event: the job that it is about
    Column("before", String, nullable=False),
    Column("after", String, nullable=False),
    Column("reason", Text, nullable=False),
    Index("events_of_job", "job", "sequence"),
    sqlite_autoincrement=True,
)

artifacts = Table(
    "artifacts",
    metadata,
    # A member who sent it, a job that has it as its result, or an assignment that needs it.
    Column("owner", String, primary_key=True),
    Column("sha256", String, primary_key=True),
    Column("size", Integer, nullable=False),
    sqlite_with_rowid=False,
)
