// The frame around the pages: navigation, run list, keyboard, and light or dark theme.
import { html } from "./html.js";
import { render } from "./vendor/preact.mjs";
import { useEffect, useState } from "./vendor/hooks.mjs";
import { Link, change, go, href, useAddress } from "./address.js";
import { runColour } from "./chart.js";
import { exported, useAnswer, useLive } from "./data.js";
import { useKeys } from "./keys.js";
import { ImagePage, ImagesPage } from "./pages/images.js";
import { MismatchPage } from "./pages/mismatch.js";
import { OverviewPage } from "./pages/overview.js";
import { ProcessesPage } from "./pages/processes.js";
import { RolloutPage } from "./pages/rollout.js";
import { RolloutsPage } from "./pages/rollouts.js";
import { SettingsPage } from "./pages/settings.js";
import { State, Tags } from "./parts.js";
import { fixed, whole, words } from "./formatting.js";

const PAGES = [
  ["", "Overview", OverviewPage],
  ["rollouts", "Rollouts", RolloutsPage],
  ["mismatch", "Mismatch", MismatchPage],
  ["images", "Images", ImagesPage],
  ["processes", "Processes", ProcessesPage],
  ["settings", "Settings", SettingsPage],
].filter(([path]) => !exported || path !== "processes");
const HIDDEN = { rollout: RolloutPage, image: ImagePage };
const OWNER = { rollout: "rollouts", image: "images" };
const KEYS = [
  ["1 – 6", "open a page"],
  ["j k", "next or previous row or message"],
  ["Enter", "open the row"],
  ["n p", "next or previous page or rollout"],
  ["/", "search"],
  ["g", "show or hide patches"],
  ["t", "theme: light, dark or system"],
  ["Esc", "back to the list, or leave a field"],
  ["?", "this list"],
];

function useTheme() {
  const [theme, set] = useState(localStorage.getItem("theme") || "auto");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(system.matches);
  useEffect(() => {
    const listen = () => setDark(system.matches);
    system.addEventListener("change", listen);
    return () => system.removeEventListener("change", listen);
  }, []);
  const shown = theme === "auto" ? (dark ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = shown;
  const next = () => set((now) => {
    const wanted = { auto: "light", light: "dark", dark: "auto" }[now];
    localStorage.setItem("theme", wanted);
    return wanted;
  });
  return { theme, shown, next };
}

/** The runs in the address, or else the newest one. */
function chosen(runs, query) {
  const named = (query.get("runs") || "").split(",").filter(Boolean);
  const known = runs.filter((run) => named.includes(run.key));
  if (known.length) return known;
  const one = runs.find((run) => run.key === query.get("run"));
  if (one) return [one];
  const best = [...runs].sort((a, b) => (b.state === "running") - (a.state === "running") || b.last - a.last);
  return best.slice(0, 1);
}

/** Whether a run matches every word of a search. */
function matches(run, search) {
  const known = [run.key, run.path, run.env, run.model, run.state, run.end.problem, run.notes].join("\n").toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => known.includes(word));
}

function RunLine({ run, place, toggle }) {
  return html`
    <li>
      <label title=${run.path}>
        <input type="checkbox" checked=${place >= 0} onChange=${() => toggle(run.key)} />
        <i style=${{ background: place >= 0 ? runColour(place) : "var(--line)" }} />
        <span>
          <b>${run.key}</b>
          <small>
            ${run.steps_total ? `${run.step}/${run.steps_total}` : "no steps"}
            ${run.reward !== null ? ` · ${fixed(run.reward)}` : ""}
          </small>
          <${State} state=${run.state} />
          ${run.state === "failed" && html`<small class="cause" title=${run.end.problem}>${run.end.cause}</small>`}
          ${run.alerts.map((one) => html`<small key=${one.kind} class="cause" title=${one.text}>⚠ ${words(one.kind)}</small>`)}
          ${run.tags.length > 0 && html`<span class="tags"><${Tags} list=${run.tags} /></span>`}
        </span>
      </label>
    </li>
  `;
}

function Sidebar({ runs, shown, page, live, theme }) {
  const [search, setSearch] = useState("");
  const [open, setOpen] = useState(false);
  const listed = runs.filter((run) => matches(run, search));
  const toggle = (key) => {
    const keys = shown.map((run) => run.key);
    const wanted = keys.includes(key) ? keys.filter((one) => one !== key) : [...keys, key];
    change({ runs: wanted.join(","), run: wanted.length ? null : key }, { replace: false });
  };
  return html`
    <aside>
      <${Link} to=${href("")} class="brand"><img src=${document.querySelector("link[rel=icon]").href} alt="" /> Sightline<//>
      <nav aria-label="pages">
        ${PAGES.map(([path, title], i) => html`
          <${Link} key=${path} to=${href(path)} aria-current=${(OWNER[page] ?? page) === path ? "page" : undefined}>
            <kbd>${i + 1}</kbd>${title}
          <//>
        `)}
      </nav>
      <h2>
        Runs
        <button class="unfold" aria-expanded=${open} onClick=${() => setOpen(!open)}>
          ${shown.length === 1 ? shown[0].key : `${shown.length} of ${runs.length}`} ${open ? "▴" : "▾"}
        </button>
      </h2>
      <div class="run-list ${open ? "open" : ""}">
        ${runs.length > 1 && html`
          <input
            type="search" placeholder="name, tag, note, state" aria-label="search runs" value=${search}
            onInput=${(event) => setSearch(event.target.value)}
          />
        `}
        <ul class="runs">
          ${listed.map((run) => html`
            <${RunLine} key=${run.key} run=${run} place=${shown.findIndex((one) => one.key === run.key)} toggle=${toggle} />
          `)}
        </ul>
        ${!listed.length && html`<p class="soft">No run matches.</p>`}
      </div>
      <footer>
        ${exported
          ? html`<span>exported file</span>`
          : html`<span class=${live.connected ? "on" : "off"}>${live.connected ? "connected" : "disconnected"}</span>`}
        <button onClick=${theme.next} title="theme: light, dark or system (t)">${theme.theme}</button>
      </footer>
    </aside>
  `;
}

function Help({ close }) {
  return html`
    <div class="help" role="dialog" aria-label="keys" onClick=${close}>
      <dl>${KEYS.map(([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    </div>
  `;
}

function useFrameKeys(theme, setHelp) {
  useKeys(
    (event) => {
      const page = PAGES[Number(event.key) - 1];
      if (page) go(href(page[0]));
      else if (event.key === "?") setHelp((open) => !open);
      else if (event.key === "t") theme.next();
      else if (event.key === "/") {
        const search = document.querySelector("main input[type=search]") ?? document.querySelector("input[type=search]");
        if (search) {
          event.preventDefault();
          search.focus();
        }
      }
    },
    (event, field) => event.key === "Escape" && field.blur(),
  );
}

function App() {
  const { page, query } = useAddress();
  const live = useLive();
  const theme = useTheme();
  const [help, setHelp] = useState(false);
  useFrameKeys(theme, setHelp);
  const { answer: runs, error } = useAnswer("runs", {}, [JSON.stringify(live.revisions)]);
  const Page = HIDDEN[page] ?? PAGES.find(([path]) => path === page)?.[2];
  useEffect(() => {
    const title = PAGES.find(([path]) => path === (OWNER[page] ?? page))?.[1] ?? "";
    document.title = `${query.get("run") || query.get("runs") || title} · Sightline`;
  }, [page, query.toString()]);
  if (!runs) return html`<p class="loading">${error ? error.message : "Loading …"}</p>`;
  if (!runs.length) return html`<p class="loading">There is no run here yet. A new run appears without a reload.</p>`;
  const shown = chosen(runs, query);
  const run = runs.find((one) => one.key === query.get("run")) ?? shown[0];
  return html`
    <${Sidebar} runs=${runs} shown=${shown} page=${page} live=${live} theme=${theme} />
    <main>
      ${run.files_left > 0 && html`
        <p class="indexing">Indexing: ${whole(run.rollouts)} rollouts read, ${run.files_left} files left.</p>
      `}
      ${Page ? html`
        <${Page} runs=${runs} shown=${shown} run=${run} query=${query} revisions=${live.revisions} theme=${theme.shown} />
      ` : html`<p>Page not found.</p>`}
    </main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}
  `;
}

render(html`<${App} />`, document.body);
