// Reads what mpk/simulate/page_data.py wrote: a manifest and blocks of packed columns.

const manifest = JSON.parse(document.getElementById("manifest").textContent);
const NO_TASK = manifest.no_task;
const CONSUMER = 0, LOADER = 1, LINK = 2;
const RUN = 0;

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; ++i) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Puts the byte planes of a column together and undoes the differences.
function readColumn(bytes, at, length, planes, delta) {
  const out = new Uint32Array(length);
  for (let p = 0; p < planes; ++p) {
    const base = at + p * length, shift = 8 * p;
    for (let i = 0; i < length; ++i) out[i] |= bytes[base + i] << shift;
  }
  if (delta) {
    let last = 0;
    for (let i = 0; i < length; ++i) {
      const z = out[i];
      last = (last + ((z >>> 1) ^ -(z & 1))) | 0;
      out[i] = last;
    }
  }
  return out;
}

async function readBlock(id) {
  const element = document.getElementById("block-" + id);
  const bytes = await inflate(fromBase64(element.textContent.trim()));
  element.textContent = "";  // its text is not needed again
  const columns = {};
  let at = 0;
  for (const [name, length, planes, delta] of JSON.parse(element.dataset.columns)) {
    columns[name] = readColumn(bytes, at, length, planes, delta);
    at += planes * length;
  }
  return columns;
}

// The spans of one device: parallel arrays, track by track in order of time. `begin` and `end` are ticks.
async function readSpans(id, described) {
  const c = await readBlock(id);
  const count = c.gap.length;
  const begin = c.gap, end = new Uint32Array(count), phase = Uint8Array.from(c.phase);
  const tracks = [];
  let first = 0;
  for (const [worker, role, spans] of described) {
    let last = 0;
    for (let i = first; i < first + spans; ++i) {
      begin[i] = last + begin[i];
      last = end[i] = begin[i] + c.length[i];
    }
    tracks.push({ worker, role, first, stop: first + spans });
    first += spans;
  }
  return { count, begin, end, phase, task: c.task, bytes: c.bytes, cause: c.cause, tracks };
}

// Loads graphs at once and spans when a device is shown for the first time.
class Store {
  constructor() {
    this.graphs = [];
    this.spans = new Map();
  }

  async loadGraphs() {
    this.graphs = await Promise.all(manifest.graphs.map(async (g) => {
      const tasks = await readBlock(g.block);
      return { ...g, tasks, count: tasks.op.length };
    }));
  }

  // A promise, kept from the first call on: a block can be read once only.
  device(timeline, device) {
    const described = manifest.timelines[timeline].devices[device];
    if (!this.spans.has(described.block)) this.spans.set(described.block, readSpans(described.block, described.tracks));
    return this.spans.get(described.block);
  }
}

// ---- words and numbers for people
function duration(ns, digits = 3) {
  const size = Math.abs(ns);
  if (size >= 1e9) return (ns / 1e9).toPrecision(Math.max(digits, 3)) + " s";
  if (size >= 1e6) return (ns / 1e6).toFixed(digits) + " ms";
  if (size >= 1e3) return (ns / 1e3).toFixed(size >= 1e5 ? 1 : 2) + " \u00b5s";
  return Math.round(ns) + " ns";
}

function bytesText(n) {
  if (n >= 1e9) return (n / 1e9).toFixed(2) + " GB";
  if (n >= 1e6) return (n / 1e6).toFixed(2) + " MB";
  if (n >= 1e3) return (n / 1e3).toFixed(1) + " KB";
  return n + " B";
}

function rateText(gbS) {
  return gbS >= 1000 ? (gbS / 1000).toFixed(2) + " TB/s" : gbS.toFixed(gbS >= 100 ? 0 : 1) + " GB/s";
}

const percent = (x, digits = 1) => (100 * x).toFixed(digits) + " %";
const whole = (n) => n.toLocaleString("en-US");
const plural = (n, word) => whole(n) + " " + word + (n === 1 ? "" : "s");

function element(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") e.className = value;
    else if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) e.setAttribute(key, value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}
