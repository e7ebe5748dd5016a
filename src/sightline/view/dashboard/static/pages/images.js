// Every distinct image of a run, and the rollouts that use it.
import { html } from "../html.js";
import { change, href } from "../address.js";
import { exported, mediaUrl, useAnswer } from "../data.js";
import { Fact, Failed, Link, OneRun, Pager, Picture } from "../parts.js";
import { bytes, whole } from "../formatting.js";
import { RolloutTable } from "./rollouts.js";

const LIMIT = 60;

export function ImagesPage({ runs, run, query, revisions }) {
  const page = Number(query.get("page") || 0);
  const sort = query.get("sort") || "most";
  const values = { run: run.key, sort, offset: page * LIMIT, limit: LIMIT, digest: query.get("digest") };
  const { answer, error } = useAnswer("images", values, [revisions[run.key]]);
  return html`
    <header class="head">
      <h1>Images</h1>
      <div class="tools asks-server">
        <${OneRun} runs=${runs} run=${run.key} />
        <input
          type="search" placeholder="digest   /" aria-label="digest" value=${query.get("digest") ?? ""}
          onChange=${(event) => change({ digest: event.target.value.trim().toLowerCase(), page: null })}
        />
        <select aria-label="order" value=${sort} onChange=${(event) => change({ sort: event.target.value, page: null })}>
          <option value="most">most used</option><option value="least">least used</option>
          <option value="largest">largest</option><option value="smallest">smallest</option>
        </select>
      </div>
    </header>
    <${Failed} error=${error} />
    ${answer && html`
      <p class="words">
        images: ${whole(answer.shown)} sent, ${whole(answer.total)} unique (${bytes(answer.nbytes)})${answer.missing ? html`, <b class="bad">${whole(answer.missing)} missing</b>` : ""}
      </p>
        <${Pager} offset=${answer.offset} limit=${LIMIT} total=${answer.total} noun="images" />
        <ul class="gallery">
          ${answer.rows.map((row) => html`
            <li key=${row.digest}>
              <${Link} to=${href("image", { run: run.key, digest: row.digest })}>
                <span class="tile"><${Picture} run=${run.key} digest=${row.digest} side=${192} missing=${row.missing} alt=${row.digest.slice(0, 12)} /></span>
                <b>${whole(row.num_shown)}×</b>
                <small>${row.width}×${row.height}, ${bytes(row.nbytes)}</small>
              <//>
            </li>
          `)}
        </ul>
    `}
  `;
}

export function ImagePage({ run, query, revisions }) {
  const digest = query.get("digest");
  const { answer, error } = useAnswer("image", { run: run.key, digest }, [revisions[run.key]]);
  if (!answer) return error ? html`<${Failed} error=${error} />` : html`<p class="loading">Loading …</p>`;
  const zoom = Math.max(1, Math.floor(240 / Math.max(answer.width, answer.height)));
  return html`
    <header class="head"><h1>Image <code>${digest.slice(0, 16)}</code></h1></header>
    <section class="one-image">
      ${answer.missing
        ? html`<div class="missing">image missing<small>no store holds ${digest}</small></div>`
        : answer.mime.startsWith("video/") && !exported
          ? html`<video src=${mediaUrl(run.key, digest)} width=${answer.width * zoom} controls muted loop preload="metadata" />`
        : html`<a href=${mediaUrl(run.key, digest)}><img src=${mediaUrl(run.key, digest)} width=${answer.width * zoom} class=${zoom > 1 ? "pixels" : ""} alt="" /></a>`}
      <dl class="facts">
        <${Fact} name="sent">${whole(answer.num_shown)}<small>times, in ${whole(answer.rollouts)} rollouts</small><//>
        <${Fact} name="steps">${answer.first_step ?? "–"} to ${answer.last_step ?? "–"}<//>
        <${Fact} name="size">${answer.width}×${answer.height}<//>
        <${Fact} name="file">${answer.mime.split("/")[1].toUpperCase()}<small>${bytes(answer.nbytes)}</small><//>
        <${Fact} name="digest"><code class="digest">${digest}</code><//>
      </dl>
    </section>
    ${!exported && html`
      <h2>Rollouts with this image</h2>
      <${RolloutTable} run=${run} filters=${{ image: digest }} page=${Number(query.get("page") || 0)} revision=${revisions[run.key]} />
    `}
  `;
}
