// Level of detail: any number of spans becomes one value a pixel, so that a frame costs one pass over the spans in view and no drawing call each.

const KINDS = 12;  // colours of operators; the last one serves all that have none of their own
const DIM = KINDS;  // what a search leaves out
const LEVELS = 16;
const PHASES = manifest.phases.length;

// The first span in [first, stop) that ends after `time`. Ends are sorted but for overlapping loads, which are looked at one by one.
function firstEndingAfter(data, first, stop, time) {
  let low = first, high = stop;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (data.end[middle] <= time) low = middle + 1;
    else high = middle;
  }
  for (let back = 0; back < 64 && low > first && data.end[low - 1] > time; ++back) --low;
  return low;
}

// What one track shows, one value a pixel: share of the pixel that runs and that waits, and the longest kind and cause in it.
class Bins {
  constructor(width) {
    this.width = width;
    this.run = new Float32Array(width);
    this.wait = new Float32Array(width);
    this.kind = new Uint8Array(width);
    this.cause = new Uint8Array(width);
    this.kinds = new Float32Array(KINDS + 1);
    this.causes = new Float32Array(PHASES);
    this.pixel = -1;
  }

  clear() {
    this.run.fill(0);
    this.wait.fill(0);
    this.pixel = -1;
  }

  add(pixel, amount, running, which) {
    if (pixel !== this.pixel) {
      this.flush();
      this.pixel = pixel;
    }
    if (running) this.kinds[which] += amount;
    else this.causes[which] += amount;
  }

  flush() {
    const p = this.pixel;
    if (p < 0 || p >= this.width) return;
    let total = 0, most = 0;
    for (let k = 0; k < KINDS; ++k) {
      const amount = this.kinds[k];
      if (amount > 0) {
        total += amount;
        if (amount > most) most = amount, this.kind[p] = k;
        this.kinds[k] = 0;
      }
    }
    const dim = this.kinds[DIM];
    if (dim > 0) {  // what was searched for shows, however little of the pixel it is
      if (most === 0) this.kind[p] = DIM, total = dim;
      else total = Math.max(total, 0.6);
      this.kinds[DIM] = 0;
    }
    this.run[p] = total;
    let waiting = 0, longest = 0;
    for (let c = 1; c < PHASES; ++c) {
      const amount = this.causes[c];
      if (amount > 0) {
        waiting += amount;
        if (amount > longest) longest = amount, this.cause[p] = c;
        this.causes[c] = 0;
      }
    }
    this.wait[p] = waiting;
    this.pixel = -1;
  }

  // Pixels [from, to) wholly covered. Most ranges are a few pixels, for which a loop beats `fill`.
  cover(from, to, running, which) {
    this.flush();
    const share = running ? this.run : this.wait, label = running ? this.kind : this.cause;
    if (to - from > 48) {
      share.fill(1, from, to);
      label.fill(which, from, to);
    } else for (let x = from; x < to; ++x) share[x] = 1, label[x] = which;
  }
}

// Adds `amount`, spread evenly over pixels [x0, x1), to `out`; parts outside it are dropped.
function spread(out, x0, x1, amount) {
  const rate = amount / Math.max(x1 - x0, 1e-9);
  const from = Math.max(x0, 0), to = Math.min(x1, out.length);
  if (to < from) return;
  const p = Math.floor(from), q = Math.min(Math.floor(to), out.length - 1);
  if (p >= out.length) return;
  if (p === q) {
    out[p] += x1 - x0 < 1e-9 ? amount : rate * (to - from);
    return;
  }
  out[p] += rate * (p + 1 - from);
  for (let x = p + 1; x < q; ++x) out[x] += rate;
  out[q] += rate * (to - q);
}

// Bins the spans of a track between ticks [begin, end). `colours`: kind of each task. `found`: tasks that a search found, or null. `totals`, where
// given: `busy` gets the share of the pixel that runs, `moved` the bytes that come from memory.
function binTrack(data, track, begin, end, bins, colours, found, totals) {
  const { begin: from, end: to, phase, task, bytes } = data;
  const width = bins.width, scale = width / (end - begin);
  bins.clear();
  let reach = begin;
  for (let i = firstEndingAfter(data, track.first, track.stop, begin); i < track.stop; ++i) {
    const b = from[i], e = to[i];
    if (b >= end) break;
    const running = phase[i] === RUN;
    if (totals !== null && bytes[i] !== 0 && totals.moves(track.role, running)) spread(totals.moved, (b - begin) * scale, (e - begin) * scale, bytes[i]);
    const start = b < reach ? reach : b, stop = e > end ? end : e;
    if (stop <= start) continue;
    reach = stop;
    const t = task[i];
    const which = running ? (found !== null && (t === NO_TASK || found[t] === 0) ? DIM : t === NO_TASK ? KINDS - 1 : colours[t]) : phase[i];
    const x0 = (start - begin) * scale, x1 = (stop - begin) * scale;
    const p = x0 | 0, q = x1 | 0;
    if (p === q) bins.add(p, x1 - x0, running, which);
    else {
      bins.add(p, p + 1 - x0, running, which);
      if (q > p + 1) bins.cover(p + 1, q, running, which);
      if (q < width && x1 > q) bins.add(q, x1 - q, running, which);
    }
    if (running && totals !== null && track.role === CONSUMER) {
      const busy = totals.busy;
      if (p === q) busy[p] += x1 - x0;
      else {
        busy[p] += p + 1 - x0;
        for (let x = p + 1; x < q; ++x) busy[x] += 1;
        if (q < width) busy[q] += x1 - q;
      }
    }
  }
  bins.flush();
}

// Only what a track brings from memory, for tracks that are not shown.
function addMoved(data, track, begin, end, totals) {
  const scale = totals.moved.length / (end - begin);
  for (let i = firstEndingAfter(data, track.first, track.stop, begin); i < track.stop && data.begin[i] < end; ++i) {
    if (data.bytes[i] !== 0 && totals.moves(track.role, data.phase[i] === RUN)) {
      spread(totals.moved, (data.begin[i] - begin) * scale, (data.end[i] - begin) * scale, data.bytes[i]);
    }
  }
}

// Colours of the theme as pixels, mixed with the paper in steps by how much of a pixel is covered.
class Palette {
  constructor() {
    this.read();
  }

  read() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue("--" + name).trim();
    this.ink = value("ink"), this.muted = value("muted"), this.line = value("line"), this.paper = value("paper"), this.accent = value("accent");
    this.mark = value("mark"), this.raised = value("raised"), this.dim = value("dim"), this.track = value("track");
    this.kinds = Array.from({ length: KINDS }, (_, k) => value("c" + k));
    this.waits = [this.track, ...[1, 2, 3, 4].map((c) => value("w" + c))];
    const hatches = [null, null, value("h2"), null, value("h4")];
    const ground = rgb(this.track);
    const ladder = (colour, least) => Uint32Array.from({ length: LEVELS }, (_, l) => pixel(mix(ground, rgb(colour), l === 0 ? 0 : Math.max(least, l / (LEVELS - 1)))));
    this.ground = pixel(ground);
    this.runs = [...this.kinds, this.dim].map((c) => ladder(c, 0.22));
    this.loads = [...this.kinds, this.dim].map((c) => ladder(hex(mix(ground, rgb(c), 0.62)), 0.22));
    this.idle = this.waits.map((c) => ladder(c, 0.4));
    this.hatch = hatches.map((c) => (c === null ? null : pixel(rgb(c))));
  }
}

function rgb(colour) {
  const n = parseInt(colour.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}
const hex = (colour) => "#" + colour.map((v) => v.toString(16).padStart(2, "0")).join("");
const mix = (a, b, share) => a.map((v, i) => Math.round(v + (b[i] - v) * share));
const pixel = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;  // little-endian RGBA

// Paints binned tracks into an image. All rows of a lane are alike but for the hatching of some causes, which repeats every four.
class Painter {
  constructor(width, height) {
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.width = width, this.height = height;
    this.row = new Uint32Array(width);
    this.upper = new Uint32Array(width);
    this.hatched = new Uint32Array(width);
  }

  fits(width, height) {
    return this.width === width && this.height === height;
  }

  // An empty image in the colours of `palette`, for a screen of `ratio` device pixels a CSS pixel.
  begin(palette, ratio) {
    this.palette = palette;
    this.shift = ratio >= 1.75 ? 1 : 0;  // hatching is as wide on a fine screen
    this.pixels.fill(palette.ground);
    return this;
  }

  // Rows [top, bottom) of the image show `bins`, running spans in the tones of `runs`; waits fill the lower part of tall lanes only.
  lane(bins, top, bottom, runs) {
    const { palette, width, row, upper, pixels } = this;
    const from = Math.max(0, top), to = Math.min(this.height, bottom);
    if (from >= to) return;
    const { run, wait, kind, cause } = bins, { idle, hatch, ground } = palette, highest = LEVELS - 1;
    const low = bottom - top >= 10 ? top + Math.round((bottom - top) * 0.45) : top;
    const hatches = [];
    row.fill(ground);
    if (low > top) upper.fill(ground);
    for (let x = 0; x < width; ++x) {
      const r = run[x], w = wait[x];
      if (r > 0 && (r >= 0.5 * w || w < 0.02)) {
        row[x] = runs[kind[x]][Math.min(highest, Math.ceil(r * highest))];
        if (low > top) upper[x] = row[x];
      } else if (w > 0) {
        row[x] = idle[cause[x]][Math.min(highest, Math.ceil(w * highest))];
        if (hatch[cause[x]] !== null) hatches.push(x);
      }
    }
    for (let y = from; y < to; ++y) pixels.set(y < low ? upper : hatches.length > 0 ? this.hatch(hatches, cause, y) : row, y * width);
  }

  // The row at height y: slanted lines where weights are waited for, dots where a peer is.
  hatch(places, cause, y) {
    const { hatched, shift, palette } = this, v = y >> shift;
    hatched.set(this.row);
    for (const x of places) {
      const u = x >> shift;
      if (cause[x] === 2 ? ((u + v) & 3) === 0 : (u & 1) === 0 && (v & 1) === 0 && ((u + v) & 2) === 0) hatched[x] = palette.hatch[cause[x]];
    }
    return hatched;
  }
}
