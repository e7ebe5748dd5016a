// The graph of a trace: nodes from top to bottom, one lane for each branch.
import { html } from "../html.js";
import { change } from "../address.js";
import { short } from "../formatting.js";

const ROW = 30;
const LANE = 22;
const MOST_ROWS = 400;

/** The place of every node: a row by its number, a lane by the first branch that contains it. */
function layout(rollout) {
  const lane = new Map();
  rollout.branches.forEach((path, i) => {
    for (const id of path) if (!lane.has(id)) lane.set(id, i);
  });
  return rollout.nodes.slice(0, MOST_ROWS).map((node, row) => ({
    node, row, x: 14 + LANE * Math.min(lane.get(node.id) ?? 0, 7), y: 16 + ROW * row,
  }));
}

export function Graph({ rollout, branch, path }) {
  const placed = layout(rollout);
  const places = new Map(placed.map((one) => [one.node.id, one]));
  const lanes = Math.min(8, rollout.branches.length);
  const on = new Set(path);
  const open = (id) => {
    const wanted = rollout.branches.findIndex((one) => one.includes(id));
    const next = rollout.branches[branch]?.includes(id) ? branch : wanted;
    change({ branch: next, node: null, token: null });
    requestAnimationFrame(() => document.getElementById(`node-${id}`)?.scrollIntoView({ block: "start" }));
  };
  return html`
    <aside class="graph" aria-label="trace graph">
      ${rollout.branches.length > 1 && html`
        <div class="branches">
          ${rollout.branches.map((one, i) => html`
            <button key=${i} aria-pressed=${i === branch} onClick=${() => change({ branch: i, node: null, token: null })}>
              branch ${i + 1}<small>${one.length} nodes</small>
            </button>
          `)}
        </div>
      `}
      <svg width=${220} height=${placed.length * ROW + 8} role="img" aria-label="${rollout.nodes.length} nodes, ${rollout.branches.length} branches">
        ${placed.map(({ node, x, y }) => {
          const parent = places.get(node.parent);
          if (!parent) return null;
          const through = on.has(node.id) && on.has(node.parent) ? "on" : "";
          const bend = parent.x === x ? `L${x} ${y}` : `C${parent.x} ${y - ROW * 0.3} ${x} ${parent.y + ROW * 0.3} ${x} ${y}`;
          return html`<path key=${node.id} class="edge ${through}" d="M${parent.x} ${parent.y}${bend}" />`;
        })}
        ${placed.map(({ node, x, y }) => html`
          <g
            key=${node.id} class="node r-${node.role} ${on.has(node.id) ? "on" : ""}" tabIndex=${0} role="link"
            onClick=${() => open(node.id)} onKeyDown=${(event) => event.key === "Enter" && open(node.id)}
          >
            <title>${`node ${node.id}, ${node.role}, ${node.num_tokens} tokens`}</title>
            <rect x="0" y=${y - ROW / 2} width="220" height=${ROW} class="hit" />
            ${node.num_sampled > 0
              ? html`<circle cx=${x} cy=${y} r="6" />`
              : html`<rect x=${x - 5} y=${y - 5} width="10" height="10" rx="2" />`}
            <text x=${14 + LANE * lanes} y=${y + 4}>
              ${node.role}
              ${node.parts.some((part) => part.image !== undefined) ? ` ▣${node.parts.filter((part) => part.image !== undefined).length}` : ""}
            </text>
            <text x="214" y=${y + 4} text-anchor="end" class="soft">
              ${node.advantage !== null && node.advantage !== 0 ? short(node.advantage) : node.num_tokens}
            </text>
          </g>
        `)}
      </svg>
      ${rollout.nodes.length > MOST_ROWS && html`<small>${rollout.nodes.length - MOST_ROWS} more nodes</small>`}
    </aside>
  `;
}
