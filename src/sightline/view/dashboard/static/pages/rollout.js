// One rollout: its messages and images, its graph of nodes, and every token.
import { html } from "../html.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/hooks.mjs";
import { change, go, href } from "../address.js";
import { ask, useAnswer } from "../data.js";
import { useKeys } from "../keys.js";
import { Bar, Fact, Failed, Link, Verdict } from "../parts.js";
import { duration, fixed, plural, short, whole, words } from "../formatting.js";
import { Graph } from "./graph.js";
import { PatchedPicture } from "./patches.js";
import { Film } from "./video.js";
import { TOKEN_COLOURS, Tokens } from "./tokens.js";
import { rolloutHref } from "./rollouts.js";

export function RolloutPage({ run, query, revisions }) {
  const file = query.get("file");
  const number = query.get("number");
  const lacks = useRef(true);
  // Ask again until the rollout exists: a link may name one that is not written or indexed yet.
  const { answer, error } = useAnswer("rollout", { run: run.key, file, number }, [lacks.current && revisions[run.key]]);
  lacks.current = !answer;
  if (!answer) return error ? html`<${Failed} error=${error} />` : html`<p class="loading">Loading …</p>`;
  return html`<${Rollout} key="${file}/${number}" run=${run} rollout=${answer} query=${query} />`;
}

function branchOf(rollout, query) {
  const node = query.get("node");
  const named = Number(query.get("branch"));
  if (query.has("branch") && rollout.branches[named]) return named;
  if (node !== null) {
    const found = rollout.branches.findIndex((path) => path.includes(Number(node)));
    if (found >= 0) return found;
  }
  // By default, the longest branch.
  return rollout.branches.reduce((best, path, i, all) => (path.length > all[best].length ? i : best), 0);
}

function useRolloutKeys(run, rollout, patches) {
  const { before, after } = rollout.neighbours;
  useKeys((event) => {
    const to = (number) => number !== null && go(rolloutHref(run.key, { file: rollout.file, number }));
    if (event.key === "n") to(after);
    else if (event.key === "p") to(before);
    else if (event.key === "Escape") go(href("rollouts", { run: run.key }));
    else if (event.key === "g") change({ patches: patches ? "off" : null });
    else if (event.key === "j" || event.key === "k") {
      const cards = [...document.querySelectorAll("article.message")];
      const at = cards.findIndex((card) => card.getBoundingClientRect().top > 60);
      const now = at < 0 ? cards.length : at;
      cards[Math.max(0, Math.min(cards.length - 1, event.key === "j" ? now + (cards[now]?.getBoundingClientRect().top < 90 ? 1 : 0) : now - 1))]
        ?.scrollIntoView({ block: "start", behavior: "smooth" });
    }
  });
}

function Rollout({ run, rollout, query }) {
  const branch = branchOf(rollout, query);
  const path = rollout.branches[branch] ?? [];
  const colour = query.get("colour") || "probability";
  const patches = query.get("patches") !== "off";
  useRolloutKeys(run, rollout, patches);
  const [lit, setLit] = useState(null);
  const { before, after } = rollout.neighbours;
  const step = (number, title, key) => (
    number === null
      ? html`<button disabled title=${key}>${title}</button>`
      : html`<${Link} class="button" title=${key} to=${rolloutHref(run.key, { file: rollout.file, number })}>${title}<//>`
  );
  return html`
    <header class="head">
      <h1>
        ${rollout.id} <${Verdict} name=${rollout.verdict} />
      </h1>
      <div class="tools">
        <label>
          colour tokens by${" "}
          <select value=${colour} onChange=${(event) => change({ colour: event.target.value })}>
            ${Object.entries(TOKEN_COLOURS).map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}
          </select>
        </label>
        <label>
          <input
            type="checkbox" checked=${patches}
            onChange=${(event) => change({ patches: event.target.checked ? null : "off" })}
          />${" "}
          patches <kbd>g</kbd>
        </label>
        ${step(before, "‹", "previous (p)")}${step(after, "›", "next (n)")}
      </div>
    </header>
    <${Facts} run=${run} rollout=${rollout} />
    ${rollout.error && html`<pre class="failed" role="alert">${rollout.error}</pre>`}
    <div class="rollout">
      <${Graph} rollout=${rollout} branch=${branch} path=${path} />
      <div class="conversation">
        ${rollout.toolsets.map((toolset, i) => html`
          <details key=${i} class="toolset"><summary>tools${rollout.toolsets.length > 1 ? ` ${i + 1}` : ""}</summary><pre>${pretty(toolset)}</pre></details>
        `)}
        ${path.map((id) => html`
          <${MessageCard}
            key=${id} run=${run} rollout=${rollout} node=${rollout.nodes[id]} colour=${colour} patches=${patches}
            lit=${lit?.node === id ? lit : null} light=${setLit}
            wanted=${query.get("node") === String(id) ? Number(query.get("token") ?? -1) : null}
          />
        `)}
      </div>
    </div>
  `;
}

function pretty(text) {
  try {
    const read = JSON.parse(text);
    const line = JSON.stringify(read);
    return line.length < 90 ? line : JSON.stringify(read, null, 2);
  } catch {
    return text;
  }
}

function Facts({ run, rollout }) {
  const parts = Object.entries(rollout.rewards);
  const high = Math.max(1, ...parts.map(([, value]) => value ?? 0));
  const siblings = rollout.neighbours.siblings;
  return html`
    <section class="summary">
      <dl class="facts">
        <${Fact} name="reward"><b>${fixed(rollout.reward, 3)}</b><//>
        ${parts.map(([name, value]) => html`<${Fact} key=${name} name=${words(name)}><${Bar} value=${value} high=${high} /><//>`)}
        <${Fact} name="step">
          ${rollout.step === null ? rollout.file.replace(".msgpack", "")
            : html`<${Link} to=${href("rollouts", { run: run.key, step_from: rollout.step, step_to: rollout.step })}>${rollout.step}<//>`}
        <//>
        <${Fact} name="environment">${rollout.env || "–"}<//>
        <${Fact} name="task" title="seed ${rollout.seed}">${rollout.task}<small>${rollout.split}</small><//>
        <${Fact} name="lag">${rollout.lag ?? "–"}<//>
        <${Fact} name="KL">${short(rollout.kl)}<//>
        <${Fact} name="temperature">${rollout.temperature}<//>
        <${Fact} name="seconds">${duration(rollout.seconds)}<//>
        ${Object.entries(rollout.forks).map(([reason, number]) => html`<${Fact} key=${reason} name="fork: ${words(reason)}">${number}<//>`)}
        ${rollout.truncated && html`<${Fact} name="ended by"><span class="bad">limit</span><//>`}
        ${rollout.door_errors.length > 0 && html`<${Fact} name="refused requests"><span class="bad">${rollout.door_errors.length}</span><//>`}
      </dl>
      ${siblings.length > 1 && html`
        <nav class="siblings" aria-label="group">
          <${Link} to=${href("rollouts", { run: run.key, group: rollout.group })}>group ${rollout.group}<//>
          ${siblings.map((one) => html`
            <${Link}
              key=${one.number} to=${rolloutHref(run.key, one)} title="${one.trace_id}, ${one.verdict || "not judged"}"
              aria-current=${one.number === rollout.number ? "true" : undefined}
            >
              ${fixed(one.reward)}
            <//>
          `)}
        </nav>
      `}
    </section>
  `;
}

function MessageCard({ run, rollout, node, colour, patches, lit, light, wanted }) {
  const card = useRef(null);
  const [open, setOpen] = useState(node.num_sampled > 0 || wanted !== null);
  useEffect(() => {
    if (wanted !== null) {
      setOpen(true);
      card.current.scrollIntoView({ block: "start" });
    }
  }, [wanted]);
  let slot = -1;
  return html`
    <article class="message r-${node.role} ${node.num_sampled ? "sampled" : ""}" id="node-${node.id}" ref=${card}>
      <header>
        <b>${node.role}</b>
        <small>node ${node.id}</small>
        <small>${plural(node.num_tokens, "token")}${node.num_visual ? `, ${whole(node.num_visual)} of images` : ""}${node.num_sampled ? `, ${whole(node.num_sampled)} sampled` : ""}</small>
        ${node.finish_reason && html`<small>ended by ${node.finish_reason}</small>`}
        ${node.versions.length > 0 && html`<small>version ${[...new Set(node.versions.map(([version]) => version))].join(", ")}</small>`}
        ${node.credit !== null && html`<small>credit <b>${short(node.credit)}</b></small>`}
        ${node.advantage !== null && html`<small class=${node.advantage > 0 ? "up" : node.advantage < 0 ? "down" : ""}>advantage <b>${short(node.advantage)}</b></small>`}
        ${node.kl !== null && html`<small>KL <b>${short(node.kl)}</b></small>`}
        ${node.num_sampled > 0 && !node.trained && rollout.step !== null && html`<small>not trained</small>`}
        <button class="quiet" aria-expanded=${open} onClick=${() => setOpen(!open)}>tokens</button>
      </header>
      ${node.reasoning && html`<details class="reasoning" open><summary>reasoning</summary><p class="text">${node.reasoning}</p></details>`}
      ${node.parts.map((part, i) => {
        if (part.video !== undefined) {
          slot += part.num_steps;
          return html`<${Film} key=${i} run=${run.key} part=${part} />`;
        }
        if (part.image === undefined) {
          return html`<p key=${i} class="text">${part.text}${part.cut && html`<small class="bad"> … cut</small>`}</p>`;
        }
        slot += 1;
        const mine = slot;
        return html`
          <${PatchedPicture}
            key=${i} run=${run.key} part=${part} patches=${patches} lit=${lit?.slot === mine ? lit.cell : null}
            light=${(cell) => light(cell === null ? null : { node: node.id, slot: mine, cell })}
          />
        `;
      })}
      ${node.tool_calls.map((call, i) => html`
        <div key=${i} class="call"><b>${call.name}</b><pre>${pretty(call.arguments)}</pre></div>
      `)}
      ${open && html`
        <${Tokens}
          run=${run.key} rollout=${rollout} node=${node} colour=${colour} wanted=${wanted} lit=${lit}
          light=${(where) => light(where === null ? null : { node: node.id, ...where })}
        />
      `}
    </article>
  `;
}
