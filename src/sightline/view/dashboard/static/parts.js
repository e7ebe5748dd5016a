// Small components that several pages use.
import { html } from "./html.js";
import { useState } from "./vendor/hooks.mjs";
import { Link, change, href } from "./address.js";
import { exported, mediaUrl } from "./data.js";
import { short, whole, words } from "./formatting.js";

export function Verdict({ name }) {
  if (!name) return html`<span class="verdict none">no verdict</span>`;
  return html`<span class="verdict v-${name.replace(/[^a-z_]/g, "")}">${words(name)}</span>`;
}

export function State({ state, phase }) {
  return html`<span class="state s-${state}">${state === "running" && phase ? `running · ${phase}` : state}</span>`;
}

/** A number over a bar from `low` to `high`. */
export function Bar({ value, low = 0, high = 1, text }) {
  if (value === null || value === undefined) return html`<span class="soft">–</span>`;
  const share = Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
  return html`
    <span class="bar">
      <i style=${{ width: `${100 * share}%` }} />
      <b>${text ?? short(value)}</b>
    </span>
  `;
}

export function Picture({ run, digest, side = 96, missing, alt = "", ...rest }) {
  const [broken, setBroken] = useState(false);
  if (missing || broken) {
    return html`<span class="missing" title=${digest}>image missing<small>${digest.slice(0, 12)}</small></span>`;
  }
  return html`
    <img
      loading="lazy" alt=${alt} src=${mediaUrl(run, digest, side)}
      onError=${() => setBroken(true)} ...${rest}
    />
  `;
}

export function Pager({ offset, limit, total, noun }) {
  const last = Math.max(0, Math.ceil(total / limit) - 1);
  const page = Math.floor(offset / limit);
  const to = (wanted) => change({ page: wanted || null }, { replace: false });
  return html`
    <nav class="pager" aria-label="pages">
      <button disabled=${page <= 0} onClick=${() => to(0)} title="first">«</button>
      <button disabled=${page <= 0} onClick=${() => to(page - 1)} title="previous (p)">‹</button>
      <span>
        ${total ? `${whole(offset + 1)}–${whole(Math.min(total, offset + limit))} of ` : ""}
        ${whole(total)} ${noun}
      </span>
      <button disabled=${page >= last} onClick=${() => to(page + 1)} title="next (n)">›</button>
      <button disabled=${page >= last} onClick=${() => to(last)} title="last">»</button>
    </nav>
  `;
}

export function Problems({ list }) {
  if (!list?.length) return null;
  return html`
    <details class="problems" open=${list.length < 4}>
      <summary>${list.length === 1 ? "1 file or image is" : `${list.length} problems: files or images are`} missing or unreadable</summary>
      <ul>${list.map((problem) => html`<li key=${problem}>${problem}</li>`)}</ul>
    </details>
  `;
}

export function Failed({ error }) {
  return error ? html`<p class="failed" role="alert">${error.message}</p>` : null;
}

/** Why a run failed, was stopped or finished. */
export function End({ run }) {
  if (!run.end.problem) return null;
  const title = {
    failed: "This run failed", stopped: "Stopped by a signal", finished: "Finished: the goal was reached",
  }[run.state] ?? run.state;
  const { problem, cause, fix } = run.end;
  return html`
    <div class="end e-${run.state}" role=${run.state === "failed" ? "alert" : undefined}>
      <b>${title}</b>
      ${problem !== "a signal" && html`<p>${cause}</p>`}
      ${problem.trim() !== cause && html`<details><summary>full message</summary><pre>${problem}</pre></details>`}
      ${fix && html`<p class="fix">${fix}</p>`}
      ${run.state === "failed" && !exported && html`<p><${Link} to=${href("processes", { run: run.key })}>Processes and logs<//></p>`}
    </div>
  `;
}

const ALERTS = { blind: "Ignores its images", diverges: "Diverging", collapses: "Collapsing", no_signal: "No training signal" };

export function Alerts({ list }) {
  return list.map((one) => html`
    <p key=${one.kind} class="alert a-${one.kind}" role="alert"><b>${ALERTS[one.kind] ?? one.kind}</b> ${one.text}</p>
  `);
}

export function Tags({ list }) {
  return list.map((tag) => html`<span key=${tag} class="tag">${tag}</span>`);
}

export function Fact({ name, children, title }) {
  return html`<div class="fact" title=${title}><dt>${name}</dt><dd>${children}</dd></div>`;
}

/** Selects the run of a page. */
export function OneRun({ runs, run }) {
  if (runs.length < 2) return null;
  return html`
    <label class="pick">
      run${" "}
      <select value=${run} onChange=${(event) => change({ run: event.target.value, page: null }, { replace: false })}>
        ${runs.map((one) => html`<option key=${one.key} value=${one.key}>${one.key}</option>`)}
      </select>
    </label>
  `;
}

export { Link };
