// The pipelines of a job: clusters as rows, from the Root to the Leaf, with links and averaging rings.
import { html, pure } from "./html.js";
import { bandwidth, count, gigabytes, milliseconds, percent } from "./format.js";

const WIDTH = 196, HEIGHT = 118, GAP = 92, ROW_GAP = 46, LEFT = 84, TOP = 10;

export const Topology = pure(({ detail, isAveraging }) => {
  const { nodes, links } = detail;
  const clusters = [...new Set(nodes.map((each) => each.cluster))].sort((a, b) => a - b);
  const columns = Math.max(...nodes.map((each) => each.stage)) + 1;
  const width = LEFT + columns * WIDTH + (columns - 1) * GAP + 8;
  const height = TOP + clusters.length * HEIGHT + (clusters.length - 1) * ROW_GAP + 10;
  const place = (node) => ({ x: LEFT + node.stage * (WIDTH + GAP), y: TOP + clusters.indexOf(node.cluster) * (HEIGHT + ROW_GAP) });
  const byNode = new Map(nodes.map((each) => [each.node, each]));
  const linkOf = new Map(links.map((each) => [`${each.node}-${each.next}`, each]));
  return html`<div class="scroll" role="region" aria-label="Pipelines of this job" tabIndex="0">
    <svg class="topology" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}>
      <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" /></marker></defs>
      ${clusters.map((cluster) => {
        const y = TOP + clusters.indexOf(cluster) * (HEIGHT + ROW_GAP) + HEIGHT / 2;
        return html`<text class="cluster" x="4" y=${y - 4}>Cluster</text><text class="cluster number" x="4" y=${y + 18}>${cluster}</text>`;
      })}
      ${detail.rings.flatMap((ring) => ring.slice(1).map((node, index) => html`<${Ring} key=${`r${ring[index]}-${node}`} upper=${byNode.get(ring[index])} lower=${byNode.get(node)} place=${place} isActive=${isAveraging} />`))}
      ${nodes.map((node) => {
        const next = nodes.find((each) => each.cluster === node.cluster && each.stage === node.stage + 1);
        return next && html`<${Link} key=${`l${node.node}`} from=${place(node)} link=${linkOf.get(`${node.node}-${next.node}`)} />`;
      })}
      ${nodes.map((node) => html`<${Box} key=${node.node} node=${byNode.get(node.node)} at=${place(node)} />`)}
    </svg>
  </div>`;
});

function Ring({ upper, lower, place, isActive }) {
  if (!upper || !lower) return null;
  const from = place(upper), to = place(lower);
  const out = from.x + WIDTH / 2 - 9, back = from.x + WIDTH / 2 + 9, top = from.y + HEIGHT;
  const there = to.x + WIDTH / 2 - 9, here = to.x + WIDTH / 2 + 9, bend = (to.y - top) / 2;
  return html`<g class=${`ring ${isActive ? "active" : ""}`}>
    <path d=${`M${out} ${top} C${out - 10} ${top + bend} ${there - 10} ${to.y - bend} ${there} ${to.y}`} />
    <path d=${`M${here} ${to.y} C${here + 10} ${to.y - bend} ${back + 10} ${top + bend} ${back} ${top}`} />
  </g>`;
}

function Link({ from, link }) {
  const x = from.x + WIDTH, y = from.y + HEIGHT / 2;
  const words = link && !link.failure ? [`${bandwidth(Math.min(link.forward, link.back))}`, `${milliseconds(link.delay)}`] : [];
  return html`<g class=${`hop ${link?.route ?? "unknown"}`}>
    <line x1=${x + 3} x2=${x + GAP - 4} y1=${y} y2=${y} marker-end="url(#arrow)" />
    ${words.map((text, line) => html`<text x=${x + GAP / 2} y=${y - 20 + 12 * line}>${text}</text>`)}
    ${link && html`<text x=${x + GAP / 2} y=${y + 18}>${link.failure ? "cannot connect" : link.route}</text>`}
  </g>`;
}

function Box({ node, at }) {
  const { x, y } = at;
  const inner = WIDTH - 20;
  const phase = node.phase === "training" && node.worker_phase && node.worker_phase !== "train" ? node.worker_phase : node.phase;
  const memory = node.ram && node.offered ? `${gigabytes(node.ram)} of ${gigabytes(node.offered)}` : node.ram ? gigabytes(node.ram) : "";
  const label = `${node.role} node_${node.node} at ${node.name}: ${phase}${memory ? `, memory ${memory}` : ""}${node.computing == null ? "" : `, computing ${percent(node.computing)} of the time`}`;
  return html`<a href=${`#/providers/${node.provider}`} class=${`box ${node.phase}`}>
    <rect class="frame" x=${x} y=${y} width=${WIDTH} height=${HEIGHT} rx="9" />
    <text class="role" x=${x + 10} y=${y + 19}>${node.role}</text>
    <text class="phase" x=${x + WIDTH - 10} y=${y + 19}>${phase}${node.generation ? ` · ${node.generation + 1}. machine` : ""}</text>
    <text class="name" x=${x + 10} y=${y + 38}>${clip(node.name, 24)}</text>
    <text class="layers" x=${x + 10} y=${y + 54}>${node.layers ? layers(node.layers) : `stage ${node.stage}`}</text>
    ${memory && html`<${Meter} x=${x + 10} y=${y + 64} width=${inner} share=${node.offered ? node.ram / node.offered : 0} kind="memory" label="memory" value=${memory} />`}
    ${node.computing == null
      ? html`<text class="meter" x=${x + 10} y=${y + 100}>${node.phase === "training" ? "times are not known yet" : ""}</text>`
      : html`<${Shares} x=${x + 10} y=${y + 89} width=${inner} node=${node} />`}
    <title>${label}</title>
  </a>`;
}

function Meter({ x, y, width, share, kind, label, value }) {
  return html`<g class=${kind}>
    <text class="meter" x=${x} y=${y + 6}>${label}</text><text class="meter value" x=${x + width} y=${y + 6}>${value}</text>
    <rect class="track" x=${x} y=${y + 10} width=${width} height="4" rx="2" /><rect class="fill" x=${x} y=${y + 10} width=${width * Math.min(1, share)} height="4" rx="2" />
  </g>`;
}

function Shares({ x, y, width, node }) {
  const computing = Math.min(1, node.computing);
  const sending = Math.min(1 - computing, node.sending);
  return html`<g class="shares">
    <text class="meter" x=${x} y=${y + 6}>computing ${percent(computing)}</text><text class="meter value" x=${x + width} y=${y + 6}>waiting ${percent(1 - computing)}</text>
    <rect class="track" x=${x} y=${y + 10} width=${width} height="8" rx="2" />
    <rect class="computing" x=${x} y=${y + 10} width=${width * computing} height="8" rx="2" />
    <rect class="sending" x=${x + width * computing} y=${y + 10} width=${width * sending} height="8" />
  </g>`;
}

function layers(found) {
  const size = found.parameters >= 1e9 ? `${(found.parameters / 1e9).toFixed(1)} B` : found.parameters >= 1e6 ? `${(found.parameters / 1e6).toFixed(1)} M` : count(found.parameters);
  return `${clip(found.words, 20)} · ${size} weights`;
}

function clip(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
