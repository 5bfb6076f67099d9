// The dashboard: rows of all runs by server-sent events, a chart that compares runs, a view of each run and each sweep.
// What runs have written reaches the page as text nodes and attribute values only.
import { bestOf, drawSweep } from "./sweep.js";

const $ = (selector) => document.querySelector(selector);
const rows = new Map(); // run -> its newest row
const lines = new Map(); // run -> its <tr>
const selected = new Set(); // runs to compare
const dark = matchMedia("(prefers-color-scheme: dark)");

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

// A report is this page with the server's answers inside, by their addresses: it asks for nothing, and nothing changes.
const inside = JSON.parse($("#inside")?.textContent ?? "null");
const placeOf = () => (location.hash.slice(1) || (inside?.page ?? "")).split("/").map(decodeURIComponent);
const isElsewhere = (kind, name) => placeOf()[0] !== kind || placeOf()[1] !== name;
const api = (kind, name, rest = "") => `api/${kind}/${encodeURIComponent(name)}${rest}`;

async function get(url) {
  if (inside) return inside.answers[decodeURIComponent(url)];
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// A browser opens few connections to a server: streams of pages that nobody sees are closed.
function stream(url, onOpen, onMessage) {
  if (inside) { say(url, ""); onOpen(); onMessage(inside.answers[decodeURIComponent(url.split("?")[0])]); return () => {}; }
  let source = null;
  function open() {
    if (document.hidden) return source?.close();
    source = new EventSource(url);
    source.onopen = onOpen;
    source.onmessage = (event) => { say(url, ""); onMessage(JSON.parse(event.data)); };
    source.onerror = () => source.readyState === EventSource.CLOSED
      ? get(url).catch((error) => { if (source) say(url, `not up to date: ${error.message}`); }) : say(url, "not up to date: the dashboard does not answer");
  }
  document.addEventListener("visibilitychange", open);
  open();
  return () => { document.removeEventListener("visibilitychange", open); source?.close(); source = null; say(url, ""); };
}

// ---- words and numbers

function duration(seconds) {
  const whole = Math.round(seconds), pad = (n) => `${n}`.padStart(2, "0");
  if (whole >= 172800) return `${Math.floor(whole / 86400)}d${pad(Math.floor((whole % 86400) / 3600))}h`;
  if (whole >= 3600) return `${Math.floor(whole / 3600)}h${pad(Math.floor((whole % 3600) / 60))}m`;
  return whole >= 60 ? `${Math.floor(whole / 60)}m${pad(whole % 60)}s` : `${whole}s`;
}

const many = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const short = (n) => Math.abs(n) >= 1e4 ? Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(n) : `${Number(n.toPrecision(5))}`;
const clock = (time) => new Date(time * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const badge = (state) => el("span", { class: `state ${state}` }, state);
let said = inside?.said ?? "", folder = "runs";

const troubles = new Map(); // address -> why what came from it is not up to date

function say(url, trouble) {
  if (trouble) troubles.set(url, trouble);
  else troubles.delete(url);
  const text = troubles.values().next().value ?? said;
  if ($("#link").textContent !== text) $("#link").textContent = text; // else a screen reader would tell it again
}

// ---- the table of runs

const COLUMNS = ["run", "state", "attempt", "nodes", "step", "loss", "tok/s", "eta", "goodput", "checkpoint", "reason"];
const NUMBERS = ["step", "loss", "tok/s", "eta", "goodput"];
const NARROW = ["run", "state", "step", "loss"]; // on a telephone
const kindOf = (column) => `${NUMBERS.includes(column) ? "n " : ""}${NARROW.includes(column) ? "" : "wide"}`;

$(".runs thead").append(el("tr", {}, el("th", { scope: "col", "aria-label": "compare" }),
  ...COLUMNS.map((column) => el("th", { scope: "col", class: kindOf(column) }, column))));

function textOf(row, column) {
  if (column !== "checkpoint") return row[column];
  return row.checkpoint === null ? "-" : `${duration(Math.max(0, Date.now() / 1000 - row.checkpoint))} ago`;
}

function paint(row) {
  if (!lines.has(row.run)) {
    const box = el("input", { type: "checkbox", "aria-label": `compare ${row.run}`, change: () => { selected[box.checked ? "add" : "delete"](row.run); compare(); } });
    const link = el("a", { href: `#run/${encodeURIComponent(row.run)}` }, row.run);
    const owner = row.owner ? [el("span", { class: "dim" }, ` of ${row.owner}`)] : [];
    lines.set(row.run, el("tr", {}, el("td", {}, box), el("th", { scope: "row" }, link, ...owner), el("td", {}, badge("")),
      ...COLUMNS.slice(2).map((column) => el("td", { class: kindOf(column) + (column === "reason" ? " dim" : "") }))));
  }
  const cells = lines.get(row.run).cells;
  const state = cells[2].firstChild;
  if (state.textContent !== row.state) { state.textContent = row.state; state.className = `state ${row.state}`; }
  COLUMNS.slice(2).forEach((column, i) => {
    const text = textOf(row, column);
    if (cells[i + 3].textContent !== text) cells[i + 3].textContent = text;
  });
}

function filter() {
  const wanted = $("#filter").value.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const [name, tr] of lines) {
    const row = rows.get(name), text = `${name} ${row.state} ${row.owner ?? ""} ${row.reason}`.toLowerCase();
    tr.hidden = !wanted.every((word) => text.includes(word));
    shown += !tr.hidden;
  }
  const count = `${shown === rows.size ? "" : `${shown} of `}${many(rows.size, "run")}`;
  if ($("#count").textContent !== count) $("#count").textContent = count;
}

function take(news) {
  for (const row of news.rows ?? []) { rows.set(row.run, row); paint(row); }
  if (news.order) {
    const there = new Set(news.order), focused = document.activeElement;
    for (const name of [...rows.keys()]) if (!there.has(name)) { rows.delete(name); lines.delete(name); selected.delete(name); }
    $(".runs tbody").replaceChildren(...news.order.map((name) => lines.get(name)));
    if (focused?.isConnected) focused.focus({ preventScroll: true });
    if (!inside) get("api/sweeps").then(listSweeps).then(() => say("api/sweeps", ""), (error) => say("api/sweeps", error.message));
  }
  if ("complete" in news) {
    folder = news.folder;
    said = news.trouble ? `not up to date: ${news.trouble}` : news.complete ? `under ${folder}/, live` : "reading the runs";
    say("api/rows", "");
  }
  $("#empty").hidden = rows.size > 0 || said === "reading the runs";
  $("#search").hidden = $(".scroll").hidden = rows.size === 0;
  filter();
  for (const view of views) if (!view.runs || (news.rows ?? []).some((row) => view.runs.has(row.run))) view.soon();
}

function listSweeps(names) {
  $("#sweeps").hidden = !names.length;
  $("#sweeps").replaceChildren("Sweeps:", ...names.map((name) => el("a", { href: `#sweep/${encodeURIComponent(name)}` }, name)));
}

// What is drawn again when one of its runs has changed, three seconds later and when it has been drawn before.
const views = new Set();

function view(draw, runs) {
  const attempt = () => draw().catch((error) => { $("#problem").textContent = error.message; });
  let drawn = attempt();
  const made = { runs, timer: 0 };
  made.soon = () => { made.timer ||= setTimeout(async () => {
    await drawn; // a slow answer is not asked for twice
    made.timer = 0;
    if (views.has(made)) drawn = attempt();
  }, 3000); };
  views.add(made);
  return made;
}

// ---- curves

const INTERNAL = new Set(["step", "time", "attempt", "data_s", "checkpoint_stall_s", "useful_s", "stall_s", "lost_s", "recover_s", "snapshot_s", "snapshots", "steps", "resumed", "epoch_end"]);
const COLOURS = ["#3b82c4", "#d1495b", "#2a9d5c", "#b8860b", "#8a5cc7", "#1f9aa8", "#c4569b", "#7a7f87"];
const fetched = new Map(); // run -> {row, answer}

function curvesOf(run) {
  const known = fetched.get(run);
  if (known && known.row === rows.get(run)) return known.answer;
  const made = { row: rows.get(run), answer: get(api("runs", run, "/curves")) };
  made.answer.catch(() => fetched.delete(run));
  fetched.set(run, made);
  return made.answer;
}

const UNITS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
const TICKS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000];

// Every whole second has its own label: ticks are never labelled alike.
function since(seconds) {
  let rest = Math.round(seconds), text = "";
  for (const [unit, size] of UNITS) {
    if (rest >= size) text += `${Math.floor(rest / size)}${unit}`;
    rest %= size;
  }
  return text || "0s";
}

const beganOf = ({ columns, gaps }) => gaps[0]?.[0] ?? columns.time?.findLast((at) => at !== null) ?? 0;

// x and y, oldest first; of a step that was done again the last counts. Lines come the newest first.
function pointsOf(answer, key, over) {
  const { columns, gaps } = answer;
  const { step = [], time = [], tokens_per_s: rate = [], step_s = [], useful_s = [] } = columns;
  const kept = [];
  for (let i = 0, below = Infinity; i < step.length; i++) {
    if (step[i] === null || time[i] === null || step[i] >= below) continue;
    kept.unshift(i);
    below = step[i];
  }
  const began = beganOf(answer);
  const x = [], y = [];
  let tokens = 0, before = 0;
  for (const i of kept) {
    tokens += (step[i] - before) * (rate[i] ?? 0) * (step_s[i] ?? 0);
    before = step[i];
    const idle = gaps.reduce((sum, [at, seconds]) => sum + (at <= time[i] ? seconds : 0), 0);
    const value = key === "goodput" ? (useful_s[i] ?? NaN) / (time[i] - began - idle) : columns[key]?.[i];
    if (!Number.isFinite(value)) continue;
    x.push(over === "tokens" ? tokens : over === "time" ? time[i] - began : step[i]);
    y.push(value);
  }
  return [x, y];
}

function chart(title, key, over) {
  const keys = el("select", { "aria-label": `${title}: curve`, change: draw }, el("option", {}, key));
  const axis = el("select", { "aria-label": `${title}: over`, change: draw }, ...["step", "tokens", "time"].map((name) => el("option", { selected: name === over }, name)));
  const plot = el("div", { class: "plot", role: "img", "aria-label": `${title}: not drawn yet` });
  const node = el("div", { class: "card" }, el("h2", {}, title), el("div", { class: "bar" }, keys, "over", axis), plot);
  let names = [], faults = [], shown = null, drawnAs = "", isZoomed = false;
  async function draw() {
    const runs = names, answers = await Promise.all(runs.map(curvesOf));
    if (runs !== names) return; // others were chosen meanwhile
    const numeric = ({ columns }) => Object.keys(columns).filter((name) => !INTERNAL.has(name) && columns[name].some((value) => value !== null));
    const found = new Set(answers.flatMap(numeric));
    if (answers.some((answer) => pointsOf(answer, "goodput", "step")[1].length)) found.add("goodput");
    const all = [...found].sort((a, b) => (b === "loss") - (a === "loss"));
    if (all.join() !== [...keys.options].map((option) => option.text).join()) keys.replaceChildren(...all.map((name) => el("option", { selected: name === keys.value }, name)));
    const tables = answers.map((answer) => pointsOf(answer, keys.value, axis.value));
    const data = tables.length ? uPlot.join(tables) : [[]];
    const newest = names.map((name, i) => `${name} ${tables[i][1].length ? short(tables[i][1].at(-1)) : "no values"}`);
    plot.setAttribute("aria-label", `${keys.value} over ${axis.value}; newest: ${newest.join(", ")}`);
    const as = JSON.stringify([names, keys.value, axis.value, dark.matches]);
    const isKnown = key === "goodput" ? found.has(key) : found.size > 0;
    faults = axis.value === "time" && answers.length === 1 ? answers[0].faults.map((at) => at - beganOf(answers[0])) : [];
    if (as === drawnAs) { shown.setData(data, !isZoomed); return isKnown; }
    shown?.destroy();
    [drawnAs, isZoomed] = [as, false];
    shown = new uPlot(options(names, axis.value), data, plot);
    shown.over.addEventListener("dblclick", () => { isZoomed = false; });
    return isKnown;
  }
  function options(runs, over) {
    const [text, rule] = ["--text", "--rule"].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name));
    const x = over === "time" ? since : short;
    const side = { stroke: text, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
    return {
      width: Math.max(240, plot.clientWidth), height: 260, scales: { x: { time: false } }, cursor: { drag: { x: true, y: false } },
      axes: [{ ...side, ...(over === "time" && { incrs: TICKS_S }), values: (_, at) => at.map(x) }, { ...side, size: 64, values: (_, at) => at.map(short) }],
      series: [{ label: over, value: (_, v) => (v === null ? "-" : x(v)) }, ...runs.map((name, i) => ({ label: name, stroke: COLOURS[i % 8], width: 1.8,
        dash: i >= 8 ? [6, 4] : undefined, spanGaps: true, value: (_, v) => (v === null ? "-" : short(v)) }))],
      hooks: { setSelect: [() => { isZoomed = true; }], draw: [markFaults] },
    };
  }
  function markFaults({ ctx, bbox, valToPos }) {
    ctx.fillStyle = COLOURS[1];
    for (const at of faults.map((seconds) => valToPos(seconds, "x", true))) if (at >= bbox.left && at <= bbox.left + bbox.width) ctx.fillRect(at, bbox.top, 1.5, bbox.height);
  }
  new ResizeObserver(() => shown?.setSize({ width: Math.max(240, plot.clientWidth), height: 260 })).observe(plot);
  dark.addEventListener("change", draw);
  return { node, show: (runs) => { names = runs; return draw(); } };
}

const comparison = chart("Compared runs", "loss", "step");
let compared = null;
$("#compare").append(comparison.node);
$("#clear").addEventListener("click", () => { selected.clear(); for (const tr of lines.values()) tr.cells[0].firstChild.checked = false; compare(); $("#filter").focus(); });

function compare() {
  views.delete(compared);
  $("#compare").hidden = $("#clear").hidden = selected.size === 0;
  compared = selected.size ? view(() => comparison.show([...selected]), selected) : null;
}

// ---- one run

const runCharts = [chart("Curve", "loss", "step"), chart("Goodput over time", "goodput", "time")];
$("#run .charts").append(...runCharts.map((made) => made.node));

// Nodes of the newest round; what is known against one of them is its state, else the run's.
function nodesOf(events) {
  let placed = null, found = new Map(), wrong = new Set();
  for (const event of events) {
    if (event.event === "round_started") [placed, found, wrong] = [event, new Map(), new Set()];
    else if (event.event === "node_lost") found.set(event.node, ["lost", event.why]);
    else if (event.event === "slow_node") found.set(event.node, ["slow", event.sentence]);
    else if (event.event === "corruption") for (const node of event.nodes) { found.set(node, ["corrupt", event.why]); event.ranks.forEach((rank) => wrong.add(rank)); }
    else if (event.event === "round_broken") placed?.nodes.forEach((node, i) => { if (placed.hosts[i] === event.blamed && !found.has(node)) found.set(node, ["failed", event.why]); });
  }
  const perNode = placed ? Math.floor(placed.world_size / placed.nodes.length) : 0;
  const nodes = (placed?.nodes ?? []).map((node, i) => {
    const [state, why] = found.get(node) ?? ["", ""];
    const ranks = Array.from({ length: perNode }, (_, k) => i * perNode + k);
    return { node, host: placed.hosts[i], state, why, ranks: ranks.map((rank) => [rank, state === "corrupt" && !wrong.has(rank) ? "" : state]) };
  });
  return [...nodes, ...(placed?.spares ?? []).map((node) => ({ node, host: "", state: "spare", why: "", ranks: [] }))];
}

const terms = (pairs) => pairs.flatMap(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]);

function replace(holder, key, make) { // only when it is different: what a user has selected stays
  if (holder.dataset.shown !== key) { holder.replaceChildren(...make()); holder.dataset.shown = key; }
}

async function showRun(name) {
  const about = await get(api("runs", name));
  if (isElsewhere("run", name)) return;
  if ($("#run").hidden) followLogs(name);
  show("run");
  const row = rows.get(name), state = row?.state ?? "-", nodes = nodesOf(about.events);
  const told = [["step", row?.step ?? "-"], ["loss", row?.loss ?? "-"], ...(row?.reason ? [["reason", row.reason]] : []), ...about.story];
  replace($("#story"), JSON.stringify([state, told]), () => [el("dt", {}, "state"), el("dd", {}, badge(state)), ...terms(told)]);
  replace($("#nodes"), JSON.stringify([state, nodes]), () => nodes.length ? [el("div", { class: "scroll", role: "region", "aria-label": "Table of nodes", tabindex: 0 }, el("table", {}, el("thead", {}, el("tr", {},
    ...["node", "state", "ranks", "reason"].map((column) => el("th", { scope: "col" }, column)))), el("tbody", {}, ...nodes.map((node) => el("tr", {},
    el("th", { scope: "row" }, `${node.node} ${node.host}`), el("td", {}, badge(node.state || state)),
    el("td", { class: "ranks" }, ...node.ranks.map(([rank, how]) => el("span", { class: `rank ${how || state}`, title: `rank ${rank}: ${how || state}` }, `${rank}`))), el("td", { class: "dim" }, node.why))))))] : ["No round has started yet."]);
  const happened = about.events.filter((event) => event.sentence).slice(-100).reverse();
  replace($("#events"), JSON.stringify(happened), () => terms(happened.map((event) => [clock(event.time), event.sentence])));
  const { handle = "-", overrides = [] } = about.submitted;
  $("#compared").parentElement.hidden = !about.compared.length;
  replace($("#compared"), JSON.stringify(about.compared), () => [el("thead", {}, el("tr", {}, ...["", "planned", "measured"].map((column) => (column ? el("th", { scope: "col", class: "n" }, column) : el("td"))))),
    el("tbody", {}, ...about.compared.map(([what, planned, measured]) => el("tr", {}, el("th", { scope: "row" }, what), el("td", { class: "n" }, planned), el("td", { class: "n" }, measured))))]);
  replace($("#submitted"), handle, () => terms([["handle", handle], ["overrides", overrides.join(" ") || "-"]]));
  replace($("#config"), about.config, () => [about.config]);
  for (const made of runCharts) made.node.hidden = !(await made.show([name])); // a program may measure nothing
}

const COLOUR = /\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))/g; // what colours a terminal, or names its window
let stopLogs = () => {};

function followLogs(name) {
  stopLogs();
  const log = $("#log"), query = new URLSearchParams({ text: $("#text").value, rank: $("#rank").value });
  let count = 0;
  stopLogs = stream(api("runs", name, `/logs?${query}`), () => { count = 0; log.replaceChildren(); }, (news) => {
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
    log.append(...news.map(([from, line]) => el("div", {}, el("span", {}, `[${from}] `), line.replace(COLOUR, ""))));
    while (log.childElementCount > 5000) log.firstChild.remove();
    count += news.length;
    $("#lines").textContent = count ? many(count, "line") : "no line yet";
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  });
}

// ---- one sweep

async function showSweep(name) {
  const sweep = await get(api("sweeps", name));
  if (isElsewhere("sweep", name)) return;
  show("sweep");
  for (const row of sweep.rows) row.state = rows.get(row.run)?.state ?? row.state;
  const best = bestOf(sweep), value = (row) => (row.objective === null ? "-" : short(row.objective));
  $("#best").textContent = best ? `best: ${best.run}, ${sweep.objective} ${value(best)} with ${best.overrides.join(" ") || "no overrides"}` : `no job has a value of ${sweep.objective} yet`;
  $("#fixed").textContent = sweep.fixed.join("\n") || "-";
  drawSweep($("#drawn"), sweep);
  $("#jobs").replaceChildren(el("thead", {}, el("tr", {}, ...["run", ...sweep.keys, "state", "step", sweep.objective, "reason"].map((column) => el("th", { scope: "col" }, column)))),
    el("tbody", {}, ...sweep.rows.map((row) => el("tr", {}, el("th", { scope: "row" }, rows.has(row.run) ? el("a", { href: `#run/${encodeURIComponent(row.run)}` }, row.run) : row.run),
      ...sweep.keys.map((key) => el("td", {}, el("span", { class: "value" }, row.values[key] ?? ""))), el("td", {}, badge(row.state)), el("td", { class: "n" }, rows.get(row.run)?.step ?? `${row.step}`),
      el("td", { class: "n" }, value(row)), el("td", { class: "dim" }, rows.get(row.run)?.reason ?? row.reason)))));
}

// ---- which of them

let current = null;

function show(shown) {
  for (const section of ["runs", "run", "sweep"]) $(`#${section}`).hidden = section !== shown;
  $("#problem").textContent = "";
}

function route() {
  const [kind, name] = placeOf();
  views.delete(current);
  stopLogs();
  current = null;
  show(kind ? "" : "runs"); // a run and a sweep when they have been read
  $("#back").hidden = kind === "" || inside !== null;
  $("#logs").hidden = inside !== null;
  document.title = $("#title").textContent = name ? `${kind === "sweep" ? "Sweep " : ""}${name}` : "Runs";
  if (kind === "run") { $("#text").value = $("#rank").value = ""; current = view(() => showRun(name), new Set([name])); }
  if (kind === "sweep") current = view(() => showSweep(name));
  if (route.was !== undefined) { $("#title").focus(); scrollTo(0, 0); }
  route.was = kind;
}

let typing = 0;
$("#filter").addEventListener("input", filter);
$("#logs").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => { if (current) followLogs([...current.runs][0]); }, 300); });
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", route);
addEventListener("keydown", (event) => { if (event.key === "/" && !event.target.matches("[type=search], [type=number], select")) { event.preventDefault(); $(placeOf()[0] === "run" ? "#text" : "#filter").focus(); } });
setInterval(() => { for (const row of rows.values()) paint(row); }, 10_000);
route();
stream("api/rows", () => {}, take);
