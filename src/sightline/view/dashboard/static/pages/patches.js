// An image at full size under a grid of its tokens.
import { html } from "../html.js";
import { useState } from "../vendor/hooks.mjs";
import { href } from "../address.js";
import { mediaUrl } from "../data.js";
import { Link } from "../parts.js";
import { bytes, plural } from "../formatting.js";

const MOST_CELLS = 12_000;

/** Rows and columns of tokens. A token covers `merge` by `merge` patches. */
export function cellsOf(slot) {
  const [frames, rows, columns] = slot.grid;
  const merge = Math.sqrt((frames * rows * columns) / slot.length);
  const down = rows / merge;
  const across = columns / merge;
  const fits = Number.isInteger(merge) && Number.isInteger(down) && Number.isInteger(across);
  return fits ? { rows: down, columns: across, merge } : null;
}

export function PatchedPicture({ run, part, patches, lit, light }) {
  const [broken, setBroken] = useState(false);
  const cells = part.slot ? cellsOf(part.slot) : null;
  // Enlarge small images, so that their patches are visible.
  const zoom = Math.max(1, Math.floor(160 / Math.max(part.width, part.height)));
  return html`
    <figure class="picture">
      ${part.missing || broken ? html`
        <div class="missing" style=${{ aspectRatio: `${part.width} / ${part.height}` }}>
          image missing<small>${part.image.slice(0, 16)}, ${part.width}×${part.height}</small>
        </div>
      ` : html`
        <div class="frame" style=${{ width: `${part.width * zoom}px` }}>
          <img
            src=${mediaUrl(run, part.image)} alt="image of ${part.width} by ${part.height} pixels" width=${part.width * zoom}
            class=${zoom > 1 ? "pixels" : ""} onError=${() => setBroken(true)}
          />
          ${cells && patches && html`<${Cells} cells=${cells} cover=${part.slot.cover} lit=${lit} light=${light} />`}
        </div>
      `}
      <figcaption>
        <${Link} to=${href("image", { run, digest: part.image })}>${part.image.slice(0, 12)}<//>
        <span>${part.width}×${part.height}</span>
        <span>${part.mime.replace("image/", "").toUpperCase()} ${bytes(part.nbytes)}</span>
        ${part.slot && html`
          <span>${plural(part.slot.length, "token")} from ${part.slot.offset}${cells ? `, ${cells.rows}×${cells.columns}` : ""}</span>
          <span title="processor ${part.slot.fingerprint}">${part.slot.grid[1]}×${part.slot.grid[2]} patches</span>
          ${part.slot.pixel_digest && html`<span title="digest of the pixels that the sampler used; the trainer's are compared with it">pixels ${part.slot.pixel_digest.slice(0, 8)}</span>`}
        `}
        ${part.slot && lit !== null && cells && html`<span class="lit">token ${lit + 1}: row ${Math.floor(lit / cells.columns) + 1}, column ${(lit % cells.columns) + 1}</span>`}
      </figcaption>
    </figure>
  `;
}

function Cells({ cells, cover, lit, light }) {
  const { rows, columns } = cells;
  // The image covers this share of the patches. The rest is padding.
  const width = columns * cover[0];
  const height = rows * cover[1];
  const at = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const column = Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * width));
    const row = Math.min(rows - 1, Math.floor(((event.clientY - box.top) / box.height) * height));
    light(row * columns + column);
  };
  const lines = [];
  if (rows * columns <= MOST_CELLS) {
    for (let row = 1; row < height; row += 1) lines.push(`M0 ${row}H${width}`);
    for (let column = 1; column < width; column += 1) lines.push(`M${column} 0V${height}`);
  }
  return html`
    <svg
      class="cells" viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" role="img"
      aria-label="${rows} by ${columns} tokens" onMouseMove=${at} onMouseLeave=${() => light(null)}
    >
      <path d=${lines.join("")} class="under" />
      <path d=${lines.join("")} class="over" />
      ${lit !== null && html`
        <rect x=${lit % columns} y=${Math.floor(lit / columns)} width="1" height="1" />
      `}
    </svg>
  `;
}
