// A page of rollouts with filters. Only the visible page is fetched.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.mjs";
import { change, go, href } from "../address.js";
import { exported, useAnswer } from "../data.js";
import { useKeys } from "../keys.js";
import { Bar, Failed, Link, OneRun, Pager, Picture, Verdict } from "../parts.js";
import { count, fixed, short, whole, words } from "../formatting.js";

export const LIMIT = 50;
const FILTERS = [
  "step_from", "step_to", "reward_from", "reward_to", "verdict", "env", "split", "group", "file", "error", "text",
  "image", "sort",
];
const SORTS = {
  newest: "newest first", oldest: "oldest first", reward_high: "highest reward", reward_low: "lowest reward",
  mismatch: "largest mismatch", longest: "longest",
};
const GROUP_SORTS = {
  newest: "newest first", oldest: "oldest first", reward_high: "highest reward", reward_low: "lowest reward",
  spread: "widest spread", longest: "longest",
};

export function rolloutHref(run, row, more = {}) {
  return href("rollout", { run, file: row.file, number: row.number, ...more });
}

export function RolloutsPage({ runs, run, query, revisions }) {
  const { answer: facets } = useAnswer("facets", { run: run.key }, [revisions[run.key]]);
  const filters = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]));
  const folded = query.get("fold") !== null;
  const Table = folded ? GroupTable : RolloutTable;
  return html`
    <header class="head">
      <h1>Rollouts</h1>
      <div class="tools"><${OneRun} runs=${runs} run=${run.key} /></div>
    </header>
    ${exported && html`<p class="words">This file contains rollouts of the first and the last step.</p>`}
    <${Filters} filters=${filters} facets=${facets} folded=${folded} />
    <${Table} run=${run} filters=${filters} page=${Number(query.get("page") || 0)} revision=${revisions[run.key]} />
  `;
}

function Filters({ filters, facets, folded }) {
  const set = (name) => (event) => change({ [name]: event.target.value, page: null });
  const [text, setText] = useState(filters.text ?? "");
  useEffect(() => setText(filters.text ?? ""), [filters.text]);
  useEffect(() => {
    const wait = setTimeout(() => {
      if (text !== (filters.text ?? "")) change({ text, page: null });
    }, 250);
    return () => clearTimeout(wait);
  }, [text]);
  const number = (name, title, step) => html`
    <input
      type="number" step=${step} placeholder=${title} aria-label="${words(name)}" value=${filters[name] ?? ""}
      onChange=${set(name)}
    />
  `;
  const pick = (name, title, table) => html`
    <select aria-label=${title} value=${filters[name] ?? ""} onChange=${set(name)}>
      <option value="">any ${title}</option>
      ${Object.entries(table ?? {}).map(([value, num]) => (
        value === "" ? null : html`<option key=${value} value=${value}>${words(value)} (${count(num)})</option>`
      ))}
    </select>
  `;
  const active = FILTERS.filter((name) => filters[name] && name !== "sort");
  return html`
    <div class="filters" role="search">
      <input
        type="search" placeholder="text, tool call or id   /" aria-label="text" value=${text}
        onInput=${(event) => setText(event.target.value)}
      />
      <fieldset><legend>steps</legend>${number("step_from", "from", 1)}–${number("step_to", "to", 1)}</fieldset>
      <fieldset><legend>reward</legend>${number("reward_from", "from", 0.1)}–${number("reward_to", "to", 0.1)}</fieldset>
      ${pick("verdict", "verdict", facets?.verdicts)}
      ${Object.keys(facets?.envs ?? {}).length > 1 && pick("env", "environment", facets.envs)}
      ${pick("split", "split", facets?.splits)}
      ${facets?.evals.length > 0 && html`
        <select aria-label="evaluation" value=${filters.file ?? ""} onChange=${set("file")}>
          <option value="">any file</option>
          ${facets.evals.map((name) => html`<option key=${name} value=${name}>${words(name.replace(".msgpack", ""))}</option>`)}
        </select>
      `}
      <select aria-label="order" value=${filters.sort ?? "newest"} onChange=${set("sort")}>
        ${Object.entries(folded ? GROUP_SORTS : SORTS).map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}
      </select>
      <label title="one row for all rollouts of a task">
        <input type="checkbox" checked=${folded} onChange=${(event) => change({ fold: event.target.checked ? "1" : null, page: null })} /> by group
      </label>
      ${filters.error && html`<span class="chip">${filters.error}</span>`}
      ${filters.group && html`<span class="chip">group ${filters.group}</span>`}
      ${filters.image && html`<span class="chip">image ${filters.image.slice(0, 12)}</span>`}
      ${active.length > 0 && html`
        <button onClick=${() => change({ ...Object.fromEntries(active.map((n) => [n, null])), page: null })}>
          clear
        </button>
      `}
    </div>
  `;
}

export function RolloutTable({ run, filters, page, revision }) {
  const { answer, error, stale } = useAnswer(
    "rollouts", { run: run.key, ...filters, offset: page * LIMIT, limit: LIMIT }, [revision],
  );
  const [at, setAt] = useState(-1);
  useEffect(() => setAt(-1), [page, JSON.stringify(filters)]);
  useKeys((event) => {
    const rows = answer?.rows ?? [];
    if (event.key === "j") setAt((now) => Math.min(rows.length - 1, now + 1));
    else if (event.key === "k") setAt((now) => Math.max(0, now - 1));
    else if (event.key === "Enter" && rows[at]) go(rolloutHref(run.key, rows[at]));
    else if (event.key === "n" && (page + 1) * LIMIT < answer?.total) change({ page: page + 1 }, { replace: false });
    else if (event.key === "p" && page > 0) change({ page: page - 1 || null }, { replace: false });
  });
  useEffect(() => {
    document.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
  }, [at]);
  if (!answer) return error ? html`<${Failed} error=${error} />` : html`<p class="loading">Loading …</p>`;
  return html`
    <${Failed} error=${error} />
    <${Pager} offset=${answer.offset} limit=${LIMIT} total=${answer.total} noun="rollouts" />
    <div class="scroll">
      <${Rows} run=${run} rows=${answer.rows} at=${at} stale=${stale} />
    </div>
    ${answer.total === 0 && html`<p class="empty">${emptyWords(run, filters)}</p>`}
  `;
}

function emptyWords(run, filters) {
  if (run.rollouts) return "No rollout matches the filters.";
  if (Object.values(filters).some(Boolean)) return "The run has no rollouts.";
  return run.state === "running" ? "No rollout has been written yet." : `The run has no rollouts. State: ${run.state}.`;
}

function Rows({ run, rows, at = -1, stale = false }) {
  const parts = [...new Set(rows.flatMap((row) => Object.keys(row.rewards)))].slice(0, 4);
  const high = Math.max(1, ...rows.map((row) => row.reward ?? 0));
  return html`
    <table class="rollouts ${stale ? "stale" : ""}">
      <thead>
        <tr>
          <th>images</th><th>rollout</th><th class="num">step</th><th>verdict</th><th>reward</th>
          ${parts.map((name) => html`<th key=${name} class="num part">${words(name)}</th>`)}
          <th class="num">advantage</th><th class="num">KL</th><th class="num">lag</th>
          <th class="num">turns</th><th class="num">tokens</th><th>last answer</th>
        </tr>
      </thead>
      <tbody>
        ${rows.map((row, i) => html`
          <tr
            key="${row.file}/${row.number}" class=${i === at ? "at" : ""}
            onClick=${(event) => event.target.closest("a") || go(rolloutHref(run.key, row))}
          >
            <${Thumbs} run=${run} row=${row} />
            <td><${Link} to=${rolloutHref(run.key, row)}>${row.trace_id}<//></td>
            <td class="num">${row.step ?? html`<small>${row.split}</small>`}</td>
            <td><${Verdict} name=${row.verdict} />${row.error && html`<small class="bad cut" title=${row.error}>${row.error}</small>`}</td>
            <td><${Bar} value=${row.reward} high=${high} text=${fixed(row.reward)} /></td>
            ${parts.map((name) => html`<td key=${name} class="num part">${short(row.rewards[name] ?? null)}</td>`)}
            <td class="num ${row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : ""}">${fixed(row.advantage)}</td>
            <td class="num">${short(row.kl)}</td>
            <td class="num">${row.lag ?? "–"}</td>
            <td class="num">${row.turns}${row.branches > 1 && html`<small title="branches"> /${row.branches}</small>`}</td>
            <td class="num">${whole(row.tokens)}</td>
            <td class="answer">${row.answer}</td>
          </tr>
        `)}
      </tbody>
    </table>
  `;
}

function Thumbs({ run, row }) {
  return html`
    <td class="thumbs">
      ${row.thumbs.map((digest, k) => html`<${Picture} key=${k} run=${run.key} digest=${digest} side=${64} />`)}
      ${row.images > row.thumbs.length && html`<small>+${row.images - row.thumbs.length}</small>`}
    </td>
  `;
}

/** One row for each group, which unfolds into its rollouts. */
function GroupTable({ run, filters, page, revision }) {
  const { answer, error, stale } = useAnswer(
    "groups", { run: run.key, ...filters, offset: page * LIMIT, limit: LIMIT }, [revision],
  );
  const [open, setOpen] = useState("");
  if (!answer) return error ? html`<${Failed} error=${error} />` : html`<p class="loading">Loading …</p>`;
  const high = Math.max(1, ...answer.rows.map((row) => row.high ?? 0));
  return html`
    <${Failed} error=${error} />
    <${Pager} offset=${answer.offset} limit=${LIMIT} total=${answer.total} noun="groups" />
    <div class="scroll">
      <table class="rollouts groups ${stale ? "stale" : ""}">
        <thead>
          <tr>
            <th>images</th><th>group</th><th class="num">step</th><th class="num">task</th><th class="num">rollouts</th>
            <th>mean reward</th><th class="num">lowest</th><th class="num">highest</th><th class="num">turns</th>
            <th class="num">tokens</th><th>verdicts</th>
          </tr>
        </thead>
        ${answer.rows.map((row) => {
          const key = `${row.file}/${row.group_id}`;
          const toggle = () => setOpen(open === key ? "" : key);
          return html`
            <tbody key=${key}>
              <tr onClick=${toggle}>
                <${Thumbs} run=${run} row=${row} />
                <td><button class="fold" aria-expanded=${open === key}>${open === key ? "▾" : "▸"} ${row.group_id || "–"}</button></td>
                <td class="num">${row.step ?? html`<small>${row.split}</small>`}</td>
                <td class="num">${row.task}</td>
                <td class="num">${row.rollouts}</td>
                <td><${Bar} value=${row.reward} high=${high} text=${fixed(row.reward)} /></td>
                <td class="num">${fixed(row.low)}</td>
                <td class="num">${fixed(row.high)}</td>
                <td class="num">${short(row.turns)}</td>
                <td class="num">${whole(row.tokens)}</td>
                <td>${Object.entries(row.verdicts).map(([name, num]) => html`<span key=${name}>${num} <${Verdict} name=${name} /> </span>`)}</td>
              </tr>
              ${open === key && html`<tr class="inside"><td colSpan="11"><${Siblings} run=${run} row=${row} revision=${revision} /></td></tr>`}
            </tbody>
          `;
        })}
      </table>
    </div>
    ${answer.total === 0 && html`<p class="empty">${emptyWords(run, filters)}</p>`}
  `;
}

function Siblings({ run, row, revision }) {
  const wanted = { run: run.key, file: row.file, group: row.group_id, sort: "reward_high", limit: 64 };
  const { answer, error } = useAnswer("rollouts", wanted, [revision]);
  if (!answer) return error ? html`<${Failed} error=${error} />` : html`<p class="loading">Loading …</p>`;
  return html`<${Rows} run=${run} rows=${answer.rows} />`;
}
