// The numbers of one run, or of several beside one another.
import { useMemo } from "preact/hooks";
import { change } from "../address.jsx";
import { Chart, runColour, smoothed } from "../chart.jsx";
import { useMetrics } from "../data.js";
import { Fact, Link, Problems, State, Verdict } from "../parts.jsx";
import { ago, count, duration, fixed, short, whole, words } from "../formatting.js";
import { href } from "../address.jsx";
import { probeWords } from "./mismatch.jsx";

/** Charts: title, the columns they show, and how. A counter is shown by its growth in each step. */
const CHARTS = [
  { title: "Reward", columns: { reward: "reward" }, evals: true, wide: true },
  { title: "Parts of the reward", prefix: "parts." },
  { title: "Loss", columns: { loss: "loss" } },
  { title: "Mismatch KL", note: "sampler to trainer", columns: { mismatch_kl: "own version", lag_kl: "older" }, log: true },
  { title: "Entropy", note: "nats a token", columns: { entropy: "entropy" }, fromZero: true },
  { title: "Lag", note: "versions", columns: { lag_mean: "mean", lag_max: "greatest" }, fromZero: true },
  { title: "Throughput", note: "sampled tokens a second", columns: { tokens_per_s: "tokens" }, fromZero: true },
  { title: "Verdicts", note: "rollouts a step", prefix: "verdicts.", counter: true, fromZero: true },
  { title: "Bytes by wire", note: "a step", prefix: "wire.", only: /bytes/, counter: true, fromZero: true },
  { title: "Bad media", note: "so far", columns: { bad_media: "bad" }, fromZero: true },
  { title: "Gradient norm", columns: { grad_norm: "norm" }, fromZero: true },
  { title: "Clipped", note: "share of tokens", columns: { clip_fraction: "clipped" }, fromZero: true },
  { title: "KL to the reference", columns: { kl_ref: "KL" }, fromZero: true },
  { title: "Seconds a step", columns: { seconds: "whole" }, prefix: "seconds.", fromZero: true },
  { title: "Blindness probe", note: "KL when images are exchanged", columns: { exchanged_kl: "exchanged", same_kl: "the same" }, log: true },
  { title: "Rewards by environment", prefix: "envs.", only: /reward$/ },
];

function columnOf(known, steps, name, counter) {
  let before = 0;
  return steps.map((step) => {
    const value = known.rows.get(step)?.[name];
    if (value === undefined) return null;
    if (!counter) return value;
    const grown = value - before;
    before = value;
    return grown < 0 ? value : grown;
  });
}

function namesOf(chart, metrics) {
  const found = { ...chart.columns };
  if (chart.prefix) {
    for (const known of Object.values(metrics)) {
      for (const row of known.rows.values()) {
        for (const name of Object.keys(row)) {
          if (name.startsWith(chart.prefix) && (!chart.only || chart.only.test(name))) {
            found[name] = words(name.slice(chart.prefix.length).replace(/_bytes$|\.reward$/, ""));
          }
        }
      }
    }
  }
  return found;
}

function seriesOf(chart, shown, metrics, steps, window) {
  const names = Object.entries(namesOf(chart, metrics));
  const several = shown.length > 1;
  const series = [];
  shown.forEach((run, place) => {
    const known = metrics[run.key];
    if (!known) return;
    names.forEach(([name, label], which) => {
      const values = columnOf(known, steps, name, chart.counter);
      if (values.every((value) => value === null)) return;
      const colour = runColour(several ? place : which);
      const title = several ? (names.length > 1 ? `${run.key} ${label}` : run.key) : label;
      const dash = several && which > 0;
      if (window > 1) series.push({ label: `${title} raw`, colour, values, faint: true });
      series.push({ label: title, colour, values: smoothed(values, window), dash });
    });
    if (chart.evals && run.evals.length) {
      const at = new Map(run.evals.map((one) => [one.step, one.reward]));
      series.push({
        label: several ? `${run.key} held out` : "held out", points: true,
        colour: runColour(several ? place : 1), values: steps.map((step) => at.get(step) ?? null),
      });
    }
  });
  return series;
}

export function OverviewPage({ shown, query, revisions, theme }) {
  const metrics = useMetrics(shown.map((run) => run.key), revisions);
  const window = Number(query.get("smooth") || 1);
  const zoom = /^(\d+)-(\d+)$/.exec(query.get("steps") || "");
  const range = zoom ? [Number(zoom[1]), Number(zoom[2])] : null;
  const steps = useMemo(() => {
    const all = new Set();
    for (const run of shown) for (const step of metrics[run.key]?.steps ?? []) all.add(step);
    for (const run of shown) for (const one of run.evals) all.add(one.step);
    return [...all].sort((a, b) => a - b);
  }, [metrics, shown.map((run) => run.key).join()]);
  const onZoom = (wanted) => change({ steps: wanted ? wanted.join("-") : null });
  return (
    <>
      <header class="head">
        <h1>{shown.length > 1 ? `${shown.length} runs` : shown[0].key}</h1>
        <div class="tools">
          <label>
            smoothing{" "}
            <input
              type="range" min="1" max="50" value={window} aria-label="smoothing"
              onInput={(event) => change({ smooth: event.target.value > 1 ? event.target.value : null })}
            />
            <output>{window > 1 ? `${window} steps` : "none"}</output>
          </label>
          {range
            ? <button onClick={() => onZoom(null)}>steps {range[0]} to {range[1]} ✕</button>
            : <small>drag over a chart to zoom</small>}
        </div>
      </header>
      {shown.map((run) => <Summary key={run.key} run={run} titled={shown.length > 1} />)}
      <section class="charts">
        {CHARTS.map((chart) => {
          const series = seriesOf(chart, shown, metrics, steps, window);
          if (!series.length) return null;
          return (
            <div key={chart.title} class={chart.wide ? "wide" : ""}>
              <Chart
                title={chart.title} note={chart.note} x={steps} series={series} log={chart.log} theme={theme}
                fromZero={chart.fromZero} range={range} onZoom={onZoom} height={chart.wide ? 220 : 160}
              />
            </div>
          );
        })}
      </section>
    </>
  );
}

function Summary({ run, titled }) {
  const evals = Object.fromEntries(run.evals.map((one) => [one.name, one]));
  const final = evals.final;
  return (
    <section class="summary">
      {titled && <h2>{run.key}</h2>}
      <dl class="facts">
        <Fact name="state">
          <State state={run.state} phase={run.phase} />
          {run.state !== "live" && run.last ? <small>{ago(Date.now() / 1000 - run.last)}</small> : null}
        </Fact>
        <Fact name="step">{run.step}<small>of {run.steps_total ?? "?"}</small></Fact>
        {run.state === "live" && <Fact name="left">{duration(run.eta_s)}</Fact>}
        <Fact name="reward">{fixed(run.reward, 3)}</Fact>
        {evals.start && (
          <Fact name="held out" title="before and after training">
            {fixed(evals.start.reward, 3)}{final ? ` → ${fixed(final.reward, 3)}` : ""}
          </Fact>
        )}
        {final?.swapped !== undefined && (
          <Fact name="images exchanged" title="the same tasks with the images of another">{fixed(final.swapped, 3)}</Fact>
        )}
        <Fact name="mismatch KL" title="of the newest step that measured it">
          <Link to={href("mismatch", { run: run.key })}>{short(run.mismatch_kl)}</Link>
        </Fact>
        <Fact name="tokens a second">{count(run.tokens_per_s)}</Fact>
        <Fact name="rollouts"><Link to={href("rollouts", { run: run.key })}>{whole(run.rollouts)}</Link></Fact>
        <Fact name="images"><Link to={href("images", { run: run.key })}>{whole(run.images)}</Link></Fact>
        <Fact name="bad media"><span class={run.bad_media ? "bad" : ""}>{whole(run.bad_media)}</span></Fact>
        {Object.entries(run.dropped).map(([reason, number]) => (
          <Fact key={reason} name="dropped"><span class="bad">{number}</span> <Verdict name={reason} /></Fact>
        ))}
      </dl>
      {run.probe && <p class={`probe ${run.probe.is_blind ? "bad" : ""}`}>{probeWords(run.probe)}</p>}
      <Problems list={run.problems} />
    </section>
  );
}
