// The processes of a run: their last activity, queues and logs.
import { html } from "../html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.mjs";
import { change } from "../address.js";
import { Chart, runColour } from "../chart.js";
import { ask, useAnswer, useMetrics, useTick } from "../data.js";
import { Failed, OneRun, State } from "../parts.js";
import { ago, bytes, whole, words } from "../formatting.js";

const CHARTS = [
  ["Rollouts in flight", { in_flight: "in flight", waiting: "waiting", groups_ahead: "groups ahead" }],
  ["Trainer time (seconds)", { "seconds.wait": "wait", "seconds.materialize": "images", "seconds.compute": "compute", "seconds.forward": "forward", "seconds.backward": "backward", "seconds.optimizer": "optimizer", "seconds.probe": "probe", "seconds.publish": "publish" }],
  ["Images", { images_shown: "sent", images_stored: "unique" }],
];

const NAMES = CHARTS.flatMap(([, columns]) => Object.keys(columns)).join();

export function ProcessesPage({ runs, run, query, revisions, theme }) {
  const { answer, error } = useAnswer("processes", { run: run.key }, [revisions[run.key], useTick(5)]);
  const metrics = useMetrics([run.key], revisions, NAMES)[run.key];
  const chosen = query.get("log") || answer?.processes.find((one) => one.log_bytes)?.name;
  return html`
    <header class="head">
      <h1>Processes</h1>
      <div class="tools"><${OneRun} runs=${runs} run=${run.key} /></div>
    </header>
    <${Failed} error=${error} />
    ${answer && html`
      <p class="words"><${State} state=${answer.state} phase=${answer.phase} />${" "}
          ${Object.entries(answer.workers_lost).map(([why, number]) => html`<b key=${why} class="bad"> ${number} workers lost: ${words(why)}. </b>`)}
          ${Object.entries(answer.dropped).map(([why, number]) => html`<b key=${why} class="bad"> ${whole(number)} rollouts dropped: ${words(why)}. </b>`)}
        </p>
        <div class="scroll">
          <table class="rollouts">
            <thead><tr><th>process</th><th>last activity</th><th class="num">log</th><th>last log line</th></tr></thead>
            <tbody>
              ${answer.processes.map((one) => html`
                <tr key=${one.name} class=${one.name === chosen ? "at" : ""} onClick=${() => change({ log: one.name })}>
                  <td><button class="quiet">${one.name}</button></td>
                  <td>${one.last ? ago(answer.now - one.last) : "–"}</td>
                  <td class="num">${bytes(one.log_bytes)}</td>
                  <td class="answer">${one.last_line}</td>
                </tr>
              `)}
            </tbody>
          </table>
        </div>
    `}
    ${metrics?.steps.length > 0 && html`
      <section class="charts">
        ${CHARTS.map(([title, columns]) => {
          const series = Object.entries(columns).map(([name, label], i) => ({
            label, colour: runColour(i), values: metrics.steps.map((step) => metrics.rows.get(step)[name] ?? null),
          })).filter((one) => one.values.some((value) => value !== null));
          return series.length > 0 && html`
            <div key=${title}><${Chart} title=${title} x=${metrics.steps} series=${series} fromZero theme=${theme} height=${140} /></div>
          `;
        })}
      </section>
    `}
    ${chosen && html`<${Log} key="${run.key}/${chosen}" run=${run.key} name=${chosen} revision=${revisions[run.key]} />`}
    ${answer?.notes.length > 0 && html`
      <section>
        <h2>Events</h2>
        <div class="scroll">
          <table class="rollouts">
            <tbody>
              ${answer.notes.map((note, i) => html`
                <tr key=${i}>
                  <td>${new Date(note.time * 1000).toLocaleTimeString()}</td><td>${note.process}</td>
                  <td>${note.kind}</td><td class="num">${note.step || ""}</td><td class="answer">${note.text}</td>
                </tr>
              `)}
            </tbody>
          </table>
        </div>
      </section>
    `}
  `;
}

function Log({ run, name, revision }) {
  const [parts, setParts] = useState([]);
  const [error, setError] = useState(null);
  const box = useRef(null);
  useEffect(() => {
    ask("log", { run, name }).then((part) => {
      // Keep the earlier parts that were loaded.
      setParts((known) => [...known.filter((one) => one.end <= part.start), part]);
      requestAnimationFrame(() => box.current && (box.current.scrollTop = box.current.scrollHeight));
    }, setError);
  }, [revision]);
  const first = parts[0];
  const earlier = () => ask("log", { run, name, before: first.start }).then((part) => setParts((known) => [part, ...known]), setError);
  return html`
    <section>
      <h2>${name}.log ${first && first.start > 0 && html`<button onClick=${earlier}>earlier</button>`}</h2>
      <${Failed} error=${error} />
      <pre class="log" ref=${box} tabIndex=${0}>${parts.map((part) => part.text).join("") || "The log is empty."}</pre>
    </section>
  `;
}
