// All curves of a job, with what is common to them: zoom, scale, smoothing, marks.
import { html, useMemo, useState } from "./html.js";
import { Chart } from "./chart.js";
import { figure } from "./format.js";
import { Loading, Problem } from "./parts.js";
import { useLatest } from "./latest.js";
import { call } from "./store.js";

const POINTS = 800;
const PAUSE = 2000;
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

export function Curves({ job, marks, theme }) {
  const [range, setRange] = useState(null);
  const [isLog, setLog] = useState(false);
  const [smoothing, setSmoothing] = useState(0);
  const query = range ? `&first=${Math.max(0, Math.floor(range[0]))}&last=${Math.max(0, Math.ceil(range[1]))}` : "";
  const version = range ? query : `${job.updates}|${job.validation}|${job.state}`;
  const { data, error, again } = useLatest(() => call("GET", `/jobs/${job.id}/curves?points=${POINTS}${query}`), version, PAUSE);
  if (error && !data) return html`<${Problem} error=${error} again=${again} />`;
  if (!data) return html`<${Loading} what="the curves" />`;
  const extent = data.loss.last > data.loss.first ? [data.loss.first, Math.max(data.loss.last, job.updates - 1)] : null;
  const zoom = (found) => setRange(found && [Math.max(data.loss.first, found[0]), Math.min(Math.max(data.loss.last, found[0] + 1), found[1])]);
  return html`<div class="toolbar">
      <label class="switch"><input type="checkbox" checked=${isLog} onChange=${(event) => setLog(event.target.checked)} /> Logarithmic</label>
      <label class="slider">Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} /><span>${smoothing.toFixed(2)}</span></label>
      <span class="key"><span class="mark checkpoint" aria-hidden="true">◆</span> checkpoint</span>
      <span class="key"><span class="mark takeover" aria-hidden="true">▼</span> takeover</span>
      <span class="quiet">Drag to zoom, double-click to show all.</span>
    </div>
    ${error && html`<p class="notice warn">These curves are old: ${error}</p>`}
    <div class="charts">
      <${LossChart} ...${{ data, job, range, extent, zoom, isLog, smoothing, marks, theme }} />
      <${ValidationCharts} ...${{ data, range, extent, zoom, marks, theme }} />
      <${LearningRateChart} ...${{ data, range, extent, zoom, marks, theme }} />
      <${RateChart} data=${data} theme=${theme} />
      <${StageCharts} data=${data} theme=${theme} />
      <${StalenessChart} ...${{ data, range, extent, zoom, marks, theme }} />
    </div>`;
}

function LossChart({ data, job, range, extent, zoom, isLog, smoothing, marks, theme }) {
  const { buckets, step } = data.loss;
  const shown = useMemo(() => {
    const x = buckets.map((each) => each.last), mean = buckets.map((each) => each.mean);
    if (!range && job.loss != null && job.updates - 1 > (x[x.length - 1] ?? -1)) {
      x.push(job.updates - 1); // newer than the curve
      mean.push(job.loss);
    }
    const pad = (name) => mean.map((value, i) => (buckets[i] ? buckets[i][name] : value));
    const series = [{ label: smoothing ? "smoothed" : step > 1 ? "mean" : "loss", colour: "--c1", values: smoothed(mean, smoothing) }];
    if (smoothing) series.push({ label: "loss", colour: "--c1soft", values: mean });
    if (step > 1) {
      series.push({ label: "highest", colour: "--c1", values: pad("high"), isHidden: true });
      series.push({ label: "lowest", colour: "--c1", values: pad("low"), isHidden: true });
    }
    return { x, series };
  }, [data, smoothing, range ? 0 : job.updates]);
  const values = shown.series[0].values.filter((each) => each != null);
  const label = values.length ? `Loss from ${values[0].toPrecision(3)} to ${values[values.length - 1].toPrecision(3)}` : "Loss: none yet";
  const count = shown.series.length;
  return html`<${Chart} title="Loss" isWide=${true} unit=${step > 1 ? `mean and range of ${step} updates` : "per update"} label=${label} x=${shown.x} series=${shown.series}
    band=${step > 1 ? { series: [count - 1, count], colour: "--c1" } : null} isLog=${isLog} marks=${marks} range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
}

function ValidationCharts({ data, range, extent, zoom, marks, theme }) {
  const names = [...new Set(data.validations.map((each) => each.name))];
  return names.map((name, index) => {
    const own = data.validations.filter((each) => each.name === name);
    const series = [{ label: name, colour: COLOURS[(index + 1) % COLOURS.length], values: own.map((each) => each.value), hasPoints: true }];
    return html`<${Chart} key=${name} title=${`Validation ${name}`} unit="after an epoch" label=${`Validation ${name}, ${own.length} results`} x=${own.map((each) => each.update)}
      series=${series} marks=${marks} range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
  });
}

function LearningRateChart({ data, range, extent, zoom, marks, theme }) {
  const known = data.loss.buckets.filter((each) => each.learning_rate != null);
  if (!known.length) return null;
  const values = known.map((each) => each.learning_rate);
  const series = [{ label: "learning rate", colour: "--c5", values }];
  return html`<${Chart} title="Learning rate" unit="first parameter group" label=${`Learning rate, now ${figure(values[values.length - 1])}`} x=${known.map((each) => each.last)}
    series=${series} marks=${marks} range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
}

function RateChart({ data, theme }) {
  const [range, setRange] = useState(null);
  if (data.paces.length < 2) return null;
  const series = [{ label: "samples/s", colour: "--c3", values: data.paces.map((each) => each[1]) }];
  return html`<${Chart} title="Samples per second" unit="last half hour" label="Samples per second over time" isTime=${true} x=${data.paces.map((each) => each[0])}
    series=${series} range=${range} onRange=${setRange} theme=${theme} />`;
}

function StalenessChart({ data, range, extent, zoom, marks, theme }) {
  const { buckets } = data.loss;
  if (!buckets.some((each) => each.staleness > 0)) return null;
  const series = [{ label: "staleness", colour: "--c4", values: buckets.map((each) => each.staleness) }];
  return html`<${Chart} title="Staleness" unit="updates, at the Root" label="Staleness of gradients" x=${buckets.map((each) => each.last)} series=${series} marks=${marks}
    range=${range} extent=${extent} onRange=${zoom} theme=${theme} />`;
}

function StageCharts({ data, theme }) {
  const [range, setRange] = useState(null);
  const x = useMemo(() => [...new Set(data.stages.flatMap((each) => each.times))].sort((a, b) => a - b), [data]);
  const shares = useMemo(() => stageSeries(data.stages, x, "shares", 100), [data]);
  const seconds = useMemo(() => stageSeries(data.stages, x, "seconds", 1000), [data]);
  if (x.length < 2) return null;
  const common = { isTime: true, x, range, onRange: setRange, theme, hasLegend: true };
  return html`${shares.some((each) => each.values.some((value) => value != null)) && html`<${Chart} ...${common} title="Utilisation of the stages" unit="% of the time computing" label="Share of time in which each stage computes" series=${shares} low=${0} high=${100} />`}
    <${Chart} ...${common} title="Computing time of the stages" unit="ms per micro-batch" label="Computing time of each stage over time" series=${seconds} low=${0} />`;
}

function stageSeries(stages, x, field, factor) {
  return stages.map((stage, index) => {
    const found = new Map(stage.times.map((time, i) => [time, stage[field][i]]));
    const values = x.map((time) => (found.get(time) == null ? null : factor * found.get(time)));
    return { label: `stage ${stage.stage}`, colour: COLOURS[index % COLOURS.length], values, dash: index >= COLOURS.length ? [6, 3] : undefined };
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
