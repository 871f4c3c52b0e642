// Small parts that several views use.
import { html, pure, useEffect, useRef, useState } from "./html.js";
import { ago, capital, folded, moment, sentence } from "./format.js";
import { now, store, subscribe } from "./store.js";

const LONG = 220;

// Returns what `select` takes from the store, and draws again when one of these values is another one.
export function useStore(select) {
  const [, draw] = useState(0);
  const drawn = useRef(null);
  drawn.current = { select, values: select(store) };
  useEffect(() => {
    const check = () => {
      const { select: chosen, values } = drawn.current;
      const next = chosen(store);
      if (Object.keys(next).some((name) => next[name] !== values[name])) draw((n) => n + 1);
    };
    check(); // it may have changed since the first drawing
    return subscribe(check);
  }, []);
  return drawn.current.values;
}

const tickers = new Set();
setInterval(() => tickers.forEach((each) => each()), 1000);

export function useSecond() {
  const [, draw] = useState(0);
  useEffect(() => {
    const tick = () => draw((n) => n + 1);
    tickers.add(tick);
    return () => tickers.delete(tick);
  }, []);
}

export function Ago({ time }) {
  useSecond();
  return html`<time dateTime=${new Date(1000 * time).toISOString()} title=${moment(time)}>${ago(now() - time)}</time>`;
}

const NAMES = { submitted: "Waiting", offered: "Idle" };

export function State({ state }) {
  return html`<span class=${`state ${state}`}><i aria-hidden="true"></i>${NAMES[state] ?? capital(state)}</span>`;
}

// Sets the title of the browser's tab.
export function useTitle(words) {
  useEffect(() => { document.title = words ? `${words} · Ravnest` : "Ravnest"; }, [words]);
}

export const Reason = pure(({ text }) => html`<${FoldedReason} key=${text} text=${text} />`);

function FoldedReason({ text }) {
  const [open, setOpen] = useState(false);
  if (!text) return null;
  const parts = folded(text);
  const isLong = text.length > LONG || parts.length > 3;
  const shown = open ? folded(text, true) : isLong ? cut(parts) : parts;
  return html`<div class="reason">
    ${shown.map((part) => html`<p>${capital(part.text)}${part.times > 1 && html` <span class="times" title="said ${part.times} times">×${part.times}</span>`}</p>`)}
    ${isLong && html`<button type="button" class="link" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Less" : "More"}</button>`}
  </div>`;
}

function cut(parts) {
  const [first, second] = parts;
  const short = (part) => ({ ...part, text: part.text.length > LONG ? `${part.text.slice(0, LONG)} …` : part.text });
  return second && first.text.length < LONG / 2 ? [first, second].map(short) : [short(first)];
}

export function Copy({ text, label }) {
  const [done, setDone] = useState("");
  const field = useRef(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setDone("Copied");
    } catch {
      getSelection().selectAllChildren(field.current);
      setDone("Selected");
    }
    setTimeout(() => setDone(""), 2000);
  };
  return html`<div class="command">
    <code ref=${field} tabIndex="0" aria-label=${label}>${text}</code>
    <button type="button" onClick=${copy} aria-label=${`Copy: ${label}`}>${done || "Copy"}</button>
    <span class="hidden" role="status">${done}</span>
  </div>`;
}

// Button that asks once more before it acts.
export function Confirm({ label, question, sure, act, quiet }) {
  const [asks, setAsks] = useState(false);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const yes = useRef(null);
  useEffect(() => { if (asks) yes.current?.focus(); }, [asks]);
  const go = async () => {
    setBusy(true);
    setProblem("");
    try {
      await act();
      setAsks(false);
    } catch (error) {
      setProblem(error.message);
    } finally {
      setBusy(false);
    }
  };
  if (!asks) return html`<button type="button" class=${quiet ? "small" : ""} onClick=${() => setAsks(true)}>${label}</button>`;
  return html`<span class="confirm" role="group" aria-label=${question}>
    <span>${question}</span>
    <button type="button" class="danger small" ref=${yes} disabled=${busy} onClick=${go}>${busy ? "…" : sure}</button>
    <button type="button" class="small" disabled=${busy} onClick=${() => { setAsks(false); setProblem(""); }}>Keep</button>
    ${problem && html`<span class="problem" role="alert">${problem}</span>`}
  </span>`;
}

// `mark` is a second share, drawn as a line.
export function Bar({ share, label, mark }) {
  const width = (value) => `${100 * Math.max(0, Math.min(1, value ?? 0))}%`;
  return html`<span class="bar" role="img" aria-label=${label}><i class="fill" style=${{ width: width(share) }}></i>${mark != null && html`<i class="mark" style=${{ left: width(mark) }}></i>`}</span>`;
}

export const Sparkline = pure(({ curve, width, height }) => {
  if (curve.length < 2) return html`<p class="sparkline none">No losses yet</p>`;
  const values = curve.map(([, loss]) => loss);
  const low = Math.min(...values), high = Math.max(...values);
  const first = curve[0][0], last = curve[curve.length - 1][0];
  const points = curve.map(([update, loss]) => {
    const x = (width * (update - first)) / (last - first || 1);
    const y = 3 + (height - 6) * (1 - (loss - low) / (high - low || 1));
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  const [endX, endY] = points[points.length - 1].split(",");
  const ends = [values[0], values[values.length - 1]].map((value) => value.toPrecision(3));
  // The curve is stretched to the width of the card; the dot at its end is not.
  return html`<div class="sparkline" role="img" aria-label=${`loss from ${ends[0]} to ${ends[1]}`}>
    <svg viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
      <polygon points=${`0,${height} ${points.join(" ")} ${endX},${height}`} />
      <polyline points=${points.join(" ")} vector-effect="non-scaling-stroke" />
    </svg>
    <i style=${{ top: `${(100 * endY) / height}%` }}></i>
    <p aria-hidden="true"><span>${ends[0]}</span><span>${ends[1]}</span></p>
  </div>`;
});

export function Empty({ title, children }) {
  return html`<div class="empty"><p class="title">${title}</p>${children}</div>`;
}

export function Loading({ what }) {
  return html`<p class="loading" role="status">Loading ${what} …</p>`;
}

export function Problem({ error, again }) {
  return html`<div class="notice bad" role="alert"><p>${sentence(error)}</p>${again && html`<button type="button" class="small" onClick=${again}>Try again</button>`}</div>`;
}
