// How to join, and for admins the tokens and members.
import { html, useState } from "./html.js";
import { moment } from "./format.js";
import { Confirm, Copy, Loading, Problem, useStore, useTitle } from "./parts.js";
import { useLatest } from "./latest.js";
import { call } from "./store.js";

const SHOWN = 12;
const ROLES = {
  provider: "lends a machine",
  requester: "submits jobs, sees and cancels its own",
  viewer: "sees everything on this page",
  relay: "passes on traffic of machines behind NAT",
};

function commandOf(role, token) {
  const server = `--server ${location.origin} --token ${token}`;
  if (role === "viewer") return `${location.origin}/login?token=${token}`;
  return { provider: `ravnest provide ${server} --ram 4`, requester: `ravnest submit job:job ${server}`, relay: `ravnest relay ${server}` }[role];
}

export function Join() {
  const { me } = useStore(({ me }) => ({ me }));
  useTitle("Join");
  return html`<h1>Join</h1>
    <div class="columns">
      <section aria-labelledby="lend"><h2 id="lend">Lend a machine</h2>
        <p>Install Ravnest on it, then run this there. It measures itself, offers what you allow, and works in a sandbox. Ctrl-C takes it back at any time.</p>
        <${Copy} label="command for a provider" text=${commandOf("provider", "TOKEN")} />
      </section>
      <section aria-labelledby="train"><h2 id="train">Train a model</h2>
        <p>Run this where the model and the data are. <code>job:job</code> is a function <code>job</code> in <code>job.py</code> that returns a <code>ravnest.Job</code>.</p>
        <${Copy} label="command for a requester" text=${commandOf("requester", "TOKEN")} />
      </section>
    </div>
    ${me.role === "admin" ? html`<${Tokens} />` : html`<p class="notice">Tokens come from the admin of this server. On the server's machine:</p>
      <${Copy} label="command to create a token" text="ravnest token create --role provider" />`}`;
}

function Tokens() {
  const { status } = useStore(({ status }) => ({ status }));
  const [changes, setChanges] = useState(0);
  const { data, error, again } = useLatest(() => call("GET", "/members"), `${changes}|${status}`, 0);
  const changed = () => setChanges((n) => n + 1);
  if (!data) return error ? html`<${Problem} error=${error} again=${again} />` : html`<${Loading} what="tokens and members" />`;
  return html`<${NewToken} onMade=${changed} />
    <section aria-labelledby="tokens"><h2 id="tokens">Tokens</h2>
      ${data.tokens.length === 0 ? html`<p class="quiet">There is no token that could be used.</p>` : html`<div class="scroll" role="region" aria-label="Tokens" tabIndex="0"><table class="grid compact stacked">
        <thead><tr><th scope="col">Role</th><th scope="col">Uses left</th><th scope="col">Expires</th><th scope="col">Fingerprint</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
        <tbody>${data.tokens.map((each) => html`<tr key=${each.id}><th scope="row">${each.role}</th><td data-label="uses left">${each.uses_left ?? "any number"}</td><td data-label="expires">${each.expires ? moment(each.expires) : "never"}</td><td data-label="fingerprint"><code>${each.id.slice(0, 10)}</code></td>
          <td class="n"><${Confirm} quiet=${true} label="Revoke" question="Nobody can join with it any more." sure="Revoke" act=${async () => { await call("DELETE", `/tokens/${each.id}`); changed(); }} /></td></tr>`)}</tbody>
      </table></div>`}
    </section>
    <${Members} members=${data.members} onChange=${changed} />`;
}

function Members({ members, onChange }) {
  const [all, setAll] = useState(false);
  const newest = members.slice().reverse().sort((a, b) => Number(b.active) - Number(a.active));
  const shown = all ? newest : newest.slice(0, SHOWN);
  return html`<section aria-labelledby="members"><h2 id="members">Members</h2>
      <div class="scroll" role="region" aria-label="Members" tabIndex="0"><table class="grid compact stacked">
        <thead><tr><th scope="col">Name</th><th scope="col">Role</th><th scope="col">Joined</th><th scope="col">Until</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
        <tbody>${shown.map((each) => html`<tr key=${each.id} class=${each.active ? "" : "stale"}><th scope="row">${each.name}<div class="quiet"><code>${each.id}</code></div></th><td>${each.role}</td><td data-label="joined">${moment(each.created)}</td><td data-label="until">${!each.active ? "ended" : each.expires ? moment(each.expires) : "–"}</td>
          <td class="n">${each.active && each.id !== "admin" ? html`<${Confirm} quiet=${true} label="Revoke" question="End its access now?" sure="Revoke" act=${async () => { await call("DELETE", `/members/${each.id}`); onChange(); }} />` : null}</td></tr>`)}</tbody>
      </table></div>
      ${newest.length > SHOWN && html`<button type="button" class="link" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${newest.length}`}</button>`}
    </section>`;
}

function NewToken({ onMade }) {
  const [role, setRole] = useState("provider");
  const [uses, setUses] = useState("1");
  const [hours, setHours] = useState("24");
  const [made, setMade] = useState(null);
  const [problem, setProblem] = useState("");
  const create = async () => {
    setProblem("");
    try {
      const { token } = await call("POST", "/tokens", { role, uses: uses === "" ? null : Number(uses), hours: Number(hours) });
      setMade({ role, token });
      onMade();
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<section aria-labelledby="new"><h2 id="new">New token</h2>
    <div class="form">
      <label>Role <select value=${role} onChange=${(event) => setRole(event.target.value)}>${Object.keys(ROLES).map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      <label>Uses <input type="number" min="1" placeholder="any number" value=${uses} onInput=${(event) => setUses(event.target.value)} /></label>
      <label>Hours <input type="number" min="1" value=${hours} onInput=${(event) => setHours(event.target.value)} /></label>
      <button type="button" class="primary" onClick=${create}>Create token</button>
    </div>
    <p class="quiet">A ${role} ${ROLES[role]}.</p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${made && html`<div class="notice good" role="status"><p>This ${made.role === "viewer" ? "link" : "command"} is shown once:</p><${Copy} label="command with the new token" text=${commandOf(made.role, made.token)} /></div>`}
  </section>`;
}
