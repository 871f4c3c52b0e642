// A curve with axes, zoom, hover and marks, drawn by uPlot.
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useLayoutEffect, useRef } from "./html.js";
import { clock, count, figure } from "./format.js";

const HEIGHT = 236;
const NEAR = 7; // pixels from a mark

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// `series` have a label, a colour and values; `band` fills between two of them. `range` is the part of the
// x axis that is shown, `onRange` asks for another one.
export function Chart({ title, unit, x, series, band, isTime, isLog, isStepped, marks, range, extent, onRange, label, theme, low, high, hasLegend, isWide }) {
  const place = useRef(null), readout = useRef(null), plot = useRef(null);
  const latest = useRef({});
  latest.current = { marks: marks ?? [], range: range ?? extent, extent, x, onRange, series, isTime, low, high };
  const data = [x, ...series.map((each) => (isLog ? each.values.map((v) => (v > 0 ? v : null)) : each.values))];
  const shape = `${series.map((each) => each.label + each.colour).join()}|${isLog}|${isTime}|${theme}`;

  useLayoutEffect(() => {
    const made = new uPlot(options(latest, place.current.clientWidth, { isLog, isTime, isStepped, band, show, ask }), data, place.current);
    plot.current = made;
    document.fonts.ready.then(() => plot.current === made && made.redraw(false, true));
    const resized = new ResizeObserver(() => made.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(data), [x, series, range?.[0], range?.[1], extent?.[1], marks]);

  function show(index) {
    if (!readout.current) return;
    const { series: shown, isTime: timed, marks: known } = latest.current;
    const made = plot.current;
    if (index == null || !made) {
      readout.current.textContent = "";
      return;
    }
    const at = made.data[0][index];
    const words = shown.filter((each) => !each.isHidden).map((each) => `${each.label} ${figure(each.values[index])}`);
    const near = known.find((mark) => Math.abs(made.valToPos(placeOf(mark, timed), "x") - made.cursor.left) < NEAR);
    readout.current.textContent = [timed ? clock(at) : `update ${count(at)}`, ...words, near?.words].filter(Boolean).join(" · ");
  }

  function move(event) {
    const made = plot.current;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (step && made && x.length) {
      event.preventDefault();
      const index = Math.max(0, Math.min(x.length - 1, (made.cursor.idx ?? 0) + step));
      made.setCursor({ left: made.valToPos(x[index], "x"), top: 20 });
    } else if (event.key === "+" || event.key === "-") {
      event.preventDefault();
      zoom(event.key === "+" ? 0.5 : 2);
    } else if (event.key === "Escape" || event.key === "0") {
      onRange(null);
    }
  }

  function zoom(factor) {
    const made = plot.current;
    if (!made || x.length < 2) return;
    const { min, max } = made.scales.x;
    const middle = made.cursor.idx == null ? (min + max) / 2 : x[made.cursor.idx];
    const half = ((max - min) / 2) * factor;
    ask([middle - half, middle + half]);
  }

  // Asks for a part of the x axis; all of it is no range, so that new points are shown as they come.
  function ask([from, to]) {
    const { extent: whole, x: points, onRange: tell } = latest.current;
    const [first, last] = whole ?? [points[0], points[points.length - 1]];
    const least = Math.min(1, (last - first) / 50); // of an update or a second
    const begin = Math.max(first, Math.min(from, last - least)), end = Math.min(last, Math.max(to, begin + least));
    tell(begin <= first && end >= last ? null : [begin, end]);
  }

  return html`<figure class=${`chart ${isWide ? "whole" : ""}`}>
    <figcaption>
      <span class="title">${title}${unit && html` <span class="unit">${unit}</span>`}</span>
      <output ref=${readout}></output>
      <span class="tools">
        <button type="button" class="tool" aria-label=${`Zoom in: ${title}`} title="Zoom in" onClick=${() => zoom(0.5)}>+</button>
        <button type="button" class="tool" aria-label=${`Zoom out: ${title}`} title="Zoom out" onClick=${() => zoom(2)}>−</button>
        <button type="button" class="tool" aria-label=${`Show all: ${title}`} title="Show all" disabled=${!range} onClick=${() => onRange(null)}>⟲</button>
      </span>
    </figcaption>
    ${hasLegend && series.length > 1 && html`<p class="legend">${series.map((each, index) => html`<span><i class=${`line c${index % 6 + 1}`}></i> ${each.label}</span>`)}</p>`}
    <div class="plot" ref=${place} role="img" tabIndex="0" aria-label=${`${label}. Arrow keys move along the curve, + and − zoom, 0 shows all.`} onKeyDown=${move}></div>
  </figure>`;
}

// Returns where a mark is on the x axis.
function placeOf(mark, isTime) {
  return isTime ? mark.time : mark.update;
}

function options(latest, width, { isLog, isTime, isStepped, band, show, ask }) {
  const ink = css("--quiet"), lines = css("--line"), font = `12px ${css("--font")}`;
  const axis = { stroke: ink, font, grid: { stroke: lines, width: 1 }, ticks: { stroke: lines, width: 1, size: 5 } };
  const clocks = (_, values) => values.map((value) => clock(value).slice(0, 8));
  return {
    width,
    height: HEIGHT,
    padding: [10, 12, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: (_, low, high) => latest.current.range ?? (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
      y: { distr: isLog ? 3 : 1, range: isLog ? undefined : (_, least, most) => bounds(latest.current, least, most) },
    },
    axes: [
      { ...axis, size: 30, label: isTime ? "time" : "update", labelSize: 18, labelFont: font, labelGap: 0, space: isTime ? 90 : 70, values: isTime ? clocks : (_, values) => values.map((v) => (Number.isInteger(v) ? count(v) : "")) },
      { ...axis, size: 58, values: (_, values) => axisWords(values) },
    ],
    series: [{}, ...latest.current.series.map((each) => ({
      label: each.label,
      stroke: css(each.colour),
      width: each.isHidden ? 0 : 2,
      dash: each.dash,
      paths: isStepped ? uPlot.paths.stepped({ align: -1 }) : undefined,
      points: { show: each.hasPoints ? true : undefined, size: 6 },
      spanGaps: true,
    }))],
    bands: band ? [{ series: band.series, fill: `${css(band.colour)}2e` }] : [],
    cursor: {
      drag: { x: true, y: false, setScale: false },
      points: { size: 7 },
      bind: { dblclick: () => () => latest.current.onRange(null) },
    },
    hooks: {
      setCursor: [(made) => show(made.cursor.idx)],
      setSelect: [(made) => {
        if (made.select.width < 4) return;
        ask([made.posToVal(made.select.left, "x"), made.posToVal(made.select.left + made.select.width, "x")]);
        made.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      draw: [(made) => drawMarks(made, latest.current)],
    },
  };
}

// Returns the numbers of an axis; small ones as powers of ten, so that they are short.
function axisWords(values) {
  const largest = Math.max(...values.map((v) => Math.abs(v ?? 0)));
  return values.map((v) => (v == null ? "" : largest < 0.01 && v !== 0 ? String(v.toExponential(2)).replace(/\.?0+e/, "e") : figure(v)));
}

function bounds({ low, high }, least, most) {
  if (least == null) return [low ?? 0, high ?? 1];
  const room = 0.07 * (most - least || Math.abs(most) || 1);
  return [low ?? (least >= 0 ? Math.max(0, least - room) : least - room), high ?? most + room];
}

// Draws checkpoints as ticks at the top edge, and takeovers as lines.
function drawMarks(made, { marks, isTime }) {
  const { ctx, bbox } = made;
  const colours = { checkpoint: css("--mark"), takeover: css("--warn") };
  const ratio = devicePixelRatio;
  ctx.save();
  for (const mark of marks) {
    const at = Math.round(made.valToPos(placeOf(mark, isTime), "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    const isTakeover = mark.kind === "takeover", size = 4.5 * ratio;
    ctx.strokeStyle = ctx.fillStyle = colours[mark.kind];
    ctx.lineWidth = 1.5 * ratio;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + (isTakeover ? bbox.height : 7 * ratio));
    ctx.stroke();
    if (!isTakeover) continue;
    ctx.beginPath();
    ctx.moveTo(at - size, bbox.top);
    ctx.lineTo(at + size, bbox.top);
    ctx.lineTo(at, bbox.top + 2 * size);
    ctx.fill();
  }
  ctx.restore();
}
