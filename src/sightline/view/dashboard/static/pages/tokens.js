// Every token of a node, with the logprobs of sampler and trainer.
import { html } from "../html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.mjs";
import { change } from "../address.js";
import { ask } from "../data.js";
import { Failed } from "../parts.js";
import { short, whole } from "../formatting.js";

export const TOKEN_COLOURS = {
  probability: "probability", ratio: "ratio", kl: "KL", advantage: "advantage", version: "version", none: "none",
};

/** The scores of the sampled token at `place`, counted from the first sampled one. */
function scoreOf(page, place) {
  const sampler = page.logprobs[place];
  const trainer = page.trainer?.[place] ?? null;
  const log = trainer === null || sampler === null ? null : trainer - sampler;
  return {
    sampler,
    trainer,
    ratio: page.ratios?.[place] ?? null,
    advantage: page.advantages?.[place] ?? null,
    version: page.versions[place],
    kl: log === null ? null : Math.expm1(log) - log,
  };
}

/** A class and a strength from 0 to 1. The style sheet has the colours for light and dark. */
function shade(score, colour) {
  switch (colour) {
    case "probability":
      return ["c-rare", 1 - Math.exp(Math.min(0, score.sampler ?? 0))];
    case "ratio": {
      const log = score.ratio > 0 ? Math.log(score.ratio) : 0;
      return [log > 0 ? "c-up" : "c-down", Math.min(1, Math.abs(log) * 4)];
    }
    case "kl":
      return ["c-kl", score.kl > 0 ? Math.max(0, Math.min(1, 1 + Math.log10(score.kl) / 8)) : 0];
    case "advantage":
      return [score.advantage > 0 ? "c-up" : "c-down", Math.min(1, Math.abs(score.advantage ?? 0))];
    case "version":
      return [`c-version-${score.version % 4}`, 0.6];
    default:
      return ["", 0];
  }
}

function visible(text, id) {
  if (text === null) return `#${id}`;
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
}

export function Tokens({ run, rollout, node, colour, wanted, lit, light }) {
  const [pages, setPages] = useState([]);
  const [error, setError] = useState(null);
  const [hover, setHover] = useState(null);
  const place = useRef(null);
  const fetchFrom = (start) => ask("tokens", {
    run, file: rollout.file, number: rollout.number, node: node.id, start,
  }).then((page) => setPages((known) => [...known, page]), setError);
  useEffect(() => {
    // Fetch tokens when they scroll into view.
    const watch = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        watch.disconnect();
        fetchFrom(0);
      }
    }, { rootMargin: "400px" });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (wanted !== null && wanted >= 0) place.current.querySelector(".wanted")?.scrollIntoView({ block: "center" });
  }, [pages.length]);
  const last = pages.at(-1);
  const shown = last ? last.start + last.ids.length : 0;
  return html`
    <div class="tokens" ref=${place} onMouseLeave=${() => { setHover(null); light(null); }}>
      <${Failed} error=${error} />
      <div class="strip">
        ${pages.flatMap((page) => spans(page, { colour, wanted, lit, node, setHover, light }))}
        ${pages.length === 0 && !error && html`<span class="soft">…</span>`}
      </div>
      ${last && shown < last.total && html`
        <button onClick=${() => fetchFrom(shown)}>${whole(last.total - shown)} more tokens</button>
      `}
      ${hover && html`<${Detail} ...${hover} />`}
    </div>
  `;
}

function spans(page, { colour, wanted, lit, node, setHover, light }) {
  const found = [];
  for (let i = 0; i < page.ids.length; i += 1) {
    const at = page.start + i;
    const slot = page.slots.findIndex(([offset, length]) => at >= offset && at < offset + length);
    if (slot >= 0) {
      const [offset, length, digest] = page.slots[slot];
      const stop = Math.min(page.ids.length, offset + length - page.start);
      found.push(
        html`<${SlotTokens}
          key=${at} slot=${slot} length=${length} digest=${digest} lit=${lit?.slot === slot ? lit.cell : null}
          light=${light} setHover=${setHover} first=${offset}
        />`,
      );
      i = stop - 1;
      continue;
    }
    const sampled = at >= page.sampled_start;
    const id = page.ids[i];
    if (!sampled) {
      found.push(
        html`<span key=${at} class="token context" onMouseEnter=${() => { setHover({ id, at, text: page.texts[i], kind: "context" }); light(null); }}>
          ${visible(page.texts[i], id)}
        </span>`,
      );
      continue;
    }
    const place = at - Math.max(page.sampled_start, page.start);
    const score = scoreOf(page, place);
    const [name, strength] = shade(score, colour);
    const mine = at - page.sampled_start;
    found.push(
      html`<span
        key=${at} tabIndex=${0} data-place=${mine}
        class="token sampled ${name} ${mine === wanted ? "wanted" : ""}" style=${{ "--strength": strength.toFixed(3) }}
        onMouseEnter=${() => { setHover({ id, at, text: page.texts[i], kind: "sampled", ...score }); light(null); }}
        onFocus=${() => setHover({ id, at, text: page.texts[i], kind: "sampled", ...score })}
        onClick=${() => change({ node: node.id, token: mine })}
      >
        ${visible(page.texts[i], id)}
      </span>`,
    );
  }
  return found;
}

/** The tokens of an image, drawn as a few cells. */
function SlotTokens({ slot, length, digest, lit, light, setHover, first }) {
  const most = Math.min(length, 24);
  const say = (cell) => {
    light({ slot, cell });
    setHover({ kind: "image", at: first + cell, text: `token ${cell + 1} of ${length} of image ${digest.slice(0, 12)}` });
  };
  return html`
    <span class="slot" title="${length} tokens of image ${digest.slice(0, 12)}">
      ${Array.from({ length: most }, (_, i) => {
        const from = Math.floor((i * length) / most);
        const to = Math.floor(((i + 1) * length) / most);
        return html`<i key=${i} class=${lit !== null && lit >= from && lit < to ? "lit" : ""} onMouseEnter=${() => say(from)} />`;
      })}
      <small>${whole(length)}</small>
    </span>
  `;
}

function Detail({ id, at, text, kind, sampler, trainer, ratio, kl, advantage, version }) {
  const probability = sampler === undefined || sampler === null ? null : Math.exp(sampler);
  return html`
    <dl class="detail">
      <div class="token-text"><dt>${kind}</dt><dd><code>${text === null ? "no tokenizer" : JSON.stringify(text)}</code></dd></div>
      ${id !== undefined && html`<div><dt>id</dt><dd>${id}</dd></div>`}
      <div><dt>place</dt><dd>${at}</dd></div>
      ${kind === "sampled" && html`
        <div><dt>probability</dt><dd>${probability === null ? "–" : `${(100 * probability).toPrecision(3)}%`}</dd></div>
        <div><dt>sampler</dt><dd>${short(sampler)}</dd></div>
        <div><dt>trainer</dt><dd>${short(trainer)}</dd></div>
        <div><dt>ratio</dt><dd>${ratio === null ? "–" : ratio.toPrecision(6)}</dd></div>
        <div><dt>KL</dt><dd>${short(kl)}</dd></div>
        <div><dt>advantage</dt><dd>${short(advantage)}</dd></div>
        <div><dt>version</dt><dd>${version}</dd></div>
      `}
    </dl>
  `;
}
