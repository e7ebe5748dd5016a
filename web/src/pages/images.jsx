// Every distinct image of a run, and where one is used.
import { change, href } from "../address.jsx";
import { useAnswer } from "../data.js";
import { Fact, Failed, Link, OneRun, Pager, Picture } from "../parts.jsx";
import { bytes, whole } from "../formatting.js";
import { RolloutTable } from "./rollouts.jsx";

const LIMIT = 60;

export function ImagesPage({ runs, run, query, revisions }) {
  const page = Number(query.get("page") || 0);
  const sort = query.get("sort") || "most";
  const values = { run: run.key, sort, offset: page * LIMIT, limit: LIMIT, digest: query.get("digest") };
  const { answer, error } = useAnswer("images", values, [revisions[run.key]]);
  return (
    <>
      <header class="head">
        <h1>Images</h1>
        <div class="tools">
          <OneRun runs={runs} run={run.key} />
          <input
            type="search" placeholder="digest   /" aria-label="digest" value={query.get("digest") ?? ""}
            onChange={(event) => change({ digest: event.target.value.trim().toLowerCase(), page: null })}
          />
          <select aria-label="order" value={sort} onChange={(event) => change({ sort: event.target.value, page: null })}>
            <option value="most">most shown</option><option value="least">least shown</option>
            <option value="largest">largest</option><option value="smallest">smallest</option>
          </select>
        </div>
      </header>
      <Failed error={error} />
      {answer && (
        <>
          <p class="words">
            {whole(answer.shown)} times an image was shown; {whole(answer.total)} are distinct, {bytes(answer.nbytes)} in all,
            each stored once.{answer.missing ? <b class="bad"> {whole(answer.missing)} are in no store.</b> : ""}
          </p>
          <Pager offset={answer.offset} limit={LIMIT} total={answer.total} noun="images" />
          <ul class="gallery">
            {answer.rows.map((row) => (
              <li key={row.digest}>
                <Link to={href("image", { run: run.key, digest: row.digest })}>
                  <span class="tile"><Picture run={run.key} digest={row.digest} side={192} missing={row.missing} alt={row.digest.slice(0, 12)} /></span>
                  <b>{whole(row.num_shown)}×</b>
                  <small>{row.width}×{row.height}, {bytes(row.nbytes)}</small>
                </Link>
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  );
}

export function ImagePage({ run, query, revisions }) {
  const digest = query.get("digest");
  const { answer, error } = useAnswer("image", { run: run.key, digest }, [revisions[run.key]]);
  if (!answer) return error ? <Failed error={error} /> : <p class="loading">reading …</p>;
  const zoom = Math.max(1, Math.floor(240 / Math.max(answer.width, answer.height)));
  return (
    <>
      <header class="head"><h1>Image <code>{digest.slice(0, 16)}</code></h1></header>
      <section class="one-image">
        {answer.missing
          ? <div class="missing">image missing<small>no store holds {digest}</small></div>
          : answer.mime.startsWith("video/")
            ? <video src={`/media/${encodeURIComponent(run.key)}/${digest}`} width={answer.width * zoom} controls muted loop preload="metadata" />
          : <a href={`/media/${encodeURIComponent(run.key)}/${digest}`}><img src={`/media/${encodeURIComponent(run.key)}/${digest}`} width={answer.width * zoom} class={zoom > 1 ? "pixels" : ""} alt="" /></a>}
        <dl class="facts">
          <Fact name="shown">{whole(answer.num_shown)}<small>times, in {whole(answer.rollouts)} rollouts</small></Fact>
          <Fact name="steps">{answer.first_step ?? "–"} to {answer.last_step ?? "–"}</Fact>
          <Fact name="size">{answer.width}×{answer.height}</Fact>
          <Fact name="file">{answer.mime.split("/")[1].toUpperCase()}<small>{bytes(answer.nbytes)}</small></Fact>
          <Fact name="digest"><code class="digest">{digest}</code></Fact>
        </dl>
      </section>
      <h2>Where it is used</h2>
      <RolloutTable run={run} filters={{ image: digest }} page={Number(query.get("page") || 0)} revision={revisions[run.key]} />
    </>
  );
}
