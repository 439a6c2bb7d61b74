"use strict";
// The table of index.html. What is asked stands in the address after "#", so that a link leads to the same view.

const figures = JSON.parse(document.getElementById("figures").textContent);
const byId = (id) => document.getElementById(id);
const FIELDS = ["q", "method", "length", "gpu"];
const DEFAULTS = { q: "", method: "lora", length: String(figures.lengths[0] ?? ""), gpu: "" };

const keyOf = (model, method, length, gpu) => [model, method, length, gpu].join("\n");
const cells = new Map(figures.cells.map((cell) => [keyOf(cell.model, cell.method, cell.length, cell.gpu), cell]));
const refused = new Map(
  figures.refused.map(([model, method, length, gpu, why]) => [keyOf(model, method, length, gpu), why ?? gpu])
);

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

/** What the address asks for. */
function asked() {
  const written = new URLSearchParams(location.hash.slice(1));
  const state = { ...DEFAULTS, cell: written.get("cell") ?? "" };
  for (const field of FIELDS) if (written.has(field)) state[field] = written.get(field);
  if (!figures.methods.includes(state.method)) state.method = DEFAULTS.method;
  if (!figures.lengths.map(String).includes(state.length)) state.length = DEFAULTS.length;
  return state;
}

/** The address of a view, without what is as usual. */
function address(state) {
  const written = new URLSearchParams();
  for (const field of [...FIELDS, "cell"]) {
    if (state[field] && state[field] !== DEFAULTS[field]) written.set(field, state[field]);
  }
  return "#" + written.toString();
}

/** Whether each word of a search is in a name, wherever. */
const isMeant = (name, search) =>
  search.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word));

const ends = (pair, unit) => (pair ? `${shown(pair[0])} to ${shown(pair[1])}${unit}` : "no forecast");
const shown = (value) => Number(value.toPrecision(2)).toLocaleString("en");
const percent = (error) => `${error < 0 ? "-" : "+"}${Math.abs(100 * error).toFixed(0)} %`;

function draw() {
  const state = asked();
  for (const field of FIELDS) if (byId(field).value !== state[field]) byId(field).value = state[field];
  const models = figures.models.filter(([name]) => isMeant(name, state.q));
  const gpus = figures.gpus.filter(([name]) => isMeant(name, state.gpu));
  const head = byId("head");
  head.replaceChildren();
  const top = element("tr", undefined, head);
  element("th", "model", top);
  for (const [name, gb] of gpus) element("th", `${name} ${name.endsWith("GB") ? "" : `${gb} GB`}`, top);
  const rows = byId("rows");
  rows.replaceChildren();
  for (const [model, billions] of models) {
    const row = element("tr", undefined, rows);
    element("th", `${model} (${shown(billions)} B)`, row);
    for (const [gpu] of gpus) row.append(drawnCell(state, model, gpu));
  }
  byId("said").textContent =
    `${models.length} of ${figures.models.length} models, ${gpus.length} of ${figures.gpus.length} GPUs. ` +
    `Versions: ${Object.entries(figures.versions).map((each) => each.join(" ")).join(", ")}. ` +
    `Prices of 10 M tokens: ${figures.prices}.`;
  drawDetail(state);
}

function drawnCell(state, model, gpu) {
  const key = keyOf(model, state.method, state.length, gpu);
  const cell = cells.get(key);
  const drawn = document.createElement("td");
  if (!cell) {
    drawn.textContent = "-";
    drawn.title = refused.get(key) ?? "not asked";
    return drawn;
  }
  const name = `${model}@${gpu}`;
  const link = element("a", `${cell.count}`, drawn);
  link.href = address({ ...state, cell: name });
  link.setAttribute("aria-label", `${cell.count} x ${gpu} for ${model}`);
  drawn.className = cell.count === 1 ? "one" : cell.count <= 8 ? "few" : "many";
  if (state.cell === name) drawn.classList.add("chosen");
  return drawn;
}

function drawDetail(state) {
  const detail = byId("detail");
  detail.replaceChildren();
  const at = state.cell.lastIndexOf("@");
  const [model, gpu] = [state.cell.slice(0, at), state.cell.slice(at + 1)];
  const key = keyOf(model, state.method, state.length, gpu);
  const cell = cells.get(key);
  detail.hidden = !cell && !refused.has(key);
  if (detail.hidden) return;
  const tokens = Number(state.length).toLocaleString("en");
  element("h2", `${model}, ${state.method}, ${tokens} tokens on ${cell ? cell.machines : gpu}`, detail);
  const list = element("dl", undefined, detail);
  const line = (name, ...parts) => {
    element("dt", name, list);
    element("dd", undefined, list).append(...parts);
  };
  if (!cell) {
    line("no", refused.get(key));
    return;
  }
  line("memory", `${ends(cell.gib.slice(0, 2), "")} of ${cell.gib[2]} GiB of each GPU`);
  line("strategy", `${cell.strategy}, ${cell.settings}, ${cell.batch} samples a step`);
  line("speed", `${ends(cell.step, " s")} a step, ${ends(cell.speed, " tokens/s")} a GPU`);
  line("10 M tokens", `${ends(cell.hours, " hours")}${cell.price ? `, ${ends(cell.price, " dollars")}` : ", no price on the list"}`);
  line("nearest memory", ...measured(figures.memory[cell.memory], ""));
  line("nearest speed", ...measured(figures.speed[cell.time], " on GPUs of this kind"));
  const words = `cookbook plan ${model} --method ${cell.method} --length ${cell.length} --gpus ${cell.machines}`;
  line("more", element("code", words));
}

/** A published run and how far its forecast was from it. */
function measured(run, where) {
  if (!run) return [`none of this method${where} was published that we know of`];
  const text = `${run.run}: published ${run.published}, forecast ${percent(run.error)}`;
  if (!run.source.startsWith("https://")) return [`${text} (${run.id}, ${run.source})`];
  const link = element("a", run.id);
  link.href = run.source;
  return [`${text} (`, link, ")"];
}

for (const method of figures.methods) element("option", method, byId("method"));
for (const length of figures.lengths) {
  element("option", Number(length).toLocaleString("en"), byId("length")).value = String(length);
}
byId("asked").addEventListener("input", () => {
  const state = asked();
  for (const field of FIELDS) state[field] = byId(field).value;
  history.replaceState(null, "", address(state));
  draw();
});
byId("asked").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", draw);
draw();
