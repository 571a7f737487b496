// The page as a whole: the view (a range of time common to all panels), pointer and keyboard, drawing once a frame.

class App {
  constructor() {
    this.store = new Store();
    this.palette = new Palette();
    this.panels = [];
    this.current = null;  // the panel with the chosen span
    this.pending = false;
    this.range = null;  // [from, to] in ns while a range is being chosen
  }

  async start() {
    showTitle();
    showFigures();
    showIdle();
    showOperators(this);
    await this.store.loadGraphs();
    const indices = colourIndices();
    this.colours = this.store.graphs.map((g) => Uint8Array.from(g.tasks.op, (op) => indices.get(g.operators[op].short) ?? KINDS - 1));
    this.panels = manifest.timelines.map((_, i) => new Panel(i, this));
    document.getElementById("panels").append(...this.panels.map((p) => p.element));
    this.overview = new Surface(document.getElementById("overview"));
    this.ruler = new Surface(document.getElementById("ruler"));
    this.tip = document.getElementById("tip");
    this.detail = document.getElementById("detail");
    this.legend = new Legend(this);
    this.whole = Math.max(...manifest.timelines.map((t) => t.duration * t.tick_ns), 1);
    this.view = { begin: 0, end: this.whole };
    await this.showDevice(0);
    this.search = new Search(this);
    this.listen();
    this.draw();
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    performance.mark("mpk-ready");
    document.documentElement.dataset.ready = "true";
  }

  async showDevice(device) {
    await Promise.all(this.panels.map((p) => p.load(Math.min(device, p.timeline.devices.length - 1))));
    const share = this.panels.length > 1 ? 0.34 : 0.6;
    for (const p of this.panels) p.fitRows(Math.max(this.panels.length > 1 ? 220 : 340, window.innerHeight * share));
    this.current = null;
    if (this.search) this.search.run();
  }

  // ---- time and pixels (CSS, from the left edge of a surface)
  x(ns, plot) {
    return LEFT + ((ns - this.view.begin) / (this.view.end - this.view.begin)) * plot;
  }

  time(x, plot) {
    return this.view.begin + ((x - LEFT) / plot) * (this.view.end - this.view.begin);
  }

  setView(begin, end) {
    const least = 50, length = Math.min(Math.max(end - begin, least), this.whole * 1.04);
    const margin = length >= this.whole ? (length - this.whole) / 2 : length * 0.1;
    const middle = (begin + end) / 2;
    const from = Math.min(Math.max(middle - length / 2, -margin), this.whole - length + margin);
    this.view = { begin: from, end: from + length };
    this.hideTip();
    this.draw();
  }

  zoom(factor, at = (this.view.begin + this.view.end) / 2) {
    if (factor > 1 && (this.view.end - this.view.begin) * factor >= this.whole) return this.setView(0, this.whole);
    this.setView(at - (at - this.view.begin) * factor, at + (this.view.end - at) * factor);
  }

  pan(share) {
    const by = share * (this.view.end - this.view.begin);
    this.setView(this.view.begin + by, this.view.end + by);
  }

  // ---- drawing
  draw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.paint();
    });
  }

  paint() {
    const shown = this.panels.filter((p) => p.bin());
    const most = niceAbove(shown.reduce((m, p) => p.rate.reduce((a, r) => Math.max(a, r), m), 0), [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]);
    for (const p of shown) p.paintChart(most);
    this.paintOverview();
    this.paintRuler();
  }

  paintOverview() {
    const s = this.overview;
    if (!s.fit()) return;
    const c = s.context, base = s.height - 4, high = s.height - 8;
    c.fillStyle = this.palette.track;
    c.fillRect(LEFT, base - high, s.plot, high);
    c.save();
    c.beginPath();
    c.rect(LEFT, 0, s.plot, s.height);
    c.clip();
    this.panels.forEach((p, i) => {
      const { utilisation } = p.described.overview, begin = p.shift, length = p.timeline.duration * p.tick;
      c.beginPath();
      utilisation.forEach((u, n) => {
        const x = LEFT + ((begin + (n / utilisation.length) * length) / this.whole) * s.plot;
        if (n === 0) c.moveTo(x, base);
        c.lineTo(x, base - u * high);
      });
      c.lineTo(LEFT + ((begin + length) / this.whole) * s.plot, base);
      c.fillStyle = c.strokeStyle = i === 0 ? this.palette.accent : this.palette.ink;
      c.globalAlpha = i === 0 ? 0.35 : 0.8;
      if (i === 0) c.fill();
      else c.stroke();
    });
    c.restore();
    const from = LEFT + Math.max(0, this.view.begin / this.whole) * s.plot, to = LEFT + Math.min(1, this.view.end / this.whole) * s.plot;
    c.fillStyle = this.palette.paper;
    c.globalAlpha = 0.72;
    c.fillRect(LEFT, base - high, from - LEFT, high);
    c.fillRect(to, base - high, LEFT + s.plot - to, high);
    c.globalAlpha = 1;
    c.strokeStyle = this.palette.ink;
    c.strokeRect(from + 0.5, base - high + 0.5, Math.max(to - from - 1, 2), high - 1);
    c.fillStyle = this.palette.muted;
    c.textAlign = "right";
    c.fillText("whole", LEFT - 8, s.height / 2);
    c.textAlign = "left";
    c.fillText(duration(this.whole, 1), s.width - RIGHT + 6, s.height / 2);
  }

  paintRuler() {
    const s = this.ruler;
    if (!s.fit()) return;
    const c = s.context, span = this.view.end - this.view.begin;
    const step = niceAbove((span / s.plot) * 90), unit = step >= 1e6 ? [1e6, "ms"] : step >= 1e3 || this.view.end >= 1e5 ? [1e3, "\u00b5s"] : [1, "ns"];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / unit[0]) - 1e-9));
    c.strokeStyle = this.palette.line;
    c.fillStyle = this.palette.muted;
    c.textAlign = "center";
    c.beginPath();
    for (let n = Math.ceil(this.view.begin / step); n * step <= this.view.end; ++n) {
      const x = this.x(n * step, s.plot);
      c.moveTo(Math.round(x) + 0.5, s.height - 6), c.lineTo(Math.round(x) + 0.5, s.height);
      if (x > LEFT + 20 && x < s.width - RIGHT - 20) c.fillText(((n * step) / unit[0]).toFixed(digits) + " " + unit[1], x, s.height - 15);
    }
    c.moveTo(LEFT, s.height - 0.5), c.lineTo(LEFT + s.plot, s.height - 0.5);
    c.stroke();
    if (this.range !== null) {
      const [a, b] = this.range.map((t) => this.x(t, s.plot));
      c.fillStyle = this.palette.accent;
      c.globalAlpha = 0.3;
      c.fillRect(Math.min(a, b), 0, Math.abs(b - a), s.height);
      c.globalAlpha = 1;
      c.fillStyle = this.palette.ink;
      c.fillText(duration(Math.abs(this.range[1] - this.range[0])), Math.min(Math.max((a + b) / 2, LEFT + 30), s.width - RIGHT - 30), 9);
    }
  }

  // ---- spans
  select(panel, span, draw = true) {
    if (this.current && this.current !== panel) this.current.selected = -1;
    this.current = span < 0 ? null : panel;
    panel.selected = span;
    if (span < 0) this.detail.textContent = "Point at a span, or click one to keep it. Press ? for the keys.";
    else {
      const [name, lines] = panel.describe(span), cause = panel.causeOf(span);
      this.detail.replaceChildren(element("b", {}, name), " \u00b7 " + lines.join(" \u00b7 "),
        cause < 0 ? "" : element("button", { type: "button", onclick: () => this.follow() }, "go there (C)"),
        this.comparable(panel, span) ? element("button", { type: "button", onclick: () => this.align() }, "align the other timeline (A)") : "");
      const track = panel.trackOf(span), top = track.worker * panel.rowHeight;
      if (top < panel.scroll || top + panel.rowHeight > panel.scroll + panel.height) panel.scrollTo(top - panel.height / 2);
    }
    if (draw) this.draw();
  }

  // From a wait to what it waited for.
  follow() {
    const panel = this.current, cause = panel ? panel.causeOf(panel.selected) : -1;
    if (cause < 0) return;
    this.select(panel, cause, false);
    this.reveal(panel, cause);
  }

  comparable(panel, span) {
    return this.panels.length === 2 && this.panels[0].graph === this.panels[1].graph && panel.data.task[span] !== NO_TASK;
  }

  // Moves the other timeline so that the chosen span's task begins at the same time in both.
  align() {
    const panel = this.current;
    if (!panel || !this.comparable(panel, panel.selected)) return;
    const task = panel.data.task[panel.selected], track = panel.workers[panel.graph.tasks.worker[task]]?.[CONSUMER];
    const step = panel.stepOf(panel.selected);
    for (let i = track?.first ?? 0; track && i < track.stop; ++i) {
      if (panel.data.task[i] !== task || panel.data.phase[i] !== RUN || panel.stepOf(i) !== step) continue;
      this.panels.find((p) => p !== panel).align(task, step, panel.ns(panel.data.begin[i]));
      return;
    }
  }

  reveal(panel, span) {
    const begin = panel.ns(panel.data.begin[span]), end = panel.ns(panel.data.end[span]);
    const width = this.view.end - this.view.begin;
    if (begin < this.view.begin || end > this.view.end) this.setView((begin + end) / 2 - width / 2, (begin + end) / 2 + width / 2);
    else this.draw();
  }

  zoomTo(panel, span) {
    const begin = panel.ns(panel.data.begin[span]), end = panel.ns(panel.data.end[span]), pad = Math.max((end - begin) * 0.6, 100);
    this.setView(begin - pad, end + pad);
  }

  // The span before or after the chosen one on its track, or at the same time on another row.
  neighbour(along, across) {
    const panel = this.current ?? this.panels[0], { data } = panel;
    if (panel.selected < 0) {
      const track = data.tracks.find((t) => t.worker * panel.rowHeight >= panel.scroll && t.role === CONSUMER);
      if (track) this.select(panel, Math.min(firstEndingAfter(data, track.first, track.stop, panel.ticks((this.view.begin + this.view.end) / 2)), track.stop - 1));
      return;
    }
    const track = panel.trackOf(panel.selected);
    let span = panel.selected + along;
    if (across !== 0) {
      const time = (data.begin[panel.selected] + data.end[panel.selected]) / 2;
      for (let w = track.worker + across; w >= 0 && w < panel.workers.length; w += across) {
        const other = panel.workers[w][track.role];
        if (other === null) continue;
        span = Math.min(firstEndingAfter(data, other.first, other.stop, time), other.stop - 1);
        break;
      }
    } else if (span < track.first || span >= track.stop) return;
    if (span === panel.selected) return;
    this.select(panel, span, false);
    this.reveal(panel, span);
  }

  // ---- input
  listen() {
    const on = (id, action) => document.getElementById(id).addEventListener("click", action);
    on("in", () => this.zoom(0.5));
    on("out", () => this.zoom(2));
    on("all", () => this.setView(0, this.whole));
    on("higher", () => this.growRows(1.4));
    on("lower", () => this.growRows(1 / 1.4));
    const devices = Math.max(...manifest.timelines.map((t) => t.devices.length)), choice = document.getElementById("device");
    for (let d = 0; d < devices; ++d) choice.append(element("option", { value: d }, d));
    document.getElementById("device-choice").hidden = devices < 2;
    choice.addEventListener("change", async () => {
      await this.showDevice(Number(choice.value));
      this.draw();
    });
    for (const panel of this.panels) {
      this.listenToRows(panel);
      panel.chart.addEventListener("wheel", (event) => this.onWheel(event, panel.chartSurface), { passive: false });
    }
    this.listenToRange(this.ruler, (x) => this.time(x, this.ruler.plot));
    this.listenToRange(this.overview, (x) => ((x - LEFT) / this.overview.plot) * this.whole);
    for (const s of [this.ruler, this.overview]) s.canvas.addEventListener("wheel", (event) => this.onWheel(event, s), { passive: false });
    document.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(document.getElementById("panels"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.palette.read();
      this.draw();
    });
  }

  growRows(factor) {
    for (const p of this.panels) p.setRowHeight(factor > 1 ? Math.max(p.rowHeight * factor, p.rowHeight + 1) : p.rowHeight * factor, p.height / 2);
    this.draw();
  }

  onWheel(event, surface, panel = null) {
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const x = event.clientX - surface.canvas.getBoundingClientRect().left;
    if (x < LEFT || x > surface.width - RIGHT) {
      if (!panel || panel.workers.length * panel.rowHeight <= panel.height + 1) return;  // the page scrolls
      panel.scrollTo(panel.scroll + event.deltaY * unit);
      this.draw();
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(((event.deltaX || event.deltaY) * unit) / surface.plot);
    else {
      const at = surface === this.overview ? ((x - LEFT) / surface.plot) * this.whole : this.time(x, surface.plot);
      this.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY * unit)) * 0.0028), at);
    }
    event.preventDefault();
    this.hideTip();
  }

  // Choosing a range by dragging; a click moves the view there.
  listenToRange(surface, time) {
    const { canvas } = surface;
    const at = (event) => time(Math.min(Math.max(event.clientX - canvas.getBoundingClientRect().left, LEFT), LEFT + surface.plot));
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      from = at(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (from === null) return;
      this.range = [from, at(event)];
      this.draw();
    });
    const end = (event) => {
      if (from === null) return;
      const to = at(event), moved = this.range !== null && Math.abs(to - from) > (this.view.end - this.view.begin) * 0.004;
      if (event.type === "pointerup") {
        const half = (this.view.end - this.view.begin) / 2;
        if (moved) this.setView(Math.min(from, to), Math.max(from, to));
        else if (surface === this.overview) this.setView(to - half, to + half);
      }
      from = this.range = null;
      this.draw();
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
  }

  listenToRows(panel) {
    const { rows, rowSurface: s } = panel;
    let drag = null;
    const point = (event) => {
      const box = rows.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    rows.addEventListener("wheel", (event) => this.onWheel(event, s, panel), { passive: false });
    rows.addEventListener("pointerdown", (event) => {
      const [x, y] = point(event);
      rows.setPointerCapture(event.pointerId);
      drag = { x, y, view: this.view, scroll: panel.scroll, from: this.time(x, s.plot), range: event.shiftKey, moved: false };
      this.hideTip();
    });
    rows.addEventListener("pointermove", (event) => {
      const [x, y] = point(event);
      if (drag === null) return this.showTip(panel, x, y, event);
      drag.moved ||= Math.hypot(x - drag.x, y - drag.y) > 3;
      if (!drag.moved) return;
      if (drag.range) {
        this.range = [drag.from, this.time(Math.min(Math.max(x, LEFT), LEFT + s.plot), s.plot)];
        this.draw();
      } else {
        const by = ((drag.x - x) / s.plot) * (drag.view.end - drag.view.begin);
        panel.scrollTo(drag.scroll + drag.y - y);
        this.setView(drag.view.begin + by, drag.view.end + by);
      }
    });
    rows.addEventListener("pointerup", (event) => {
      const [x, y] = point(event);
      if (drag && !drag.moved) this.select(panel, panel.at(x, y));
      else if (drag && this.range !== null) this.setView(Math.min(...this.range), Math.max(...this.range));
      drag = this.range = null;
      this.draw();
    });
    rows.addEventListener("pointercancel", () => { drag = this.range = null; });
    rows.addEventListener("pointerleave", () => this.hideTip());
    rows.addEventListener("dblclick", (event) => {
      const span = panel.at(...point(event));
      if (span >= 0) this.zoomTo(panel, span);
    });
  }

  showTip(panel, x, y, event) {
    const span = panel.at(x, y);
    if (span < 0) return this.hideTip();
    const [name, lines] = panel.describe(span);
    this.tip.replaceChildren(element("b", {}, name), ...lines.map((line, i) => element("div", { class: i === 0 ? "where" : "" }, line)));
    this.tip.hidden = false;
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - width - 8)) + "px";
    this.tip.style.top = (event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 10 : event.clientY + 18) + "px";
  }

  hideTip() {
    this.tip.hidden = true;
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    if (target.matches?.("input, select") || ((event.key === "Enter" || event.key === " ") && target.matches?.("button"))) return;
    const rows = !target.matches?.(".scroll");  // the table scrolls by its own arrows
    const actions = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.setView(0, this.whole), "Home": () => this.setView(0, this.whole),
      "ArrowLeft": () => rows && this.pan(-0.2), "ArrowRight": () => rows && this.pan(0.2),
      "ArrowUp": () => (event.shiftKey ? this.growRows(1.4) : target.matches?.(".rows") && this.neighbour(0, -1)),
      "ArrowDown": () => (event.shiftKey ? this.growRows(1 / 1.4) : target.matches?.(".rows") && this.neighbour(0, 1)),
      "[": () => this.neighbour(-1, 0), "]": () => this.neighbour(1, 0), "c": () => this.follow(), "a": () => this.align(),
      "Enter": () => this.current && this.zoomTo(this.current, this.current.selected),
      "/": () => { this.search.input.focus(); this.search.input.select(); },
      "n": () => this.search.step(1), "N": () => this.search.step(-1), "?": () => document.getElementById("help").scrollIntoView(),
      "Escape": () => (this.current ? this.select(this.current, -1) : this.search.set("")),
    };
    const action = actions[event.key];
    if (action === undefined || action() === false) return;
    event.preventDefault();
  }
}

// A round number not below `value`: one of `steps` times a power of ten.
function niceAbove(value, steps = [1, 2, 5, 10]) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return steps.map((m) => m * power).find((v) => v >= value * 0.999999);
}

const app = new App();
app.start().catch((error) => {
  document.getElementById("detail").textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
window.mpkPage = app;  // for tests and the console
