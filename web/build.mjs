// Bundles the dashboard into the folder of the Python package that serves it.
import { build } from "esbuild";
import { cp, mkdir, rm } from "node:fs/promises";

const out = "../src/sightline/view/dashboard/static";
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
await build({
  entryPoints: { app: "src/main.jsx" },
  outdir: out,
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "eof",
  jsx: "automatic",
  jsxImportSource: "preact",
  logLevel: "warning",
});
await cp("src/index.html", `${out}/index.html`);
await cp("src/icon.svg", `${out}/icon.svg`);
