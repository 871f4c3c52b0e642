// What the server has said: the whole state once, then its changes, over server-sent events.

const MOST_POINTS = 120;
const MOST_MEASURES = 200;
const STALE_AFTER = 12_000; // the server says something every five seconds
const LONGEST_PAUSE = 10_000;
const LONGEST_ANSWER = 15_000;
const REST_AFTER = 30_000; // milliseconds after which a page that nobody sees gives up its stream

export const store = {
  status: "loading", // loading, live, stale, down, ended
  problem: "",
  me: null,
  version: "",
  removed: null, // jobs that were deleted: their number, and when the last one ended
  jobs: new Map(),
  providers: new Map(),
  usedMemory: 0, // bytes that all workers take
  skew: 0, // seconds that the server's clock is ahead
  heard: 0, // time of the last message, of performance.now
  heardAt: 0, // the same of Date.now
};

const listeners = new Set();
let scheduled = false;
let source = null;
let timer = 0;
let failures = 0;
let restTimer = 0;
let isResting = false;

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function now() {
  return Date.now() / 1000 + store.skew;
}

function changed() {
  if (scheduled) return;
  scheduled = true;
  queueMicrotask(() => {
    scheduled = false;
    for (const each of listeners) each();
  });
}

// Notes the time since `began` after the listeners and what they have drawn, for measurements in the browser.
// `name`: "update" of a message, "reload" of details or curves.
export function measureDrawn(name, began) {
  queueMicrotask(() => queueMicrotask(() => {
    if (performance.getEntriesByName(name).length > MOST_MEASURES) performance.clearMeasures(name);
    performance.measure(name, { start: began });
  }));
}

// Returns a map with the changes; items that are the same stay the same objects.
function applied(items, changes, onItem = (item) => item) {
  if (!changes) return items;
  const found = new Map(items);
  for (const id of changes.removed) found.delete(id);
  const isNew = [];
  for (const [id, fields] of Object.entries(changes.changed)) {
    const known = found.get(id);
    const item = onItem({ ...known, ...fields }, known);
    if (known) found.set(id, item);
    else isNew.push([id, item]);
  }
  return isNew.length ? new Map([...isNew, ...found]) : found;
}

function extended(card, known) {
  const update = card.updates - 1;
  if (!known || card.loss == null || update < 0) return card;
  const curve = card.curve.filter(([each]) => each < update);
  curve.push([update, card.loss]);
  if (curve.length > MOST_POINTS) {
    const last = curve[curve.length - 1];
    card.curve = [...curve.filter((_, i) => i % 2 === 0 && i < curve.length - 1), last];
  } else {
    card.curve = curve;
  }
  return card;
}

function take(message, isWhole) {
  const began = performance.now();
  const data = JSON.parse(message.data);
  if (isWhole) {
    store.me = data.me;
    store.version = data.version;
    store.removed = data.removed;
    store.jobs = new Map();
    store.providers = new Map();
    store.usedMemory = 0;
  }
  store.jobs = applied(store.jobs, data.jobs, extended);
  store.providers = applied(store.providers, data.providers);
  store.usedMemory = data.used_memory ?? store.usedMemory;
  store.skew = data.time - Date.now() / 1000;
  store.heard = performance.now();
  store.heardAt = Date.now();
  store.status = "live";
  store.problem = "";
  failures = 0;
  changed();
  measureDrawn("update", began);
}

export function connect() {
  clearTimeout(timer);
  source?.close();
  const opened = new EventSource("/page/stream");
  source = opened;
  opened.addEventListener("state", (message) => take(message, true));
  opened.addEventListener("change", (message) => take(message, false));
  opened.addEventListener("end", (message) => end(JSON.parse(message.data).reason));
  opened.addEventListener("error", () => {
    opened.close();
    if (source === opened && store.status !== "ended") lost();
  });
}

function end(reason) {
  source?.close();
  source = null;
  store.status = "ended";
  store.problem = reason;
  changed();
}

// The server was stopped, or refuses: ask why, and try again after a pause that grows.
async function lost() {
  store.status = store.me ? "down" : "loading";
  changed();
  try {
    const answer = await fetch("/page/whoami", { cache: "no-store", signal: AbortSignal.timeout(LONGEST_ANSWER) });
    if (answer.status === 401) return end("this login has ended");
    const words = await answer.json();
    store.problem = (answer.ok ? words.refusal : words.detail) ?? "";
  } catch {
    store.problem = "the server does not answer";
  }
  if (store.problem) store.status = "down";
  if (isResting) return undefined;
  const pause = Math.min(LONGEST_PAUSE, 500 * 2 ** failures) * (0.75 + Math.random() / 2);
  failures += 1;
  timer = setTimeout(connect, pause);
  changed();
  return undefined;
}

// A page that nobody sees needs no stream: browsers open six connections to a server at most.
function rest() {
  clearTimeout(restTimer);
  if (document.hidden) {
    restTimer = setTimeout(() => {
      isResting = true;
      clearTimeout(timer);
      source?.close();
      source = null;
    }, REST_AFTER);
  } else if (store.status !== "ended") {
    store.heard = performance.now(); // a page that rested is not called silent before the server could answer
    if (isResting || !source || source.readyState === EventSource.CLOSED) {
      isResting = false;
      connect();
    }
  }
}

export function start() {
  connect();
  document.addEventListener("visibilitychange", rest);
  setInterval(() => {
    const silent = performance.now() - store.heard;
    if (store.status === "live" && !isResting && silent > STALE_AFTER) {
      store.status = "stale";
      changed();
      lost();
    }
  }, 1000);
}

// Returns the answer of a route of the page; throws an error with the server's words.
export async function call(method, path, body) {
  const options = { method, cache: "no-store", headers: {}, signal: AbortSignal.timeout(LONGEST_ANSWER) };
  if (method !== "GET") options.headers["X-Ravnest-Page"] = "1";
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(`/page${path}`, options);
  } catch (error) {
    throw new Error(error.name === "TimeoutError" ? `the server did not answer within ${LONGEST_ANSWER / 1000} s` : "the server does not answer");
  }
  if (!answer.ok) {
    const words = await answer.json().catch(() => ({}));
    throw new Error(words.detail ?? `the server answered with ${answer.status}`);
  }
  return answer.json();
}
