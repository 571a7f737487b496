// One timeline on one device: a chart of utilisation and bandwidth above a row for each worker, all on the page's common axis of time.

const LEFT = 64, RIGHT = 64;  // CSS pixels beside what is plotted
const MIN_ROW = 2, MAX_ROW = 48;
const LANES = 8;  // device pixels from which on a row shows loaders and links too, and is set apart from its neighbours
const FONT = '11px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", Arial, sans-serif';

// A canvas at the resolution of the screen; all sizes given to its methods are CSS pixels.
class Surface {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  // Fits the backing store to the element; returns whether there is anything to draw on.
  fit(height) {
    if (height !== undefined) this.canvas.style.height = height + "px";
    const box = this.canvas.getBoundingClientRect();
    this.ratio = window.devicePixelRatio || 1;
    this.width = box.width, this.height = height ?? box.height;
    const w = Math.round(this.width * this.ratio), h = Math.round(this.height * this.ratio);
    if (this.canvas.width !== w) this.canvas.width = w;
    if (this.canvas.height !== h) this.canvas.height = h;
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.context.font = FONT;
    this.context.textBaseline = "middle";
    return w > 0 && h > 0 && this.width > LEFT + RIGHT + 8;
  }

  get plot() {
    return this.width - LEFT - RIGHT;
  }
}

class Panel {
  constructor(index, app) {
    this.index = index, this.app = app;
    this.timeline = manifest.timelines[index];
    this.tick = this.timeline.tick_ns;
    this.shift = 0;  // ns that the timeline is moved to the right of the common axis
    this.scroll = 0;  // CSS pixels that the rows are scrolled
    this.selected = -1;  // index of a span
    this.data = null;
    this.found = null;  // Uint8Array [tasks] of what the search found
    const unit = this.timeline.unit, many = manifest.timelines.length > 1;
    this.chart = element("canvas", { class: "chart", "aria-hidden": "true" });
    this.rows = element("canvas", { class: "rows", tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": `Timeline of ${plural(this.timeline.workers, unit)}, ${this.timeline.source}. Arrow keys move, plus and minus zoom, brackets choose spans.` });
    const title = element("h3", {}, many ? this.timeline.label : `${plural(this.timeline.workers, unit)} over time`,
      element("small", {}, key("accent"), `running ${unit}s`), element("small", {}, key("mark"), `bytes from memory (${this.timeline.traffic})`),
      this.timeline.roles.length > 1 ? element("small", {}, "below each " + unit + ", where rows are high enough: its "
        + this.timeline.roles.slice(1).map((r) => manifest.roles[r]).join(", ")) : null);
    if (many && this.timeline.steps > 1) title.append(this.stepChoice());
    if (many) title.append(this.moved = element("small", {}));
    this.element = element("div", { class: "panel" }, title, this.chart, this.rows);
    this.chartSurface = new Surface(this.chart), this.rowSurface = new Surface(this.rows);
  }

  get graph() {
    return this.app.store.graphs[this.timeline.graph];
  }

  // Which step stands at the beginning of the common axis, so that single steps can be compared.
  stepChoice() {
    const select = element("select", { "aria-label": `First step shown of the ${this.timeline.source} timeline` });
    for (let s = 0; s < this.timeline.steps; ++s) select.append(element("option", { value: s }, `from step ${s + 1} of ${this.timeline.steps}`));
    select.addEventListener("change", () => {
      const step = Number(select.value);
      this.move(step === 0 ? 0 : -this.described.steps[step - 1] * this.tick);
    });
    return select;
  }

  // Puts the timeline that many ns to the right on the common axis, and says so.
  move(shift) {
    this.shift = shift;
    this.moved.replaceChildren();
    if (shift !== 0) {
      this.moved.append(`moved by ${shift > 0 ? "+" : "\u2212"}${duration(Math.abs(shift))} `,
        element("button", { type: "button", onclick: () => this.move(0) }, "back"));
    }
    this.app.draw();
  }

  // Moves the timeline so that the run of `task` in the given step begins at `time` on the common axis; returns whether there is one.
  align(task, step, time) {
    const track = this.workers[this.graph.tasks.worker[task]]?.[CONSUMER];
    for (let i = track?.first ?? 0; track && i < track.stop; ++i) {
      if (this.data.task[i] !== task || this.data.phase[i] !== RUN || this.stepOf(i) !== Math.min(step, this.described.steps.length - 1)) continue;
      this.move(time - this.data.begin[i] * this.tick);
      return true;
    }
    return false;
  }

  stepOf(i) {
    const step = this.described.steps.findIndex((end) => this.data.begin[i] < end);
    return step < 0 ? this.described.steps.length - 1 : step;
  }

  async load(device) {
    this.device = device;
    const data = await this.app.store.device(this.index, device);
    if (this.device !== device) return;  // another one was chosen meanwhile
    this.data = data;
    this.described = this.timeline.devices[device];
    this.selected = -1;
    this.found = null;
    this.workers = [];
    this.data.tracks.forEach((track) => {
      (this.workers[track.worker] ??= [null, null, null])[track.role] = track;
    });
    for (let w = 0; w < this.timeline.workers; ++w) this.workers[w] ??= [null, null, null];
  }

  // ---- geometry
  fitRows(available) {
    const ratio = window.devicePixelRatio || 1;
    this.rowHeight = Math.min(22, Math.max(MIN_ROW, Math.floor((available / this.workers.length) * ratio) / ratio));
    this.available = available;
  }

  get height() {
    return Math.min(this.available, this.workers.length * this.rowHeight);
  }

  setRowHeight(height, anchor = 0) {
    const at = (this.scroll + anchor) / this.rowHeight;
    this.rowHeight = Math.min(MAX_ROW, Math.max(MIN_ROW, height));
    this.scrollTo(at * this.rowHeight - anchor);
  }

  scrollTo(top) {
    this.scroll = Math.max(0, Math.min(top, this.workers.length * this.rowHeight - this.height));
  }

  ticks(ns) {
    return (ns - this.shift) / this.tick;
  }

  ns(ticks) {
    return ticks * this.tick + this.shift;
  }

  // Device pixels from the top of a row at which its lanes end: consumer, loader, link. Low rows have room for the consumer only.
  lanes(row) {
    if (row < LANES) return [row, row, row];
    const gap = row >= 14 ? 2 : 1, extra = this.timeline.roles.length - 1;
    const small = Math.max(2, Math.round(row * 0.27)), first = Math.max(1, row - gap - extra * small);
    const ends = [first, first, first];
    this.timeline.roles.slice(1).forEach((role, i) => {
      for (let r = role; r < 3; ++r) ends[r] = first + (i + 1) * small;
    });
    return ends;
  }

  // ---- drawing
  // Bins what is in view and paints the rows; the charts follow once all panels know their highest rate.
  bin() {
    if (this.data === null || !this.rowSurface.fit(this.height)) return false;
    const { app, data, rowSurface: s } = this;
    const width = Math.round(s.plot * s.ratio), height = Math.round(this.height * s.ratio);
    const begin = this.ticks(app.view.begin), end = this.ticks(app.view.end);
    if (!this.bins || this.bins.width !== width) this.bins = new Bins(width);
    const loads = this.timeline.traffic === "loads";
    const totals = { busy: new Float32Array(width), moved: new Float64Array(width), moves: (role, running) => (loads ? role === LOADER : role === CONSUMER && running) };
    if (!this.painter?.fits(width, height)) this.painter = new Painter(width, height);
    const painter = this.painter.begin(app.palette, s.ratio), row = this.rowHeight * s.ratio;
    const top = this.scroll * s.ratio;
    this.workers.forEach((lanes, w) => {
      const y = Math.round(w * row - top), ends = this.lanes(Math.round((w + 1) * row - top) - y);
      lanes.forEach((track, role) => {
        if (track === null) return;
        const top = y + (role === CONSUMER ? 0 : ends[role - 1]), bottom = y + ends[role];
        if (role !== CONSUMER && (bottom <= Math.max(top, 0) || top >= height)) return addMoved(data, track, begin, end, totals);
        binTrack(data, track, begin, end, this.bins, app.colours[this.timeline.graph], this.found, totals);
        painter.lane(this.bins, role === CONSUMER ? top : top + 1, bottom, role === CONSUMER ? app.palette.runs : app.palette.loads);
      });
    });
    this.paintRows(painter.image);
    const perPixel = (app.view.end - app.view.begin) / width;
    this.utilisation = totals.busy.map((b) => b / this.workers.length);
    this.rate = totals.moved.map((m) => (m * this.timeline.byte_unit) / perPixel);  // bytes a nanosecond are GB/s
    return true;
  }

  paintRows(image) {
    const { app, rowSurface: s } = this, c = s.context, palette = app.palette;
    c.putImageData(image, Math.round(LEFT * s.ratio), 0);
    c.fillStyle = palette.muted;
    c.textAlign = "right";
    const every = Math.max(1, Math.ceil(14 / this.rowHeight));
    const nice = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((n) => n >= every) ?? every;
    const first = Math.floor(this.scroll / this.rowHeight);
    for (let w = first; w < this.workers.length && w * this.rowHeight - this.scroll < this.height; ++w) {
      const y = (w + 0.5) * this.rowHeight - this.scroll;
      if (w % nice === 0 && y > 3 && y < this.height - 3) c.fillText(`${this.timeline.unit} ${w}`, LEFT - 8, y);
    }
    c.save();
    c.beginPath();
    c.rect(LEFT, 0, s.plot, this.height);
    c.clip();
    if (this.rowHeight >= 12) this.paintNames();
    this.paintSteps(c, this.height);
    this.paintSelection();
    c.restore();
    const whole = this.workers.length * this.rowHeight;
    if (whole > this.height + 1) {
      c.fillStyle = palette.line;
      c.fillRect(s.width - RIGHT + 6, 0, 5, this.height);
      c.fillStyle = palette.muted;
      c.fillRect(s.width - RIGHT + 6, (this.scroll / whole) * this.height, 5, Math.max(12, (this.height / whole) * this.height));
    }
  }

  paintSteps(c, height) {
    c.strokeStyle = this.app.palette.ink;
    c.globalAlpha = 0.55;
    c.setLineDash([3, 3]);
    c.beginPath();
    for (const end of this.described.steps.slice(0, -1)) {
      const x = Math.round(this.app.x(this.ns(end), this.rowSurface.plot)) + 0.5;
      if (x > LEFT && x < LEFT + this.rowSurface.plot) c.moveTo(x, 0), c.lineTo(x, height);
    }
    c.stroke();
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  // Names inside spans that are wide enough.
  paintNames() {
    const { app, data, rowSurface: s } = this, c = s.context;
    const begin = this.ticks(app.view.begin), end = this.ticks(app.view.end), least = (34 / s.plot) * (end - begin);
    c.textAlign = "left";
    const first = Math.floor(this.scroll / this.rowHeight), last = Math.min(this.workers.length, Math.ceil((this.scroll + this.height) / this.rowHeight));
    for (let w = first; w < last; ++w) {
      const track = this.workers[w][CONSUMER];
      if (track === null) continue;
      const high = this.lanes(Math.round(this.rowHeight * s.ratio))[0] / s.ratio;
      for (let i = firstEndingAfter(data, track.first, track.stop, begin); i < track.stop && data.begin[i] < end; ++i) {
        const from = Math.max(data.begin[i], begin), to = Math.min(data.end[i], end);
        if (to - from < least || data.task[i] === NO_TASK) continue;
        const running = data.phase[i] === RUN;
        const x = app.x(this.ns(from), s.plot), room = ((to - from) / (end - begin)) * s.plot - 8;
        const words = this.label(i);
        const text = c.measureText(words).width <= room ? words : this.operator(i).name;
        if (c.measureText(text).width > room) continue;
        const dim = this.found !== null && this.found[data.task[i]] === 0;
        c.fillStyle = !running || dim ? app.palette.ink : contrast(app.palette.kinds[app.colours[this.timeline.graph][data.task[i]]]);
        const y = w * this.rowHeight - this.scroll + (running ? high / 2 + 1 : high * 0.74);
        if (running || high >= 26) c.fillText(text, x + 4, y);
      }
    }
  }

  paintSelection() {
    if (this.selected < 0) return;
    const box = this.box(this.selected);
    const c = this.rowSurface.context;
    c.lineWidth = 2;
    c.strokeStyle = this.app.palette.mark;
    c.strokeRect(box.x - 1, box.y - 1, Math.max(box.width, 2) + 2, box.height + 2);
    c.lineWidth = 1;
  }

  paintChart(most) {
    const s = this.chartSurface;
    if (!s.fit() || !this.utilisation) return;
    const c = s.context, palette = this.app.palette, high = s.height - 12, base = s.height - 4, ratio = s.ratio;
    c.fillStyle = palette.track;
    c.fillRect(LEFT, base - high, s.plot, high);
    c.fillStyle = palette.accent;
    c.globalAlpha = 0.3;
    c.beginPath();
    c.moveTo(LEFT, base);
    this.utilisation.forEach((u, p) => c.lineTo(LEFT + p / ratio, base - Math.min(1, u) * high));
    c.lineTo(LEFT + s.plot, base);
    c.fill();
    c.globalAlpha = 1;
    c.strokeStyle = palette.mark;
    c.lineWidth = 1.25;
    c.beginPath();
    this.rate.forEach((r, p) => (p === 0 ? c.moveTo(LEFT, base - (r / most) * high) : c.lineTo(LEFT + p / ratio, base - (r / most) * high)));
    c.stroke();
    c.lineWidth = 1;
    this.paintSteps(c, s.height);
    c.fillStyle = palette.muted;
    c.textAlign = "right";
    c.fillText("100 %", LEFT - 8, base - high + 5);
    c.fillText("0", LEFT - 8, base - 4);
    c.textAlign = "left";
    c.fillText(most >= 1000 ? (most / 1000).toFixed(1) + " TB/s" : most.toPrecision(2) + " GB/s", s.width - RIGHT + 6, base - high + 5);
    c.fillText("0", s.width - RIGHT + 6, base - 4);
  }

  // ---- spans
  box(i) {
    const s = this.rowSurface, track = this.trackOf(i), ends = this.lanes(Math.round(this.rowHeight * s.ratio)).map((e) => e / s.ratio);
    const x = this.app.x(this.ns(this.data.begin[i]), s.plot), top = track.role === CONSUMER ? 0 : ends[track.role - 1];
    return { x, width: this.app.x(this.ns(this.data.end[i]), s.plot) - x, y: track.worker * this.rowHeight - this.scroll + top, height: ends[track.role] - top };
  }

  trackOf(i) {
    let low = 0, high = this.data.tracks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (this.data.tracks[middle].first <= i) low = middle;
      else high = middle - 1;
    }
    return this.data.tracks[low];
  }

  // The span under a point of the rows (CSS pixels), or -1: what covers it, else the nearest within two pixels.
  at(x, y) {
    if (this.data === null) return -1;
    const s = this.rowSurface, w = Math.floor((y + this.scroll) / this.rowHeight);
    if (w < 0 || w >= this.workers.length || x < LEFT || x > LEFT + s.plot) return -1;
    const ends = this.lanes(Math.round(this.rowHeight * s.ratio)), inside = (y + this.scroll - w * this.rowHeight) * s.ratio;
    const role = this.workers[w].findIndex((track, r) => track !== null && (inside < ends[r] || r === this.timeline.roles.at(-1)));
    return role < 0 ? -1 : this.nearest(this.workers[w][role], this.ticks(this.app.time(x, s.plot)));
  }

  nearest(track, tick) {
    if (track === null) return -1;
    const { data, app } = this, slack = (2 / this.rowSurface.plot) * ((app.view.end - app.view.begin) / this.tick);
    let best = -1, distance = slack, longest = -1;
    for (let i = firstEndingAfter(data, track.first, track.stop, tick - slack); i < track.stop && data.begin[i] <= tick + slack; ++i) {
      const far = Math.max(0, data.begin[i] - tick, tick - data.end[i]), long = data.end[i] - data.begin[i];
      if (far < distance || (far === distance && long > longest)) best = i, distance = far, longest = long;
    }
    return best;
  }

  operator(i) {
    return this.graph.operators[this.graph.tasks.op[this.data.task[i]]];
  }

  tiles(task) {
    const t = this.graph.tasks, first = t.tile_begin[task], count = t.tile_count[task];
    return count > 1 ? `tiles ${first}\u2013${first + count - 1}` : `tile ${first}`;
  }

  label(i) {
    return `${this.operator(i).name} ${this.tiles(this.data.task[i]).replace(/^tiles? /, "")}`;
  }

  // What there is to say about a span: [headline, lines].
  describe(i) {
    const { data, timeline } = this, task = data.task[i], track = this.trackOf(i), phase = data.phase[i];
    const took = (data.end[i] - data.begin[i]) * this.tick, bytes = data.bytes[i] * timeline.byte_unit;
    const lines = [];
    let name = manifest.phases[phase];
    if (task !== NO_TASK) {
      const op = this.operator(i);
      const doing = { [CONSUMER]: "runs", [LOADER]: "loads for", [LINK]: "sends for" }[track.role];
      name = phase === RUN ? (track.role === CONSUMER ? op.name : `${doing} ${op.name}`) : `${op.name} waits ${manifest.phases[phase].replace(/^wait /, "")}`;
      lines.push(`task ${task} \u00b7 ${op.kind} \u00b7 ${op.layer >= 0 ? "layer " + op.layer : "outside the layers"} \u00b7 ${this.tiles(task)}`);
    }
    const from = data.begin[i] * this.tick;
    lines.push(`${duration(took)}, from ${duration(from)} to ${duration(from + took)} on ${timeline.unit} ${track.worker}`);
    if (bytes > 0) lines.push(`${bytesText(bytes)}${timeline.traffic === "loads" ? "" : " of weights"}, ${rateText(bytes / Math.max(took, 1))}`);
    const cause = this.causeOf(i);
    if (cause >= 0) {
      const t = data.task[cause], where = this.trackOf(cause).worker;
      lines.push(`last to end of what it waits for: ${this.operator(cause).name}, task ${t} on ${timeline.unit} ${where}, at ${duration(data.end[cause] * this.tick)}`);
    }
    return [name, lines];
  }

  // The run of the task that a wait waited for longest, or -1.
  causeOf(i) {
    const { data } = this, task = data.cause[i];
    if (task === NO_TASK) return -1;
    const track = this.workers[this.graph.tasks.worker[task]]?.[CONSUMER];
    if (!track) return -1;
    let best = -1;  // its last run that began before the wait ended: a task runs once a step
    for (let k = track.first; k < track.stop && data.begin[k] <= data.end[i]; ++k) if (data.task[k] === task && data.phase[k] === RUN) best = k;
    return best;
  }
}

function key(colour) {
  return element("span", { class: "key", style: `border-top: 3px solid var(--${colour})` });
}

// Black or white, whichever reads better on a colour.
function contrast(colour) {
  const [r, g, b] = rgb(colour).map((v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#101418" : "#ffffff";
}
