// One provider: what it offers, what it does now, and what it did.
import { html } from "./html.js";
import { bandwidth, compute, count, day, gigabytes, milliseconds, moment, plural } from "./format.js";
import { Ago, Empty, Reason, State, useStore, useTitle } from "./parts.js";
import { Events, Missing } from "./job.js";
import { useLatest } from "./latest.js";
import { call } from "./store.js";

export function Provider({ id }) {
  const { row, status } = useStore(({ providers, status }) => ({ row: providers.get(id), status }));
  const { name, updates } = useStore(({ providers, jobs }) => { const job = jobs.get(providers.get(id)?.job); return { name: job?.name, updates: job?.updates }; });
  const { data, error, again } = useLatest(() => call("GET", `/providers/${id}`), `${row?.changed}|${row?.state}|${status}`, 1000);
  useTitle(row?.name ?? "Provider");
  if (!data) return html`<${Missing} title=${row?.name ?? "Provider"} error=${error} again=${again} what="the provider" />`;
  const part = data.parts.find((each) => row && each.job === row.job && each.phase !== "lost" && each.phase !== "failed");
  return html`<nav class="crumbs" aria-label="Path"><a href="#/">Overview</a> <span aria-hidden="true">/</span> ${row?.name ?? id}</nav>
    <header class="head"><h1>${row?.name ?? id}</h1>${row ? html`<${State} state=${row.state} />` : html`<span class="state lost">gone</span>`}</header>
    <p class="quiet"><code>${id}</code>${row && html` · since <${Ago} time=${row.changed} />`}${row?.silent ? html` · <span class="bad">silent, seen <${Ago} time=${row.silent} /></span>` : null}</p>
    ${row ? html`<${Reason} text=${row.reason} />
    <dl class="tiles">
      <div><dt>Memory</dt><dd><b>${gigabytes(row.ram)}</b></dd><dd class="quiet">Offered for training</dd></div>
      <div><dt>Compute</dt><dd><b>${compute(row.compute)}</b></dd><dd class="quiet">${row.cores} ${row.cores === 1 ? "core" : "cores"}</dd></div>
      <div><dt>Bandwidth</dt><dd><b>${bandwidth(row.bandwidth)}</b></dd><dd class="quiet">${milliseconds(row.delay)} to the server and back</dd></div>
      <div><dt>Record</dt><dd><b>${count(data.finished)}</b> finished</dd><dd class="quiet">${count(data.failed)} failed, ${count(data.lost)} lost</dd></div>
    </dl>
    <dl class="settings wide">
      <div><dt>reached</dt><dd><span class=${`reach ${row.reach}`}>${row.reach}</span> <span class="quiet">${row.reach_reason}</span></dd></div>
      <div><dt>sandbox</dt><dd>${row.sandbox ?? "not said"}</dd></div>
      <div><dt>versions</dt><dd>ravnest ${row.version}, torch ${row.torch}</dd></div>
    </dl>` : html`<p class="notice warn">This provider left some time ago.</p>`}
    <section aria-labelledby="part"><h2 id="part">Current part</h2>
      ${part ? html`<p><b>${part.role}</b> node_${part.node} of cluster ${part.cluster} in <a href=${`#/jobs/${part.job}`}>${name ?? part.job_name}</a>: ${part.phase}${part.phase === "training" && updates ? `, ${plural(updates, "update")} so far` : ""}</p>` : html`<p class="quiet">It works for no job that you may see.</p>`}
    </section>
    <div class="columns">
      <section aria-labelledby="parts"><h2 id="parts">History</h2>
        ${data.parts.length === 0 ? html`<${Empty} title="No work yet"><p>Parts of jobs appear here.</p><//>` : html`<div class="scroll" role="region" aria-label="History" tabIndex="0"><table class="grid compact">
          <thead><tr><th scope="col">Submitted</th><th scope="col">Job</th><th scope="col">Part</th><th scope="col">Outcome</th></tr></thead>
          <tbody>${data.parts.map((each) => html`<tr><td class="date" title=${moment(each.submitted)}>${day(each.submitted)}</td><th scope="row"><a href=${`#/jobs/${each.job}`}>${each.job_name}</a></th><td>${each.role} node_${each.node}, cluster ${each.cluster}</td><td><span class=${each.phase === "finished" ? "good" : each.phase === "failed" || each.phase === "lost" ? "bad" : ""}>${each.phase}</span>${each.cause ? html` <span class="quiet">(${each.cause})</span>` : null}<${Reason} text=${each.reason} /></td></tr>`)}</tbody>
        </table></div>`}
      </section>
      <section aria-labelledby="events"><h2 id="events">Events</h2><${Events} events=${data.events} /></section>
    </div>`;
}
