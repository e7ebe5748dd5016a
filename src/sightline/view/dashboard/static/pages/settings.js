// The settings of runs: changed ones first, then defaults, and the differences between runs.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.mjs";
import { change } from "../address.js";
import { runColour } from "../chart.js";
import { ask } from "../data.js";

function flat(table, prefix = "") {
  return Object.entries(table).flatMap(([name, value]) => (
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? flat(value, `${prefix}${name}.`) : [[`${prefix}${name}`, JSON.stringify(value)]]
  ));
}

export function SettingsPage({ shown, query }) {
  const [settings, set] = useState({});
  const keys = shown.map((run) => run.key).join();
  useEffect(() => {
    let current = true;
    Promise.all(shown.map(async (run) => {
      const found = await ask("settings", { run: run.key }).catch(() => ({ settings: {}, defaults: {} }));
      return [run.key, { values: Object.fromEntries(flat(found.settings)), defaults: Object.fromEntries(flat(found.defaults)) }];
    })).then((pairs) => current && set(Object.fromEntries(pairs)));
    return () => { current = false; };
  }, [keys]);
  const only = query.get("only") !== null;
  const search = (query.get("text") ?? "").toLowerCase();
  const names = [...new Set(Object.values(settings).flatMap((one) => Object.keys(one.values)))].sort();
  const rows = names.map((name) => {
    const values = shown.map((run) => settings[run.key]?.values[name]);
    const defaults = shown.map((run) => settings[run.key]?.defaults[name] ?? "null");
    const chosen = values.some((value, i) => value !== undefined && value !== defaults[i]);
    return { name, values, chosen, usual: defaults[0], differs: new Set(values).size > 1 };
  }).sort((a, b) => b.chosen - a.chosen);
  const chosen = rows.filter((row) => row.chosen).length;
  const differing = rows.filter((row) => row.differs).length;
  const visible = rows.filter((row) => (!only || row.differs) && (!search || row.name.includes(search) || row.values.some((v) => v?.toLowerCase().includes(search))));
  return html`
    <header class="head">
      <h1>Settings</h1>
      <div class="tools">
        <input type="search" placeholder="setting or value   /" aria-label="setting" value=${query.get("text") ?? ""} onInput=${(event) => change({ text: event.target.value })} />
        <label><input type="checkbox" checked=${only} onChange=${(event) => change({ only: event.target.checked ? "1" : null })} /> only differences</label>
      </div>
    </header>
    <p class="words">${shown.length > 1 ? `${differing} of ${names.length} settings differ between ${shown.length} runs.` : `${chosen} of ${names.length} settings differ from their defaults and are listed first. Select a second run to compare.`}</p>
    <div class="scroll">
      <table class="rollouts settings">
        <thead><tr><th>setting</th>${shown.map((run, i) => html`<th key=${run.key}><i class="dot" style=${{ background: runColour(i) }} />${run.key}</th>`)}<th>default</th></tr></thead>
        <tbody>
          ${visible.map((row) => html`
            <tr key=${row.name} class="${row.differs ? "differs" : ""} ${row.chosen ? "chosen" : "usual"}">
              <th><small>${row.name.slice(0, row.name.lastIndexOf(".") + 1)}</small>${row.name.slice(row.name.lastIndexOf(".") + 1)}</th>
              ${row.values.map((value, i) => html`<td key=${i}><code>${value ?? "–"}</code></td>`)}
              <td class="soft">${row.chosen && row.usual !== "null" ? html`<code>${row.usual}</code>` : ""}</td>
            </tr>
          `)}
        </tbody>
      </table>
    </div>
  `;
}
