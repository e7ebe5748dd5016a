// Templates: `html` turns markup into elements, in the browser and without a build.
import htm from "./vendor/htm.mjs";
import { h } from "./vendor/preact.mjs";

export const html = htm.bind(h);
