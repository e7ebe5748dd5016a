// Where the logprobs of sampler and trainer differ, and whether the model uses its images.
import { html } from "../html.js";
import { useMemo } from "../vendor/hooks.mjs";
import { change, href } from "../address.js";
import { useAnswer } from "../data.js";
import { Failed, Link, OneRun, Picture } from "../parts.js";
import { count, short, whole } from "../formatting.js";
import { rolloutHref } from "./rollouts.js";

const TITLES = {
  turn: ["By turn", "first, second, …"],
  distance: ["By distance after an image", "tokens since the last image"],
  image_tokens: ["By image size", "tokens of the last image"],
  image_pixels: ["By image size", "pixels of the last image"],
  num_images: ["By number of images", "images before the token"],
  lag: ["By lag", "versions between sampling and training"],
};
const POWERS = new Set(["distance", "image_tokens", "image_pixels"]);
const HEALTHY = 0.015;

function named(dimension, bucket) {
  if (bucket < 0) return "no image";
  if (dimension === "turn") return String(bucket + 1);
  if (dimension === "distance") return bucket === 0 ? "0" : `${count(2 ** bucket - 1)}–${count(2 ** (bucket + 1) - 2)}`;
  if (POWERS.has(dimension)) return `${count(2 ** bucket)}+`;
  return String(bucket);
}

function summaryWords(dimensions) {
  const lag = dimensions.lag ?? [];
  const tokens = lag.reduce((sum, cell) => sum + cell.tokens, 0);
  if (!tokens) return "No token was sampled by the version that trained on it, so there is nothing to compare. [orchestrator] diagnostics_every samples such tokens.";
  const kl = lag.reduce((sum, cell) => sum + cell.kl * cell.tokens, 0) / tokens;
  const verdict = kl < 1e-3 ? "sampler and trainer agree" : kl < HEALTHY ? "normal for a healthy run" : "too large: sampler and trainer disagree";
  const parts = [`The mean KL over ${whole(tokens)} tokens is ${short(kl)}: ${verdict}.`];
  for (const [dimension, cells] of Object.entries(dimensions)) {
    const enough = cells.filter((cell) => cell.tokens >= Math.max(20, tokens / 1000));
    if (enough.length < 2 || dimension === "image_tokens" || kl < 1e-9) continue;
    const top = enough.reduce((a, b) => (b.kl > a.kl ? b : a));
    const low = enough.reduce((a, b) => (b.kl < a.kl ? b : a));
    if (top.kl > 4 * Math.max(low.kl, 1e-300)) {
      parts.push(`${TITLES[dimension][0]} (${TITLES[dimension][1]}) the KL varies: ${short(top.kl)} at ${named(dimension, top.bucket)}, ${short(low.kl)} at ${named(dimension, low.bucket)}.`);
    }
  }
  return parts.join(" ");
}

export function MismatchPage({ runs, run, query, revisions }) {
  const fresh = query.get("fresh") !== "off";
  const values = { run: run.key, fresh, step_from: query.get("step_from"), step_to: query.get("step_to") };
  const { answer, error } = useAnswer("mismatch", values, [revisions[run.key]]);
  const set = (name) => (event) => change({ [name]: event.target.value });
  return html`
    <header class="head">
      <h1>Mismatch</h1>
      <div class="tools asks-server">
        <${OneRun} runs=${runs} run=${run.key} />
        <fieldset>
          <legend>steps</legend>
          <input type="number" aria-label="step from" placeholder="from" value=${query.get("step_from") ?? ""} onChange=${set("step_from")} />–
          <input type="number" aria-label="step to" placeholder="to" value=${query.get("step_to") ?? ""} onChange=${set("step_to")} />
        </fieldset>
        <label title="Tokens of older versions also differ because the policy has changed since">
          <input type="checkbox" checked=${fresh} onChange=${(event) => change({ fresh: event.target.checked ? null : "off" })} />${" "}
          only tokens of the current version
        </label>
      </div>
    </header>
    <${Failed} error=${error} />
    ${run.probe && html`<p class="probe ${run.probe.is_blind ? "bad" : ""}">${run.probe.words}</p>`}
    ${answer && html`<p class="words">${summaryWords(answer.dimensions)}</p>`}
    ${answer && html`
      <section class="dimensions">
        ${Object.entries(TITLES).map(([name, [title, note]]) => (
          answer.dimensions[name] && html`<${Dimension} key=${name} name=${name} title=${title} note=${note} cells=${answer.dimensions[name]} />`
        ))}
      </section>
    `}
    ${answer?.worst.length > 0 && html`<${Worst} run=${run.key} worst=${answer.worst} />`}
  `;
}

function Dimension({ name, title, note, cells }) {
  const high = Math.max(...cells.map((cell) => cell.kl), 1e-300);
  return html`
    <div class="dimension">
      <h3>${title}<small>${note}</small></h3>
      <table>
        <thead><tr><th /><th>mean KL</th><th class="num">ratio</th><th class="num">worst KL</th><th class="num">tokens</th></tr></thead>
        <tbody>
          ${cells.map((cell) => html`
            <tr key=${cell.bucket}>
              <th>${named(name, cell.bucket)}</th>
              <td><span class="bar"><i style=${{ width: `${(100 * cell.kl) / high}%` }} /><b>${short(cell.kl)}</b></span></td>
              <td class="num">${cell.ratio.toPrecision(6)}</td>
              <td class="num">${short(cell.worst)}</td>
              <td class="num">${count(cell.tokens)}</td>
            </tr>
          `)}
        </tbody>
      </table>
    </div>
  `;
}

function Worst({ run, worst }) {
  return html`
    <section>
      <h2>Tokens with the largest KL</h2>
      <div class="scroll">
        <table class="rollouts worst">
          <thead>
            <tr>
              <th>preceding image</th><th>token</th><th class="num">KL</th><th class="num">ratio</th>
              <th class="num">sampler</th><th class="num">trainer</th><th class="num">tokens after it</th>
              <th class="num">lag</th><th class="num">step</th><th>rollout</th>
            </tr>
          </thead>
          <tbody>
            ${worst.map((one, i) => html`
              <tr key=${i}>
                <td class="thumbs">${one.digest ? html`<${Link} to=${href("image", { run, digest: one.digest })}><${Picture} run=${run} digest=${one.digest} side=${64} /><//>` : "–"}</td>
                <td><code>${one.text === null ? `#${one.token_id}` : JSON.stringify(one.text)}</code></td>
                <td class="num">${short(one.kl)}</td>
                <td class="num">${one.ratio.toPrecision(6)}</td>
                <td class="num">${short(one.sampler)}</td>
                <td class="num">${short(one.trainer)}</td>
                <td class="num">${one.distance < 0 ? "–" : one.distance}</td>
                <td class="num">${one.lag}</td>
                <td class="num">${one.step}</td>
                <td><${Link} to=${rolloutHref(run, one, { node: one.node, token: one.place, colour: "kl" })}>${one.trace_id}<//></td>
              </tr>
            `)}
          </tbody>
        </table>
      </div>
    </section>
  `;
}
