// All jobs and providers.
import { html, pure, useMemo, useState } from "./html.js";
import { bandwidth, compute, count, duration, figure, gigabytes, percent, plural } from "./format.js";
import { Ago, Bar, Copy, Empty, Reason, Sparkline, State, useSecond, useStore, useTitle } from "./parts.js";
import { now } from "./store.js";

const FINAL = new Set(["done", "failed", "cancelled"]);
const SHOWN_ENDED = 6;
const PAGE_ROWS = 50;
const SILENT_JOB = 45;

export function Overview() {
  const { jobs, providers, me, removed } = useStore(({ jobs, providers, me, removed }) => ({ jobs, providers, me, removed }));
  useTitle("");
  const names = useNames(jobs);
  const active = [], waiting = [], ended = [];
  for (const job of jobs.values()) (FINAL.has(job.state) ? ended : job.state === "submitted" ? waiting : active).push(job);
  const maySeeJobs = me.role !== "provider" && me.role !== "relay";
  return html`<h1 class="hidden">Overview</h1>
    <${Capacity} jobs=${active.length} waiting=${waiting.length} providers=${providers} />
    ${maySeeJobs && html`<section aria-labelledby="jobs">
      <h2 id="jobs">Jobs</h2>
      ${jobs.size === 0 && html`<${Empty} title="No jobs yet">
        <p>Submit one from the machine that has the model and the data:</p>
        <${Copy} label="command to submit a job" text=${`ravnest submit job:job --server ${location.origin} --token TOKEN`} />
      <//>`}
      <div class="cards">${active.map((job) => html`<${JobCard} key=${job.id} job=${job} />`)}</div>
      ${waiting.length > 0 && html`<h3>Waiting</h3><ul class="rows">${waiting.map((job) => html`<${WaitingJob} key=${job.id} job=${job} />`)}</ul>`}
      ${ended.length > 0 && html`<${Ended} jobs=${ended} />`}
      ${removed && html`<p class="quiet">${plural(removed.count, "older job")} ${removed.count === 1 ? "was" : "were"} removed; the last ended <${Ago} time=${removed.time} />.</p>`}
    </section>`}
    <${Providers} providers=${providers} names=${names} />`;
}

// Returns the names of the jobs by id; the same object while they are the same.
function useNames(jobs) {
  const key = JSON.stringify([...jobs.values()].map((job) => [job.id, job.name]));
  return useMemo(() => new Map(JSON.parse(key)), [key]);
}

const Capacity = pure((props) => html`<${CapacityTiles} ...${props} />`);

function CapacityTiles({ jobs, waiting, providers }) {
  const { usedMemory } = useStore(({ usedMemory }) => ({ usedMemory }));
  const total = useMemo(() => totals(providers), [providers]);
  return html`<dl class="tiles">
    <div><dt>Jobs</dt><dd><b>${count(jobs)}</b> running</dd><dd class="quiet">${waiting ? `${plural(waiting, "job")} waiting` : "None waits"}</dd></div>
    <div><dt>Providers</dt><dd><b>${count(total.busy)}</b> ${total.here ? `of ${count(total.here)} busy` : "here"}</dd><dd class="quiet">${total.here ? `${count(total.here - total.busy)} idle` : "None has joined"}${total.lost > 0 ? `, ${count(total.lost)} lost` : ""}</dd></div>
    <${InUse} what="Memory" used=${total.busyRam} all=${total.ram} words=${gigabytes} measured=${usedMemory / 1e9} />
    <${InUse} what="Compute" used=${total.busyCompute} all=${total.compute} words=${compute} />
  </dl>`;
}

// `measured` is what is used in fact, where that is known.
function InUse({ what, used, all, words, measured }) {
  if (!all) return html`<div><dt>${what} reserved</dt><dd><b>–</b></dd><dd class="quiet">Nothing is offered</dd></div>`;
  return html`<div><dt>${what} reserved</dt><dd><b>${percent(used / all)}</b> of ${words(all)}</dd><dd><${Bar} share=${used / all} mark=${measured ? measured / all : null} label=${`share of the offered ${what.toLowerCase()} that is reserved`} /></dd>
    <dd class="quiet">${measured ? html`<i class="tick used"></i> ${words(measured)} in use` : `${words(used)} for jobs`}</dd></div>`;
}

function totals(providers) {
  const found = { here: 0, busy: 0, lost: 0, ram: 0, busyRam: 0, compute: 0, busyCompute: 0 };
  for (const each of providers.values()) {
    if (each.state === "lost") {
      found.lost += 1;
      continue;
    }
    found.here += 1;
    found.ram += each.ram;
    found.compute += each.compute;
    if (each.state !== "offered") {
      found.busy += 1;
      found.busyRam += each.ram;
      found.busyCompute += each.compute;
    }
  }
  return found;
}

const JobCard = pure(({ job }) => {
  const share = job.total ? job.updates / job.total : job.epochs ? Math.max(0, job.epoch - 1) / job.epochs : 0;
  return html`<article class="card">
    <header><h3><a href=${`#/jobs/${job.id}`}>${job.name}</a></h3><${State} state=${job.state} /></header>
    <${Sparkline} curve=${job.curve} width=${300} height=${56} />
    <div class="progress"><${Bar} share=${share} label=${`${percent(share)} trained`} /><span>${percent(share)}</span></div>
    <dl class="figures">
      <div><dt>Loss</dt><dd>${job.diverged ? html`<span class="bad">diverged</span>` : figure(job.loss)}</dd></div>
      <div><dt>${job.metric ? `Val. ${job.metric}` : "Validation"}</dt><dd>${figure(job.validation)}</dd></div>
      <div><dt>Samples/s</dt><dd>${figure(job.rate)}</dd></div>
      <div><dt>Left</dt><dd>${job.left == null ? "–" : duration(job.left)}</dd></div>
    </dl>
    <p class="quiet">Update ${count(job.updates)}${job.total ? ` of ${count(job.total)}` : ""} · epoch ${job.epoch} of ${job.epochs} · ${plural(job.nodes, "node")} in ${plural(job.clusters, "cluster")}${job.recoveries ? ` · ${plural(job.recoveries, "recovery", "recoveries")}` : ""}</p>
    ${job.state !== "training" || job.reason !== "all nodes are training" ? html`<${Reason} text=${job.reason} />` : null}
    <${Silence} job=${job} />
  </article>`;
});

export function Silence({ job }) {
  useSecond();
  const seconds = now() - job.changed;
  if (job.state !== "training" || seconds < SILENT_JOB) return null;
  return html`<p class="notice warn">No report for ${duration(seconds)}. The figures may be old.</p>`;
}

const WaitingJob = pure(({ job }) => html`<li>
  <div class="line"><a href=${`#/jobs/${job.id}`}><b>${job.name}</b></a><${State} state=${job.state} /><span class="quiet">submitted <${Ago} time=${job.created} /></span></div>
  <${Reason} text=${job.reason} />
</li>`);

function Ended({ jobs }) {
  const [all, setAll] = useState(false);
  const shown = all ? jobs : jobs.slice(0, SHOWN_ENDED);
  return html`<h3>Ended</h3>
    <ul class="rows">${shown.map((job) => html`<${EndedJob} key=${job.id} job=${job} />`)}</ul>
    ${jobs.length > SHOWN_ENDED && html`<button type="button" class="link" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${count(jobs.length)}`}</button>`}`;
}

const EndedJob = pure(({ job }) => html`<li>
  <div class="line">
    <a href=${`#/jobs/${job.id}`}><b>${job.name}</b></a><${State} state=${job.state} />
    <span class="quiet">${job.updates ? plural(job.updates, "update") : "before the first update"}${job.loss == null ? "" : ` · loss ${figure(job.loss)}`}${job.validation == null ? "" : ` · ${job.metric} ${figure(job.validation)}`} · <${Ago} time=${job.changed} /></span>
  </div>
  ${job.state !== "done" || job.degraded ? html`<${Reason} text=${job.degraded || job.reason} />` : null}
</li>`);

const ORDER = { training: 0, reserved: 1, offered: 2, lost: 3 };

const Providers = pure((props) => html`<${ProviderTable} ...${props} />`);

function ProviderTable({ providers, names }) {
  const [words, setWords] = useState("");
  const [page, setPage] = useState(0);
  const rows = useMemo(() => {
    const wanted = words.trim().toLowerCase();
    const found = [...providers.values()].filter((each) => !wanted || `${each.name} ${each.state} ${each.reach}`.toLowerCase().includes(wanted));
    return found.sort((a, b) => ORDER[a.state] - ORDER[b.state] || (a.name < b.name ? -1 : 1));
  }, [providers, words]);
  const pages = Math.ceil(rows.length / PAGE_ROWS);
  const first = Math.max(0, Math.min(page, pages - 1)) * PAGE_ROWS;
  const shown = rows.slice(first, first + PAGE_ROWS);
  return html`<section aria-labelledby="providers">
    <div class="heading"><h2 id="providers">Providers</h2>
      ${providers.size > 8 && html`<label class="search"><span class="hidden">Find a provider</span><input type="search" placeholder="Find by name or state" value=${words} onInput=${(event) => { setWords(event.target.value); setPage(0); }} /></label>`}
    </div>
    ${providers.size === 0 ? html`<${Empty} title="No providers yet">
      <p>A machine joins with one command. <a href="#/join">How to get a token</a></p>
      <${Copy} label="command to join as a provider" text=${`ravnest provide --server ${location.origin} --token TOKEN`} />
    <//>` : html`<div class="scroll" role="region" aria-label="Providers" tabIndex="0"><table class="grid stacked providers">
      <thead><tr><th scope="col">Name</th><th scope="col">State</th><th scope="col">Work</th><th scope="col" class="n">Memory</th><th scope="col" class="n">Cores</th><th scope="col" class="n">Compute</th><th scope="col" class="n">Bandwidth</th><th scope="col">Reached</th><th scope="col">Delivered</th></tr></thead>
      <tbody>${shown.map((each) => html`<${ProviderRow} key=${each.id} provider=${each} job=${each.job ? names.get(each.job) ?? each.job : ""} />`)}</tbody>
    </table></div>`}
    ${rows.length === 0 && providers.size > 0 && html`<p class="quiet">No provider matches “${words}”.</p>`}
    ${pages > 1 && html`<nav class="pages" aria-label="Pages of providers">
      <button type="button" class="small" disabled=${first === 0} onClick=${() => setPage(first / PAGE_ROWS - 1)}>Previous</button>
      <span role="status">${count(first + 1)}–${count(first + shown.length)} of ${count(rows.length)}</span>
      <button type="button" class="small" disabled=${first + PAGE_ROWS >= rows.length} onClick=${() => setPage(first / PAGE_ROWS + 1)}>Next</button>
    </nav>`}
  </section>`;
}

const ProviderRow = pure(({ provider, job }) => html`<tr class=${provider.state === "lost" || provider.silent ? "stale" : ""}>
  <th scope="row"><a href=${`#/providers/${provider.id}`}>${provider.name}</a></th>
  <td><${State} state=${provider.state} />${provider.silent && provider.state !== "lost" ? html`<div class="quiet">silent, seen <${Ago} time=${provider.silent} /></div>` : null}</td>
  <td class="work">${job ? html`<a href=${`#/jobs/${provider.job}`}>${job}</a>` : html`<span class="quiet">${provider.state === "lost" ? "–" : provider.state === "offered" ? "none" : "for another requester"}</span>`}</td>
  <td class="n">${gigabytes(provider.ram)}</td>
  <td class="n">${provider.cores}<span class="narrow"> ${provider.cores === 1 ? "core" : "cores"}</span></td>
  <td class="n">${compute(provider.compute)}</td>
  <td class="n">${bandwidth(provider.bandwidth)}</td>
  <td><span class=${`reach ${provider.reach}`} title=${provider.reach_reason}>${provider.reach}</span></td>
  <td><${Delivered} provider=${provider} /></td>
</tr>`);

// Parts of jobs that a provider has done, and how far the job is that it works for.
function Delivered({ provider }) {
  const { updates } = useStore(({ jobs }) => ({ updates: provider.state === "training" ? jobs.get(provider.job)?.updates : 0 }));
  if (!provider.finished && !provider.failed && !updates) return html`<span class="quiet">–</span>`;
  const parts = [provider.finished && `${count(provider.finished)} done`, provider.failed && html`<span class="bad">${count(provider.failed)} failed</span>`, updates && plural(updates, "update")].filter(Boolean);
  return parts.map((each, index) => html`${index ? ", " : ""}${each}`);
}
