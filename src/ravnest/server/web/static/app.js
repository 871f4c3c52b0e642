// The page: header, connection, and the view that the address names.
import { html, render, useEffect, useState } from "./html.js";
import { clock, sentence } from "./format.js";
import { Join } from "./join.js";
import { Job } from "./job.js";
import { Overview } from "./overview.js";
import { Provider } from "./provider.js";
import { Loading, useSecond, useStore } from "./parts.js";
import { call, start, store } from "./store.js";

const THEMES = { system: "light", light: "dark", dark: "system" };

function viewOf(hash) {
  const [, kind, id] = hash.replace(/^#/, "").split("/");
  return { kind: kind || "overview", id: id ? decodeURIComponent(id) : "" };
}

function App() {
  const { status, me } = useStore(({ status, me, problem, version }) => ({ status, me, problem, version }));
  const [view, setView] = useState(viewOf(location.hash));
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "system");
  useEffect(() => {
    const moved = () => {
      setView(viewOf(location.hash));
      scrollTo(0, 0);
      document.getElementById("main")?.focus({ preventScroll: true });
    };
    addEventListener("hashchange", moved);
    setView(viewOf(location.hash)); // it may have changed since the first drawing
    return () => removeEventListener("hashchange", moved);
  }, []);
  const isDark = useDark();
  const choose = () => {
    const next = THEMES[theme];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    localStorage.setItem("ravnest-theme", next);
    setTheme(next);
  };
  if (status === "ended") return html`<${Ended} />`;
  const isOld = status === "down" || status === "stale";
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="#/"><img src="/static/icon.svg" alt="" width="26" height="26" /> <span>Ravnest</span></a>
      <nav aria-label="Main"><a href="#/" aria-current=${view.kind === "overview" ? "page" : null}>Overview</a><a href="#/join" aria-current=${view.kind === "join" ? "page" : null}>Join</a></nav>
      <${Connection} />
      <button type="button" class="tool" onClick=${choose} aria-label=${`Theme: ${theme}`} title=${`Theme: ${theme}`}>${theme === "dark" ? "☾" : theme === "light" ? "☀" : "◐"}</button>
      ${me && html`<${Who} me=${me} />`}
    </header>
    ${isOld && html`<div class="notice bad wide" role="alert"><b>Disconnected.</b> ${sentence(store.problem || "the server is silent")} The page connects again by itself; ${store.me ? `what you see is from ${clock(store.heardAt / 1000)}` : "there is nothing to show yet"}.</div>`}
    <main id="main" tabIndex="-1" class=${isOld ? "old" : ""} aria-busy=${status === "loading"}>${me ? html`<${View} view=${view} theme=${`${theme}${isDark}`} />` : html`<${Skeleton} />`}</main>
    <footer>Ravnest ${store.version} · times are local · <a href="#/join">join</a></footer>`;
}

function View({ view, theme }) {
  if (view.kind === "overview") return html`<${Overview} />`;
  if (view.kind === "jobs") return html`<${Job} key=${view.id} id=${view.id} theme=${theme} />`;
  if (view.kind === "providers") return html`<${Provider} key=${view.id} id=${view.id} />`;
  if (view.kind === "join") return html`<${Join} />`;
  return html`<h1>Not found</h1><p>There is no such view. <a href="#/">Overview</a></p>`;
}

function Connection() {
  useSecond();
  const words = { loading: "Connecting", live: "Live", stale: "Silent", down: "Reconnecting" }[store.status];
  return html`<span class=${`connection ${store.status}`} role="status"><i aria-hidden="true"></i><span>${words}</span></span>`;
}

function Who({ me }) {
  const leave = async () => {
    await call("POST", "/logout");
    location.reload();
  };
  const name = me.name === me.role || me.name === "browser" ? "" : ` ${me.name}`;
  return html`<span class="who"><span>${me.role.charAt(0).toUpperCase()}${me.role.slice(1)}${name} · </span><button type="button" class="link" onClick=${leave}>Log out</button></span>`;
}

function Skeleton() {
  return html`<${Loading} what="the state of the server" /><div class="tiles skeleton" aria-hidden="true">${[1, 2, 3, 4].map(() => html`<div></div>`)}</div><div class="cards skeleton" aria-hidden="true">${[1, 2, 3].map(() => html`<article class="card"></article>`)}</div>`;
}

function Ended() {
  return html`<main class="door"><h1>Ravnest</h1><p class="notice bad" role="alert">You are logged out: ${store.problem}.</p><p>Open a new login link, which this command prints on the server's machine:</p><p class="command"><code>ravnest token create --role viewer</code></p></main>`;
}

function useDark() {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [isDark, setDark] = useState(query.matches);
  useEffect(() => {
    const changed = () => setDark(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return isDark;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
start();
