"""Planning of a job for a list of providers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ravnest.errors import PlanError
from ravnest.plan.cost import ModelCosts
from ravnest.plan.explain import explain
from ravnest.plan.infeasible import Infeasible, lightest_stage
from ravnest.plan.links import LinkFigures
from ravnest.plan.loss_chunks import chunk_counts, with_loss_chunks
from ravnest.plan.memory import averaging_copies, size
from ravnest.plan.memory_steps import memory_steps
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ModelProfile
from ravnest.plan.row_cuts import least_bytes
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment, ProviderOffer
from ravnest.server.scheduling.data_shares import check_data, least_rows
from ravnest.server.scheduling.job_start import JobStart
from ravnest.server.scheduling.link_tests import NO_LINKS, ProviderLinks
from ravnest.types import Address

_TWO_VERSIONS = "schedule='async' keeps two versions of the weights and two batches: 'sync' needs less."
Candidates = Sequence[tuple[str, ProviderOffer]]
"""Ids and offers of providers, strongest first."""


@dataclass(frozen=True)
class PlannedJob:
    """A job with its plan and the providers of its nodes."""

    spec: JobSpec
    plan: Plan
    providers: tuple[str, ...]
    """Provider of each node, by the node's number."""
    explanation: str
    """The plan in words."""
    variant: int = 0
    """Position of the planned model among ``UnitModel.variants``: 0 if all tensors are whole."""
    offers: tuple[ProviderOffer, ...] = ()
    """Offers of ``providers``."""
    attempt: int = 0
    """Number of plans of the job before this one."""
    start: JobStart | None = None
    """Checkpoints to start from."""


class JobPlanner(Protocol):
    """Plans jobs and creates their assignments; both take seconds of CPU time."""

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks
    ) -> PlannedJob | Infeasible:
        """Plan a job for these providers with the measured figures of their links."""
        ...

    def ship(self, job: str, planned: PlannedJob) -> tuple[Assignment, ...]:
        """Write the stages as artifacts; return the assignment of each node, by number."""
        ...


def plan_variants(
    spec: JobSpec,
    profiles: Sequence[ModelProfile],
    providers: Candidates,
    links: ProviderLinks = NO_LINKS,
) -> PlannedJob | Infeasible:
    """Plan a job with the first of the profiles that has a plan.

    The first profile has whole tensors; the reason why there is no plan is that of this one.
    """
    whole, *others = profiles
    planned = plan_job(spec, whole, providers, links)
    offered = sum(offer.ram for _, offer in providers) * 1e9
    if isinstance(planned, PlannedJob) or offered < least_bytes(whole):
        return planned
    for variant, profile in enumerate(others, start=1):
        found = plan_job(spec, profile, providers, links)
        if isinstance(found, PlannedJob):
            return replace(found, variant=variant)
    return planned


def plan_reachable(
    plan: Callable[[Candidates], PlannedJob | Infeasible],
    chosen: Candidates,
    unreachable: Mapping[str, str],
    min_providers: int,
) -> PlannedJob | Infeasible:
    """Plan with the providers that others reach, or with one alone if it is large enough.

    ``unreachable`` has the names of the others, by id.
    """
    alone = [each for each in chosen if each[0] in unreachable]
    if not alone:
        return plan(chosen)
    together = tuple(each for each in chosen if each[0] not in unreachable)
    planned = plan(together) if together else Infeasible("no provider is left")
    if isinstance(planned, PlannedJob):
        return planned
    if min_providers <= 1:
        single = plan((max(alone, key=lambda each: each[1].ram),))
        if isinstance(single, PlannedJob):
            return single
        planned = planned if together else single
    names = ", ".join(unreachable[name] for name, _ in alone)
    return Infeasible(
        f"{planned.reason}. Others cannot reach {names}, which can therefore only train alone: "
        "`ravnest nodes` says why"
    )


def plan_job(
    spec: JobSpec, profile: ModelProfile, providers: Candidates, links: ProviderLinks = NO_LINKS
) -> PlannedJob | Infeasible:
    """Plan a job for providers; node ``i`` is the ``i``-th provider that the plan uses.

    The plan uses all providers if possible. Otherwise those with the least RAM are left out, down to
    ``min_providers``: a provider that is too small for any stage must not block the others. If pairs of
    providers cannot connect, those with the most such pairs are left out.
    Raise ``JobError`` if the row counts of the job's data are inconsistent.
    """
    check_data(spec)
    recompute = spec.training.recompute is not False
    smallest = with_loss_chunks(profile, chunk_counts(profile)[-1])
    costs = memory_steps(smallest, spec.training.schedule)[-1].costs(
        smallest, spec.training.update_frequency, recompute=recompute
    )
    least = max(spec.min_providers, spec.clusters or 1)
    chosen = _useful(costs, _with_own_address(providers), spec.clusters, least)
    infeasible: Infeasible | None = None
    while len(chosen) >= least:
        if infeasible and sum(offer.ram for _, offer in chosen) * 1e9 < costs.smallest_total:
            break
        figures = links.figures(chosen)
        plan = _plan(spec, profile, chosen, figures)
        if isinstance(plan, Plan):
            explanation = explain(plan, profile, _unit_names(profile))
            names, offers = zip(*chosen, strict=True)
            return PlannedJob(spec, plan, names, explanation, offers=offers)
        infeasible = infeasible or plan
        if plan.cut_off:
            chosen = _without_cut_off(chosen, figures)
        else:
            chosen = _without_smallest(chosen, max(len(chosen) // 8, 1))
    if infeasible is not None and spec.training.schedule == "async" and not infeasible.cut_off:
        return replace(infeasible, reason=f"{infeasible.reason} {_TWO_VERSIONS}")
    return infeasible or Infeasible(
        f"the model needs {size(costs.smallest_total)} to train at batch {costs.batch_size}, on at least"
        f" {least} providers with different addresses; {len(chosen)} such providers are idle"
    )


def _with_own_address(providers: Candidates) -> list[tuple[str, ProviderOffer]]:
    """Return the first provider of each address: two cannot listen on one address.

    Behind two routers, two providers can have the same private address, but not the same public one.
    """
    first: dict[frozenset[Address], tuple[str, ProviderOffer]] = {}
    for name, offer in providers:
        first.setdefault(frozenset(map(Address.parse, offer.all_addresses)), (name, offer))
    return list(first.values())


def _useful(
    costs: ModelCosts, providers: list[tuple[str, ProviderOffer]], clusters: int | None, least: int
) -> list[tuple[str, ProviderOffer]]:
    """Return the providers that can hold a stage, or all if they are too few: the reason names them."""
    need = lightest_stage(costs, len(providers), clusters)
    useful = [provider for provider in providers if provider[1].ram * 1e9 >= need]
    return useful if len(useful) >= least else providers


def _without_smallest(providers: Candidates, count: int) -> list[tuple[str, ProviderOffer]]:
    """Return the providers without the ``count`` ones with the least RAM; ties remove the last."""
    largest = sorted(range(len(providers)), key=lambda i: (-providers[i][1].ram, i))
    return [providers[i] for i in sorted(largest[: len(providers) - count])]


def _without_cut_off(providers: Candidates, figures: LinkFigures) -> list[tuple[str, ProviderOffer]]:
    """Return the providers without the one that cannot connect to most others; ties leave out the last.

    Of two providers that cannot connect to each other, the one with less RAM is left out.
    """
    failing = Counter(node for pair in figures.failing for node in pair)
    worst = max(range(len(providers)), key=lambda i: (failing[i], -providers[i][1].ram, i))
    return [provider for i, provider in enumerate(providers) if i != worst]


def _plan(
    spec: JobSpec, profile: ModelProfile, providers: Candidates, figures: LinkFigures
) -> Plan | Infeasible:
    nodes = [
        NodeConfig(number, Address.parse(offer.address), offer.ram, offer.bandwidth, offer.compute)
        for number, (_, offer) in enumerate(providers)
    ]
    training, most = spec.training, _most_clusters(spec)
    if spec.clusters is not None and spec.clusters > most:
        return Infeasible(
            f"clusters={spec.clusters} is too many: {spec.train.samples} samples are enough for {most}"
        )

    def planned(clusters: int | None) -> Plan | Infeasible:
        return make_plan(
            profile,
            nodes,
            clusters=clusters,
            seed=training.seed,
            update_frequency=training.update_frequency,
            averaging=averaging_copies(
                compressed=training.compression is not None,
                with_optimizer=training.average_optim,
                optimizer_factor=profile.optimizer_bytes_per_parameter_byte,
                ema=training.ema is not None,
            ),
            recompute=training.recompute is not False,
            schedule=training.schedule,
            source="",
            links=figures,
        )

    try:
        plan = planned(spec.clusters)
        too_many = isinstance(plan, Plan) and len(plan.clusters) > most
        return planned(most) if too_many else plan
    except PlanError as error:
        return Infeasible(str(error))


def _most_clusters(spec: JobSpec) -> int:
    """Return the largest number of clusters that all have a batch to train on."""
    return max(spec.train.samples // least_rows(spec), 1)


def _unit_names(profile: ModelProfile) -> list[str]:
    """Return a module name per unit: that of its first tensor, or the previous unit's name."""
    names = [""] * len(profile.units)
    for tensor in reversed(profile.state):
        names[tensor.units[0]] = tensor.name.rpartition(".")[0] or tensor.name
    current = next((name for name in names if name), "forward")
    for unit, name in enumerate(names):
        current = names[unit] = name or current
    return names
