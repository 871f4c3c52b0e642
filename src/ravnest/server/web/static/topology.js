// The pipelines of a job: clusters as rows, from the Root to the Leaf, with links and averaging rings.
// In a narrow window the nodes of a cluster are below each other.
import { html, pure, useLayoutEffect, useRef, useState } from "./html.js";
import { bandwidth, count, gigabytes, milliseconds, percent } from "./format.js";

const HEIGHT = 152, ROW_GAP = 58, TOP = 30, EDGE = 8, NAME_GAP = 10;
const WORK = { connect: "connecting", validate: "validating", predict: "predicting", average: "averaging", save: "saving", end: "ending", rejoin: "waiting for a node" };
const ENDED = new Set(["finished", "failed", "stopped", "lost"]);
const NARROW = 560; // pixels below which nodes are below each other

export function Topology({ detail, isAveraging }) {
  const place = useRef(null);
  const [room, setRoom] = useState(0);
  useLayoutEffect(() => {
    const measure = () => setRoom(place.current.clientWidth);
    const resized = new ResizeObserver(measure);
    resized.observe(place.current);
    measure();
    return () => resized.disconnect();
  }, []);
  return html`<div class="scroll" role="region" aria-label="Pipelines of this job" tabIndex="0" ref=${place}>
    ${room > 0 && html`<${Drawing} detail=${detail} isAveraging=${isAveraging} room=${room} />`}
  </div>`;
}

// Returns sizes and places of all boxes for so many pixels.
function layout(nodes, room) {
  const clusters = [...new Set(nodes.map((each) => each.cluster))].sort((a, b) => a - b);
  const columns = Math.max(...nodes.map((each) => each.stage)) + 1;
  const row = (node) => clusters.indexOf(node.cluster);
  if (room < NARROW) {
    const gap = 52, stride = columns * HEIGHT + (columns - 1) * gap + ROW_GAP;
    const width = room - 2 * EDGE;
    const at = (node) => ({ x: EDGE, y: TOP + row(node) * stride + node.stage * (HEIGHT + gap) });
    return { clusters, isNarrow: true, boxWidth: width, gap, at, width: room, height: TOP + clusters.length * stride - ROW_GAP + 10, stride };
  }
  const free = room - 2 * EDGE;
  const boxWidth = Math.max(206, Math.min(270, (free - (columns - 1) * 92) / columns));
  const gap = columns === 1 ? 0 : Math.max(92, Math.min(240, (free - columns * boxWidth) / (columns - 1)));
  const at = (node) => ({ x: EDGE + node.stage * (boxWidth + gap), y: TOP + row(node) * (HEIGHT + ROW_GAP) });
  const width = 2 * EDGE + columns * boxWidth + (columns - 1) * gap;
  return { clusters, isNarrow: false, boxWidth, gap, at, width, height: TOP + clusters.length * (HEIGHT + ROW_GAP) - ROW_GAP + 10, stride: HEIGHT + ROW_GAP };
}

const Drawing = pure(({ detail, isAveraging, room }) => {
  const { nodes, links } = detail;
  const plan = layout(nodes, room);
  const { width, height, clusters, at } = plan;
  const byNode = new Map(nodes.map((each) => [each.node, each]));
  const byPlace = new Map(nodes.map((each) => [`${each.cluster}-${each.stage}`, each]));
  const linkOf = new Map(links.map((each) => [`${each.node}-${each.next}`, each]));
  return html`<svg class="topology" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}>
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" /></marker></defs>
    ${clusters.map((cluster, index) => html`<${ClusterName} key=${`c${cluster}`} cluster=${cluster} index=${index} plan=${plan} />`)}
    ${plan.isNarrow
      ? detail.rings.length > 0 && clusters.slice(1).map((_, index) => html`<${NarrowRing} key=${`n${index}`} y=${TOP + (index + 1) * plan.stride - ROW_GAP} width=${width} isActive=${isAveraging} />`)
      : detail.rings.flatMap((ring) => ring.slice(1).map((node, index) => html`<${Ring} key=${`r${ring[index]}-${node}`} upper=${byNode.get(ring[index])} lower=${byNode.get(node)} plan=${plan} isActive=${isAveraging} />`))}
    ${nodes.map((node) => {
      const next = byPlace.get(`${node.cluster}-${node.stage + 1}`);
      return next && html`<${Link} key=${`l${node.node}`} from=${at(node)} plan=${plan} link=${linkOf.get(`${node.node}-${next.node}`)} />`;
    })}
    ${nodes.map((node) => html`<${Box} key=${node.node} node=${node} at=${at(node)} width=${plan.boxWidth} />`)}
  </svg>`;
});

function ClusterName({ cluster, index, plan }) {
  return html`<text class="cluster" x=${EDGE} y=${TOP + index * plan.stride - NAME_GAP}>Cluster ${cluster}</text>`;
}

function Ring({ upper, lower, plan, isActive }) {
  if (!upper || !lower) return null;
  const from = plan.at(upper), to = plan.at(lower), half = plan.boxWidth / 2;
  const out = from.x + half - 9, back = from.x + half + 9, top = from.y + HEIGHT;
  const there = to.x + half - 9, here = to.x + half + 9, bend = (to.y - top) / 2;
  return html`<g class=${`ring ${isActive ? "active" : ""}`}>
    <path d=${`M${out} ${top} C${out - 10} ${top + bend} ${there - 10} ${to.y - bend} ${there} ${to.y}`} />
    <path d=${`M${here} ${to.y} C${here + 10} ${to.y - bend} ${back + 10} ${top + bend} ${back} ${top}`} />
  </g>`;
}

// All rings between two clusters that are below each other.
function NarrowRing({ y, width, isActive }) {
  const x = width / 2;
  return html`<g class=${`ring ${isActive ? "active" : ""}`}>
    <path d=${`M${x - 9} ${y} C${x - 20} ${y + 14} ${x - 20} ${y + 28} ${x - 9} ${y + 42}`} /><path d=${`M${x + 9} ${y + 42} C${x + 20} ${y + 28} ${x + 20} ${y + 14} ${x + 9} ${y}`} />
    <text x=${x + 30} y=${y + 25}>${isActive ? "averaging now" : "averaging rings"}</text>
  </g>`;
}

function Link({ from, link, plan }) {
  const rate = link && !link.failure ? `${bandwidth(Math.min(link.forward, link.back))}` : "";
  const delay = rate && milliseconds(link.delay);
  const route = link ? (link.failure ? "cannot connect" : link.route) : "not measured";
  if (plan.isNarrow) {
    const x = from.x + 28, y = from.y + HEIGHT;
    return html`<g class=${`hop narrow ${link?.route ?? "unknown"}`}>
      <line x1=${x} x2=${x} y1=${y + 3} y2=${y + plan.gap - 4} marker-end="url(#arrow)" />
      <text x=${x + 14} y=${y + plan.gap / 2 + 4}>${[rate && `tested ${rate}`, delay, route].filter(Boolean).join(" · ")}</text>
    </g>`;
  }
  const x = from.x + plan.boxWidth, y = from.y + HEIGHT / 2, middle = x + plan.gap / 2;
  return html`<g class=${`hop ${link?.route ?? "unknown"}`}>
    <line x1=${x + 3} x2=${x + plan.gap - 4} y1=${y} y2=${y} marker-end="url(#arrow)" />
    <text x=${middle} y=${y - 22}>${rate}</text><text x=${middle} y=${y - 8}>${delay}</text><text x=${middle} y=${y + 18}>${route}</text><text x=${middle} y=${y + 32}>${rate && "tested"}</text>
  </g>`;
}

function Box({ node, at, width }) {
  const { x, y } = at;
  const inner = width - 24, left = x + 12;
  const phase = node.phase === "training" && node.worker_phase && node.worker_phase !== "train" ? WORK[node.worker_phase] ?? node.worker_phase : node.phase;
  const memory = memoryWords(node.memory, ENDED.has(node.phase));
  const label = `${node.role} node_${node.node} at ${node.name}: ${phase}${memory.value ? `, ${memory.label} ${memory.value}` : ""}${memory.rest ? `, ${memory.rest}` : ""}${node.layers ? `, layers ${node.layers.words}` : ""}${node.computing == null ? "" : `, computing ${percent(node.computing)} of the time, waiting ${percent(1 - node.computing)}`}${node.sending == null ? "" : `, its busier link sends ${percent(node.sending)} of the time`}`;
  return html`<a href=${`#/providers/${node.provider}`} class=${`box ${node.phase}`}>
    <rect class="frame" x=${x} y=${y} width=${width} height=${HEIGHT} rx="9" />
    <text class="role" x=${left} y=${y + 22}>${node.role}</text>
    <text class="phase" x=${x + width - 12} y=${y + 22}>${phase}${node.generation ? ` · ${node.generation + 1}. machine` : ""}</text>
    <text class="name" x=${left} y=${y + 41}>${clip(node.name, 26)}</text>
    <text class="layers" x=${left} y=${y + 58}>${node.layers ? layers(node.layers, inner) : `stage ${node.stage}`}</text>
    ${memory.value && html`<${Memory} x=${left} y=${y + 82} width=${inner} memory=${node.memory} words=${memory} />`}
    ${node.computing == null
      ? html`<text class="meter" x=${left} y=${y + 107}>${node.phase === "training" ? "times are not known yet" : ""}</text>`
      : html`<${Share} kind="computing" label="compute" x=${left} y=${y + 107} width=${inner} share=${node.computing} rest="waits" />
        <${Share} kind="sending" label="link busy" x=${left} y=${y + 132} width=${inner} share=${node.sending} />`}
    <title>${label}</title>
  </a>`;
}

// Returns the memory of a stage in words: what is used of what is offered, or, after the end of the worker, its
// peak, or, before it is measured, what the plan needs; `rest` has the other figures.
function memoryWords({ used, peak, planned, offered }, hasEnded) {
  const size = (bytes) => gigabytes(bytes / 1e9);
  const isMeasured = used != null;
  const shown = !isMeasured ? planned : hasEnded ? peak : used;
  const value = shown == null ? "" : offered == null ? size(shown) : `${size(shown)} of ${size(offered)}`;
  const rest = !isMeasured ? [] : [!hasEnded && peak != null && `peak ${size(peak)}`, planned != null && `plan ${size(planned)}`];
  return { label: !isMeasured ? "memory, planned" : hasEnded ? "memory, peak" : "memory", shown, value, rest: rest.filter(Boolean).join(" · ") };
}

function Memory({ x, y, width, memory, words }) {
  const { used, peak, planned, offered } = memory;
  const at = (bytes) => (offered ? width * Math.min(1, bytes / offered) : 0);
  const mark = (kind, bytes) => bytes != null && offered && html`<line class=${kind} x1=${x + at(bytes)} x2=${x + at(bytes)} y1=${y + 3} y2=${y + 11} />`;
  return html`<g class=${`memory ${used == null ? "planned" : ""}`}>
    <text class="meter" x=${x} y=${y}>${words.label}</text><text class="meter value" x=${x + width} y=${y}>${words.value}</text>
    <rect class="track" x=${x} y=${y + 5} width=${width} height="4" rx="2" /><rect class="fill" x=${x} y=${y + 5} width=${at(words.shown)} height="4" rx="2" />
    ${used != null && html`${mark("peak", peak)}${mark("needed", planned)}`}
  </g>`;
}

// A share of time; computing and sending overlap, so that each has a bar of its own.
// `rest` names what happens in the remaining time.
function Share({ kind, label, x, y, width, share, rest }) {
  return html`<g>
    <text class="meter" x=${x} y=${y}>${label}</text><text class="meter value" x=${x + width} y=${y}>${percent(share)}${rest && `, ${rest} ${percent(1 - share)}`}</text>
    <rect class="track" x=${x} y=${y + 5} width=${width} height="4" rx="2" /><rect class=${kind} x=${x} y=${y + 5} width=${width * (share ?? 0)} height="4" rx="2" />
  </g>`;
}

function layers(found, width) {
  const size = found.parameters >= 1e9 ? `${(found.parameters / 1e9).toFixed(1)} B` : found.parameters >= 1e6 ? `${(found.parameters / 1e6).toFixed(1)} M` : count(found.parameters);
  const end = ` · ${size} weights`;
  return `${clip(found.words, Math.floor(width / 6.4) - end.length)}${end}`;
}

function clip(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
