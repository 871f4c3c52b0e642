// One job: pipelines, curves, rounds, events, plan and what can be done with it.
import { html, pure, useMemo, useState } from "./html.js";
import { bytes, capital, clock, count, duration, figure, foldedEvents, milliseconds, moment, percent, plural } from "./format.js";
import { Ago, Bar, Confirm, Copy, Empty, Loading, Problem, Reason, State, useSecond, useStore, useTitle } from "./parts.js";
import { Curves } from "./curves.js";
import { Silence } from "./overview.js";
import { Topology } from "./topology.js";
import { useLatest } from "./latest.js";
import { call, now, store } from "./store.js";

const PAUSE = 900;
const LIT = 2; // seconds for which the rings stay lit after a round
const FINAL = new Set(["done", "failed", "cancelled"]);
const SHOWN = 25;

export function Job({ id, theme }) {
  const { card, me, status } = useStore(({ jobs, me, status }) => ({ card: jobs.get(id), me, status }));
  const { data, error, again } = useLatest(() => call("GET", `/jobs/${id}`), `${card?.changed}|${card?.state}|${status}`, PAUSE);
  useTitle(card ? `${card.name}${card.total && !FINAL.has(card.state) ? ` ${percent(card.updates / card.total)}` : ` ${card.state}`}` : "Job");
  if (!data) return html`<${Missing} title=${card?.name ?? "Job"} error=${error} again=${again} what="the job" />`;
  const job = card ?? cardOf(data.view);
  const isNew = job.state === "submitted" && !job.updates;
  const isOwn = me.role === "admin" || (me.role === "requester" && job.owner === me.id);
  const mayCancel = !FINAL.has(job.state) && isOwn;
  const resubmit = async () => { location.hash = `#/jobs/${(await call("POST", `/jobs/${id}/resubmit`, {})).id}`; };
  return html`<nav class="crumbs" aria-label="Path"><a href="#/">Overview</a> <span aria-hidden="true">/</span> ${job.name}</nav>
    <header class="head"><h1>${job.name}</h1><${State} state=${job.state} />
      <span class="actions">${mayCancel && html`<${Confirm} label="Cancel job" question="Stop this training?" sure="Yes, cancel" act=${() => call("POST", `/jobs/${id}/cancel`)} />`}
      ${isOwn && html`<${Confirm} label="Resubmit like this" question="Submit a new job with the same model, data and settings?" sure="Yes, submit" act=${resubmit} />`}</span>
    </header>
    <p class="quiet"><code>${id}</code> · submitted ${moment(data.view.created)} · last report <${Ago} time=${job.changed} /></p>
    ${error && html`<p class="notice warn" role="status">What you see is old: ${error}</p>`}
    <${Silence} job=${job} />
    ${isNew ? html`<div class="notice"><b>Waiting.</b><${Reason} text=${job.reason} /></div>` : html`<div class="status"><${Reason} text=${job.reason} /><${ScheduleLine} schedule=${data.view.progress.schedule} /></div>`}
    ${data.view.degraded && html`<p class="notice warn">${data.view.degraded}</p>`}
    ${!isNew && html`<${Figures} job=${job} detail=${data} />`}
    <section aria-labelledby="pipelines"><h2 id="pipelines">Pipelines</h2>
      ${data.nodes.length ? html`<${LitTopology} detail=${data} job=${job} /><${Legend} hasRings=${data.rings.length > 0} />` : html`<${Empty} title="No pipelines yet"><p>${job.state === "submitted" ? "The job waits until there is a plan for it." : "The job ended before it was shipped."}</p><//>`}
    </section>
    ${!isNew && html`<section aria-labelledby="curves"><h2 id="curves">Curves</h2>
      ${job.updates ? html`<${Curves} job=${job} marks=${data.marks} theme=${theme} />` : html`<${Empty} title="No losses"><p>${FINAL.has(job.state) ? "The job ended before its first update." : "Curves begin with the first update."}</p><//>`}
    </section>`}
    <div class="columns">
      <section aria-labelledby="events"><h2 id="events">Events</h2><${Events} events=${data.events} /></section>
      <div>
        <${Rounds} rounds=${data.rounds} clusters=${data.view.clusters.length} />
        ${isOwn && html`<${Commands} id=${id} job=${job} detail=${data} />`}
      </div>
    </div>
    <div class="columns">
      <section aria-labelledby="plan"><h2 id="plan">Plan</h2>${data.view.plan ? html`<pre class="plan" tabIndex="0">${data.view.plan}</pre>` : html`<p class="quiet">There is no plan yet.</p>`}</section>
      <section aria-labelledby="settings"><h2 id="settings">Settings</h2><${Settings} settings=${data.settings} /></section>
    </div>`;
}

// A view whose data is not there: it is loading, or it cannot be loaded.
export function Missing({ title, error, again, what }) {
  return html`<nav class="crumbs" aria-label="Path"><a href="#/">Overview</a> <span aria-hidden="true">/</span> ${title}</nav>
    <h1>${title}</h1>${error ? html`<${Problem} error=${error} again=${again} />` : html`<${Loading} what=${what} />`}`;
}

// A job that is too old for the overview.
function cardOf(view) {
  const { progress } = view;
  return { ...view, ...progress, total: progress.total_updates, rate: progress.samples_per_second, left: progress.seconds_left };
}

function Figures({ job, detail }) {
  const share = job.total ? job.updates / job.total : 0;
  const saved = detail.view.saved_update, held = detail.view.checkpoint?.update;
  const newest = saved == null ? held : Math.max(saved, held ?? 0);
  return html`<dl class="tiles">
    <div><dt>Progress</dt><dd><b>${job.total ? percent(share) : count(job.updates)}</b> ${job.total ? `${count(job.updates)} of ${count(job.total)} updates` : "updates"}</dd><dd>${job.total ? html`<${Bar} share=${share} label="updates done" />` : null}</dd><dd class="quiet">${job.epochs ? `Epoch ${job.epoch} of ${job.epochs}` : "Evaluation without training"}${job.left == null ? "" : ` · ${duration(job.left)} left`}</dd></div>
    <div><dt>Loss</dt><dd><b>${job.diverged ? html`<span class="bad">diverged</span>` : figure(job.loss)}</b></dd><dd class="quiet">${job.metric ? `Validation ${job.metric} ${figure(job.validation)}` : "No validation yet"}</dd></div>
    <div><dt>Throughput</dt><dd><b>${figure(job.rate)}</b> samples/s</dd><dd class="quiet">${detail.view.clusters.length > 1 ? `${detail.view.clusters.length} clusters together` : "Mean since the start"} · staleness ${job.staleness}</dd></div>
    <div><dt>Checkpoint</dt><dd>${newest == null ? html`<b>–</b>` : html`<b>${count(newest)}</b> updates are safe`}</dd><dd class="quiet">${safety(newest, saved)}${job.recoveries ? ` · ${plural(job.recoveries, "recovery", "recoveries")}` : ""}</dd></div>
  </dl>`;
}

// Says where the newest checkpoint is; `saved` is the newest one at the server.
function safety(newest, saved) {
  if (newest == null) return "None yet";
  if (saved === newest) return "At the server";
  return saved == null ? "On all stages, not yet at the server" : `On all stages; the server has ${count(saved)}`;
}

function ScheduleLine({ schedule }) {
  if (!schedule) return null;
  return html`<p class="quiet">Schedule ${schedule.schedule}, ${plural(schedule.microbatches, "micro-batch", "micro-batches")} per batch: ${schedule.reason}</p>`;
}

function LitTopology({ detail, job }) {
  useSecond();
  const last = detail.rounds[0];
  const isLit = !FINAL.has(job.state) && (detail.nodes.some((each) => each.averaging || each.worker_phase === "average") || (last && now() - last.time < LIT));
  return html`<${Topology} detail=${detail} isAveraging=${Boolean(isLit)} />`;
}

const Legend = pure(({ hasRings }) => {
  return html`<p class="legend"><span><i class="swatch memory"></i> Memory used, of what is offered</span><span><i class="tick peak"></i> Its peak</span><span><i class="tick needed"></i> What the plan needs</span>
    <span><i class="swatch computing"></i> Share of time in which the stage computes; else it waits</span><span><i class="swatch sending"></i> Share in which its busier link sends</span>${hasRings && html`<span><i class="swatch ring"></i> Averaging ring, bright during a round</span>`}<span>Rates and delays of links were tested before the start</span></p>`;
});

const Settings = pure(({ settings }) => html`<dl class="settings">${settings.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`);

const Rounds = pure(({ rounds, clusters }) => {
  if (clusters < 2 && !rounds.length) return null;
  return html`<section aria-labelledby="rounds"><h2 id="rounds">Averaging rounds</h2>
    ${rounds.length === 0 ? html`<p class="quiet">No round so far.</p>` : html`<div class="scroll" role="region" aria-label="Averaging rounds" tabIndex="0"><table class="grid compact">
      <thead><tr><th scope="col" class="n">Round</th><th scope="col">When</th><th scope="col">Clusters</th><th scope="col" class="n">Took</th><th scope="col" class="n wide">Sent</th><th scope="col">Outcome</th></tr></thead>
      <tbody>${rounds.slice(0, 12).map((each) => html`<tr key=${each.time}><th scope="row" class="n">${each.round}</th><td>${clock(each.time)}</td><td>${each.clusters.join(", ") || "–"}</td><td class="n">${milliseconds(each.seconds)}</td><td class="n wide">${bytes(each.sent_bytes)}</td><td>${each.committed ? html`<span class="good">averaged</span>` : html`<span class="bad">given up</span>`}${each.reason ? html`<div class="quiet">${each.reason}</div>` : null}</td></tr>`)}</tbody>
    </table></div>`}
  </section>`;
});

export const Events = pure((props) => html`<${EventList} ...${props} />`);

function EventList({ events }) {
  const [all, setAll] = useState(false);
  const found = useMemo(() => foldedEvents(events), [events]);
  // Names do not change while a provider is known; new ones come with new events.
  const providers = store.providers;
  const shown = all ? found : found.slice(0, SHOWN);
  if (!found.length) return html`<p class="quiet">No events so far.</p>`;
  return html`<ol class="events">${shown.map((each) => html`<li key=${each.sequence} class=${each.kind}>
      <time dateTime=${new Date(1000 * each.time).toISOString()} title=${moment(each.time)}>${clock(each.time)}</time>
      <div><span class="kind">${eventTitle(each, providers)}</span>${each.times > 1 && html` <span class="times" title=${`since ${moment(each.since)}`}>×${each.times}</span>`}<${Reason} text=${each.reason} /></div>
    </li>`)}</ol>
    ${found.length > SHOWN && html`<button type="button" class="link" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${found.length}`}</button>`}`;
}

// Returns who an event is about, and what changed.
function eventTitle({ kind, subject, before, after, times }, providers) {
  const change = before && before !== after ? `${before} → ${after}` : before ? "" : after;
  const who = kind !== "provider" ? capital(kind) : times > 1 ? "Providers" : providers.get(subject)?.name ?? "Provider";
  return change ? `${who}: ${change}` : who;
}

function Commands({ id, job, detail }) {
  const server = `--server ${location.origin}`;
  const isFinal = FINAL.has(job.state);
  return html`<section aria-labelledby="commands"><h2 id="commands">Commands</h2>
    ${!isFinal && html`<p>Watch it in a terminal, and download the model at the end:</p>`}
    ${job.state === "done" && html`<p>Download the trained model:</p>`}
    ${(!isFinal || job.state === "done") && html`<${Copy} label="command to fetch the model" text=${`ravnest fetch ${id} ${server}`} />`}
    ${detail.view.best && html`<p>Download the best model so far, of epoch ${detail.view.best.epoch} (${detail.view.best.metric} ${figure(detail.view.best.value)}):</p><${Copy} label="command to fetch the best model" text=${`ravnest fetch ${id} --best ${server}`} />`}
    ${detail.view.saved_update != null && job.state !== "done" && html`<p>Download the model as it was after update ${count(detail.view.saved_update)}:</p><${Copy} label="command to fetch the model of the last checkpoint" text=${`ravnest fetch ${id} --partial ${server}`} />`}
    ${job.updates > 0 && html`<p>See what each stage and link did when, in Perfetto:</p><${Copy} label="command to write a trace" text=${`ravnest trace ${id} ${server}`} />`}
    ${isFinal && html`<p>Submit it again with the same model, data and settings${detail.view.saved_update == null ? "; this needs a checkpoint, and the server has none of this job" : `, from update ${count(detail.view.saved_update)}`}:</p>
      <${Copy} label="command to submit it again" text=${`ravnest submit --resume ${id} ${server}`} />`}
    <p>Submit another job like this, with other settings and no upload:</p>
    <${Copy} label="command to submit a job like this" text=${`ravnest submit --like ${id} --set epochs=${job.epochs || 1} ${server}`} />
  </section>`;
}
