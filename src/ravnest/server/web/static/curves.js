// All curves of a job, with what is common to them: zoom, scale, smoothing, marks.
import { html, pure, useMemo, useState } from "./html.js";
import { Chart } from "./chart.js";
import { figure } from "./format.js";
import { Loading, Problem, useStore } from "./parts.js";
import { useLatest } from "./latest.js";
import { call } from "./store.js";

const POINTS = 800;
const PAUSE = 900;
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

export function Curves({ job, marks, theme }) {
  const { status } = useStore(({ status }) => ({ status }));
  const [range, setRange] = useState(null);
  const [isLog, setLog] = useState(false);
  const [smoothing, setSmoothing] = useState(0);
  const query = range ? `&first=${Math.max(0, Math.floor(range[0]))}&last=${Math.max(0, Math.ceil(range[1]))}` : "";
  const version = `${query}|${job.updates}|${job.validation}|${job.state}|${status}`;
  const { data, error, again } = useLatest(() => call("GET", `/jobs/${job.id}/curves?points=${POINTS}${query}`), version, PAUSE);
  const [first, last] = [data?.loss.first ?? 0, data?.loss.last ?? 0];
  // Updates since these curves were loaded are shown once they are as wide as a bucket: before, nothing new would be seen.
  const isNewer = !range && (job.updates - 1 - last) * POINTS > last - first;
  const newest = useMemo(() => (isNewer ? { update: job.updates - 1, loss: job.loss } : null), [isNewer && job.updates]);
  const end = newest ? newest.update : last;
  const extent = useMemo(() => (end > first ? [first, end] : null), [first, end]);
  if (error && !data) return html`<${Problem} error=${error} again=${again} />`;
  if (!data) return html`<${Loading} what="the curves" />`;
  const { loss, validations, paces, stages } = data;
  const common = { range, extent, zoom: setRange, marks, theme, isLog };
  const overTime = { marks, theme, isLog, smoothing };
  return html`<div class="toolbar">
      <label class="switch"><input type="checkbox" checked=${isLog} onChange=${(event) => setLog(event.target.checked)} /> Logarithmic</label>
      <label class="slider">Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} /><span>${smoothing.toFixed(2)}</span></label>
      <span class="key"><span class="mark checkpoint" aria-hidden="true">❘</span> checkpoint</span>
      <span class="key"><span class="mark takeover" aria-hidden="true">▼</span> takeover</span>
      <span class="quiet">Drag to zoom, double-click to show all.</span>
    </div>
    ${error && html`<p class="notice warn">These curves are old: ${error}</p>`}
    <div class="charts">
      <${LossChart} ...${{ ...common, loss, newest, smoothing }} />
      <${ValidationCharts} ...${common} validations=${validations} />
      <${LearningRateChart} ...${common} loss=${loss} />
      <${RateChart} ...${overTime} paces=${paces} />
      <${StageCharts} ...${overTime} stages=${stages} />
      <${StalenessChart} ...${common} loss=${loss} />
    </div>`;
}

// Charts are drawn again only if what they show is other data: a job's messages change little of it.
const LossChart = pure((props) => html`<${LossCurve} ...${props} />`);

function LossCurve({ loss, newest, range, extent, zoom, isLog, smoothing, marks, theme }) {
  const { buckets, step } = loss;
  const shown = useMemo(() => {
    const x = buckets.map((each) => each.last), mean = buckets.map((each) => each.mean);
    if (newest && newest.loss != null) {
      x.push(newest.update);
      mean.push(newest.loss);
    }
    const pad = (name) => mean.map((value, i) => (buckets[i] ? buckets[i][name] : value));
    const series = [{ label: smoothing ? "smoothed" : step > 1 ? "mean" : "loss", colour: "--c1", values: smoothed(mean, smoothing) }];
    if (smoothing) series.push({ label: "loss", colour: "--c1soft", values: mean });
    if (step > 1) {
      series.push({ label: "highest", colour: "--c1", values: pad("high"), isHidden: true });
      series.push({ label: "lowest", colour: "--c1", values: pad("low"), isHidden: true });
    }
    return { x, series };
  }, [loss, smoothing, newest]);
  const values = shown.series[0].values.filter((each) => each != null);
  const label = values.length ? `Loss from ${values[0].toPrecision(3)} to ${values[values.length - 1].toPrecision(3)}` : "Loss: none yet";
  const count = shown.series.length;
  return html`<${Chart} title="Loss" isWide=${true} unit=${step > 1 ? `average of ${step} updates` : "per update"} label=${label} x=${shown.x} series=${shown.series}
    band=${step > 1 ? { series: [count - 1, count], colour: "--c1" } : null} isLog=${isLog} marks=${marks} range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
}

const ValidationCharts = pure(({ validations, range, extent, zoom, marks, theme, isLog }) => {
  const names = [...new Set(validations.map((each) => each.name))];
  return names.map((name, index) => {
    const own = validations.filter((each) => each.name === name);
    const series = [{ label: name, colour: COLOURS[(index + 1) % COLOURS.length], values: own.map((each) => each.value), hasPoints: true }];
    return html`<${Chart} key=${name} title=${`Validation ${name}`} unit="after an epoch" label=${`Validation ${name}, ${own.length} results`} x=${own.map((each) => each.update)}
      series=${series} isLog=${isLog} marks=${marks} range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
  });
});

const LearningRateChart = pure(({ loss, range, extent, zoom, marks, theme, isLog }) => {
  const known = loss.buckets.filter((each) => each.learning_rate != null);
  if (!known.length) return null;
  const values = known.map((each) => each.learning_rate);
  const series = [{ label: "learning rate", colour: "--c5", values }];
  return html`<${Chart} title="Learning rate" unit="first parameter group" label=${`Learning rate, now ${figure(values[values.length - 1])}`} x=${known.map((each) => each.last)}
    series=${series} isStepped=${true} isLog=${isLog} marks=${marks} range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
});

const RateChart = pure((props) => html`<${RateCurve} ...${props} />`);

function RateCurve({ paces, marks, theme, isLog, smoothing }) {
  const [range, setRange] = useState(null);
  const x = useMemo(() => paces.map((each) => each[0]), [paces]);
  const series = useMemo(() => [{ label: "samples/s", colour: "--c3", values: smoothed(paces.map((each) => each[1]), smoothing) }], [paces, smoothing]);
  if (paces.length < 2) return null;
  return html`<${Chart} title="Samples per second" unit="all clusters" label="Samples per second over time" isTime=${true} x=${x}
    series=${series} isLog=${isLog} marks=${marks} range=${range} onRange=${setRange} theme=${theme} />`;
}

const StalenessChart = pure(({ loss, range, extent, zoom, marks, theme }) => {
  const { buckets } = loss;
  if (!buckets.some((each) => each.staleness > 0)) return null;
  const series = [{ label: "staleness", colour: "--c4", values: buckets.map((each) => each.staleness) }];
  return html`<${Chart} title="Staleness" unit="updates, at the Root" label="Staleness of gradients" x=${buckets.map((each) => each.last)} series=${series} marks=${marks}
    range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
});

const StageCharts = pure((props) => html`<${StageCurves} ...${props} />`);

function StageCurves({ stages, marks, theme, isLog, smoothing }) {
  const [range, setRange] = useState(null);
  const x = useMemo(() => [...new Set(stages.flatMap((each) => each.times))].sort((a, b) => a - b), [stages]);
  const shares = useMemo(() => stageSeries(stages, x, "shares", 100, smoothing), [stages, smoothing]);
  const seconds = useMemo(() => stageSeries(stages, x, "seconds", 1000, smoothing), [stages, smoothing]);
  if (x.length < 2) return null;
  const common = { isTime: true, x, marks, range, onRange: setRange, theme, hasLegend: true };
  return html`${shares.some((each) => each.values.some((value) => value != null)) && html`<${Chart} ...${common} title="Utilisation of the stages" unit="% of the time computing" label="Share of time in which each stage computes" series=${shares} low=${0} high=${100} />`}
    <${Chart} ...${common} title="Computing time of the stages" unit="ms per micro-batch" label="Computing time of each stage over time" series=${seconds} isLog=${isLog} low=${0} />`;
}

function stageSeries(stages, x, field, factor, smoothing) {
  return stages.map((stage, index) => {
    const found = new Map(stage.times.map((time, i) => [time, stage[field][i]]));
    const values = x.map((time) => (found.get(time) == null ? null : factor * found.get(time)));
    return { label: `stage ${stage.stage}`, colour: COLOURS[index % COLOURS.length], values: smoothed(values, smoothing), dash: index >= COLOURS.length ? [6, 3] : undefined };
  });
}

// Exponential moving average without the bias of its start.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
