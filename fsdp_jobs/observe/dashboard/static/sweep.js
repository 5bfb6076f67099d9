// Charts of a sweep: all keys together, one line per job, and the objective over each key. What runs and users have
// written becomes text nodes only.

const SVG = "http://www.w3.org/2000/svg";
const TICKS = 6; // labelled values of a numeric axis
const LETTERS = 22; // of the label of a word

function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The axis of a key: numbers as they are or by their logarithm, words side by side; places from 0 to 1.
export function scaleOf(key, values) {
  const written = [...new Set(values)];
  if (!written.every((value) => value.trim() !== "" && Number.isFinite(Number(value)))) {
    const placeOf = (value) => (written.length > 1 ? written.indexOf(value) / (written.length - 1) : 0.5);
    const short = (word) => (word.length > LETTERS ? `${word.slice(0, LETTERS - 3)}...` : word);
    return { title: key, placeOf, ticks: written.map((value) => [placeOf(value), short(value)]) };
  }
  const numbers = [...new Set(written.map(Number))].sort((a, b) => a - b);
  const [low, high] = [numbers[0], numbers.at(-1)];
  const isLog = low > 0 && high / low >= 10;
  const [bend, unbend] = isLog ? [Math.log10, (x) => 10 ** x] : [(x) => x, (x) => x];
  const span = bend(high) - bend(low);
  const placeOf = (value) => (span ? (bend(Number(value)) - bend(low)) / span : 0.5);
  const shown = numbers.length <= TICKS ? numbers
    : Array.from({ length: TICKS }, (_, i) => unbend(bend(low) + (i * span) / (TICKS - 1)));
  const digits = numbers.length <= TICKS ? 6 : 4;
  return { title: isLog ? `${key} (log)` : key, placeOf, ticks: shown.map((x) => [placeOf(x), `${Number(x.toPrecision(digits))}`]) };
}

// The best of the jobs that are done, or of all if none is.
export function bestOf(sweep) {
  const measured = sweep.rows.filter((row) => row.objective !== null);
  const done = measured.filter((row) => row.state === "done");
  const sign = sweep.direction === "minimize" ? 1 : -1;
  return (done.length ? done : measured).reduce((a, b) => (a && sign * (a.objective - b.objective) <= 0 ? a : b), null);
}

const inWords = (sweep, row) => `${row.run}: ${sweep.objective} ${Number(row.objective.toPrecision(5))}, ${row.overrides.join(" ")}`;

function parallel(sweep, rows, scales, best) {
  const [width, height, top, left] = [1000, 320, 30, 16];
  const objective = scaleOf(sweep.objective, rows.map((row) => `${row.objective}`));
  const axes = [...scales.map((scale) => ({ ...scale, valueOf: (row) => row.values[scale.key] })), { ...objective, valueOf: (row) => `${row.objective}` }];
  const x = (i) => left + (i * (width - left - 90)) / Math.max(1, axes.length - 1);
  const y = (place) => top + (1 - place) * (height - top - 16);
  const chart = draw("svg", { viewBox: `0 0 ${width} ${height}`, class: "sweep", role: "img", "aria-label": `All keys together: one line per job, ${rows.length} jobs; the table has the numbers` });
  for (const row of [...rows].sort((a, b) => (a === best) - (b === best))) {
    const good = sweep.direction === "minimize" ? 1 - objective.placeOf(row.objective) : objective.placeOf(row.objective);
    const points = axes.map((axis, i) => `${x(i)},${y(axis.placeOf(axis.valueOf(row)))}`).join(" ");
    const shade = row === best ? { class: "best" } : { stroke: `hsl(${30 + 190 * good} 65% 50%)` };
    chart.append(draw("polyline", { points, fill: "none", "stroke-width": row === best ? 3.5 : 1.4, ...shade }, draw("title", {}, inWords(sweep, row))));
  }
  axes.forEach((axis, i) => {
    chart.append(draw("line", { x1: x(i), x2: x(i), y1: y(1), y2: y(0), class: "axis" }));
    chart.append(draw("text", { x: x(i) - (i ? 0 : left), y: 14, "text-anchor": i ? "middle" : "start", class: "name" }, axis.title));
    for (const [place, label] of axis.ticks) chart.append(draw("text", { x: x(i) + 5, y: y(place) + 4 }, label));
  });
  return chart;
}

function overKey(sweep, rows, scale, best) {
  const [width, height, left, bottom] = [320, 220, 70, 26];
  const objective = scaleOf(sweep.objective, rows.map((row) => `${row.objective}`));
  const x = (place) => left + 12 + place * (width - left - 40);
  const y = (place) => 30 + (1 - place) * (height - bottom - 46);
  const chart = draw("svg", { viewBox: `0 0 ${width} ${height}`, class: "sweep", role: "img", "aria-label": `${sweep.objective} over ${scale.key}` });
  chart.append(draw("text", { x: left, y: 14, class: "name" }, scale.title));
  chart.append(draw("path", { d: `M${left} 22V${height - bottom}H${width - 8}`, class: "axis", fill: "none" }));
  for (const [place, label] of scale.ticks) chart.append(draw("text", { x: x(place), y: height - 8, "text-anchor": place > 0.8 ? "end" : place < 0.2 ? "start" : "middle" }, label));
  for (const [place, label] of objective.ticks.filter((_, i, all) => i === 0 || i === all.length - 1)) {
    chart.append(draw("text", { x: left - 5, y: y(place) + 4, "text-anchor": "end" }, label));
  }
  for (const row of [...rows].sort((a, b) => (a === best) - (b === best))) {
    const place = { cx: x(scale.placeOf(row.values[scale.key])), cy: y(objective.placeOf(row.objective)) };
    const kind = row === best ? "best dot" : row.state === "done" ? "dot" : "ring";
    chart.append(draw("circle", { ...place, r: row === best ? 6 : 4, class: kind }, draw("title", {}, inWords(sweep, row))));
  }
  return chart;
}

export function drawSweep(place, sweep) {
  const rows = sweep.rows.filter((row) => row.objective !== null);
  const scales = sweep.keys.map((key) => [key, rows.map((row) => row.values[key]).filter((value) => value !== undefined)])
    .filter(([, values]) => values.length).map(([key, values]) => ({ key, ...scaleOf(key, values) }));
  const complete = rows.filter((row) => scales.every((scale) => row.values[scale.key] !== undefined));
  const [heading, best, small] = [(text) => Object.assign(document.createElement("h2"), { textContent: text }), bestOf(sweep), document.createElement("div")];
  place.replaceChildren();
  if (scales.length >= 2 && complete.length) place.append(heading("All keys together: one line per job"), parallel(sweep, complete, scales, best));
  if (!scales.length) return;
  small.className = "small";
  small.append(...scales.map((scale) => overKey(sweep, rows.filter((row) => row.values[scale.key] !== undefined), scale, best)));
  place.append(heading(`${sweep.objective} over each key`), small, Object.assign(document.createElement("p"), { className: "dim", textContent: "The best job is red; a job that is not done is a ring." }));
}
