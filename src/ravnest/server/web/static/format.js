// Numbers, durations and reasons as text. Pure.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
// Made once: a formatter takes the browser as long as hundreds of texts.
const clocks = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const moments = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });

const days = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium" });

export function count(value) {
  return value == null ? "–" : whole.format(value);
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

// Returns a number with four significant digits, as short as possible.
export function figure(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return whole.format(value);
  return String(Number(value.toPrecision(4)));
}

export function percent(share, digits = 0) {
  return share == null ? "–" : `${(100 * share).toFixed(digits)}%`;
}

export function gigabytes(value) {
  return value >= 100 ? `${value.toFixed(0)} GB` : value >= 1 ? `${value.toFixed(1)} GB` : `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} MB`;
}

export function bytes(value) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
}

export function compute(gflops) {
  return gflops >= 1000 ? `${(gflops / 1000).toFixed(1)} TFLOP/s` : `${gflops.toFixed(0)} GFLOP/s`;
}

export function bandwidth(mbits) {
  return mbits >= 1000 ? `${(mbits / 1000).toFixed(1)} Gbit/s` : `${mbits.toFixed(mbits < 10 ? 1 : 0)} Mbit/s`;
}

export function milliseconds(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  const s = Math.max(0, seconds);
  if (s < 60) return `${s.toFixed(0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`.replace(" 60 s", " 59 s");
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

export function clock(time) {
  return clocks.format(1000 * time);
}

export function day(time) {
  return days.format(1000 * time);
}

export function moment(time) {
  return moments.format(1000 * time);
}

// Returns words with a capital at the start, unless they start with a name such as `node_0`.
export function capital(words) {
  return /^[a-z]+[ ,.:;]|^[a-z]+$/.test(words) ? words.charAt(0).toUpperCase() + words.slice(1) : words;
}

// Returns the words of the server as a sentence.
export function sentence(words) {
  const text = capital(words);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

const NODES = /(node_\d+(?: of cluster \d+)?(?: \([^)]*\))?)((?:, node_\d+(?: of cluster \d+)?(?: \([^)]*\))?)+)(?=:)/g;

// Returns a reason in which only the first of several nodes is named.
function shortened(reason) {
  return reason.replace(NODES, (_, first, others) => `${first} and ${others.split(", node_").length - 1} more`);
}

// Splits a reason into sentences; those that are repeated, also for other nodes, come once with their number.
export function folded(reason, isWhole = false) {
  const parts = (isWhole ? reason : shortened(reason)).split(/;\s+|\n+/).map((part) => part.trim()).filter(Boolean);
  const keys = parts.map(likeness);
  const period = parts.findIndex((_, i) => i > 0 && parts.length % i === 0 && keys.every((key, j) => key === keys[j % i]));
  if (period > 0) return [{ text: parts.slice(0, period).join("; "), times: parts.length / period }];
  const found = new Map();
  parts.forEach((text, i) => {
    const known = found.get(keys[i]);
    found.set(keys[i], known ? { text: known.text, times: known.times + 1 } : { text, times: 1 });
  });
  return [...found.values()];
}

const NEAR = 4;

// Joins events that are near to each other and say the same, also of other nodes, newest first.
export function foldedEvents(events) {
  const found = [];
  for (const event of events) {
    const key = `${event.kind}|${event.before}|${event.after}|${likeness(event.reason)}`;
    const same = found.slice(-NEAR).find((each) => each.key === key);
    if (same) {
      same.times += 1;
      same.since = event.time;
    } else {
      found.push({ ...event, key, times: 1, since: event.time });
    }
  }
  return found;
}

// Returns a text without what differs between nodes: names of machines in brackets, and numbers.
function likeness(text) {
  return shortened(text).replace(/ and \d+ more/g, "").replace(/\([^)]*\)/g, "()").replace(/\d+/g, "#");
}
