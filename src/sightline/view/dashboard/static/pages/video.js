// A video: a file in a player, or a list of frames that are shown in turn.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.mjs";
import { href } from "../address.js";
import { exported, mediaUrl } from "../data.js";
import { Link } from "../parts.js";
import { fixed, plural } from "../formatting.js";

export function Film({ run, part }) {
  const zoom = Math.max(1, Math.floor(160 / Math.max(part.width, part.height)));
  const size = { width: part.width * zoom, height: part.height * zoom };
  const digest = part.video || part.frames[0]?.image;
  return html`
    <figure class="picture film">
      ${part.missing ? html`
        <div class="missing" style=${{ aspectRatio: `${part.width} / ${part.height}` }}>
          video missing<small>${digest?.slice(0, 16)}, ${part.width}×${part.height}</small>
        </div>
      ` : part.video && exported ? html`
        <img ...${size} src=${mediaUrl(run, part.video)} alt="the first frame" />
      ` : part.video ? html`
        <video ...${size} src=${mediaUrl(run, part.video)} controls muted loop preload="metadata" />
      ` : html`<${Frames} run=${run} frames=${part.frames} size=${size} />`}
      <figcaption>
        <${Link} to=${href("image", { run, digest })}>${digest?.slice(0, 12)}<//>
        <span>${part.width}×${part.height}</span>
        <span>${plural(part.num_frames, "frame")}${part.fps ? `, ${fixed(part.fps, 1)} per second` : ""}</span>
        <span>${plural(part.num_steps, "step")} of ${plural(part.num_tokens, "token")}</span>
      </figcaption>
    </figure>
  `;
}

function Frames({ run, frames, size }) {
  const [at, setAt] = useState(0);
  const [plays, setPlays] = useState(false);
  useEffect(() => {
    if (!plays) return undefined;
    const next = (at + 1) % frames.length;
    const seconds = next ? frames[next].seconds - frames[at].seconds : 1;
    const timer = setTimeout(() => setAt(next), 1000 * Math.min(Math.max(seconds, 0.05), 3));
    return () => clearTimeout(timer);
  }, [plays, at]);
  return html`
    <div class="frame">
      <img
        ...${size} class="pixels" src=${mediaUrl(run, frames[at].image)}
        alt="frame ${at + 1} of ${frames.length}, at ${fixed(frames[at].seconds, 1)} seconds"
      />
      <div class="player">
        <button aria-pressed=${plays} onClick=${() => setPlays(!plays)}>${plays ? "pause" : "play"}</button>
        <input
          type="range" min="0" max=${frames.length - 1} value=${at} aria-label="frame"
          onInput=${(event) => { setPlays(false); setAt(Number(event.target.value)); }}
        />
        <small>${fixed(frames[at].seconds, 1)} s</small>
      </div>
    </div>
  `;
}
