// A uPlot chart with its own legend. All charts of a page share cursor and zoom.
import { html } from "./html.js";
import { useEffect, useRef } from "./vendor/hooks.mjs";
import uPlot from "./vendor/uPlot.esm.js";
import { clock, duration, short } from "./formatting.js";

const sync = uPlot.sync("steps");

function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function runColour(index) {
  return token(`--run-${index % 8}`);
}

/** The mean of the window that ends at each point. Gaps remain. */
export function smoothed(values, window) {
  if (window <= 1) return values;
  const recent = [];
  let sum = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    recent.push(value);
    sum += value;
    if (recent.length > window) sum -= recent.shift();
    return sum / recent.length;
  });
}

/** Ticks on whole numbers. */
function wholeNumbers(u, axis, low, high, increment) {
  const stride = Math.max(1, Math.round(increment));
  const found = [];
  for (let at = Math.ceil(low / stride) * stride; at <= high; at += stride) found.push(at);
  return found;
}

/** Ticks on a few powers of ten. */
function decades(u, axis, low, high) {
  const first = Math.ceil(Math.log10(low));
  const last = Math.floor(Math.log10(high));
  const stride = Math.max(1, Math.ceil((last - first + 1) / 5));
  const found = [];
  for (let power = first; power <= last; power += stride) found.push(10 ** power);
  return found.length ? found : [low, high];
}

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** The kinds of x-axis: how values are formatted, and the steps between grid lines. */
export const AXES = {
  step: { title: "step", format: short, at: (x) => `step ${x}` },
  time: { title: "wall clock", format: clock, at: duration, incrs: SECONDS },
  tokens: { title: "tokens", format: short, at: (x) => `${short(x)} tokens` },
};

/**
 * `series`: {label, colour, values, dash, faint, points}; `x`: the places on `axis`, ascending.
 * `range` is the visible part of the axis; `onZoom` changes it.
 */
export function Chart({ title, note, x, axis: axisName = "step", series, log, fromZero, range, onZoom, height = 168, theme }) {
  const place = useRef(null);
  const legend = useRef(null);
  const plot = useRef(null);
  const latest = useRef({});
  latest.current = { x, series, onZoom };
  const shape = JSON.stringify([
    series.map((one) => [one.label, one.colour, one.dash, one.faint, one.points]), log, fromZero, theme, axisName,
  ]);

  const data = () => {
    const { x: steps, series: all } = latest.current;
    const clean = (value) => (value === undefined || (log && !(value > 0)) ? null : value);
    return [steps, ...all.map((one) => one.values.map(clean))];
  };

  const describe = (index) => {
    const { series: all, x: steps } = latest.current;
    if (!legend.current) return;
    legend.current.replaceChildren(
      ...all.filter((one) => !one.faint).map((one) => {
        const item = document.createElement("span");
        const mark = document.createElement("i");
        mark.style.background = one.colour;
        if (one.dash) mark.className = "dash";
        let at = index;
        if (at === null || at === undefined) {
          at = one.values.length - 1;
          while (at > 0 && (one.values[at] === null || one.values[at] === undefined)) at -= 1;
        }
        const value = document.createElement("b");
        value.textContent = short(one.values[at] ?? null);
        item.append(mark, one.label, " ", value);
        return item;
      }),
    );
    if (index !== null && index !== undefined) {
      const item = document.createElement("span");
      item.className = "at";
      item.textContent = AXES[axisName].at(steps[index]);
      legend.current.append(item);
    }
  };

  useEffect(() => {
    const axis = {
      stroke: token("--soft"),
      grid: { stroke: token("--line"), width: 1 },
      ticks: { show: false },
      font: `11px ${token("--sans")}`,
    };
    const made = new uPlot(
      {
        width: place.current.clientWidth,
        height,
        padding: [8, 16, 0, 0],
        legend: { show: false },
        cursor: {
          sync: { key: sync.key, setSeries: false },
          drag: { x: true, y: false, setScale: false },
          points: { size: 6 },
          y: false,
        },
        scales: {
          x: { time: false },
          y: log ? { distr: 3 } : fromZero ? { range: (u, low, high) => uPlot.rangeNum(Math.min(0, low ?? 0), high > 0 ? high : 1, 0.08, true) } : {},
        },
        axes: [
          {
            ...axis, size: 26, space: 56, values: (u, ticks) => ticks.map((v) => AXES[axisName].format(v)),
            ...(AXES[axisName].incrs ? { incrs: AXES[axisName].incrs } : { splits: wholeNumbers }),
          },
          { ...axis, size: 52, space: 26, ...(log ? { splits: decades, filter: (u, ticks) => ticks } : {}), values: (u, ticks) => ticks.map((v) => (v === null ? "" : short(v))) },
        ],
        series: [
          {},
          ...series.map((one) => ({
            label: one.label,
            stroke: one.faint ? `${one.colour}55` : one.colour,
            width: one.faint ? 1 : 1.6,
            dash: one.dash ? [5, 4] : undefined,
            spanGaps: true,
            points: one.points ? { show: true, size: 7, fill: one.colour } : { show: false },
            paths: one.points ? () => null : undefined,
          })),
        ],
        hooks: {
          setCursor: [(u) => describe(u.cursor.idx)],
          setSelect: [(u) => {
            if (u.select.width > 4 && u.cursor.event) {
              const low = u.posToVal(u.select.left, "x");
              const high = u.posToVal(u.select.left + u.select.width, "x");
              u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              latest.current.onZoom?.([Math.floor(low), Math.ceil(high)]);
            }
          }],
        },
      },
      data(),
      place.current,
    );
    plot.current = made;
    sync.sub(made);
    const reset = () => latest.current.onZoom?.(null);
    made.over.addEventListener("dblclick", reset);
    const watch = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width && width !== made.width) made.setSize({ width, height });
    });
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      sync.unsub(made);
      made.destroy();
    };
  }, [shape]);

  useEffect(() => {
    plot.current.setData(data(), false);
    const low = range ? range[0] : (x[0] ?? 0);
    const high = range ? range[1] : (x.at(-1) ?? 1);
    plot.current.batch(() => {
      plot.current.setScale("x", { min: low, max: high === low ? low + 1 : high });
    });
    describe(plot.current.cursor.idx);
  });

  return html`
    <figure class="chart">
      <figcaption>
        <h3>${title}</h3>
        ${note && html`<small>${note}</small>`}
        <div class="legend" ref=${legend} />
      </figcaption>
      <div ref=${place} class="plot" />
    </figure>
  `;
}
