// The metrics of one run, or of several runs compared.
import { html } from "../html.js";
import { useEffect, useMemo, useState } from "../vendor/hooks.mjs";
import { change, href } from "../address.js";
import { AXES, Chart, runColour, smoothed } from "../chart.js";
import { useAnswer, useMetrics } from "../data.js";
import { Alerts, End, Fact, Link, Problems, State, Tags, Verdict } from "../parts.js";
import { ago, count, duration, fixed, plural, short, whole, words } from "../formatting.js";
import { rolloutHref } from "./rollouts.js";

/** Charts: their titles, columns and options. A `counter` is drawn as its growth per step. */
const CHARTS = [
  { title: "Reward", columns: { reward: "reward" }, evals: true, wide: true },
  { title: "Loss", columns: { loss: "training", "sft_eval.loss": "held out" }, onePoints: "sft_eval.loss" },
  { title: "Reward components", prefix: "parts." },
  { title: "Reward spread", note: "standard deviation", columns: { reward_std: "all rollouts", reward_group_std: "within groups" }, fromZero: true },
  { title: "Groups without signal", note: "share", columns: { no_signal_rate: "no signal" }, fromZero: true },
  { title: "Entropy", note: "nats per token", columns: { entropy: "entropy" }, fromZero: true },
  { title: "Answer length", note: "tokens", columns: { answer_tokens_mean: "mean", answer_tokens_max: "maximum" }, fromZero: true },
  { title: "Turns", columns: { turns_mean: "mean" }, fromZero: true },
  { title: "Broken and truncated", note: "rollouts per step", columns: { broken: "broken", truncated: "truncated" }, fromZero: true, unlessZero: true },
  { title: "Mismatch KL", note: "sampler compared with trainer", columns: { mismatch_kl: "same version", lag_kl: "older versions" }, log: true },
  { title: "Gradient norm", columns: { grad_norm: "norm" }, fromZero: true },
  { title: "Learning rate", columns: { lr: "model", vision_lr: "vision tower" }, fromZero: true },
  { title: "Lag", note: "versions", columns: { lag_mean: "mean", lag_max: "maximum" }, fromZero: true },
  { title: "Throughput", note: "sampled tokens per second", columns: { tokens_per_s: "tokens" }, fromZero: true },
  { title: "GPU memory", note: "GB", columns: { gpu_peak_gb: "peak per step" }, fromZero: true },
  { title: "Verdicts", note: "rollouts per step", prefix: "verdicts.", counter: true, fromZero: true },
  { title: "Failed images", note: "total", columns: { bad_media: "failed" }, fromZero: true, unlessZero: true },
  { title: "Clipped tokens", note: "share", columns: { clip_fraction: "clipped" }, fromZero: true },
  { title: "KL to the reference", columns: { kl_ref: "KL" }, fromZero: true },
  { title: "Step time", note: "seconds", columns: { seconds: "total" }, prefix: "seconds.", fromZero: true },
  { title: "Image probe", note: "KL after swapping the images", columns: { exchanged_kl: "swapped", same_kl: "unchanged" }, log: true },
  { title: "Reward by environment", prefix: "envs.", only: /reward$/ },
];
const NO_METRICS = new Set(["elapsed_s", "eta_s", "steps_total", "version"]);
/** The metrics that place a step on the x-axis. */
const AXIS_METRICS = ["elapsed_s", "tokens_sampled_total", "tokens_sampled", "trained_tokens"];
/** The most lines of a chart, and the most additional charts of a page. */
const MAX_SERIES = 24;
const MAX_OTHERS = 40;
const isIn = (chart, name) => name in (chart.columns ?? {}) || (chart.prefix && name.startsWith(chart.prefix));

function allNames(metrics) {
  return [...new Set(Object.values(metrics).flatMap((known) => known.names))].sort();
}

/** The names to request: only what is drawn. */
function wantedNames(charts) {
  const found = charts.flatMap((chart) => [...Object.keys(chart.columns ?? {}), ...(chart.prefix ? [`${chart.prefix}*`] : [])]);
  return [...new Set([...AXIS_METRICS, ...found])].join();
}

/** One chart for each remaining metric; metrics of one table share a chart. */
function otherCharts(names) {
  const tables = new Map();
  for (const name of names) {
    if (NO_METRICS.has(name) || CHARTS.some((chart) => isIn(chart, name))) continue;
    const [table] = name.split(".");
    if (!tables.has(table)) tables.set(table, { title: words(table) });
    if (name === table) tables.get(table).columns = { [name]: words(name) };
    else tables.get(table).prefix = `${table}.`;
  }
  return [...tables.values()];
}

/** The place of each step on the x-axis. */
function placesOf(known, axis) {
  const places = new Map([[0, 0]]);
  let tokens = 0;
  for (const step of known?.steps ?? []) {
    const row = known.rows.get(step);
    tokens = row.tokens_sampled_total ?? tokens + (row.tokens_sampled ?? row.trained_tokens ?? 0);
    places.set(step, axis === "step" ? step : axis === "time" ? row.elapsed_s ?? 0 : tokens);
  }
  return places;
}

/** The values of a column at each of `x`. */
function columnOf(known, places, x, name, counter) {
  const at = new Map();
  let before = 0;
  for (const step of known.steps) {
    const value = known.rows.get(step)[name];
    if (value === undefined) continue;
    const grown = value - before;
    before = value;
    at.set(places.get(step), counter && grown >= 0 ? grown : value);
  }
  return x.map((one) => at.get(one) ?? null);
}

function labelsOf(chart, names) {
  const found = { ...chart.columns };
  for (const name of names) {
    if (chart.prefix && name.startsWith(chart.prefix) && (!chart.only || chart.only.test(name))) {
      found[name] = words(name.slice(chart.prefix.length).replace(/_bytes$|\.reward$/, ""));
    }
  }
  return Object.entries(found).slice(0, MAX_SERIES);
}

function seriesOf(chart, shown, metrics, names, places, x, window) {
  const labels = labelsOf(chart, names);
  const several = shown.length > 1;
  const series = [];
  shown.forEach((run, place) => {
    const known = metrics[run.key];
    if (!known) return;
    labels.forEach(([name, label], which) => {
      const values = columnOf(known, places[run.key], x, name, chart.counter);
      if (values.every((value) => value === null || (chart.unlessZero && value === 0))) return;
      const colour = runColour(several ? place : which);
      const title = several ? (labels.length > 1 ? `${run.key} ${label}` : run.key) : label;
      const points = chart.onePoints === name;
      if (window > 1 && !points) series.push({ label: `${title} raw`, colour, values, faint: true });
      series.push({ label: title, colour, values: points ? values : smoothed(values, window), dash: several && which > 0, points });
    });
    if (chart.evals && run.evals.length) {
      const at = new Map(run.evals.map((one) => [places[run.key].get(one.step), one.reward]));
      series.push({
        label: several ? `${run.key} held out` : "held out", points: true,
        colour: runColour(several ? place : 1), values: x.map((one) => at.get(one) ?? null),
      });
    }
  });
  return series;
}

export function OverviewPage({ shown, query, revisions, theme }) {
  const more = query.get("more");
  const [others, setOthers] = useState([]);
  const drawn = more === null ? [] : others.filter((chart) => chart.title.includes(more === "1" ? "" : more)).slice(0, MAX_OTHERS);
  const metrics = useMetrics(shown.map((run) => run.key), revisions, wantedNames([...CHARTS, ...drawn]));
  const window = Number(query.get("smooth") || 1);
  const axis = query.get("axis") in AXES ? query.get("axis") : "step";
  const zoom = /^(\d+)-(\d+)$/.exec(query.get("zoom") || "");
  const range = zoom ? [Number(zoom[1]), Number(zoom[2])] : null;
  const { names, places, x } = useMemo(() => {
    const found = Object.fromEntries(shown.map((run) => [run.key, placesOf(metrics[run.key], axis)]));
    const all = new Set();
    for (const run of shown) {
      for (const step of metrics[run.key]?.steps ?? []) all.add(found[run.key].get(step));
      for (const one of run.evals) if (found[run.key].has(one.step)) all.add(found[run.key].get(one.step));
    }
    return { names: allNames(metrics), places: found, x: [...all].sort((a, b) => a - b) };
  }, [metrics, shown.map((run) => run.key).join(), axis]);
  useEffect(() => setOthers(otherCharts(names)), [names.join()]);
  const charts = [...CHARTS, ...drawn]
    .map((chart) => ({ ...chart, series: seriesOf(chart, shown, metrics, names, places, x, window) }))
    .filter((chart) => chart.series.length);
  const onZoom = (wanted) => change({ zoom: wanted ? wanted.join("-") : null });
  const read = shown.every((run) => metrics[run.key]);
  return html`
    <header class="head">
      <h1>${shown.length > 1 ? `${shown.length} runs` : shown[0].key}</h1>
      <div class="tools">
        <select aria-label="x-axis" value=${axis} onChange=${(event) => change({ axis: event.target.value === "step" ? null : event.target.value, zoom: null })}>
          ${Object.entries(AXES).map(([name, { title }]) => html`<option key=${name} value=${name}>by ${title}</option>`)}
        </select>
        <label>
          smoothing${" "}
          <input
            type="range" min="1" max="50" value=${window} aria-label="smoothing"
            onInput=${(event) => change({ smooth: event.target.value > 1 ? event.target.value : null })}
          />
          <output>${window > 1 ? `${window} steps` : "none"}</output>
        </label>
        ${range
          ? html`<button onClick=${() => onZoom(null)}>${AXES[axis].at(range[0])} to ${AXES[axis].format(range[1])} ✕</button>`
          : html`<small class="hint">drag to zoom</small>`}
      </div>
    </header>
    ${shown.map((run) => html`<${Summary} key=${run.key} run=${run} titled=${shown.length > 1} revision=${revisions[run.key]} />`)}
    <section class="charts">
      ${charts.map((chart) => html`
        <div key=${chart.title} class=${chart.wide ? "wide" : ""}>
          <${Chart}
            title=${chart.title} note=${chart.note} x=${x} axis=${axis} series=${chart.series} log=${chart.log} theme=${theme}
            fromZero=${chart.fromZero} range=${range} onZoom=${onZoom} height=${chart.wide ? 220 : 160}
          />
        </div>
      `)}
    </section>
    ${read && !charts.length && html`<p class="empty">${shown.map(emptyWords).join(" ")}</p>`}
    ${others.length > 0 && html`
      <button onClick=${() => change({ more: more === null ? "1" : null })}>
        ${more === null ? `Show ${plural(others.length, "more chart")}` : "Show fewer charts"}
      </button>
    `}
    ${more !== null && others.length > MAX_OTHERS && html`
      <label class="hint">
        ${" "}${drawn.length} of ${others.length}, filter by name:${" "}
        <input value=${more === "1" ? "" : more} onInput=${(event) => change({ more: event.target.value || "1" })} />
      </label>
    `}
  `;
}

function emptyWords(run) {
  if (run.state === "running") return `No step has finished yet. Phase: ${run.phase || "starting"}.`;
  if (run.state === "finished") return "The run has no step metrics.";
  return `The run ${{ failed: "failed", stopped: "was stopped" }[run.state]} before its first step finished.`;
}

function Summary({ run, titled, revision }) {
  const evals = Object.fromEntries(run.evals.map((one) => [one.name, one]));
  const final = evals.final;
  const isRunning = run.state === "running";
  const has = (value) => value !== null && value !== undefined;
  return html`
    <section class="summary">
      ${titled && html`<h2>${run.key}</h2>`}
      <${End} run=${run} />
      <${Alerts} list=${run.alerts} />
      <dl class="facts">
        <${Fact} name="state">
          <${State} state=${run.state} phase=${run.phase} />
          ${!isRunning && run.last ? html`<small>${ago(Date.now() / 1000 - run.last)}</small>` : null}
        <//>
        <${Fact} name="step">${run.step}${run.steps_total ? html`<small>of ${run.steps_total}</small>` : null}<//>
        ${run.elapsed_s > 0 && html`<${Fact} name="elapsed" title="without pauses before a resume">${duration(run.elapsed_s)}<//>`}
        ${isRunning && has(run.eta_s) && html`<${Fact} name="remaining">${duration(run.eta_s)}<//>`}
        ${has(run.reward) && html`<${Fact} name="reward">${fixed(run.reward, 3)}<//>`}
        ${has(run.loss) && html`<${Fact} name="loss">${short(run.loss)}<//>`}
        ${evals.start && html`
          <${Fact} name="held out" title="before and after training">
            ${fixed(evals.start.reward, 3)}${final ? ` → ${fixed(final.reward, 3)}` : ""}
          <//>
        `}
        ${final?.swapped !== undefined && html`
          <${Fact} name="with swapped images" title="the same tasks, each with another task's images">${fixed(final.swapped, 3)}<//>
        `}
        ${has(run.mismatch_kl) && html`
          <${Fact} name="mismatch KL" title="newest measurement">
            <${Link} to=${href("mismatch", { run: run.key })}>${short(run.mismatch_kl)}<//>
          <//>
        `}
        ${has(run.tokens_per_s) && html`<${Fact} name="tokens per second">${count(run.tokens_per_s)}<//>`}
        <${Fact} name="rollouts"><${Link} to=${href("rollouts", { run: run.key })}>${whole(run.rollouts)}<//><//>
        ${run.images > 0 && html`<${Fact} name="images"><${Link} to=${href("images", { run: run.key })}>${whole(run.images)}<//><//>`}
        ${run.bad_media > 0 && html`<${Fact} name="failed images"><span class="bad">${whole(run.bad_media)}</span><//>`}
        ${["broken", "truncated"].map((name) => run[name] > 0 && html`
          <${Fact} key=${name} name=${name} title="rollouts of steps and evaluations"><span class="bad">${whole(run[name])}</span><//>
        `)}
        ${!run.broken && !run.truncated && Object.entries(run.dropped).map(([reason, number]) => html`
          <${Fact} key=${reason} name="dropped"><span class="bad">${number}</span> <${Verdict} name=${reason} /><//>
        `)}
      </dl>
      <${Exceptions} run=${run} revision=${revision} />
      ${run.probe && !run.probe.is_blind && html`<p class="probe">${run.probe.words}</p>`}
      <${Notes} run=${run} />
      <${Problems} list=${run.problems} />
    </section>
  `;
}

/** The distinct exceptions of rollouts, by their last line. */
function Exceptions({ run, revision }) {
  const { answer } = useAnswer("failures", { run: run.key }, [revision]);
  if (!answer?.errors.length) return null;
  return html`
    <details class="exceptions" open=${answer.errors.length < 6}>
      <summary>${plural(answer.errors.length, "distinct exception")} in rollouts</summary>
      <div class="scroll">
        <table class="rollouts settings">
          <thead><tr><th class="num">rollouts</th><th>exception</th><th class="num">steps</th><th>example</th></tr></thead>
          <tbody>
            ${answer.errors.map((one) => html`
              <tr key=${one.error}>
                <td class="num"><${Link} to=${href("rollouts", { run: run.key, error: one.error })}>${whole(one.num)}<//></td>
                <td class="exception"><code>${one.error}</code></td>
                <td class="num">${one.first_step === null ? "–" : one.first_step === one.last_step ? one.first_step : `${one.first_step}–${one.last_step}`}</td>
                <td><${Link} to=${rolloutHref(run.key, one)}>${one.trace_id}<//></td>
              </tr>
            `)}
          </tbody>
        </table>
      </div>
    </details>
  `;
}

function Notes({ run }) {
  if (!run.notes.trim()) return null;
  const parts = run.notes.trim().split(/(#[^\s#]+)/);
  const tagOf = (part) => run.tags.find((tag) => part === `#${tag}`);
  return html`<p class="notes">${parts.map((part) => (tagOf(part) ? html`<${Tags} list=${[tagOf(part)]} />` : part))}</p>`;
}
